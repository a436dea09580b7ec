"""What only compiled kernels on a real GPU can show."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from imports import fresh
from monorepo.timing import host_ratio

from .oracle import ZEROS, check, exact_weight, part, weight

pytestmark = pytest.mark.gpu
HALF, BFLOAT = torch.float16, torch.bfloat16
TOKENS = (*range(1, 18), 31, 32, 33, 64, 65, 127, 128, 129, 329, 600)
#: (out, in) of layers that tuned kernels refuse, and a plain one (case B134).
SIZES = ((2112, 704), (704, 2112), (192, 7168), (48, 1344), (4096, 2880))


@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("group_size", (32, 64, 128, 256, -1))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_real_sizes(
    kernel: ModuleType, size: tuple[int, int], group_size: int, zeros: str, dtype: torch.dtype
) -> None:
    n, k = size
    w = weight(kernel, n, k, group_size=group_size, zeros=zeros, scales=dtype, device="cuda")
    dense = exact_weight(kernel, w)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device="cuda", dtype=dtype)
        y = kernel.w4a16_gemm(x, w, bias)
        check(kernel, x, w, bias, y, dense)
        assert torch.equal(y, kernel.w4a16_gemm(x, w, bias))
    assert torch.equal(kernel.dequantize(w, torch.float32).double(),
                       exact_weight(kernel, w).float().double()) or zeros == "float"  # fmt: skip


def test_tuned_sizes(kernel: ModuleType) -> None:
    """Every entry of the tables, on the shape it was tuned for."""
    for k, n in ((7168, 2048), (4096, 11008), (7168, 18432)):
        for dtype in (HALF, BFLOAT):
            w = weight(kernel, n, k, scales=dtype, device="cuda")
            for tokens in (1, 8, 16, 32, 64, 100, 256, 512, 513):
                x = torch.randn(tokens, k, device="cuda", dtype=dtype)
                check(kernel, x, w, None, kernel.w4a16_gemm(x, w))


def test_bfloat16_beyond_float16(kernel: ModuleType) -> None:
    """Case B136: activations that float16 does not hold, scales in float16."""
    w = weight(kernel, 512, 1024, device="cuda")
    x = (torch.randn(5, 1024, device="cuda") * 1e5).bfloat16()
    check(kernel, x, w, None, kernel.w4a16_gemm(x, w))


GRAPH = """
    import torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/w4a16", version=1)
    weight = kernel.quantize(torch.randn(2048, 4096, device="cuda").half(), 128)
    for tokens in (1, 2, 8, 16, 64):
        x = torch.randn(tokens, 4096, device="cuda").half()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernel.w4a16_gemm(x, weight)
        for _ in range(20):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, kernel.w4a16_gemm(x, weight))
"""


def test_graph_capture_at_the_first_call(kernel: ModuleType) -> None:
    """Case B59: in a fresh process, for numbers of tokens never seen."""
    fresh(GRAPH)


def test_graphs_side_by_side(kernel: ModuleType) -> None:
    """Two graphs that were captured on one stream run at the same time on two."""
    w = weight(kernel, 2048, 7168, device="cuda")
    x = [torch.randn(8, 7168, device="cuda", dtype=HALF) for _ in range(2)]
    wanted = [kernel.w4a16_gemm(each, w) for each in x]
    graphs, outputs = [], []
    for each in x:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append([kernel.w4a16_gemm(each, w) for _ in range(20)])
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(30):
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(outputs, wanted, strict=True):
            assert all(torch.equal(y, right) for y in found)


def test_streams_side_by_side(kernel: ModuleType) -> None:
    """Eager calls on two streams share a weight, and nothing else."""
    w = weight(kernel, 2048, 7168, device="cuda")
    x = [torch.randn(8, 7168, device="cuda", dtype=HALF) for _ in range(2)]
    wanted = [kernel.w4a16_gemm(each, w) for each in x]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # so that both have work waiting
    for _ in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(kernel.w4a16_gemm(x[i], w))
    torch.cuda.synchronize()
    for ys, right in zip(found, wanted, strict=True):
        assert all(torch.equal(y, right) for y in ys)


def test_second_device(kernel: ModuleType) -> None:
    """Case B46: results and launches are on the device of x, whichever is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs; torch sees one")
    w = weight(kernel, 136, 1056, device="cuda:1")
    x = torch.randn(5, 1056, device="cuda:1", dtype=HALF)
    with torch.cuda.device(0):
        check(kernel, x, w, None, kernel.w4a16_gemm(x, w))
        with pytest.raises(ValueError, match="must be on cuda:1 with the weight.*cuda:0"):
            kernel.w4a16_gemm(x.to("cuda:0"), w)


def test_one_compilation_a_bucket(kernel: ModuleType) -> None:
    """Case B65: the number of tokens is no part of what Triton compiles."""
    function = part(kernel, "_kernels").w4a16_gemm_kernel
    w = weight(kernel, 1000, 1056, device="cuda")

    def compiled() -> int:
        return len(function.device_caches[torch.cuda.current_device()][0])

    for first, others in ((1, range(2, 9)), (9, range(10, 17)), (17, (20, 32)), (65, (100, 128))):
        kernel.w4a16_gemm(torch.randn(first, 1056, device="cuda", dtype=HALF), w)
        before = compiled()
        for tokens in others:
            kernel.w4a16_gemm(torch.randn(tokens, 1056, device="cuda", dtype=HALF), w)
        assert compiled() == before


