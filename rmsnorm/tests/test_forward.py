"""Values of the forward pass, the same tests on the reference, the interpreter and a GPU."""

from __future__ import annotations

import collections
from types import ModuleType

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from monorepo.numerics import check_elements, check_tensor, ulp_error

from .oracle import DTYPES, Problem, problem, storage

Launches = collections.Counter[str]
# NumPy, which computes in the interpreter, warns of divisions that IEEE arithmetic defines.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
WIDTHS = (1, 2, 17, 63, 64, 127, 128, 257, 1000, 1024, 4096, 16400)
# On a GPU also what the interpreter is too slow for: real models' widths, and the widest tile.
GPU_WIDTHS = (2880, 5120, 7168, 8192, 11008, 16384, 16385, 65536)
OPTIONS = {
    "plain": {"weight": None},
    "weight": {},
    "bias": {"bias": torch.float32},
    "bias_without_weight": {"weight": None, "bias": torch.float32},
    "offset": {"offset": 1.0},
    "offset_bias": {"offset": 0.5, "bias": torch.float16},
    "before_weight": {"rounding": "before_weight"},
    "before_weight_offset_bias": {
        "rounding": "before_weight",
        "offset": 1.0,
        "bias": torch.float32,
    },
    "large_eps": {"eps": 1.0},
    "zero_eps": {"eps": 0.0},
}


def check_forward(kernel: ModuleType, given: Problem) -> None:
    """Call the kernel and hold its results, their dtype and layout, to what they have to be."""
    y, total = given(kernel)
    assert y.dtype == (given.out_dtype or given.x.dtype)
    assert y.shape == given.x.shape and y.is_contiguous() and y.device == given.x.device
    # With a bias single elements cancel, so the tensor is judged as a whole.
    check = check_elements if given.bias is None else check_tensor
    check(y, given.exact(), given.peer())
    if given.residual is not None:
        assert total is not None and total.is_contiguous()
        assert total.dtype == (given.residual_dtype or given.residual.dtype)
        torch.testing.assert_close(total, given.total, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ("once", "before_weight"))
