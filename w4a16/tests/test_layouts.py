"""Strides: every layout gives what its contiguous copy gives, and no other memory is touched.

Cases B22, B26, B53; w4a16.md 6, #5.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from imports import fresh

from .oracle import check, memory, part, poison, weight

HALF, BFLOAT = torch.float16, torch.bfloat16
NAN = float("nan")
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"


def base(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return dense memory full of NaN: what a layout leaves out is not to be read."""
    return torch.full(shape, NAN, dtype=dtype, device=device)


# [2, 3, k] in memory that is NaN wherever it is not x.
LAYOUTS: dict[str, Callable[[str, torch.dtype, int], Tensor]] = {
    "contiguous": lambda d, t, k: base(d, t, 2, 3, k),
    "every second row": lambda d, t, k: base(d, t, 2, 6, k)[:, ::2],
    "without the first": lambda d, t, k: base(d, t, 2, 4, k)[:, 1:],
    "without the last": lambda d, t, k: base(d, t, 2, 4, k)[:, :-1],
    "columns at 16": lambda d, t, k: base(d, t, 2, 3, k + 32)[..., 16 : k + 16],
    "columns at 8": lambda d, t, k: base(d, t, 2, 3, k + 32)[..., 8 : k + 8],
    "columns at 3": lambda d, t, k: base(d, t, 2, 3, k + 16)[..., 3 : k + 3],
    "rows 8 apart from 16": lambda d, t, k: base(d, t, 2, 3, k + 8)[..., :k],
    "rows 1 apart from 16": lambda d, t, k: base(d, t, 2, 3, k + 1)[..., :k],
    "every second column": lambda d, t, k: base(d, t, 2, 3, 2 * k)[..., 1::2],
    "odd offset": lambda d, t, k: base(d, t, 6 * k + 3)[3:].view(2, 3, k),
    "transposed": lambda d, t, k: base(d, t, k, 2, 3).movedim(0, -1),
    "permuted": lambda d, t, k: base(d, t, 3, 2, k).transpose(0, 1),
    "heads": lambda d, t, k: base(d, t, 2, 3, 3, k)[:, :, 1],
    "expanded batch": lambda d, t, k: base(d, t, 1, 3, k).expand(2, 3, k),
    "expanded rows": lambda d, t, k: base(d, t, 2, 1, k).expand(2, 3, k),
    "one row": lambda d, t, k: base(d, t, 1, 1, k).expand(2, 3, k),
    "one number": lambda d, t, k: base(d, t, 1, 1, 1).expand(2, 3, k),
}


def fill(view: Tensor) -> Tensor:
    """Write random numbers into a view, also where several elements share memory."""
    shape = [size if stride else 1 for size, stride in zip(view.shape, view.stride(), strict=True)]
    view[tuple(slice(size) for size in shape)].copy_(torch.randn(shape))
    return view


@pytest.mark.kernels_ci
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(kernel: ModuleType, device: str, uses_triton: bool, layout: str) -> None:
    for k in (96,) if INTERPRETED else (96, 160):
        w = weight(kernel, 40, k, group_size=32, zeros="integer", device=device)
        x = fill(LAYOUTS[layout](device, HALF, k))
        before = memory(x)
        y = kernel.w4a16_gemm(x, w)
        assert torch.equal(memory(x), before)
        check(kernel, x, w, None, y)
        # The reference multiplies by PyTorch, whose bits depend on strides.
        assert not uses_triton or torch.equal(y, kernel.w4a16_gemm(x.contiguous(), w))
        for piece in (x[1, 2], x[:, :1]):
            y = kernel.w4a16_gemm(piece, w)
            check(kernel, piece, w, None, y)
            assert not uses_triton or torch.equal(y, kernel.w4a16_gemm(piece.contiguous(), w))
        assert kernel.w4a16_gemm(x[:0], w).shape == (0, 3, 40)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_act_order(kernel: ModuleType, device: str, layout: str) -> None:
    """The permutation reads x by its strides too."""
    w = weight(kernel, 40, 96, group_size=32, perm=True, device=device)
    x = fill(LAYOUTS[layout](device, HALF, 96))
    y = kernel.w4a16_gemm(x, w)
    check(kernel, x, w, None, y)


@pytest.mark.parametrize("stride", (0, 1, 8, 16, 24, 32, 48))
def test_overlapping_rows(kernel: ModuleType, device: str, uses_triton: bool, stride: int) -> None:
    """Windows of one long row, as `unfold` gives them."""
    k = 96
    w = weight(kernel, 40, k, group_size=32, device=device)
    long = torch.randn(20 * 48 + k, device=device, dtype=HALF)
    x = long.as_strided((20, k), (stride, 1))
    y = kernel.w4a16_gemm(x, w)
    check(kernel, x, w, None, y)
    assert not uses_triton or torch.equal(y, kernel.w4a16_gemm(x.contiguous(), w))


