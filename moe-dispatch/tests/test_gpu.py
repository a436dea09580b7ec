"""What only compiled kernels on a real GPU can show."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from imports import fresh

from .gpu import first_tokens, layer
from .oracle import check, check_call, choices, force, problem
from .routing import part

pytestmark = pytest.mark.gpu
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)


def launches(function: Callable[[], object]) -> list[str]:
    """Return the names of all that a call makes the GPU do: kernels, copies and fills."""
    for _ in range(2):
        function()
    for _ in range(2):  # what is profiled first may miss events
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            function()
            torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_launches(kernel: ModuleType, dtype: torch.dtype) -> None:
    """Five for a whole layer and three for one token: no fill, no copy, no cast beside them."""
    for tokens, count in ((1, 3), (64, 5), (300, 5), (2050, 5)):
        tensors = layer(tokens, dtype)
        names = launches(lambda t=tensors: kernel.fused_moe_forward(*t, 16, 4))
        assert len(names) == count and all("moe_" in name for name in names), names
        names = launches(lambda t=tensors: kernel.fused_moe_forward(*t, 16, 4, "sigmoid"))
        assert len(names) == count, names
    p = problem(300, experts=16, top_k=4, dtype=dtype, device="cuda", layout="interleaved")
    names = launches(lambda: p.call(kernel))
    assert len(names) == 5 and all("moe_" in name for name in names), names
    p = first_tokens(p, 1)
    names = launches(lambda: p.call(kernel))
    assert len(names) == 2 and all("moe_" in name for name in names), names


def test_launches_of_several_passes(kernel: ModuleType) -> None:
    """Five for as many tokens as one pass takes."""
    most = part(kernel, "config").MOST_TOKENS
    for tokens, count in ((most, 5), (most + 1, 10)):
        tensors = layer(tokens, HALF, hidden=64, inner=32)
        names = launches(lambda t=tensors: kernel.fused_moe_forward(*t, 16, 2))
        assert len(names) == count, names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_graph_with_other_choices(kernel: ModuleType, dtype: torch.dtype) -> None:
    """Cases B59, B68, class 12: nothing that a graph holds depends on who is chosen."""
    for tokens in (1, 3, 40, 300):
        p = problem(
            tokens, experts=9, top_k=3, hidden=256, inner=128, dtype=dtype, device="cuda"
        )  # fmt: skip
        p.call(kernel)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = p.call(kernel)
        few = choices(tokens, 9, 3, "cuda") % 3
        skipped = choices(tokens, 9, 3, "cuda")
        skipped[::2, 1], skipped[-1] = -1, 9
        everywhere = (choices(tokens, 9, 3, "cuda") for _ in range(5))
        nobody = torch.full_like(few, -1)
        for ids in (*everywhere, few, torch.zeros_like(few), skipped, nobody, few + 6):
            p.x.copy_(torch.randn_like(p.x))
            p.ids.copy_(ids)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, p.call(kernel))
            check(p, out)


def test_graph_of_a_layer(kernel: ModuleType) -> None:
    """Class 12, of the router too: its counters are zero again after each replay."""
    for tokens in (1, 8, 65, 600):
        for dtype in DTYPES:
            tensors = layer(tokens, dtype, experts=130, hidden=1024, inner=64)
            graph = torch.cuda.CUDAGraph()
            kernel.fused_moe_forward(*tensors, 130, 6)
            with torch.cuda.graph(graph):
                captured = kernel.fused_moe_forward(*tensors, 130, 6)
            for _ in range(5):
                tensors[0].copy_(torch.randn_like(tensors[0]))
                graph.replay()
                eager = kernel.fused_moe_forward(*tensors, 130, 6)
                assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


def test_graph_of_no_tokens(kernel: ModuleType) -> None:
    """Class 4: an idle rank captures what the others do."""
    tensors = layer(0, BFLOAT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, ids, weights = kernel.fused_moe_forward(*tensors, 16, 4)
        one = torch.ones(1, device="cuda") + 1  # a graph of nothing is none
    graph.replay()
    assert out.shape == (0, 512) and ids.shape == weights.shape == (0, 4) and one.item() == 2


GRAPH = """
    import torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/moe-dispatch", version=1)
    router = torch.randn(16, 512, device="cuda").half() / 23
    gate, up = (torch.randn(16, 256, 512, device="cuda").half() / 23 for _ in range(2))
    down = torch.randn(16, 512, 256, device="cuda").half() / 16
    for tokens in (1, 2, 8, 64, 700):
        x = torch.randn(tokens, 512, device="cuda").half()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernel.fused_moe_forward(x, router, gate, up, down, 16, 4)
        for _ in range(20):
            x.copy_(torch.randn_like(x))
            graph.replay()
            eager = kernel.fused_moe_forward(x, router, gate, up, down, 16, 4)
            assert all(torch.equal(a, b) for a, b in zip(captured, eager))
