"""Rounding to 4 bits, and the packed weight: its layout, its inverse, where it goes and is kept."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from .oracle import ZEROS, exact_weight, memory, part, parts, weight

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="packing is PyTorch code, the same with and without the interpreter",
)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
each_dtype = pytest.mark.parametrize("dtype", (HALF, BFLOAT, FLOAT), ids=str)
each_kind = pytest.mark.parametrize("symmetric", (True, False), ids=("symmetric", "asymmetric"))


def steps(w) -> Tensor:
    """Return the scale of each element, in float64."""
    size = w.in_features if w.group_size == -1 else w.group_size
    return w.scales.double().repeat_interleave(size, 0)[: w.in_features].T


@each_kind
@each_dtype
@pytest.mark.parametrize("group_size", (32, 64, 128, 256, 512, 1024, -1))
def test_error_is_half_a_step(
    kernel: ModuleType, device: str, group_size: int, dtype: torch.dtype, symmetric: bool
) -> None:
    """Of any weight, also in a partial group; a little more where the scale was rounded down."""
    for n, k in ((24, 1056), (8, 32), (16, 160)):
        dense = (torch.randn(n, k, device=device) * 0.1).to(dtype)
        w = kernel.quantize(dense, group_size, symmetric)
        assert w.scales.dtype is (BFLOAT if dtype is FLOAT else dtype)
        assert (w.zeros is None) == symmetric
        rounded = 15 * torch.finfo(w.scales.dtype).eps / 2
        error = (exact_weight(kernel, w) - dense.double()).abs() / steps(w)
        assert float(error.max()) <= 0.5 + rounded
        # Nothing is given away: each group uses its range.
        assert float(steps(w).max()) <= float(dense.float().abs().max()) * 2 / 15 * (1 + rounded)


@each_kind
@each_dtype
def test_what_is_on_the_grid_stays(
    kernel: ModuleType, device: str, dtype: torch.dtype, symmetric: bool
) -> None:
    """Rounding a weight that was rounded before changes nothing."""
    grid = torch.arange(16.0, device=device).repeat(4) - (7.5 if symmetric else 4)
    if symmetric:
        grid = grid.round().clamp(-7.5, 7.5)
        grid[0] = -7.5
    dense = (grid.expand(8, 64) * 2.0**-6).to(dtype)
    w = kernel.quantize(dense, 64, symmetric)
    once = kernel.dequantize(w, FLOAT)
    if not symmetric:
        assert torch.equal(once, dense.float())
    again = kernel.quantize(once.clamp(-7.5 * 2**-6) if symmetric else once, 64, symmetric)
    assert torch.equal(kernel.dequantize(again, FLOAT), once)


@each_kind
@each_dtype
@pytest.mark.parametrize("value", (0.0, 1.0, -1.0, 3.3e-3, -6.0e4))
def test_constant_groups(
    kernel: ModuleType, device: str, value: float, dtype: torch.dtype, symmetric: bool
) -> None:
    """No division by 0, no range of 0: a constant is off by its scale's rounding at most."""
    dense = torch.full((8, 96), value, device=device).to(dtype)
    w = kernel.quantize(dense, 32, symmetric)
    got = kernel.dequantize(w, FLOAT)
    assert bool(got.isfinite().all())
    error = (got - dense.float()).abs().double()
    # Half a step, and what 15 steps gain or lose by the rounding of a bfloat16 scale.
    rounding = 15 * torch.finfo(BFLOAT).eps / 2
    assert bool((error <= (0.5 + rounding) * steps(w)).all())
    if not value:
        assert not bool(got.any())


@each_kind
def test_groups_do_not_touch(kernel: ModuleType, device: str, symmetric: bool) -> None:
    """Each group by itself: a huge one beside a tiny one, and the last one partial."""
    dense = torch.randn(8, 160, device=device)
    sizes = torch.tensor([1e-3, 1.0, 1e3, 1e-2, 10.0], device=device).repeat_interleave(32)
    whole = kernel.quantize(dense * sizes, 32, symmetric)
    for group in range(5):
        cut = slice(32 * group, 32 * group + 32)
        alone = kernel.quantize((dense * sizes)[:, cut], 32, symmetric)
        assert torch.equal(exact_weight(kernel, whole)[:, cut], exact_weight(kernel, alone))


