"""torch.compile and torch.export: no graph break, the bits of eager, few recompilations."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .layouts import ROWS, fill
from .oracle import DTYPES, part, problem

Launches = collections.Counter[str]
CALLS = ("rmsnorm", "rmsnorm_residual_fused", "add_rmsnorm", "layer", "two")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def norms(kernel: ModuleType) -> dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]]:
    """Calls as models make them, with nothing that a compiler could compute in another order."""
    return {
        "rmsnorm": lambda x, r, w: (kernel.rmsnorm(x, w, 1e-5, bias=w),),
        "rmsnorm_residual_fused": lambda x, r, w: (kernel.rmsnorm_residual_fused(x, r, w),),
        "add_rmsnorm": lambda x, r, w: kernel.add_rmsnorm(x, r, w, residual_dtype=torch.float32),
        "layer": lambda x, r, w: (kernel.rmsnorm(x, w, rounding="before_weight", offset=1.0),),
        "two": lambda x, r, w: kernel.add_rmsnorm(kernel.rmsnorm(x, w), r, w),
    }


@pytest.mark.parametrize("gradients", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize(
    "call", ("rmsnorm", "rmsnorm_residual_fused", "add_rmsnorm", "layer", "two")
)
def test_compiled_bits(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    launches: Launches,
    call: str,
    gradients: bool,
) -> None:
    """norm.md 5, #5: compiled whole, with the bits of eager, forward and backward."""
    dtype = torch.float16 if uses_triton and device == "cpu" else torch.bfloat16
    given = problem((6, 96), dtype, device, residual=dtype)
    inputs = [given.x, given.residual, given.weight]
    function = norms(kernel)[call]
    compiled = torch.compile(function, fullgraph=True)

    def run(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor | None]:
        leaves = [tensor.clone().requires_grad_(gradients) for tensor in inputs]
        results = function(*leaves)
        if not gradients:
            return list(results)
        torch.autograd.backward(results, [result.detach() for result in results])
        return [*results, *(leaf.grad for leaf in leaves)]

    wanted, got = run(function), run(compiled)
    assert uses_triton == bool(launches)
    for eager, graph in zip(wanted, got, strict=True):
        assert (eager is None) == (graph is None)
        assert eager is None or torch.equal(eager, graph)
        assert eager is None or eager.stride() == graph.stride()


def test_compiled_layouts(kernel: ModuleType, device: str) -> None:
    """Strides of inputs and gradients reach the kernel also through a compiled graph."""
    compiled = torch.compile(lambda x, w: kernel.rmsnorm(x, w), fullgraph=True, backend="aot_eager")
    weight = torch.randn(64, device=device)
    for layout in ROWS:
        x, dy = (fill(ROWS[layout]((2, 3, 64), torch.float16, device)) for _ in range(2))
        for function in (kernel.rmsnorm, compiled):
            leaf = x.detach().requires_grad_()
            y = function(leaf, weight)
            y.backward(dy)
            if function is kernel.rmsnorm:
                wanted = y, leaf.grad
        assert torch.equal(y, wanted[0]) and torch.equal(leaf.grad, wanted[1]), layout


def test_row_counts_do_not_recompile(kernel: ModuleType, device: str) -> None:
    """Case B65: one graph for any number of rows, and perhaps one for a single row."""
    counter = CompileCounter()
    weight = torch.randn(32, device=device)
    compiled = torch.compile(
        lambda x: kernel.add_rmsnorm(x, x, weight), fullgraph=True, dynamic=True, backend=counter
    )
    for rows in (1, 2, 3, 17, 64):
        x = torch.randn(rows, 32, device=device)
        for got, wanted in zip(compiled(x), kernel.add_rmsnorm(x, x, weight), strict=True):
            assert torch.equal(got, wanted)
    assert counter.frame_count <= 2


def test_no_graph_break(kernel: ModuleType, device: str) -> None:
    """norm.md 5, #13: also 2-D and then 4-D, without a reset between them."""
    weight = torch.randn(32, device=device)

    def norm(x: Tensor) -> Tensor:
        y, total = kernel.add_rmsnorm(x, x, weight)
        return kernel.rmsnorm(y + total, weight, rounding="before_weight")

    for shape in ((3, 32), (2, 3, 2, 32)):
        x = torch.randn(shape, device=device)
        explained = torch._dynamo.explain(norm)(x)
        assert explained.graph_break_count == 0, explained.break_reasons
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    for shape in ((3, 32), (2, 3, 2, 32), (32,), (1, 32)):
        x = torch.randn(shape, device=device)
        assert torch.equal(compiled(x), norm(x))


def test_numbers_in_a_graph(kernel: ModuleType, device: str) -> None:
    """Epsilon and offset keep their values when the compiler makes them inputs."""
    compiled = torch.compile(
        lambda x, w, eps, offset: kernel.rmsnorm(x, w, eps, offset=offset),
        fullgraph=True,
        backend="aot_eager",
    )
    x, weight = torch.randn(4, 32, device=device), torch.randn(32, device=device)
    for eps, offset in ((1e-6, 0.0), (1e-5, 1.0), (0.1, 0.5), (1e-5, 1.0)):
        wanted = kernel.rmsnorm(x, weight, eps, offset=offset)
        assert torch.equal(compiled(x, weight, eps, offset), wanted)


