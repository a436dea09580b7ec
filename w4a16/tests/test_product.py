"""Values of the product: the reference on a CPU, the Triton kernel in the interpreter."""

from __future__ import annotations

import dataclasses
import os
from types import ModuleType

import pytest
import torch

from .oracle import ZEROS, check, exact_weight, part, weight

HALF, BFLOAT = torch.float16, torch.bfloat16
GROUPS = (32, 64, 128, 256, -1)
#: (tokens, out, in): tails of rows and of features, shared tiles, several tiles.
SIZES = ((1, 8, 32), (3, 72, 96), (9, 40, 160), (17, 136, 320), (5, 24, 352), (33, 192, 448))

needs_triton = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") == "0" and not torch.cuda.is_available(),
    reason="calls the Triton kernel itself",
)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_groups_and_zeros(
    kernel: ModuleType, device: str, group_size: int, zeros: str, dtype: torch.dtype
) -> None:
    """Cases B11, B131: every group size, the last group partial, every kind of zero point."""
    for tokens, n, k in SIZES:
        w = weight(kernel, n, k, group_size=group_size, zeros=zeros, device=device)
        x = torch.randn(tokens, k, device=device, dtype=dtype)
        bias = torch.randn(n, device=device)
        check(kernel, x, w, bias, kernel.w4a16_gemm(x, w, bias))


@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("tokens", (*range(1, 18), 31, 32, 33, 64, 65, 127, 128, 129, 329))
def test_tokens(kernel: ModuleType, device: str, tokens: int, dtype: torch.dtype) -> None:
    w = weight(kernel, 72, 160, zeros="integer", device=device)
    x = torch.randn(tokens, 160, device=device, dtype=dtype)
    check(kernel, x, w, None, kernel.w4a16_gemm(x, w))


@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("n", (8, 16, 24, 40, 64, 72, 192))
def test_identity_gives_the_weight(
    kernel: ModuleType, device: str, n: int, dtype: torch.dtype
) -> None:
    """Cases B10, B50: every element of every column, N that no tile divides."""
    k = 160
    w = weight(kernel, n, k, zeros="integer", group_size=32, device=device)
    y = kernel.w4a16_gemm(torch.eye(k, device=device, dtype=dtype), w)
    exact = exact_weight(kernel, w).T
    error = (y.double() - exact).abs() / exact.abs().clamp(min=torch.finfo(dtype).tiny)
    # One rounding of a scale and one of the product, where scales come first.
    assert float(error.max()) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("scales", (HALF, BFLOAT, torch.float32))
def test_dtypes_of_scales(
    kernel: ModuleType, device: str, scales: torch.dtype, dtype: torch.dtype
) -> None:
    """Case B136."""
    for tokens in (3, 70):
        w = weight(kernel, 40, 160, scales=scales, zeros="integer", device=device)
        x = torch.randn(tokens, 160, device=device, dtype=dtype)
        for bias in (HALF, BFLOAT, torch.float32):
            b = torch.randn(40, device=device, dtype=bias)
            check(kernel, x, w, b, kernel.w4a16_gemm(x, w, b))


def test_act_order(kernel: ModuleType, device: str) -> None:
    """Case B128: features of a group that are not neighbours."""
    for tokens in (1, 20):
        w = weight(kernel, 40, 224, group_size=64, perm=True, device=device)
        x = torch.randn(tokens, 224, device=device, dtype=HALF)
        check(kernel, x, w, None, kernel.w4a16_gemm(x, w))
        dense = kernel.dequantize(w, torch.float32)
        assert torch.equal(dense.double(), exact_weight(kernel, w).float().double())


def test_large_scales_and_activations(kernel: ModuleType, device: str) -> None:
    """w4a16.md 6, #4: nothing overflows that the result does not."""
    for tokens in (4, 70):
        w = kernel.quantize(torch.full((16, 256), 350.0, device=device), 128)
        x = torch.zeros(tokens, 256, device=device, dtype=HALF)
        x[:, 0] = 150.0
        assert torch.equal(kernel.w4a16_gemm(x, w), (x @ kernel.dequantize(w, HALF).T))
        w = kernel.quantize(torch.full((16, 256), 1500.0, device=device).half(), 128)
        assert w.scales.dtype is torch.float32
        x[:, 0] = 40.0
        assert bool(kernel.w4a16_gemm(x, w).isfinite().all())


