"""Launch configurations: what the heuristics may return, bounds, and how tables are looked up."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monorepo.manifest import Manifest

from .routing import part

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="configurations are chosen the same with and without the interpreter",
)
SOURCES = Path(__file__).resolve().parents[1] / "torch-ext" / "moe_dispatch" / "configs"
TABLES = sorted(path.name for path in SOURCES.glob("*.json"))
CPU = torch.device("cpu")
#: Multiprocessors, bytes of shared memory of a program, architecture (0 is AMD).
DEVICES = {
    "A100": (108, 163 << 10, 80),
    "L4": (58, 99 << 10, 89),
    "H200": (132, 227 << 10, 90),
    "B200": (148, 227 << 10, 100),
    "5090": (170, 99 << 10, 120),
    "MI300X": (304, 64 << 10, 0),
    "MI355X": (256, 160 << 10, 0),
} | {
    f"{target.backend} {target.arch}": (
        128,
        target.shared_memory,
        target.arch if isinstance(target.arch, int) else 0,
    )
    for target in Manifest.load(Path(__file__).resolve().parents[2]).targets
}
CACHED = ("gemm_config", "score_config", "decode_config")
OPERATIONS = {
    "up": "GemmConfig",
    "down": "GemmConfig",
    "score": "ScoreConfig",
    "decode up": "DecodeConfig",
    "decode down": "DecodeConfig",
}


def device_of(kernel: ModuleType, name: str) -> Any:
    return part(kernel, "config").Device(*DEVICES[name])


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def check_gemm(kernel: ModuleType, tile: Any, itemsize: int, device: Any, *, gates: bool) -> None:
    """Raise unless a tile is one that the kernels take, and fits."""
    for field in ("tokens", "block_n", "block_k", "num_warps"):
        assert is_power_of_two(getattr(tile, field)), tile
    assert 16 <= tile.tokens <= 256 and 16 <= tile.block_n <= 256 and tile.block_k >= 16, tile
    assert tile.extra == 0 or (is_power_of_two(tile.extra) and 16 <= tile.extra <= tile.tokens)
    assert tile.num_warps in (1, 2, 4, 8, 16) and 1 <= tile.num_stages <= 8, tile
    assert tile.group >= 0, tile
    assert not (tile.rows_by_box and (tile.extra or not tile.boxes)), tile
    assert not (tile.boxes and (itemsize != 2 or not device.boxes)), tile
    assert not (tile.wide and (tile.swap or not gates)), tile
    # Tall tiles are for more rows than the others have, in the same memory.
    assert tile.tall == 0 or (is_power_of_two(tile.tall) and tile.tall > tile.tokens + tile.extra)
    # On AMD one of the steps in flight is in registers.
    held = 0 if device.arch else 1
    for rows, stages in (
        (tile.tokens + tile.extra, tile.num_stages), (tile.tall, tile.tall_stages(gates=gates))
    ):  # fmt: skip
        step = tile.step_elements(rows, gates=gates) * itemsize
        assert (stages - held) * step <= device.shared_memory, tile
    # The sums alone: a thread has 255 registers.
    sums = max(tile.tokens + tile.extra, tile.tall) * tile.block_n * (2 if gates else 1)
    assert sums / (32 * tile.num_warps) < 255, tile


def check_score(tile: Any, itemsize: int, device: Any) -> None:
    """Raise unless a tile of the router's product is one that the kernel takes, and fits."""
    for field in ("tokens", "experts", "block_k", "num_warps"):
        assert is_power_of_two(getattr(tile, field)), tile
    assert min(tile.tokens, tile.experts, tile.block_k) >= 16 and 1 <= tile.splits <= 64, tile
    assert is_power_of_two(tile.parts), tile
    held = 0 if device.arch else 1
    step = (tile.tokens + tile.experts) * tile.block_k * itemsize
    assert (tile.num_stages - held) * step <= device.shared_memory, tile


def check_decode(tile: Any) -> None:
    """Raise unless a configuration for a few tokens is one that the kernels take."""
    for field in ("block_n", "block_k", "num_warps"):
        assert is_power_of_two(getattr(tile, field)), tile
    assert 1 <= tile.num_stages <= 8, tile
    assert tile.block_n * tile.block_k / (32 * tile.num_warps) < 255, tile  # its sums


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


