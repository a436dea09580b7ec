"""The same computation in PyTorch, with the same rounding: oracle of the tests, path of CPUs."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

#: What `route` adds to a sum that it divides by.
EPSILON = 1e-20


# ---------------------------------------------------------------------------------------- routing
def _order(value: Tensor) -> Tensor:
    """Map float32 to integers in the same order: NaN is the least, the two zeros are one."""
    bits = torch.where(value == 0, torch.zeros_like(value), value).view(torch.int32).long()
    key = torch.where(bits < 0, -(2**31) - 1 - bits, bits)
    return torch.where(value.isnan(), torch.full_like(key, -(2**31)), key)


def _below(value: Tensor, most: Tensor) -> Tensor:
    """Return value - most, where infinities that are the most count as 0."""
    return torch.where(value == most, torch.zeros_like(value), value - most)


def _first(key: Tensor, count: int) -> Tensor:
    """Return the places of the greatest keys of each row, the lowest first of those equal."""
    return key.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _scores(logits: Tensor, scoring: str) -> Tensor:
    """Return the scores of all experts; NaN counts as -inf."""
    finite = torch.where(logits.isnan(), torch.full_like(logits, -torch.inf), logits)
    if scoring == "sigmoid":
        return finite.sigmoid()
    if scoring == "softmax":
        powers = _below(finite, finite.amax(-1, keepdim=True)).exp()
        return powers / powers.sum(-1, keepdim=True)
    return finite


def weigh(logits: Tensor, ids: Tensor, scoring: str, renormalize: bool, scale: float) -> Tensor:
    """Return the weights [tokens, top_k] of chosen experts, in the dtype of the logits."""
    if scoring == "topk_softmax":
        weights = _scores(logits.gather(-1, ids), "softmax")
    else:
        weights = _scores(logits, scoring).gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    return weights * scale


def weigh_backward(
    dweights: Tensor, logits: Tensor, ids: Tensor, scoring: str, renormalize: bool, scale: float
) -> Tensor:
    """Return the gradient of the logits [tokens, experts] of `weigh`."""
    if scoring == "topk_softmax":
        scores = mine = _scores(logits.gather(-1, ids), "softmax")
    else:
        scores = _scores(logits, scoring)
        mine = scores.gather(-1, ids)
    grad = dweights * scale
    if renormalize:
        total = mine.sum(-1, keepdim=True) + EPSILON
        grad = (grad - (grad * mine).sum(-1, keepdim=True) / total) / total
    if scoring == "topk_softmax":
        grad = mine * (grad - (grad * mine).sum(-1, keepdim=True))
        return torch.zeros_like(logits).scatter(-1, ids, grad)
    grad = torch.zeros_like(logits).scatter(-1, ids, grad)
    if scoring == "sigmoid":
        return grad * scores * (1 - scores)
    return scores * (grad - (grad * scores).sum(-1, keepdim=True))


def route(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the chosen experts (int64) and their weights (float32), both [tokens, top_k]."""
    logits = logits.float()
    value = logits
    if bias is not None:
        value = _scores(logits, scoring) + bias.float()
        value = torch.where(logits.isnan(), logits, value)
    key = _order(value)
    if num_groups > 1:
        groups = torch.where(value.isnan(), torch.full_like(value, -torch.inf), value)
        groups = groups.unflatten(-1, (num_groups, -1))
        # The rules of DeepSeek-V3 and of DeepSeek-V2.
        best = groups.sort(dim=-1, descending=True).values[..., : 1 if bias is None else 2]
        kept = _first(_order(best.sum(-1)), top_groups)
        allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, True)
        allowed = allowed.repeat_interleave(groups.shape[-1], -1)
        key = torch.where(allowed, key, torch.full_like(key, -(2**32)))
    ids = _first(key, top_k).contiguous()
    return ids, weigh(logits, ids, scoring, renormalize, scale)


# ---------------------------------------------------------------------------------------- experts
def local_ids(ids: Tensor, expert_map: Tensor | None, experts: int) -> Tensor:
    """Return each slot's expert here, or -1 for one to skip."""
    given = experts if expert_map is None else expert_map.numel()
    known = (ids >= 0) & (ids < given)
    ids = torch.where(known, ids, 0).long()
    if expert_map is not None:
        ids = expert_map.long()[ids]
        known = known & (ids >= 0) & (ids < experts)
    return torch.where(known, ids, -1)


