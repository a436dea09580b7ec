"""Bad arguments: an error that names function, argument, wanted and got, before any launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from .conftest import launch_functions
from .oracle import part

FUNCTIONS = ("rmsnorm", "rmsnorm_residual_fused", "add_rmsnorm")
WITH_RESIDUAL = FUNCTIONS[1:]
NAN, INF = float("nan"), float("inf")


def of(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    """Return what makes a tensor on a device that is known later."""
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


def elsewhere(*shape: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.ones(shape, device="meta")


# Argument, value (made by calling it with the device, if it can be called), error, what the text
# says was wanted, what it says came.
BAD = (
    ("x", None, TypeError, "tensor", "None"),
    ("x", [[1.0, 2.0]], TypeError, "tensor", "list"),
    ("x", 1.0, TypeError, "tensor", "1.0 (float)"),
    ("x", of(4, 8, dtype=torch.int32), TypeError, "float16, bfloat16 or float32", "torch.int32"),
    ("x", of(4, 8, dtype=torch.bool), TypeError, "float16, bfloat16 or float32", "torch.bool"),
    ("x", of(4, 8, dtype=torch.float64), TypeError, "bfloat16 or float32", "torch.float64"),
    ("x", of(4, 8, dtype=torch.complex64), TypeError, "bfloat16 or float32", "torch.complex64"),
    ("x", of(), ValueError, "at least one dimension", "()"),
    ("x", of(4, 0), ValueError, "last one of at least 1", "(4, 0)"),
    ("x", of(0), ValueError, "last one of at least 1", "(0,)"),
    ("weight", of(7), ValueError, "shape (8,)", "(7,)"),
    ("weight", of(1), ValueError, "shape (8,)", "(1,)"),
    ("weight", of(0), ValueError, "shape (8,)", "(0,)"),
    ("weight", of(1, 8), ValueError, "shape (8,)", "(1, 8)"),
    ("weight", of(4, 8), ValueError, "shape (8,)", "(4, 8)"),
    ("weight", of(), ValueError, "shape (8,)", "()"),
    ("weight", of(8, dtype=torch.int8), TypeError, "bfloat16 or float32", "torch.int8"),
    ("weight", of(8, dtype=torch.float64), TypeError, "bfloat16 or float32", "torch.float64"),
    ("weight", elsewhere(8), ValueError, "with x", "on meta"),
    ("weight", [1.0] * 8, TypeError, "tensor", "list"),
    ("weight", 1.0, TypeError, "tensor", "1.0 (float)"),
    ("bias", of(7), ValueError, "shape (8,)", "(7,)"),
    ("bias", of(0), ValueError, "shape (8,)", "(0,)"),
    ("bias", of(8, dtype=torch.int64), TypeError, "bfloat16 or float32", "torch.int64"),
    ("bias", elsewhere(8), ValueError, "with x", "on meta"),
    ("bias", 0.0, TypeError, "tensor", "0.0 (float)"),
    ("eps", NAN, ValueError, "finite", "nan"),
    ("eps", INF, ValueError, "finite", "inf"),
    ("eps", -1e-6, ValueError, "at least 0", "-1e-06"),
    ("eps", 1e39, ValueError, "finite in float32", "1e+39"),
    ("eps", 10**400, ValueError, "finite in float32", "1000"),
    ("eps", of(), TypeError, "number", "torch.float32 tensor of shape ()"),
    ("eps", "1e-6", TypeError, "number", "'1e-6' (str)"),
    ("eps", True, TypeError, "number", "True (bool)"),
    ("eps", None, TypeError, "number", "None"),
    ("offset", NAN, ValueError, "finite", "nan"),
    ("offset", -INF, ValueError, "finite", "-inf"),
    ("offset", of(8), TypeError, "number", "torch.float32 tensor of shape (8,)"),
    ("offset", "one", TypeError, "number", "'one' (str)"),
    ("offset", False, TypeError, "number", "False (bool)"),
    ("rounding", "before-weight", ValueError, "'before_weight'", "'before-weight'"),
    ("rounding", "", ValueError, "'once'", "''"),
    ("rounding", None, ValueError, "'once'", "None"),
    ("rounding", True, ValueError, "'once'", "True"),
    ("out_dtype", torch.int8, TypeError, "torch.float32", "torch.int8"),
    ("out_dtype", torch.float64, TypeError, "torch.float32", "torch.float64"),
    ("out_dtype", "float16", TypeError, "torch.float32", "'float16' (str)"),
    ("out_dtype", [torch.float16], TypeError, "torch.float32", "(list)"),
    ("out_dtype", float, TypeError, "torch.float32", "(type)"),
)
BAD_RESIDUAL = (
    ("residual", None, TypeError, "tensor", "None"),
    ("residual", [[1.0]], TypeError, "tensor", "list"),
    ("residual", of(4, 7), ValueError, "shape (4, 8)", "(4, 7)"),
    ("residual", of(8), ValueError, "shape (4, 8)", "(8,)"),
    ("residual", of(1, 8), ValueError, "shape (4, 8)", "(1, 8)"),
    ("residual", of(2, 2, 8), ValueError, "shape (4, 8)", "(2, 2, 8)"),
    ("residual", of(4, 8, dtype=torch.int32), TypeError, "bfloat16 or float32", "torch.int32"),
    ("residual", elsewhere(4, 8), ValueError, "with x", "on meta"),
)
BAD_TOTAL = (
    ("residual_dtype", torch.int32, TypeError, "torch.float32", "torch.int32"),
    ("residual_dtype", torch.float64, TypeError, "torch.float32", "torch.float64"),
    ("residual_dtype", "fp32", TypeError, "torch.float32", "'fp32' (str)"),
)
CASES = [
    (function, *case)
    for functions, cases in (
        (FUNCTIONS, BAD),
        (WITH_RESIDUAL, BAD_RESIDUAL),
        (("add_rmsnorm",), BAD_TOTAL),
    )
    for case in cases
    for function in functions
]


@pytest.fixture
def nothing_runs(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if anything is computed."""

    def computed(*_: object, **__: object) -> None:
        pytest.fail("something was computed before the arguments were checked")

    for name in launch_functions(kernel):
        monkeypatch.setattr(part(kernel, "launch"), name, computed)
    for name in ("forward", "backward"):
        monkeypatch.setattr(part(kernel, "reference"), name, computed)
        monkeypatch.setattr(part(kernel, "ops"), name, computed)


