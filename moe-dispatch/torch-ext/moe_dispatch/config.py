"""Launch configurations: what was tuned on a device, else a heuristic on sizes alone."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._shared import table
from ._shared.device import (
    device_name,
    has_triton,
    multiprocessor_count,
    on_nvidia,
    shared_memory,
    target_arch,
)

CONFIGS = pathlib.Path(__file__).parent / "configs"

#: Tokens of one pass over the experts; more take several. Bounds the workspace, and the tables of
#: the dispatch, of which every program reads all.
MOST_TOKENS = 32768
#: Slots of a block of the dispatch, at most: each is compared with each.
MOST_BLOCK = 512


@dataclass(frozen=True)
class GemmConfig:
    """Tile of one of the two grouped products.

    Attributes:
        tokens: Rows of a tile.
        extra: Rows that a tile may have beyond that: what remains of an expert's rows.
        tall: Rows of a tile of an expert with more than that many, an exception among the others;
            0 for none.
        block_n: Outputs of a tile; of gate and of up, that many each.
        block_k: Length of a step.
        num_warps: Warps of a program.
        num_stages: Steps in flight.
        swap: Whether the weights are the left operand.
        boxes: Whether weights come through TMA descriptors, where they can.
        rows_by_box: Whether the rows of h do; needs `extra` 0.
        wide: Whether gate and up are one product, where their layout allows it.
        group: Tiles that run side by side on one column of weights; 0 runs along the columns.
    """

    tokens: int
    extra: int
    tall: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool
    boxes: bool
    rows_by_box: bool
    wide: bool
    group: int

    @property
    def heights(self) -> tuple[int, int, int]:
        """What an expert's rows are cut by."""
        return self.tokens, self.extra, self.tall

    def step_elements(self, rows: int, *, gates: bool) -> int:
        """Return the elements of a step in flight, of so many rows."""
        return (rows + self.block_n * (2 if gates else 1)) * self.block_k

    def tall_stages(self, *, gates: bool) -> int:
        """Return the steps in flight of a tall tile that need no more memory than the others."""
        most = self.num_stages * self.step_elements(self.tokens + self.extra, gates=gates)
        return max(2, most // self.step_elements(self.tall, gates=gates))


@dataclass(frozen=True)
class DecodeConfig:
    """Outputs, length of a step, warps and steps in flight of a program that serves one token."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ScoreConfig:
    """Tile of the router's product, and among how many programs one is shared."""

    tokens: int
    experts: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int

    @property
    def parts(self) -> int:
        """Parts of a shared tile that are on their way at a time: 64 registers of each thread."""
        return min(16, max(1, 64 * 32 * self.num_warps // (self.tokens * self.experts)))


@dataclass(frozen=True)
class Device:
    """What the heuristics know of a GPU.

    Attributes:
        multiprocessors: Multiprocessors (compute units on AMD).
        shared_memory: Bytes of shared memory (LDS) that a program may use.
        arch: Compute capability, 90 for instance; 0 for AMD.
    """

    multiprocessors: int
    shared_memory: int
    arch: int

    @property
    def boxes(self) -> bool:
        """Whether there are TMA descriptors."""
        return self.arch >= 90


@functools.cache
def of_device(device: torch.device) -> Device:
    """Return what the heuristics know of a device; the interpreter is taken for an H200."""
    if device.type != "cuda":
        return Device(4, 227 << 10, 90)
    arch = target_arch() if has_triton() and on_nvidia() else 0
    return Device(multiprocessor_count(device), shared_memory(device), arch)


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def most_tiles(slots: int, experts: int, height: int) -> int:
    """Return how many tiles of `height` rows there can be, however the slots are shared out."""
    if slots <= experts:
        return slots
    return experts - 1 + -(-(slots - experts + 1) // height)


def rows_per_expert(tokens: int, experts: int, top_k: int) -> float:
    """Return the expected rows of an expert that has any, choices being uniform."""
    return tokens * top_k / max(experts * (1 - (1 - top_k / experts) ** tokens), 1)


def block_tokens(tokens: int, top_k: int) -> int:
    """Return the tokens whose slots the dispatch takes as one block, a power of two."""
    # Blocks are compared slot by slot with themselves, and every block reads the counts of all.
    wanted = 64 if tokens > 8192 else 32 if tokens > 256 else max(4, min(16, power_of_two(tokens)))
    while wanted * top_k > MOST_BLOCK:
        wanted //= 2
    return wanted


def gate_tokens(block: int, experts: int, num_warps: int) -> int:
    """Return the tokens that choose at a time: so many that their keys fit the registers."""
    # 16 keys a thread, of 64 bits each, beside logits and weights; 8 where many tokens need
    # several programs a multiprocessor, and where there are few tokens anyhow.
    keys = (512 if block < 64 and experts <= 512 else 256) * num_warps
    return max(1, min(block, keys // power_of_two(experts)))


# -------------------------------------------------------------------------------------- heuristics
# (tokens, extra, tall, n, k, warps, stages, swap, boxes, rows by box, wide, group) of tiles up to
# so many rows an expert. For Hopper and later: weights on the left while tiles are small,
# remainders ride on full tiles, gate and up in one product where there are many rows.
_BOXED_UP = (
    (10, (16, 0, 64, 64, 128, 4, 3, True, True, False, False, 4)),
    (26, (32, 0, 128, 64, 64, 4, 5, True, True, False, False, 4)),
    (52, (32, 16, 128, 64, 64, 4, 4, True, True, False, False, 4)),
    (110, (64, 32, 128, 128, 64, 8, 4, True, True, False, False, 4)),
    (180, (128, 32, 0, 128, 64, 8, 4, True, True, False, False, 4)),
    (0, (128, 0, 0, 128, 64, 8, 4, False, True, False, True, 8)),
)
_BOXED_DOWN = (
    (10, (16, 0, 64, 128, 128, 4, 3, True, True, False, False, 4)),
    (26, (32, 0, 128, 128, 64, 4, 5, True, True, False, False, 4)),
    (52, (64, 0, 128, 128, 64, 4, 4, True, True, True, False, 4)),
    (110, (64, 16, 128, 256, 64, 8, 4, True, True, False, False, 4)),
    (180, (128, 32, 0, 256, 64, 8, 3, True, True, False, False, 4)),
    (0, (128, 0, 0, 256, 64, 8, 4, False, True, True, False, 8)),
)
_PLAIN_UP = (
    (10, (16, 0, 64, 64, 128, 4, 3, False, False, False, False, 4)),
    (26, (32, 0, 128, 64, 64, 4, 4, False, False, False, False, 4)),
    (80, (64, 0, 128, 64, 64, 4, 4, False, False, False, False, 4)),
    (0, (128, 0, 0, 64, 64, 8, 3, False, False, False, False, 8)),
)
_PLAIN_DOWN = (
    (10, (16, 0, 64, 128, 128, 4, 3, False, False, False, False, 4)),
    (26, (32, 0, 128, 128, 64, 4, 4, False, False, False, False, 4)),
    (80, (64, 0, 128, 128, 64, 4, 4, False, False, False, False, 4)),
    (0, (128, 0, 0, 128, 64, 8, 3, False, False, False, False, 8)),
)
# float32 is multiplied in float32, without tensor cores.
_FLOAT = (
    (20, (16, 0, 0, 32, 32, 4, 2, False, False, False, False, 4)),
    (0, (32, 0, 0, 32, 32, 8, 2, False, False, False, False, 4)),
)


def fitted(config: GemmConfig, itemsize: int, device: Device, *, gates: bool) -> GemmConfig:
    """Return a configuration with as many steps in flight as the device holds."""
    stages = config.num_stages if device.arch else 2
    held = 1 if not device.arch else 0  # on AMD one of the stages is in registers
    # Beside the steps there are barriers, and what changes layout on its way out.
    room = device.shared_memory - 2048
    step = config.step_elements(config.tokens + config.extra, gates=gates) * itemsize
    while stages > 2 and (stages - held) * step > room:
        stages -= 1
    return dataclasses.replace(config, num_stages=stages)


def heuristic(rows: float, itemsize: int, device: Device, *, gates: bool) -> GemmConfig:
    """Return a tile for so many rows an expert; `gates` for gate and up, else down."""
    ladder: Sequence[tuple[int, Sequence[Any]]]
    if itemsize == 4:
        ladder = _FLOAT
    elif device.boxes:
        ladder = _BOXED_UP if gates else _BOXED_DOWN
    else:
        ladder = _PLAIN_UP if gates else _PLAIN_DOWN
    for most, values in ladder:
        if rows <= most or not most:
            return fitted(GemmConfig(*values), itemsize, device, gates=gates)
    raise AssertionError("the last step of a ladder has no end")


@functools.cache
def whole(config: GemmConfig) -> GemmConfig:
    """Return a tile of one height."""
    return dataclasses.replace(config, extra=0, tall=0)


@functools.cache
def small_steps(config: GemmConfig) -> GemmConfig:
    """Return a tile of the same height for operands that take many registers to address.

    Those that are not aligned to 16 bytes come two bytes at a time, and columns by pointers have
    an address each.
    """
    return dataclasses.replace(
        config, block_n=min(config.block_n, 64), block_k=32, num_stages=2, boxes=False,
        rows_by_box=False, wide=False,
    )  # fmt: skip


def decode_heuristic(itemsize: int) -> DecodeConfig:
    """Return a configuration for a few tokens."""
    return DecodeConfig(8, 2048 // itemsize, 4, 1)


def score_heuristic(
    tokens: int, experts: int, hidden: int, itemsize: int, device: Device
) -> ScoreConfig:
    """Return a configuration of the router's product; `tokens` is a power of two."""
    # Few tokens a tile spread the choices over many multiprocessors; many share the weight.
    block_t = 16 if tokens <= 256 else 32 if tokens <= 4096 else 64
    # All experts in one tile need one arrival less; many are shared out.
    block_e = min(max(power_of_two(experts), 16), 128 if device.arch else 64)
    block_k = (256 if block_t <= 16 else 128) // itemsize
    large = tokens > 8192 or experts > 256
    if itemsize == 4:  # without tensor cores operands take registers
        block_t, block_k = (64 if large else 32), 16
        block_e = min(block_e, 128 if large else 64)
    steps = -(-hidden // block_k)
    tiles = -(-tokens // block_t) * -(-experts // block_e)
    splits = max(1, min(2 * device.multiprocessors // tiles, steps, 16))
    warps = 8 if block_e * block_t >= 2048 or experts > 256 else 4
    if itemsize == 4 and experts > 256:
        warps = 16
    step = (block_t + block_e) * block_k * itemsize
    stages = 3 if itemsize == 2 and device.arch and 3 * step <= device.shared_memory - 2048 else 2
    return ScoreConfig(block_t, block_e, block_k, splits, warps, stages)


# ------------------------------------------------------------------------------------------ tables
@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer and how its weights lie, all that tables and heuristics look at."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    itemsize: int

    @property
    def name(self) -> str:
        """The key of a table."""
        return f"{self.experts}x{self.top_k}x{self.hidden}x{self.inner}"


def _entry(
    operation: str, tokens: int, sizes: Sizes, device: torch.device
) -> Mapping[str, int] | None:
    shipped = table.load(CONFIGS, device_name(device))
    return table.find(shipped, operation, f"{8 * sizes.itemsize}bit", sizes.name, tokens)


def bucket(tokens: int) -> int:
    """Return the power of two that stands for a number of tokens."""
    return table.row_bucket(tokens)


@functools.cache
def gemm_config(gates: bool, tokens: int, sizes: Sizes, device: torch.device) -> GemmConfig:
    """Return the tile of gate and up, or of down; `tokens` is a bucket."""
    entry = _entry("up" if gates else "down", tokens, sizes, device)
    if entry is not None:
        return GemmConfig(**entry)  # type: ignore[arg-type]  # JSON's true and false are bools
    rows = rows_per_expert(tokens, sizes.experts, sizes.top_k)
    return heuristic(rows, sizes.itemsize, of_device(device), gates=gates)


@functools.cache
def score_config(
    tokens: int, block: int, itemsize: int, sizes: Sizes, device: torch.device
) -> ScoreConfig:
    """Return the configuration of the router's product; `tokens` is a bucket.

    Its tile holds whole blocks of the dispatch, `block` tokens each. `itemsize` is that of the
    wider operand.
    """
    entry = _entry("score", tokens, sizes, device) if itemsize == sizes.itemsize else None
    if entry is None:
        found = score_heuristic(tokens, sizes.experts, sizes.hidden, itemsize, of_device(device))
    else:
        found = ScoreConfig(**entry)
    return dataclasses.replace(found, tokens=max(found.tokens, block))


@functools.cache
def decode_config(gates: bool, tokens: int, sizes: Sizes, device: torch.device) -> DecodeConfig:
    """Return the configuration of a decoding kernel; `tokens` is a bucket."""
    entry = _entry("decode up" if gates else "decode down", tokens, sizes, device)
    return decode_heuristic(sizes.itemsize) if entry is None else DecodeConfig(**entry)


def decodes(tokens: int, sizes: Sizes) -> bool:
    """Return whether so few tokens are served slot by slot, each reading its own weights."""
    # Weights are read once a slot: with more, experts that several tokens share are read again.
    return tokens == 1 or (
        tokens <= 4 and rows_per_expert(tokens, sizes.experts, sizes.top_k) <= 1.1
    )
