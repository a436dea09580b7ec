"""Launch configurations: what the heuristics may return, and bounds."""

from __future__ import annotations

import dataclasses
import os
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .configurations import (
    DEVICES,
    check_decode,
    check_gemm,
    check_score,
    device_of,
    is_power_of_two,
)
from .routing import part

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="configurations are chosen the same with and without the interpreter",
)
CPU = torch.device("cpu")


# -------------------------------------------------------------------------------------- heuristics
@settings(deadline=None, max_examples=300)
@given(
    rows=st.floats(1, 1e6),
    itemsize=st.sampled_from((2, 4)),
    device=st.sampled_from(sorted(DEVICES)),
    gates=st.booleans(),
)
def test_heuristic(
    kernel: ModuleType, rows: float, itemsize: int, device: str, gates: bool
) -> None:
    """Cases B115, B116: it fits every target, and depends on its arguments alone."""
    config, target = part(kernel, "config"), device_of(kernel, device)
    tile = config.heuristic(rows, itemsize, target, gates=gates)
    assert tile == config.heuristic(rows, itemsize, target, gates=gates)  # pure
    assert config.whole(tile) == dataclasses.replace(tile, extra=0, tall=0)
    small = config.small_steps(tile)
    assert (small.heights, small.boxes) == (tile.heights, False)
    for each in (tile, config.whole(tile), small):
        check_gemm(kernel, each, itemsize, target, gates=gates)


