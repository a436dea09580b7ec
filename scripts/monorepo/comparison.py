"""A kernel's result beside the same in float64 and in PyTorch: what `make demo` shows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from monorepo.numerics import FACTOR, FLOOR_ULP, tensor_error, ulp_error


@dataclass(frozen=True)
class Comparison:
    """One result of a kernel.

    Attributes:
        what: The function, and which of its results.
        on: What it was called on, a model for instance.
        shape: Shape of the input.
        actual: The result.
        exact: The same in float64.
        peer: The same as PyTorch code computes it at the dtype of `actual`.
        whole: Whether errors are relative to the whole tensor: sums, whose elements may cancel.
    """

    what: str
    on: str
    shape: tuple[int, ...]
    actual: Tensor
    exact: Tensor
    peer: Tensor
    whole: bool = False

    @property
    def right(self) -> bool:
        """Whether the result keeps the rule of `numerics`."""
        errors = zip(self._errors(self.actual), self._errors(self.peer), strict=True)
        return all(found <= _allowed(peer) for found, peer in errors)

    def __str__(self) -> str:
        """One row of the table under `HEADER`."""
        found, allowed = self._errors(self.actual)[0], _allowed(self._errors(self.peer)[0])
        shape = "x".join(map(str, self.shape))
        dtype = str(self.actual.dtype).removeprefix("torch.")
        return _row(self.what, self.on, shape, dtype, f"{found:.2f}", f"{allowed:.2f}")

    def _errors(self, tensor: Tensor) -> tuple[float, ...]:
        if not self.whole:
            return (ulp_error(tensor, self.exact),)
        error = tensor_error(tensor, self.exact)
        return error.largest, error.rms


def _allowed(peer: float) -> float:
    return max(FACTOR * peer, FLOOR_ULP)


def _row(what: str, on: str, shape: str, dtype: str, found: str, allowed: str) -> str:
    return f"{what:26} {on:16} {shape:>10} {dtype:9} {found:>6} {allowed:>8}"


HEADER = _row("function", "on", "shape", "dtype", "ulp", "allowed")