@each_kind
def test_zero_is_zero(kernel: ModuleType, device: str, symmetric: bool) -> None:
    """Pruned weights stay pruned: the range always holds 0, and 0 is one of the codes."""
    dense = torch.rand(16, 128, device=device) + 1  # all positive but for the zeros
    dense[:, ::3] = 0
    got = kernel.dequantize(kernel.quantize(dense, 64, symmetric), FLOAT)
    assert not bool(got[:, ::3].any())


@each_kind
@pytest.mark.parametrize("layout", ("transposed", "stepped", "expanded", "leaf"))
def test_layouts_of_the_weight(
    kernel: ModuleType, device: str, layout: str, symmetric: bool
) -> None:
    """Cases B20, B22: any strides, no change, no memory shared, no gradient kept."""
    dense = {
        "transposed": lambda: torch.randn(96, 16, device=device).t(),
        "stepped": lambda: torch.randn(32, 192, device=device)[::2, 1::2],
        "expanded": lambda: torch.randn(1, 96, device=device).expand(16, 96),
        "leaf": lambda: torch.randn(16, 96, device=device, requires_grad=True),
    }[layout]()
    before = memory(dense.detach())
    w = kernel.quantize(dense, 32, symmetric)
    wanted = kernel.quantize(dense.detach().clone(memory_format=torch.contiguous_format), 32,
                             symmetric)  # fmt: skip
    assert torch.equal(memory(dense.detach()), before)
    for got, right in zip(parts(w), parts(wanted), strict=True):
        assert torch.equal(got, right) and not got.requires_grad and got.is_contiguous()
        assert got.untyped_storage().data_ptr() != dense.untyped_storage().data_ptr()


def test_large_values_of_float16(kernel: ModuleType, device: str) -> None:
    """The largest float16 is quantised; its scale is kept in float32, where kernels need it."""
    dense = torch.full((8, 32), 65504.0, device=device, dtype=HALF)
    w = kernel.quantize(dense, 32)
    assert w.scales.dtype is FLOAT
    assert bool(kernel.dequantize(w, FLOAT).isfinite().all())


