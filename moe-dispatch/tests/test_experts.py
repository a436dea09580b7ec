"""fused_experts against float64: sizes, ids, tiles each alone, memory around operands."""

from __future__ import annotations

import dataclasses
import math
import os
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from imports import fresh
from monorepo.numerics import check_tensor

from .oracle import (
    ACTIVATIONS,
    LAYOUTS,
    Allocations,
    Problem,
    check,
    check_call,
    force,
    formula,
    guarded,
    problem,
)
from .routing import part

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"
USES_TRITON = INTERPRETED or torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not USES_TRITON, reason="calls the Triton kernels themselves")
NAN, INFINITE = math.nan, math.inf
#: The interpreter takes milliseconds a program: little of everything that makes a difference.
SIZES = {"hidden": 24, "inner": 16} if INTERPRETED else {"hidden": 96, "inner": 40}
FEW, MORE, MANY = (3, 6, 20) if INTERPRETED else (9, 17, 40)


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


def some_skipped(p: Problem) -> Problem:
    """Return a problem 30 % of whose slots, and all of whose third token, have no expert."""
    ids = p.ids.clone()
    bad = torch.rand(ids.shape, device=ids.device) < 0.3
    bad[2:3] = True
    bad[0, 0] = False
    kinds = torch.tensor([-1, p.down.shape[0], -7, 2**31 - 1, -(2**31)], device=ids.device)
    ids[bad] = kinds[torch.arange(int(bad.sum()), device=ids.device) % len(kinds)]
    return p.but(ids=ids)


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


# ------------------------------------------------------------------------------------------- tiles
def tile_of(kernel: ModuleType, **fields: object):
    """Return a small tile; block_n and block_k leave tails of what `tile_problem` is."""
    plain = {
        "tokens": 16, "extra": 0, "tall": 0, "block_n": 32 if INTERPRETED else 64,
        "block_k": 32 if INTERPRETED else 64,
        "num_warps": 4, "num_stages": 3, "swap": False, "boxes": False, "rows_by_box": False,
        "wide": False, "group": 4,
    }  # fmt: skip
    return part(kernel, "config").GemmConfig(**plain | fields)


#: Tiles of up and of down, by what they differ from `tile_of` in.
TILES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "plain": ({}, {}),
    "by columns": ({"group": 0}, {"group": 0}),
    "groups of one": ({"group": 1}, {"group": 3, "swap": True}),
    "swapped": ({"swap": True}, {"swap": True, "group": 0}),
    "boxes": ({"boxes": True}, {"boxes": True}),
    "swapped boxes": ({"swap": True, "boxes": True}, {"swap": True, "boxes": True}),
    "wide": ({"boxes": True, "wide": True, "block_n": 32}, {"boxes": True, "rows_by_box": True}),
    "wide, grown": (
        {"boxes": True, "wide": True, "extra": 16, "group": 0},
        {"boxes": True, "extra": 16},
    ),
    "wide without boxes": ({"wide": True}, {"rows_by_box": True, "block_n": 32}),
    "rows by box, swapped": ({"swap": True}, {"rows_by_box": True, "boxes": True, "swap": True}),
    "grown": ({"extra": 16}, {"extra": 16}),
    "grown, swapped": ({"extra": 16, "swap": True}, {"extra": 16, "swap": True}),
    "grown, boxes": (
        {"extra": 16, "swap": True, "boxes": True},
        {"extra": 16, "swap": True, "boxes": True, "group": 0},
    ),
    "tall": ({"tall": 32}, {"tall": 32, "swap": True}),
    "tall, grown, boxes": (
        {"tall": 32, "extra": 16, "swap": True, "boxes": True},
        {"tall": 64, "boxes": True, "rows_by_box": True},
    ),
    "32 rows": ({"tokens": 32, "extra": 16}, {"tokens": 32}),
    "of two heights": ({"tokens": 32, "boxes": True, "swap": True}, {"extra": 16, "boxes": True}),
    "64 rows": (
        {"tokens": 64, "extra": 32, "swap": True, "boxes": True},
        {"tokens": 64, "block_n": 128, "boxes": True, "rows_by_box": True},
    ),
}
#: Rows of each expert: none, one, and around what fills a tile, or two, or lets one grow.
COUNTS = (0, 1, 16, 17, 0, 34, 0) if INTERPRETED else (0, 1, 15, 16, 17, 33, 0, 50, 81, 0)


