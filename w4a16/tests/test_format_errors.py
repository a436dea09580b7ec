"""What converters refuse: an error that names converter, argument, wanted and got."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from .checkpoint_formats import (
    awq,
    gptq,
    group_of,
    random_layer,
)
from .conversions import (
    FORMATS,
    GROUP_SIZES,
    convert,
    many,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="conversion is PyTorch code, the same with and without the interpreter",
)


@many
@given(
    n=st.integers(1, 40),
    words_=st.integers(1, 40),
    group_size=st.sampled_from((16, 100, *GROUP_SIZES)),
)
def test_supports_tells_what_converts(
    kernel: ModuleType, n: int, words_: int, group_size: int
) -> None:
    """Case B140: the same rule before and at the conversion."""
    k = 8 * words_
    groups = int(group_of(k, group_size)[-1]) + 1
    supported, reason = kernel.supports(in_features=k, out_features=n, group_size=group_size)
    qweight, scales = torch.zeros(words_, n, dtype=torch.int32), torch.ones(groups, n)
    g_idx = group_of(k, group_size)
    if supported:
        assert not reason
        assert kernel.from_gptq(qweight, None, scales, g_idx).in_features == k
    elif group_size in GROUP_SIZES or groups > 1:
        with pytest.raises(ValueError):
            kernel.from_gptq(qweight, None, scales, g_idx)


def i32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def u8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


ONES = torch.ones
GPTQ, AWQ, CT, HQQ = "from_gptq", "from_awq", "from_compressed_tensors", "from_hqq"
# Converter, argument, value, error, what the text says; 16 outputs, 128 inputs, groups of 64.
BAD = (
    (GPTQ, "qweight", ONES(16, 128).bfloat16(), TypeError, "torch.int32 .*not quantised"),
    (GPTQ, "qweight", i32(16, 16).long(), TypeError, "torch.int32 .*int64"),
    (GPTQ, "qweight", None, TypeError, "torch.int32 .*None"),
    (GPTQ, "qweight", i32(16), ValueError, "in_features / 8, out_features"),
    (GPTQ, "scales", i32(2, 16), TypeError, "float16, bfloat16 or float32"),
    (GPTQ, "scales", None, TypeError, "tensor"),
    (GPTQ, "scales", ONES(2), ValueError, "2 dimensions"),
    (GPTQ, "scales", ONES(2, 24), ValueError, r"shape \(2, 16\)"),
    (GPTQ, "scales", ONES(2, 16, device="meta"), ValueError, "on cpu .*meta"),
    (GPTQ, "qzeros", ONES(2, 2), TypeError, "torch.int32"),
    (GPTQ, "qzeros", i32(3, 2), ValueError, r"shape \(2, 2\)"),
    (GPTQ, "qzeros", i32(2, 7), ValueError, r"shape \(2, 2\)"),
    (GPTQ, "qzeros", i32(2, 1), NotImplementedError, "4-bit .* of 2"),
    (GPTQ, "qzeros", i32(2, 4), NotImplementedError, "4-bit .* of 8"),
    (GPTQ, "qzeros", i32(2, 2).to("meta"), ValueError, "on cpu .*meta"),
    (GPTQ, "g_idx", ONES(128), TypeError, "int32 or torch.int64"),
    (GPTQ, "g_idx", [0] * 128, TypeError, "int32 or torch.int64"),
    (GPTQ, "g_idx", i32(128).to("meta"), ValueError, "on cpu .*meta"),
    (GPTQ, "zero_offset", 2, ValueError, "0, 1 or 'auto', got 2"),
    (GPTQ, "zero_offset", "v1", ValueError, "0, 1 or 'auto', got 'v1'"),
    (GPTQ, "zero_offset", True, ValueError, "0, 1 or 'auto', got True"),
    (AWQ, "qweight", ONES(128, 16).half(), TypeError, "torch.int32 .*not quantised"),
    (AWQ, "qweight", i32(128, 16), ValueError, r"shape \(128, 2\)"),
    (AWQ, "qweight", i32(128, 4), NotImplementedError, "4-bit .* of 8"),
    (AWQ, "qzeros", None, TypeError, "torch.int32 .*None"),
    (AWQ, "qzeros", i32(1, 2), ValueError, r"shape \(2, 2\)"),
    (AWQ, "scales", i32(2, 16), TypeError, "float16, bfloat16 or float32"),
    (CT, "weight_packed", ONES(16, 128).bfloat16(), TypeError, "torch.int32 .*not quantised"),
    (CT, "weight_packed", i32(16, 24), ValueError, r"shape \(16, 16\)"),
    (CT, "weight_packed", i32(16, 32), NotImplementedError, "4-bit .* of 8"),
    (CT, "weight_packed", i32(16, 8), NotImplementedError, "4-bit .* of 2"),
    (CT, "weight_scale", ONES(16), ValueError, "2 dimensions"),
    (CT, "weight_scale", ONES(8, 2), ValueError, r"shape \(16, 2\)"),
    (CT, "weight_zero_point", ONES(16, 2), TypeError, r"torch.int8 \[out_features, groups\]"),
    (CT, "weight_zero_point", i32(16, 2), ValueError, r"shape \(2, 2\)"),
    (CT, "weight_zero_point", i32(4, 2), NotImplementedError, "4-bit .* of 8"),
    (CT, "weight_zero_point", i32(2, 2).to(torch.int8), ValueError, r"shape \(16, 2\)"),
    (CT, "weight_zero_point", (i32(16, 2) + 8).to(torch.int8), ValueError, "-8 to 7, .* 8 to 8"),
    (CT, "shape", (16,), ValueError, r"\(out_features, in_features\), got \(16,\)"),
    (CT, "shape", (16, 128.0), ValueError, r"\(out_features, in_features\)"),
    (CT, "shape", None, ValueError, r"\(out_features, in_features\), got None"),
    (CT, "shape", torch.tensor([16.0, 128.0]), ValueError, r"\(out_features, in_features\)"),
    (HQQ, "W_q", ONES(16, 64), TypeError, "torch.uint8"),
    (HQQ, "W_q", u8(32, 64), NotImplementedError, "4-bit .* of 8"),
    (HQQ, "W_q", u8(8, 64), NotImplementedError, "4-bit .* of 2"),
    (HQQ, "W_q", i32(4, 64), NotImplementedError, "4-bit .* of 3"),
    (HQQ, "W_q", u8(64, 16), ValueError, r"shape \(16, 64\)"),
    (HQQ, "scale", u8(32, 1), TypeError, "float16, bfloat16 or float32"),
    (HQQ, "scale", ONES(33, 1), ValueError, "divisor of in_features 128"),
    (HQQ, "scale", ONES(48, 1), ValueError, "divisor of in_features 128"),
    (HQQ, "scale", ONES(128, 1), ValueError, "8 groups"),
    (HQQ, "scale", ONES(0, 1), ValueError, "divisor of in_features 128"),
    (HQQ, "zero", ONES(16, 1), ValueError, "as many elements as scale, 32"),
    (HQQ, "zero", u8(32, 1), TypeError, "float16, bfloat16 or float32"),
    (HQQ, "axis", 2, ValueError, "0 or 1, got 2"),
    (HQQ, "axis", 0, NotImplementedError, "must be 1: .* got 0"),
    (HQQ, "shape", 16, ValueError, r"\(out_features, in_features\), got 16"),
)


@pytest.mark.parametrize(
    ("function", "argument", "value", "error", "text"),
    BAD,
    ids=[f"{case[0]}-{case[1]}-{index}" for index, case in enumerate(BAD)],
)
def test_bad_argument(
    kernel: ModuleType,
    function: str,
    argument: str,
    value: object,
    error: type[Exception],
    text: str,
) -> None:
    """Case B137 and B139 among them: other bits, and layers that are not quantised."""
    name = next(name for name, (converter, _) in FORMATS.items() if converter == function)
    layer = random_layer(16, 128, 64)
    with pytest.raises(error, match=f"^{function}: .*{argument}.*{text}") as caught:
        convert(kernel, name, layer, **{argument: value})
    assert type(caught.value) is error


@pytest.mark.parametrize("bits", (2, 3, 8))
@pytest.mark.parametrize("given", ("qzeros", "g_idx"))
def test_other_bits(kernel: ModuleType, bits: int, given: str) -> None:
    """Case B137: either of these tells the bits of a GPTQ checkpoint."""
    n, k = 32, 128
    extra = {"qzeros": None, given: i32(k) if given == "g_idx" else i32(1, n * bits // 32)}
    with pytest.raises(NotImplementedError, match=f"must hold 4-bit .* of {bits} bits"):
        kernel.from_gptq(i32(k * bits // 32, n), scales=ONES(1, n), **extra)


@pytest.mark.parametrize(
    ("n", "k", "groups", "text"),
    (
        (16, 128, 8, "scales must have .*in_features is 128, got 8 groups"),
        (16, 128, 3, "scales must have .*in_features is 128, got 3 groups"),
        (16, 128, 0, "scales must have .*got 0 groups"),
        (16, 40, 1, "in_features must be a multiple of 32"),
        (12, 128, 1, "out_features must be a multiple of 8"),
        (0, 128, 1, "out_features must be a multiple of 8"),
        (16, 0, 1, "in_features must be a multiple of 32"),
    ),
)
def test_sizes_that_cannot_be_packed(
    kernel: ModuleType, n: int, k: int, groups: int, text: str
) -> None:
    """Case B131: a clear refusal."""
    with pytest.raises(ValueError, match=f"^from_gptq: {text}"):
        kernel.from_gptq(i32(k // 8, n), None, ONES(groups, n))


def test_formats_are_not_mixed_up(kernel: ModuleType) -> None:
    layer = random_layer(16, 256, 64)
    with pytest.raises(ValueError, match="from_gptq: scales must"):
        kernel.from_gptq(**awq(layer))
    tensors = gptq(layer)
    del tensors["g_idx"]
    with pytest.raises(ValueError, match="from_awq: qweight must"):
        kernel.from_awq(**tensors)
