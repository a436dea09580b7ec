"""The choice of experts in float64, one token after another, and the rule that results keep."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor

from monorepo.numerics import FACTOR, FLOOR_ULP, ulp_error

SCORINGS = ("softmax", "topk_softmax", "sigmoid")
#: Numbers that differ by less than the rounding of both in float32 may be told apart either way.
MARGIN = 2 * FACTOR * FLOOR_ULP * torch.finfo(torch.float32).eps


def part(kernel: ModuleType, name: str) -> ModuleType:
    """Return a submodule of the built package."""
    return importlib.import_module(f"{kernel.__name__}.{name}")


def scores(row: list[float], scoring: str) -> list[float]:
    """Return the scores of a token's experts; NaN counts as -inf."""
    row = [-math.inf if math.isnan(each) else each for each in row]
    if scoring == "topk_softmax":
        return row
    if scoring == "softmax":
        most = max(row)
        powers = [1.0 if each == most else math.exp(each - most) for each in row]
        return [each / sum(powers) for each in powers]
    return [
        1 / (1 + math.exp(-each)) if each >= 0 else math.exp(each) / (1 + math.exp(each))
        for each in row
    ]


def best_first(values: list[float]) -> list[int]:
    """Return places by value: NaN last of all, the lowest first of those equal."""
    return sorted(
        range(len(values)),
        key=lambda i: (math.isnan(values[i]), 0 if math.isnan(values[i]) else -values[i], i),
    )


def choose(
    row: list[float],
    top_k: int,
    scoring: str = "softmax",
    bias: list[float] | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    slack: float = 0.0,
) -> tuple[list[int], bool]:
    """Return the experts of a token, and whether rounding in float32 leaves no other choice.

    `slack` is how far logits may be from the exact ones, relative to the largest.
    """
    if bias is None:
        values, close = row, slack * max(abs(each) for each in row)
    else:
        mine = scores(row, scoring)
        values = [
            math.nan if math.isnan(logit) else score + more
            for logit, score, more in zip(row, mine, bias, strict=True)
        ]
        close = MARGIN * max(abs(each) for each in (*mine, *bias) if math.isfinite(each))
    allowed, sure = range(len(row)), True
    if num_groups > 1:
        size = len(row) // num_groups
        best = []
        for group in range(num_groups):
            members = values[group * size : (group + 1) * size]
            members = sorted((-math.inf if math.isnan(v) else v for v in members), reverse=True)
            best.append(sum(members[: 1 if bias is None else 2]))
        order = best_first(best)
        if top_groups < num_groups:
            last, next_ = best[order[top_groups - 1]], best[order[top_groups]]
            sure = last == next_ or not abs(last - next_) <= 2 * close
        allowed = [
            e for group in order[:top_groups] for e in range(group * size, (group + 1) * size)
        ]
    allowed = sorted(allowed)
    order = [allowed[i] for i in best_first([values[expert] for expert in allowed])]
    for first, second in zip(order[:top_k], order[1:], strict=False):
        same = row[first] == row[second] and (bias is None or bias[first] == bias[second])
        sure &= same or not abs(values[first] - values[second]) <= close
    return order[:top_k], sure


def weigh(
    logits: Tensor, ids: Tensor, scoring: str, renormalize: bool = True, scale: float = 1.0
) -> Tensor:
    """Return the weights of chosen experts as PyTorch code computes them, differentiable."""
    if scoring == "topk_softmax":
        weights = logits.gather(-1, ids).softmax(-1)
    elif scoring == "softmax":
        weights = logits.softmax(-1).gather(-1, ids)
    else:
        weights = logits.sigmoid().gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def exact_weights(
    row: list[float], ids: list[int], scoring: str, renormalize: bool, scale: float
) -> list[float]:
    """Return the weights of a token's experts, whatever its logits are."""
    if scoring == "topk_softmax":
        weights = scores([row[expert] for expert in ids], "softmax")
    else:
        mine = scores(row, scoring)
        weights = [mine[expert] for expert in ids]
    if renormalize:
        weights = [each / (sum(weights) + 1e-20) for each in weights]
    return [each * scale for each in weights]


def check_ids(ids: Tensor, experts: int) -> None:
    """Raise unless the experts of each token exist and differ from each other (class 2)."""
    assert ids.dtype is torch.int64
    for line in ids.reshape(-1, ids.shape[-1]).tolist():
        assert len(set(line)) == len(line) and min(line) >= 0 and max(line) < experts, line


def check_weights(
    weights: Tensor, exact: Tensor, rows: Tensor, ids: Tensor, how: tuple[str, bool, float]
) -> None:
    """Raise unless each weight is off by at most twice PyTorch's worst, with a floor of 2 ulp.

    A few weights have few roundings: PyTorch's worst is looked for among more logits like these.
    """
    finite = rows.isfinite().all(-1)
    near = rows[finite].float() * (1 - torch.arange(32, device=rows.device)[:, None, None] / 128)
    places = ids[finite].expand(32, -1, -1)
    peer = ulp_error(weigh(near, places, *how), weigh(near.double(), places, *how))
    found, allowed = ulp_error(weights, exact), max(FACTOR * peer, FLOOR_ULP)
    assert found <= allowed, f"off by {found:.3g} ulp, {allowed:.3g} allowed"


def check_route(
    kernel: ModuleType,
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    least_sure: float = 0.5,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Call `route`, and raise unless ids and weights are right; return them."""
    before = logits.clone()
    ids, weights = kernel.route(logits, top_k, bias=bias, **options)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))  # never changed
    shape = (*logits.shape[:-1], top_k)
    assert ids.shape == weights.shape == shape and ids.device == weights.device == logits.device
    assert weights.dtype is torch.float32
    check_ids(ids, logits.shape[-1])
    scoring = options.get("scoring", "softmax")
    how = (scoring, options.get("renormalize", True), options.get("scale", 1.0))
    groups = {name: options[name] for name in ("num_groups", "top_groups") if name in options}
    rows = logits.double().reshape(-1, logits.shape[-1])
    lines, more = rows.tolist(), None if bias is None else bias.double().tolist()
    sure = 0
    for line, found in zip(lines, ids.view(-1, top_k).tolist(), strict=True):
        wanted, decided = choose(line, top_k, scoring, more, **groups)
        assert found == wanted or not decided, (found, wanted)
        sure += decided
    assert sure >= least_sure * len(lines)
    assert bool(weights.isfinite().all())
    exact = [
        exact_weights(line, found, *how)
        for line, found in zip(lines, ids.view(-1, top_k).tolist(), strict=True)
    ]
    if lines:
        exact = torch.tensor(exact, dtype=torch.float64, device=logits.device)
        check_weights(weights.view(-1, top_k), exact, rows, ids.view(-1, top_k), how)
    return ids, weights