def test_dtype_pairs(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    launches: Launches,
    rounding: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> None:
    """Cases B17, B49: y has the dtype of x, whatever the weight's, on the fused path."""
    given = problem((7, 96), dtype, device, weight=weight_dtype, rounding=rounding)
    check_forward(kernel, given)
    assert launches == ({"forward": 1} if uses_triton else {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(kernel: ModuleType, device: str, option: str, dtype: torch.dtype) -> None:
    check_forward(kernel, problem((3, 2, 200), dtype, device, **OPTIONS[option]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_with_residual(
    kernel: ModuleType, device: str, option: str, dtype: torch.dtype
) -> None:
    given = problem((3, 2, 200), dtype, device, residual=dtype, **OPTIONS[option])
    check_forward(kernel, given)


@pytest.mark.parametrize("rounding", ("once", "before_weight"))
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_dtype(
    kernel: ModuleType, device: str, dtype: torch.dtype, out_dtype: torch.dtype, rounding: str
) -> None:
    check_forward(kernel, problem((5, 80), dtype, device, out_dtype=out_dtype, rounding=rounding))


@pytest.mark.parametrize("total_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_dtypes(
    kernel: ModuleType,
    device: str,
    dtype: torch.dtype,
    residual: torch.dtype,
    total_dtype: torch.dtype,
) -> None:
    """A residual stream of another dtype, such as float32 beside bfloat16 activations."""
    given = problem((5, 80), dtype, device, residual=residual, residual_dtype=total_dtype)
    check_forward(kernel, given)


@pytest.mark.parametrize("rounding", ("once", "before_weight"))
def test_reads_bfloat16(kernel: ModuleType, device: str, rounding: str) -> None:
    """Case B110: all that is loaded becomes float32 at once; the interpreter sees bits else."""
    given = problem(
        (5, 80), torch.bfloat16, device, weight=torch.bfloat16, bias=torch.bfloat16,
        residual=torch.bfloat16, residual_dtype=torch.float32, out_dtype=torch.float32,
        rounding=rounding,
    )  # fmt: skip
    check_forward(kernel, given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", WIDTHS)
def test_widths(kernel: ModuleType, device: str, n: int, dtype: torch.dtype) -> None:
    rows = 5 if n <= 4096 else 2
    check_forward(kernel, problem((rows, n), dtype, device, weight=dtype))
    check_forward(kernel, problem((rows, n), dtype, device, weight=dtype, residual=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", GPU_WIDTHS)
@pytest.mark.parametrize("rows", (1, 300))
def test_widths_of_models(
    kernel: ModuleType, device: str, n: int, rows: int, dtype: torch.dtype
) -> None:
    check_forward(kernel, problem((rows, n), dtype, device, weight=dtype))
    check_forward(kernel, problem((rows, n), dtype, device, weight=dtype, residual=dtype))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_more_than_a_million_columns(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    check_forward(kernel, problem((1, 2**20 + 3), dtype, device, weight=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((2048, 4096), (65536, 128), (70000, 16)), ids=str)
def test_many_rows(
    kernel: ModuleType, device: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Case B28 among them: more rows than a grid's second dimension can count."""
    check_forward(kernel, problem(shape, dtype, device, weight=dtype))


@pytest.mark.parametrize("rows", (1, 2, 3, 31, 64, 65))
def test_row_counts(kernel: ModuleType, device: str, rows: int) -> None:
    """The last program's tile of rows is partly empty."""
    check_forward(kernel, problem((rows, 64), torch.float16, device))


@pytest.mark.parametrize("shape", ((48,), (3, 48), (3, 2, 48), (2, 3, 2, 48)), ids=str)
def test_ranks(kernel: ModuleType, device: str, shape: tuple[int, ...]) -> None:
    """Case B25."""
    check_forward(kernel, problem(shape, torch.float16, device))
    check_forward(kernel, problem(shape, torch.float16, device, residual=torch.float16))


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_before_weight_is_llama(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> None:
    """norm.md 5, #6: a model must not drift. The reference has Llama's bits.

    Triton sums in another order, which moves a norm in 16 bits by at most 1 ulp; what the weight
    makes of it has the bits of PyTorch's product.
    """
    n = 128
    llama = LlamaRMSNorm(n, eps=1e-5).to(device).requires_grad_(False)
    inputs, norms, wanted = [], [], []
    for seed in range(1000 if device == "cuda" else 20):
        torch.manual_seed(seed)
        x = torch.randn(4, n).to(device, dtype)
        llama.weight.data = torch.randn(n).to(device, weight_dtype)
        got = kernel.rmsnorm(x, llama.weight, 1e-5, rounding="before_weight")
        norm = kernel.rmsnorm(x, None, 1e-5, rounding="before_weight")
        assert torch.equal(got, (llama.weight * norm).to(dtype)), f"seed {seed}"
        if not uses_triton:
            assert torch.equal(got, llama(x).to(dtype)), f"seed {seed}"
        llama.weight.data = torch.ones(n, device=device, dtype=dtype)
        inputs.append(x)
        norms.append(norm)
        wanted.append(llama(x))
    # Over all seeds at once: of two roundings in float32, either may be unlucky in one of them.
    inputs, norms, wanted = (torch.cat(each) for each in (inputs, norms, wanted))
    if dtype is torch.float32:
        check_elements(norms, Problem(inputs, eps=1e-5).exact(), wanted)
    else:
        assert ulp_error(norms, wanted) <= 1


@pytest.mark.parametrize("n", (96, 16400))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_rounds_before_weight(kernel: ModuleType, device: str, dtype: torch.dtype, n: int) -> None:
    """norm.md 1, defect 3: without a weight the norm is a number of x's dtype, even in float32."""
    x = torch.randn(3, n).to(device, dtype)
    before, once = (
        kernel.rmsnorm(x, rounding=rounding, out_dtype=torch.float32)
        for rounding in ("before_weight", "once")
    )
    assert torch.equal(before, before.to(dtype).float())
    assert not torch.equal(once, once.to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offset_is_gemma(
    kernel: ModuleType, device: str, uses_triton: bool, dtype: torch.dtype
) -> None:
    """Case B16; norm.md 5, #4: in 16 bits 1 + w would be 1."""
    n = 128
    gemma = GemmaRMSNorm(n).to(device, dtype)
    torch.nn.init.constant_(gemma.weight, 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11)
    assert dtype is torch.float32 or bool((1 + gemma.weight == 1).all())
    x = torch.randn(16, n).to(device, dtype)
    got, wanted = kernel.rmsnorm(x, gemma.weight.detach(), offset=1.0), gemma(x).detach()
    check_elements(got, Problem(x, weight=gemma.weight.detach(), offset=1.0).exact(), wanted)
    assert not torch.equal(got, kernel.rmsnorm(x))
    if not uses_triton:
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("rounding", ("once", "before_weight"))
@pytest.mark.parametrize("total_dtype", (None, torch.float32), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (96, 16400))
def test_add_is_two_steps(
    kernel: ModuleType,
    device: str,
    n: int,
    dtype: torch.dtype,
    total_dtype: torch.dtype | None,
    rounding: str,
) -> None:
    """The sum has the bits of x + residual, and y those of the norm of that sum."""
    given = problem((2, n), dtype, device, residual=total_dtype or dtype, rounding=rounding)
    y, total = given(kernel)
    options = {"rounding": rounding, "out_dtype": dtype}
    assert torch.equal(total, given.x + given.residual)
    assert torch.equal(y, kernel.rmsnorm(total, given.weight, **options))
    alone = kernel.rmsnorm_residual_fused(given.x, given.residual, given.weight, **options)
    assert torch.equal(alone, y)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_small_variance(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Case B14: the default eps is 1e-6 for every dtype."""
    x = (0.058 * torch.randn(64, 32)).to(device, dtype)
    y = kernel.rmsnorm(x)
    exact = Problem(x, eps=1e-6).exact()
    assert ulp_error(y, exact) < 1
    assert torch.equal(y, kernel.rmsnorm(x, None, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Squares that overflow or vanish in 16 bits do neither in float32."""
    largest = min(torch.finfo(dtype).max, 1e18)
    scale = torch.tensor([largest, largest / 4, 1.0, 1e-4, 0.0])[:, None]
    x = (torch.rand(5, 64) * 2 - 1) * scale
    check_forward(kernel, Problem(x.to(device, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_not_finite_stays_in_its_row(
    kernel: ModuleType, device: str, bad: float, dtype: torch.dtype
) -> None:
    given = problem((4, 96), dtype, device)
    given.x[1, 17] = bad
    y, _ = given(kernel)
    check_elements(y, given.exact(), given.peer())
    assert bool(y[1].isnan().any()) and bool(y[[0, 2, 3]].isfinite().all())


@pytest.mark.parametrize("shape", ((0, 16), (2, 0, 16), (0, 3, 2, 16)), ids=str)
@pytest.mark.parametrize("gradients", (False, True))
def test_zero_rows(
    kernel: ModuleType,
    device: str,
    launches: Launches,
    shape: tuple[int, ...],
    gradients: bool,
) -> None:
    """Case B44: right shape, dtype and device, zero gradients, and no launch."""
    given = problem(shape, torch.float16, device, bias=torch.float16, residual=torch.float32)
    given = given.leaves() if gradients else given
    y, total = given(kernel)
    assert (y.shape, y.dtype, y.device) == (given.x.shape, torch.float16, given.x.device)
    assert (total.shape, total.dtype) == (given.x.shape, torch.float32)
    assert kernel.rmsnorm(given.x, given.weight).shape == given.x.shape
    if gradients:
        (y.sum() + total.sum()).backward()
        for name, tensor in given.tensors.items():
            assert torch.equal(tensor.grad, torch.zeros_like(tensor)), name
            assert tensor.grad.dtype == tensor.dtype, name
    assert launches == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", (False, True))
def test_inputs_are_kept(
    kernel: ModuleType, device: str, residual: bool, dtype: torch.dtype
) -> None:
    """Case B20: no input changes, and no result is a view of one or of another result."""
    given = problem(
        (4, 64), dtype, device, bias=dtype, weight=dtype, residual=dtype if residual else None
    )
    before = {name: tensor.clone() for name, tensor in given.tensors.items()}
    results = [tensor for tensor in given(kernel) if tensor is not None]
    if residual:
        results.append(kernel.rmsnorm_residual_fused(given.x, given.residual))
    results.append(kernel.rmsnorm(given.x))
    for name, tensor in given.tensors.items():
        assert torch.equal(tensor, before[name]), name
    owners = [storage(tensor) for tensor in (*results, *given.tensors.values())]
    assert len(set(owners)) == len(owners)


@pytest.mark.parametrize("n", (96, 16400))
def test_same_bits_every_time(kernel: ModuleType, device: str, n: int) -> None:
    """Case B41."""
    given = problem((3, n), torch.float16, device, residual=torch.float16)
    y, total = given(kernel)
    for _ in range(20 if n < 1000 or device == "cuda" else 3):
        again, total_again = given(kernel)
        assert torch.equal(y, again) and torch.equal(total, total_again)


def test_same_tensor_twice(kernel: ModuleType, device: str) -> None:
    """x and residual may be one tensor."""
    x = torch.randn(3, 64, device=device)
    y, total = kernel.add_rmsnorm(x, x)
    assert torch.equal(total, x + x)
    check_elements(y, Problem(x, residual=x).exact(), Problem(x, residual=x).peer())


@pytest.mark.parametrize(
    ("size", "eps"), ((1e-20, 0.0), (1e-15, 1e-30), (1e16, 1e35), (1.0, 1e38)), ids=str
)
@pytest.mark.parametrize("n", (64, 16400))
def test_extreme_sizes(kernel: ModuleType, device: str, n: int, size: float, eps: float) -> None:
    """What float32 holds is not lost on the way: no product with the number of columns."""
    x = size * torch.randn(2, n, device=device)
    check_forward(kernel, Problem(x, eps=eps))
