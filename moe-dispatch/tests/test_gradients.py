"""Gradients of the experts and of the whole layer; what has none says so (case B56)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from monorepo.numerics import tensor_error

from .oracle import (
    ACTIVATIONS,
    INTERPRETED,
    LAYOUTS,
    Problem,
    check_error,
    formula,
    memory,
    problem,
)
from .routing import part, weigh

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="the backward pass is plain PyTorch")
NAMES = ("x", "gate_up", "down", "weights", "gate_up_bias", "down_bias")


def gradients(
    p: Problem,
    function: Callable[[Problem], Tensor],
    names: tuple[str, ...],
    dy: Tensor,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return gradients by name, of a function of a problem whose tensors are in a dtype."""
    leaves = {name: getattr(p, name).detach() for name in NAMES if getattr(p, name) is not None}
    leaves = {name: leaf if dtype is None else leaf.to(dtype) for name, leaf in leaves.items()}
    for name in names:
        leaves[name].requires_grad_()
    found = torch.autograd.grad(function(p.but(**leaves)), [leaves[name] for name in names], dy)
    for name in names:
        leaves[name].requires_grad_(False)
    return list(found)


def check_gradients(kernel: ModuleType, p: Problem, names: tuple[str, ...] = NAMES) -> None:
    """Raise unless each gradient keeps the rule against autograd through the formula."""
    dtype = p.x.dtype
    names = tuple(name for name in names if getattr(p, name) is not None)
    dy = torch.randn_like(p.x.contiguous())
    ours = gradients(p, lambda q: q.call(kernel), names, dy)
    double = torch.float64
    exact = gradients(p, lambda q: formula(q, double), names, dy.double(), double)
    peer = gradients(p, lambda q: formula(q, dtype), names, dy)
    for name, got, right, other in zip(names, ours, exact, peer, strict=True):
        leaf = getattr(p, name)
        assert got.shape == leaf.shape and got.dtype is leaf.dtype, name
        check_error(tensor_error(got, right), tensor_error(other, right))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(
    kernel: ModuleType, device: str, layout: str, activation: str, dtype: torch.dtype
) -> None:
    """Each activation on each layout, with biases."""
    if INTERPRETED and (layout, dtype) != ("interleaved", HALF):
        pytest.skip("the backward pass is plain PyTorch")
    p = problem(
        40, top_k=3, hidden=48, inner=24, dtype=dtype, device=device, layout=layout,
        activation=activation, bias=dtype, limit=1.0,
    )  # fmt: skip
    check_gradients(kernel, p)


