"""fused_experts against float64: kinds, sizes, ids, shares, shapes."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from monorepo.numerics import check_tensor

from .oracle import (
    ACTIVATIONS,
    FEW,
    INTERPRETED,
    LAYOUTS,
    MANY,
    MORE,
    SIZES,
    USES_TRITON,
    Allocations,
    check,
    check_call,
    force,
    formula,
    problem,
    some_skipped,
)
from .routing import part

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)
NAN, INFINITE = math.nan, math.inf


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kinds(
    kernel: ModuleType, device: str, layout: str, activation: str, dtype: torch.dtype
) -> None:
    """Each activation on each layout of weights, for one token and for more."""
    for tokens in (1, MORE):
        p = problem(
            tokens, dtype=dtype, device=device, layout=layout, activation=activation, **SIZES
        )  # fmt: skip
        check_call(kernel, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
def test_biases(
    kernel: ModuleType, device: str, bias_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Biases of any dtype, both or one of them, dense or not."""
    for tokens, layout in ((1, "interleaved"), (1, "fused"), (FEW, "fused"), (FEW, "interleaved")):
        p = problem(
            tokens, dtype=dtype, device=device, layout=layout, bias=bias_dtype,
            activation="swiglu_oai", **SIZES,
        )  # fmt: skip
        assert p.gate_up_bias is not None and p.down_bias is not None
        check_call(kernel, p)
        if layout == "fused":
            one = p.down_bias[0].expand_as(p.down_bias)
            check_call(kernel, p.but(gate_up_bias=None, down_bias=one))
        else:
            turned = p.gate_up_bias.t().contiguous().t()
            check_call(kernel, p.but(gate_up_bias=turned, down_bias=None))


@pytest.mark.parametrize("tokens", (1, FEW))
@pytest.mark.parametrize(("alpha", "limit"), ((1.702, 0.5), (0.25, 1.0), (-1.0, 7.0), (2.0, 0.0)))
def test_clamps(kernel: ModuleType, device: str, alpha: float, limit: float, tokens: int) -> None:
    """Gates are clamped from above only, ups on both sides; numbers of the call, not constants."""
    p = problem(tokens, device=device, activation="swiglu_oai", bias=FLOAT, **SIZES)
    p = p.but(alpha=alpha, limit=limit)
    check_call(kernel, p)


