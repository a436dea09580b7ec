"""Multiplication by a number, in Triton."""

from . import layers
from .api import kernel_name

__all__ = ["kernel_name", "layers"]