@not_interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_skipped_slots(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Class 3: what no expert served has no gradient, whatever its weight is."""
    p = problem(40, top_k=3, hidden=48, inner=24, dtype=dtype, device=device, bias=FLOAT)
    ids = torch.where(torch.rand(40, 3, device=device) < 0.3, -1, p.ids)
    ids[5] = torch.tensor((5, -1, 2**40), device=device)
    ids[ids == 4] = 0  # an expert without tokens, and some with the same one twice
    check_gradients(kernel, p.but(ids=ids))
    weights = p.weights.clone()
    weights[5] = float("nan")
    (dx,) = gradients(
        p.but(ids=ids, weights=weights), lambda q: q.call(kernel), ("x",), torch.ones_like(p.x)
    )
    assert bool(dx.isfinite().all()) and not bool(dx[5].any())


@not_interpreted
@pytest.mark.parametrize("map_dtype", (torch.int32, torch.int64), ids=str)
def test_expert_map(kernel: ModuleType, device: str, map_dtype: torch.dtype) -> None:
    """Slots of other ranks give no gradient here."""
    p = problem(40, experts=4, top_k=3, hidden=48, inner=24, dtype=FLOAT, device=device)
    ids = torch.rand(40, 9, device=device).argsort(-1)[:, :3]
    places = torch.tensor([3, -1, 0, 7, -1, 1, -9, 2], device=device, dtype=map_dtype)
    check_gradients(kernel, p.but(ids=ids, expert_map=places))


@not_interpreted
@pytest.mark.parametrize("kept", DTYPES, ids=str)
def test_dtypes_of_biases_and_weights(kernel: ModuleType, device: str, kept: torch.dtype) -> None:
    """Each gradient has the dtype of its own tensor."""
    for dtype in DTYPES:
        p = problem(40, hidden=48, inner=24, dtype=dtype, device=device, bias=kept)
        check_gradients(kernel, p.but(weights=p.weights.to(kept)))


@not_interpreted
@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_wanted(kernel: ModuleType, device: str, name: str) -> None:
    """One gradient alone is what it is beside others, and no other is computed."""
    p = problem(20, hidden=48, inner=24, dtype=FLOAT, device=device, bias=FLOAT)
    dy = torch.randn_like(p.x)
    every = gradients(p, lambda q: q.call(kernel), NAMES, dy)
    given: list[set[str]] = []
    reference = part(kernel, "reference")
    backward = reference.experts_backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reference, "experts_backward", lambda *a: (given.append(set(a[-1])), backward(*a))
        )
        (alone,) = gradients(p, lambda q: q.call(kernel), (name,), dy)
    assert torch.equal(alone, every[NAMES.index(name)])
    halves = {"gate_up": {"gate", "up"}, "gate_up_bias": {"gate_bias", "up_bias"}}
    assert given == [halves.get(name, {name})]


@pytest.mark.parametrize("shape", ((48,), (0, 48), (2, 0, 48), (2, 3, 48)), ids=str)
def test_shapes(kernel: ModuleType, device: str, shape: tuple[int, ...]) -> None:
    """Leading dimensions; without tokens, gradients are zeros (case B44)."""
    leading, tokens = shape[:-1], torch.Size(shape[:-1]).numel()
    p = problem(tokens, hidden=48, inner=24, dtype=FLOAT, device=device, bias=FLOAT)
    p = p.but(x=p.x.view(shape), ids=p.ids.view(*leading, 2), weights=p.weights.view(*leading, 2))
    found = gradients(p, lambda q: q.call(kernel), NAMES, torch.randn(shape, device=device))
    for name, grad in zip(NAMES, found, strict=True):
        assert grad.shape == getattr(p, name).shape
        assert bool(grad.any()) == bool(tokens)


@not_interpreted
@pytest.mark.parametrize("layout", ("expanded", "transposed", "stepped", "odd offset"))
def test_strided_gradient(kernel: ModuleType, device: str, layout: str) -> None:
    """Case B23: the strides of dy are not those of the result; `sum` hands on strides of 0."""
    p = problem(20, hidden=48, inner=24, dtype=FLOAT, device=device)
    dy = {
        "expanded": lambda: torch.ones(1, 1, device=device).expand(20, 48),
        "transposed": lambda: torch.randn(48, 20, device=device).t(),
        "stepped": lambda: torch.randn(20, 96, device=device)[:, ::2],
        "odd offset": lambda: torch.randn(20 * 48 + 1, device=device)[1:].view(20, 48),
    }[layout]()
    names = NAMES[:4]
    found = gradients(p, lambda q: q.call(kernel), names, dy)
    again = gradients(p, lambda q: q.call(kernel), names, dy.contiguous())
    exact = gradients(p, lambda q: formula(q, torch.float64), names, dy.double(), torch.float64)
    for one, other, right in zip(found, again, exact, strict=True):
        check_error(tensor_error(one, right), tensor_error(other, right))


@not_interpreted
def test_strided_operands(kernel: ModuleType, device: str) -> None:
    """Rows of x that are a slice, and weights that are views of one tensor."""
    p = problem(20, hidden=48, inner=24, dtype=FLOAT, device=device)
    wide = torch.randn(20, 100, device=device)
    check_gradients(kernel, p.but(x=wide[:, 3:51], weights=p.weights.t().contiguous().t()))
    whole = torch.randn(5, 96, 48, device=device, requires_grad=True)
    out = p.but(gate_up=whole[:, ::2] / 7).call(kernel)
    (grad,) = torch.autograd.grad(out.sum(), whole)
    assert not bool(grad[:, 1::2].any()) and bool(grad[:, ::2].any())


def test_same_bits_again(kernel: ModuleType, device: str) -> None:
    """Case B41; case B20 for the backward pass, twice over one graph."""
    p = problem(20, top_k=3, hidden=24, inner=16, device=device, bias=HALF)
    leaves = {name: getattr(p, name).requires_grad_() for name in NAMES}
    out = p.call(kernel)
    dy = torch.randn_like(out)
    kept = [*(each.detach() for each in p.tensors), dy, out.detach()]
    before = [memory(each) for each in kept]
    first = torch.autograd.grad(out, list(leaves.values()), dy, retain_graph=True)
    second = torch.autograd.grad(out, list(leaves.values()), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(memory(a), b) for a, b in zip(kept, before, strict=True))
    owners = {each.untyped_storage().data_ptr() for each in (*kept, *first, *second)}
    assert len(owners) == len(kept) + 12


def layer_gradients(
    function: Callable[..., tuple[Tensor, Tensor]], leaves: list[Tensor], *given: Tensor
) -> list[Tensor]:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    return list(torch.autograd.grad(function(*leaves), leaves, given))


@pytest.mark.parametrize("gating", ("softmax", "sigmoid"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_layer(kernel: ModuleType, device: str, dtype: torch.dtype, gating: str) -> None:
    """Case B56: the router learns too, through its weights and through the result."""
    tokens = 8 if INTERPRETED else 40
    p = problem(tokens, hidden=48, inner=24, dtype=dtype, device=device)
    router = torch.randn(5, 48, device=device, dtype=dtype) * 48**-0.5
    gate, up = p.gate_up.chunk(2, 1)
    leaves = [p.x, router, gate, up, p.down]
    out, ids, mix = kernel.fused_moe_forward(*leaves, 5, 2, gating)
    dout, dmix = torch.randn_like(out), torch.randn_like(mix)

    def ours(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        results = kernel.fused_moe_forward(*leaves, 5, 2, gating)
        assert torch.equal(results[1], ids) and not results[1].requires_grad
        return results[0], results[2]

    def plain(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        x, router, gate, up, down = leaves
        weights = weigh(x @ router.T, ids, gating, gating == "sigmoid")
        q = p.but(
            x=x, gate_up=torch.cat((gate, up), 1), down=down, ids=ids, weights=weights
        )  # fmt: skip
        return formula(q, x.dtype), weights

    found = layer_gradients(ours, leaves, dout, dmix)
    exact = layer_gradients(plain, [leaf.double() for leaf in leaves], dout.double(), dmix.double())
    peer = layer_gradients(plain, leaves, dout, dmix)
    for got, leaf, right, other in zip(found, leaves, exact, peer, strict=True):
        assert got.shape == leaf.shape and got.dtype is leaf.dtype
        check_error(tensor_error(got, right), tensor_error(other, right))


@pytest.mark.parametrize("wanted", (False, True), ids=("inference", "training"))
def test_autocast(kernel: ModuleType, device: str, wanted: bool) -> None:
    """It lowers neither logits nor experts nor gradients, whichever path serves."""
    p = problem(40, top_k=2, hidden=48, inner=24, dtype=FLOAT, device=device)
    router = torch.randn(p.down.shape[0], 48, device=device)
    gate, up = (half.contiguous() for half in p.gate_up.chunk(2, 1))
    results = []
    for enabled in (False, True):
        leaves = [t.detach().requires_grad_(wanted) for t in (p.x, router, gate, up, p.down)]
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled):
            one = p.but(x=leaves[0], down=leaves[4]).call(kernel)
            _, _, logits = kernel.moe_router(*leaves[:2], 2)
            out, ids, weights = kernel.fused_moe_forward(*leaves, router.shape[0], 2)
            # The router's product is PyTorch's, which a backward pass under autocast lowers.
            grads = torch.autograd.grad(one.sum(), (leaves[0], leaves[4])) if wanted else ()
        results.append((one, logits, out, ids, weights, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("tokens", (1, 7))
def test_values_are_those_without_gradients(
    kernel: ModuleType, device: str, uses_triton: bool, tokens: int
) -> None:
    """The operator and the plain call are one computation; logits of training are PyTorch's."""
    p = problem(tokens, hidden=24, inner=16, device=device)
    plain = p.call(kernel)
    assert torch.equal(p.but(x=p.x.clone().requires_grad_()).call(kernel), plain)
    with torch.no_grad():
        quiet = p.but(x=p.x.clone().requires_grad_()).call(kernel)
    assert not quiet.requires_grad and torch.equal(quiet, plain)
    router = torch.randn(5, 24, device=device)
    gate, up = p.gate_up.chunk(2, 1)
    out, ids, mix = kernel.fused_moe_forward(p.x, router, gate, up, p.down, 5, 2)
    grad = kernel.fused_moe_forward(p.x, router.requires_grad_(), gate, up, p.down, 5, 2)
    assert torch.equal(grad[1], ids) and grad[0].requires_grad and grad[2].requires_grad
    for found, wanted in ((grad[0], out), (grad[2], mix)):
        check_error(
            tensor_error(found.detach(), wanted.double()), tensor_error(wanted, wanted.double())
        )


def test_no_gradient_no_operator(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager inference pays for no dispatcher, training does not lose its gradient."""
    p = problem(3, hidden=24, inner=16, device=device)
    leaf = p.but(x=p.x.clone().requires_grad_())
    assert leaf.call(kernel).requires_grad
    for name in ("experts", "moe_operator", "route"):
        monkeypatch.setattr(part(kernel, "ops"), name, lambda *_: pytest.fail("was called"))
    with torch.no_grad():
        leaf.call(kernel)
    p.call(kernel)
    router = torch.randn(5, 24, device=device)
    kernel.fused_moe_forward(p.x, router, *p.gate_up.chunk(2, 1), p.down, 5, 2)


@not_interpreted
def test_double_backward_is_refused(kernel: ModuleType, device: str) -> None:
    """Gradients of gradients are not there, and not silently wrong."""
    p = problem(5, hidden=24, inner=16, dtype=FLOAT, device=device)
    x, weights = p.x.requires_grad_(), p.weights.requires_grad_()
    out = p.call(kernel)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(dx.square().sum(), (x, weights))