"""


def test_graph_capture_at_the_first_call(kernel: ModuleType) -> None:
    """Case B59: in a fresh process, for numbers of tokens never seen."""
    fresh(GRAPH)


def test_graphs_side_by_side(kernel: ModuleType) -> None:
    """Two graphs that were captured on one stream run at the same time on two."""
    tensors = [layer(64, HALF, experts=128, hidden=2048) for _ in range(2)]
    wanted = [kernel.fused_moe_forward(*each, 128, 8) for each in tensors]
    graphs, outputs = [], []
    for each in tensors:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append([kernel.fused_moe_forward(*each, 128, 8) for _ in range(10)])
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(outputs, wanted, strict=True):
            for results in found:
                assert all(torch.equal(a, b) for a, b in zip(results, right, strict=True))


@pytest.mark.parametrize("tokens", (1, 64))
def test_streams_side_by_side(kernel: ModuleType, tokens: int) -> None:
    """Eager calls on two streams share weights, and nothing else."""
    x, *weights = layer(tokens, HALF, experts=128, hidden=2048)
    x = [x, torch.randn_like(x)]
    wanted = [kernel.fused_moe_forward(each, *weights, 128, 8) for each in x]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # so that both have work waiting
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(kernel.fused_moe_forward(x[i], *weights, 128, 8))
    torch.cuda.synchronize()
    for calls, right in zip(found, wanted, strict=True):
        for results in calls:
            assert all(torch.equal(a, b) for a, b in zip(results, right, strict=True))


def test_host_never_waits(kernel: ModuleType) -> None:
    """Class 12: no result of the device is read on the host."""
    calls: list[Callable[[], object]] = []
    for tokens in (0, 1, 3, 64, 700):
        tensors = layer(tokens, BFLOAT)
        p = problem(tokens, experts=9, device="cuda", bias=FLOAT, layout="transposed")
        map_ = torch.arange(-4, 9, device="cuda")
        logits = torch.randn(tokens, 64, device="cuda")
        calls += [
            lambda t=tensors: kernel.fused_moe_forward(*t, 16, 4),
            lambda p=p: p.call(kernel),
            lambda p=p, m=map_: p.but(expert_map=m).call(kernel),
            lambda x=logits: kernel.route(x, 6, num_groups=8, top_groups=4),
        ]
    for mode in ("default", "error"):  # the first time compiles
        try:
            torch.cuda.set_sync_debug_mode(mode)
            for call in calls:
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
def test_compile(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    """Class 12: compiled for many tokens, then called with one; other choices at each replay."""
    torch._dynamo.reset()
    ops = part(kernel, "ops")
    taken: list[str] = []
    for name in ("_decode", "_grouped"):
        function = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, f=function, n=name: (taken.append(n), f(*a))[1])
    _, router, *weights = layer(1, BFLOAT)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        out, ids, mix = kernel.fused_moe_forward(x * 2, router, *weights, 16, 4)
        more = kernel.fused_experts(
            out, torch.cat(weights[:2], 1), weights[2], ids, mix, activation="gelu_tanh"
        )
        return out, ids, mix, more + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, mode=mode)
    for tokens, path in ((300, "_grouped"), (1, "_decode"), (17, "_grouped"), (64, "_grouped")):
        for _ in range(4):
            x = torch.randn(tokens, 512, device="cuda", dtype=BFLOAT)
            taken.clear()
            found = [each.clone() for each in compiled(x)]
            assert set(taken) <= {path}
            wanted = step(x)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_hundred_repeats(kernel: ModuleType) -> None:
    """Case B41, class 11: the same bits every time."""
    for tokens in (1, 2, 33, 300, 2050):
        for dtype in DTYPES:
            tensors = layer(tokens, dtype, experts=60, hidden=1024)
            first = kernel.fused_moe_forward(*tensors, 60, 4)
            for _ in range(100):
                again = kernel.fused_moe_forward(*tensors, 60, 4)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_order_of_tokens(kernel: ModuleType) -> None:
    """Class 11: with the same numbers of rows an expert, a token's place changes nothing.

    Rows of a tile are independent; tiles may differ in height, so their kernels may too. With one
    tile for all there is nothing that could differ.
    """
    p = problem(257, experts=8, hidden=1024, inner=512, dtype=BFLOAT, device="cuda")
    order = torch.randperm(257, device="cuda")
    moved = p.but(x=p.x[order], ids=p.ids[order], weights=p.weights[order])
    with pytest.MonkeyPatch.context() as patch:
        tile = part(kernel, "config").GemmConfig(
            32, 0, 0, 64, 64, 4, 4, True, True, False, False, 4
        )  # fmt: skip
        force(kernel, patch, tile, tile)
        assert torch.equal(p.call(kernel)[order], moved.call(kernel))


@pytest.mark.parametrize("size", (300.0, 1e10))
@pytest.mark.parametrize("tokens", (1, 70, 600))
def test_bfloat16_beyond_float16(kernel: ModuleType, tokens: int, size: float) -> None:
    """Class 15: gates times ups far above 65504."""
    p = problem(tokens, experts=8, hidden=1024, inner=512, dtype=BFLOAT, device="cuda")
    p = p.but(x=p.x * size)
    out = check_call(kernel, p)
    assert bool(out.isfinite().all()) and float(out.abs().max()) > 65504


@pytest.mark.parametrize("tokens", (1, 50, 400))
def test_float32_is_float32(kernel: ModuleType, tokens: int) -> None:
    """Case B29: sums over 4096 products as exact as PyTorch's without TF32, not a thousandth."""
    assert torch.get_float32_matmul_precision() == "highest"
    p = problem(tokens, experts=4, hidden=4096, inner=4096, dtype=FLOAT, device="cuda")
    check_call(kernel, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_of_a_call(kernel: ModuleType, dtype: torch.dtype) -> None:
    """Case B43, class 10: no copy of a weight, no intermediate but two."""
    experts, top_k, hidden, inner = 64, 4, 1024, 512
    for tokens in (1, 8, 300, 2050, 9000):
        tensors = layer(tokens, dtype, experts=experts, hidden=hidden, inner=inner)
        x, router, gate, up, down = tensors
        views = (x, router, gate.mT.contiguous().mT, up.mT.contiguous().mT,
                 down.mT.contiguous().mT)  # fmt: skip
        for given in (tensors, views):
            kernel.fused_moe_forward(*given, experts, top_k)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results = kernel.fused_moe_forward(*given, experts, top_k)
            torch.cuda.synchronize()
            extra = torch.cuda.max_memory_allocated() - before
            outputs = sum(each.nbytes for each in results)
            rows = tokens * top_k * (hidden + inner) * dtype.itemsize
            # Logits, weights in float32, the tables of the dispatch; blocks of 2 MiB.
            assert extra <= outputs + rows + 16 * 2**20, (tokens, extra)
            del results


def test_compilations(kernel: ModuleType) -> None:
    """Class 16, case B65: within a bucket, the number of tokens is no part of what is compiled."""
    kernels = part(kernel, "_kernels")
    names = ("score", "count", "index", "up", "down", "combine", "decode_up", "decode_down")
    functions = [getattr(kernels, f"moe_{name}_kernel") for name in names]

    def compiled() -> int:
        device = torch.cuda.current_device()
        return sum(len(function.device_caches[device][0]) for function in functions)

    whole = layer(128, HALF)
    p = problem(128, experts=16, top_k=4, device="cuda")

    def call(tokens: int) -> None:
        kernel.fused_moe_forward(whole[0][:tokens], *whole[1:], 16, 4)
        first_tokens(p, tokens).call(kernel)

    for first, others in ((9, range(10, 17)), (17, range(18, 33)), (65, (100, 112, 127, 128))):
        call(first)
        before = compiled()
        for tokens in others:
            call(tokens)
        assert compiled() == before


def test_second_device(kernel: ModuleType) -> None:
    """Case B46: results and launches are on the device of x, whichever is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs; torch sees one")
    for tokens in (1, 70):
        p = problem(tokens, experts=9, device="cuda:1")
        router = torch.randn(9, 96, device="cuda:1", dtype=HALF)
        with torch.cuda.device(0):
            check_call(kernel, p)
            out, ids, mix = kernel.fused_moe_forward(
                p.x, router, *p.gate_up.chunk(2, 1), p.down, 9, 2
            )
            check(p.but(ids=ids, weights=mix), out)
            with pytest.raises(ValueError, match="top_k_index must be on cuda:1.*cuda:0"):
                p.but(ids=p.ids.to("cuda:0")).call(kernel)