def tile_problem(device: str, dtype: torch.dtype, layout: str, odd: int = 0) -> Problem:
    """Return a problem of COUNTS rows an expert, whose sizes end within a tile's block."""
    hidden, inner = (40, 40) if INTERPRETED else (104, 72)
    ids = torch.cat([torch.full((count,), expert) for expert, count in enumerate(COUNTS)])
    p = problem(
        len(ids), experts=len(COUNTS), top_k=1, hidden=hidden + odd, inner=inner, dtype=dtype,
        device=device, layout=layout,
    )  # fmt: skip
    return p.but(ids=ids[torch.randperm(len(ids))].to(device).unsqueeze(1))


#: float32 has no boxes: the interpreter, which is slow, takes it where its logic differs.
TILES_AND_DTYPES = [
    (kind, dtype)
    for kind in TILES
    for dtype in DTYPES
    if not INTERPRETED or dtype is not FLOAT or kind in ("plain", "tall", "grown, swapped")
]


@needs_triton
@pytest.mark.parametrize(("kind", "dtype"), TILES_AND_DTYPES, ids=str)
def test_each_tile(
    kernel: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: torch.dtype,
) -> None:
    """Case B62: none relies on what another left in the result or between the products."""
    up, down = (tile_of(kernel, **fields) for fields in TILES[kind])
    if dtype is FLOAT:  # has no boxes, and takes twice the memory
        changes = {"rows_by_box": False, "num_stages": 2}
        up, down = (dataclasses.replace(tile, **changes) for tile in (up, down))
    force(kernel, monkeypatch, up, down, decodes=False)
    allocations = Allocations(kernel, monkeypatch)
    place = list(TILES).index(kind) + DTYPES.index(dtype)
    layouts = [LAYOUTS[place % 4]]  # each tile on some, each layout by some
    if dtype is HALF and not INTERPRETED:
        layouts.append(LAYOUTS[(place + 2) % 4])
    for layout in layouts:
        p = tile_problem(device, dtype, layout)
        out = p.call(kernel)
        allocations.check()
        check(p, out)


