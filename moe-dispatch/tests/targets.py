"""Launches to compile for GPUs that are not there, with tensors that have sizes and no memory."""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch


def launches(kernel: ModuleType, shared_memory: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each launch, and the call that makes it."""
    config = importlib.import_module(f"{kernel.__name__}.config")
    launch = importlib.import_module(f"{kernel.__name__}.launch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for elements in (100, 4096 * 4096, 2**31 + 1):
            x = torch.empty(elements, dtype=dtype, device="meta")
            tile = config.forward_heuristic(elements)
            yield (
                f"forward {dtype} {elements} {tile}",
                lambda x=x, tile=tile: launch.forward(x, torch.empty_like(x), 0.5, tile),
            )
