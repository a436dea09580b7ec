"""Drop-in module that holds a packed weight in the place of a linear layer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from . import formats
from ._shared import arrivals
from ._shared.checks import check_float_tensor, describe
from .api import quantize, w4a16_gemm
from .weight import W4Weight

#: Integers as wide as the floating-point dtypes of scales and zeros.
_BITS = {2: torch.int16, 4: torch.int32}


class W4A16Linear(nn.Module):
    """`y = x @ weight.T + bias` with a 4-bit weight, in the place of `torch.nn.Linear`.

    The parts of the weight are buffers: they move with `.to(device)`, and are saved and loaded
    with the module. Their dtypes belong to the format, so `.half()` or `.to(dtype)` changes that
    of the bias only. The module does not train.

    Args:
        weight: The packed weight; its tensors become the buffers, without a copy.
        bias: `[out_features]` float16, bfloat16 or float32 on the weight's device, which is
            copied; or None.

    Attributes:
        in_features: Input features.
        out_features: Output features.
        group_size: Input features of a group; -1 for a single group.
        qweight: As in `W4Weight`, like scales, zeros (or None) and perm (or None).
        bias: A parameter without gradient, or None.

    Raises:
        TypeError: weight is no `W4Weight`, or bias no tensor of these dtypes.
        ValueError: The shape or device of bias does not fit.

    Example:
        >>> layer = W4A16Linear.from_linear(nn.Linear(4096, 4096).half().cuda())
        >>> y = layer(torch.randn(1, 4096, dtype=torch.float16, device="cuda"))
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: W4Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        if not isinstance(weight, W4Weight):
            raise TypeError(f"W4A16Linear: weight must be a W4Weight, got {describe(weight)}")
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.group_size = weight.group_size
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.register_buffer("perm", weight.perm)
        self._packed = weight
        if bias is None:
            self.register_parameter("bias", None)
            return
        check_float_tensor("W4A16Linear", "bias", bias)
        if bias.shape != (self.out_features,) or bias.device != weight.device:
            raise ValueError(
                f"W4A16Linear: bias must have shape ({self.out_features},) and be on "
                f"{weight.device} with the weight, got {describe(bias)}"
            )
        # A copy: `load_state_dict` writes into it.
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group_size: int = 128, symmetric: bool = True
    ) -> W4A16Linear:
        """Return the layer with its weight rounded to 4 bits by `quantize`.

        Args:
            linear: The layer, which stays as it is and shares no memory with the result.
            group_size: As in `quantize`.
            symmetric: As in `quantize`.

        Raises:
            TypeError: linear is no `nn.Linear`, or its weight of a dtype `quantize` refuses.
            ValueError: `quantize` refuses the sizes.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(
                f"W4A16Linear.from_linear: linear must be an nn.Linear, got {describe(linear)}"
            )
        return cls(quantize(linear.weight.detach(), group_size, symmetric), linear.bias)

    @classmethod
    def from_gptq(
        cls,
        qweight: Tensor,
        qzeros: Tensor | None,
        scales: Tensor,
        g_idx: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        zero_offset: int | str = "auto",
    ) -> W4A16Linear:
        """Return the layer of a GPTQ checkpoint; see the function `from_gptq`."""
        return cls(formats.from_gptq(qweight, qzeros, scales, g_idx, zero_offset=zero_offset), bias)

    @classmethod
    def from_awq(
        cls, qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> W4A16Linear:
        """Return the layer of an AWQ checkpoint; see the function `from_awq`."""
        return cls(formats.from_awq(qweight, qzeros, scales), bias)

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        shape: Sequence[int] | Tensor,
        g_idx: Tensor | None = None,
    ) -> W4A16Linear:
        """Return the layer of a compressed-tensors checkpoint; see `from_compressed_tensors`."""
        weight = formats.from_compressed_tensors(
            weight_packed, weight_scale, weight_zero_point, shape=shape, g_idx=g_idx
        )
        return cls(weight, bias)

    @property
    def weight(self) -> W4Weight:
        """The packed weight, made of the buffers that the module has now."""
        packed, now = self._packed, self._buffers
        # Whatever swaps a buffer (`.to`, `load_state_dict(assign=True)`, `functional_call`)
        # comes by here; checking the parts anew at every call would cost more than the launch.
        if (
            packed.qweight is not now["qweight"]
            or packed.scales is not now["scales"]
            or packed.zeros is not now["zeros"]
            or packed.perm is not now["perm"]
        ):
            packed = W4Weight(
                self.qweight, self.scales, self.zeros, self.perm, self.in_features, self.group_size
            )
            self._packed = packed
        return packed

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`, `[..., out_features]`, for x `[..., in_features]`."""
        return w4a16_gemm(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, group_size={self.group_size}, "
            f"symmetric={self.zeros is None}, act_order={self.perm is not None}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> W4A16Linear:
        """Apply a conversion; scales and zeros pass as integers, which no `.half()` casts."""
        kept = (self.scales, self.zeros)

        def convert(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and any(tensor is part for part in kept):
                return fn(tensor.view(_BITS[tensor.element_size()])).view(tensor.dtype)
            return fn(tensor)

        super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        arrivals.reserve(self.qweight.device)
        return self
