"""Launch configurations: what was tuned on a device, else a heuristic on sizes alone."""

import functools
import pathlib
from dataclasses import dataclass

import torch

from ._shared import table
from ._shared.device import device_name

CONFIGS = pathlib.Path(__file__).parent / "configs"


@dataclass(frozen=True)
class ForwardConfig:
    """Elements and warps of a program."""

    block: int
    num_warps: int


def forward_heuristic(elements: int) -> ForwardConfig:
    """Return a configuration for a tensor of so many elements."""
    # 8 elements a thread make loads of 16 bytes in 16 bits; small tensors take one warp.
    return ForwardConfig(1024, 4) if elements > 256 else ForwardConfig(256, 1)


@functools.cache
def forward_config(elements: int, dtype: torch.dtype, device: torch.device) -> ForwardConfig:
    """Return the configuration of a call; `elements` is a bucket of `table.row_bucket`."""
    shipped = table.load(CONFIGS, device_name(device))
    # Every element is a row of its own: nothing else about the shape matters.
    entry = table.find(shipped, "forward", str(dtype).removeprefix("torch."), 1, elements)
    return forward_heuristic(elements) if entry is None else ForwardConfig(**entry)