@pytest.mark.parametrize("layout", ("every second", "expanded", "odd offset", "column"))
def test_bias(kernel: ModuleType, device: str, layout: str) -> None:
    n = 40
    bias = {
        "every second": lambda: base(device, torch.float32, 2 * n)[::2],
        "expanded": lambda: base(device, torch.float32, 1).expand(n),
        "odd offset": lambda: base(device, HALF, n + 1)[1:],
        "column": lambda: base(device, HALF, n, 3)[:, 1],
    }[layout]()
    fill(bias)
    before = memory(bias)
    w = weight(kernel, n, 96, group_size=32, device=device)
    for tokens in (3, 40):
        x = torch.randn(tokens, 96, device=device, dtype=HALF)
        y = kernel.w4a16_gemm(x, w, bias)
        check(kernel, x, w, bias, y)
        assert torch.equal(y, kernel.w4a16_gemm(x, w, bias.contiguous()))
    assert torch.equal(memory(bias), before)


@pytest.mark.parametrize(
    "layout",
    ("contiguous", "every second row", "columns at 16", "columns at 8", "heads", "expanded rows"),
)
def test_rows_16_apart_are_not_copied(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Case B26, as the documentation says it."""
    ops = part(kernel, "ops")
    x = fill(LAYOUTS[layout](device, HALF, 96)[0])
    assert x.stride(0) % 16 == 0
    if x.data_ptr() % 16 == 0:
        assert ops._in_place(x) is x


@pytest.mark.parametrize(
    "layout", ("columns at 3", "rows 8 apart from 16", "every second column", "transposed")
)
def test_other_rows_are_copied(kernel: ModuleType, device: str, layout: str) -> None:
    """What the kernel cannot read is made dense, never misread; the copy is its own memory."""
    ops = part(kernel, "ops")
    x = fill(LAYOUTS[layout](device, HALF, 96)[0])
    dense = ops._in_place(x)
    assert dense.is_contiguous() and torch.equal(dense, x)
    assert dense.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert dense.data_ptr() % 16 == 0


def test_a_single_row_of_any_stride(kernel: ModuleType, device: str) -> None:
    """The stride of one row says nothing: it is not looked at, nor handed to the kernel."""
    w = weight(kernel, 40, 96, group_size=32, device=device)
    row = torch.randn(96, device=device, dtype=HALF)
    wanted = kernel.w4a16_gemm(row[None], w)
    for stride in (0, 1, 96, 97, 2**24, 2**40):
        assert torch.equal(kernel.w4a16_gemm(row.as_strided((1, 96), (stride, 1)), w), wanted)


def test_parts_of_a_larger_tensor(kernel: ModuleType, device: str) -> None:
    """Weights as views into the memory of several, at any address."""
    w = weight(kernel, 40, 160, group_size=32, zeros="integer", device=device)
    x = torch.randn(3, 160, device=device, dtype=HALF)
    wanted = kernel.w4a16_gemm(x, w)
    for lead in (1, 5, 8):

        def moved(tensor: Tensor, lead: int = lead) -> Tensor:
            whole = poison(tensor.new_empty(lead + tensor.numel() + 64))
            return whole[lead : lead + tensor.numel()].view(tensor.shape).copy_(tensor)

        assert torch.equal(kernel.w4a16_gemm(x, w._map(moved)), wanted)


FAR = """
    import sys, torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/w4a16", version=1)
    k = 64
    weight = kernel.quantize(torch.randn(16, k).half(), 32)
    # Read in place: the last tile starts more than 2^31 elements after the first. Copied: three.
    for tokens, stride in ((195, 2**24 - 16), (3, 2**30 + 16)):
        # A file of holes: only the pages that are touched take memory.
        size = (tokens - 1) * stride + k
        flat = torch.from_file(
            f"{sys.argv[1]}/{stride}", shared=True, size=size, dtype=torch.float16
        )
        x = flat.as_strided((tokens, k), (stride, 1))
        x.copy_(torch.randn(tokens, k))
        assert (tokens - 1) * stride >= 2**31
        assert torch.equal(kernel.w4a16_gemm(x, weight), kernel.w4a16_gemm(x.contiguous(), weight))
"""


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU test_gpu.py does this with real memory")
def test_rows_past_2_to_the_31_elements(kernel: ModuleType, tmp_path: Path) -> None:
    """Cases B01, B04; w4a16.md 6, #6: offsets are 64-bit. A wrong one would end the process."""
    fresh(FAR, str(tmp_path))
