"""Mixture-of-experts layers in Triton: routing, dispatch, experts and combination."""

from . import layers
from .api import fused_experts, fused_moe_forward, route
from .experts import experts_forward
from .stages import (
    compute_permutation_indices,
    fused_expert_ffn,
    grouped_gemm,
    moe_router,
    permute_tokens,
    unpermute_tokens,
)

__all__ = [
    "compute_permutation_indices",
    "experts_forward",
    "fused_expert_ffn",
    "fused_experts",
    "fused_moe_forward",
    "grouped_gemm",
    "layers",
    "moe_router",
    "permute_tokens",
    "route",
    "unpermute_tokens",
]
