"""What a configuration may be, and the devices that the heuristics are asked for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from monorepo.manifest import Manifest

from .routing import part

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