@needs_triton
@pytest.mark.parametrize("kind", ("swapped boxes", "wide", "grown"))
def test_tiles_on_unaligned_rows(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Case B55: where TMA cannot read, a tile that wants it reads by pointers."""
    up, down = (tile_of(kernel, **fields) for fields in TILES[kind])
    force(kernel, monkeypatch, up, down, decodes=False)
    for layout in LAYOUTS[::3] if INTERPRETED else LAYOUTS:
        check_call(kernel, tile_problem(device, HALF, layout, odd=-5))


@needs_triton
@settings(max_examples=5 if INTERPRETED else 60, deadline=None)
@given(data=st.data())
def test_any_dispatch(kernel: ModuleType, device: str, data: st.DataObject) -> None:
    """Cases B37, B38: any experts, choices, shares, heights of tiles and passes."""
    draw = data.draw
    experts = draw(st.integers(1, 40), label="experts")
    top_k = draw(st.integers(1, 10), label="top_k")
    tokens = draw(st.integers(1, 90), label="tokens")
    p = problem(tokens, experts=experts, top_k=top_k, hidden=24, inner=16, device=device)
    few = draw(st.integers(1, experts), label="experts that are chosen")
    ids = torch.randint(few, (tokens, top_k), device=device)
    skipped = draw(st.sampled_from((0.0, 0.3, 0.9)), label="skipped")
    ids[torch.rand(tokens, top_k, device=device) < skipped] = -1
    p = p.but(ids=ids)
    heights = [
        {
            "tokens": draw(st.sampled_from((16, 32)), label="height"),
            "extra": draw(st.sampled_from((0, 16)), label="extra"),
            "group": draw(st.sampled_from((0, 1, 3)), label="group"),
        }
        for _ in range(2)
    ]
    with pytest.MonkeyPatch.context() as patch:
        force(kernel, patch, *(tile_of(kernel, **each) for each in heights), decodes=False)
        if draw(st.booleans(), label="passes"):
            patch.setattr(part(kernel, "config"), "MOST_TOKENS", 32)
        allocations = Allocations(kernel, patch)
        out = p.call(kernel)
        allocations.check()
    check(p, out)


@needs_triton
@pytest.mark.parametrize("layout", ("fused", "interleaved transposed"))
@pytest.mark.parametrize("dtype", (HALF, FLOAT), ids=str)
def test_both_paths(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
    layout: str,
) -> None:  # fmt: skip
    """Case B62: the path of a few tokens for many, that of many for one, on poisoned memory."""
    allocations = Allocations(kernel, monkeypatch)
    for decodes in (True, False):
        force(kernel, monkeypatch, decodes=decodes)
        for tokens in (1, MORE):
            p = problem(
                tokens, dtype=dtype, device=device, layout=layout, bias=HALF, **SIZES
            )  # fmt: skip
            out = p.call(kernel)
            allocations.check()
            check(p, out)


@needs_triton
@pytest.mark.parametrize("tokens", (32, 33, 75))
def test_several_passes(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """More tokens than one pass takes: each with its own ids, weights and part of the result."""
    p = problem(tokens, device=device, bias=FLOAT, **SIZES)
    p = some_skipped(p.but(ids=p.ids.t().contiguous().t()))
    monkeypatch.setattr(part(kernel, "config"), "MOST_TOKENS", 32)
    passes = []
    combine = part(kernel, "launch").combine
    monkeypatch.setattr(part(kernel, "launch"), "combine", lambda *a: passes.append(combine(*a)))
    allocations = Allocations(kernel, monkeypatch)
    out = p.call(kernel)
    allocations.check()
    check(p, out)
    assert len(passes) == -(-tokens // 32)


#: Where each launch writes, among its arguments, and on which path it runs.
STAGES = {
    "up": (3, False), "down": (2, False), "combine": (4, False), "decode_up": (3, True),
    "decode_down": (2, True),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("stage", STAGES)
def test_a_broken_stage_is_seen(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """These tests look at what each launch does: with zeros instead they fail."""
    launch = part(kernel, "launch")
    place, decodes = STAGES[stage]
    right = getattr(launch, stage)
    force(kernel, monkeypatch, decodes=decodes)
    Allocations(kernel, monkeypatch)
    p = problem(FEW, device=device, **SIZES)
    check_call(kernel, p)
    for zeroed in ((), (-1,), (slice(None), 3), None):

        def broken(*arguments: object, zeroed: tuple[object, ...] | None = zeroed) -> None:
            if zeroed is not None:  # else nothing is launched
                right(*arguments)
                written = arguments[place]
                assert isinstance(written, Tensor)
                written[zeroed] = 0

        monkeypatch.setattr(launch, stage, broken)
        with pytest.raises(AssertionError):
            check_call(kernel, p)


@pytest.mark.parametrize("tokens", (1, MANY))
def test_same_bits_every_time(kernel: ModuleType, device: str, tokens: int) -> None:
    """Case B41, class 11."""
    p = problem(tokens, device=device, bias=FLOAT, **SIZES)
    first = p.call(kernel)
    for _ in range(3 if INTERPRETED else 20):
        assert torch.equal(first, p.call(kernel))


# ------------------------------------------------------------------------------------------ memory
@pytest.mark.parametrize("lead", (4096, 3))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", (1, FEW))
def test_poison_around_operands(
    kernel: ModuleType, device: str, tokens: int, layout: str, lead: int
) -> None:
    """Cases B07, B53, class 6: nothing beside an operand is used, wherever it begins."""
    p = problem(tokens, device=device, layout=layout, bias=FLOAT, **SIZES)
    fields = {
        field.name: guarded(value, lead)
        for field in dataclasses.fields(p)
        if isinstance(value := getattr(p, field.name), Tensor)
    }
    check_call(kernel, p.but(**fields))


PROTECTED = """
    import ctypes, mmap
    import torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/moe-dispatch", version=1)
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    kept = []

    def fenced(tensor, side):
        # At the end (or the start) of its pages, beside one that nobody may touch.
        size = tensor.numel() * tensor.element_size()
        pages = -(-size // page) + 2
        buffer = mmap.mmap(-1, pages * page)
        kept.append(buffer)
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for fence in (start, start + (pages - 1) * page):
            assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
        offset = page if side == "start" else (pages - 1) * page - size
        whole = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset)
        return whole.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    for side in ("end", "start"):
        for hidden, inner, dtype in ((40, 24, torch.float16), (33, 17, torch.float32)):
            for tokens, interleaved in ((1, False), (7, False), (7, True)):
                both = torch.randn(3, 2 * inner, hidden, dtype=dtype)
                operands = [
                    torch.randn(tokens, hidden, dtype=dtype), both,
                    torch.randn(3, hidden, inner, dtype=dtype), torch.randint(-1, 4, (tokens, 3)),
                    torch.rand(tokens, 3), torch.randn(3, 2 * inner), torch.randn(3, hidden),
                    torch.tensor([0, -1, 1, 2]),
                ]

                def call(x, gate_up, down, ids, mix, bias, other, places):
                    return kernel.fused_experts(
                        x, gate_up, down, ids, mix, gate_up_bias=bias, down_bias=other,
                        expert_map=places, interleaved=interleaved,
                    )

                wanted = call(*operands)
                assert torch.equal(call(*(fenced(each, side) for each in operands)), wanted)
                router = fenced(torch.randn(3, hidden, dtype=dtype), side)
                x, gate_up, down = (fenced(each, side) for each in operands[:3])
                gate, up = (fenced(each, side) for each in both.chunk(2, 1))
                out, ids, mix = kernel.fused_moe_forward(x, router, gate, up, down, 3, 2)
                assert bool(out.isfinite().all())
                kernel.route(fenced(torch.randn(tokens, 7), side), 3)
"""


@pytest.mark.skipif(not INTERPRETED, reason="where a GPU's memory ends, nothing is protected")
def test_nothing_outside_an_operand_is_touched(kernel: ModuleType) -> None:
    """Cases B07, B38: operands beside pages that end the process when they are read."""
    fresh(PROTECTED)


FAR = """
    import importlib, sys, torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/moe-dispatch", version=1)
    config = importlib.import_module(f"{kernel.__name__}.config")
    ops = importlib.import_module(f"{kernel.__name__}.ops")
    found, ops._plan = config.gemm_config, ops._plan.__wrapped__
    stride = 2**31 + 64
    # A file of holes: only the pages that are touched take memory.
    whole = torch.from_file(sys.argv[1], shared=True, size=stride + 16384, dtype=torch.float16)
    experts, n, k = 2, 32, 32

    def far(weight, lead):
        strides = stride, *weight.stride()[1:]
        return whole[lead:].as_strided(weight.shape, strides).copy_(weight)

    for transposed in (False, True):
        for boxes in (True, False):
            def changed(*arguments):
                import dataclasses
                return dataclasses.replace(found(*arguments), boxes=boxes)
            config.gemm_config = changed
            both, down = torch.randn(2, 2 * n, k).half(), torch.randn(2, k, n).half()
            if transposed:
                both, down = both.mT.contiguous().mT, down.mT.contiguous().mT
            x = torch.randn(5, k).half()
            ids = torch.tensor([[1]] * 4 + [[0]])
            for tokens in (1, 5):
                for interleaved in (False, True):
                    near, apart = (
                        kernel.fused_experts(
                            x[:tokens], *weights, ids[:tokens], torch.ones(tokens, 1),
                            interleaved=interleaved,
                        )
                        for weights in ((both, down), (far(both, 0), far(down, 4096)))
                    )
                    assert torch.equal(near, apart) and bool(near.any())
    # Gates and ups that are further apart than 32 bits tell, and rows of x that are.
    both, router = torch.randn(2, 2 * n, k).half(), torch.randn(2, k).half()
    gate, up = both.chunk(2, 1)
    low = whole[:2048].view(2, n, k)
    high = whole[stride:][:2048].view(2, n, k)
    for tokens in (1, 5):
        wanted = kernel.fused_moe_forward(x[:tokens], router, gate, up, down, 2, 2)
        for first, second in ((low, high), (high, low)):
            first.copy_(gate), second.copy_(up)
            got = kernel.fused_moe_forward(x[:tokens], router, first, second, down, 2, 2)
            assert all(torch.equal(a, b) for a, b in zip(wanted, got))
    rows = whole[8192:].as_strided((2, k), (stride, 1))
    rows.copy_(x[:2])
    for tokens in (1, 2):
        got = kernel.fused_moe_forward(rows[2 - tokens:], router, gate, up, down, 2, 2)
        wanted = kernel.fused_moe_forward(x[2 - tokens: 2], router, gate, up, down, 2, 2)
        assert all(torch.equal(a, b) for a, b in zip(wanted, got))
"""


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU test_gpu.py does this with real memory")
def test_offsets_past_2_to_the_31_elements(kernel: ModuleType, tmp_path) -> None:
    """Cases B01, B02: offsets are 64-bit. A wrong one would end the process."""
    fresh(FAR, str(tmp_path / "holes"))