@pytest.mark.kernels_ci
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("gradients", (False, True), ids=("", "gradients"))
@pytest.mark.parametrize(
    ("function", "argument", "value", "error", "wanted", "got"),
    CASES,
    ids=[f"{case[0]}-{case[1]}-{case[5]}" for case in CASES],
)
def test_bad_argument(
    kernel: ModuleType,
    device: str,
    function: str,
    argument: str,
    value: object,
    error: type[Exception],
    wanted: str,
    got: str,
    gradients: bool,
) -> None:
    arguments = {"x": torch.ones(4, 8, device=device), "weight": torch.ones(8, device=device)}
    if gradients:
        arguments["weight"].requires_grad_()
    if function in WITH_RESIDUAL:
        arguments["residual"] = torch.ones(4, 8, device=device)
    arguments[argument] = value(device) if callable(value) and value is not float else value
    with pytest.raises(error) as caught:
        getattr(kernel, function)(**arguments)
    text = str(caught.value)
    assert type(caught.value) is error
    assert text.startswith(f"{function}: {argument} must"), text
    before, _, after = text.partition(", got ")
    assert wanted in before and got in after, text


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("argument", ("weight", "bias", "residual"))
def test_other_device(kernel: ModuleType, argument: str) -> None:
    """Case B46: the text names both devices."""
    x = torch.ones(4, 8, device="cuda")
    arguments = {"residual": x}
    arguments[argument] = torch.ones(4, 8) if argument == "residual" else torch.ones(8)
    pattern = rf"add_rmsnorm: {argument} must be on cuda:0 with x, got .* on cpu"
    with pytest.raises(ValueError, match=pattern):
        kernel.add_rmsnorm(x, **arguments)


@pytest.mark.usefixtures("nothing_runs")
def test_unknown_argument(kernel: ModuleType, device: str) -> None:
    x = torch.ones(4, 8, device=device)
    with pytest.raises(TypeError, match=re.escape("rmsnorm() got an unexpected keyword argument")):
        kernel.rmsnorm(x, out=x)
    with pytest.raises(TypeError, match="positional argument"):
        kernel.rmsnorm(x, None, 1e-6, None)


@pytest.mark.parametrize("eps", (0, 1, 1e-12, 1e30))
@pytest.mark.parametrize("offset", (0, 1, -2))
def test_numbers_of_any_kind(kernel: ModuleType, device: str, eps: float, offset: float) -> None:
    """Integers are taken as the numbers they are, and not remembered for the next call."""
    x, weight = torch.randn(4, 24, device=device), torch.randn(24, device=device)
    for _ in range(2):
        got = kernel.rmsnorm(x, weight, eps, offset=offset)
        assert torch.equal(got, kernel.rmsnorm(x, weight, float(eps), offset=float(offset)))
        other = kernel.rmsnorm(x, weight, 0.5, offset=0.25)
        assert not torch.equal(got, other)
        assert torch.equal(other, kernel.rmsnorm(x, weight, 0.5, offset=0.25))


@pytest.mark.parametrize("carrier", ("x", "weight"))
def test_forward_mode_is_refused(kernel: ModuleType, device: str, carrier: str) -> None:
    """A tangent is not dropped silently (B56 for the other mode of differentiation)."""
    given = {"x": torch.randn(2, 8, device=device), "weight": torch.randn(8, device=device)}
    with torch.autograd.forward_ad.dual_level():
        kernel.rmsnorm(**given)  # nothing to differentiate
        given[carrier] = torch.autograd.forward_ad.make_dual(
            given[carrier], torch.ones_like(given[carrier])
        )
        with pytest.raises(NotImplementedError, match="rmsnorm: .*forward-mode"):
            kernel.rmsnorm(**given)


def test_forward_mode_of_a_transform_is_refused(kernel: ModuleType, device: str) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(NotImplementedError, match="rmsnorm: .*forward-mode"):
        torch.func.jvp(kernel.rmsnorm, (x,), (x,))


def test_tensors_without_data(kernel: ModuleType) -> None:
    y, total = kernel.add_rmsnorm(*(torch.empty(2, 8, device="meta") for _ in range(2)))
    assert y.is_meta and total.is_meta and y.shape == total.shape == (2, 8)


def test_more_rows_than_kernels_count(kernel: ModuleType) -> None:
    """B04: a row number past 2^31 would wrap, and pass the mask as a negative one."""
    rows = part(kernel, "api").MOST_ROWS + 1
    x = torch.empty(1, 1, dtype=torch.float16).expand(rows, 1)
    with pytest.raises(ValueError, match=f"at most {rows - 1} rows"):
        kernel.rmsnorm(x)
