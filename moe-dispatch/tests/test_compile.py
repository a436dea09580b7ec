"""torch.compile, export and tracing: no graph break, the bits of eager, few recompilations."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .oracle import INTERPRETED, LAYOUTS, Problem, check, problem
from .routing import part

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="slow, and nothing new to the kernel")
HALF, FLOAT = torch.float16, torch.float32
HIDDEN, INNER, EXPERTS, TOP_K = 24, 16, 5, 2
GATING = ("silu", 1.702, 7.0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def small(tokens: int, device: str, **options: object) -> Problem:
    return problem(
        tokens, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, inner=INNER, device=device, **options
    )  # fmt: skip


def random(*shape: int, device: str, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5


class Layer(torch.nn.Module):
    """A whole layer of fused_moe_forward."""

    def __init__(self, kernel: ModuleType, device: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.router = torch.nn.Parameter(random(EXPERTS, HIDDEN, device=device))
        self.gate_up = torch.nn.Parameter(random(EXPERTS, 2 * INNER, HIDDEN, device=device))
        self.down = torch.nn.Parameter(random(EXPERTS, HIDDEN, INNER, device=device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = self.gate_up.chunk(2, 1)
        return self.kernel.fused_moe_forward(
            x, self.router, gate, up, self.down, EXPERTS, TOP_K, "sigmoid"
        )


def experts_arguments(p: Problem) -> tuple[object, ...]:
    """Return the arguments of the operator `experts`."""
    return (
        p.x, p.gate_up, None, p.down, p.gate_up_bias, p.down_bias, p.ids, p.weights, p.expert_map,
        *GATING, p.interleaved,
    )  # fmt: skip


SAMPLES = ("plain", "biases and a map", "no tokens", "strided")


def sample(name: str, device: str) -> Problem:
    p = small(0 if name == "no tokens" else 3, device)
    if name == "biases and a map":
        p = small(3, device, bias=FLOAT, layout="interleaved transposed")
        return p.but(expert_map=torch.tensor([4, -1, 2, 0, 9, 1], device=device))
    if name == "strided":
        return p.but(
            x=random(6, 2 * HIDDEN, device=device)[::2, ::2], ids=p.ids.t().contiguous().t(),
            gate_up=random(EXPERTS, 2 * INNER, 2 * HIDDEN, device=device)[..., ::2],
        )  # fmt: skip
    return p


@pytest.mark.parametrize("name", SAMPLES[1:3] if INTERPRETED else SAMPLES)
def test_experts_operator(kernel: ModuleType, device: str, name: str) -> None:
    """Case B64: schema, fake, autograd and ahead-of-time dispatch of the operator agree."""
    ops = part(kernel, "ops")
    p = sample(name, device)
    torch.library.opcheck(ops.experts, experts_arguments(p))
    for each in p.tensors:
        each.requires_grad_(each.is_floating_point())
    torch.library.opcheck(ops.experts, experts_arguments(p))


@not_interpreted
@pytest.mark.parametrize("name", SAMPLES)
def test_experts_backward_operator(kernel: ModuleType, device: str, name: str) -> None:
    ops = part(kernel, "ops")
    p = sample(name, device)
    biases = p.gate_up_bias is not None
    arguments = experts_arguments(p)
    dy = torch.randn_like(p.x)
    for wanted in ((True, True, True, biases, biases, True), (False, True, False, False, biases)):
        flags = [wanted[0], wanted[1], False, wanted[2], wanted[3], wanted[4], wanted[-1]]
        torch.library.opcheck(ops.experts_backward, (dy, *arguments, flags))
    gate, up = p.gate_up.chunk(2, 1)
    if not biases:
        both = (p.x, gate, up, *arguments[3:])
        flags = [True, True, True, True, False, False, True]
        torch.library.opcheck(ops.experts_backward, (dy, *both, flags))


@pytest.mark.parametrize("tokens", (3,) if INTERPRETED else (3, 0))
def test_other_operators(kernel: ModuleType, device: str, tokens: int) -> None:
    """Case B64 for the choice, the whole layer, and the stages of the predecessor."""
    ops = part(kernel, "ops")
    p = small(tokens, device)
    logits = random(tokens, 8, device=device, dtype=FLOAT)
    bias = random(8, device=device, dtype=FLOAT)
    leaf = logits.clone().requires_grad_()
    for given in (None, bias):
        torch.library.opcheck(ops.route, (logits, given, 3, "sigmoid", True, 4, 2, 2.5))
        torch.library.opcheck(
            ops.route, (leaf, given, 3, "sigmoid", True, 4, 2, 2.5),
            # The other one adds up results to one loss, which int64 in front of float32 breaks.
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )  # fmt: skip
    torch.library.opcheck(
        ops.route, (logits.t().contiguous().t(), None, 3, "softmax", False, 1, 1, 1.0)
    )
    router = random(EXPERTS, HIDDEN, device=device)
    for gate, up, interleaved in ((*p.gate_up.chunk(2, 1), False), (p.gate_up, None, True)):
        torch.library.opcheck(
            ops.moe_operator,
            (p.x, router, None, gate, up, p.down, None, None, TOP_K, "softmax", True, *GATING,
             interleaved),
        )  # fmt: skip
    rows = tokens * TOP_K
    offsets = torch.tensor([0, 1, 1, 2, 2, rows], device=device).clamp(max=rows)
    x = random(rows, HIDDEN, device=device)
    torch.library.opcheck(part(kernel, "stage_ops").grouped_gemm_operator, (x, p.gate_up, offsets))
    slots = torch.randperm(rows, device=device)
    torch.library.opcheck(
        part(kernel, "stage_ops").expert_ffn_operator,
        (x, *p.gate_up.chunk(2, 1), p.down, offsets, p.weights, slots),
    )  # fmt: skip


@not_interpreted
@pytest.mark.parametrize("function", ("experts", "layer"))
def test_many_tokens_then_one(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Case B65: compiled for 300 tokens, the path is chosen at each call."""
    ops, layer = part(kernel, "ops"), Layer(kernel, device).requires_grad_(False)
    name = {"experts": "run", "layer": "moe"}[function]
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        if function == "layer":
            return layer(x)
        return (kernel.fused_experts(x, layer.gate_up, layer.down, ids, weights),)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    seen, right = [], getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda x, *rest: seen.append(x.shape[0]) or right(x, *rest))
    for tokens in (70 if INTERPRETED else 300, 1, 2, 3, 17, 1):
        p = small(tokens, device)
        seen.clear()
        found = compiled(p.x, p.ids, p.weights)
        assert seen == [tokens]  # not a graph that has made up its mind
        wanted = step(p.x, p.ids, p.weights)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert counter.frame_count <= 3


