"""Strides: every layout gives what its contiguous copy gives, and no weight is copied.

Cases B43, B53, B55, class 10.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from .oracle import (
    INTERPRETED,
    USES_TRITON,
    Allocations,
    Problem,
    check,
    check_call,
    force,
    guarded,
    memory,
    problem,
)
from .routing import part

HALF, FLOAT = torch.float16, torch.float32
needs_triton = pytest.mark.skipif(not USES_TRITON, reason="the reference reads any layout")
HIDDEN, INNER = (24, 16) if INTERPRETED else (96, 40)
MORE = 6 if INTERPRETED else 17


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return dense memory full of NaN: what a layout leaves out is not to be read."""
    return like.new_full(shape, float("nan"))


# [2, 3, k] in memory that is NaN wherever it is not x.
ROWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "every second row": lambda x, k: empty(x, 2, 6, k)[:, ::2],
    "without the first": lambda x, k: empty(x, 2, 4, k)[:, 1:],
    "columns at 8": lambda x, k: empty(x, 2, 3, k + 16)[..., 8 : k + 8],
    "columns at 3": lambda x, k: empty(x, 2, 3, k + 8)[..., 3 : k + 3],
    "odd rows": lambda x, k: empty(x, 2, 3, k + 1)[..., :k],
    "odd offset": lambda x, k: empty(x, 6 * k + 1)[1:].view(2, 3, k),
    "every second column": lambda x, k: empty(x, 2, 3, 2 * k)[..., 1::2],
    "transposed": lambda x, k: empty(x, k, 2, 3).movedim(0, -1),
    "permuted": lambda x, k: empty(x, 3, 2, k).transpose(0, 1),
    "expanded batch": lambda x, k: empty(x, 1, 3, k).expand(2, 3, k),
    "one row": lambda x, k: empty(x, 1, 1, k).expand(2, 3, k),
    "one number": lambda x, k: empty(x, 1, 1, 1).expand(2, 3, k),
}
# [e, n, k], the same for weights: those that are read where they lie, and the others.
IN_PLACE: dict[str, Callable[[Tensor, int, int, int], Tensor]] = {
    "transposed": lambda w, e, n, k: empty(w, e, k, n).mT,
    "every second expert": lambda w, e, n, k: empty(w, 2 * e, n, k)[::2],
    "every second row": lambda w, e, n, k: empty(w, e, 2 * n, k)[:, 1::2],
    "columns at 8": lambda w, e, n, k: empty(w, e, n, k + 16)[..., 8 : k + 8],
    "columns at 3": lambda w, e, n, k: empty(w, e, n, k + 8)[..., 3 : k + 3],
    "odd rows": lambda w, e, n, k: empty(w, e, n, k + 1)[..., :k],
    "odd rows, transposed": lambda w, e, n, k: empty(w, e, k, n + 1)[..., :n].mT,
    "odd offset": lambda w, e, n, k: empty(w, e * n * k + 1)[1:].view(e, n, k),
    "odd offset, transposed": lambda w, e, n, k: empty(w, e * n * k + 1)[1:].view(e, k, n).mT,
    "experts inside": lambda w, e, n, k: empty(w, n, e, k).transpose(0, 1),
    "one expert": lambda w, e, n, k: empty(w, 1, n, k).expand(e, n, k),
}
COPIED: dict[str, Callable[[Tensor, int, int, int], Tensor]] = {
    "every second column": lambda w, e, n, k: empty(w, e, n, 2 * k)[..., ::2],
    "experts along": lambda w, e, n, k: empty(w, n, k, e).movedim(-1, 0),
    "one number": lambda w, e, n, k: empty(w, 1, 1, 1).expand(e, n, k),
}


def fill(view: Tensor, values: Tensor) -> Tensor:
    """Write numbers into a view, also where several elements share memory."""
    shape = tuple(
        slice(size if stride else 1) for size, stride in zip(view.shape, view.stride(), strict=True)
    )
    view[shape].copy_(values[shape])
    return view