def halves(both: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up [experts, inner, ...] of what holds both, as views."""
    if interleaved:
        return both[:, 0::2], both[:, 1::2]
    inner = both.shape[1] // 2
    return both[:, :inner], both[:, inner:]


def activate(gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """Return the activation of float32 gate and up."""
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + 1)


def activate_backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    if activation == "swiglu_oai":
        low, bound = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = (alpha * low).sigmoid()
        slope = sigmoid * (1 + alpha * low * (1 - sigmoid))
        dgate = dh * (bound + 1) * slope * (gate <= limit)
        return dgate, dh * low * sigmoid * ((up >= -limit) & (up <= limit))
    if activation == "silu":
        sigmoid = gate.sigmoid()
        return dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid
    inner = 0.7978845608028654 * (gate + 0.044715 * gate.pow(3))
    tanh = inner.tanh()
    slope = 0.7978845608028654 * (1 + 3 * 0.044715 * gate.square())
    dgate = 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh.square()) * slope
    return dh * up * dgate, dh * 0.5 * gate * (1 + tanh)


def each_expert(ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Yield every expert that has slots, and those slots in order; none on the meta device."""
    if ids.is_meta:
        return
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = (flat + 1).bincount(minlength=experts + 1).tolist()
    for expert, slots in enumerate(order.split(counts), start=-1):
        if expert >= 0 and slots.numel():
            yield expert, slots


def bounds(offsets: Tensor, rows: int) -> Tensor:
    """Return the first row of each expert and the last's end, never outside of the rows or back."""
    return offsets.clamp(0, rows).cummax(0).values


def full_precision(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context without autocast, which would round float32 operands."""
    kind = like.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias in float32, differentiable."""
    with full_precision(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def experts(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """Return the weighted sum of the experts' outputs; `ids` are those of `local_ids`."""
    tokens, top_k = ids.shape
    y = x.new_zeros(tokens * top_k, down.shape[1])
    for expert, slots in each_expert(ids, gate.shape[0]):
        rows = x[slots // top_k]
        g = linear(rows, gate[expert], None if gate_bias is None else gate_bias[expert])
        u = linear(rows, up[expert], None if up_bias is None else up_bias[expert])
        h = activate(g, u, activation, alpha, limit).to(x.dtype)
        bias = None if down_bias is None else down_bias[expert]
        y[slots] = linear(h, down[expert], bias).to(x.dtype)
    return combine(y.view(tokens, top_k, down.shape[1]), ids, weights).to(x.dtype)


def combine(y: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of y [tokens, top_k, hidden] by weight, in float32, in order."""
    total = y.new_zeros(y.shape[0], y.shape[2], dtype=torch.float32)
    weights = torch.where(ids >= 0, weights.float(), 0.0)
    for choice in range(y.shape[1]):
        total += weights[:, choice, None] * y[:, choice].float()
    return total


def experts_backward(
    dout: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    grads: dict[str, Tensor],
) -> None:
    """Fill `grads`, zeros by the names of the arguments of `experts`, with their gradients.

    Everything is computed again, expert by expert, in float32.
    """
    tokens, top_k = ids.shape
    flat = weights.reshape(-1).float()
    dslots = x.new_zeros(tokens * top_k, x.shape[1]) if "x" in grads else None
    for expert, slots in each_expert(ids, gate.shape[0]):
        rows, dy = x[slots // top_k].float(), dout[slots // top_k].float()
        wg, wu, wd = gate[expert].float(), up[expert].float(), down[expert].float()
        g = linear(rows, wg, None if gate_bias is None else gate_bias[expert])
        u = linear(rows, wu, None if up_bias is None else up_bias[expert])
        h = activate(g, u, activation, alpha, limit)
        if "weights" in grads:
            y = linear(h, wd, None if down_bias is None else down_bias[expert])
            grads["weights"].view(-1)[slots] = (y * dy).sum(-1).to(weights.dtype)
        dy = dy * flat[slots, None]
        if "down" in grads:
            grads["down"][expert] = (dy.T @ h).to(down.dtype)
        if "down_bias" in grads:
            grads["down_bias"][expert] = dy.sum(0).to(grads["down_bias"].dtype)
        dg, du = activate_backward(dy @ wd, g, u, activation, alpha, limit)
        for name, grad in (("gate", dg), ("up", du)):
            if name in grads:
                grads[name][expert] = (grad.T @ rows).to(gate.dtype)
            if f"{name}_bias" in grads:
                grads[f"{name}_bias"][expert] = grad.sum(0).to(grads[f"{name}_bias"].dtype)
        if dslots is not None:
            dslots[slots] = (dg @ wg + du @ wu).to(x.dtype)
    if dslots is not None:
        by_token = dslots.view(tokens, top_k, x.shape[1])
        for choice in range(top_k):  # in order: sums of atomics would not repeat
            grads["x"] += by_token[:, choice]