@needs_triton
def test_each_tile_alone(kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases B08, B61, B62, B41: any number of programs, on outputs and workspace full of NaN."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    new_empty = torch.Tensor.new_empty

    def poisoned(tensor: torch.Tensor, *shape, **options) -> torch.Tensor:
        return new_empty(tensor, *shape, **options).fill_(-1)  # NaN as float32

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    tokens, n, k = 20, 136, 416
    w = weight(kernel, n, k, zeros="integer", group_size=64, device=device)
    x = torch.randn(tokens, k, device=device, dtype=HALF)
    for block_m, block_n, before in ((16, 64, False), (32, 64, False), (64, 128, True)):
        for programs in (1, 2, 3, 4, 5, 7, 11, 64):
            tile = config.GemmConfig(block_m, block_n, 4, 2, before, 0, programs)
            results = []
            for _ in range(2):
                y = torch.full((tokens, n), float("nan"), device=device, dtype=HALF)
                ops.fused(x, w, None, y, tile)
                results.append(y)
            check(kernel, x, w, None, results[0])
            assert torch.equal(*results)


@needs_triton
def test_counters_are_left_at_zero(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = part(kernel, "_shared.arrivals")
    given = []
    counters = arrivals.counters

    def noted(*arguments):
        given.append(counters(*arguments))
        return given[-1]

    monkeypatch.setattr(arrivals, "counters", noted)
    w = weight(kernel, 136, 1056, device=device)
    for tokens in (1, 16, 40):
        kernel.w4a16_gemm(torch.randn(tokens, 1056, device=device, dtype=HALF), w)
    assert len(given) == 3 and not any(bool(each.any()) for each in given)


@needs_triton
def test_nothing_is_read_beyond_an_operand(kernel: ModuleType, device: str) -> None:
    """Cases B07, B13: every operand lies between NaN, and tails are cut by the kernel."""

    def guarded(tensor: torch.Tensor) -> torch.Tensor:
        margin = 4096
        whole = torch.empty(tensor.numel() + 2 * margin, dtype=tensor.dtype, device=device)
        whole.fill_(float("nan") if tensor.is_floating_point() else 0x7F7F)
        inner = whole[margin : margin + tensor.numel()].view(tensor.shape)
        return inner.copy_(tensor)

    for group_size, k in ((32, 96), (64, 160), (128, 224)):
        w = weight(kernel, 72, k, group_size=group_size, zeros="integer", device=device)
        w = w._map(guarded)
        x = guarded(torch.randn(3, k, device=device, dtype=HALF))
        bias = guarded(torch.randn(72, device=device))
        check(kernel, x, w, bias, kernel.w4a16_gemm(x, w, bias))


@pytest.mark.parametrize(
    "dtype, shape", [(HALF, s) for s in ((0, 64), (2, 0, 64), (64,), (2, 3, 64), (1, 1, 1, 64))]
)
def test_shapes(
    kernel: ModuleType, device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Case B44 and leading dimensions; inputs stay as they were (B20), results are their own."""
    w = weight(kernel, 24, 64, device=device)
    x = torch.randn(shape, device=device, dtype=dtype)
    before = x.clone()
    y = kernel.w4a16_gemm(x, w)
    assert y.shape == (*shape[:-1], 24) and y.dtype is dtype and torch.equal(x, before)
    if x.numel():
        check(kernel, x, w, None, y)


def test_layouts(kernel: ModuleType, device: str) -> None:
    """Cases B22, B53, B55: any strides give what a contiguous copy gives."""
    k = 96
    w = weight(kernel, 40, k, group_size=32, device=device)
    base = torch.randn(4, 6, 2 * k + 16, device=device, dtype=HALF)
    long = torch.randn(4 * 6 * k * 4, device=device, dtype=HALF)
    layouts = (
        base[0, :, :k],
        base[:, 1:, :k],
        base[:, ::2, k : 2 * k],
        base[1, :, 3 : k + 3],
        base[2, :, : 2 * k : 2],
        base.transpose(0, 1)[..., :k],
        base[0, :1, :k].expand(5, k),
        torch.randn(k, 5, device=device, dtype=HALF).t(),
        long[1 : 1 + 3 * k].view(3, k),
        long.as_strided((5, k), (16, 1)),
        long.as_strided((5, k), (24, 1)),
    )
    for x in layouts:
        assert torch.equal(kernel.w4a16_gemm(x, w), kernel.w4a16_gemm(x.contiguous(), w))


def test_batch_does_not_matter(kernel: ModuleType, device: str, uses_triton: bool) -> None:
    """A token gives the same bits in any batch of its bucket, as the docstring says."""
    if not uses_triton:
        pytest.skip("PyTorch's own product, which promises nothing")
    w = weight(kernel, 136, 1056, device=device)
    x = torch.randn(16, 1056, device=device, dtype=HALF)
    for batch in (8, 16):
        whole = kernel.w4a16_gemm(x[:batch], w)
        first = 1 if batch == 8 else 9
        assert torch.equal(kernel.w4a16_gemm(x[:first], w), whole[:first])


def test_gradients(kernel: ModuleType, device: str) -> None:
    """Case B56: x and bias get theirs, and what has none says so."""
    w = weight(kernel, 40, 96, group_size=32, perm=True, device=device)
    x = torch.randn(2, 3, 96, device=device, dtype=HALF, requires_grad=True)
    bias = torch.randn(40, device=device, requires_grad=True)
    y = kernel.w4a16_gemm(x, w, bias)
    dy = torch.randn_like(y)
    dx, dbias = torch.autograd.grad(y, (x, bias), dy, retain_graph=True)
    exact = dy.double() @ exact_weight(kernel, w)
    peer = dy @ exact_weight(kernel, w).half()
    allowed = 2 * max(float((peer - exact).norm()), float(exact.norm()) * 2**-11)
    assert float((dx - exact).norm()) <= allowed
    torch.testing.assert_close(dbias, dy.float().sum((0, 1)))
    y.sum().backward()  # an expanded gradient (B23)
    assert x.grad is not None and bool(x.grad.any())
    trained = dataclasses.replace(w, scales=w.scales.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="w4a16_gemm: scales and zeros have no gradient"):
        kernel.w4a16_gemm(x, trained)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="w4a16_gemm: there is no forward-mode"):
            kernel.w4a16_gemm(dual, w)


def test_operators(kernel: ModuleType, device: str) -> None:
    """Case B64: schema, fake tensors, autograd, AOT; strided and permuted samples."""
    ops = part(kernel, "ops")
    for perm in (False, True):
        w = weight(kernel, 40, 96, group_size=32, zeros="integer", perm=perm, device=device)
        base = torch.randn(3, 112, device=device, dtype=HALF)
        for x in (base[:, :96].contiguous(), base[:, 16:], base[:, :96].detach().requires_grad_()):
            bias = torch.randn(40, device=device, requires_grad=x.requires_grad)
            parts = (w.qweight, w.scales, w.zeros, w.perm)
            torch.library.opcheck(ops.w4a16_gemm, (x, *parts, bias, 96, 32))
        dy = torch.randn(3, 40, device=device, dtype=HALF)
        torch.library.opcheck(ops.w4a16_gemm_dx, (dy, *parts, 96, 32))


def test_compile(kernel: ModuleType, device: str) -> None:
    """w4a16.md 6, #9 and case B65: one graph for all tokens; which path runs is decided inside."""
    torch._dynamo.reset()
    w = weight(kernel, 40, 96, group_size=32, device=device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def product(x: torch.Tensor) -> torch.Tensor:
        return kernel.w4a16_gemm(x, w)

    compiled = torch.compile(product, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (64, 1, 2, 3, 17, 40):
        x = torch.randn(tokens, 96, device=device, dtype=HALF)
        assert torch.equal(compiled(x), kernel.w4a16_gemm(x, w))
    assert counter.frame_count <= 2
