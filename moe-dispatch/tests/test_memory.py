"""Memory around and far from operands: nothing outside is touched, nothing wraps at 32 bits."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch
from torch import Tensor

from imports import fresh

from .oracle import (
    FEW,
    INTERPRETED,
    LAYOUTS,
    SIZES,
    check_call,
    guarded,
    problem,
)

FLOAT = torch.float32


@pytest.mark.parametrize("lead", (4096, 3))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", (1, FEW))
def test_poison_around_operands(
    kernel: ModuleType, device: str, tokens: int, layout: str, lead: int
) -> None:
    """Cases B07, B53, class 6: nothing beside an operand is used, wherever it begins."""
    p = problem(tokens, device=device, layout=layout, bias=FLOAT, **SIZES)
    fields = {
        field.name: guarded(value, lead)
        for field in dataclasses.fields(p)
        if isinstance(value := getattr(p, field.name), Tensor)
    }
    check_call(kernel, p.but(**fields))


PROTECTED = """
    import ctypes, mmap
    import torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/moe-dispatch", version=1)
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
        for hidden, inner, dtype in ((40, 24, torch.float16), (33, 17, torch.float32)):
            for tokens, interleaved in ((1, False), (7, False), (7, True)):
                both = torch.randn(3, 2 * inner, hidden, dtype=dtype)
                operands = [
                    torch.randn(tokens, hidden, dtype=dtype), both,
                    torch.randn(3, hidden, inner, dtype=dtype), torch.randint(-1, 4, (tokens, 3)),
                    torch.rand(tokens, 3), torch.randn(3, 2 * inner), torch.randn(3, hidden),
                    torch.tensor([0, -1, 1, 2]),
                ]

                def call(x, gate_up, down, ids, mix, bias, other, places):
                    return kernel.fused_experts(
                        x, gate_up, down, ids, mix, gate_up_bias=bias, down_bias=other,
                        expert_map=places, interleaved=interleaved,
                    )

                wanted = call(*operands)
                assert torch.equal(call(*(fenced(each, side) for each in operands)), wanted)
                router = fenced(torch.randn(3, hidden, dtype=dtype), side)
                x, gate_up, down = (fenced(each, side) for each in operands[:3])
                gate, up = (fenced(each, side) for each in both.chunk(2, 1))
                out, ids, mix = kernel.fused_moe_forward(x, router, gate, up, down, 3, 2)
                assert bool(out.isfinite().all())
                kernel.route(fenced(torch.randn(tokens, 7), side), 3)
"""


@pytest.mark.skipif(not INTERPRETED, reason="where a GPU's memory ends, nothing is protected")
def test_nothing_outside_an_operand_is_touched(kernel: ModuleType) -> None:
    """Cases B07, B38: operands beside pages that end the process when they are read."""
    fresh(PROTECTED)


FAR = """
    import importlib, sys, torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/moe-dispatch", version=1)
    config = importlib.import_module(f"{kernel.__name__}.config")
    ops = importlib.import_module(f"{kernel.__name__}.ops")
    found, ops._plan = config.gemm_config, ops._plan.__wrapped__
    stride = 2**31 + 64
    # A file of holes: only the pages that are touched take memory.
    whole = torch.from_file(sys.argv[1], shared=True, size=stride + 16384, dtype=torch.float16)
    experts, n, k = 2, 32, 32

    def far(weight, lead):
        strides = stride, *weight.stride()[1:]
        return whole[lead:].as_strided(weight.shape, strides).copy_(weight)

    for transposed in (False, True):
        for boxes in (True, False):
            def changed(*arguments):
                import dataclasses
                return dataclasses.replace(found(*arguments), boxes=boxes)
            config.gemm_config = changed
            both, down = torch.randn(2, 2 * n, k).half(), torch.randn(2, k, n).half()
            if transposed:
                both, down = both.mT.contiguous().mT, down.mT.contiguous().mT
            x = torch.randn(5, k).half()
            ids = torch.tensor([[1]] * 4 + [[0]])
            for tokens in (1, 5):
                for interleaved in (False, True):
                    near, apart = (
                        kernel.fused_experts(
                            x[:tokens], *weights, ids[:tokens], torch.ones(tokens, 1),
                            interleaved=interleaved,
                        )
                        for weights in ((both, down), (far(both, 0), far(down, 4096)))
                    )
                    assert torch.equal(near, apart) and bool(near.any())
    # Gates and ups that are further apart than 32 bits tell, and rows of x that are.
    both, router = torch.randn(2, 2 * n, k).half(), torch.randn(2, k).half()
    gate, up = both.chunk(2, 1)
    low = whole[:2048].view(2, n, k)
    high = whole[stride:][:2048].view(2, n, k)
    for tokens in (1, 5):
        wanted = kernel.fused_moe_forward(x[:tokens], router, gate, up, down, 2, 2)
        for first, second in ((low, high), (high, low)):
            first.copy_(gate), second.copy_(up)
            got = kernel.fused_moe_forward(x[:tokens], router, first, second, down, 2, 2)
            assert all(torch.equal(a, b) for a, b in zip(wanted, got))
    rows = whole[8192:].as_strided((2, k), (stride, 1))
    rows.copy_(x[:2])
    for tokens in (1, 2):
        got = kernel.fused_moe_forward(rows[2 - tokens:], router, gate, up, down, 2, 2)
        wanted = kernel.fused_moe_forward(x[2 - tokens: 2], router, gate, up, down, 2, 2)
        assert all(torch.equal(a, b) for a, b in zip(wanted, got))
"""


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU test_gpu_sizes.py does this with real memory")
def test_offsets_past_2_to_the_31_elements(kernel: ModuleType, tmp_path) -> None:
    """Cases B01, B02: offsets are 64-bit. A wrong one would end the process."""
    fresh(FAR, str(tmp_path / "holes"))
