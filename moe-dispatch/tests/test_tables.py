"""Tuned tables: how they are looked up, and that what ships is what the kernels take."""

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

from .configurations import (
    DEVICES,
    check_decode,
    check_gemm,
    check_score,
    device_of,
)
from .routing import part

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="configurations are chosen the same with and without the interpreter",
)
SOURCES = Path(__file__).resolve().parents[1] / "torch-ext" / "moe_dispatch" / "configs"
TABLES = sorted(path.name for path in SOURCES.glob("*.json"))
CPU = torch.device("cpu")
CACHED = ("gemm_config", "score_config", "decode_config")
OPERATIONS = {
    "up": "GemmConfig",
    "down": "GemmConfig",
    "score": "ScoreConfig",
    "decode up": "DecodeConfig",
    "decode down": "DecodeConfig",
}


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
