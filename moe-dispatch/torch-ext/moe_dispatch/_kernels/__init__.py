"""Triton bodies of a mixture-of-experts layer.

A *slot* is one choice of one token, numbered `token * top_k + choice`. A *row* is a slot's place
when slots are ordered by expert; rows that share an expert are cut into *tiles* of
(expert, first row, row after the last, unused).
"""

from .decoding import moe_decode_down_kernel, moe_decode_up_kernel
from .dispatch import moe_count_kernel, moe_cut_kernel, moe_index_kernel
from .experts import moe_combine_kernel, moe_down_kernel, moe_up_kernel
from .routing import moe_route_kernel, moe_score_kernel

__all__ = [
    "moe_combine_kernel",
    "moe_count_kernel",
    "moe_cut_kernel",
    "moe_decode_down_kernel",
    "moe_decode_up_kernel",
    "moe_down_kernel",
    "moe_index_kernel",
    "moe_route_kernel",
    "moe_score_kernel",
    "moe_up_kernel",
]
