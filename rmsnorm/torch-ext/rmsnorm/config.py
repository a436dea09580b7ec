"""Launch configurations: what was tuned on a device, else a heuristic on sizes alone."""

import functools
import pathlib
from dataclasses import dataclass

import torch

from ._shared import table
from ._shared.device import device_name, shared_memory

CONFIGS = pathlib.Path(__file__).parent / "configs"

#: The widest row that one program holds in registers, in elements: 32 elements a thread at
#: 8 warps for each of the tensors that a backward pass keeps.
WIDEST_TILE = 8192
#: From this number of rows on, a large GPU is full and throughput counts, below it latency.
MANY_ROWS = 1024
#: Up to this number of rows, one launch that reads them twice stands for two that read them once.
#: On an H200 it wins at 16 rows of every width tuned, at 256 from 5120 columns on.
FEW_ROWS = 64
#: What a block of the blocked backward kernel reads, in bytes: it has to stay in L2.
BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ForwardConfig:
    """Tile of the forward kernel.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        num_warps: Warps of a program.
        passes: 1 if the tile covers a row, which is read once; 2 reads it twice, in pieces.
        unroll: Pieces of a row that are in flight together.
    """

    block_m: int
    block_n: int
    num_warps: int
    passes: int
    unroll: int


@dataclass(frozen=True)
class BackwardConfig:
    """Tile of a backward kernel.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        num_warps: Warps of a program.
        num_stages: Tiles in flight in a program's loop; 1 means none ahead.
        programs: Programs a multiprocessor gets, each looping over tiles that cover a row. Each
            keeps a float32 sum of the weight's gradient, so their number is bounded. 0 takes
            the blocked kernel, whose tiles need not cover a row.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


#: Tile of the sum of partial gradients.
SUM_TILE = BackwardConfig(64, 32, 4, 1, 1)


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def forward_heuristic(rows: int, n: int, itemsize: int) -> ForwardConfig:
    """Return a tile for the forward pass of `rows` rows of `n` columns of `itemsize` bytes."""
    cover = _power_of_two(n)
    if n > WIDEST_TILE or (n >= 2048 and rows >= MANY_ROWS):
        # Two passes in pieces beat a whole row in registers, by 4 % and more on an H200: with 8
        # elements a thread, enough programs are resident to keep memory busy.
        block_n = 4096 if n >= 8192 else min(cover // 2, 2048)
        # Rows this wide leave few programs a multiprocessor: each has more in flight instead.
        unroll = 8 // itemsize if n > WIDEST_TILE else 1
        return ForwardConfig(1, block_n, block_n // 256, 2, unroll)
    # Narrow rows share a program until it has 1024 elements.
    block_m = max(1, min(1024 // cover, _power_of_two(rows)))
    # 32 elements a thread: four 16-byte loads in flight, and few warps to wait for.
    return ForwardConfig(block_m, cover, max(1, block_m * cover // 1024), 1, 1)


def backward_heuristic(rows: int, n: int, itemsize: int, shared_memory: int) -> BackwardConfig:
    """Return a tile for the backward pass of `rows` rows of `n` columns.

    Args:
        rows: Rows.
        n: Columns.
        itemsize: Bytes of an element.
        shared_memory: Bytes of shared memory that a program may use.
    """
    cover = _power_of_two(n)
    if n > WIDEST_TILE or rows <= FEW_ROWS:
        block_n = cover if n <= WIDEST_TILE else 4096
        return BackwardConfig(16, block_n, max(4, block_n // 512), 1, 0)
    # Tiles of 8192 elements in 8 warps, loaded two ahead, but a tile for each multiprocessor.
    # Rows that are not aligned load element by element: that takes registers, and cannot be
    # done ahead.
    aligned = n % 16 == 0
    most, per_warp = (8192, 1024) if aligned else (4096, 512)
    block_m = max(1, min(most // cover, _power_of_two(rows // MANY_ROWS * 8)))
    elements = block_m * cover
    num_warps = max(4, elements // per_warp)
    # The loop loads up to three tensors: h, dy and the gradient of the sum.
    stages = 3 if aligned and 9 * elements * itemsize <= shared_memory else 1
    return BackwardConfig(block_m, cover, num_warps, stages, max(1, 8 // num_warps))


def backward_programs(config: BackwardConfig, rows: int, multiprocessors: int) -> int:
    """Return the programs of the backward kernel, each with a sum of its own."""
    return min(-(-rows // config.block_m), multiprocessors * config.programs)


def backward_block(rows: int, n: int, itemsize: int) -> int:
    """Return the rows of a block of the blocked backward kernel, each with a sum of its own."""
    if rows <= FEW_ROWS:
        return rows
    return min(rows, max(FEW_ROWS, BLOCK_BYTES // (2 * n * itemsize)))


@functools.cache
def forward_config(
    rows: int, n: int, dtype: torch.dtype, fused_add: bool, device: torch.device
) -> ForwardConfig:
    """Return the configuration of a forward call; `rows` is a bucket of `table.row_bucket`."""
    operation = "add_forward" if fused_add else "forward"
    entry = _tuned(operation, rows, n, dtype, device)
    if entry is not None:
        return ForwardConfig(**entry)
    return forward_heuristic(rows, n, dtype.itemsize)


@functools.cache
def backward_config(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> BackwardConfig:
    """Return the configuration of a backward call; `rows` is a bucket of `table.row_bucket`."""
    entry = _tuned("backward", rows, n, dtype, device)
    if entry is not None:
        return BackwardConfig(**entry)
    return backward_heuristic(rows, n, dtype.itemsize, shared_memory(device))


def _tuned(
    operation: str, rows: int, n: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int] | None:
    shipped = table.load(CONFIGS, device_name(device))
    # float16 and bfloat16 share entries: what counts is the bytes that move.
    entry = table.find(shipped, operation, f"{dtype.itemsize * 8}bit", n, rows)
    return None if entry is None else dict(entry)