@settings(deadline=None, max_examples=200)
@given(
    bucket=st.integers(0, 15).map(lambda each: 1 << each),
    experts=st.integers(1, 1024),
    hidden=st.integers(1, 2**16),
    top_k=st.integers(1, 32),
    itemsize=st.sampled_from((2, 4)),
    device=st.sampled_from(sorted(DEVICES)),
)
@example(32768, 1024, 4096, 8, 4, "H200")
@example(32768, 1024, 4096, 8, 2, "H200")
@example(32768, 1, 64, 1, 4, "H200")
def test_score_heuristic(
    kernel: ModuleType, bucket: int, experts: int, hidden: int, top_k: int, itemsize: int,
    device: str,
) -> None:  # fmt: skip
    """It fits, holds whole blocks of the dispatch, and needs no more counters than there are."""
    config, target = part(kernel, "config"), device_of(kernel, device)
    arguments = bucket, experts, hidden, itemsize, target
    tile = config.score_heuristic(*arguments)
    assert tile == config.score_heuristic(*arguments)
    check_score(tile, itemsize, target)
    assert bucket <= config.MOST_TOKENS
    block = config.block_tokens(bucket, min(top_k, experts))
    whole = max(tile.tokens, block)
    assert whole % block == 0
    blocks, slabs = -(-bucket // whole), -(-experts // tile.experts)
    counters = blocks * slabs + blocks
    assert counters <= part(kernel, "_shared.arrivals").MOST, (arguments, tile, counters)
    steps = -(-hidden // tile.block_k)
    assert tile.splits <= steps
    # Parts of shared tiles: as many programs as are resident, about.
    assert tile.splits == 1 or blocks * slabs * tile.splits <= 2 * target.multiprocessors


@pytest.mark.parametrize("itemsize", (2, 4))
def test_decode_heuristic(kernel: ModuleType, itemsize: int) -> None:
    check_decode(part(kernel, "config").decode_heuristic(itemsize))


def test_ladders_have_no_gaps(kernel: ModuleType) -> None:
    """More rows never mean a lower tile, and the last step serves all that follow."""
    config = part(kernel, "config")
    for device in DEVICES:
        for gates in (False, True):
            for itemsize in (2, 4):
                heights = [
                    config.heuristic(rows, itemsize, device_of(kernel, device), gates=gates).tokens
                    for rows in (1, 5, 10, 11, 26, 27, 52, 80, 81, 110, 180, 181, 10**9)
                ]
                assert heights == sorted(heights)


# ------------------------------------------------------------------------------------------ bounds
def tiles_of(count: int, height: int, extra: int, tall: int = 0) -> list[int]:
    """Return the rows of each tile of an expert, as the kernels' comment says."""
    if tall and count > tall:
        height, extra = tall, 0
    full, rest = divmod(count, height)
    if rest == 0:
        return [height] * full
    if rest <= full * extra:
        grown = [max(0, min(extra, rest - j * extra)) for j in range(full)]
        return [height + more for more in grown]
    even, odd = divmod(count, full + 1)
    return [even + (j < odd) for j in range(full + 1)]


@settings(deadline=None, max_examples=400)
@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    height=st.sampled_from((16, 32, 64, 128)),
    extra=st.sampled_from((0, 16, 32)),
    tall=st.sampled_from((0, 64, 128, 256)),
    skipped=st.integers(0, 50),
)
@example([1] * 40, 16, 0, 0, 0)
@example([17, 1, 1, 1], 16, 0, 0, 0)
@example([0, 0, 0], 16, 0, 0, 0)
@example([300], 128, 0, 256, 0)
def test_most_tiles(
    kernel: ModuleType, counts: list[int], height: int, extra: int, tall: int, skipped: int
) -> None:
    """The grid's bound holds however slots are shared out, skipped ones and grown tiles too."""
    config = part(kernel, "config")
    tall *= tall > height + extra  # as `check_gemm` has it
    tiles = [tiles_of(count, height, extra, tall) for count in counts]
    assert [sum(each) for each in tiles] == counts
    assert all(1 <= rows <= max(height + extra, tall) for each in tiles for rows in each)
    most = config.most_tiles(sum(counts) + skipped, len(counts), height)
    assert sum(map(len, tiles)) <= most


@pytest.mark.parametrize("experts", (1, 2, 7, 64))
@pytest.mark.parametrize("slots", (0, 1, 6, 7, 8, 63, 64, 65, 1000))
def test_most_tiles_is_tight(kernel: ModuleType, experts: int, slots: int) -> None:
    """No bound without need: one row for each expert but one, which gets the others."""
    ones = min(slots, experts - 1)
    counts = [1] * ones + [slots - ones]
    worst = sum(len(tiles_of(count, 16, 0)) for count in counts)
    assert part(kernel, "config").most_tiles(slots, experts, 16) == worst


@settings(deadline=None, max_examples=400)
@given(st.integers(1, 2**20), st.integers(1, 32))
def test_block_tokens(kernel: ModuleType, tokens: int, top_k: int) -> None:
    """A power of two; slots of a block are compared with each other."""
    config = part(kernel, "config")
    block = config.block_tokens(config.bucket(tokens), top_k)
    assert is_power_of_two(block) and block * top_k <= config.MOST_BLOCK == 512


@settings(deadline=None, max_examples=400)
@given(
    bucket=st.integers(0, 15).map(lambda each: 1 << each),
    experts=st.integers(1, 1024),
    top_k=st.integers(1, 32),
    warps=st.sampled_from((1, 2, 4, 8, 16)),
)
def test_gate_tokens(kernel: ModuleType, bucket: int, experts: int, top_k: int, warps: int) -> None:
    """Blocks are whole numbers of them; a thread holds 16 keys, unless one token has more."""
    config = part(kernel, "config")
    block = config.block_tokens(bucket, min(top_k, experts))
    found = config.gate_tokens(block, experts, warps)
    assert is_power_of_two(found) and block % found == 0
    assert found == 1 or found * config.power_of_two(experts) <= 16 * 32 * warps


@pytest.mark.parametrize("tokens", (1, 2, 3, 4, 5, 63, 64, 65, 65535, 65536))
def test_buckets(kernel: ModuleType, tokens: int) -> None:
    """Case B65: numbers of tokens share what is compiled with those up to a power of two."""
    bucket = part(kernel, "config").bucket(tokens)
    assert is_power_of_two(bucket) and tokens <= bucket < 2 * tokens


def test_rows_per_expert(kernel: ModuleType) -> None:
    """Never less than one, nor more than there are, and no fewer with more tokens."""
    rows = part(kernel, "config").rows_per_expert
    for experts, top_k in ((1, 1), (8, 2), (8, 8), (256, 8), (1024, 32)):
        found = [rows(tokens, experts, top_k) for tokens in (1, 2, 3, 16, 100, 4096, 65536)]
        assert found == sorted(found) and found[0] >= 1
        assert found[-1] >= 65536 * top_k / experts
    assert rows(100, 1, 1) == 100


def test_who_decodes(kernel: ModuleType) -> None:
    """One token always; a few only where no two of them are likely to share an expert."""
    config = part(kernel, "config")
    for experts, top_k in ((1, 1), (8, 2), (256, 8), (1024, 1)):
        sizes = config.Sizes(experts, top_k, 64, 64, 2)
        assert config.decodes(1, sizes) and not config.decodes(5, sizes)
    assert config.decodes(2, config.Sizes(256, 8, 64, 64, 2))
    assert not config.decodes(2, config.Sizes(8, 2, 64, 64, 2))
