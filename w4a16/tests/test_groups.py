"""Groups of checkpoints: act-order in all its spellings, partial groups, shards."""

from __future__ import annotations

import dataclasses
import os
from types import ModuleType

import pytest
import torch
from hypothesis import given
from torch import Tensor

from .checkpoint_formats import (
    compressed_tensors,
    gptq,
    group_of,
    random_layer,
)
from .conversions import (
    act_order_formats,
    check,
    convert,
    many,
    sizes,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="conversion is PyTorch code, the same with and without the interpreter",
)


@act_order_formats
@many
@given(sizes=sizes)
def test_any_act_order(kernel: ModuleType, name: str, sizes: dict[str, object]) -> None:
    """Case B128: each feature under the scale that its own g_idx names."""
    layer = random_layer(**sizes, act_order=True)
    check(kernel, convert(kernel, name, layer), layer)


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
