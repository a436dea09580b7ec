"""Gradients, against autograd in float64: the same tests on reference, interpreter and GPU."""

from __future__ import annotations

import collections
import itertools
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from monorepo.numerics import check_tensor

from .oracle import DTYPES, Problem, part, problem
from .test_forward import OPTIONS

Launches = collections.Counter[str]
# NumPy, which computes in the interpreter, warns of divisions that IEEE arithmetic defines.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(params=("chosen", "whole rows", "blocks"))
def tiles(
    request: pytest.FixtureRequest,
    kernel: ModuleType,
    uses_triton: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Run a test with the chosen tile, then on each of the two kernels with a small one."""
    if request.param != "chosen":
        if not uses_triton:
            pytest.skip("the reference has no tiles")
        use_backward_tile(kernel, monkeypatch, request.param)
    return request.param


def use_backward_tile(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, block_m: int = 2
) -> None:
    """Take one of the backward kernels for any problem: on tiles of whole rows, or on blocks."""
    config = part(kernel, "config")

    def tile(rows: int, n: int, *_: object) -> object:
        whole = name == "whole rows"
        block_n = 1 << (n - 1).bit_length() if whole else 32
        programs = 2 if whole else 0
        return config.BackwardConfig(block_m, block_n, num_warps=1, num_stages=1, programs=programs)

    monkeypatch.setattr(config, "backward_config", tile)
    monkeypatch.setattr(config, "backward_block", lambda *_: 2 * block_m + 1)


def check_launches(launches: Launches, uses_triton: bool) -> None:
    """Raise unless one forward and one backward kernel ran, and nothing but sums beside them."""
    if not uses_triton:
        assert launches == {}
        return
    assert launches["forward"] == 1
    assert sum(count for name, count in launches.items() if name.startswith("backward")) == 1
    assert launches["sum_partials"] + 2 >= launches.total()


def check_gradients(
    kernel: ModuleType, given: Problem, dy: Tensor | None, dtotal: Tensor | None = None
) -> Problem:
    """Run backward from both results and hold each gradient to what it has to be."""
    leaves = given.leaves()
    y, total = leaves(kernel)
    outputs = [(y, dy), (total, dtotal)]
    results, gradients = zip(*(pair for pair in outputs if pair[1] is not None), strict=True)
    torch.autograd.backward(results, gradients)
    for name, (exact, peer) in given.gradients(dy, dtotal).items():
        tensor = leaves.tensors[name]
        assert tensor.grad is not None, f"{name} has no gradient"
        assert tensor.grad.dtype == tensor.dtype, name
        check_tensor(tensor.grad, exact, peer)
    return leaves


def random_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(tensor.shape).to(tensor.device, dtype or tensor.dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rounding", ("once", "before_weight"))
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_pairs(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    launches: Launches,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    rounding: str,
) -> None:
    """norm.md 5, #10: each gradient has the dtype of its tensor, whatever that of x."""
    if weight_dtype is torch.bfloat16 and uses_triton and device == "cpu":
        weight_dtype = torch.float16  # the interpreter cuts bits off a bfloat16 gradient (B110)
    given = problem((9, 96), dtype, device, weight=weight_dtype, rounding=rounding)
    check_gradients(kernel, given, random_like(given.x))
    check_launches(launches, uses_triton)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(
    kernel: ModuleType, device: str, tiles: str, option: str, dtype: torch.dtype
) -> None:
    given = problem((5, 2, 100), dtype, device, **OPTIONS[option])
    check_gradients(kernel, given, random_like(given.x))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_gradient_of_weight_sees_the_rounding(
    kernel: ModuleType, device: str, tiles: str, dtype: torch.dtype
) -> None:
    """With `before_weight` the weight meets the rounded norm, forward and backward."""
    x = torch.randn(1, 96).to(device, dtype)
    gradients = []
    for rounding in ("before_weight", "once"):
        weight = torch.ones(96, device=device, requires_grad=True)
        kernel.rmsnorm(x, weight, rounding=rounding).sum().backward()
        gradients.append(weight.grad)
    before, once = gradients
    assert torch.equal(before, kernel.rmsnorm(x, rounding="before_weight")[0].float())
    assert not torch.equal(once, once.to(dtype).float())


@pytest.mark.parametrize("through", ("norm", "sum", "both"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", ("plain", "weight", "before_weight_offset_bias"))
def test_residual(
    kernel: ModuleType, device: str, tiles: str, option: str, dtype: torch.dtype, through: str
) -> None:
    """Case B19: the gradient that reaches the sum itself does not pass the norm."""
    given = problem((5, 2, 100), dtype, device, residual=dtype, **OPTIONS[option])
    dy, dtotal = random_like(given.x), random_like(given.x)
    check_gradients(
        kernel, given, None if through == "sum" else dy, None if through == "norm" else dtotal
    )


@pytest.mark.parametrize("total_dtype", (torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("residual", (torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_dtypes(
    kernel: ModuleType,
    device: str,
    dtype: torch.dtype,
    residual: torch.dtype,
    total_dtype: torch.dtype,
) -> None:
    given = problem((5, 80), dtype, device, residual=residual, residual_dtype=total_dtype)
    check_gradients(kernel, given, random_like(given.x), random_like(given.x, total_dtype))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_dtype(
    kernel: ModuleType, device: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    given = problem((5, 80), dtype, device, out_dtype=out_dtype)
    check_gradients(kernel, given, random_like(given.x, out_dtype))


@pytest.mark.parametrize("b", (0.0, 3.0))
def test_sum_used_downstream(kernel: ModuleType, device: str, b: float) -> None:
    """Case B19 word for word."""
    given = problem((6, 64), torch.float32, device, residual=torch.float32)
    leaves, exact, peer = given.leaves(), given.leaves(torch.float64), given.leaves()
    for problem_, (y, total) in (
        (leaves, leaves(kernel)),
        (exact, (replace(exact, x=exact.x + exact.residual, residual=None).exact(), None)),
        (peer, (peer.peer(), None)),
    ):
        total = problem_.x + problem_.residual if total is None else total
        (2.0 * y.sum() + b * (total**2).sum()).backward()
    for name in ("x", "residual", "weight"):
        gradients = (p.tensors[name].grad for p in (leaves, exact, peer))
        check_tensor(*gradients)
    assert torch.equal(leaves.x.grad, leaves.residual.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 2, 17, 63, 64, 127, 128, 257, 1000, 4096))
def test_widths(kernel: ModuleType, device: str, n: int, dtype: torch.dtype) -> None:
    given = problem((5, n), dtype, device, weight=dtype, bias=dtype)
    check_gradients(kernel, given, random_like(given.x))


def test_wider_than_any_tile(
    kernel: ModuleType, device: str, uses_triton: bool, launches: Launches
) -> None:
    given = problem((2, 16401), torch.float16, device, residual=torch.float16)
    check_gradients(kernel, given, random_like(given.x), random_like(given.x))
    check_launches(launches, uses_triton)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    ((2048, 4096), (8192, 5120), (65536, 128), (3000, 7168), (300, 16384), (300, 40000),
     (3, 2**20 + 3)),
    ids=str,
)  # fmt: skip
def test_sizes_of_models(
    kernel: ModuleType, device: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    given = problem(shape, dtype, device, weight=dtype, residual=dtype)
    check_gradients(kernel, given, random_like(given.x), random_like(given.x))


@pytest.mark.parametrize("rows", (1, 33, 100))
def test_row_counts(kernel: ModuleType, device: str, tiles: str, rows: int) -> None:
    """More rows than programs: each sums the weight's gradient over several tiles of rows."""
    given = problem((rows, 64), torch.float16, device, bias=torch.float16)
    check_gradients(kernel, given, random_like(given.x))


@pytest.mark.parametrize("shape", ((48,), (3, 48), (3, 2, 48), (2, 3, 2, 48)), ids=str)
def test_ranks(kernel: ModuleType, device: str, shape: tuple[int, ...]) -> None:
    """Case B25."""
    given = problem(shape, torch.float16, device, residual=torch.float16)
    check_gradients(kernel, given, random_like(given.x), random_like(given.x))


SUBSETS = [
    names
    for count in range(1, 5)
    for names in itertools.combinations(("x", "residual", "weight", "bias"), count)
]


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_frozen_inputs(
    kernel: ModuleType, device: str, tiles: str, wanted: tuple[str, ...]
) -> None:
    """A frozen tensor gets no gradient and changes no other: same bits as with all."""
    given = problem((5, 64), torch.float16, device, residual=torch.float16, bias=torch.float32)
    dy, dtotal = random_like(given.x), random_like(given.x)
    everything = check_gradients(kernel, given, dy, dtotal)
    some = given.leaves()
    for name, tensor in some.tensors.items():
        tensor.requires_grad_(name in wanted)
    y, total = some(kernel)
    torch.autograd.backward(
        [t for t in (y, total) if t.requires_grad],
        [g for t, g in ((y, dy), (total, dtotal)) if t.requires_grad],
    )
    for name, tensor in some.tensors.items():
        if name in wanted:
            assert torch.equal(tensor.grad, everything.tensors[name].grad), name
        else:
            assert tensor.grad is None, name


@pytest.mark.parametrize("reduce", ("sum", "mean"))
@pytest.mark.parametrize("residual", (None, torch.float16), ids=str)
def test_expanded_gradient(
    kernel: ModuleType, device: str, residual: torch.dtype | None, reduce: str
) -> None:
    """Case B23; norm.md 5, #2: autograd hands over one element with strides of 0."""
    given = problem((2, 16, 64), torch.float16, device, residual=residual)
    leaves = given.leaves()
    y, total = leaves(kernel)
    loss = getattr(y, reduce)() + (0 if total is None else getattr(total, reduce)())
    loss.backward()
    ones = torch.ones_like(y) / (1 if reduce == "sum" else y.numel())
    gradients = given.gradients(ones, None if total is None else ones)
    for name, (exact, peer) in gradients.items():
        check_tensor(leaves.tensors[name].grad, exact, peer)


@pytest.mark.parametrize("n", (64, 100))
def test_backward_twice(kernel: ModuleType, device: str, tiles: str, n: int) -> None:
    """norm.md 5, #3: backward changes neither what it saved nor the gradient it is handed."""
    given = problem((5, n), torch.float16, device, residual=torch.float16).leaves()
    y, total = given(kernel)
    gradient = torch.ones_like(y)
    inputs = tuple(given.tensors.values())

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            (y + given.x * 0, total), inputs, (gradient, gradient), retain_graph=True
        )

    first = gradients()
    assert bool((gradient == 1).all())
    for _ in range(20 if device == "cuda" else 3):  # case B41: the same bits every time
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def test_saved_tensors(kernel: ModuleType, device: str) -> None:
    """norm.md 5, #12: saved are x, the weight and 1 / rms in float32, and nothing else."""
    saved: list[Tensor] = []
    given = problem((5, 64), torch.float16, device, weight=torch.float16).leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        given(kernel)
    found = sorted((tuple(t.shape), str(t.dtype)) for t in saved)
    assert found == [((5,), "torch.float32"), ((5, 64), "torch.float16"), ((64,), "torch.float16")]


@pytest.mark.parametrize("n", (64, 16400))
def test_rstd_is_float32(kernel: ModuleType, device: str, n: int) -> None:
    x = torch.randn(5, n).to(device, torch.float16)
    ops = part(kernel, "ops")
    _, rstd = ops.rmsnorm(x, None, None, 1e-6, 0.0, False, torch.float16)
    assert rstd.dtype is torch.float32 and rstd.shape == (5,)
    mean = x.double().square().mean(-1)
    check_tensor(rstd, 1 / (mean + 1e-6).sqrt(), torch.rsqrt(x.float().pow(2).mean(-1) + 1e-6))


def test_input_changed_before_backward(kernel: ModuleType, device: str) -> None:
    """Autograd notices, instead of a gradient of other values."""
    given = problem((5, 64), torch.float32, device).leaves()
    x = given.x * 1
    y = kernel.rmsnorm(x, given.weight)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("residual", (None, torch.float32), ids=str)
def test_double_backward_is_an_error(
    kernel: ModuleType, device: str, residual: torch.dtype | None
) -> None:
    """There is no second derivative: it must not come out as zero."""
    given = problem((5, 64), torch.float32, device, residual=residual).leaves()
    y, _ = given(kernel)
    (dx,) = torch.autograd.grad(y.square().sum(), given.x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.square().sum().backward()


@pytest.mark.parametrize("name", ("x", "weight", "bias", "residual"))
def test_results_carry_a_gradient(kernel: ModuleType, device: str, name: str) -> None:
    """Case B56; norm.md 5, #16: whatever wants a gradient, the results that depend on it say so."""
    given = problem((3, 64), torch.float32, device, residual=torch.float32, bias=torch.float32)
    assert given(kernel)[0].grad_fn is None
    given.tensors[name].requires_grad_()
    y, total = given(kernel)
    assert y.grad_fn is not None
    assert name in ("weight", "bias") or total.grad_fn is not None
    functions = {"rmsnorm_residual_fused": (given.x, given.residual, given.weight)}
    if name != "residual":
        functions["rmsnorm"] = (given.x, given.weight)
    for function, arguments in functions.items():
        assert getattr(kernel, function)(*arguments, bias=given.bias).grad_fn is not None
    with torch.no_grad():
        assert given(kernel)[0].grad_fn is None
    with torch.inference_mode():
        assert not given(kernel)[0].requires_grad


def test_fused_without_sum_has_the_same_gradients(kernel: ModuleType, device: str) -> None:
    given = problem((5, 64), torch.float16, device, residual=torch.float16)
    both, alone = given.leaves(), given.leaves()
    dy = random_like(given.x)
    both(kernel)[0].backward(dy)
    kernel.rmsnorm_residual_fused(alone.x, alone.residual, alone.weight).backward(dy)
    for name, tensor in both.tensors.items():
        assert torch.equal(tensor.grad, alone.tensors[name].grad), name
