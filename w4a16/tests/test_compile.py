"""torch.compile, export and tracing: no graph break, the bits of eager, few recompilations."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .oracle import ZEROS, check, part, weight

not_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0", reason="slow, and nothing new to the kernel"
)
HALF = torch.float16
N, K, GROUP = 24, 96, 32


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def tensors(device: str) -> dict[str, Tensor]:
    """Return activations: dense, strided, of any rank, of no tokens."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=HALF)

    return {
        "dense": random(6, K),
        "1-D": random(K),
        "3-D": random(2, 3, K),
        "every second token": random(12, K)[::2],
        "without the first": random(2, 4, K)[:, 1:],
        "sliced features": random(6, K + 16)[:, 16:],
        "every second feature": random(6, 2 * K)[:, ::2],
        "transposed": random(K, 6).t(),
        "permuted": random(3, 2, K).transpose(0, 1),
        "expanded": random(1, K).expand(6, K),
        "odd offset": random(6 * K + 1)[1:].view(6, K),
        "no tokens": random(0, K),
        "no tokens, 3-D": random(2, 0, K),
    }


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"
SAMPLES = tuple(tensors("cpu"))
if INTERPRETED:  # slow, and the same operators
    SAMPLES = ("without the first", "every second feature", "no tokens")


@pytest.mark.parametrize("sample", SAMPLES)
def test_operators(kernel: ModuleType, device: str, sample: str) -> None:
    """Case B64: schema, fake, autograd and ahead-of-time dispatch of each operator agree."""
    ops = part(kernel, "ops")
    x = tensors(device)[sample]
    w = weight(kernel, N, K, group_size=GROUP, zeros="integer", perm=True, device=device)
    parts = (w.qweight, w.scales, w.zeros, w.perm)
    bias = torch.randn(N, device=device)
    torch.library.opcheck(ops.w4a16_gemm, (x, *parts, bias, K, GROUP))
    leaf = x.detach().requires_grad_()
    torch.library.opcheck(ops.w4a16_gemm, (leaf, *parts, bias.detach().requires_grad_(), K, GROUP))
    # dy with the strides of x: another weight, whose rows are the features of x.
    v = weight(kernel, K, 64, group_size=GROUP, device=device)
    torch.library.opcheck(ops.w4a16_gemm_dx, (x, v.qweight, v.scales, None, None, 64, GROUP))


def test_operator_on_a_strided_bias(kernel: ModuleType, device: str) -> None:
    """Case B64: an operator reads what its arguments say, not what memory lies there."""
    w = weight(kernel, N, K, group_size=GROUP, device=device)
    parts = (w.qweight, w.scales, w.zeros, w.perm)
    x = torch.randn(3, K, device=device, dtype=HALF)
    bias = torch.randn(2 * N, device=device)[::2]
    got = part(kernel, "ops").w4a16_gemm(x, *parts, bias, K, GROUP)
    assert torch.equal(got, kernel.w4a16_gemm(x, w, bias))


@not_interpreted
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("scales", (HALF, torch.float32), ids=str)
def test_operators_of_each_kind(
    kernel: ModuleType, device: str, scales: torch.dtype, zeros: str
) -> None:
    ops = part(kernel, "ops")
    w = weight(kernel, N, K, group_size=-1, zeros=zeros, scales=scales, device=device)
    parts = (w.qweight, w.scales, w.zeros, w.perm)
    for gradients in (False, True):
        x = torch.randn(3, K, device=device, dtype=HALF, requires_grad=gradients)
        torch.library.opcheck(ops.w4a16_gemm, (x, *parts, None, K, -1))
    dy = torch.randn(3, N, device=device, dtype=HALF)
    torch.library.opcheck(ops.w4a16_gemm_dx, (dy, *parts, K, -1))


