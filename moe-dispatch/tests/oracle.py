"""Problems of the experts, their exact results, and the rule that results keep.

How experts are chosen is in `routing.py`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from monorepo.numerics import FACTOR, FLOOR_ULP, Error, spacing, tensor_error

from .routing import part

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"
USES_TRITON = INTERPRETED or torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not USES_TRITON, reason="calls the Triton kernels themselves")
#: The interpreter takes milliseconds a program: little of everything that makes a difference.
SIZES = {"hidden": 24, "inner": 16} if INTERPRETED else {"hidden": 96, "inner": 40}
FEW, MORE, MANY = (3, 6, 20) if INTERPRETED else (9, 17, 40)
ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")
#: How gates and ups share a weight, and whether weights are dense along n: see `problem`.
LAYOUTS = ("fused", "interleaved", "transposed", "interleaved transposed")


@dataclass(frozen=True)
class Problem:
    """The arguments of a call of `fused_experts`."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    interleaved: bool = False
    expert_map: Tensor | None = None

    def but(self, **changes: object) -> Problem:
        """Return the same call but for some arguments."""
        return dataclasses.replace(self, **changes)

    def call(self, kernel: ModuleType) -> Tensor:
        """Return what the kernel makes of it."""
        return kernel.fused_experts(
            self.x, self.gate_up, self.down, self.ids, self.weights,
            gate_up_bias=self.gate_up_bias, down_bias=self.down_bias, activation=self.activation,
            alpha=self.alpha, limit=self.limit, interleaved=self.interleaved,
            expert_map=self.expert_map,
        )  # fmt: skip

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the call."""
        return [each for each in vars(self).values() if isinstance(each, Tensor)]


def problem(
    tokens: int,
    *,
    experts: int = 5,
    top_k: int = 2,
    hidden: int = 96,
    inner: int = 40,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    layout: str = "fused",
    bias: torch.dtype | None = None,
    activation: str = "silu",
    limit: float = 7.0,
) -> Problem:
    """Return a random problem at unit scale: gates, ups and results have a deviation of about 1."""

    def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).mul_(scale)

    def weight(n: int, k: int, gain: float) -> Tensor:
        if "transposed" in layout:
            return random(experts, k, n, scale=gain * k**-0.5).mT
        return random(experts, n, k, scale=gain * k**-0.5)

    # Gates and ups of deviation 1 are about 0.6 once activated, and 1.3 with the one of gpt-oss.
    gain = 0.8 if activation == "swiglu_oai" else 1.7
    return Problem(
        random(tokens, hidden),
        weight(2 * inner, hidden, 1.0),
        weight(hidden, inner, gain),
        choices(tokens, experts, top_k, device),
        (0.5 + torch.rand(tokens, top_k, device=device)) * top_k**-0.5,
        None if bias is None else random(experts, 2 * inner, scale=0.5, dtype=bias),
        None if bias is None else random(experts, hidden, scale=0.5, dtype=bias),
        activation,
        limit=limit,
        interleaved="interleaved" in layout,
    )


def choices(tokens: int, experts: int, top_k: int, device: str) -> Tensor:
    """Return random experts, each at most once a token as long as there are enough."""
    order = torch.rand(tokens, -(-top_k // experts) * experts, device=device).argsort(-1)
    return order[:, :top_k] % experts


def some_skipped(p: Problem) -> Problem:
    """Return a problem 30 % of whose slots, and all of whose third token, have no expert."""
    ids = p.ids.clone()
    bad = torch.rand(ids.shape, device=ids.device) < 0.3
    bad[2:3] = True
    bad[0, 0] = False
    kinds = torch.tensor([-1, p.down.shape[0], -7, 2**31 - 1, -(2**31)], device=ids.device)
    ids[bad] = kinds[torch.arange(int(bad.sum()), device=ids.device) % len(kinds)]
    return p.but(ids=ids)


def local(ids: Tensor, experts: int, expert_map: Tensor | None) -> Tensor:
    """Return each slot's expert here, or -1 if it has none: one slot after another."""
    given = list(range(experts)) if expert_map is None else expert_map.tolist()

    def one(index: int) -> int:
        expert = given[index] if 0 <= index < len(given) else -1
        return expert if 0 <= expert < experts else -1

    found = [one(index) for index in ids.reshape(-1).tolist()]
    return torch.tensor(found, dtype=torch.int64, device=ids.device).view(-1, ids.shape[-1])


def activate(gate: Tensor, up: Tensor, p: Problem) -> Tensor:
    """Return what happens between the products, as PyTorch code writes it."""
    if p.activation == "silu":
        return F.silu(gate) * up
    if p.activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=p.limit), up.clamp(-p.limit, p.limit)
    return gate * torch.sigmoid(gate * p.alpha) * (up + 1)


def formula(p: Problem, dtype: torch.dtype) -> Tensor:
    """Return the result as PyTorch code computes it in a dtype, differentiable.

    In float64 that is the exact result, at the dtype of x the peer.
    """
    experts, hidden, _ = p.down.shape
    x = p.x.to(dtype).reshape(-1, hidden)
    ids = local(p.ids, experts, p.expert_map)
    weights = p.weights.to(dtype).reshape(ids.shape)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        shift = None if bias is None else bias[expert].to(dtype)
        return F.linear(rows, weight[expert].to(dtype), shift)

    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, choice = (ids == expert).nonzero(as_tuple=True)
        both = linear(x[token], p.gate_up, p.gate_up_bias, expert)
        gate, up = (both[:, 0::2], both[:, 1::2]) if p.interleaved else both.chunk(2, -1)
        y = linear(activate(gate, up, p), p.down, p.down_bias, expert)
        out = out.index_add(0, token, y * weights[token, choice, None])
    return out.view(p.x.shape)


