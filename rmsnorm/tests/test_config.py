"""Launch configurations: what the heuristics may return, and how tables are looked up."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .oracle import part

SOURCES = Path(__file__).resolve().parents[1] / "torch-ext" / "rmsnorm" / "configs"
TABLES = sorted(path.name for path in SOURCES.glob("*.json"))
CPU = torch.device("cpu")
LARGEST_BLOCK = 2**20  # elements of a tensor that Triton compiles
MOST_PER_THREAD = 64  # float32 registers of one tile; a thread has 255

rows_and_columns = {"rows": st.integers(1, 2**31 - 1), "n": st.integers(1, 2**21)}


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def check_tile(tile: object, elements: int) -> None:
    assert is_power_of_two(tile.block_m) and is_power_of_two(tile.block_n), tile
    assert is_power_of_two(tile.num_warps) and tile.num_warps <= 32, tile
    assert elements <= LARGEST_BLOCK and elements / (32 * tile.num_warps) <= MOST_PER_THREAD, tile


def check_forward_tile(tile: object, n: int) -> None:
    check_tile(tile, tile.block_m * tile.block_n)
    assert tile.passes in (1, 2) and is_power_of_two(tile.unroll)
    assert tile.passes == 2 or tile.block_n >= n, f"{tile} reads a part of {n} columns"


def check_backward_tile(kernel: ModuleType, tile: object, n: int) -> None:
    if tile.programs:
        check_tile(tile, tile.block_m * tile.block_n)
        assert tile.block_n >= n, f"{tile} reads a part of {n} columns"
    else:
        # A program has a piece of one row, or the sums of a few columns.
        check_tile(tile, max(tile.block_n, tile.block_m * part(kernel, "launch").COLUMNS))
    assert tile.programs >= 0 and 1 <= tile.num_stages <= 8, tile


@settings(deadline=None)
@given(**rows_and_columns, itemsize=st.sampled_from((2, 4)))
@example(rows=1, n=1, itemsize=2)
@example(rows=1, n=16384, itemsize=4)
@example(rows=1, n=16385, itemsize=2)
@example(rows=2**31 - 1, n=2**20, itemsize=2)
def test_forward_heuristic(kernel: ModuleType, rows: int, n: int, itemsize: int) -> None:
    config = part(kernel, "config")
    tile = config.forward_heuristic(rows, n, itemsize)
    check_forward_tile(tile, n)
    assert tile == config.forward_heuristic(rows, n, itemsize)


@settings(deadline=None)
@given(
    **rows_and_columns,
    itemsize=st.sampled_from((2, 4)),
    shared_memory=st.sampled_from((64 << 10, 99 << 10, 163 << 10, 227 << 10)),
    multiprocessors=st.integers(1, 304),
)
def test_backward_heuristic(
    kernel: ModuleType,
    rows: int,
    n: int,
    itemsize: int,
    shared_memory: int,
    multiprocessors: int,
) -> None:
    """Cases B115, B116: what a loop loads ahead fits the shared memory of the device."""
    config = part(kernel, "config")
    tile = config.backward_heuristic(rows, n, itemsize, shared_memory)
    check_backward_tile(kernel, tile, n)
    if tile.num_stages > 1:
        tensors = 3  # h, dy and the gradient of the sum
        ahead = tile.num_stages * tensors * tile.block_m * tile.block_n * itemsize
        assert ahead <= shared_memory, tile
    if tile.programs:
        programs = config.backward_programs(tile, rows, multiprocessors)
        assert 1 <= programs <= min(-(-rows // tile.block_m), multiprocessors * tile.programs)
    else:
        assert 1 <= config.backward_block(rows, n, itemsize) <= rows


TABLE = {
    "forward": {
        "16bit": {
            "64": {
                "1": {"block_m": 1, "block_n": 64, "num_warps": 1, "passes": 1, "unroll": 1},
                "16": {"block_m": 4, "block_n": 64, "num_warps": 2, "passes": 1, "unroll": 1},
                "4096": {"block_m": 16, "block_n": 64, "num_warps": 4, "passes": 1, "unroll": 1},
            }
        }
    },
    "backward": {
        "32bit": {
            "64": {
                "16": {
                    "block_m": 2, "block_n": 64, "num_warps": 2, "num_stages": 1, "programs": 3,
                }
            }
        }
    },
}  # fmt: skip


@pytest.fixture
def tables(kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that holds the tables instead of the shipped one."""
    config = part(kernel, "config")
    monkeypatch.setattr(config, "CONFIGS", tmp_path)
    for lookup in (config.forward_config, config.backward_config):
        lookup.cache_clear()
    yield tmp_path
    for lookup in (config.forward_config, config.backward_config):
        lookup.cache_clear()