def test_many_tokens_then_one(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """w4a16.md 6, #9; case B65: compiled for 512 tokens, the path is chosen at each call."""
    w = weight(kernel, N, K, group_size=GROUP, zeros="integer", device=device)
    bias = torch.randn(N, device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x: kernel.w4a16_gemm(x, w, bias), fullgraph=True, dynamic=True, backend=counter
    )
    ops = part(kernel, "ops")
    seen, gemm = [], ops.gemm
    monkeypatch.setattr(ops, "gemm", lambda x, *rest: seen.append(x.shape[0]) or gemm(x, *rest))
    for tokens in (512, 1, 2, 3, 17, 64, 1):
        x = torch.randn(tokens, K, device=device, dtype=HALF)
        seen.clear()
        got = compiled(x)
        assert seen == [tokens]  # not a graph that has made up its mind
        assert torch.equal(got, kernel.w4a16_gemm(x, w, bias))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("sample", SAMPLES)
def test_compiled_layouts(kernel: ModuleType, device: str, sample: str) -> None:
    """Strides of activations and gradients reach the operator through a compiled graph."""
    w = weight(kernel, N, K, group_size=GROUP, perm=True, device=device)
    x = tensors(device)[sample]
    compiled = torch.compile(lambda x: kernel.w4a16_gemm(x, w), fullgraph=True, backend="aot_eager")
    results = []
    for function in (lambda x: kernel.w4a16_gemm(x, w), compiled):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        y.sum().backward()  # an expanded gradient
        results.append((y.detach(), leaf.grad))
        assert y.is_contiguous()
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@not_interpreted
def test_inductor(kernel: ModuleType, device: str) -> None:
    """Compiled by the usual backend, beside pointwise code that it fuses."""
    w = weight(kernel, N, K, group_size=GROUP, zeros="integer", device=device)
    compiled = torch.compile(lambda x: kernel.w4a16_gemm(x * 2, w) + 1, fullgraph=True)
    x = torch.randn(5, K, device=device, dtype=HALF)
    assert torch.equal(compiled(x), kernel.w4a16_gemm(x * 2, w) + 1)


def test_training_step(kernel: ModuleType, device: str) -> None:
    """Gradients of the input and of the bias, compiled whole, have the bits of eager."""
    w = weight(kernel, N, K, group_size=GROUP, device=device)

    def step(x: Tensor, bias: Tensor) -> Tensor:
        return (kernel.w4a16_gemm(x, w, bias).float() ** 2).sum()

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        x = torch.randn(2, 3, K, device=device).half().requires_grad_()
        bias = torch.randn(N, device=device, requires_grad=True)
        found.append(torch.autograd.grad(function(x, bias), (x, bias)))
    for eager, graph in zip(*found, strict=True):
        assert torch.equal(eager, graph)


def test_no_graph_break(kernel: ModuleType, device: str) -> None:
    w = weight(kernel, N, K, group_size=GROUP, device=device)
    for x in (torch.randn(3, K, device=device).half(), torch.randn(2, 3, K, device=device).half()):
        explained = torch._dynamo.explain(lambda x: kernel.w4a16_gemm(x, w))(x)
        assert explained.graph_break_count == 0, explained.break_reasons


def test_errors_in_a_graph(kernel: ModuleType, device: str) -> None:
    """What eager refuses, a compiled call refuses too."""
    w = weight(kernel, N, K, group_size=GROUP, device=device)
    compiled = torch.compile(lambda x: kernel.w4a16_gemm(x, w), backend="aot_eager")
    with pytest.raises(ValueError, match=f"last dimension of {K}"):
        compiled(torch.randn(3, K - 32, device=device).half())


def test_export(kernel: ModuleType, device: str) -> None:
    """Case B65: an exported program takes any number of tokens, and holds our operator."""
    w = weight(kernel, N, K, group_size=GROUP, zeros="integer", perm=True, device=device)
    layer = kernel.W4A16Linear(w, torch.randn(N, device=device))
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        layer, (torch.randn(4, K, device=device).half(),), dynamic_shapes={"x": {0: tokens}}
    )
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert f"{kernel.__name__}.w4a16_gemm.default" in targets, targets
    for count in (2, 3, 17, 64, 600):
        x = torch.randn(count, K, device=device).half()
        assert torch.equal(program.module()(x), layer(x))


@pytest.mark.parametrize("shape", ((K,), (3, K), (2, 3, K), (0, K)), ids=str)
@pytest.mark.parametrize("dtype", (HALF, torch.bfloat16), ids=str)
def test_fake_tensors(
    kernel: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    """Shape, dtype, strides and device are known without computing anything."""
    ops = part(kernel, "ops")
    monkeypatch.setattr(ops, "gemm", lambda *_: pytest.fail("something was computed"))
    w = weight(kernel, N, K, group_size=GROUP, device=device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty((*shape[:-1], 2 * K), dtype=dtype, device=device)[..., ::2]
        y = kernel.w4a16_gemm(x, w)
    assert y.shape == (*shape[:-1], N) and y.dtype is dtype
    assert y.is_contiguous() and y.device.type == device


def test_tracing_sees_the_operator(kernel: ModuleType, device: str) -> None:
    """A launch is invisible to tracers: without gradients too, they have to get the operator."""
    w = weight(kernel, N, K, group_size=GROUP, device=device)
    x, other = (torch.randn(3, K, device=device).half() for _ in range(2))
    traced = make_fx(lambda x: kernel.w4a16_gemm(x, w))(x)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert any("w4a16_gemm" in name for name in called), called
    assert torch.equal(traced(other), kernel.w4a16_gemm(other, w))


def test_lazily_negated_tensors(kernel: ModuleType, device: str) -> None:
    w = weight(kernel, N, K, group_size=GROUP, device=device)
    x, bias = torch.randn(3, K, device=device).half(), torch.randn(N, device=device)
    wanted = kernel.w4a16_gemm(-x, w, -bias)
    assert torch.equal(kernel.w4a16_gemm(torch._neg_view(x), w, torch._neg_view(bias)), wanted)


def test_vmap(kernel: ModuleType, device: str) -> None:
    w = weight(kernel, N, K, group_size=GROUP, device=device)
    x = torch.randn(3, 2, K, device=device).half()
    got = torch.vmap(lambda each: kernel.w4a16_gemm(each, w))(x)
    assert torch.equal(got, torch.stack([kernel.w4a16_gemm(each, w) for each in x]))


def test_inference_mode(kernel: ModuleType, device: str) -> None:
    with torch.inference_mode():
        w = weight(kernel, N, K, group_size=GROUP, device=device)
        x = torch.randn(3, K, device=device).half()
        y = kernel.w4a16_gemm(x, w)
        check(kernel, x, w, None, y)
    assert y.is_inference()
