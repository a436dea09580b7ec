"""Workloads of moe-dispatch, for `kernels benchmark` and for the repository's `scripts/bench.py`."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from kernels import Benchmark

#: rows x columns: decode, prefill and training batches.
SHAPES = ((1, 4096), (16, 4096), (2048, 4096), (8192, 8192))
FACTOR = 0.5


class MoeDispatchBenchmark(Benchmark):
    """One prefill-sized tensor, checked against PyTorch."""

    seed = 0

    def setup(self) -> None:
        """Make a tensor of 2048 x 4096; small enough for a CPU, large enough for a GPU."""
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.x = torch.randn(2048, 4096, device=self.device, dtype=dtype)

    def benchmark_moe_dispatch(self) -> None:
        """Time the multiplication."""
        self.out = self.kernel.moe_dispatch(self.x, FACTOR)

    def verify_moe_dispatch(self) -> torch.Tensor:
        """Return PyTorch's product."""
        return self.x * FACTOR


@dataclass(frozen=True)
class Workload:
    """One operation on one shape, with the implementations to time beside each other.

    Attributes:
        operation: What is computed.
        shape: (rows, columns).
        dtype: dtype of every operand.
        bytes: What has to move through memory: each operand and each result once.
        flop: Arithmetic operations.
        prepare: From a number of copies of the operands to, for each rival, one call a copy.
    """

    operation: str
    shape: tuple[int, int]
    dtype: torch.dtype
    bytes: int
    flop: int
    prepare: Callable[[int], dict[str, list[Callable[[], object]]]]


def _rivals(kernel) -> dict[str, Callable[[torch.Tensor], object]]:
    return {
        "ours": lambda x: kernel.moe_dispatch(x, FACTOR),
        "torch": lambda x: x * FACTOR,
    }


def workloads(kernel) -> Iterator[Workload]:
    """Yield what to time."""
    for dtype, (rows, n) in itertools.product((torch.bfloat16, torch.float16), SHAPES):

        def prepare(copies: int, rows=rows, n=n, dtype=dtype):
            xs = [torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(copies)]
            return {
                name: [lambda f=rival, x=x: f(x) for x in xs]
                for name, rival in _rivals(kernel).items()
            }

        moved = 2 * rows * n * dtype.itemsize
        yield Workload("forward", (rows, n), dtype, moved, rows * n, prepare)


def host_calls(kernel) -> dict[str, Callable[[], object]]:
    """Return what to time on the host: one row, so that the GPU never holds the host back."""
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    return {name: lambda f=rival: f(x) for name, rival in _rivals(kernel).items()}
