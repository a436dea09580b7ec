"""Workloads of rmsnorm, for `kernels benchmark` and for the repository's `scripts/bench.py`."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch._functorch.config
import torch.nn.functional as F
from kernels import Benchmark

#: rows x hidden: decode, prefill and training batches, odd widths, per-head norms.
SHAPES = (
    (1, 4096),
    (16, 4096),
    (2048, 4096),
    (8192, 4096),
    (16384, 8192),
    (4096, 16384),
    (8192, 5120),
    (8192, 7168),
    (65536, 128),
)
EPS = 1e-6


class RMSNormBenchmark(Benchmark):
    """The three public functions on one prefill-sized batch, checked against PyTorch."""

    seed = 0

    def setup(self) -> None:
        """Make a batch of 2048 x 4096; small enough for a CPU, large enough for a GPU."""
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.x = torch.randn(2048, 4096, device=self.device, dtype=dtype)
        self.residual = torch.randn_like(self.x)
        self.weight = torch.randn(4096, device=self.device, dtype=dtype)

    def benchmark_rmsnorm(self) -> None:
        """Time the norm."""
        self.out = self.kernel.rmsnorm(self.x, self.weight, EPS)

    def verify_rmsnorm(self) -> torch.Tensor:
        """Return PyTorch's norm."""
        return F.rms_norm(self.x, (4096,), self.weight, EPS)

    def benchmark_rmsnorm_residual_fused(self) -> None:
        """Time the norm of a sum."""
        self.out = self.kernel.rmsnorm_residual_fused(self.x, self.residual, self.weight, EPS)

    def verify_rmsnorm_residual_fused(self) -> torch.Tensor:
        """Return PyTorch's norm of the sum."""
        return F.rms_norm(self.x + self.residual, (4096,), self.weight, EPS)

    def benchmark_add_rmsnorm(self) -> None:
        """Time the norm that returns the sum too."""
        self.out, _ = self.kernel.add_rmsnorm(self.x, self.residual, self.weight, EPS)

    def verify_add_rmsnorm(self) -> torch.Tensor:
        """Return PyTorch's norm of the sum."""
        return F.rms_norm(self.x + self.residual, (4096,), self.weight, EPS)


@dataclass(frozen=True)
class Workload:
    """One operation on one shape, with the implementations to time beside each other.

    Attributes:
        operation: What is computed.
        shape: (rows, hidden).
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


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _liger():
    """Return Liger's two autograd functions, or None where it is not installed."""
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        return None
    return (
        lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "gemma", False),
        lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "gemma", False),
    )


def _rivals(kernel, fused_add: bool) -> dict[str, Callable[..., object]]:
    """Return each implementation as a function of (x[, residual], weight)."""
    torch._dynamo.reset()
    liger = _liger()
    if fused_add:
        rivals = {
            "ours": lambda x, r, w: kernel.add_rmsnorm(x, r, w, EPS),
            "torch": _add_norm,
            "torch.compile": torch.compile(_add_norm, dynamic=False),
        }
        return rivals if liger is None else rivals | {"liger": liger[1]}
    rivals = {
        "ours": lambda x, w: kernel.rmsnorm(x, w, EPS),
        "torch": _norm,
        "torch.compile": torch.compile(_norm, dynamic=False),
    }
    return rivals if liger is None else rivals | {"liger": liger[0]}


def _prepare_forward(kernel, rows, n, dtype, fused_add):
    def prepare(copies: int) -> dict[str, list[Callable[[], object]]]:
        inputs = [
            [torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(2 if fused_add else 1)]
            for _ in range(copies)
        ]
        weight = torch.randn(n, device="cuda", dtype=dtype)
        return {
            name: [lambda f=rival, a=each: f(*a, weight) for each in inputs]
            for name, rival in _rivals(kernel, fused_add).items()
        }

    return prepare


def _prepare_backward(kernel, rows, n, dtype):
    def prepare(copies: int) -> dict[str, list[Callable[[], object]]]:
        weight = torch.randn(n, device="cuda", dtype=dtype, requires_grad=True)
        inputs = [
            torch.randn(rows, n, device="cuda", dtype=dtype, requires_grad=True)
            for _ in range(copies)
        ]
        gradients = [torch.randn_like(x) for x in inputs]
        calls = {}
        for name, rival in _rivals(kernel, False).items():
            outputs = [rival(x, weight) for x in inputs]
            calls[name] = [
                lambda y=y, x=x, dy=dy: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
                for y, x, dy in zip(outputs, inputs, gradients, strict=True)
            ]
        return calls

    return prepare


def workloads(kernel) -> Iterator[Workload]:
    """Yield what to time; a norm is about 4 operations an element, its backward about 9."""
    # torch.compile's backward may otherwise free what a second replay of it needs.
    torch._functorch.config.donated_buffer = False
    for dtype, (rows, n) in itertools.product((torch.bfloat16, torch.float16), SHAPES):
        tensor, elements = rows * n * dtype.itemsize, rows * n
        yield Workload(
            "forward", (rows, n), dtype, 2 * tensor, 4 * elements,
            _prepare_forward(kernel, rows, n, dtype, False),
        )  # fmt: skip
        yield Workload(
            "add_forward", (rows, n), dtype, 4 * tensor, 5 * elements,
            _prepare_forward(kernel, rows, n, dtype, True),
        )  # fmt: skip
        yield Workload(
            "backward", (rows, n), dtype, 3 * tensor, 9 * elements,
            _prepare_backward(kernel, rows, n, dtype),
        )  # fmt: skip


def host_calls(kernel) -> dict[str, Callable[[], object]]:
    """Return what to time on the host: one row, so that the GPU never holds the host back."""
    n = 4096
    x = torch.randn(1, n, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn_like(x)
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    config = kernel.config.forward_config(1, n, x.dtype, False, x.device)
    bare = kernel.launch._kernels.rmsnorm_forward_kernel
    flags = dict(PASSES=config.passes, UNROLL=config.unroll, FLAT=True, BEFORE_WEIGHT=False)
    flags |= dict(TOTAL=kernel.launch.TRITON_DTYPES[x.dtype], num_warps=config.num_warps)

    def raw() -> None:
        bare[(1,)](
            x, None, weight, None, y, None, None, 1, n, 1, n, 0, 0, 0, EPS, 0.0,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, **flags,
        )  # fmt: skip

    return {
        "raw Triton launch": raw,
        "ours": lambda: kernel.rmsnorm(x, weight, EPS),
        "ours, add_rmsnorm": lambda: kernel.add_rmsnorm(x, residual, weight, EPS),
        "torch": lambda: _norm(x, weight),
        "torch.empty_like": lambda: torch.empty_like(x),
    }