@not_interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_layouts(kernel: ModuleType, device: str, layout: str) -> None:
    """Strides of operands and gradients reach the operators through a compiled graph."""
    p = small(6, device, layout=layout, bias=HALF)
    wide = random(6, 2 * HIDDEN, device=device)
    p = p.but(x=wide[:, ::2], weights=p.weights.t().contiguous().t())
    results = []
    for function in (
        Problem.call,
        torch.compile(Problem.call, fullgraph=True, backend="aot_eager"),
    ):
        leaves = [p.x.detach().requires_grad_(), p.gate_up.detach().requires_grad_()]
        out = function(p.but(x=leaves[0], gate_up=leaves[1]), kernel)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


@not_interpreted
def test_inductor(kernel: ModuleType, device: str) -> None:
    """Compiled by the usual backend, beside pointwise code that it fuses."""
    layer = Layer(kernel, device).requires_grad_(False)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        out, ids, mix = layer(x * 2)
        return kernel.fused_experts(out, layer.gate_up, layer.down, ids, mix) + 1, ids + 1

    compiled = torch.compile(step, fullgraph=True)
    x = random(5, HIDDEN, device=device)
    assert all(torch.equal(a, b) for a, b in zip(compiled(x), step(x), strict=True))


def test_training_step(kernel: ModuleType, device: str) -> None:
    """Gradients of a whole layer, compiled whole, have the bits of eager."""
    layer = Layer(kernel, device).float()

    def step(x: Tensor) -> Tensor:
        out, _, mix = layer(x)
        return out.square().sum() + mix.square().sum()

    x = random(6, HIDDEN, device=device, dtype=FLOAT).requires_grad_()
    leaves = [x, *layer.parameters()]
    found = [
        torch.autograd.grad(function(x), leaves)
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager"))
    ]
    for eager, graph in zip(*found, strict=True):
        assert torch.equal(eager, graph)


def test_no_graph_break(kernel: ModuleType, device: str) -> None:
    p = small(3, device)
    layer = Layer(kernel, device)
    for function, arguments in ((layer, (p.x,)), (Problem.call, (p, kernel))):
        explained = torch._dynamo.explain(function)(*arguments)
        assert explained.graph_break_count == 0, explained.break_reasons


@not_interpreted
def test_errors_in_a_graph(kernel: ModuleType, device: str) -> None:
    """What eager refuses, a compiled call refuses too."""
    p = small(3, device)
    compiled = torch.compile(Problem.call, backend="aot_eager")
    with pytest.raises(ValueError, match="down_proj must be"):
        compiled(p.but(down=p.down[:, :-1]), kernel)