def check(p: Problem, out: Tensor) -> None:
    """Raise unless a result is off by at most twice what PyTorch is at the dtype of x.

    A few numbers have few roundings: PyTorch's worst is looked for among more like them.
    """
    assert out.shape == p.x.shape and out.dtype is p.x.dtype and out.device == p.x.device
    assert out.is_contiguous()
    with torch.no_grad():
        exact = formula(p, torch.float64)
        more = repeated(p, SAMPLE // max(out.numel(), 1))
        right = exact if more is p else formula(more, torch.float64)
        peer = tensor_error(formula(more, p.x.dtype), right)
        peer = in_ulp_of(exact, peer, right, p.x.dtype)
        nowhere = (local(p.ids, p.down.shape[0], p.expert_map) < 0).all(-1)
    check_error(tensor_error(out, exact), peer)
    assert not bool(out.reshape(len(nowhere), -1)[nowhere].any())  # exactly zero


#: Numbers that PyTorch's error is taken from, at least.
SAMPLE = 2048


def repeated(p: Problem, times: int) -> Problem:
    """Return so many problems in one, their activations each a little smaller."""
    if times < 2:
        return p
    top_k, hidden = p.ids.shape[-1], p.x.shape[-1]
    smaller = 1 - torch.arange(times, device=p.x.device)[:, None, None] / (2 * times)
    return p.but(
        x=(p.x.reshape(-1, hidden) * smaller).to(p.x.dtype).reshape(-1, hidden),
        ids=p.ids.reshape(-1, top_k).repeat(times, 1),
        weights=p.weights.reshape(-1, top_k).repeat(times, 1),
    )


def in_ulp_of(exact: Tensor, error: Error, right: Tensor, dtype: torch.dtype) -> Error:
    """Return errors against `right`, relative to its size, in ulp of `exact` in a dtype.

    An ulp is up to twice as large a part of one tensor as of another.
    """

    def parts(values: Tensor) -> Tensor:
        sizes = torch.stack((values.abs().max(), values.pow(2).mean().sqrt()))
        return spacing(sizes, dtype) / sizes

    largest, rms = (parts(right) / parts(exact)).nan_to_num(1.0).tolist()
    return Error(error.largest * largest, error.rms * rms)


def check_error(found: Error, peer: Error) -> None:
    """Raise unless an error is at most twice PyTorch's, with the floor of `numerics`."""
    for name in ("largest", "rms"):
        got, allowed = getattr(found, name), max(FACTOR * getattr(peer, name), FLOOR_ULP)
        assert got <= allowed, f"{name} error {got:.3g} ulp, {allowed:.3g} allowed"


def check_call(kernel: ModuleType, p: Problem) -> Tensor:
    """Call the kernel, check what it returns, and return it."""
    out = p.call(kernel)
    check(p, out)
    return out


GUARD = 4096  # elements before and behind; more than a tile reads of a row


def poison(tensor: Tensor) -> Tensor:
    """Fill with what a result must not depend on: NaN, or integers that are no index (B38)."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def guarded(tensor: Tensor, lead: int = GUARD) -> Tensor:
    """Return a copy of the same strides that has poison before and behind it in memory."""
    size = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    whole = poison(tensor.new_empty(lead + size + GUARD))
    return whole[lead:].as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def memory(view: Tensor) -> Tensor:
    """Return a copy of all memory around a view, bit by bit."""
    whole = torch.empty(0, dtype=torch.uint8, device=view.device)
    return whole.set_(view.untyped_storage()).clone()


class Allocations:
    """What `ops` allocates: poison instead of chance, with guards around it."""

    def __init__(self, kernel: ModuleType, patch) -> None:
        self._module = part(kernel, "ops").__name__
        self.given: list[Tensor] = []
        for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, self._instead_of(getattr(owner, name)))

    def _instead_of(self, allocate):
        def poisoned(*args: object, **kwargs: object) -> Tensor:
            plain = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals["__name__"] != self._module or plain.is_meta:
                return plain
            size = plain.numel()
            whole = torch.zeros(size + 2 * GUARD, dtype=plain.dtype, device=plain.device)
            self.given.append(poison(whole)[GUARD : GUARD + size].view(plain.shape))
            return self.given[-1]

        return poisoned

    def check(self) -> None:
        """Raise if memory beside an allocation was written, or if there was none; forget them."""
        assert self.given
        for tensor in self.given:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            ends = torch.cat((whole[:GUARD], whole[-GUARD:]))
            assert torch.equal(ends.nan_to_num(7.0), poison(ends.clone()).nan_to_num(7.0))
        self.given.clear()


def force(
    kernel: ModuleType, patch, up: object = None, down: object = None, decodes: bool | None = None
) -> None:
    """Make calls run by given tiles, or by the path of a few tokens or of many."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    if up is not None:
        patch.setattr(config, "gemm_config", lambda gates, *_: up if gates else down)
        patch.setattr(ops, "_plan", ops._plan.__wrapped__)
    if decodes is not None:
        patch.setattr(config, "decodes", lambda *_: decodes)
