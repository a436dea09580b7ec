"""Launch configurations: what the heuristic may return, and how tables are looked up."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .oracle import part

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="configurations are chosen the same with and without the interpreter",
)
SOURCES = Path(__file__).resolve().parents[1] / "torch-ext" / "w4a16" / "configs"
TABLES = sorted(path.name for path in SOURCES.glob("*.json"))
CPU = torch.device("cpu")
#: Multiprocessors, bytes of shared memory of a program, architecture (0 is AMD).
DEVICES = {
    "A100": (108, 163 << 10, 80),
    "L4": (58, 99 << 10, 89),
    "4090": (128, 99 << 10, 89),
    "H100": (132, 227 << 10, 90),
    "H200": (132, 227 << 10, 90),
    "B200": (148, 227 << 10, 100),
    "5090": (170, 99 << 10, 120),
    "MI300X": (304, 64 << 10, 0),
    "MI355X": (256, 160 << 10, 0),
}
BUCKETS = (8, 16, 32, 64, 128, 256, 512)
#: Numbers of tokens that the documentation says share their bits.
BATCHES = ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128))


@pytest.fixture(autouse=True)
def no_target(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a GPU there is no architecture to ask Triton for."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    lookups = config.gemm_config, ops._tile
    for lookup in lookups:
        lookup.cache_clear()
    monkeypatch.setattr(config, "has_triton", lambda: False)
    yield
    for lookup in lookups:
        lookup.cache_clear()


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def heuristic(kernel: ModuleType, device: str, tokens: int, n: int, k: int, after: bool = False):
    processors, shared_memory, arch = DEVICES[device]
    return part(kernel, "config").heuristic(
        tokens,
        n,
        k,
        after_only=after,
        multiprocessors=processors,
        shared_memory=shared_memory,
        arch=arch,
    )


def check_tile(kernel: ModuleType, tile: object) -> None:
    config = part(kernel, "config")
    for field in ("block_m", "block_n", "num_warps"):
        assert is_power_of_two(getattr(tile, field)), tile
    assert config.SMALLEST_M <= tile.block_m <= 128 and 32 <= tile.block_n <= 256, tile
    assert tile.num_warps <= 16 and 1 <= tile.num_stages <= 8, tile
    # The sum alone: a thread has 255 registers.
    assert tile.block_m * tile.block_n / (32 * tile.num_warps) <= 128, tile
    assert tile.max_registers == 0 or 32 <= tile.max_registers <= 255, tile
    assert tile.programs >= 0, tile


sizes = {
    "tokens": st.integers(1, 512),
    "n": st.integers(1, 2**21 - 1).map(lambda each: 8 * each),
    "k": st.integers(1, 2**12).map(lambda each: 32 * each),
}


@settings(deadline=None, max_examples=400)
@given(**sizes, after=st.booleans(), device=st.sampled_from(sorted(DEVICES)))
def test_heuristic(
    kernel: ModuleType, tokens: int, n: int, k: int, after: bool, device: str
) -> None:
    """Cases B115, B116, B133: it fits, shares out all work once, and needs a bounded workspace."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    bucket = config.bucket(tokens)
    tile = heuristic(kernel, device, bucket, n, k, after)
    check_tile(kernel, tile)
    processors, shared_memory, _ = DEVICES[device]
    assert tile.num_stages * config.step_bytes(tile.block_m, tile.block_n) <= shared_memory
    assert not (after and tile.scale_before)
    assert tile == heuristic(kernel, device, bucket, n, k, after)  # pure
    steps = -(-k // 128)
    count = config.tiles(tokens, n, tile)
    per, shared, size = ops._shares(tokens, n, steps, tile)
    programs = -(-count * steps // per)
    assert programs * per >= count * steps > (programs - 1) * per
    assert 1 <= shared <= part(kernel, "_shared.arrivals").MOST
    if per % steps == 0:
        assert size == 0
    else:
        # Each shared tile has its counter; CARD.md: two tiles of float32 a program.
        assert shared == count and programs <= tile.programs
        assert size == 2 * programs * tile.block_m * tile.block_n
    # A program a tile, or as many as are resident.
    assert tile.programs <= max(4 * processors, config.tiles(bucket, n, tile))


@pytest.mark.parametrize(
    "tokens",
    (
        1,
        64,
        512,
        300,
    ),
)
@pytest.mark.parametrize("size", ((128256, 8192), (53248, 16384)), ids=str)
@pytest.mark.parametrize("device", ("A100", "H200", "B200", "MI300X"))
def test_workspace_is_bounded(
    kernel: ModuleType, device: str, size: tuple[int, int], tokens: int
) -> None:
    """CARD.md, case B43: two tiles for each program that is resident, in float32."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    n, k = size
    tile = heuristic(kernel, device, config.bucket(tokens), n, k)
    words = ops._shares(tokens, n, -(-k // 128), tile)[2]
    assert words <= 2 * 4 * DEVICES[device][0] * tile.block_m * tile.block_n


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("after", (False, True))
def test_a_bucket_has_one_number_of_tiles(kernel: ModuleType, device: str, after: bool) -> None:
    """Else a token's bits would depend on how many share its batch, against what is said."""
    config = part(kernel, "config")
    for n, k in ((2048, 7168), (28672, 8192), (192, 7168), (8, 32)):
        for first, last in BATCHES:
            if after and last > config.MOST_FUSED_AFTER:
                continue  # never fused
            tile = heuristic(kernel, device, config.bucket(last), n, k, after)
            shares = {
                part(kernel, "ops")._shares(tokens, n, -(-k // 128), tile)
                for tokens in range(first, last + 1)
            }
            assert len(shares) == 1, (tile, first, last)


def test_buckets(kernel: ModuleType) -> None:
    """Case B65: as few as there are tiles; each holds the numbers above the one before."""
    config = part(kernel, "config")
    found = {tokens: config.bucket(tokens) for tokens in range(1, config.MOST_FUSED + 1)}
    assert sorted(set(found.values())) == list(BUCKETS)
    assert all(is_power_of_two(b) and b >= t and (b == 8 or b < 2 * t) for t, b in found.items())


@pytest.mark.parametrize("tokens", (1, 64, 65, 512, 513, 10**6))
@pytest.mark.parametrize("zeros", (None, torch.int16, torch.float32), ids=str)
@pytest.mark.parametrize("scales", (torch.float16, torch.bfloat16, torch.float32), ids=str)
def test_which_path(
    kernel: ModuleType, scales: torch.dtype, zeros: torch.dtype | None, tokens: int
) -> None:
    """Few tokens inside the product, many by dequantising; where scales come after, fewer."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    tile = ops._tile(tokens, 4096, 4096, scales, zeros, CPU)
    after = torch.float32 in (scales, zeros)
    assert (tile is None) == (tokens > (config.MOST_FUSED_AFTER if after else config.MOST_FUSED))
    assert tile is None or not (after and tile.scale_before)


@pytest.mark.parametrize(
    "size",
    (
        (28672, 8192),
        (25600, 5120),
        (128256, 4096),
        (15880, 8224),
        (2048, 2**20),
    ),
    ids=str,
)
def test_scratch_is_bounded(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """w4a16_gemm's documentation: at most 128 MiB of the dequantised weight at a time."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    n, k = size
    taken = []
    launch = type("Launch", (), {"dequantize": staticmethod(lambda _, out, *__: taken.append(out))})
    monkeypatch.setattr(ops, "launch", launch, raising=False)
    monkeypatch.setattr(torch, "mm", lambda *_, **__: None)
    shape = type("Sizes", (), {"out_features": n, "in_features": k})
    x = torch.empty(600, k, dtype=torch.float16, device="meta")
    ops.by_dequantizing(x, shape, None, torch.empty(600, n, dtype=torch.float16, device="meta"))
    assert sum(each.shape[0] for each in taken) == n
    assert max(each.nbytes for each in taken) <= config.SCRATCH_BYTES


ENTRY = {
    "block_m": 32, "block_n": 64, "num_warps": 4, "num_stages": 2, "scale_before": True,
    "max_registers": 0, "programs": 7,
}  # fmt: skip


@pytest.fixture
def tables(kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that holds the tables instead of the shipped one."""
    config = part(kernel, "config")
    monkeypatch.setattr(config, "CONFIGS", tmp_path)
    config.gemm_config.cache_clear()
    yield tmp_path
    config.gemm_config.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "nearest"), ((8, 8), (16, 8), (32, 8), (64, 128), (128, 128), (512, 128))
)
def test_nearest_number_of_tokens(
    kernel: ModuleType, tables: Path, tokens: int, nearest: int
) -> None:
    """By ratio, and the smaller of two as near."""
    entries = {str(each): {**ENTRY, "programs": each} for each in (8, 128)}
    (tables / "cpu.json").write_text(json.dumps({"gemm": {"16bit": {"96x64": entries}}}))
    found = part(kernel, "config").gemm_config(tokens, 64, 96, False, CPU)
    assert found.programs == nearest


def test_what_no_table_holds(kernel: ModuleType, tables: Path) -> None:
    """Another size takes the heuristic's tile, and so do scales that have to come after."""
    table = {"gemm": {"16bit": {"96x64": {"8": ENTRY}}}}
    (tables / "cpu.json").write_text(json.dumps(table))
    config = part(kernel, "config")
    assert config.gemm_config(8, 64, 96, False, CPU) == config.tuned(ENTRY)
    for n, k, after in ((96, 64, False), (64, 128, False), (64, 96, True)):
        found = config.gemm_config(8, n, k, after, CPU)
        assert found != config.tuned(ENTRY) and not (after and found.scale_before)


def test_missing_table_is_said_once(
    kernel: ModuleType, tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = part(kernel, "config")
    with caplog.at_level(logging.DEBUG, logger=kernel.__name__):
        for tokens in (8, 16, 32):
            assert config.gemm_config(tokens, 64, 96, False, CPU)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "cpu" in record.getMessage() and str(tables) in record.getMessage()


def test_tables_ship(kernel: ModuleType) -> None:
    """What was tuned is in what is built, byte for byte."""
    built = part(kernel, "config").CONFIGS
    assert TABLES and sorted(path.name for path in built.glob("*.json")) == TABLES
    for name in TABLES:
        assert (built / name).read_bytes() == (SOURCES / name).read_bytes()


@pytest.mark.parametrize("name", TABLES)
def test_shipped_table(kernel: ModuleType, name: str) -> None:
    """Each entry is a tile that fits its device, under keys that are looked up."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    table = json.loads((config.CONFIGS / name).read_text())
    assert set(table) == {"gemm"} and set(table["gemm"]) == {"16bit"}
    device = next(device for device in DEVICES if name.endswith(f"_{device}.json"))
    for size, by_tokens in table["gemm"]["16bit"].items():
        k, n = (int(each) for each in size.split("x"))
        assert k % 32 == 0 and n % 8 == 0
        assert {int(tokens) for tokens in by_tokens} <= set(BUCKETS)
        for tokens, entry in by_tokens.items():
            tile = config.tuned(entry)
            check_tile(kernel, tile)
            assert tile.block_m <= 2 * int(tokens) or tile.block_m == config.SMALLEST_M
            step = config.step_bytes(tile.block_m, tile.block_n)
            assert tile.num_stages * step <= DEVICES[device][1], (size, tokens)
            per, shared, _ = ops._shares(int(tokens), n, -(-k // 128), tile)
            assert per >= 1 and shared <= part(kernel, "_shared.arrivals").MOST
        for first, last in BATCHES:
            (bucket,) = {config.bucket(tokens) for tokens in range(first, last + 1)}
            find = part(kernel, "_shared.table").find
            tile = config.tuned(find(table, "gemm", "16bit", size, bucket))
            shares = {
                ops._shares(tokens, n, -(-k // 128), tile) for tokens in range(first, last + 1)
            }
            assert len(shares) == 1, (size, first, last)


@pytest.mark.parametrize("smallest", (8, 16))
def test_smallest_tile_of_this_triton(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, smallest: int
) -> None:
    """Triton 3.4 multiplies no fewer than 16 columns, whatever a table says."""
    config = part(kernel, "config")
    monkeypatch.setattr(config, "SMALLEST_M", smallest)
    assert config.tuned({**ENTRY, "block_m": 8}).block_m == smallest
    for device in DEVICES:
        for tokens in BUCKETS:
            tile = heuristic(kernel, device, tokens, 4096, 4096)
            assert tile.block_m >= smallest


def test_configurations_are_values(kernel: ModuleType) -> None:
    """Hashable and frozen: they are keys of compiled kernels."""
    config = part(kernel, "config")
    for tile in (config.tuned(ENTRY), config.DEQUANTIZE):
        assert hash(tile) == hash(dataclasses.replace(tile)) and tile == dataclasses.replace(tile)
        with pytest.raises(dataclasses.FrozenInstanceError):
            tile.block_n = 2