#: Hidden and inner features; the interpreter, which is slow, takes fewer in float32.
ODD_SIZES = ((130, 40), (33, 17), (1, 1))
SIZES_AND_DTYPES = [
    (size, dtype)
    for dtype in (HALF, FLOAT)
    for size in (*ODD_SIZES, (96, 96), (511, 200), (40, 511), (8, 264))
    if size in ODD_SIZES or dtype is HALF or not INTERPRETED
]


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES, ids=str)
def test_sizes(kernel: ModuleType, device: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Class 6: no tail of hidden or inner reads or writes what is its neighbour's."""
    hidden, inner = size
    layouts = ("fused", "transposed") if max(size) < 200 else ("fused",)
    for layout in layouts[:1] if INTERPRETED and dtype is FLOAT else layouts:
        for tokens in (1, FEW):
            p = problem(
                tokens, experts=2, hidden=hidden, inner=inner, dtype=dtype, device=device,
                layout=layout, bias=None if hidden == 1 else dtype, top_k=1 if hidden == 1 else 2,
            )  # fmt: skip
            check_call(kernel, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", (1, 2, 3, 17, 65, 300))
def test_tokens(kernel: ModuleType, device: str, tokens: int, dtype: torch.dtype) -> None:
    """Class 5: no number of tokens counts padding into an expert."""
    check_call(kernel, problem(tokens, dtype=dtype, device=device, **SIZES))


@pytest.mark.parametrize("experts", (1, 3, 7, 60) if INTERPRETED else (1, 3, 5, 7, 60))
@pytest.mark.parametrize("top_k", (1, 3, "all") if INTERPRETED else (1, 2, 3, "all"))
def test_experts_and_choices(
    kernel: ModuleType, device: str, experts: int, top_k: int | str
) -> None:
    """Cases B37, B40, class 7: neither has to be a power of two."""
    top_k = min(experts, 32) if top_k == "all" else top_k
    for tokens in (1, FEW):
        check_call(kernel, problem(tokens, experts=experts, top_k=top_k, device=device, **SIZES))


def test_many_experts(kernel: ModuleType, device: str) -> None:
    """Class 7: more than 255 experts, none of them out of reach; and 1024."""
    for experts in (300, 1024):
        p = problem(15 if INTERPRETED else experts // 2, experts=experts, hidden=16, inner=8,
                    device=device)  # fmt: skip
        order = experts - 1 - torch.randperm(p.ids.numel(), device=device)
        check_call(kernel, p.but(ids=order.view(-1, 2)))


@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("tokens", (1, FEW))
def test_ids_of_any_kind(
    kernel: ModuleType, device: str, tokens: int, ids_dtype: torch.dtype
) -> None:
    """Case B40: ids and weights of either width and of any strides."""
    p = problem(tokens, top_k=3, device=device, **SIZES)
    ids = p.ids.to(ids_dtype)
    wanted = check_call(kernel, p)
    wide = torch.full((tokens, 9), 77, dtype=ids_dtype, device=device)
    wide[:, 1:7:2] = ids
    heavy = torch.full((tokens, 9), NAN, device=device)
    heavy[:, 1:7:2] = p.weights
    for some, mix in (
        (ids, p.weights.t().contiguous().t()),
        (wide[:, 1:7:2], heavy[:, 1:7:2]),
        (ids.t().contiguous().t(), p.weights),
    ):
        assert torch.equal(p.but(ids=some, weights=mix).call(kernel), wanted)
    one = p.but(ids=ids[:1].expand(tokens, 3), weights=p.weights[:1, :1].expand(tokens, 3))
    check_call(kernel, one)


@pytest.mark.parametrize("mix_dtype", DTYPES, ids=str)
def test_weights_of_any_dtype(kernel: ModuleType, device: str, mix_dtype: torch.dtype) -> None:
    for dtype in (HALF, FLOAT):
        for tokens in (1, FEW):
            p = problem(tokens, top_k=3, dtype=dtype, device=device, **SIZES)
            check_call(kernel, p.but(weights=p.weights.to(mix_dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decodes", (True, False))
def test_skipped_slots(
    kernel: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    uses_triton: bool,
    decodes: bool,
    dtype: torch.dtype,
) -> None:
    """Cases B38, B55, classes 3 and 13: what no expert serves adds nothing, writes nothing."""
    force(kernel, monkeypatch, decodes=decodes)
    for experts, ids_dtype in ((5, torch.int64), (1, torch.int32)):
        p = problem(
            MORE if decodes else 33, experts=experts, top_k=3, dtype=dtype, device=device,
            bias=FLOAT, **SIZES,
        )  # fmt: skip
        p = some_skipped(p)
        with monkeypatch.context() as patch:
            allocations = Allocations(kernel, patch)
            out = p.but(ids=p.ids.to(ids_dtype)).call(kernel)
        if uses_triton:
            allocations.check()
        check(p, out)
    far = p.but(ids=torch.where(p.ids >= 0, p.ids, 2**40 + p.ids))  # 0 if cut to 32 bits
    assert torch.equal(far.call(kernel), out)


@pytest.mark.parametrize("decodes", (True, False))
@pytest.mark.parametrize("value", (NAN, INFINITE))
def test_skipped_slots_of_any_value(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, value: float, decodes: bool
) -> None:
    """Class 13: 0 times what is not finite would be NaN; nothing of a skipped slot is looked at."""
    force(kernel, monkeypatch, decodes=decodes)
    clean = some_skipped(problem(5, top_k=3, device=device, bias=FLOAT, **SIZES))
    clean = clean.but(ids=torch.where(clean.ids == 0, -1, clean.ids))
    wanted = check_call(kernel, clean)
    p = clean.but(
        x=clean.x.clone(), gate_up=clean.gate_up.clone(), down=clean.down.clone(),
        weights=torch.where((clean.ids < 0) | (clean.ids >= 5), value, clean.weights),
        gate_up_bias=clean.gate_up_bias.clone(), down_bias=clean.down_bias.clone(),
    )  # fmt: skip
    p.x[2] = value  # a token without experts, and an expert without tokens
    for each in (p.gate_up, p.down, p.gate_up_bias, p.down_bias):
        each[0] = value
    assert torch.equal(p.call(kernel), wanted)


@pytest.mark.parametrize("decodes", (True, False))
@pytest.mark.parametrize("value", (NAN, INFINITE, -INFINITE))
def test_not_finite_stays_in_its_row(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, value: float, decodes: bool
) -> None:
    """A token that is not finite is seen in its result, and in no other."""
    force(kernel, monkeypatch, decodes=decodes)
    for activation in ACTIVATIONS[:1] if INTERPRETED and value < 0 else ACTIVATIONS:
        p = problem(3, device=device, activation=activation, **SIZES)
        wanted = p.call(kernel)
        p.x[1, 5] = value
        out = p.call(kernel)
        assert torch.equal(out[::2], wanted[::2])
        assert not bool(out[1].isfinite().any())


@pytest.mark.parametrize("decodes", (True, False))
@pytest.mark.parametrize("dtype", (HALF, FLOAT), ids=str)
def test_shares_of_experts(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
    decodes: bool,
) -> None:  # fmt: skip
    """Class 14: all to one expert, to the last, to every other one, the same one twice."""
    force(kernel, monkeypatch, decodes=decodes)
    tokens = FEW if decodes else MANY
    p = problem(tokens, experts=7, top_k=3, dtype=dtype, device=device, **SIZES)
    for ids in (
        torch.zeros_like(p.ids),
        torch.full_like(p.ids, 6),
        2 * (p.ids % 3) + 1,
        torch.arange(3, device=device).expand(tokens, 3),
        torch.where(torch.arange(tokens, device=device)[:, None] == tokens - 1, p.ids, 5),
        torch.full_like(p.ids, -1),
    ):
        check_call(kernel, p.but(ids=ids))


@pytest.mark.parametrize("map_dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("tokens", (1, MORE))
def test_expert_map(kernel: ModuleType, device: str, tokens: int, map_dtype: torch.dtype) -> None:
    """Expert parallelism: each rank serves its own, and together they are the whole."""
    whole = problem(
        tokens, experts=8, top_k=3, dtype=FLOAT, device=device, bias=FLOAT, **SIZES
    )  # fmt: skip
    whole.ids[0, 1] = 8  # one beyond all experts, and beyond the map
    order = torch.randperm(8, device=device)
    parts = []
    for mine in (order[:3], order[3:]):
        places = torch.full((8,), -1, device=device)
        places[mine] = torch.arange(len(mine), device=device)
        rank = whole.but(
            gate_up=whole.gate_up[mine], down=whole.down[mine], expert_map=places.to(map_dtype),
            gate_up_bias=whole.gate_up_bias[mine], down_bias=whole.down_bias[mine],
        )  # fmt: skip
        parts.append(check_call(kernel, rank))
    check_tensor(parts[0] + parts[1], formula(whole, torch.float64), formula(whole, FLOAT))
    strided = torch.stack((rank.expert_map, rank.expert_map + 1), 1)[:, 0]
    assert torch.equal(rank.but(expert_map=strided).call(kernel), rank.call(kernel))
    # An entry that names no expert here is one of another rank too.
    odd = rank.but(expert_map=torch.tensor([0, 5, -3, 1, 99, 2, 4, 3]).to(device, map_dtype))
    check_call(kernel, odd)


@pytest.mark.parametrize("shape", ((), (1,), (2, 3), (2, 1, 5)), ids=str)
def test_leading_dimensions(kernel: ModuleType, device: str, shape: tuple[int, ...]) -> None:
    tokens = math.prod(shape)
    flat = problem(tokens, device=device)
    p = flat.but(
        x=flat.x.view(*shape, 96),
        ids=flat.ids.view(*shape, 2),
        weights=flat.weights.view(*shape, 2),
    )
    out = check_call(kernel, p)
    assert torch.equal(out.view(-1, 96), flat.call(kernel))


@pytest.mark.parametrize("shape", ((0,), (2, 0), (0, 3)), ids=str)
@pytest.mark.parametrize("gradients", (False, True))
def test_zero_tokens(
    kernel: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    gradients: bool,
) -> None:
    """Case B44, class 4: right shape, dtype and device, zero gradients, nothing computed."""
    reference = part(kernel, "reference")
    for name in ("each_expert", "linear"):  # the first one makes the host wait for a GPU
        monkeypatch.setattr(reference, name, lambda *_: pytest.fail("something was computed"))
    if USES_TRITON:
        monkeypatch.setattr(part(kernel, "launch"), "launch", lambda *_: pytest.fail("launched"))
    flat = problem(0, device=device, bias=FLOAT)
    p = flat.but(
        x=flat.x.view(*shape, 96).requires_grad_(gradients), ids=flat.ids.view(*shape, 2),
        gate_up=flat.gate_up.requires_grad_(gradients),
        weights=flat.weights.view(*shape, 2).requires_grad_(gradients),
    )  # fmt: skip
    out = p.call(kernel)
    assert (out.shape, out.dtype, out.device) == ((*shape, 96), HALF, p.x.device)
    if gradients:
        out.sum().backward()
        for leaf in (p.x, p.gate_up, p.weights):
            assert leaf.grad is not None and torch.equal(leaf.grad, torch.zeros_like(leaf))
    router = torch.randn(5, 96, device=device)
    out, ids, mix = kernel.fused_moe_forward(
        flat.x.detach(), router, *flat.gate_up.detach().chunk(2, 1), flat.down, 5, 2
    )
    assert out.shape == (0, 96) and ids.shape == mix.shape == (0, 2)
    assert ids.dtype is torch.int64 and out.dtype is mix.dtype is HALF