@each_kind
def test_small_values_of_float16(kernel: ModuleType, device: str, symmetric: bool) -> None:
    """Weights around 1e-6 are numbers of float16, their scales hardly any: kept in bfloat16."""
    dense = (torch.rand(8, 128, device=device) * 1.2e-6 - 0.6e-6).half()
    w = kernel.quantize(dense, 128, symmetric)
    assert w.scales.dtype is BFLOAT
    error = (kernel.dequantize(w, FLOAT) - dense.float()).abs().double()
    rounding = 15 * torch.finfo(BFLOAT).eps / 2
    assert bool((error <= ((0.5 if symmetric else 1.0) + rounding) * steps(w)).all())


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 6), k=st.integers(1, 12), seed=st.integers(0, 1000))
def test_packing_and_its_inverse(kernel: ModuleType, n: int, k: int, seed: int) -> None:
    made = part(kernel, "weight")
    codes = torch.randint(
        0, 16, (8 * n, 32 * k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    packed = made.pack_codes(codes)
    assert packed.shape == (-(-k // 4), 8 * n, 32) and packed.dtype is torch.int16
    assert packed.is_contiguous()
    assert torch.equal(made.unpack_codes(packed, 32 * k), codes)


def test_the_layout_by_hand(kernel: ModuleType) -> None:
    """Word i of a block holds features i, i + 32, i + 64, i + 96, from the low bits up."""
    made = part(kernel, "weight")
    codes = torch.zeros(8, 160, dtype=torch.uint8)
    codes[2, 5], codes[2, 37], codes[2, 69], codes[2, 101] = 1, 2, 3, 15
    codes[7, 128 + 31] = 9
    packed = made.pack_codes(codes)
    wanted = torch.zeros(2, 8, 32, dtype=torch.int16)
    wanted[0, 2, 5] = 0xF321 - 2**16
    wanted[1, 7, 31] = 9
    assert torch.equal(packed, wanted)


def test_nothing_in_features_that_are_not_there(kernel: ModuleType) -> None:
    """What a partial block pads with is 0, so equal weights have equal files."""
    made = part(kernel, "weight")
    packed = made.pack_codes(torch.full((8, 32), 15, dtype=torch.uint8))
    assert packed.unique().tolist() == [15]


def test_group_of_all_features(kernel: ModuleType, device: str) -> None:
    """A group as large as the weight, or larger, is the single group."""
    dense = torch.randn(8, 96, device=device)
    for group_size in (128, 1024, -1):
        w = kernel.quantize(dense, group_size)
        assert w.group_size == -1 and w.scales.shape == (1, 8)


@pytest.mark.parametrize("perm", (False, True))
@pytest.mark.parametrize("scales", (HALF, BFLOAT, FLOAT), ids=str)
@pytest.mark.parametrize("zeros", ZEROS)
def test_safetensors(
    kernel: ModuleType, tmp_path: Path, zeros: str, scales: torch.dtype, perm: bool
) -> None:
    """A weight comes back from a file, and from a pickle, with its bits and its sizes."""
    w = weight(kernel, 24, 160, group_size=64, zeros=zeros, scales=scales, perm=perm)
    save_file(w.state_dict(), tmp_path / "w.safetensors")
    state = load_file(tmp_path / "w.safetensors")
    for again in (
        kernel.W4Weight.from_state_dict(state),
        pickle.loads(pickle.dumps(w)),
        copy.deepcopy(w),
    ):
        assert (again.in_features, again.out_features, again.group_size) == (160, 24, 64)
        assert again.nbytes == w.nbytes == sum(each.nbytes for each in parts(w))
        for got, right in zip(parts(again), parts(w), strict=True):
            assert torch.equal(got, right) and got.dtype is right.dtype
        x = torch.randn(3, 160, dtype=HALF)
        assert torch.equal(kernel.w4a16_gemm(x, again), kernel.w4a16_gemm(x, w))


def test_moves(kernel: ModuleType) -> None:
    """To another device and back, all parts together; here to the one that holds no values."""
    w = weight(kernel, 24, 160, group_size=64, zeros="integer", perm=True)
    there = w.to("meta")
    assert there.device.type == "meta" and there.out_features == 24
    assert all(each.is_meta for each in parts(there))
    assert [each.dtype for each in parts(there)] == [each.dtype for each in parts(w)]
    assert w.device.type == "cpu"
    same = w.to(torch.device("cpu"))
    assert all(a is b for a, b in zip(parts(same), parts(w), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", ZEROS)
def test_moves_to_the_gpu(kernel: ModuleType, zeros: str) -> None:
    w = weight(kernel, 24, 160, group_size=64, zeros=zeros, perm=True)
    for there in (w.to("cuda"), w.to(0), w.to("cuda", non_blocking=True)):
        torch.cuda.synchronize()
        assert there.device == torch.device("cuda", 0)
        for got, right in zip(parts(there.to("cpu")), parts(w), strict=True):
            assert torch.equal(got, right)


def test_a_weight_is_a_value_of_its_own(kernel: ModuleType) -> None:
    """Not compared by its tensors, which have no truth; used as a key if need be."""
    w = weight(kernel, 8, 32)
    other = dataclasses.replace(w)
    assert w == w and w != other and len({w, other}) == 2


@pytest.mark.parametrize("dtype", (HALF, BFLOAT, FLOAT), ids=str)
def test_dequantize_is_one_rounding(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    for zeros in ("eight", "integer"):
        w = weight(kernel, 24, 160, zeros=zeros, perm=True, device=device)
        # The product of a code and a scale of 11 bits is exact in float32.
        assert torch.equal(kernel.dequantize(w, dtype), exact_weight(kernel, w).to(dtype))
