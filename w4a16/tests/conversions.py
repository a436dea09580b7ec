"""What is given to each converter for a layer, and what has to come out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from monorepo.numerics import check_elements

from .checkpoint_formats import (
    Layer,
    awq,
    compressed_tensors,
    gptq,
    hqq,
)

GROUP_SIZES = (32, 64, 128, 256, 512, 1024, -1)
SCALES = (torch.float16, torch.bfloat16, torch.float32)


def codes_of(kernel: ModuleType, weight: object) -> Tensor:
    """Return the codes of a packed weight in the order of the input's features."""
    unpack = importlib.import_module(f"{kernel.__name__}.weight").unpack_codes
    codes = unpack(weight.qweight, weight.in_features).long()
    if weight.perm is None:
        return codes
    unordered = torch.empty_like(codes)
    unordered[:, weight.perm.long()] = codes
    return unordered


def check(kernel: ModuleType, weight: object, layer: Layer) -> None:
    """Assert that a packed weight is that layer."""
    assert isinstance(weight, kernel.W4Weight)
    assert (weight.out_features, weight.in_features) == layer.shape
    assert torch.equal(codes_of(kernel, weight), layer.codes)
    assert weight.scales.dtype is layer.scales.dtype
    assert torch.equal(weight.scales, layer.scales.T)
    zeros = torch.full_like(layer.zeros.T, 8) if weight.zeros is None else weight.zeros
    assert torch.equal(zeros.double(), layer.zeros.T.double())
    dense = kernel.dequantize(weight, torch.float32)
    check_elements(dense, layer.weight(), layer.weight(torch.float32))
    if not layer.zeros.is_floating_point():
        assert torch.equal(dense, layer.weight().float()), "exact in float32"


def compressed_arguments(
    layer: Layer, *, packed_zeros: bool = True, act_order: bool = False
) -> dict[str, object]:
    tensors: dict[str, object] = dict(
        compressed_tensors(layer, packed_zeros=packed_zeros, act_order=act_order)
    )
    if act_order:
        tensors["g_idx"] = tensors.pop("weight_g_idx")
    tensors["shape"] = tensors.pop("weight_shape")
    return tensors


#: Converter, and what it is given for a layer.
FORMATS: dict[str, tuple[str, Callable[[Layer], dict[str, object]]]] = {
    "gptq v1": ("from_gptq", lambda layer: {**gptq(layer, 1), "zero_offset": 1}),
    "gptq v2": ("from_gptq", lambda layer: {**gptq(layer, 0), "zero_offset": 0}),
    "awq": ("from_awq", awq),
    "ct": ("from_compressed_tensors", compressed_arguments),
    "ct, int8 zeros": (
        "from_compressed_tensors",
        lambda layer: compressed_arguments(layer, packed_zeros=False),
    ),
    "ct, g_idx": (
        "from_compressed_tensors",
        lambda layer: compressed_arguments(layer, act_order=True),
    ),
    "hqq": ("from_hqq", lambda layer: {**hqq(layer), "shape": layer.shape}),
}
each_format = pytest.mark.parametrize("name", FORMATS)
act_order_formats = pytest.mark.parametrize("name", ("gptq v1", "gptq v2", "ct, g_idx"))


def convert(kernel: ModuleType, name: str, layer: Layer, **changes: object) -> object:
    """Return what the converter makes of a layer packed in a format, with other arguments."""
    function, arguments = FORMATS[name]
    return getattr(kernel, function)(**{**arguments(layer), **changes})


sizes = st.fixed_dictionaries(
    {
        "n": st.integers(1, 6).map(lambda n: 8 * n),
        "k": st.integers(1, 14).map(lambda k: 32 * k),
        "group_size": st.sampled_from(GROUP_SIZES),
        "symmetric": st.booleans(),
        "dtype": st.sampled_from(SCALES),
        "seed": st.integers(0, 2**31),
    }
)
many = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
