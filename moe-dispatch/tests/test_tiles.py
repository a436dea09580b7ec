"""Tiles and paths, each alone: none relies on what another left, and all see a broken stage."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .oracle import (
    FEW,
    INTERPRETED,
    LAYOUTS,
    MANY,
    MORE,
    SIZES,
    Allocations,
    Problem,
    check,
    check_call,
    force,
    needs_triton,
    problem,
    some_skipped,
)
from .routing import part

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)


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
