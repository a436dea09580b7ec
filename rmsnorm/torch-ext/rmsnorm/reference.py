"""RMSNorm in plain PyTorch, with the rounding points of the kernels.

It is the oracle of the tests and what runs where Triton does not (CPU tensors). All arithmetic is
float32; `before_weight` rounds once more, to the dtype of what is normalised.
"""

import torch


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: float,
    before_weight: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return y [..., n], x + residual (None without residual) and 1 / rms [...] float32."""
    total = None
    h = x
    if residual is not None:
        total = (x.float() + residual.float()).to(residual_dtype).contiguous()
        h = total
    h32 = h.float()
    rstd = torch.rsqrt(h32.pow(2).mean(-1, keepdim=True) + eps)
    y = h32 * rstd
    if before_weight:
        y = y.to(h.dtype).float()
    if weight is not None:
        y = y * _effective(weight, offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype).contiguous(), total, rstd.squeeze(-1).contiguous()


def backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    before_weight: bool,
    dx_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx [..., n] and, in float32, the gradients [n] of weight and bias.

    With x_hat = h * rstd and g = dy * (weight + offset):
    dx = (g - x_hat * mean(g * x_hat)) * rstd + dtotal. Source: the derivative of the forward
    formula; the rounding before the weight counts as the identity.
    """
    dy32 = dy.float()
    x_hat = h.float() * rstd.unsqueeze(-1)
    factor = x_hat.to(h.dtype).float() if before_weight else x_hat
    g = dy32 if weight is None else dy32 * _effective(weight, offset)
    dx = (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if dtotal is not None:
        dx = dx + dtotal.float()
    n = h.shape[-1]
    dweight = (dy32 * factor).reshape(-1, n).sum(0)
    dbias = dy32.reshape(-1, n).sum(0)
    return dx.to(dx_dtype).contiguous(), dweight, dbias


def _effective(weight: torch.Tensor, offset: float) -> torch.Tensor:
    # In float32: 1 + w in 16 bits would lose small w.
    return weight.float() + offset
