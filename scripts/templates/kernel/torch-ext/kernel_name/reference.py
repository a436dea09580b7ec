"""The same computation in PyTorch, with the same rounding: oracle of the tests, path of CPUs."""

from torch import Tensor


def forward(x: Tensor, factor: float) -> Tensor:
    """Return x * factor, rounded once."""
    return (x.float() * factor).to(x.dtype).contiguous()
