from collections.abc import Callable, Iterator
from types import ModuleType

import torch


def launches(kernel: ModuleType, shared_memory: int) -> Iterator[tuple[str, Callable[[], None]]]:
    x = torch.empty(32768)
    y = torch.empty_like(x)
    half = x.half()

    yield "sound", lambda: kernel.scale_rows[(8,)](x, y, 1000, 2.0, BLOCK=1024)
    yield "spills", lambda: kernel.scale_rows[(1,)](x, y, 32768, 2.0, BLOCK=32768, num_warps=1)
    yield (
        "shared memory",
        lambda: kernel.matmul[(1,)](half, half, y, 4096, BLOCK=128, BLOCK_K=128, num_stages=4),
    )
    yield "float64", lambda: kernel.sum_in_float64[(1,)](x, y, BLOCK=1024)
    yield "16-bit atomic", lambda: kernel.add_to[(1,)](half, half, BLOCK=1024)
    yield "floating-point atomic", lambda: kernel.add_to[(1,)](x, y, BLOCK=1024)
    yield "grid", lambda: kernel.scale_rows[(1, 65536)](x, y, 1000, 2.0, BLOCK=1024)
    yield "threads", lambda: kernel.scale_rows[(1,)](x, y, 1000, 2.0, BLOCK=1024, num_warps=64)
    yield "does not compile", lambda: kernel.three_columns[(1,)](x, y)
    yield "no launch", lambda: None
