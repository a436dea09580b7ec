"""Converters of checkpoints: code for code what an independent packer put in."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from types import ModuleType

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from .checkpoint_formats import (
    Layer,
    awq,
    compressed_tensors,
    gptq,
    hqq,
    random_layer,
)
from .conversions import (
    FORMATS,
    GROUP_SIZES,
    SCALES,
    check,
    codes_of,
    convert,
    each_format,
    many,
    sizes,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="conversion is PyTorch code, the same with and without the interpreter",
)
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


@each_format
@many
@given(sizes=sizes)
def test_any_sizes(kernel: ModuleType, name: str, sizes: dict[str, object]) -> None:
    """Case B131 too: the last group may be partial, except in HQQ."""
    layer = random_layer(**sizes)
    if name == "hqq":
        assume(len(set(torch.bincount(layer.group).tolist())) == 1)
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