def test_export(kernel: ModuleType, device: str) -> None:
    """Case B65: an exported program takes any number of tokens, and holds our operators."""

    class Both(Layer):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            out, ids, mix = super().forward(x)
            return kernel.fused_experts(out, self.gate_up, self.down, ids, mix), ids

    both = Both(kernel, device).requires_grad_(False)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        both, (random(4, HIDDEN, device=device),), dynamic_shapes={"x": {0: tokens}}
    )
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    for name in ("moe", "experts"):
        assert f"{kernel.__name__}.{name}.default" in targets, targets
    for count in (2, 3, 17) if INTERPRETED else (2, 3, 17, 64, 600):
        x = random(count, HIDDEN, device=device)
        found = program.module()(x)
        assert all(torch.equal(a, b) for a, b in zip(found, both(x), strict=True))


@pytest.mark.parametrize("shape", ((), (3,), (2, 3), (0,)), ids=str)
@pytest.mark.parametrize("dtype", (HALF, torch.bfloat16), ids=str)
@pytest.mark.parametrize("gradients", (False, True))
def test_fake_tensors(
    kernel: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    gradients: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    """Case B68: shapes are known without computing anything, none depends on data."""
    ops = part(kernel, "ops")
    for name in ("run", "moe", "choose"):
        monkeypatch.setattr(ops, name, lambda *_: pytest.fail("something was computed"))
    with FakeTensorMode():
        p = small(torch.Size(shape).numel(), device, dtype=dtype, bias=FLOAT)
        wide = torch.empty(*shape, 2 * HIDDEN, dtype=dtype, device=device)
        ids = torch.empty(*shape, TOP_K, dtype=torch.int32, device=device)
        weights = torch.empty(*shape, TOP_K, device=device, requires_grad=gradients)
        p = p.but(x=wide[..., ::2].requires_grad_(gradients), ids=ids, weights=weights)
        out = p.call(kernel)
        assert out.shape == (*shape, HIDDEN) and out.dtype is dtype
        assert out.is_contiguous() and out.device.type == device
        x = p.x.reshape(-1, HIDDEN)
        router = torch.empty(EXPERTS, HIDDEN, device=device)
        whole = kernel.fused_moe_forward(x, router, *p.gate_up.chunk(2, 1), p.down, EXPERTS, TOP_K)
        kinds = [(each.shape, each.dtype) for each in whole]
        count = x.shape[0]
        assert kinds == [
            ((count, HIDDEN), dtype), ((count, TOP_K), torch.int64), ((count, TOP_K), dtype)
        ]  # fmt: skip
        if gradients:
            grads = torch.autograd.grad(out.sum(), (p.x, p.weights))
            assert [each.shape for each in grads] == [p.x.shape, p.weights.shape]


@not_interpreted
def test_tracing_sees_the_operators(kernel: ModuleType, device: str) -> None:
    """A launch is invisible to tracers: without gradients too, they have to get the operator."""
    p, layer = small(3, device), Layer(kernel, device).requires_grad_(False)
    other = torch.randn_like(p.x)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return p.but(x=x).call(kernel), *layer(x)

    traced = make_fx(step)(p.x)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    for name in ("experts", "moe"):
        assert any(f".{name}." in target for target in called), called
    for found, wanted in zip(traced(other), step(other), strict=True):
        assert torch.equal(found, wanted)


@not_interpreted
def test_lazily_negated_tensors(kernel: ModuleType, device: str) -> None:
    p = small(3, device, bias=FLOAT)
    wanted = p.but(x=-p.x, down=-p.down, weights=-p.weights).call(kernel)
    negated = p.but(
        x=torch._neg_view(p.x), down=torch._neg_view(p.down), weights=torch._neg_view(p.weights)
    )
    assert torch.equal(negated.call(kernel), wanted)


@not_interpreted
def test_vmap(kernel: ModuleType, device: str) -> None:
    p = small(6, device)
    x, ids, weights = (each.view(3, 2, -1) for each in (p.x, p.ids, p.weights))
    got = torch.vmap(lambda x, i, w: p.but(x=x, ids=i, weights=w).call(kernel))(x, ids, weights)
    check(p, got.reshape(6, HIDDEN).contiguous())


def test_inference_mode(kernel: ModuleType, device: str) -> None:
    with torch.inference_mode():
        p = small(3, device)
        out = p.call(kernel)
        check(p, out)
    assert out.is_inference()
