"""The operator: registered for autograd and torch.compile, called directly where neither is on."""

import torch
from torch import Tensor

from . import config, reference
from ._ops import add_op_namespace_prefix
from ._shared import table
from ._shared.device import device_guard, has_triton, uses_triton

if has_triton():
    from . import launch


def forward(x: Tensor, factor: float) -> Tensor:
    """Return x * factor, on any device."""
    if x.numel() and not uses_triton(x):
        return reference.forward(x, factor)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tile = config.forward_config(table.row_bucket(x.numel()), x.dtype, x.device)
        with device_guard(x):
            launch.forward(x.contiguous(), y, factor, tile)
    return y


@torch.library.custom_op(add_op_namespace_prefix("kernel_name"), mutates_args=())
def kernel_name(x: Tensor, factor: float) -> Tensor:
    """Return x * factor."""
    return forward(x, factor)


@torch.library.register_fake(add_op_namespace_prefix("kernel_name"))
def _(x, factor):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup(ctx, inputs, output):
    ctx.factor = inputs[1]


def _gradient(ctx, dy):
    return kernel_name(dy, ctx.factor), None


kernel_name.register_autograd(_gradient, setup_context=_setup)