def test_export(kernel: ModuleType, device: str) -> None:
    """Case B65: an exported program takes any number of rows, and holds our operator."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = kernel.RMSNorm(32, bias=True, device=device)

        def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            y, residual = kernel.add_rmsnorm(x, residual, self.norm.weight)
            return self.norm(y), residual

    rows = torch.export.Dim("rows", min=2, max=4096)
    block, example = Block(), torch.randn(4, 32, device=device)
    program = torch.export.export(
        block, (example, example.clone()), dynamic_shapes={"x": {0: rows}, "residual": {0: rows}}
    )
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    for name in ("rmsnorm", "add_rmsnorm"):
        assert f"{kernel.__name__}.{name}.default" in targets
    for count in (2, 3, 17, 64):
        x, residual = torch.randn(count, 32, device=device), torch.randn(count, 32, device=device)
        results = zip(program.module()(x, residual), block(x, residual), strict=True)
        assert all(torch.equal(got, wanted) for got, wanted in results)


def samples(device: str) -> dict[str, tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return x, weight and bias: dense, strided, without one or both, of no rows."""
    x = torch.randn(6, 32, device=device)
    weight, bias = torch.randn(32, device=device), torch.randn(32, device=device)
    return {
        "dense": (x, weight, bias),
        "plain": (x, None, None),
        "without bias": (x, weight, None),
        "without weight": (x, None, bias),
        "4-D": (x.view(1, 2, 3, 32), weight, bias),
        "1-D": (x[0], weight, bias),
        "strided rows": (torch.randn(12, 32, device=device)[::2], weight, bias),
        "strided columns": (torch.randn(6, 64, device=device)[:, ::2], weight, bias),
        "transposed": (torch.randn(32, 6, device=device).t(), weight, bias),
        "permuted": (torch.randn(3, 2, 32, device=device).transpose(0, 1), weight, bias),
        "expanded": (torch.randn(1, 32, device=device).expand(6, 32), weight, bias),
        "strided weight": (x, torch.randn(64, device=device)[::2], bias),
        "no rows": (torch.randn(0, 32, device=device), weight, bias),
        "float16": (x.half(), weight, bias.half()),
    }


SAMPLES = tuple(samples("cpu"))


def leaves(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0", reason="slow, and the same operators"
)
@pytest.mark.parametrize("sample", SAMPLES)
def test_operators(kernel: ModuleType, device: str, sample: str) -> None:
    """Case B64: schema, fake, autograd and ahead-of-time dispatch of each operator agree."""
    ops = part(kernel, "ops")
    tensors = samples(device)[sample]
    x, weight, bias = tensors
    scalars = (1e-6, 1.0, True)
    for inputs in (tensors, leaves(tensors)):
        torch.library.opcheck(ops.rmsnorm, (*inputs, *scalars, x.dtype))
        dtypes = (torch.float16, torch.float32)
        torch.library.opcheck(
            ops.add_rmsnorm, (inputs[0], inputs[0], *inputs[1:], *scalars, *dtypes)
        )
    rstd = torch.rand(x.shape[:-1], device=device)
    weight_dtype = None if weight is None else weight.dtype
    bias_dtype = None if bias is None else bias.dtype
    for dtotal, need_dx in ((None, True), (x, True), (None, False)):
        torch.library.opcheck(
            ops.rmsnorm_backward,
            (
                x, dtotal, x.clone(), weight, rstd, 1.0, True, x.dtype, weight_dtype,
                bias_dtype, need_dx,
            ),
        )  # fmt: skip


@pytest.mark.parametrize("shape", ((8,), (3, 8), (2, 3, 8), (2, 3, 4, 8), (0, 8)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_tensors(
    kernel: ModuleType,
    device: str,
    launches: Launches,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    """Shapes, dtypes, strides and device are known without computing anything."""
    with FakeTensorMode():
        x = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype, device=device)[..., ::2]
        weight = torch.empty(shape[-1], device=device)
        y, total = kernel.add_rmsnorm(
            x, x, weight, residual_dtype=torch.float32, out_dtype=torch.float16
        )
        plain = kernel.rmsnorm(x)
    for result, wanted in ((y, torch.float16), (total, torch.float32), (plain, dtype)):
        assert result.shape == shape and result.dtype is wanted
        assert result.is_contiguous() and result.device.type == device
    assert launches == {}


def test_tracing_sees_the_operator(kernel: ModuleType, device: str) -> None:
    """A launch is invisible to tracers: without gradients too, they have to get the operator."""
    x, weight = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    traced = make_fx(lambda x, weight: kernel.rmsnorm(x, weight))(x, weight)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert any("rmsnorm" in name for name in called), called
    other = torch.randn(3, 8, device=device)
    assert torch.equal(traced(other, weight), kernel.rmsnorm(other, weight))


def test_lazily_negated_tensors(kernel: ModuleType, device: str) -> None:
    x, weight = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    wanted = kernel.rmsnorm(-x, weight)
    assert torch.equal(kernel.rmsnorm(torch._neg_view(x), weight), wanted)
    assert torch.equal(kernel.rmsnorm(x, torch._neg_view(weight)), wanted)


def test_vmap(kernel: ModuleType, device: str) -> None:
    x, weight = torch.randn(3, 2, 8, device=device), torch.randn(8, device=device)
    got = torch.vmap(lambda each: kernel.rmsnorm(each, weight))(x)
    assert torch.equal(got, kernel.rmsnorm(x, weight))
