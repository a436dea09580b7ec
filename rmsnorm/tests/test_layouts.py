"""Strides: every layout gives what its contiguous copy gives, and no other memory is touched.

Cases B22, B25, B26, B52, B53; norm.md 5, #2.
"""

from __future__ import annotations

import collections
import itertools
from types import ModuleType

import pytest
import torch
from hypothesis import given as generated
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from .layouts import ROWS, VECTORS, fill, guarded, memory
from .oracle import DTYPES, Problem, part, problem
from .test_backward import check_gradients, random_like, use_backward_tile
from .test_forward import check_forward

Launches = collections.Counter[str]
WIDTHS = (1, 17, 63, 64, 127, 128)
PAIRS = list(itertools.product(ROWS, ROWS))


@pytest.mark.parametrize("layouts", PAIRS, ids="-".join)
def test_x_and_residual(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    launches: Launches,
    layouts: tuple[str, str],
) -> None:
    for n in WIDTHS:
        x, residual = (fill(ROWS[name]((2, 3, n), torch.float16, device)) for name in layouts)
        before = memory(x), memory(residual)
        check_forward(kernel, Problem(x))
        check_forward(kernel, Problem(x, residual=residual))
        assert torch.equal(memory(x), before[0]) and torch.equal(memory(residual), before[1])
    assert launches["forward"] == (2 * len(WIDTHS) if uses_triton else 0)


