"""Triton body of the multiplication. The factor arrives as a Python float: float32 in Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["factor"])
def kernel_name_forward_kernel(
    x_ptr,  # [n]
    y_ptr,  # [n]
    n,
    factor,
    BLOCK: tl.constexpr,
):
    # 64-bit: tensors of more than 2^31 elements are real.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=mask)
