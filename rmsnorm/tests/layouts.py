"""Layouts of one shape, each carved out of memory that is otherwise NaN (guarded buffers)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

GUARD = 40  # elements in front of and behind each buffer


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str, lead: int = GUARD) -> Tensor:
    """Return a dense tensor of NaN, with NaN before and after it in memory."""
    size = math.prod(shape)
    memory = torch.full((lead + size + GUARD,), float("nan"), dtype=dtype, device=device)
    return memory[lead : lead + size].view(shape)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return guarded(shape, dtype, device)


def odd_offset(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Data that start between two multiples of 16 bytes."""
    return guarded(shape, dtype, device, lead=1)


def transposed(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """The last dimension is the outermost in memory; norm.md 1, defect 1."""
    return guarded((shape[-1], *shape[:-1]), dtype, device).movedim(0, -1)


def sliced_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Case B53: every second step of a sequence."""
    *batch, rows, n = shape
    return guarded((*batch, 2 * rows + 1, n), dtype, device)[..., 1::2, :]


def sliced_columns(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    *lead, n = shape
    return guarded((*lead, n + 7), dtype, device)[..., 3 : 3 + n]


def stepped_columns(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    *lead, n = shape
    return guarded((*lead, 2 * n), dtype, device)[..., ::2]


def expanded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """All of the first dimension is one piece of memory."""
    return guarded(shape[1:], dtype, device).expand(shape)


def permuted(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """The first two dimensions change places in memory, as in `[heads, tokens]`."""
    if len(shape) < 3:
        return guarded(shape, dtype, device)
    first, second, *rest = shape
    return guarded((second, first, *rest), dtype, device).transpose(0, 1)


def heads(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Case B26: the middle third of a fused projection of query, key and value."""
    *lead, rows, n = shape
    return guarded((*lead, 3 * rows, n), dtype, device)[..., rows : 2 * rows, :]


Layout = Callable[[tuple[int, ...], torch.dtype, str], Tensor]
ROWS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (
        contiguous,
        odd_offset,
        transposed,
        sliced_rows,
        sliced_columns,
        stepped_columns,
        expanded,
        permuted,
        heads,
    )
}


def stepped(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return guarded((2 * shape[0],), dtype, device)[::2]


def column(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return guarded((shape[0], 3), dtype, device)[:, 1]


def one_element(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return guarded((1,), dtype, device).expand(shape)


VECTORS: dict[str, Layout] = {
    layout.__name__: layout for layout in (contiguous, odd_offset, stepped, column, one_element)
}


def fill(view: Tensor) -> Tensor:
    """Write random numbers into a view, also where several elements share memory."""
    shape = [size if stride else 1 for size, stride in zip(view.shape, view.stride(), strict=True)]
    distinct = view[tuple(slice(size) for size in shape)]
    distinct.copy_(torch.randn(shape))
    return view


def memory(view: Tensor) -> Tensor:
    """Return a copy of all memory around a view, bit by bit."""
    whole = torch.empty(0, dtype=torch.uint8, device=view.device)
    return whole.set_(view.untyped_storage()).clone()