@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
def test_compile_takes_the_decode_path(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    """w4a16.md 6, #9: compiled for 513 tokens, then called with one."""
    torch._dynamo.reset()
    ops = part(kernel, "ops")
    taken: list[str] = []
    for name in ("fused", "by_dequantizing"):
        function = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, f=function, n=name: (taken.append(n), f(*a))[1])
    w = weight(kernel, 512, 1024, device="cuda")
    compiled = torch.compile(
        lambda x: kernel.w4a16_gemm(x, w) * 1.0, fullgraph=True, dynamic=True, mode=mode
    )
    for tokens, path in ((513, "by_dequantizing"), (1, "fused"), (7, "fused")):
        x = torch.randn(tokens, 1024, device="cuda", dtype=HALF)
        for _ in range(3):
            taken.clear()
            y = compiled(x).clone()
            assert set(taken) <= {path}
            assert torch.equal(y, kernel.w4a16_gemm(x, w))


def test_outputs_past_32_bits(kernel: ModuleType) -> None:
    """w4a16.md 6, #6: more than 2^31 elements of x and of y."""
    n, k = 65536, 128
    w = weight(kernel, n, k, device="cuda")
    x = torch.randn(32769, k, device="cuda", dtype=HALF)
    check(kernel, x[-2:], w, None, kernel.w4a16_gemm(x, w)[-2:].clone())


def test_strides_past_32_bits(kernel: ModuleType) -> None:
    """Rows further apart than 32 bits tell."""
    n, k = 256, 128
    w = weight(kernel, n, k, device="cuda")
    few = torch.empty(2, 2**31 + 64, device="cuda", dtype=HALF)[:, :k]
    few.copy_(torch.randn(2, k, device="cuda"))
    check(kernel, few, w, None, kernel.w4a16_gemm(few, w))