def laid_out(layout: str, weight: Tensor) -> Tensor:
    return fill((IN_PLACE | COPIED)[layout](weight, *weight.shape), weight)


def aligned(*tensors: Tensor) -> bool:
    """Return whether TMA can read all: if it cannot, steps are others, and so are bits."""
    return all(
        each.data_ptr() % 16 == 0
        and all(s == 1 or (s > 0 and s * each.element_size() % 16 == 0) for s in each.stride())
        for each in tensors
    )


#: The interpreter, which is slow, takes float32 for a few: it is read by the same code.
ROWS_AND_DTYPES = [
    (layout, dtype)
    for layout in ROWS
    for dtype in (HALF, FLOAT)
    if not INTERPRETED or dtype is HALF or layout in ("odd offset", "one row", "permuted")
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("layout", "dtype"), ROWS_AND_DTYPES, ids=str)
def test_rows(
    kernel: ModuleType, device: str, uses_triton: bool, layout: str, dtype: torch.dtype
) -> None:
    """Case B53: x in any memory."""
    flat = problem(6, hidden=HIDDEN, inner=INNER, dtype=dtype, device=device)
    x = fill(ROWS[layout](flat.x, HIDDEN), flat.x.view(2, 3, HIDDEN))
    p = flat.but(x=x, ids=flat.ids.view(2, 3, 2), weights=flat.weights.view(2, 3, 2))
    before = memory(x)
    out = check_call(kernel, p)
    assert torch.equal(memory(x), before)
    if INTERPRETED and dtype is FLOAT:
        return
    one = p.but(x=x[1, 2:], ids=p.ids[1, 2:], weights=p.weights[1, 2:])
    check_call(kernel, one)
    if uses_triton and aligned(x.reshape(6, HIDDEN)):  # the reference's bits depend on strides
        assert torch.equal(out, p.but(x=x.contiguous()).call(kernel))
        assert torch.equal(one.call(kernel), one.but(x=one.x.contiguous()).call(kernel))


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("layout", (*IN_PLACE, *COPIED))
def test_weights(
    kernel: ModuleType, device: str, uses_triton: bool, layout: str, interleaved: bool
) -> None:
    """Case B55, class 10: weights in any memory, also where TMA cannot read them."""
    calls = (1, HALF), (MORE, HALF), (MORE, FLOAT)
    if INTERPRETED:
        calls = ((1, FLOAT), (MORE, HALF)) if interleaved else ((1, HALF), (MORE, FLOAT))
    for tokens, dtype in calls:
        p = problem(tokens, hidden=HIDDEN, inner=INNER, dtype=dtype, device=device)
        p = p.but(
            gate_up=laid_out(layout, p.gate_up), down=laid_out(layout, p.down),
            interleaved=interleaved,
        )  # fmt: skip
        before = [memory(each) for each in p.tensors]
        out = check_call(kernel, p)
        for each, kept in zip(p.tensors, before, strict=True):
            assert torch.equal(memory(each), kept)
        if uses_triton and aligned(p.gate_up, p.down):
            dense = p.but(gate_up=p.gate_up.contiguous(), down=p.down.contiguous())
            assert torch.equal(out, dense.call(kernel)) or layout == "transposed"


@pytest.mark.parametrize("size", ((25, 16), (24, 17), (33, 9)), ids=str)
def test_odd_sizes_transposed(kernel: ModuleType, device: str, size: tuple[int, int]) -> None:
    """Case B55: no row of a transposed weight but the first begins at a multiple of 16 bytes."""
    hidden, inner = size
    for layout in ("transposed", "interleaved transposed"):
        for tokens in (3,) if INTERPRETED else (1, MORE):
            p = problem(tokens, hidden=hidden, inner=inner, device=device, layout=layout)
            check_call(kernel, p)
            check_call(kernel, p.but(down=p.down.contiguous()))
            check_call(kernel, p.but(gate_up=p.gate_up.contiguous()))