@pytest.mark.parametrize("n", (1024, 16400))
@pytest.mark.parametrize("layout", ROWS)
def test_wide_rows(kernel: ModuleType, device: str, layout: str, n: int) -> None:
    x = fill(ROWS[layout]((2, 2, n), torch.float16, device))
    check_forward(kernel, Problem(x, residual=x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ROWS)
def test_dtypes(kernel: ModuleType, device: str, layout: str, dtype: torch.dtype) -> None:
    check_forward(kernel, Problem(fill(ROWS[layout]((2, 3, 64), dtype, device))))


@pytest.mark.parametrize("shape", ((5, 48), (2, 3, 2, 48)), ids=str)
@pytest.mark.parametrize("layout", ROWS)
def test_ranks(kernel: ModuleType, device: str, layout: str, shape: tuple[int, ...]) -> None:
    given = problem(shape, torch.float16, device)
    x = fill(ROWS[layout](shape, torch.float16, device))
    check_forward(kernel, Problem(x, weight=given.weight))
    leaf = Problem(x, weight=given.weight)
    check_gradients(kernel, leaf, random_like(x))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("layout", VECTORS)
def test_weight_and_bias(kernel: ModuleType, device: str, layout: str, n: int) -> None:
    given = problem((5, n), torch.float16, device, weight=None)
    weight = fill(VECTORS[layout]((n,), torch.float16, device))
    bias = fill(VECTORS[layout]((n,), torch.float32, device))
    before = memory(weight), memory(bias)
    check_forward(kernel, Problem(given.x, weight=weight))
    check_forward(kernel, Problem(given.x, weight=weight, bias=bias))
    assert torch.equal(memory(weight), before[0]) and torch.equal(memory(bias), before[1])


def keep_layout(tensor: Tensor) -> Tensor:
    """Return the same view as a leaf that wants a gradient."""
    return tensor.detach().requires_grad_()


@pytest.mark.parametrize("tile", ("whole rows", "blocks"))
@pytest.mark.parametrize("layouts", PAIRS, ids="-".join)
def test_x_and_gradient(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    monkeypatch: pytest.MonkeyPatch,
    layouts: tuple[str, str],
    tile: str,
) -> None:
    """The layout of dy is not that of x, and dx is dense whatever theirs."""
    if uses_triton:
        use_backward_tile(kernel, monkeypatch, tile)
    elif tile == "blocks":
        pytest.skip("the reference has no tiles")
    for n in (17, 64):
        x, dy = (fill(ROWS[name]((2, 3, n), torch.float16, device)) for name in layouts)
        weight = fill(VECTORS["stepped"]((n,), torch.float16, device))
        before = memory(x), memory(dy)
        check_view_gradients(kernel, Problem(x, weight=weight), dy, None)
        assert torch.equal(memory(x), before[0]) and torch.equal(memory(dy), before[1])


@pytest.mark.parametrize("layouts", PAIRS, ids="-".join)
def test_both_gradients(kernel: ModuleType, device: str, layouts: tuple[str, str]) -> None:
    for n in (17, 64):
        dy, dtotal = (fill(ROWS[name]((2, 3, n), torch.float16, device)) for name in layouts)
        given = problem((2, 3, n), torch.float16, device, residual=torch.float16)
        before = memory(dy), memory(dtotal)
        check_view_gradients(kernel, given, dy, dtotal)
        assert torch.equal(memory(dy), before[0]) and torch.equal(memory(dtotal), before[1])


def check_view_gradients(
    kernel: ModuleType, given: Problem, dy: Tensor, dtotal: Tensor | None
) -> None:
    """`check_gradients`, with leaves that keep their strides."""

    class Views(Problem):
        def leaves(self, dtype: torch.dtype | None = None) -> Problem:
            if dtype is not None:
                return super().leaves(dtype)
            named = {name: keep_layout(tensor) for name, tensor in self.tensors.items()}
            return Problem(**{**vars(self), **named})

    check_gradients(kernel, Views(**vars(given)), dy, dtotal)


def no_copy(*_: object, **__: object) -> Tensor:
    raise AssertionError("a copy was made")


@pytest.mark.parametrize("layout", ("odd_offset", "sliced_rows", "sliced_columns", "heads",
                                    "expanded", "permuted"))  # fmt: skip
def test_rows_by_strides_are_not_copied(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    """Case B26."""
    x = fill(ROWS[layout]((4, 3, 64), torch.float16, device))
    _, (rows,) = part(kernel, "_shared.rows").as_rows(x)
    assert rows.tensor is x
    if uses_triton:
        monkeypatch.setattr(torch.Tensor, "contiguous", no_copy)
        monkeypatch.setattr(torch.Tensor, "clone", no_copy)
        kernel.rmsnorm(x)


def test_heads_of_a_fused_projection(kernel: ModuleType, device: str) -> None:
    """Case B26 word for word: norms of query and key, on views of what the projection wrote."""
    tokens, heads, size = 5, 4, 16
    qkv = torch.randn(tokens, 3 * heads * size).to(device, torch.float16)
    for piece in qkv.split(heads * size, dim=-1):
        check_forward(kernel, Problem(piece.view(tokens, heads, size)))
        check_forward(kernel, Problem(piece.view(tokens, heads, size).transpose(0, 1)))


def test_result_is_contiguous(kernel: ModuleType, device: str) -> None:
    """Case B52: the strides of a transposed x are not handed on."""
    x = torch.randn(7, 1, 32).to(device, torch.float16).transpose(0, 1)
    for given in (Problem(x), Problem(x, residual=x)):
        check_forward(kernel, given)
    every_second = torch.randn(2, 8, 32).to(device, torch.float16)[:, ::2]
    for leaf in (keep_layout(x), keep_layout(every_second)):
        y, total = kernel.add_rmsnorm(leaf, leaf)
        assert y.is_contiguous() and total.is_contiguous()


SLICES = {
    "without the first": lambda base: base[:, 1:],
    "every second": lambda base: base[:, ::2],
    "part of both": lambda base: base[1:, :-1],
    "the last": lambda base: base[:, -1],
    "one sequence": lambda base: base[0],
    "one of each": lambda base: base[:, 2:3],
}


@pytest.mark.parametrize("cut", SLICES)
def test_sequence_slices(kernel: ModuleType, device: str, cut: str) -> None:
    """Case B53."""
    x = SLICES[cut](torch.randn(3, 6, 32).to(device, torch.float16))
    check_forward(kernel, Problem(x))
    check_forward(kernel, Problem(x, residual=x.flip(0)))


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """A view of `shape` into numbers that count up, with strides as torch can make them."""
    order = draw(st.permutations(range(len(shape))))
    if draw(st.booleans()):
        order = list(range(len(shape)))
    steps = [draw(st.sampled_from((1, 1, 2))) for _ in shape]
    pads = [draw(st.sampled_from((0, 0, 1))) for _ in shape]
    spread = [draw(st.sampled_from((False, False, False, True))) for _ in shape]
    sizes = [1 if e else s * k + p for s, k, p, e in zip(shape, steps, pads, spread, strict=True)]
    dense = torch.arange(int(torch.tensor(sizes).prod())).view([sizes[i] for i in order])
    view = dense.permute([order.index(i) for i in range(len(shape))])
    cut = tuple(slice(None, s * k, k) for s, k in zip(shape, steps, strict=True))
    view = view[tuple(slice(None) if e else c for c, e in zip(cut, spread, strict=True))]
    return view.expand(shape)


@settings(max_examples=200, deadline=None)
@generated(data=st.data(), count=st.integers(1, 3))
def test_as_rows_addresses_every_element(
    kernel: ModuleType, data: st.DataObject, count: int
) -> None:
    """Whatever the strides, all rows of all tensors are found under one period."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    tensors = [data.draw(views(shape)) for _ in range(count)]
    period, described = part(kernel, "_shared.rows").as_rows(*tensors)
    for tensor, rows in zip(tensors, described, strict=True):
        held = torch.empty(0, dtype=torch.int64).set_(rows.tensor.untyped_storage())
        wanted = tensor.reshape(-1, shape[-1]).tolist()
        for row, values in enumerate(wanted):
            outer, inner = divmod(row, period)
            start = rows.tensor.storage_offset() + rows.outer * outer + rows.inner * inner
            assert held[start : start + shape[-1]].tolist() == values


def test_guard_sees_a_read_outside(device: str) -> None:
    """The trick itself: what lies beside a guarded tensor is NaN."""
    for lead in (1, 40):
        view = fill(guarded((2, 3), torch.float16, device, lead))
        whole = torch.empty(0, dtype=view.dtype, device=device).set_(view.untyped_storage())
        assert int(whole.isnan().sum()) == whole.numel() - view.numel() > lead
