"""The stages of a layer one by one, with the arguments and results of the public predecessor."""

import torch
from torch import Tensor

from . import layouts, ops, reference, stage_ops
from ._shared.checks import check_float_tensor, describe
from ._shared.dispatch import needs_operator
from .api import (
    check_beside,
    check_count,
    check_router,
    check_weights,
)


def moe_router(
    hidden_states: Tensor,
    router_weight: Tensor,
    top_k: int,
    gating: str = "softmax",
    router_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the router's logits in float32 and choose experts by them.

    Args:
        hidden_states: `[tokens, hidden]`, float16, bfloat16 or float32.
        router_weight: `[experts, hidden]`, a float tensor.
        top_k: Choices of a token, 1 to 32.
        gating: "softmax" (not renormalised) or "sigmoid" (renormalised).
        router_bias: `[experts]`, a float tensor that is added to the logits, or None.

    Returns:
        Indices `[tokens, top_k]` int64, and weights `[tokens, top_k]` and logits
        `[tokens, experts]` in the dtype of hidden_states, both differentiable.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number, shape or device does not fit.
        NotImplementedError: An argument carries a forward-mode tangent.

    Example:
        >>> ids, weights, logits = moe_router(torch.randn(4, 64), torch.randn(8, 64), 2)
    """
    function = "moe_router"
    check_float_tensor(function, "router_weight", router_weight)
    experts = router_weight.shape[0] if router_weight.dim() else 0
    check_router(function, hidden_states, router_weight, experts, top_k, gating)
    if router_bias is not None:
        check_beside(
            function, "router_bias", router_bias, (experts,), "hidden_states", hidden_states
        )
    routing = ops.Routing(top_k, gating, gating == "sigmoid", 1, 1, 1.0)
    if needs_operator(function, hidden_states, router_weight, router_bias):
        logits = reference.linear(hidden_states, router_weight, router_bias)
        ids, weights = ops.route(logits, None, *routing)
    else:
        ids, weights, logits = stage_ops.router(hidden_states, router_weight, router_bias, routing)
    return ids, weights.to(hidden_states.dtype), logits.to(hidden_states.dtype)


def compute_permutation_indices(
    top_k_indices: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Order the slots `token * top_k + choice` by expert, each expert's by number.

    Args:
        top_k_indices: `[tokens, top_k]`, int32 or int64, from 0 to num_experts - 1.
        num_experts: Experts, 1 to 1024.

    Returns:
        The slot of each row `[slots]`, the first row of each expert and the number of rows
        `[num_experts + 1]`, and the row of each slot `[slots]`, all int64.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number or shape does not fit.

    Example:
        >>> rows, offsets, restore = compute_permutation_indices(torch.tensor([[1, 0]]), 2)
    """
    _check_ids("compute_permutation_indices", top_k_indices, num_experts)
    ordered, rows = top_k_indices.reshape(-1).sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=rows.device, dtype=ordered.dtype)
    offsets = torch.searchsorted(ordered, bounds)
    restore = torch.empty_like(rows)
    restore[rows] = torch.arange(rows.numel(), device=rows.device)
    return rows, offsets, restore