@needs_triton
@pytest.mark.parametrize("layout", IN_PLACE)
def test_weights_that_are_not_copied(kernel: ModuleType, device: str, layout: str) -> None:
    """Case B43, class 10, as the documentation says it."""
    ops = part(kernel, "ops")
    p = problem(1, hidden=HIDDEN, inner=INNER, device=device)
    gate_up, down = laid_out(layout, p.gate_up), laid_out(layout, p.down)
    assert ops.layouts.dense(down)[0] is down
    for interleaved in (False, True):
        gates = ops.layouts.gates(ops.layouts.Weights(gate_up, None, down), interleaved)
        for each in (gates.gate, gates.up):
            assert each is None or each.untyped_storage().data_ptr() == \
                gate_up.untyped_storage().data_ptr()  # fmt: skip


@needs_triton
@pytest.mark.parametrize("layout", ("contiguous", "transposed", "every second expert"))
def test_memory_of_a_call(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Case B43: beyond the results two intermediates, and tables that do not grow with sizes."""
    p = problem(MORE, hidden=HIDDEN, inner=INNER, device=device)
    gate_up, down = p.gate_up, p.down
    if layout != "contiguous":
        gate_up, down = laid_out(layout, gate_up), laid_out(layout, down)
    router = torch.randn(5, HIDDEN, device=device, dtype=HALF)
    contiguous = torch.Tensor.contiguous

    def counted(tensor: Tensor, *arguments: object, **options: object) -> Tensor:
        found = contiguous(tensor, *arguments, **options)
        assert found.data_ptr() == tensor.data_ptr(), "a copy was made"
        return found

    monkeypatch.setattr(torch.Tensor, "contiguous", counted)
    allocations = Allocations(kernel, monkeypatch)
    config = part(kernel, "config")
    for decodes in (True, False):
        force(kernel, monkeypatch, decodes=decodes)
        for whole in (True, False):
            allocations.given.clear()
            if whole:
                gate, up = gate_up.chunk(2, 1)
                out, ids, mix = kernel.fused_moe_forward(p.x, router, gate, up, down, 5, 2)
                outputs = out.nbytes + ids.nbytes + mix.nbytes
            else:
                out = p.but(gate_up=gate_up, down=down).call(kernel)
                outputs = out.nbytes
            slots = MORE * 2
            # Transposed weights are served by the path of many tokens.
            both = not decodes or layout == "transposed"
            rows = slots * (HIDDEN * both + INNER) * 2
            logits = whole * MORE * (5 + 2) * 4
            given = sum(each.nbytes for each in allocations.given)
            # Experts, places and counts of slots, and tiles of both products; parts of logits.
            tables = 4 * (2 * slots + 5 * MORE + 2 * 4 * config.most_tiles(slots, 5, 1) + 32)
            split = [each.nbytes for each in allocations.given if each.dtype is FLOAT]
            parts = max(split, default=0) if whole else 0
            assert given <= outputs + rows + logits + tables + parts
            assert parts <= 2**20


def whole_layer(
    kernel: ModuleType, p: Problem, router: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, ...]:
    """Run a layer, check what its experts do, and return its results."""
    out, ids, mix = kernel.fused_moe_forward(p.x, router, gate, up, down, down.shape[0], 2)
    check(p.but(gate_up=torch.cat((gate, up), 1), down=down, ids=ids, weights=mix), out)
    assert all(each.is_contiguous() for each in (out, ids, mix))
    return out, ids, mix


@pytest.mark.parametrize("dtype", (HALF, FLOAT), ids=str)
@pytest.mark.parametrize("tokens", (1, MORE))
def test_halves_of_one_weight(
    kernel: ModuleType, device: str, uses_triton: bool, tokens: int, dtype: torch.dtype
) -> None:
    """Class 10: gates and ups of one weight, in either order or in turns, or of two weights."""
    p = problem(tokens, hidden=HIDDEN, inner=INNER, dtype=dtype, device=device)
    router = torch.randn(5, HIDDEN, device=device, dtype=dtype) * HIDDEN**-0.5
    gate, up = (half.contiguous() for half in p.gate_up.chunk(2, 1))
    wanted = whole_layer(kernel, p, router, gate, up, p.down)
    behind, before = torch.cat((up, gate), 1).chunk(2, 1)
    turns = torch.stack((gate, up), 2).flatten(1, 2)
    for pair in (p.gate_up.chunk(2, 1), (before, behind), (turns[:, 0::2], turns[:, 1::2])):
        found = whole_layer(kernel, p, router, *pair, p.down)
        if uses_triton:
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    # Two layouts, each dense in its way, and halves that overlap.
    whole_layer(kernel, p, router, gate, up.mT.contiguous().mT, p.down)
    whole_layer(kernel, p, router, gate.mT.contiguous().mT, up.mT.contiguous().mT, p.down)
    whole_layer(kernel, p, router, gate, gate, p.down)
    whole_layer(kernel, p, router, p.gate_up[:, 1 : INNER + 1], gate, p.down)


@needs_triton
@pytest.mark.parametrize("wide", (False, True))
def test_halves_in_one_product(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    """The box that holds rows of both, wherever they lie: behind, before, beside each other."""
    tile = part(kernel, "config").GemmConfig(
        16, 0, 0, 32, 32 if INTERPRETED else 64, 4, 3, False, True, False, wide, 4
    )  # fmt: skip
    force(kernel, monkeypatch, tile, tile, decodes=False)
    p = problem(MORE, hidden=HIDDEN, inner=INNER, device=device)
    router = torch.randn(5, HIDDEN, device=device, dtype=HALF) * HIDDEN**-0.5
    gate, up = p.gate_up.chunk(2, 1)
    apart = gate.contiguous(), up.contiguous()
    turns = torch.stack((gate, up), 2).flatten(1, 2)
    for pair in (
        (gate, up), (up, gate), apart, apart[::-1], (turns[:, 0::2], turns[:, 1::2]),
        (guarded(apart[0]), guarded(apart[1])), (gate, gate),
    ):  # fmt: skip
        whole_layer(kernel, p, router, *pair, p.down)


@pytest.mark.parametrize("layout", ("odd rows", "every second row", "transposed", "one expert"))
def test_router_weight(kernel: ModuleType, device: str, uses_triton: bool, layout: str) -> None:
    """The router's weight in any memory and dtype."""
    for tokens in (1, MORE):
        for dtype in (HALF, FLOAT):
            p = problem(tokens, hidden=HIDDEN, inner=INNER, device=device)
            dense = torch.randn(5, HIDDEN, device=device, dtype=dtype)
            if layout == "one expert":
                dense = dense[:1].expand(5, HIDDEN).contiguous()
                view = dense[:1].expand(5, HIDDEN)
            else:
                view = laid_out(layout, dense[None])[0]
            gate, up = p.gate_up.chunk(2, 1)
            found = whole_layer(kernel, p, view, gate, up, p.down)
            wanted = whole_layer(kernel, p, dense, gate, up, p.down)
            if uses_triton:
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tokens", (1, MORE))
def test_inputs_are_kept(kernel: ModuleType, device: str, tokens: int) -> None:
    """Case B20: no operand changes, and results are dense memory of their own."""
    p = problem(tokens, hidden=HIDDEN, inner=INNER, device=device, bias=FLOAT)
    p = p.but(expert_map=torch.arange(5, device=device))
    router = torch.randn(5, HIDDEN, device=device)
    operands = [*p.tensors, router]
    before = [memory(each) for each in operands]
    results = [
        p.call(kernel),
        *kernel.fused_moe_forward(p.x, router, *p.gate_up.chunk(2, 1), p.down, 5, 2),
    ]
    for each, kept in zip(operands, before, strict=True):
        assert torch.equal(memory(each), kept)
    assert all(each.is_contiguous() for each in results)
    owners = {each.untyped_storage().data_ptr() for each in (*operands, *results)}
    assert len(owners) == len(operands) + len(results)
