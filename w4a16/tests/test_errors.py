"""Bad arguments: an error that names function, argument, wanted and got, before any launch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from .oracle import part, weight

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="arguments are checked the same with and without the interpreter",
)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


def of(*shape: int, dtype: torch.dtype = HALF, device: str | None = None) -> Callable:
    """Return what makes a tensor on a device that is known later."""
    return lambda there: torch.ones(shape, dtype=dtype, device=device or there)


# Function, argument, value (made by calling it with the device, if it is a function), error, what
# the text says was wanted, what it says came.
BAD = (
    ("w4a16_gemm", "x", None, TypeError, "float16 or bfloat16", "None"),
    ("w4a16_gemm", "x", [[1.0]], TypeError, "float16 or bfloat16", "list"),
    ("w4a16_gemm", "x", of(3, 64, dtype=FLOAT), TypeError, "float16 or bfloat16", "torch.float32"),
    ("w4a16_gemm", "x", of(3, 64, dtype=torch.float64), TypeError, "bfloat16", "torch.float64"),
    ("w4a16_gemm", "x", of(3, 64, dtype=torch.int8), TypeError, "bfloat16", "torch.int8"),
    ("w4a16_gemm", "x", of(), ValueError, "last dimension of 64", "()"),
    ("w4a16_gemm", "x", of(64, 3), ValueError, "last dimension of 64", "(64, 3)"),
    ("w4a16_gemm", "x", of(3, 32), ValueError, "last dimension of 64", "(3, 32)"),
    ("w4a16_gemm", "x", of(0), ValueError, "last dimension of 64", "(0,)"),
    ("w4a16_gemm", "x", of(3, 0), ValueError, "last dimension of 64", "(3, 0)"),
    ("w4a16_gemm", "x", of(0, 16), ValueError, "last dimension of 64", "(0, 16)"),
    ("w4a16_gemm", "x", of(3, 64, device="meta"), ValueError, "with the weight", "on meta"),
    ("w4a16_gemm", "weight", None, TypeError, "a W4Weight", "None"),
    ("w4a16_gemm", "weight", of(16, 64), TypeError, "a W4Weight", "shape (16, 64)"),
    ("w4a16_gemm", "weight", {}, TypeError, "a W4Weight", "{} (dict)"),
    ("w4a16_gemm", "bias", 0.0, TypeError, "a tensor", "0.0 (float)"),
    ("w4a16_gemm", "bias", [0.0] * 16, TypeError, "a tensor", "list"),
    ("w4a16_gemm", "bias", of(16, dtype=torch.int32), TypeError, "or float32", "torch.int32"),
    ("w4a16_gemm", "bias", of(16, dtype=torch.float64), TypeError, "or float32", "torch.float64"),
    ("w4a16_gemm", "bias", of(1), ValueError, "shape (16,)", "(1,)"),
    ("w4a16_gemm", "bias", of(0), ValueError, "shape (16,)", "(0,)"),
    ("w4a16_gemm", "bias", of(64), ValueError, "shape (16,)", "(64,)"),
    ("w4a16_gemm", "bias", of(1, 16), ValueError, "shape (16,)", "(1, 16)"),
    ("w4a16_gemm", "bias", of(), ValueError, "shape (16,)", "()"),
    ("w4a16_gemm", "bias", of(16, device="meta"), ValueError, "with x", "on meta"),
    ("dequantize", "weight", None, TypeError, "a W4Weight", "None"),
    ("dequantize", "weight", of(16, 64), TypeError, "a W4Weight", "shape (16, 64)"),
    ("dequantize", "dtype", torch.int8, TypeError, "torch.float32", "torch.int8"),
    ("dequantize", "dtype", torch.float64, TypeError, "torch.float32", "torch.float64"),
    ("dequantize", "dtype", "float16", TypeError, "torch.float32", "'float16' (str)"),
    ("dequantize", "dtype", None, TypeError, "torch.float32", "None"),
    ("quantize", "weight", None, TypeError, "tensor", "None"),
    ("quantize", "weight", [[1.0]], TypeError, "tensor", "list"),
    ("quantize", "weight", of(16, 64, dtype=torch.int8), TypeError, "float32", "torch.int8"),
    ("quantize", "weight", of(16, 64, dtype=torch.float64), TypeError, "32", "torch.float64"),
    ("quantize", "weight", of(64), ValueError, "[out_features, in_features]", "(64,)"),
    ("quantize", "weight", of(2, 16, 64), ValueError, "[out_features, in_features]", "(2, 16, 64)"),
    ("quantize", "weight", of(), ValueError, "[out_features, in_features]", "()"),
    ("quantize", "out_features", of(12, 64), ValueError, "a multiple of 8 from 8", "12"),
    ("quantize", "out_features", of(0, 64), ValueError, "a multiple of 8 from 8", "0"),
    ("quantize", "out_features", of(1, 64), ValueError, "a multiple of 8 from 8", "1"),
    ("quantize", "in_features", of(16, 100), ValueError, "a multiple of 32 from 32", "100"),
    ("quantize", "in_features", of(16, 0), ValueError, "a multiple of 32 from 32", "0"),
    ("quantize", "in_features", of(16, 31), ValueError, "a multiple of 32 from 32", "31"),
    ("quantize", "group_size", 96, ValueError, "one of (32, 64, 128", "96"),
    ("quantize", "group_size", 0, ValueError, "one of (32, 64, 128", "0"),
    ("quantize", "group_size", -2, ValueError, "one of (32, 64, 128", "-2"),
    ("quantize", "group_size", 2048, ValueError, "one of (32, 64, 128", "2048"),
    ("quantize", "group_size", None, ValueError, "one of (32, 64, 128", "None"),
    ("quantize", "group_size", "128", ValueError, "one of (32, 64, 128", "128"),
)


@pytest.fixture
def nothing_runs(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if anything is computed."""

    def computed(*_: object, **__: object) -> None:
        pytest.fail("something was computed before the arguments were checked")

    for module, names in (
        ("ops", ("gemm", "w4a16_gemm", "dequantize", "fused", "by_dequantizing")),
        ("reference", ("gemm", "dequantize")),
        ("api", ("pack",)),
    ):
        for name in names:
            monkeypatch.setattr(part(kernel, module), name, computed)