@pytest.mark.parametrize(
    ("rows", "nearest"),
    ((1, 1), (2, 1), (4, 1), (8, 16), (16, 16), (256, 16), (512, 4096), (2**20, 4096)),
)
@pytest.mark.parametrize("kind", ("float16", "bfloat16"))
def test_nearest_number_of_rows(
    kernel: ModuleType, tables: Path, kind: str, rows: int, nearest: int
) -> None:
    """By ratio, and the smaller of two as near; both dtypes of 16 bits share an entry."""
    (tables / "cpu.json").write_text(json.dumps(TABLE))
    config = part(kernel, "config")
    found = config.forward_config(rows, 64, getattr(torch, kind), False, CPU)
    assert dataclasses.asdict(found) == TABLE["forward"]["16bit"]["64"][str(nearest)]


def test_what_no_table_holds(kernel: ModuleType, tables: Path) -> None:
    """Another width, dtype or operation takes the heuristic's tile."""
    (tables / "cpu.json").write_text(json.dumps(TABLE))
    config = part(kernel, "config")
    tuned = config.backward_config(4, 64, torch.float32, CPU)
    assert (tuned.block_m, tuned.num_warps, tuned.programs) == (2, 2, 3)
    for n, dtype, fused_add in (
        (128, torch.float16, False), (64, torch.float32, False), (64, torch.float16, True)
    ):  # fmt: skip
        found = config.forward_config(4, n, dtype, fused_add, CPU)
        assert found == config.forward_heuristic(4, n, dtype.itemsize)


def test_missing_table_is_said_once(
    kernel: ModuleType, tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = part(kernel, "config")
    with caplog.at_level(logging.DEBUG, logger=kernel.__name__):
        for rows in (1, 2, 4):
            assert config.forward_config(rows, 64, torch.float16, False, CPU)
            assert config.backward_config(rows, 64, torch.float16, CPU)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "cpu" in record.getMessage() and str(tables) in record.getMessage()


@pytest.mark.parametrize("rows", (1, 2, 3, 4, 5, 1000, 1024, 1025))
def test_row_bucket(kernel: ModuleType, rows: int) -> None:
    bucket = part(kernel, "_shared.table").row_bucket(rows)
    assert is_power_of_two(bucket) and bucket >= rows > bucket / 2


@pytest.mark.parametrize("name", TABLES)
def test_shipped_table(kernel: ModuleType, name: str) -> None:
    """Each entry is a configuration that its width can take, under keys that are looked up."""
    config = part(kernel, "config")
    table = json.loads((config.CONFIGS / name).read_text())
    assert table and set(table) <= {"forward", "add_forward", "backward"}
    for operation, by_width in table.items():
        assert by_width and set(by_width) <= {"16bit", "32bit"}
        for by_size in by_width.values():
            for n, by_rows in by_size.items():
                for rows, entry in by_rows.items():
                    assert is_power_of_two(int(rows))
                    if operation == "backward":
                        check_backward_tile(kernel, config.BackwardConfig(**entry), int(n))
                    else:
                        check_forward_tile(config.ForwardConfig(**entry), int(n))


def test_configurations_are_values(kernel: ModuleType) -> None:
    """Hashable and frozen: they are keys of compiled kernels."""
    config = part(kernel, "config")
    for tile in (config.forward_heuristic(1, 64, 2), config.SUM_TILE):
        assert hash(tile) == hash(dataclasses.replace(tile))
        with pytest.raises(dataclasses.FrozenInstanceError):
            tile.block_m = 2
