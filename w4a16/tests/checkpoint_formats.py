"""Checkpoint formats from the other side: what a layer's numbers look like in a file.

Written from the formats' descriptions, and shares no code with the kernel, whose converters are
held to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """A quantised layer in plain numbers: `(codes[n, k] - zeros[n, g]) * scales[n, g]`.

    Attributes:
        codes: `[n, k]` int64, 0 to 15.
        scales: `[n, groups]` of a floating-point dtype.
        zeros: `[n, groups]`: int64 of 0 to 15, or floating-point ones (HQQ).
        group: `[k]` int64: g, the group of each input feature.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    def weight(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the weight `[n, k]`, computed in `dtype`."""
        codes, scales, zeros = (part.to(dtype) for part in (self.codes, self.scales, self.zeros))
        return (codes - zeros[:, self.group]) * scales[:, self.group]


def group_of(k: int, group_size: int) -> Tensor:
    """Return the group of each input feature, contiguous ones; the last may be partial."""
    return torch.arange(k) // (k if group_size == -1 else group_size)


def random_layer(
    n: int,
    k: int,
    group_size: int,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Layer:
    """Return a layer of random numbers; every code and zero occurs if there is room for it."""
    random = torch.Generator().manual_seed(seed)
    group = group_of(k, group_size)
    groups = int(group[-1]) + 1
    if act_order:
        group = group[torch.randperm(k, generator=random)]
    zeros = torch.randint(16, (n, groups), generator=random)
    return Layer(
        torch.randint(16, (n, k), generator=random),
        (torch.rand(n, groups, generator=random) / 16 + 0.001).to(dtype),
        torch.full_like(zeros, 8) if symmetric else zeros,
        group,
    )


def words(codes: Tensor) -> Tensor:
    """Return `[..., 8]` codes as int32 words `[...]`: code i in bits 4i to 4i + 3."""
    word = torch.zeros(codes.shape[:-1], dtype=torch.int64)
    for i in range(8):
        word = word + codes[..., i] * 16**i
    return torch.where(word < 2**31, word, word - 2**32).to(torch.int32)


def gptq(layer: Layer, zero_offset: int = 1) -> dict[str, Tensor]:
    """Return the tensors of AutoGPTQ and GPTQModel: v1 with a zero_offset of 1, v2 with 0."""
    n, k = layer.shape
    stored = (layer.zeros.T - zero_offset) % 16
    return {
        "qweight": words(layer.codes.T.reshape(k // 8, 8, n).transpose(1, 2)),
        "qzeros": words(stored.reshape(-1, n // 8, 8)),
        "scales": layer.scales.T.contiguous(),
        "g_idx": layer.group.to(torch.int32),
    }


def awq(layer: Layer) -> dict[str, Tensor]:
    """Return the tensors of AutoAWQ's GEMM layout."""
    n, k = layer.shape
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": words(layer.codes.T.reshape(k, n // 8, 8)[..., order]),
        "qzeros": words(layer.zeros.T.reshape(-1, n // 8, 8)[..., order]),
        "scales": layer.scales.T.contiguous(),
    }


def compressed_tensors(
    layer: Layer, *, packed_zeros: bool = True, act_order: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of compressed-tensors' "pack-quantized"; without zeros if all are 8."""
    n, k = layer.shape
    tensors = {
        "weight_packed": words(layer.codes.reshape(n, k // 8, 8)),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if bool((layer.zeros != 8).any()):
        zeros = words(layer.zeros.reshape(n // 8, 8, -1).transpose(1, 2))
        if not packed_zeros:
            zeros = (layer.zeros - 8).to(torch.int8)
        tensors["weight_zero_point"] = zeros
    if act_order:
        tensors["weight_g_idx"] = layer.group.to(torch.int32)
    return tensors


def hqq(layer: Layer) -> dict[str, Tensor]:
    """Return the tensors of HQQ's "4bit_u8" with axis=1; groups divide the features."""
    codes = layer.codes.reshape(layer.scales.numel(), -1)
    high, low = codes.chunk(2)
    return {
        "W_q": (high * 16 + low).to(torch.uint8),
        "scale": layer.scales.reshape(-1, 1),
        "zero": layer.zeros.to(layer.scales.dtype).reshape(-1, 1),
    }
