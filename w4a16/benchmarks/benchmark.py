"""Workloads of w4a16, for `kernels benchmark` and for the repository's `scripts/bench.py`."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kernels import Benchmark

#: In x out features: Llama-3-70B and Qwen3-32B gate and up, DeepSeek-V3, Llama-2-7B, a narrow one.
SHAPES = ((8192, 28672), (5120, 25600), (7168, 18432), (4096, 11008), (7168, 2048))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 4096)
#: What varies for the few tokens of decoding: groups and zero points.
VARIANTS = (("asymmetric g128", 128, True), ("g64", 64, False), ("g32", 32, False))
#: torch's int4 kernel multiplies row by row of tokens: above this it takes milliseconds.
MOST_INT4PACK = 32


class W4A16Benchmark(Benchmark):
    """A decoding step and a prompt of one layer, checked against the dequantised weight."""

    seed = 0

    def setup(self) -> None:
        """Make a layer of 2048 x 2048; small enough for a CPU, large enough for a GPU."""
        dtype = torch.float16
        dense = torch.randn(2048, 2048, device=self.device, dtype=dtype) * 0.02
        self.weight = self.kernel.quantize(dense, 128)
        self.dense = self.kernel.dequantize(self.weight, torch.float32)
        self.token = torch.randn(1, 2048, device=self.device, dtype=dtype)
        self.prompt = torch.randn(64, 2048, device=self.device, dtype=dtype)

    def benchmark_decode(self) -> None:
        """Time one token."""
        self.out = self.kernel.w4a16_gemm(self.token, self.weight)

    def verify_decode(self) -> torch.Tensor:
        """Return the product with the dequantised weight."""
        return F.linear(self.token.float(), self.dense).half()

    def benchmark_prompt(self) -> None:
        """Time 64 tokens."""
        self.out = self.kernel.w4a16_gemm(self.prompt, self.weight)

    def verify_prompt(self) -> torch.Tensor:
        """Return the product with the dequantised weight."""
        return F.linear(self.prompt.float(), self.dense).half()


@dataclass(frozen=True)
class Workload:
    """One operation on one shape, with the implementations to time beside each other.

    Attributes:
        operation: Groups and zero points of the weight.
        shape: (tokens, in features, out features).
        dtype: dtype of the activations and scales.
        bytes: What has to move through memory: packed weight, scales, x and y once.
        flop: Arithmetic operations.
        prepare: From a number of copies of the weight to, for each rival, one call a copy.
    """

    operation: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    bytes: int
    flop: int
    prepare: Callable[[int], dict[str, list[Callable[[], object]]]]


def _weight(kernel, k: int, n: int, group_size: int, zeros: bool, dtype: torch.dtype):
    groups = -(-k // group_size)
    return kernel.W4Weight(
        torch.randint(-(2**15), 2**15, (-(-k // 128), n, 32), device="cuda", dtype=torch.int16),
        (torch.rand(groups, n, device="cuda") * 0.02 + 0.005).to(dtype),
        torch.randint(0, 16, (groups, n), device="cuda", dtype=torch.int16) if zeros else None,
        None,
        k,
        group_size,
    )


def _int4pack(kernel, weight) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torch's int4 product of the same weight."""
    codes = kernel.reference.unpack_codes(weight.qweight, weight.in_features)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    scales = weight.scales.bfloat16()
    zeros = torch.zeros_like(scales)
    if weight.zeros is not None:
        zeros = ((8.0 - weight.zeros) * scales.float()).bfloat16()
    both = torch.stack((scales, zeros), -1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, weight.group_size, both)


def _prepare(kernel, tokens, k, n, group_size, zeros, dtype):
    def prepare(copies: int) -> dict[str, list[Callable[[], object]]]:
        weights = [_weight(kernel, k, n, group_size, zeros, dtype) for _ in range(copies)]
        dense = [kernel.dequantize(weight, dtype) for weight in weights]
        x = torch.randn(tokens, k, device="cuda", dtype=dtype)
        calls = {
            "ours": [lambda w=w: kernel.w4a16_gemm(x, w) for w in weights],
            "torch": [lambda w=w: F.linear(x, w) for w in dense],
        }
        exact = x.double() @ dense[0].double().T
        rivals = [calls["ours"][0]()]
        if tokens <= MOST_INT4PACK and dtype is torch.bfloat16:
            packed = [_int4pack(kernel, weight) for weight in weights]
            calls["int4pack"] = [lambda f=f: f(x) for f in packed]
            rivals.append(calls["int4pack"][0]())
        for y in rivals:  # what is timed is the same product
            error = (y.double() - exact).norm() / exact.norm()
            if not error <= torch.finfo(dtype).eps:
                raise ValueError(f"{tokens} x {k} x {n}: off by {error:.2e}")
        return calls

    return prepare


def workloads(kernel) -> Iterator[Workload]:
    """Yield what to time."""
    cases = [
        (dtype, shape, tokens, ("g128", 128, False))
        for dtype, shape, tokens in itertools.product(
            (torch.bfloat16, torch.float16), SHAPES, TOKENS
        )
    ] + [
        (torch.bfloat16, shape, tokens, variant)
        for shape, tokens, variant in itertools.product(SHAPES, (1, 8, 16), VARIANTS)
    ]
    for dtype, (k, n), tokens, (operation, group_size, zeros) in cases:
        groups = k // group_size * (2 if zeros else 1)
        moved = k * n // 2 + (groups * n + tokens * (k + n)) * dtype.itemsize
        yield Workload(
            operation, (tokens, k, n), dtype, moved, 2 * tokens * k * n,
            _prepare(kernel, tokens, k, n, group_size, zeros, dtype),
        )  # fmt: skip


def host_calls(kernel) -> dict[str, Callable[[], object]]:
    """Return what to time on the host: one token, so that the GPU never holds the host back."""
    k = n = 1024
    weight = _weight(kernel, k, n, 128, False, torch.bfloat16)
    dense = kernel.dequantize(weight, torch.bfloat16)
    x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(1, n, device="cuda", dtype=torch.bfloat16)
    kept = []
    launcher = kernel.launch.launch
    kernel.launch.launch = lambda *arguments: kept.append(arguments)
    try:
        kernel.w4a16_gemm(x, weight)
    finally:
        kernel.launch.launch = launcher
    _, bare, programs, tensors, scalars, constants, num_warps, _ = kept[0]
    tensors = tuple(y if tensor is not None and tensor.shape == y.shape else tensor
                    for tensor in tensors)  # fmt: skip

    def raw() -> None:
        bare[(programs,)](*tensors, *scalars, **constants, num_warps=num_warps)

    return {
        "raw Triton launch": raw,
        "ours": lambda: kernel.w4a16_gemm(x, weight),
        "torch": lambda: F.linear(x, dense),
    }