# ------------------------------------------------------------------------------------------ tables
SIZE, NAME = (8, 2, 64, 32), "8x2x64x32"
GEMM = {
    "tokens": 64, "extra": 0, "tall": 128, "block_n": 32, "block_k": 32, "num_warps": 4,
    "num_stages": 2, "swap": False, "boxes": True, "rows_by_box": False, "wide": False, "group": 7,
}  # fmt: skip
SCORE = {
    "tokens": 16, "experts": 16, "block_k": 32, "splits": 3, "num_warps": 4, "num_stages": 2
}  # fmt: skip
DECODE = {"block_n": 2, "block_k": 64, "num_warps": 2, "num_stages": 3}
TABLE = {
    "up": {"16bit": {NAME: {"16": GEMM}}},
    "down": {"16bit": {NAME: {"16": {**GEMM, "group": 3}}}},
    "score": {"16bit": {NAME: {"16": SCORE}}},
    "decode up": {"16bit": {NAME: {"1": DECODE}}},
    "decode down": {"16bit": {NAME: {"1": {**DECODE, "block_n": 4}}}},
}


@pytest.fixture
def fresh(kernel: ModuleType) -> Iterator[None]:
    """Configurations that are looked up anew, in the test and after it."""
    cached = [getattr(part(kernel, "config"), name) for name in CACHED]
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.fixture
def tables(
    kernel: ModuleType, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder that holds the tables instead of the shipped one."""
    monkeypatch.setattr(part(kernel, "config"), "CONFIGS", tmp_path)
    return tmp_path


def test_tuned_entries_are_used(kernel: ModuleType, tables: Path) -> None:
    """For their size and width, at the nearest number of tokens; others take the heuristic's."""
    (tables / "cpu.json").write_text(json.dumps(TABLE))
    config = part(kernel, "config")
    sizes = config.Sizes(*SIZE, 2)
    assert sizes.name == NAME
    for tokens in (1, 16, 4096):
        assert config.gemm_config(True, tokens, sizes, CPU) == config.GemmConfig(**GEMM)
        assert config.gemm_config(False, tokens, sizes, CPU).group == 3
        assert config.score_config(tokens, 8, 2, sizes, CPU) == config.ScoreConfig(**SCORE)
        # Its tile holds whole blocks.
        assert config.score_config(tokens, 64, 2, sizes, CPU).tokens == 64
        found = config.decode_config(True, tokens, sizes, CPU)
        assert found == config.DecodeConfig(**DECODE)
        assert config.decode_config(False, tokens, sizes, CPU).block_n == 4
    # A wider router weight is another product.
    assert config.score_config(16, 8, 4, sizes, CPU).splits != SCORE["splits"]
    here = config.of_device(CPU)
    for other in (dataclasses.replace(sizes, itemsize=4), dataclasses.replace(sizes, inner=64)):
        rows = config.rows_per_expert(16, other.experts, other.top_k)
        for gates in (False, True):
            found = config.gemm_config(gates, 16, other, CPU)
            assert found == config.heuristic(rows, other.itemsize, here, gates=gates)


def test_missing_table_is_said_once(
    kernel: ModuleType, tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = part(kernel, "config")
    sizes = config.Sizes(*SIZE, 2)
    with caplog.at_level(logging.DEBUG, logger=kernel.__name__):
        for tokens in (1, 16, 64):
            assert config.gemm_config(True, tokens, sizes, CPU)
            assert config.score_config(tokens, 16, 2, sizes, CPU)
            assert config.decode_config(True, tokens, sizes, CPU)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "cpu" in record.getMessage() and str(tables) in record.getMessage()


def check_table(kernel: ModuleType, table: Mapping[str, Any], device: str) -> None:
    """Raise unless each entry is one that the kernels take, under keys that are looked up."""
    config, target = part(kernel, "config"), device_of(kernel, device)
    most = part(kernel, "_shared.arrivals").MOST
    assert set(table) <= set(OPERATIONS)
    for operation, by_width in table.items():
        kind = getattr(config, OPERATIONS[operation])
        types = {field.name: field.type for field in dataclasses.fields(kind)}
        assert set(by_width) <= {"16bit", "32bit"}
        for width, by_size in by_width.items():
            itemsize = int(width.removesuffix("bit")) // 8
            for size, by_tokens in by_size.items():
                sizes = config.Sizes(*(int(each) for each in size.split("x")), itemsize)
                assert sizes.name == size and 1 <= sizes.experts <= 1024
                assert 1 <= sizes.top_k <= min(32, sizes.experts)
                assert min(sizes.hidden, sizes.inner) >= 1
                for tokens, entry in by_tokens.items():
                    assert str(int(tokens)) == tokens and config.bucket(int(tokens)) == int(tokens)
                    assert set(entry) == set(types), (size, tokens)
                    assert all(type(entry[name]) is types[name] for name in types), (size, tokens)
                    tile = kind(**entry)
                    if operation in ("up", "down"):
                        gates = operation == "up"
                        check_gemm(kernel, tile, itemsize, target, gates=gates)
                    elif operation == "score":
                        check_score(tile, itemsize, target)
                    else:
                        check_decode(tile)
                if operation == "score":
                    find = part(kernel, "_shared.table").find
                    for tokens in (1 << each for each in range(16)):
                        tile = kind(**find(table, operation, width, size, tokens))
                        block = config.block_tokens(tokens, sizes.top_k)
                        blocks = -(-tokens // max(tile.tokens, block))
                        assert blocks * -(-sizes.experts // tile.experts) + blocks <= most


def test_tables_ship(kernel: ModuleType) -> None:
    """What was tuned is in what is built, byte for byte."""
    built = part(kernel, "config").CONFIGS
    assert sorted(path.name for path in built.glob("*.json")) == TABLES
    for name in TABLES:
        assert (built / name).read_bytes() == (SOURCES / name).read_bytes()


@pytest.mark.parametrize("name", TABLES)
def test_shipped_tables(kernel: ModuleType, name: str) -> None:
    """Each entry is a tile that fits its device, under keys that are looked up."""
    device = next(each for each in DEVICES if name.endswith(f"_{each}.json"))
    check_table(kernel, json.loads((SOURCES / name).read_text()), device)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", TABLES)
def test_shipped_entries_are_used(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On the device that a table is named for, each entry is what its size gets."""
    config = part(kernel, "config")
    monkeypatch.setattr(config, "device_name", lambda _: name.removesuffix(".json"))
    for operation, by_width in json.loads((SOURCES / name).read_text()).items():
        kind = getattr(config, OPERATIONS[operation])
        for width, by_size in by_width.items():
            itemsize = int(width.removesuffix("bit")) // 8
            for size, by_tokens in by_size.items():
                sizes = config.Sizes(*(int(each) for each in size.split("x")), itemsize)
                for tokens, entry in by_tokens.items():
                    given = int(tokens), sizes, CPU
                    if operation == "score":
                        found = config.score_config(given[0], 1, itemsize, *given[1:])
                    elif operation.startswith("decode"):
                        found = config.decode_config(operation == "decode up", *given)
                    else:
                        found = config.gemm_config(operation == "up", *given)
                    assert found == kind(**entry), (operation, size, tokens)


@pytest.mark.parametrize(
    ("operation", "change"),
    (
        ("up", {"tokens": 48}),
        ("up", {"tall": 64}),
        ("up", {"tall": 192}),
        ("down", {"extra": 64}),
        ("up", {"num_stages": 50}),
        ("up", {"wide": True, "swap": True}),
        ("up", {"swap": 1}),
        ("up", {"boxes": None}),
        ("down", {"rows_by_box": True, "extra": 16}),
        ("down", {"block_n": 512}),
        ("down", {"unknown": 1}),
        ("score", {"tokens": 8}),
        ("score", {"splits": 0}),
        ("decode up", {"block_n": 3}),
        ("decode down", {"num_stages": 0}),
    ),
    ids=str,
)
def test_a_bad_entry_is_found(
    kernel: ModuleType, operation: str, change: dict[str, object]
) -> None:
    """What looks at the shipped tables sees what is wrong with one."""
    check_table(kernel, TABLE, "H200")
    tokens, entry = next(iter(TABLE[operation]["16bit"][NAME].items()))
    bad = {operation: {"16bit": {NAME: {tokens: {**entry, **change}}}}}
    with pytest.raises(AssertionError):
        check_table(kernel, bad, "H200")


@pytest.mark.parametrize(
    "bad",
    (
        {"gemm": {}},
        {"up": {"8bit": {}}},
        {"up": {"16bit": {"8x9x64x32": {"16": GEMM}}}},
        {"up": {"16bit": {NAME: {"17": GEMM}}}},
        {"up": {"32bit": {NAME: {"16": GEMM}}}},
    ),
    ids=str,
)
def test_a_bad_key_is_found(kernel: ModuleType, bad: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_table(kernel, bad, "H200")


def test_configurations_are_values(kernel: ModuleType) -> None:
    """Hashable and frozen: they are keys of compiled kernels."""
    config = part(kernel, "config")
    for tile in (
        config.GemmConfig(**GEMM),
        config.ScoreConfig(**SCORE),
        config.DecodeConfig(**DECODE),
        config.Sizes(*SIZE, 2),
        config.of_device(CPU),
    ):
        assert hash(tile) == hash(dataclasses.replace(tile)) and tile == dataclasses.replace(tile)
        with pytest.raises(dataclasses.FrozenInstanceError):
            tile.block_n = 2
