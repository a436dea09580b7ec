"""Public functions: what is computed, which arguments are taken, which path serves a call."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import layouts, ops, reference
from ._shared.checks import check_finite, check_float_tensor, describe
from ._shared.dispatch import needs_operator

SCORINGS = ("softmax", "topk_softmax", "sigmoid")
ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")
#: The most experts, and the most choices of a token.
MOST_EXPERTS = 1024
MOST_CHOICES = 32


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and their weights, in float32.

    - "softmax": the weights are the chosen part of the softmax over all experts (Qwen3-MoE; with
      `renormalize`, Mixtral).
    - "topk_softmax": the softmax of the chosen logits (gpt-oss). `renormalize` changes nothing.
    - "sigmoid": the sigmoid of each chosen logit (DeepSeek-V3, with `bias` and groups).

    A `bias` is added to the scores (for "topk_softmax", the logits) for the choice and is no part
    of the weights. With groups, only experts of the `top_groups` best groups can be chosen; a group
    is as good as its best expert (DeepSeek-V2) or, with a bias, as the sum of its best two
    (DeepSeek-V3, "noaux_tc").

    Without a bias the choice is by logits, which tells apart what rounds to the same score. Of
    equal ones the lowest index is chosen. NaN counts as less than any number, with a weight of
    that of -inf; ids are always valid and differ from each other.

    Args:
        logits: `[..., experts]`, float16, bfloat16 or float32, of any strides; 1 to 1024 experts.
        top_k: Choices of a token, 1 to 32.
        scoring: "softmax", "topk_softmax" or "sigmoid".
        renormalize: Whether weights are divided by their sum (plus 1e-20).
        bias: `[experts]`, a float tensor; has no gradient.
        num_groups: Groups of consecutive experts, as many in each.
        top_groups: Groups that a token may choose from.
        scale: What the weights are multiplied by at the end.

    Returns:
        Indices, int64, and weights, float32, both `[..., top_k]`, best first. The weights are
        differentiable in the logits.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number, shape or device does not fit.
        NotImplementedError: An argument carries a forward-mode tangent.

    Example:
        >>> ids, weights = route(torch.randn(16, 128), 8)
    """
    check_float_tensor("route", "logits", logits)
    if not logits.dim() or not 1 <= logits.shape[-1] <= MOST_EXPERTS:
        raise ValueError(
            f"route: logits must be [..., experts] with 1 to {MOST_EXPERTS} experts, "
            f"got {describe(logits)}"
        )
    experts = logits.shape[-1]
    check_choices("route", top_k, experts)
    _check_one_of("route", "scoring", scoring, SCORINGS)
    _check_flag("route", "renormalize", renormalize)
    if bias is not None:
        check_beside("route", "bias", bias, (experts,), "logits", logits)
    check_count("route", "num_groups", num_groups, experts)
    if experts % num_groups:
        raise ValueError(f"route: num_groups must divide {experts} experts, got {num_groups}")
    check_count("route", "top_groups", top_groups, num_groups)
    if top_k > top_groups * (experts // num_groups):
        raise ValueError(
            f"route: top_k must be at most {top_groups * (experts // num_groups)}, the experts of "
            f"top_groups={top_groups} groups, got {top_k}"
        )
    check_finite("route", "scale", scale, minimum=-math.inf)
    lines = logits.reshape(-1, experts)
    routing = ops.Routing(top_k, scoring, renormalize, num_groups, top_groups, float(scale))
    if needs_operator("route", logits, bias):
        ids, weights = ops.route(
            lines, bias, top_k, scoring, renormalize, num_groups, top_groups, float(scale)
        )
    else:
        ids, weights = ops.choose(lines, bias, routing)
    shape = (*logits.shape[:-1], top_k)
    return ids.view(shape), weights.view(shape)


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Run every token through its experts and sum their outputs by weight.

    For each choice: `down(act(gate(x), up(x)))`, sums in float32, rounded to the dtype of x after
    the activation and after down; then the weighted sum in float32, in the order of the choices.
    "silu" is silu(gate) * up, "gelu_tanh" is gelu(gate) * up with the tanh approximation,
    "swiglu_oai" is that of gpt-oss: g = min(gate, limit), u = clamp(up, -limit, limit),
    g * sigmoid(alpha * g) * (u + 1).

    Weights are read where they lie: dense along the last dimension or along the one before (a
    transposed weight, as gpt-oss stores it). Any other layout is copied at each call.

    Args:
        hidden_states: `[..., hidden]`, float16, bfloat16 or float32. Never changed.
        gate_up_proj: `[experts, 2 * inner, hidden]` of the same dtype: gates, then ups.
        down_proj: `[experts, hidden, inner]` of the same dtype.
        top_k_index: `[..., top_k]`, int32 or int64. An id below 0 or not below the number of
            experts (with a map: of its entries) is skipped.
        top_k_weights: `[..., top_k]`, a float tensor.
        activation: "silu", "gelu_tanh" or "swiglu_oai".
        gate_up_bias: `[experts, 2 * inner]`, a float tensor, or None; laid out as the weight.
        down_bias: `[experts, hidden]`, a float tensor, or None.
        alpha: Of "swiglu_oai".
        limit: Of "swiglu_oai", at least 0; inf for none.
        interleaved: Whether gates and ups take turns: gate 0, up 0, gate 1, ...
        expert_map: `[all experts]`, int32 or int64: for each id the expert here, or -1 for one
            that is elsewhere (expert parallelism). None if ids are those of the experts here.

    Returns:
        `[..., hidden]`, contiguous, of the dtype of hidden_states. Differentiable once in
        hidden_states, the weights, the biases and top_k_weights; the backward pass is plain
        PyTorch and waits for the device. The same bits for the same call every time.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number, shape or device does not fit.
        NotImplementedError: An argument carries a forward-mode tangent.

    Example:
        >>> x, gate_up, down = torch.randn(4, 64), torch.randn(8, 64, 64), torch.randn(8, 64, 32)
        >>> out = fused_experts(x, gate_up, down, *route(torch.randn(4, 8), 2))
    """
    function = "fused_experts"
    check_float_tensor(function, "hidden_states", hidden_states)
    if not hidden_states.dim() or not hidden_states.shape[-1]:
        raise ValueError(
            f"{function}: hidden_states must be [..., hidden] with hidden of 1 at least, "
            f"got {describe(hidden_states)}"
        )
    weights = layouts.Weights(gate_up_proj, None, down_proj, gate_up_bias, down_bias)
    check_weights(function, hidden_states, weights, ("gate_up_proj", "", "down_proj"))
    if not isinstance(top_k_index, Tensor) or top_k_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{function}: top_k_index must be a tensor of int32 or int64, got "
            f"{describe(top_k_index)}"
        )
    leading = hidden_states.shape[:-1]
    if (
        not top_k_index.dim()
        or top_k_index.shape[:-1] != leading
        or not 1 <= top_k_index.shape[-1] <= MOST_CHOICES
    ):
        raise ValueError(
            f"{function}: top_k_index must have shape {(*leading, 'top_k')} with 1 to "
            f"{MOST_CHOICES} choices, got {describe(top_k_index)}"
        )
    _check_device(function, "top_k_index", top_k_index, "hidden_states", hidden_states)
    check_beside(
        function, "top_k_weights", top_k_weights, top_k_index.shape, "hidden_states", hidden_states
    )
    _check_one_of(function, "activation", activation, ACTIVATIONS)
    check_finite(function, "alpha", alpha, minimum=-math.inf)
    if type(limit) is not float or limit != math.inf:
        check_finite(function, "limit", limit, minimum=0.0)
    _check_flag(function, "interleaved", interleaved)
    if expert_map is not None:
        _check_map(function, expert_map, hidden_states)
        expert_map = expert_map.contiguous()
    top_k = top_k_index.shape[-1]
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    ids, router = top_k_index.reshape(-1, top_k), top_k_weights.reshape(-1, top_k)
    gating = ops.Gating(activation, float(alpha), float(limit), interleaved)
    if needs_operator(function, hidden_states, *weights, top_k_weights):
        out: Tensor = ops.experts(x, *weights, ids, router, expert_map, *gating)
    else:
        out = ops.run(x, weights, ids, router, expert_map, gating)
    return out.view(*leading, down_proj.shape[1])


def fused_moe_forward(
    hidden_states: Tensor,
    router_weight: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    num_experts: int,
    top_k: int,
    gating: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a whole layer: router, choice, experts with SiLU, weighted sum.

    On a GPU that is five launches for up to 32768 tokens, three for one token. The host does
    not wait, but at the first call on a device. Logits are float32.

    Args:
        hidden_states: `[tokens, hidden]`, float16, bfloat16 or float32. Never changed.
        router_weight: `[experts, hidden]`, a float tensor.
        w_gate: `[experts, inner, hidden]` of the dtype of hidden_states. Halves of a fused weight
            are read where they lie.
        w_up: `[experts, inner, hidden]` of the same dtype.
        w_down: `[experts, hidden, inner]` of the same dtype.
        num_experts: Experts, 1 to 1024.
        top_k: Choices of a token, 1 to 32.
        gating: "softmax" (the chosen part of the softmax, not renormalised) or "sigmoid"
            (renormalised). See `route` with `fused_experts` for others.

    Returns:
        The output `[tokens, hidden]`, the chosen experts `[tokens, top_k]` int64, and their
        weights `[tokens, top_k]` in the dtype of hidden_states. Output and weights are
        differentiable, by the operators of `route` and `fused_experts`.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number, shape or device does not fit.
        NotImplementedError: An argument carries a forward-mode tangent.

    Example:
        >>> x, w = torch.randn(4, 64), torch.randn(8, 32, 64)
        >>> out, ids, weights = fused_moe_forward(x, torch.randn(8, 64), w, w, w.mT, 8, 2)
    """
    function = "fused_moe_forward"
    check_router(function, hidden_states, router_weight, num_experts, top_k, gating)
    weights = layouts.Weights(w_gate, w_up, w_down)
    check_weights(function, hidden_states, weights, ("w_gate", "w_up", "w_down"))
    if w_down.shape[0] != num_experts:
        raise ValueError(
            f"{function}: w_down must hold num_experts={num_experts} experts, got "
            f"{describe(w_down)}"
        )
    return moe(
        function, hidden_states, router_weight, None, weights,
        ops.Routing(top_k, gating, gating == "sigmoid", 1, 1, 1.0),
        ops.Gating("silu", 1.702, 7.0, False),
    )  # fmt: skip


def moe(
    function: str, x: Tensor, router: Tensor, router_bias: Tensor | None, weights: layouts.Weights,
    routing: ops.Routing, gating: ops.Gating,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a whole layer on x [tokens, hidden], by the path that serves the call."""
    tensors = (x, router, router_bias, *weights)
    if not needs_operator(function, *tensors):
        return ops.moe(x, router, router_bias, weights, routing, gating)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        logits = reference.linear(x, router, router_bias)
        ids, mix = ops.route(logits, None, *routing)
        return ops.experts(x, *weights, ids, mix, None, *gating), ids, mix.to(x.dtype)
    out: tuple[Tensor, Tensor, Tensor] = ops.moe_operator(
        x, router, router_bias, *weights, *routing[:3], *gating
    )
    return out


# ------------------------------------------------------------------------------------------ checks
def check_router(
    function: str, x: object, router: object, num_experts: object, top_k: object, gating: object
) -> None:
    """Raise unless x [tokens, hidden] and a router [experts, hidden] go together."""
    check_float_tensor(function, "hidden_states", x)
    assert isinstance(x, Tensor)
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"{function}: hidden_states must be [tokens, hidden], got {describe(x)}")
    check_count(function, "num_experts", num_experts, MOST_EXPERTS)
    assert isinstance(num_experts, int)
    check_beside(function, "router_weight", router, (num_experts, x.shape[1]), "hidden_states", x)
    check_choices(function, top_k, num_experts)
    _check_one_of(function, "gating", gating, ("softmax", "sigmoid"))


def check_weights(
    function: str, x: Tensor, weights: layouts.Weights, names: tuple[str, str, str]
) -> None:
    """Raise unless the weights go with x [..., hidden]; `names` are those of the arguments."""
    hidden = x.shape[-1]
    for name, weight in zip(names, weights[:3], strict=True):
        if not name:
            continue
        check_float_tensor(function, name, weight)
        assert weight is not None
        if weight.dtype != x.dtype:
            raise TypeError(
                f"{function}: {name} must have the dtype of hidden_states, {x.dtype}, "
                f"got {describe(weight)}"
            )
        _check_device(function, name, weight, "hidden_states", x)
        if weight.dim() != 3:
            raise ValueError(f"{function}: {name} must have 3 dimensions, got {describe(weight)}")
    experts, outputs, inner = weights.down.shape
    if not 1 <= experts <= MOST_EXPERTS or outputs != hidden or not inner:
        raise ValueError(
            f"{function}: {names[2]} must be [experts, {hidden}, inner] with 1 to {MOST_EXPERTS} "
            f"experts, got {describe(weights.down)}"
        )
    wide = inner * 2 if weights.up is None else inner
    for name, weight in zip(names[:2], weights[:2], strict=True):
        if weight is not None and weight.shape != (experts, wide, hidden):
            raise ValueError(
                f"{function}: {name} must have shape {(experts, wide, hidden)} to go with "
                f"{names[2]} of shape {tuple(weights.down.shape)}, got {describe(weight)}"
            )
    for name, bias, shape in (
        ("gate_up_bias", weights.gate_up_bias, (experts, wide)),
        ("down_bias", weights.down_bias, (experts, hidden)),
    ):
        if bias is not None:
            check_beside(function, name, bias, shape, "hidden_states", x)


def check_beside(
    function: str, name: str, value: object, shape: Sequence[int], other: str, like: Tensor
) -> None:
    """Raise unless `value` is a float tensor of a shape, on the device of another argument."""
    check_float_tensor(function, name, value)
    assert isinstance(value, Tensor)
    if value.shape != tuple(shape):
        raise ValueError(
            f"{function}: {name} must have shape {tuple(shape)} to go with {other} of shape "
            f"{tuple(like.shape)}, got {describe(value)}"
        )
    _check_device(function, name, value, other, like)


def check_count(function: str, name: str, value: object, most: int) -> None:
    """Raise unless `value` is an integer from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{function}: {name} must be an integer, got {describe(value)}")
    if not 1 <= value <= most:
        raise ValueError(f"{function}: {name} must be from 1 to {most}, got {value}")


def check_choices(function: str, top_k: object, experts: int) -> None:
    """Raise unless `top_k` is a number of choices among so many experts."""
    check_count(function, "top_k", top_k, min(MOST_CHOICES, experts))


def _check_device(function: str, name: str, value: Tensor, other: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(
            f"{function}: {name} must be on {like.device} with {other}, got {describe(value)}"
        )


def _check_map(function: str, value: object, like: Tensor) -> None:
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{function}: expert_map must be a tensor of int32 or int64, got {describe(value)}"
        )
    if value.dim() != 1 or not value.numel():
        raise ValueError(f"{function}: expert_map must be [all experts], got {describe(value)}")
    _check_device(function, "expert_map", value, "hidden_states", like)


def _check_one_of(function: str, name: str, value: object, wanted: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{function}: {name} must be a string, got {describe(value)}")
    if value not in wanted:
        choices = " or ".join(map(repr, wanted))
        raise ValueError(f"{function}: {name} must be {choices}, got {value!r}")


def _check_flag(function: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be True or False, got {describe(value)}")
