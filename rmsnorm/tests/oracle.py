"""The norm in float64 and as PyTorch code writes it, and what tests ask of a result."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Problem:
    """Arguments of one call. `add_rmsnorm` if there is a residual, else `rmsnorm`."""

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    rounding: str = "once"
    out_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None

    def __call__(self, kernel: ModuleType) -> tuple[Tensor, Tensor | None]:
        """Return what the kernel makes of it: y, and x + residual or None."""
        options = {
            "bias": self.bias,
            "offset": self.offset,
            "rounding": self.rounding,
            "out_dtype": self.out_dtype,
        }
        if self.residual is None:
            return kernel.rmsnorm(self.x, self.weight, self.eps, **options), None
        options["residual_dtype"] = self.residual_dtype
        return kernel.add_rmsnorm(self.x, self.residual, self.weight, self.eps, **options)

    @property
    def total(self) -> Tensor:
        """What is normalised: x, or x + residual rounded to the dtype of the sum."""
        if self.residual is None:
            return self.x
        sum_ = self.x.float() + self.residual.float()
        return sum_.to(self.residual_dtype or self.residual.dtype)

    def exact(self) -> Tensor:
        """Return y in float64, from the rounded sum."""
        h = self.total.double()
        y = h / (h.square().mean(-1, keepdim=True) + self.eps).sqrt()
        if self.weight is not None:
            y = y * (self.weight.double() + self.offset)
        return y if self.bias is None else y + self.bias.double()

    def peer(self) -> Tensor:
        """Return y as the models in transformers compute it at the input's dtype."""
        h = self.total
        y = h.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.rounding == "before_weight":
            y = y.to(h.dtype).float()
        if self.weight is not None:
            y = y * (self.weight.float() + self.offset)
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(self.out_dtype or self.x.dtype)

    def leaves(self, dtype: torch.dtype | None = None) -> Problem:
        """Return the same problem on copies that want gradients, in `dtype` if one is given."""

        def leaf(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()

        return replace(
            self,
            x=leaf(self.x),
            residual=leaf(self.residual),
            weight=leaf(self.weight),
            bias=leaf(self.bias),
        )

    def gradients(
        self, dy: Tensor | None, dtotal: Tensor | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return for each tensor its gradient in float64, and as PyTorch computes it.

        Both are those at the rounded sum, whose gradient is that of x and of residual alike.
        """
        plain = replace(self, x=self.total, residual=None, out_dtype=self.out_dtype or self.x.dtype)
        exact, peer = plain.leaves(torch.float64), plain.leaves()
        for leaves, y in ((exact, exact.exact()), (peer, peer.peer())):
            if dy is not None:
                y.backward(dy.to(y.dtype))
            else:
                (0 * y).sum().backward()
            if dtotal is not None:
                leaves.x.grad = leaves.x.grad + dtotal.to(leaves.x.dtype)
        found = {
            name: (tensor.grad, peer.tensors[name].grad) for name, tensor in exact.tensors.items()
        }
        if self.residual is not None:
            found["residual"] = found["x"]
        return {
            name: (found[name][0], found[name][1].to(tensor.dtype))
            for name, tensor in self.tensors.items()
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments, by name."""
        named = {name: getattr(self, name) for name in ("x", "residual", "weight", "bias")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def problem(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    *,
    weight: torch.dtype | None = torch.float32,
    bias: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    **options: object,
) -> Problem:
    """Return a problem with random tensors of these dtypes; None leaves one out."""

    def random(size: tuple[int, ...], kind: torch.dtype | None) -> Tensor | None:
        return None if kind is None else torch.randn(size).to(device, kind)

    return Problem(
        x=random(shape, dtype),
        residual=random(shape, residual),
        weight=random(shape[-1:], weight),
        bias=random(shape[-1:], bias),
        **options,
    )


def part(kernel: ModuleType, name: str) -> ModuleType:
    """Return a module inside the loaded kernel."""
    return importlib.import_module(f"{kernel.__name__}.{name}")


def storage(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()
