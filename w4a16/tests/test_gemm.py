"""The product in depth: tiles and shares each alone, memory around operands, batches, extremes.

`test_product.py` goes through sizes and formats; here is what a right result may still hide.
"""

from __future__ import annotations

import dataclasses
import json
import os
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from imports import fresh

from .oracle import (
    ZEROS,
    Allocations,
    check,
    check_guards,
    exact_weight,
    guarded,
    memory,
    part,
    parts,
    poison,
    relative_error,
    weight,
)

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"
USES_TRITON = INTERPRETED or torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not USES_TRITON, reason="calls the Triton kernel itself")
KINDS: dict[str, dict[str, object]] = {
    "symmetric": {},
    "integer zeros": {"zeros": "integer"},
    "float zeros": {"zeros": "float"},
    "float32 scales": {"scales": FLOAT, "zeros": "integer"},
    "act-order": {"zeros": "integer", "perm": True},
}
#: Multiprocessors, KiB of shared memory and architecture: A100, 4090, L4, H100, B200, MI300X.
DEVICES = ((108, 163, 80), (128, 99, 89), (58, 99, 89), (132, 227, 90), (148, 227, 100),
           (304, 64, 0))  # fmt: skip


def tile_of(kernel: ModuleType, block_m: int, block_n: int, programs: int, before: bool = False):
    return part(kernel, "config").GemmConfig(block_m, block_n, 4, 2, before, 0, programs)


def fused(kernel: ModuleType, x: Tensor, w, bias: Tensor | None, tile) -> Tensor:
    """Return the product of one tile on a guarded output full of NaN."""
    y = guarded(torch.zeros(x.shape[0], w.out_features, dtype=x.dtype, device=x.device))
    part(kernel, "ops").fused(x, w, bias, poison(y), tile)
    check_guards(y)
    return y


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kernel: ModuleType, device: str, kind: str, dtype: torch.dtype) -> None:
    """Each kind of weight in each bucket, with a partial block, a partial group, a tail of N."""
    for tokens, group_size, k in ((1, 64, 288), (12, 128, 224), (33, 256, 352), (70, 32, 96)):
        w = weight(kernel, 72, k, group_size=group_size, device=device, **KINDS[kind])
        x = torch.randn(tokens, k, device=device, dtype=dtype)
        bias = torch.randn(72, device=device, dtype=dtype)
        check(kernel, x, w, bias, kernel.w4a16_gemm(x, w, bias))


def all_tiles(kernel: ModuleType) -> set:
    """Return the tiles that the heuristic and the tables can give; what differs in speed only."""
    config = part(kernel, "config")
    found = {
        config.heuristic(
            tokens, n, 4096, after_only=after, multiprocessors=processors,
            shared_memory=1024 * kilobytes, arch=arch,
        )
        for tokens in (8, 16, 32, 64, 128, 256, 512)
        for n in (512, 8192, 65536)
        for after in (False, True)
        for processors, kilobytes, arch in DEVICES
    }  # fmt: skip
    for path in sorted(config.CONFIGS.glob("*.json")):
        for by_tokens in json.loads(path.read_text())["gemm"]["16bit"].values():
            found |= {config.tuned(entry) for entry in by_tokens.values()}
    found = {dataclasses.replace(tile, programs=1) for tile in found}
    if INTERPRETED:  # which has neither warps nor registers nor a pipeline
        found = {
            dataclasses.replace(tile, num_warps=4, num_stages=2, max_registers=0) for tile in found
        }
    return found


