"""Public names, errors before any launch, configurations, and counters of arrivals."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .oracle import part, weight

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0", reason="the same with the interpreter"
)
HALF = torch.float16


def test_public_names(kernel: ModuleType) -> None:
    for name in kernel.__all__:
        public = getattr(kernel, name)
        text = inspect.getdoc(public)
        assert text, name
        if inspect.isfunction(public):
            for section in ("Args:", "Returns:"):
                assert section in text, (name, section)
            for parameter in inspect.signature(public).parameters:
                assert f"    {parameter}: " in text, f"{name}: {parameter} is not described"


def test_import_without_triton(kernel: ModuleType) -> None:
    """Case B109: the reference needs only torch."""
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from kernels import get_kernel

        kernel = get_kernel("roofline-kernels/w4a16", version=1)
        assert not torch.cuda.is_initialized()
        weight = kernel.quantize(torch.randn(8, 64), 32)
        assert kernel.w4a16_gemm(torch.randn(3, 64).half(), weight).shape == (3, 8)
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr[-2000:]


def test_errors(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names the function, the argument, what was wanted and what came."""
    monkeypatch.setattr(part(kernel, "ops"), "gemm", lambda *_: pytest.fail("was called"))
    w = weight(kernel, 16, 64)
    x = torch.randn(3, 64, dtype=HALF)
    meta = torch.randn(3, 64, dtype=HALF, device="meta")
    for call, error, match in (
        (lambda: kernel.w4a16_gemm(x, x), TypeError, "weight must be a W4Weight, got a torch"),
        (lambda: kernel.w4a16_gemm(x.float(), w), TypeError, "x must be float16 or bfloat16"),
        (lambda: kernel.w4a16_gemm(None, w), TypeError, "x must be float16 or bfloat16, got None"),
        (lambda: kernel.w4a16_gemm(x[:, :32], w), ValueError, r"last dimension of 64.*\(3, 32\)"),
        (lambda: kernel.w4a16_gemm(x[0, 0], w), ValueError, r"last dimension of 64.*\(\)"),
        (lambda: kernel.w4a16_gemm(meta, w), ValueError, "x must be on cpu with the weight.*meta"),
        (lambda: kernel.w4a16_gemm(x, w, x), ValueError, r"bias must have shape \(16,\)"),
        (lambda: kernel.w4a16_gemm(x, w, torch.arange(16)), TypeError, "bias must be float16"),
        (lambda: kernel.w4a16_gemm(x, w, meta[0, :16]), ValueError, "bias must be on cpu.*meta"),
        (lambda: kernel.quantize(x), ValueError, "quantize: out_features.*multiple of 8.*got 3"),
        (lambda: kernel.quantize(x[0]), ValueError, r"must be \[out_features, in_features\]"),
        (lambda: kernel.quantize(x.int()), TypeError, "quantize: weight must be float16"),
        (lambda: kernel.quantize(x.new_full((8, 64), float("inf"))), ValueError, "finite"),
        (lambda: kernel.quantize(x.new_ones(8, 64), 96), ValueError, "group_size must be one of"),
        (lambda: kernel.dequantize(w, torch.int8), TypeError, "dequantize: dtype must be"),
        (lambda: kernel.dequantize(x, HALF), TypeError, "dequantize: weight must be a W4Weight"),
    ):
        with pytest.raises(error, match=match):
            call()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((8, 12, 16, 40, 0)),
    st.sampled_from((32, 64, 96, 100, 160, 16)),
    st.sampled_from((32, 64, 96, 128, 256, -1, 0)),
    st.sampled_from((HALF, torch.bfloat16, torch.float32)),
    st.booleans(),
)
def test_supports_is_what_the_call_does(
    kernel: ModuleType, n: int, k: int, group_size: int, dtype: torch.dtype, symmetric: bool
) -> None:
    """Case B140."""
    right, reason = kernel.supports(
        in_features=k, out_features=n, group_size=group_size, dtype=dtype, symmetric=symmetric
    )
    try:
        w = kernel.quantize(torch.randn(n, k), group_size, symmetric)
        kernel.w4a16_gemm(torch.randn(2, k).to(dtype), w)
    except (ValueError, TypeError):
        assert not right and reason
    else:
        assert right and not reason


@pytest.mark.parametrize("bits", (2, 3, 8))
def test_other_bits(kernel: ModuleType, bits: int) -> None:
    """Case B137."""
    right, reason = kernel.supports(in_features=64, out_features=64, bits=bits)
    assert not right and reason == f"bits must be 4, got {bits}"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 512),
    st.integers(1, 20000).map(lambda each: 8 * each),
    st.integers(1, 1000).map(lambda each: 32 * each),
    st.booleans(),
    st.sampled_from(((108, 163, 80), (128, 99, 89), (58, 99, 89), (132, 227, 90), (304, 64, 0))),
)
def test_heuristic_fits(
    kernel: ModuleType, tokens: int, n: int, k: int, after: bool, device: tuple[int, int, int]
) -> None:
    """Cases B115, B116, B133: A100, 4090, L4, H100 and MI300X."""
    config = part(kernel, "config")
    processors, kilobytes, arch = device
    tile = config.heuristic(
        config.bucket(tokens), n, k, after_only=after, multiprocessors=processors,
        shared_memory=kilobytes * 1024, arch=arch,
    )  # fmt: skip
    assert tile.num_stages * config.step_bytes(tile.block_m, tile.block_n) <= kilobytes * 1024
    assert not (after and tile.scale_before)
    assert tile.programs >= 0
    # What the card says of the workspace: two float32 tiles a program.
    steps = -(-k // 128)
    per, shared, size = part(kernel, "ops")._shares(tokens, n, steps, tile)
    assert per >= 1 and shared <= part(kernel, "_shared.arrivals").MOST
    assert size <= 2 * tile.programs * tile.block_m * tile.block_n


def test_counters(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls of a stream share theirs; each captured call has its own, for good."""
    arrivals = part(kernel, "_shared.arrivals")
    monkeypatch.setattr(arrivals.torch.cuda, "synchronize", lambda *_: None)
    arena = arrivals._Arena(torch.device("cpu"))
    first, again, other = (arena.of_stream(stream) for stream in (1, 1, 2))
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()
    captured = [arena.take(5) for _ in range(3)]
    assert len({each.data_ptr() for each in captured}) == 3
    assert all(each.data_ptr() % 16 == first.data_ptr() % 16 for each in captured)
    assert arena.take(arrivals._ARENA) is None  # the caller then zeroes its own
    assert arena.take(arena._free.numel()) is not None
    assert arena.of_stream(1).data_ptr() == first.data_ptr()
    assert arena._free.numel() == arrivals._ARENA  # filled up again, ahead of the next capture


def test_round_trip(kernel: ModuleType) -> None:
    """What quantize gives is within half a step (one, with a zero point), and survives a file."""
    from safetensors.torch import load, save

    dense = torch.randn(24, 160)
    for symmetric in (True, False):
        w = kernel.quantize(dense, 64, symmetric)
        steps = w.scales.float().repeat_interleave(64, 0)[:160].T
        error = (kernel.dequantize(w, torch.float32) - dense).abs() / steps
        # The scale is rounded to bfloat16: the outermost values may be clamped by that much.
        clamped = 15 * torch.finfo(torch.bfloat16).eps / 2
        assert float(error.max()) <= (0.5 if symmetric else 1.0) + clamped
        again = kernel.W4Weight.from_state_dict(load(save(w.state_dict())))
        assert torch.equal(kernel.dequantize(again, HALF), kernel.dequantize(w, HALF))
        assert again.group_size == 64 and again.nbytes == w.nbytes