def test_host_time(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager call costs at most 1.3 times what a bare Triton launch of the same kernel does."""
    w = weight(kernel, 1024, 1024, device="cuda")
    x = torch.randn(1, 1024, device="cuda", dtype=HALF)
    launches: list[Callable[[], object]] = []

    def note(_, function, programs, tensors, scalars, constants, num_warps, max_registers):
        tensors = tuple(None if each is None else each.clone() for each in tensors)
        launches.append(
            lambda: function[(programs,)](*tensors, *scalars, **constants, num_warps=num_warps)
        )

    with monkeypatch.context() as patch:
        patch.setattr(part(kernel, "launch"), "launch", note)
        kernel.w4a16_gemm(x, w)
    (bare,) = launches
    assert host_ratio(lambda: kernel.w4a16_gemm(x, w), bare) <= 1.3  # the limit of the issue


@pytest.mark.parametrize("dtype", (HALF, BFLOAT, torch.float32))
@pytest.mark.parametrize("zeros", ("eight", "integer"))
@pytest.mark.parametrize("group_size", (32, 64, 128, 256, -1))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dequantize_has_the_bits_of_the_reference(
    kernel: ModuleType, size: tuple[int, int], group_size: int, zeros: str, dtype: torch.dtype
) -> None:
    for scales in (HALF, BFLOAT, torch.float32):
        w = weight(kernel, *size, group_size=group_size, zeros=zeros, scales=scales, device="cuda")
        wanted = part(kernel, "reference").dequantize(w, dtype)
        assert torch.equal(kernel.dequantize(w, dtype), wanted)


def test_launches_are_told_apart(kernel: ModuleType) -> None:
    """What was compiled for one call is not taken for another that differs in one thing."""
    compiled = part(kernel, "_shared.launcher")._compiled
    n, k = 136, 416
    kinds = [(zeros, HALF) for zeros in ZEROS] + [("eight", torch.float32)]
    calls = []
    for dtype in (HALF, BFLOAT):
        x = torch.randn(20, k, device="cuda", dtype=dtype)
        wide = torch.randn(3, 512, device="cuda", dtype=dtype)
        for group_size in (32, 128):
            whole = weight(kernel, n, 512, group_size=group_size, device="cuda")
            for zeros, scales in kinds:
                w = weight(
                    kernel, n, k, group_size=group_size, zeros=zeros, scales=scales, device="cuda"
                )
                bias = torch.randn(n + 1, device="cuda")
                calls += [(x[:1], w, None), (x, w, None), (x[:1], w, bias[:n]), (x, w, bias[1:])]
            calls += [(wide, whole, None), (wide, whole, bias[:n].half())]
    for order in (1, -1):
        found = []
        for x, w, bias in 2 * calls[::order]:
            found.append(kernel.w4a16_gemm(x, w, bias))
        compiled.clear()
        for (x, w, bias), y in zip(2 * calls[::order], found, strict=True):
            compiled.clear()  # so that Triton looks at every argument again
            assert torch.equal(y, kernel.w4a16_gemm(x, w, bias))


def needs_memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / 2**30:.0f} are free")


def test_weight_past_32_bits(kernel: ModuleType) -> None:
    """Case B02: more than 2^31 words of codes, and more tiles than there are counters."""
    needs_memory(40)
    n, k = 2**24 - 32, 640  # 5 steps of n x 32 words
    assert (k // 128) * n * 32 > 2**31
    qweight = torch.randint(-(2**15), 2**15, (5, n, 32), device="cuda", dtype=torch.int16)
    scales = torch.rand(20, n, device="cuda", dtype=HALF) * 0.02 + 0.005
    w = kernel.W4Weight(qweight, scales, None, None, k, 32)
    last = kernel.W4Weight(
        qweight[:, -64:].contiguous(), scales[:, -64:].contiguous(), None, None, k, 32
    )
    for tokens in (1, 9):
        x = torch.randn(tokens, k, device="cuda", dtype=HALF)
        check(kernel, x, last, None, kernel.w4a16_gemm(x, w)[:, -64:].contiguous())


def test_activations_past_32_bits(kernel: ModuleType) -> None:
    """w4a16.md 6, #6: more than 2^31 elements of x, dense and in rows that are far apart."""
    needs_memory(30)
    k = 8192
    w = weight(kernel, 128, k, device="cuda")
    x = torch.zeros(2**18 + 8, k, device="cuda", dtype=HALF)
    assert x.numel() > 2**31
    x[-3:] = torch.randn(3, k, device="cuda")
    y = kernel.w4a16_gemm(x, w)
    check(kernel, x[-3:], w, None, y[-3:].clone())
    assert not bool(y[:-3].any())
    # Read in place by the fused kernel: the last row starts 2^31 elements after the first.
    small = weight(kernel, 128, 256, device="cuda")
    far = x.as_strided((257, 256), (2**23, 1))
    far.copy_(torch.randn(257, 256, device="cuda"))
    check(kernel, far, small, None, kernel.w4a16_gemm(far, small))


def test_eager_beside_a_graph(kernel: ModuleType) -> None:
    """A replay on one stream and eager calls on another share no counters."""
    w = weight(kernel, 2048, 7168, device="cuda")
    x = [torch.randn(8, 7168, device="cuda", dtype=HALF) for _ in range(2)]
    wanted = [kernel.w4a16_gemm(each, w) for each in x]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [kernel.w4a16_gemm(x[0], w) for _ in range(20)]
    side = torch.cuda.Stream()
    for _ in range(30):
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            eager = [kernel.w4a16_gemm(x[1], w) for _ in range(20)]
        torch.cuda.synchronize()
        assert all(torch.equal(y, wanted[0]) for y in captured)
        assert all(torch.equal(y, wanted[1]) for y in eager)


def test_many_captures(kernel: ModuleType) -> None:
    """Captures take counters for good: when none are left, calls zero their own."""
    arrivals = part(kernel, "_shared.arrivals")
    w = weight(kernel, 2048, 7168, device="cuda")
    x = torch.randn(1, 7168, device="cuda", dtype=HALF)
    wanted = kernel.w4a16_gemm(x, w)
    arena = arrivals._arena(torch.cuda.current_device())
    taken = arena._free
    arena._free = taken[:0]
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernel.w4a16_gemm(x, w)
        for _ in range(3):
            y.zero_()
            graph.replay()
            assert torch.equal(y, wanted)
    finally:
        arena._free = taken


def test_rows_alone_and_in_batches(kernel: ModuleType) -> None:
    """w4a16.md 6, #13 at real sizes: a token has its bits in any batch of its bucket."""
    for n, k in ((2048, 7168), (11008, 4096), (4096, 2880)):
        for dtype in (HALF, BFLOAT):
            w = weight(kernel, n, k, scales=dtype, device="cuda")
            x = torch.randn(128, k, device="cuda", dtype=dtype)
            for first, last in ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128)):
                whole = kernel.w4a16_gemm(x[:last], w)
                for tokens in range(first, last):
                    assert torch.equal(kernel.w4a16_gemm(x[:tokens], w), whole[:tokens])


def test_memory_of_a_call(kernel: ModuleType) -> None:
    """Case B43: beyond the result, the workspace of the tile or the slice that CARD.md names."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    device = torch.device("cuda", torch.cuda.current_device())
    n, k = 11008, 4096
    w = weight(kernel, n, k, device="cuda")
    for tokens in (1, 16, 64, 512, 2048):
        x = torch.randn(tokens, k, device="cuda", dtype=HALF)
        kernel.w4a16_gemm(x, w)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = kernel.w4a16_gemm(x, w)
        torch.cuda.synchronize()
        workspace = config.SCRATCH_BYTES
        if tokens <= config.MOST_FUSED:
            tile = config.gemm_config(config.bucket(tokens), n, k, False, device)
            workspace = 4 * ops._shares(tokens, n, k // 128, tile)[2]
        extra = torch.cuda.max_memory_allocated() - before - y.nbytes
        # Large blocks come in units of 2 MiB.
        assert extra <= workspace + 2 * 2**21