def permute_tokens(
    hidden_states: Tensor, top_k_indices: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copy tokens into rows ordered by expert; `fused_experts` reads them where they are instead.

    Args:
        hidden_states: `[tokens, hidden]`, float16, bfloat16 or float32.
        top_k_indices: `[tokens, top_k]`, int32 or int64, from 0 to num_experts - 1.
        num_experts: Experts, 1 to 1024.

    Returns:
        The rows `[tokens * top_k, hidden]`, differentiable, then as int64 the first row of each
        expert and the number of rows, the slot of each row, and the row of each slot.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number, shape or device does not fit.

    Example:
        >>> rows, offsets, order, restore = permute_tokens(x, ids, 8)
    """
    function = "permute_tokens"
    check_float_tensor(function, "hidden_states", hidden_states)
    _check_ids(function, top_k_indices, num_experts)
    if hidden_states.dim() != 2 or hidden_states.shape[0] != top_k_indices.shape[0]:
        raise ValueError(
            f"{function}: hidden_states must be [{top_k_indices.shape[0]}, hidden] to go with "
            f"top_k_indices, got {describe(hidden_states)}"
        )
    if hidden_states.device != top_k_indices.device:
        raise ValueError(
            f"{function}: top_k_indices must be on {hidden_states.device} with hidden_states, "
            f"got {describe(top_k_indices)}"
        )
    order, offsets, restore = compute_permutation_indices(top_k_indices, num_experts)
    return hidden_states[order // top_k_indices.shape[1]], offsets, order, restore


def unpermute_tokens(
    expert_outputs: Tensor,
    top_k_weights: Tensor,
    restore_idx: Tensor,
    num_tokens: int,
    top_k: int,
) -> Tensor:
    """Sum each token's rows by weight, in float32 and in the order of its choices.

    Args:
        expert_outputs: `[num_tokens * top_k, hidden]`, rows ordered by expert.
        top_k_weights: `[num_tokens, top_k]`, a float tensor.
        restore_idx: `[num_tokens * top_k]` int64, the row of each slot.
        num_tokens: Tokens.
        top_k: Choices of a token, 1 to 32.

    Returns:
        `[num_tokens, hidden]` of the dtype of expert_outputs, differentiable.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number, shape or device does not fit.
        NotImplementedError: An argument carries a forward-mode tangent.

    Example:
        >>> out = unpermute_tokens(rows, weights, restore, 4, 2)
    """
    function = "unpermute_tokens"
    check_float_tensor(function, "expert_outputs", expert_outputs)
    check_count(function, "top_k", top_k, 32)
    _check_tokens(function, num_tokens)
    slots = num_tokens * top_k
    if expert_outputs.dim() != 2 or expert_outputs.shape[0] != slots:
        raise ValueError(
            f"{function}: expert_outputs must be [{slots}, hidden] for num_tokens={num_tokens} and "
            f"top_k={top_k}, got {describe(expert_outputs)}"
        )
    check_beside(
        function, "top_k_weights", top_k_weights, (num_tokens, top_k), "expert_outputs",
        expert_outputs,
    )  # fmt: skip
    _check_places(function, "restore_idx", restore_idx, slots, expert_outputs)
    if needs_operator(function, expert_outputs, top_k_weights):
        y = expert_outputs[restore_idx].view(num_tokens, top_k, expert_outputs.shape[1])
        total = (y.float() * top_k_weights.float().unsqueeze(-1)).sum(1)
        return total.to(expert_outputs.dtype)
    return stage_ops.unpermute(expert_outputs, top_k_weights, restore_idx)


def grouped_gemm(
    tokens: Tensor, weights: Tensor, expert_offsets: Tensor, num_experts: int
) -> Tensor:
    """Multiply rows that are ordered by expert by their expert's weight.

    Args:
        tokens: `[rows, k]`, float16, bfloat16 or float32.
        weights: `[num_experts, n, k]` of the same dtype.
        expert_offsets: `[num_experts + 1]` int64 on the same device: the first row of each expert,
            then the number of rows that have one. Rows after that give zeros; what lies outside
            of the rows or goes back is cut off.
        num_experts: Experts, 1 to 1024.

    Returns:
        `[rows, n]` of the dtype of tokens.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number, shape or device does not fit.
        RuntimeError: An argument wants a gradient: `fused_experts` has one.

    Example:
        >>> y = grouped_gemm(rows, torch.randn(8, 32, 64), offsets, 8)
    """
    function = "grouped_gemm"
    check_float_tensor(function, "tokens", tokens)
    check_float_tensor(function, "weights", weights)
    check_count(function, "num_experts", num_experts, 1024)
    if tokens.dim() != 2 or not tokens.shape[1]:
        raise ValueError(f"{function}: tokens must be [rows, k], got {describe(tokens)}")
    if weights.dtype != tokens.dtype:
        raise TypeError(
            f"{function}: weights must have the dtype of tokens, {tokens.dtype}, "
            f"got {describe(weights)}"
        )
    wanted = weights.dim() == 3 and weights.shape[1] > 0
    if not wanted or (weights.shape[0], weights.shape[2]) != (num_experts, tokens.shape[1]):
        raise ValueError(
            f"{function}: weights must be [{num_experts}, n, {tokens.shape[1]}] to go with tokens, "
            f"got {describe(weights)}"
        )
    check_beside(function, "weights", weights, weights.shape, "tokens", tokens)
    _check_places(function, "expert_offsets", expert_offsets, num_experts + 1, tokens)
    _refuse_gradients(function, tokens, weights)
    if needs_operator(function, tokens, weights):
        out: Tensor = stage_ops.grouped_gemm_operator(tokens, weights, expert_offsets)
        return out
    return stage_ops.grouped_gemm(tokens, weights, expert_offsets)


def fused_expert_ffn(
    permuted_tokens: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    expert_offsets: Tensor,
    num_experts: int,
    top_k_weights: Tensor,
    sorted_idx: Tensor,
    num_tokens: int,
    top_k: int,
) -> Tensor:
    """Run rows that are ordered by expert through their experts, and sum them by token.

    Args:
        permuted_tokens: `[num_tokens * top_k, hidden]`, float16, bfloat16 or float32.
        w_gate: `[num_experts, inner, hidden]` of the same dtype.
        w_up: `[num_experts, inner, hidden]` of the same dtype.
        w_down: `[num_experts, hidden, inner]` of the same dtype.
        expert_offsets: `[num_experts + 1]` int64: the first row of each expert, and the number.
        num_experts: Experts, 1 to 1024.
        top_k_weights: `[num_tokens, top_k]`, a float tensor.
        sorted_idx: `[num_tokens * top_k]` int64, the slot of each row.
        num_tokens: Tokens.
        top_k: Choices of a token, 1 to 32.

    Returns:
        `[num_tokens, hidden]` of the dtype of permuted_tokens.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A number, shape or device does not fit.
        RuntimeError: An argument wants a gradient: `fused_experts` has one.

    Example:
        >>> out = fused_expert_ffn(rows, gate, up, down, offsets, 8, weights, order, 4, 2)
    """
    function = "fused_expert_ffn"
    check_float_tensor(function, "permuted_tokens", permuted_tokens)
    check_count(function, "num_experts", num_experts, 1024)
    check_count(function, "top_k", top_k, 32)
    _check_tokens(function, num_tokens)
    slots = num_tokens * top_k
    shape = permuted_tokens.shape
    if permuted_tokens.dim() != 2 or shape[0] != slots or not shape[1]:
        raise ValueError(
            f"{function}: permuted_tokens must be [{slots}, hidden] for num_tokens={num_tokens} "
            f"and top_k={top_k}, got {describe(permuted_tokens)}"
        )
    weights = layouts.Weights(w_gate, w_up, w_down)
    check_weights(function, permuted_tokens, weights, ("w_gate", "w_up", "w_down"))
    if w_down.shape[0] != num_experts:
        raise ValueError(
            f"{function}: w_down must hold num_experts={num_experts} experts, got "
            f"{describe(w_down)}"
        )
    check_beside(
        function, "top_k_weights", top_k_weights, (num_tokens, top_k), "permuted_tokens",
        permuted_tokens,
    )  # fmt: skip
    _check_places(function, "expert_offsets", expert_offsets, num_experts + 1, permuted_tokens)
    _check_places(function, "sorted_idx", sorted_idx, slots, permuted_tokens)
    _refuse_gradients(function, permuted_tokens, w_gate, w_up, w_down, top_k_weights)
    arguments = permuted_tokens, w_gate, w_up, w_down, expert_offsets, top_k_weights, sorted_idx
    if needs_operator(function, *arguments):
        out: Tensor = stage_ops.expert_ffn_operator(*arguments)
        return out
    return stage_ops.expert_ffn(*arguments)


# ------------------------------------------------------------------------------------------ checks
def _check_ids(function: str, ids: object, num_experts: object) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{function}: top_k_indices must be a tensor of int32 or int64, got {describe(ids)}"
        )
    if ids.dim() != 2 or not 1 <= ids.shape[1] <= 32:
        raise ValueError(
            f"{function}: top_k_indices must be [tokens, top_k] with 1 to 32 choices, "
            f"got {describe(ids)}"
        )
    check_count(function, "num_experts", num_experts, 1024)


def _check_tokens(function: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{function}: num_tokens must be an integer, got {describe(value)}")
    if value < 0:
        raise ValueError(f"{function}: num_tokens must be from 0, got {value}")


def _check_places(function: str, name: str, value: object, count: int, like: Tensor) -> None:
    if not isinstance(value, Tensor) or value.dtype is not torch.int64:
        raise TypeError(f"{function}: {name} must be a tensor of int64, got {describe(value)}")
    if value.shape != (count,):
        raise ValueError(f"{function}: {name} must have shape ({count},), got {describe(value)}")
    if value.device != like.device:
        raise ValueError(f"{function}: {name} must be on {like.device}, got {describe(value)}")


def _refuse_gradients(function: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"{function}: there is no gradient; use fused_experts, or torch.no_grad()"
        )