@pytest.mark.kernels_ci
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("gradients", (False, True), ids=("", "gradients"))
@pytest.mark.parametrize(
    ("function", "argument", "value", "error", "wanted", "got"),
    BAD,
    ids=[f"{case[0]}-{case[1]}-{case[5]}" for case in BAD],
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
    x = torch.ones(3, 64, device=device, dtype=HALF, requires_grad=gradients)
    arguments: dict[str, object] = {
        "w4a16_gemm": {"x": x, "weight": weight(kernel, 16, 64, device=device)},
        "dequantize": {"weight": weight(kernel, 16, 64, device=device), "dtype": HALF},
        "quantize": {"weight": torch.ones(16, 64, device=device)},
    }[function]
    if callable(value):
        value = value(device)
    # A size that is wrong is one of the weight, but named by what it is.
    named = "weight" if argument in ("out_features", "in_features") else argument
    with pytest.raises(error) as caught:
        getattr(kernel, function)(**{**arguments, named: value})
    text = str(caught.value)
    assert type(caught.value) is error
    assert text.startswith(f"{function}: {argument} must be") or text.startswith(
        f"{function}: {argument} must have"
    ), text
    before, _, after = text.partition(", got ")
    assert wanted in before and got in after, text


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("dtype", (HALF, BFLOAT, FLOAT), ids=str)
def test_only_finite_weights(
    kernel: ModuleType, device: str, dtype: torch.dtype, bad: float
) -> None:
    dense = torch.zeros(8, 64, device=device, dtype=dtype)
    dense[7, 63] = bad
    with pytest.raises(ValueError, match="quantize: weight must be finite, got infinities or NaN"):
        kernel.quantize(dense)


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_runs")
def test_other_device(kernel: ModuleType) -> None:
    """Case B46, B47: the text names both devices."""
    w = weight(kernel, 16, 64, device="cuda")
    x = torch.ones(3, 64, dtype=HALF)
    with pytest.raises(ValueError, match="x must be on cuda:0 with the weight, got .* on cpu"):
        kernel.w4a16_gemm(x, w)
    with pytest.raises(ValueError, match="bias must be on cuda:0 with x, got .* on cpu"):
        kernel.w4a16_gemm(x.cuda(), w, torch.zeros(16))


# Field of a `W4Weight` of 16 x 160 in groups of 64, a bad value, error, wanted, got.
BAD_PARTS = (
    ("qweight", None, ValueError, "[blocks, rows, 32]", "None"),
    ("qweight", of(16, 64, dtype=torch.int16), ValueError, "[blocks, rows, 32]", "(16, 64)"),
    ("qweight", of(2, 16, 32, dtype=torch.int32), TypeError, "torch.int16", "torch.int32"),
    ("qweight", of(1, 16, 32, dtype=torch.int16), ValueError, "shape (2, 16, 32)", "(1, 16, 32)"),
    ("qweight", of(2, 16, 31, dtype=torch.int16), ValueError, "shape (2, 16, 32)", "(2, 16, 31)"),
    ("scales", of(3, 16, dtype=torch.float64), TypeError, "torch.float16", "torch.float64"),
    ("scales", None, TypeError, "torch.float16", "None"),
    ("scales", of(2, 16), ValueError, "shape (3, 16)", "(2, 16)"),
    ("scales", of(16, 3), ValueError, "shape (3, 16)", "(16, 3)"),
    ("scales", of(3, 16, device="meta"), ValueError, "with qweight", "on meta"),
    ("zeros", of(3, 16), TypeError, "torch.int16 or torch.float32", "torch.float16"),
    ("zeros", of(3, 16, dtype=torch.uint8), TypeError, "torch.int16", "torch.uint8"),
    ("zeros", of(3, 1, dtype=torch.int16), ValueError, "shape (3, 16)", "(3, 1)"),
    ("zeros", of(3, 16, dtype=FLOAT, device="meta"), ValueError, "with qweight", "on meta"),
    ("perm", of(160, dtype=torch.int64), TypeError, "torch.int32", "torch.int64"),
    ("perm", of(159, dtype=torch.int32), ValueError, "shape (160,)", "(159,)"),
)


@pytest.mark.parametrize(
    ("name", "value", "error", "wanted", "got"),
    BAD_PARTS,
    ids=[f"{case[0]}-{case[4]}" for case in BAD_PARTS],
)
def test_bad_part(
    kernel: ModuleType,
    device: str,
    name: str,
    value: object,
    error: type[Exception],
    wanted: str,
    got: str,
) -> None:
    w = weight(kernel, 16, 160, group_size=64, zeros="integer", perm=True, device=device)
    if callable(value):
        value = value(device)
    with pytest.raises(error) as caught:
        dataclasses.replace(w, **{name: value})
    text = str(caught.value)
    assert type(caught.value) is error and text.startswith(f"W4Weight: {name} must be"), text
    before, _, after = text.partition(", got ")
    assert wanted in before and got in after, text


def test_parts_are_dense(kernel: ModuleType, device: str) -> None:
    """The kernel reads parts without strides: another layout is refused, never misread."""
    w = weight(kernel, 16, 160, group_size=64, zeros="integer", device=device)
    for name in ("qweight", "scales", "zeros"):
        dense = getattr(w, name)
        for other in (
            dense.transpose(-1, -2).contiguous().transpose(-1, -2),
            torch.cat((dense, dense))[::2],
            dense[:1].expand_as(dense),
        ):
            with pytest.raises(ValueError, match=f"W4Weight: {name} must be contiguous"):
                dataclasses.replace(w, **{name: other})


@pytest.mark.parametrize(
    ("change", "text"),
    (
        ({"in_features": 100}, "in_features must be a multiple of 32 from 32 .*got 100"),
        ({"in_features": 192}, r"scales must be contiguous|qweight must be contiguous|perm"),
        ({"in_features": 2**24}, "in_features must be .* to 16777184, got 16777216"),
        ({"group_size": 96}, "group_size must be one of .*, got 96"),
        ({"group_size": 32}, r"scales must be contiguous of shape \(5, 16\), got .*\(3, 16\)"),
        ({"group_size": -1}, r"scales must be contiguous of shape \(1, 16\), got .*\(3, 16\)"),
    ),
)
def test_bad_sizes(kernel: ModuleType, device: str, change: dict[str, object], text: str) -> None:
    w = weight(kernel, 16, 160, group_size=64, perm=True, device=device)
    with pytest.raises(ValueError, match=f"W4Weight: ({text})"):
        dataclasses.replace(w, **change)


def test_bad_state(kernel: ModuleType, device: str) -> None:
    w = weight(kernel, 16, 160, group_size=64, device=device)
    good = w.state_dict()
    load = kernel.W4Weight.from_state_dict
    for state in (
        {},
        {name: good[name] for name in ("qweight", "scales")},
        {**good, "g_idx": good["sizes"]},
    ):
        with pytest.raises(ValueError, match=r"from_state_dict: wanted qweight.*, got \["):
            load(state)
    with pytest.raises(ValueError, match=r"sizes must be \(in_features, group_size\), got .*\(3,"):
        load({**good, "sizes": torch.tensor([160, 64, 0])})
    with pytest.raises(ValueError, match="W4Weight: scales must be contiguous of shape"):
        load({**good, "sizes": torch.tensor([160, 128])})


def test_to_takes_a_device(kernel: ModuleType, device: str) -> None:
    w = weight(kernel, 16, 64, device=device)
    with pytest.raises(TypeError, match="W4Weight.to takes a device"):
        w.to(HALF)
    with pytest.raises(dataclasses.FrozenInstanceError):
        w.group_size = 32


@settings(max_examples=150, deadline=None)
@given(
    n=st.sampled_from((0, 1, 4, 8, 12, 16, 40)),
    k=st.sampled_from((0, 16, 32, 64, 96, 100, 128, 160, 256)),
    bits=st.sampled_from((2, 3, 4, 4, 4, 8)),
    group_size=st.sampled_from((-2, -1, 0, 32, 64, 96, 128, 256, 512, 1024, 2048)),
    symmetric=st.booleans(),
    desc_act=st.booleans(),
    dtype=st.sampled_from((HALF, BFLOAT, FLOAT, torch.int8)),
    source=st.sampled_from((HALF, BFLOAT, FLOAT)),
)
@example(12, 64, 4, 32, True, False, HALF, HALF)
@example(16, 100, 4, 32, True, False, HALF, HALF)
@example(16, 64, 4, 96, True, False, HALF, HALF)
@example(16, 64, 4, 32, True, False, FLOAT, FLOAT)
@example(16, 64, 8, 32, True, False, HALF, HALF)
@example(16, 64, 4, 64, False, True, BFLOAT, FLOAT)
def test_supports_and_the_call_agree(
    kernel: ModuleType,
    device: str,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    desc_act: bool,
    dtype: torch.dtype,
    source: torch.dtype,
) -> None:
    """Cases B137, B140: what `supports` says of a weight is what the functions do with it."""
    right, reason = kernel.supports(
        in_features=k, out_features=n, bits=bits, group_size=group_size, symmetric=symmetric,
        desc_act=desc_act, dtype=dtype,
    )  # fmt: skip
    assert right == (reason == "")
    if bits != 4:
        assert reason == f"bits must be 4, got {bits}"
        return
    try:
        w = kernel.quantize(torch.ones(n, k, device=device, dtype=source), group_size, symmetric)
        if desc_act:
            order = torch.randperm(k, device=device).to(torch.int32)
            w = dataclasses.replace(w, perm=order)
        y = kernel.w4a16_gemm(torch.ones(2, k, device=device).to(dtype), w)
    except (ValueError, TypeError) as error:
        assert not right
        # The same words: the rule is one.
        if "dtype" not in reason:
            assert str(error) == f"quantize: {reason}"
    else:
        assert right and y.shape == (2, n)


@pytest.mark.usefixtures("nothing_runs")
def test_unknown_argument(kernel: ModuleType, device: str) -> None:
    w, x = weight(kernel, 16, 64, device=device), torch.ones(1, 64, dtype=HALF, device=device)
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        kernel.w4a16_gemm(x, w, out=x)
    with pytest.raises(TypeError, match="positional argument"):
        kernel.supports(64, 16)


@pytest.mark.parametrize("part_name", ("scales", "zeros"))
@pytest.mark.parametrize("x_gradient", (False, True))
def test_parts_have_no_gradient(
    kernel: ModuleType, device: str, part_name: str, x_gradient: bool
) -> None:
    """Case B56: nothing stops learning without a word."""
    w = weight(kernel, 16, 64, zeros="float", device=device)
    leaf = getattr(w, part_name).clone().requires_grad_()
    w = dataclasses.replace(w, **{part_name: leaf})
    x = torch.ones(1, 64, dtype=HALF, device=device, requires_grad=x_gradient)
    with pytest.raises(RuntimeError, match="w4a16_gemm: scales and zeros have no gradient"):
        kernel.w4a16_gemm(x, w)


@pytest.mark.parametrize("carrier", ("x", "bias"))
def test_forward_mode_is_refused(kernel: ModuleType, device: str, carrier: str) -> None:
    """A tangent is not dropped silently."""
    w = weight(kernel, 16, 64, device=device)
    given: dict[str, Tensor] = {
        "x": torch.randn(2, 64, device=device, dtype=HALF),
        "bias": torch.randn(16, device=device),
    }
    with torch.autograd.forward_ad.dual_level():
        kernel.w4a16_gemm(weight=w, **given)  # nothing to differentiate
        given[carrier] = torch.autograd.forward_ad.make_dual(
            given[carrier], torch.ones_like(given[carrier])
        )
        with pytest.raises(NotImplementedError, match="w4a16_gemm: .*forward-mode"):
            kernel.w4a16_gemm(weight=w, **given)


def test_forward_mode_of_a_transform_is_refused(kernel: ModuleType, device: str) -> None:
    w = weight(kernel, 16, 64, device=device)
    x = torch.randn(2, 64, device=device, dtype=HALF)
    with pytest.raises(NotImplementedError, match="w4a16_gemm: .*forward-mode"):
        torch.func.jvp(lambda each: kernel.w4a16_gemm(each, w), (x,), (x,))
