"""Converters of checkpoints: code for code what an independent packer put in."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from monorepo.numerics import check_elements

from .checkpoint_formats import (
    Layer,
    awq,
    compressed_tensors,
    gptq,
    group_of,
    hqq,
    random_layer,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="conversion is PyTorch code, the same with and without the interpreter",
)

GROUP_SIZES = (32, 64, 128, 256, 512, 1024, -1)
SCALES = (torch.float16, torch.bfloat16, torch.float32)

EXAMPLE_ZEROS = (8, 7, 0, 15, 1, 8, 3, 12)
#: The example's words of output feature 0 to 7 (GPTQ, compressed-tensors), of input feature 0 to 7
#: (AWQ), and of its zeros, as the packers of vLLM and gemlite write them.
GPTQ_WORDS = "52fc9630 a741eb85 fc9630da 41eb852f 9630da74 eb852fc9 30da741e 852fc963"
AWQ_WORDS = "39f5e4a0 6c2817d3 9f5b4a06 c28e7d39 f5b1a06c 28e4d39f 5b1706c2 8e4a39f5"
V1_ZEROS, V2_ZEROS = "b270ef67", "c381f078"


def ints(text: str) -> Tensor:
    """Return int32 words written in hexadecimal."""
    values = [int(word, 16) for word in text.split()]
    return torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32)


def example() -> Layer:
    """Return the example of the vectors, 8 outputs and the period of 8 inputs four times."""
    n, k = torch.arange(8), torch.arange(32) % 8
    return Layer(
        (3 * k + 5 * n[:, None]) % 16,
        torch.linspace(0.5, 1.5, 8).half()[:, None],
        torch.tensor(EXAMPLE_ZEROS)[:, None],
        torch.zeros(32, dtype=torch.int64),
    )


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


# Worked values.


def test_the_packer_writes_the_worked_values() -> None:
    """What the converters are held to writes what vLLM, gemlite and HQQ write."""
    layer = example()
    for offset, zeros in ((1, V1_ZEROS), (0, V2_ZEROS)):
        tensors = gptq(layer, offset)
        assert torch.equal(tensors["qweight"], ints(GPTQ_WORDS).expand(4, 8))
        assert torch.equal(tensors["qzeros"], ints(zeros)[None])
    assert torch.equal(awq(layer)["qweight"], ints(AWQ_WORDS).repeat(4)[:, None])
    packed = compressed_tensors(layer)
    assert torch.equal(packed["weight_packed"], ints(GPTQ_WORDS)[:, None].expand(8, 4))
    assert torch.equal(packed["weight_zero_point"], ints(V2_ZEROS)[:, None])
    small = Layer(torch.arange(1, 9).view(4, 2), torch.ones(4, 1), torch.ones(4, 1), torch.zeros(2))
    assert hqq(small)["W_q"].tolist() == [[0x15, 0x26], [0x37, 0x48]]


@pytest.mark.kernels_ci
def test_worked_values(kernel: ModuleType) -> None:
    layer = example()
    scales, column = layer.scales.T.contiguous(), ints(GPTQ_WORDS)
    for offset, zeros in ((1, V1_ZEROS), (0, V2_ZEROS)):
        weight = kernel.from_gptq(
            column.repeat(4, 1), ints(zeros)[None], scales, zero_offset=offset
        )
        check(kernel, weight, layer)
    # Zeros 8 7 0 15 1 8 3 12 are nibbles 8 0 1 3 7 15 8 12 there, the lowest first.
    weight = kernel.from_awq(ints(AWQ_WORDS).repeat(4)[:, None], ints("c8f73108")[None], scales)
    check(kernel, weight, layer)
    weight = kernel.from_compressed_tensors(
        column[:, None].repeat(1, 4), layer.scales, ints(V2_ZEROS)[:, None], shape=(8, 32)
    )
    check(kernel, weight, layer)
    assert codes_of(kernel, weight)[0, :8].tolist() == [0, 3, 6, 9, 12, 15, 2, 5]
    assert codes_of(kernel, weight)[:, 0].tolist() == [0, 5, 10, 15, 4, 9, 14, 3]


def test_worked_values_of_hqq(kernel: ModuleType) -> None:
    """The first half of the groups lies in the high nibbles, the second half in the low ones."""
    pairs = ((0x19, 0x2A), (0x3B, 0x4C), (0x5D, 0x6E), (0x7F, 0x80))
    W_q = torch.tensor(pairs, dtype=torch.uint8).repeat(1, 16)
    weight = kernel.from_hqq(W_q, torch.ones(8, 1), torch.full((8, 1), 8.0), shape=(8, 32))
    wanted = torch.tensor([(r, (r + 1) % 16) for r in range(1, 16, 2)]).repeat(1, 16)
    assert torch.equal(codes_of(kernel, weight), wanted)
    assert weight.zeros is None


def test_zeros_do_not_carry(kernel: ModuleType) -> None:
    """A stored 15 is a zero of 0; added to the word, it would reach its neighbour."""
    qzeros = ints(V1_ZEROS)[None]
    carried = qzeros.long() + 0x11111111
    assert int(carried) & 0xFFFFFFFF == 0xC3820078
    weight = kernel.from_gptq(
        ints(GPTQ_WORDS).repeat(4, 1), qzeros, torch.ones(1, 8), zero_offset=1
    )
    assert weight.zeros.tolist() == [list(EXAMPLE_ZEROS)]


# Agreement with the independent packer.


@each_format
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("symmetric", (True, False))
def test_conversion(kernel: ModuleType, name: str, group_size: int, symmetric: bool) -> None:
    layer = random_layer(24, 1024, group_size, symmetric=symmetric)
    weight = convert(kernel, name, layer)
    check(kernel, weight, layer)
    assert weight.perm is None
    assert (weight.zeros is None) == symmetric
    assert weight.group_size == (-1 if group_size == 1024 else group_size)


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


@each_format
@many
@given(sizes=sizes)
def test_any_sizes(kernel: ModuleType, name: str, sizes: dict[str, object]) -> None:
    """Case B131 too: the last group may be partial, except in HQQ."""
    layer = random_layer(**sizes)
    if name == "hqq":
        assume(len(set(torch.bincount(layer.group).tolist())) == 1)
    check(kernel, convert(kernel, name, layer), layer)


@act_order_formats
@many
@given(sizes=sizes)
def test_any_act_order(kernel: ModuleType, name: str, sizes: dict[str, object]) -> None:
    """Case B128: each feature under the scale that its own g_idx names."""
    layer = random_layer(**sizes, act_order=True)
    check(kernel, convert(kernel, name, layer), layer)


@many
@given(sizes=sizes)
def test_any_hqq_zeros(kernel: ModuleType, sizes: dict[str, object]) -> None:
    """Zeros between the codes, below and above them, stay what they are."""
    layer = random_layer(**{**sizes, "k": 512})
    random = torch.Generator().manual_seed(int(sizes["seed"]))
    zeros = torch.randn(layer.zeros.shape, generator=random) * 8 + 8
    layer = dataclasses.replace(layer, zeros=zeros.to(layer.scales.dtype))
    weight = convert(kernel, "hqq", layer)
    check(kernel, weight, layer)
    assert weight.zeros.dtype is torch.float32


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


# Zeros of GPTQ.


@pytest.mark.parametrize("zero_offset", (0, 1))
def test_symmetric_of_either_version(kernel: ModuleType, zero_offset: int) -> None:
    """Case B125: all 7 and all 8 mean the same, whatever the config says, without a warning."""
    layer = random_layer(16, 256, 64, symmetric=True)
    tensors = gptq(layer, zero_offset)
    stored = "88888888" if zero_offset == 0 else "77777777"
    assert bool((tensors["qzeros"] == ints(stored)).all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(kernel, kernel.from_gptq(**tensors), layer)
        check(kernel, kernel.from_gptq(**tensors, zero_offset=zero_offset), layer)
        check(kernel, kernel.from_gptq(**{**tensors, "qzeros": None}), layer)


def test_asymmetric_warns(kernel: ModuleType) -> None:
    """Case B125: what the tensors cannot tell is not guessed silently."""
    layer = random_layer(16, 256, 64)
    with pytest.warns(UserWarning, match="zero_offset=1.*zero_offset=0") as caught:
        check(kernel, kernel.from_gptq(**gptq(layer, 1)), layer)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for zero_offset in (0, 1):
            check(kernel, convert(kernel, f"gptq v{2 - zero_offset}", layer), layer)


@pytest.mark.parametrize("zero_offset", (0, 1))
def test_offset_decides(kernel: ModuleType, zero_offset: int) -> None:
    """Case B125: an explicit argument is not overruled by what the zeros look like."""
    layer = random_layer(16, 64, 32, symmetric=True)
    weight = kernel.from_gptq(**gptq(layer, 1 - zero_offset), zero_offset=zero_offset)
    assert weight.zeros.unique().tolist() == [7 if zero_offset == 0 else 9]


def test_garbage_zeros(kernel: ModuleType) -> None:
    """Case B127: None stands for symmetric; qzeros that are passed are used."""
    layer = random_layer(16, 64, 32, symmetric=True)
    garbage = dataclasses.replace(layer, zeros=random_layer(16, 64, 32, seed=1).zeros)
    check(kernel, convert(kernel, "gptq v1", layer, qzeros=None), layer)
    check(kernel, convert(kernel, "gptq v1", layer, qzeros=gptq(garbage)["qzeros"]), garbage)


# Groups.


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_spellings_of_no_act_order(kernel: ModuleType, dtype: torch.dtype) -> None:
    layer = random_layer(8, 192, 128)
    tensors = gptq(layer)
    for g_idx in (None, torch.empty(0, dtype=dtype), layer.group.to(dtype)):
        weight = kernel.from_gptq(**{**tensors, "g_idx": g_idx}, zero_offset=1)
        assert weight.perm is None
        check(kernel, weight, layer)
    tensors = compressed_tensors(layer)
    shape = tensors.pop("weight_shape")
    minus, empty = torch.full((192,), -1, dtype=dtype), torch.empty(0, dtype=dtype)
    for g_idx in (None, empty, minus, layer.group.to(dtype)):
        weight = kernel.from_compressed_tensors(**tensors, shape=shape, g_idx=g_idx)
        assert weight.perm is None
        check(kernel, weight, layer)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_act_order(kernel: ModuleType, dtype: torch.dtype) -> None:
    """Case B128: the order is kept as a permutation, stable within each group."""
    layer = random_layer(8, 256, 64, act_order=True)
    weight = convert(kernel, "gptq v1", layer, g_idx=layer.group.to(dtype))
    check(kernel, weight, layer)
    assert weight.perm.dtype is torch.int32
    assert torch.equal(layer.group[weight.perm.long()], group_of(256, 64))
    for group in weight.perm.view(4, 64):
        assert torch.equal(group, group.sort().values)


def test_act_order_of_one_group(kernel: ModuleType) -> None:
    layer = random_layer(8, 256, -1, act_order=True)
    assert convert(kernel, "gptq v1", layer).perm is None


@pytest.mark.parametrize(
    ("k", "group_size", "groups"), ((192, 128, 2), (352, 128, 3), (1376, 1024, 2), (96, 64, 2))
)
@pytest.mark.parametrize("act_order", (False, True))
@act_order_formats
def test_partial_group(
    kernel: ModuleType, name: str, k: int, group_size: int, groups: int, act_order: bool
) -> None:
    """Case B131."""
    layer = random_layer(16, k, group_size, act_order=act_order)
    weight = convert(kernel, name, layer)
    check(kernel, weight, layer)
    assert weight.group_size == group_size
    assert weight.scales.shape[0] == groups


@pytest.mark.parametrize(
    ("g_idx", "text"),
    (
        (group_of(256, 64).flip(0).clone().fill_(0), "groups of 0 to 256"),
        (group_of(256, 64)[:128].repeat(2), "groups of 0 to 128"),
        (torch.tensor([0] * 63 + [1] * 65 + [2] * 64 + [3] * 64), "groups of 63 to 65"),
        (group_of(256, 64) + 1, "from 0 to 3, .*from 1 to 4"),
        (group_of(256, 64) - 4, "from 0 to 3, .*from -4 to -1"),
        (torch.tensor([-1] * 64 + [0] * 192), "from 0 to 3, .*from -1 to 0"),
        (group_of(512, 64), r"shape \(256,\)"),
        (group_of(768, 64), r"shape \(256,\)"),
        (group_of(256, 64).view(4, 64), r"shape \(256,\)"),
    ),
    ids=("one", "shard", "uneven", "above", "from the end", "some negative", "two", "qkv", "2d"),
)
@act_order_formats
def test_bad_g_idx(kernel: ModuleType, name: str, g_idx: Tensor, text: str) -> None:
    """Case B130 too: q, k and v fused along the outputs have one g_idx, of the inputs."""
    with pytest.raises(ValueError, match=f"g_idx must .*{text}"):
        convert(kernel, name, random_layer(16, 256, 64), g_idx=g_idx)


def test_fused_projections(kernel: ModuleType) -> None:
    """Case B130: q, k and v side by side are what they are one by one, under one order."""
    parts = [random_layer(16, 256, 64, act_order=True, seed=seed) for seed in range(3)]
    parts = [dataclasses.replace(part, group=parts[0].group) for part in parts]
    files = [gptq(part) for part in parts]
    fused = {
        name: torch.cat([file[name] for file in files], 1) for name in files[0].keys() - {"g_idx"}
    }
    weight = kernel.from_gptq(**fused, g_idx=files[0]["g_idx"], zero_offset=1)
    dense = torch.cat([part.weight().float() for part in parts])
    assert torch.equal(kernel.dequantize(weight, torch.float32), dense)


def test_shard_along_the_outputs(kernel: ModuleType) -> None:
    """A column-parallel shard is a slice of each tensor, as views of them."""
    layer = random_layer(32, 256, 64, act_order=True)
    whole = kernel.dequantize(convert(kernel, "gptq v1", layer), torch.float32)
    tensors = gptq(layer)
    for start in (0, 16):
        shard = kernel.from_gptq(
            tensors["qweight"][:, start : start + 16],
            tensors["qzeros"][:, start // 8 : start // 8 + 2],
            tensors["scales"][:, start : start + 16],
            tensors["g_idx"],
            zero_offset=1,
        )
        assert torch.equal(kernel.dequantize(shard, torch.float32), whole[start : start + 16])


# What stays as it is.


@each_format
def test_inputs_stay_and_are_not_shared(kernel: ModuleType, name: str) -> None:
    arguments = FORMATS[name][1](random_layer(16, 64, -1))
    before = copy.deepcopy(arguments)
    weight = convert(kernel, name, random_layer(16, 64, -1), **arguments)
    for part in weight.state_dict().values():
        part.zero_()
    for key, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(arguments[key], value), key


@each_format
@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_dtype_of_scales(kernel: ModuleType, name: str, dtype: torch.dtype) -> None:
    """Case B136: float16, bfloat16 and float32 scales are taken, and kept."""
    layer = random_layer(16, 128, 64, dtype=dtype)
    check(kernel, convert(kernel, name, layer), layer)


# Errors.


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


@pytest.mark.gpu
@each_format
def test_on_the_gpu(kernel: ModuleType, name: str) -> None:
    """The same bits where the checkpoint lies on a GPU."""
    layer = random_layer(48, 352, 32 if name == "hqq" else 128)
    here = convert(kernel, name, layer).state_dict()
    arguments = {
        key: value.cuda() if isinstance(value, Tensor) else value
        for key, value in FORMATS[name][1](layer).items()
    }
    there = convert(kernel, name, layer, **arguments)
    assert there.device.type == "cuda"
    for key, part in there.state_dict().items():
        assert torch.equal(part.cpu(), here[key]), key