@needs_triton
def test_each_tile_on_poisoned_memory(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases B08, B62: none relies on what another left in the result or in the workspace."""
    allocations = Allocations(kernel, monkeypatch)
    shared_memory = part(kernel, "_shared.device").shared_memory
    step_bytes = part(kernel, "config").step_bytes
    n, k = (136, 288) if INTERPRETED else (520, 416)
    w = weight(kernel, n, k, zeros="integer", group_size=64, device=device)
    dense = exact_weight(kernel, w)
    tiles = all_tiles(kernel)
    assert len(tiles) >= 6
    for tile in tiles:
        where = w.device if w.device.index is not None else torch.device(device)
        if tile.num_stages * step_bytes(tile.block_m, tile.block_n) > shared_memory(where):
            continue  # of another device
        x = torch.randn(tile.block_m + 1, k, device=device, dtype=HALF)
        # Shared, with tiles crossing, and a program a tile.
        for programs in (4,) if INTERPRETED and tile.block_m > 32 else (4, 10**6):
            y = fused(kernel, x, w, None, dataclasses.replace(tile, programs=programs))
            check(kernel, x, w, None, y, dense)
    allocations.check()


@needs_triton
@settings(max_examples=25 if INTERPRETED else 60, deadline=None)
@given(data=st.data())
def test_any_shares(kernel: ModuleType, device: str, data: st.DataObject) -> None:
    """Split-K and stream-K by one number: any programs, groups, tails, and tiles that cross."""
    draw = data.draw
    tokens = draw(st.integers(1, 40), label="tokens")
    n = 8 * draw(st.integers(1, 25), label="n / 8")
    k = 32 * draw(st.integers(1, 20), label="k / 32")
    zeros = draw(st.sampled_from(ZEROS), label="zeros")
    before = draw(st.booleans(), label="before") and zeros != "float"
    tile = tile_of(
        kernel,
        draw(st.sampled_from((16, 32, 64)), label="block_m"),
        draw(st.sampled_from((64, 128)), label="block_n"),
        draw(st.integers(1, 30), label="programs"),
        before,
    )
    group_size = draw(st.sampled_from((32, 64, 128, 256, -1)), label="group_size")
    w = weight(kernel, n, k, group_size=group_size, zeros=zeros, device=device)
    x = torch.randn(tokens, k, device=device, dtype=HALF)
    bias = torch.randn(n, device=device) if draw(st.booleans(), label="bias") else None
    with pytest.MonkeyPatch.context() as patch:
        allocations = Allocations(kernel, patch)
        y = fused(kernel, x, w, bias, tile)
    for tensor in allocations.given:
        check_guards(tensor)
    check(kernel, x, w, bias, y)


@needs_triton
@pytest.mark.parametrize("programs", (2, 3, 7))
def test_same_bits_every_time(kernel: ModuleType, device: str, programs: int) -> None:
    """Case B41: parts are added in one order, whoever comes last."""
    w = weight(kernel, 72, 544, zeros="integer", device=device)
    x = torch.randn(5, 544, device=device, dtype=HALF)
    tile = tile_of(kernel, 16, 64, programs)
    first = fused(kernel, x, w, None, tile)
    for _ in range(2 if INTERPRETED else 100):
        assert torch.equal(first, fused(kernel, x, w, None, tile))


@needs_triton
def test_one_set_of_counters(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager calls of a stream share their counters: each call leaves every one at zero."""
    arrivals = part(kernel, "_shared.arrivals")
    own = torch.zeros(arrivals.MOST, dtype=torch.int32, device=device)
    asked = []
    monkeypatch.setattr(arrivals, "counters", lambda _, count: asked.append(count) or own)
    for tokens, n, k, programs in (
        (1, 8, 1056, 9), (40, 136, 288, 7), (3, 136, 416, 5), (17, 72, 160, 1)
    ):  # fmt: skip
        w = weight(kernel, n, k, device=device)
        x = torch.randn(tokens, k, device=device, dtype=HALF)
        check(kernel, x, w, None, fused(kernel, x, w, None, tile_of(kernel, 16, 64, programs)))
        assert not bool(own.any())
        assert 1 <= asked[-1] <= arrivals.MOST


@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("group_size", (32, 128, -1))
def test_each_code_and_plane(
    kernel: ModuleType, device: str, group_size: int, zeros: str, dtype: torch.dtype
) -> None:
    """Case B10: identity activations, one place at a time, in a batch of each tile."""
    k = 160
    w = weight(kernel, 40, k, group_size=group_size, zeros=zeros, device=device)
    exact = exact_weight(kernel, w)
    eye = torch.eye(k, device=device, dtype=dtype)
    for tokens in (1, 80):
        for start in range(0, k, tokens) if tokens > 1 else (31, 96, 128, 159):
            x = eye[start : start + tokens]
            check(kernel, x, w, None, kernel.w4a16_gemm(x, w), exact)


PROTECTED = """
    import ctypes, mmap, sys
    import torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/w4a16", version=1)
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    kept = []

    def fenced(tensor, side):
        # At the end (or the start) of its pages, beside one that nobody may touch.
        size = tensor.numel() * tensor.element_size()
        pages = -(-size // page) + 2
        buffer = mmap.mmap(-1, pages * page)
        kept.append(buffer)
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for fence in (start, start + (pages - 1) * page):
            assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
        offset = page if side == "start" else (pages - 1) * page - size
        whole = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset)
        return whole.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    for side in ("end", "start"):
        for n, k, group_size in ((8, 32, 32), (72, 96, 32), (40, 160, 64)):
            for symmetric, tokens in ((False, 1), (True, 70)):
                w = kernel.quantize(torch.randn(n, k).half(), group_size, symmetric)
                x, bias = torch.randn(tokens, k).half(), torch.randn(n)
                wanted = kernel.w4a16_gemm(x, w, bias)
                w = w._map(lambda part: fenced(part, side))
                y = kernel.w4a16_gemm(fenced(x, side), w, fenced(bias, side))
                assert torch.equal(y, wanted)
                dense = kernel.dequantize(w, torch.float32)
                assert dense.shape == (n, k)
"""


@pytest.mark.skipif(not INTERPRETED, reason="where a GPU's memory ends, nothing is protected")
def test_nothing_outside_an_operand_is_touched(kernel: ModuleType) -> None:
    """Cases B07, B13: operands beside pages that end the process when they are read."""
    fresh(PROTECTED)


@pytest.mark.parametrize("misplaced", (1, 3))
def test_poison_around_operands(kernel: ModuleType, device: str, misplaced: int) -> None:
    """Cases B07, B13: also where no operand starts at a multiple of 16 bytes."""
    for zeros in ZEROS:
        w = weight(kernel, 40, 96, group_size=32, zeros=zeros, perm=True, device=device)
        w = w._map(lambda each: guarded(each, misplaced) if each.dim() > 1 else each)
        x = guarded(torch.randn(3, 96, device=device, dtype=HALF), misplaced)
        bias = guarded(torch.randn(40, device=device), misplaced)
        check(kernel, x, w, bias, kernel.w4a16_gemm(x, w, bias))
        assert bool(kernel.dequantize(w, HALF).isfinite().all())


@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_not_finite_stays_in_its_row(
    kernel: ModuleType, device: str, bad: float, dtype: torch.dtype
) -> None:
    for tokens in (5, 70):
        w = weight(kernel, 72, 160, zeros="integer", device=device)
        x = torch.randn(tokens, 160, device=device, dtype=dtype)
        x[1, 77] = bad
        y = kernel.w4a16_gemm(x, w)
        assert not bool(y[1].isfinite().all())
        others = [row for row in range(tokens) if row != 1]
        check(kernel, x[others], w, None, y[others])


@pytest.mark.skipif(INTERPRETED, reason="NumPy multiplies there, and not each row alike")
@needs_triton
@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
def test_rows_alone_and_in_batches(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Case B41, w4a16.md 6, #13: a token has its bits in any batch of its bucket, as documented."""
    n, k = 1032, 2080
    w = weight(kernel, n, k, zeros="integer", scales=dtype, device=device)
    x = torch.randn(128, k, device=device, dtype=dtype)
    for first, last in ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128)):
        whole = kernel.w4a16_gemm(x[:last], w)
        for tokens in {first, (first + last) // 2}:
            assert torch.equal(kernel.w4a16_gemm(x[:tokens], w), whole[:tokens]), tokens
        turned = kernel.w4a16_gemm(x[:last].roll(3, 0), w)
        assert torch.equal(turned.roll(-3, 0), whole), last


@pytest.mark.parametrize("tokens", (4, 70))
def test_no_overflow_on_the_way(kernel: ModuleType, device: str, tokens: int) -> None:
    """w4a16.md 6, #4: scales of 50, activations of 200, sums that cancel before float16 ends."""
    k = 1024
    codes = torch.full((16, k), 7, dtype=torch.uint8, device=device)
    codes[:, ::2] = 9
    codes[:, 0] = 15
    scales = torch.full((8, 16), 50.0, dtype=HALF, device=device)
    w = part(kernel, "weight").pack("test", codes, scales, None, 128)
    x = torch.full((tokens, k), 200.0, dtype=HALF, device=device)
    # 7 * 50 * 200 too much by the first code: take most of that away again, in another plane.
    x[:, 1] = 200.0 * 6
    wanted = x.double() @ exact_weight(kernel, w).T
    assert float(wanted.abs().max()) < 65504
    assert torch.equal(kernel.w4a16_gemm(x, w).double(), wanted)


@pytest.mark.parametrize("tokens", (4, 70))
@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
@pytest.mark.parametrize("scale", (1e-4, 60.0, 8000.0))
def test_scales_of_any_size(
    kernel: ModuleType, device: str, scale: float, dtype: torch.dtype, tokens: int
) -> None:
    """Large ones are kept in float32, so that nothing overflows that the result does not."""
    dense = torch.randn(16, 256, device=device).clamp(-3, 3) / 3 * 7.5 * scale
    w = kernel.quantize(dense.half(), 128)
    assert w.scales.dtype is (FLOAT if scale > 64 else HALF)
    x = torch.randn(tokens, 256, device=device, dtype=dtype) / max(1.0, scale / 8)
    check(kernel, x, w, None, kernel.w4a16_gemm(x, w))


@pytest.mark.parametrize("tokens", (3, 70))
@pytest.mark.parametrize("size", (1e5, 1e30, 1e-30))
@pytest.mark.parametrize("dtype", (BFLOAT,), ids=str)
def test_bfloat16_beyond_float16(
    kernel: ModuleType, device: str, dtype: torch.dtype, size: float, tokens: int
) -> None:
    """Case B136: activations that float16 does not hold, with scales in any dtype."""
    for scales in (HALF, BFLOAT, FLOAT):
        w = weight(kernel, 40, 160, scales=scales, zeros="integer", device=device)
        x = (torch.randn(tokens, 160, device=device) * size).to(dtype)
        check(kernel, x, w, None, kernel.w4a16_gemm(x, w))


@pytest.mark.parametrize("shape", ((0, 64), (2, 0, 64), (0, 3, 64)), ids=str)
@pytest.mark.parametrize("gradients", (False, True))
def test_zero_tokens(
    kernel: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    gradients: bool,
) -> None:
    """Case B44: right shape, dtype and device, zero gradients, and nothing computed."""
    ops = part(kernel, "ops")
    for name in ("fused", "by_dequantizing"):
        monkeypatch.setattr(ops, name, lambda *_: pytest.fail("something was launched"))
    monkeypatch.setattr(ops.reference, "gemm", lambda *_: pytest.fail("something was computed"))
    w = weight(kernel, 24, 64, perm=True, device=device)
    x = torch.randn(shape, device=device, dtype=HALF, requires_grad=gradients)
    bias = torch.randn(24, device=device, requires_grad=gradients)
    y = kernel.w4a16_gemm(x, w, bias)
    assert (y.shape, y.dtype, y.device) == ((*shape[:-1], 24), HALF, x.device)
    if gradients:
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == shape and x.grad.dtype is HALF
        assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("shape", ((64,), (1, 64), (2, 3, 64), (2, 1, 5, 64)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_kept(
    kernel: ModuleType, device: str, kind: str, shape: tuple[int, ...]
) -> None:
    """Case B20: no operand changes, and the result is dense memory of its own."""
    w = weight(kernel, 24, 64, group_size=32, device=device, **KINDS[kind])
    x = torch.randn(shape, device=device, dtype=HALF)
    bias = torch.randn(24, device=device)
    operands = [x, bias, *parts(w)]
    before = [memory(each) for each in operands]
    y = kernel.w4a16_gemm(x, w, bias)
    dense = kernel.dequantize(w, HALF)
    assert all(torch.equal(memory(a), b) for a, b in zip(operands, before, strict=True))
    assert y.shape == (*shape[:-1], 24) and y.is_contiguous() and dense.is_contiguous()
    owners = {each.untyped_storage().data_ptr() for each in (*operands, y, dense)}
    assert len(owners) == len(operands) + 2
    check(kernel, x, w, bias, y)
    flat = kernel.w4a16_gemm(x.reshape(-1, 64), w, bias)
    assert torch.equal(flat, y.view(-1, 24)) or device == "cpu"  # a matrix-vector product there


@needs_triton
@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_dequantised_weight(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    """The path of many tokens, with a weight that is larger than the scratch allows at a time."""
    ops, config = part(kernel, "ops"), part(kernel, "config")
    monkeypatch.setattr(ops, "_tile", lambda *_: None)
    allocations = Allocations(kernel, monkeypatch)
    n, k = 520, 64
    w = weight(kernel, n, k, group_size=64, device=device, **KINDS[kind])
    for scratch, slices in ((config.SCRATCH_BYTES, 1), (256 * k * 2, 3)):
        monkeypatch.setattr(config, "SCRATCH_BYTES", scratch)
        for bias, x in (
            (None, torch.randn(9, k, device=device, dtype=dtype)),
            (torch.randn(n, device=device), torch.randn(k, 9, device=device, dtype=dtype).t()),
        ):
            allocations.given.clear()
            check(kernel, x, w, bias, kernel.w4a16_gemm(x, w, bias))
            assert len(allocations.given) == 1 + slices  # the result and each slice
            allocations.check()


@needs_triton
@pytest.mark.parametrize("group_size", (32, 64, 256) if INTERPRETED else (32, 64, 128, 256, -1))
@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_has_the_bits_of_the_reference(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, kind: str, group_size: int
) -> None:
    allocations = Allocations(kernel, monkeypatch)
    reference = part(kernel, "reference")
    for n, k in ((40, 352),) if INTERPRETED else ((72, 352), (8, 32), (2112, 704)):
        w = weight(kernel, n, k, group_size=group_size, device=device, **KINDS[kind])
        for dtype in (HALF, FLOAT) if INTERPRETED else (HALF, BFLOAT, FLOAT):
            got, wanted = kernel.dequantize(w, dtype), reference.dequantize(w, dtype)
            if w.perm is not None:
                wanted = wanted[:, w.perm.long().argsort()]
            if kind == "float zeros":
                # Off by the rounding of zero - 8, which is as fine as that of the zero point.
                exact = exact_weight(kernel, w)
                floor = torch.finfo(dtype).eps
                assert relative_error(got, exact) <= 2 * max(relative_error(wanted, exact), floor)
            else:
                assert torch.equal(got, wanted), (n, k, dtype)
            assert got.dtype is dtype
    allocations.check()


@pytest.mark.parametrize("tokens", (4, 70))
def test_large_scales_that_did_not_come_from_pack(
    kernel: ModuleType, device: str, tokens: int
) -> None:
    """A file may hold 16-bit scales that 2^9 times are no float16."""
    codes = torch.randint(0, 16, (16, 128), dtype=torch.uint8, device=device)
    parts = {
        "qweight": part(kernel, "weight").pack_codes(codes),
        "scales": torch.full((1, 16), 200.0, dtype=HALF, device=device),
        "sizes": torch.tensor([128, -1]),
    }
    w = kernel.W4Weight.from_state_dict(parts)
    x = torch.randn(tokens, 128, device=device, dtype=HALF) / 16
    check(kernel, x, w, None, kernel.w4a16_gemm(x, w))
