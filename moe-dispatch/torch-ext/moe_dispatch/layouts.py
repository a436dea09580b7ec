"""How weights and tokens lie in memory, and what of it the kernels take without a copy."""

from typing import NamedTuple

from torch import Tensor

from . import reference


class Weights(NamedTuple):
    """The experts' weights and biases.

    Attributes:
        gate_up: `[experts, 2 * inner, hidden]`, or the gates `[experts, inner, hidden]`.
        up: `[experts, inner, hidden]` where it is not part of `gate_up`.
        down: `[experts, hidden, inner]`.
        gate_up_bias: `[experts, 2 * inner]` or None.
        down_bias: `[experts, hidden]` or None.
    """

    gate_up: Tensor
    up: Tensor | None
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def layout_of(weight: Tensor) -> str | None:
    """Return along which dimension a weight [experts, n, k] is dense, or None."""
    if weight.stride(2) == 1 or weight.shape[2] == 1:
        return "rows"
    if weight.stride(1) == 1 or weight.shape[1] == 1:
        return "columns"
    return None


def aligned(tensor: Tensor, *strides: int) -> bool:
    """Return whether what TMA reads begins at multiples of 16 bytes, and can have such strides."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(
        0 < stride < 2**38 and stride * size % 16 == 0 for stride in strides
    )


def weight_aligned(weight: Tensor, layout: str) -> bool:
    """Return whether a weight [experts, n, k] is aligned, and truly dense in its layout."""
    across, along = (1, 2) if layout == "rows" else (2, 1)
    strides = weight.stride(0), weight.stride(across)
    return weight.stride(along) == 1 and aligned(weight, *strides)


class Gates(NamedTuple):
    """Gate and up as the kernels take them.

    Attributes:
        gate: `[experts, inner, hidden]`, or both for "pairs".
        up: `[experts, inner, hidden]`, None for "pairs".
        gate_bias: `[experts, inner]` or None.
        up_bias: `[experts, inner]` or None.
        layout: "rows" or "columns".
        aligned: Whether all is aligned to 16 bytes.
        halves: Whether one box can hold rows of both.
    """

    gate: Tensor
    up: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    layout: str
    aligned: bool
    halves: bool


def gates(weights: Weights, interleaved: bool) -> Gates:
    """Return gates and ups as the kernels take them, copied if they are dense in neither way."""
    biases: tuple[Tensor | None, Tensor | None] = None, None
    if weights.gate_up_bias is not None:
        biases = reference.halves(weights.gate_up_bias, interleaved)
    gate, up = weights.gate_up, weights.up
    layout = layout_of(gate)
    if up is not None and (layout != layout_of(up) or gate.stride() != up.stride()):
        gate, up, layout = gate.contiguous(), up.contiguous(), "rows"
    elif layout is None:
        gate, layout = gate.contiguous(), "rows"
        up = None if up is None else up.contiguous()
    if up is None and interleaved:
        return Gates(gate, None, *biases, layout, weight_aligned(gate, layout), False)
    if up is None:
        gate, up = reference.halves(gate, False)
    both_aligned = weight_aligned(gate, layout) and aligned(up)
    apart = abs(up.data_ptr() - gate.data_ptr())
    halves = layout == "rows" and 0 < apart < 2**39
    return Gates(gate, up, *biases, layout, both_aligned, halves)


def dense(weight: Tensor) -> tuple[Tensor, str]:
    """Return a weight [experts, n, k] and its layout, copied if it is dense in neither way."""
    layout = layout_of(weight)
    return (weight.contiguous(), "rows") if layout is None else (weight, layout)


def rows(x: Tensor) -> Tensor:
    """Return x [n, k] with rows that are dense, copied if need be."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
