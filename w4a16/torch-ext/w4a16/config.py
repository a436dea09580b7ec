"""Launch configurations: what was tuned on a device, else a heuristic on sizes alone."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ._shared import table
from ._shared.device import (
    device_name,
    has_triton,
    multiprocessor_count,
    on_nvidia,
    shared_memory,
    smallest_dot,
    target_arch,
)

#: Fewest tokens of a tile.
SMALLEST_M = smallest_dot()

CONFIGS = pathlib.Path(__file__).parent / "configs"

#: Up to this number of tokens the weight is converted inside the product. Above it is dequantised
#: once and cuBLAS (or hipBLAS) multiplies. On an H200 at 512 tokens the product is ahead on large
#: layers, level or up to 5 % behind on small ones.
MOST_FUSED = 512
#: The same where scales can only be applied after the product, which takes small tiles.
MOST_FUSED_AFTER = 64
#: Bytes of the dequantised weight that exist at a time; a larger one is taken in slices of rows.
SCRATCH_BYTES = 128 * 2**20
#: Steps of 128 input features that a program gets at least when a tile is shared: what it adds up
#: has to be much more than what it leaves for the others to add.
FEWEST_STEPS = 4


@dataclass(frozen=True)
class GemmConfig:
    """Tile of the product, and how many programs share the work.

    Attributes:
        block_m: Tokens of a tile.
        block_n: Output features of a tile.
        num_warps: Warps of a program.
        num_stages: Steps in flight in a program's loop.
        scale_before: Whether weights are scaled before the product (less work for 64 tokens and
            more; rounds as a dequantised weight does) or the product afterwards.
        max_registers: The most registers of a thread; 0 leaves it to the compiler.
        programs: Programs among which all steps of all tiles are divided evenly; 0 gives each
            tile one of its own. Bounds the workspace: two tiles of float32 a program.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    scale_before: bool
    max_registers: int
    programs: int


@dataclass(frozen=True)
class DequantizeConfig:
    """Rows and warps of a program of the dequantising kernel."""

    block_n: int
    num_warps: int


#: Of six tried on an H200 the fastest, or within a microsecond of it, on each of four layers.
DEQUANTIZE = DequantizeConfig(64, 8)


def tuned(entry: Mapping[str, int]) -> GemmConfig:
    """Return the configuration of a table's entry."""
    config = GemmConfig(**entry)  # type: ignore[arg-type]  # JSON's true and false are bools
    return dataclasses.replace(config, block_m=max(config.block_m, SMALLEST_M))


def bucket(tokens: int) -> int:
    """Return the number of tokens that stands for this one: a power of two, 8 at least."""
    return max(8, table.row_bucket(tokens))


def tiles(tokens: int, n: int, config: GemmConfig) -> int:
    """Return the tiles of a product."""
    return -(-tokens // config.block_m) * -(-n // config.block_n)


def steps_per_program(tokens: int, n: int, steps: int, config: GemmConfig) -> int:
    """Return how many steps each program takes, of all tiles' steps in one line."""
    if not config.programs:
        return steps
    return -(-tiles(tokens, n, config) * steps // config.programs)


def slice_rows(n: int, k: int, itemsize: int) -> int:
    """Return how many rows are dequantised at a time: even slices, of whole tiles if they fit."""
    most = max(1, SCRATCH_BYTES // (k * itemsize))
    slices = -(-n // most)
    return min(n, most, -(-n // (slices * 256)) * 256)


def heuristic(
    tokens: int,
    n: int,
    k: int,
    *,
    after_only: bool,
    multiprocessors: int,
    shared_memory: int,
    arch: int,
) -> GemmConfig:
    """Return a configuration for a product that no table holds.

    Args:
        tokens: A bucket of `bucket`.
        n: Output features.
        k: Input features.
        after_only: Whether scales have to be applied after the product.
        multiprocessors: Multiprocessors (compute units) of the device.
        shared_memory: Bytes of shared memory (LDS) that a program may use.
        arch: Compute capability, 90 for instance; 0 for AMD.
    """
    # Steps of all tiles of 128 rows a multiprocessor: what there is to share.
    share = -(-n // 128) * -(-k // 128) // multiprocessors
    if arch:
        small, smaller = share < 32, share < 16
        block_m, block_n, warps, stages, before, resident = {
            8: (SMALLEST_M, 64, 2, 3, False, 4) if small else (SMALLEST_M, 128, 2, 4, False, 4),
            16: (16, 64, 2, 3, False, 4) if small else (16, 128, 2, 3, False, 4),
            32: (32, 64, 4, 4, False, 2) if smaller else (32, 128, 4, 3, False, 3),
        }.get(tokens, (64, 128, 4, 3, True, 2))
        if arch < 90 and tokens >= 64:
            # Every warp keeps its operands in registers: they are shared out among more warps.
            block_m, warps, resident = min(tokens, 128), 8, 1
        elif arch == 90 and tokens > (128 if smaller else 64):
            block_m = 128
    else:
        block_m, block_n, warps, stages, before, resident = {
            8: (16, 64, 4, 2, False, 4),
            16: (16, 64, 4, 2, False, 4),
            32: (32, 64, 4, 2, False, 2),
        }.get(tokens, (64, 128, 8, 2, True, 2))
    if after_only and block_m >= 32:
        # The product needs registers of its own beside the sum, its correction some more.
        block_m, block_n, warps, before = 32, 64, 4, False
    while stages > 2 and stages * step_bytes(block_m, block_n) > shared_memory:
        stages -= 1
    config = GemmConfig(block_m, block_n, warps, stages, before, 0, 1)
    steps = -(-k // 128)
    count = tiles(tokens, n, config)
    programs = min(multiprocessors * resident, max(count, count * steps // FEWEST_STEPS))
    if count >= 4 * programs:
        programs = 0  # many tiles a program: the last, uneven round hardly counts
    return GemmConfig(block_m, block_n, warps, stages, before, 0, programs)


def step_bytes(block_m: int, block_n: int) -> int:
    """Return the bytes of shared memory that a step in flight takes: tokens, codes and scales."""
    return block_m * 128 * 2 + block_n * (64 + 4)


@functools.cache
def gemm_config(tokens: int, n: int, k: int, after_only: bool, device: torch.device) -> GemmConfig:
    """Return the configuration of a product; `tokens` is a bucket of `bucket`."""
    entry = table.find(
        table.load(CONFIGS, device_name(device)), "gemm", "16bit", f"{k}x{n}", tokens
    )
    if entry is not None:
        config = tuned(entry)
        if not (config.scale_before and after_only):
            return config
    return heuristic(
        tokens,
        n,
        k,
        after_only=after_only,
        multiprocessors=multiprocessor_count(device),
        shared_memory=shared_memory(device),
        arch=target_arch() if has_triton() and on_nvidia() else 0,
    )
