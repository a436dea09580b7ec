"""A built kernel, one sound launch and one for each fault that the compile targets must show."""

import triton
import triton.language as tl


@triton.jit
def scale_rows(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * n
    x = tl.load(x_ptr + row + cols, mask=cols < n, other=0.0).to(tl.float32)
    # Held over a reduction, so that all of x is live at once.
    y = x * factor / tl.sum(x * x)
    tl.store(y_ptr + row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, k, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, BLOCK_K):
        a = tl.load(a_ptr + rows[:, None] * k + start + inner[None, :])
        b = tl.load(b_ptr + (start + inner[:, None]) * BLOCK + rows[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * BLOCK + rows[None, :], acc)


@triton.jit
def sum_in_float64(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr, tl.sum(x.to(tl.float64)).to(tl.float32))


@triton.jit
def add_to(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + cols, tl.load(x_ptr + cols))


@triton.jit
def three_columns(x_ptr, y_ptr):
    cols = tl.arange(0, 3)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols))
