# Copied from shared/rows.py by scripts/sync_shared.py: edit it there.
"""Tensors as rows along the last dimension, by strides instead of copies."""

from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """A tensor whose element (row, column) lies at `outer * o + inner * i + column` elements.

    `o, i = divmod(row, period)`, with the `period` that `as_rows` returns beside it.
    """

    tensor: torch.Tensor
    outer: int
    inner: int


def _levels(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the leading dimensions as (size, stride), those that merge merged."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    return levels


def as_rows(*tensors: torch.Tensor | None) -> tuple[int, tuple[Rows | None, ...]]:
    """Describe tensors of one shape `[..., n]` by one common pair of row strides each.

    Leading dimensions that two strides describe (a slice along one dimension, the heads of a
    fused projection) are taken as they are. Any other layout, a last dimension that is not
    dense included, is copied.

    Returns:
        The period and, for each tensor, its `Rows` (None for None). A period of 1 means
        that all rows are `outer` elements apart.
    """
    rows: list[Rows | None] = []
    for tensor in tensors:  # the usual case first: this runs at every call
        if tensor is None:
            rows.append(None)
        elif tensor.is_contiguous():
            rows.append(Rows(tensor, tensor.shape[-1], 0))
        else:
            return _by_strides(tensors)
    return 1, tuple(rows)


def _by_strides(tensors: tuple[torch.Tensor | None, ...]) -> tuple[int, tuple[Rows | None, ...]]:
    """Do what `as_rows` does, for tensors of which one at least is not contiguous."""
    found: list[tuple[torch.Tensor, list[tuple[int, int]]] | None] = []
    period = 1
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        levels = _levels(tensor)
        dense = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
        two = len(levels) == 2
        if not dense or len(levels) > 2 or (two and period not in (1, levels[1][0])):
            tensor = tensor.contiguous()
            levels = _levels(tensor)
        elif two:
            period = levels[1][0]
        found.append((tensor, levels))
    rows: list[Rows | None] = []
    for item in found:
        if item is None:
            rows.append(None)
            continue
        tensor, levels = item
        if len(levels) == 2:
            rows.append(Rows(tensor, levels[0][1], levels[1][1]))
        else:
            stride = levels[0][1] if levels else 0
            rows.append(Rows(tensor, stride * period, stride if period > 1 else 0))
    return period, tuple(rows)
