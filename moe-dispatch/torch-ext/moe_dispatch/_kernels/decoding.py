"""Triton bodies that serve the slots of a few tokens one by one, without an order."""

import triton
import triton.language as tl

from .dispatch import moe_expert
from .experts import moe_activate, moe_load

_DECODE = ["top_k", "given", "experts", "stride_it", "stride_ik"]


@triton.jit(do_not_specialize=[*_DECODE, "columns", "alpha", "limit"])
def moe_decode_up_kernel(
    x_ptr,  # [tokens, hidden]
    gate_ptr,  # [experts, inner, hidden], or pairs of both
    up_ptr,  # [experts, inner, hidden]; unused for pairs
    h_ptr,  # [slots, inner]
    gate_bias_ptr,  # [experts, inner] or None
    up_bias_ptr,  # [experts, inner] or None
    ids_ptr,  # [tokens, top_k]
    map_ptr,  # [given] or None
    columns,  # programs of a slot
    top_k,
    given,
    experts,
    stride_it,
    stride_ik,
    alpha,
    limit,
    inner,
    hidden,
    stride_xt,
    stride_we,
    stride_wn,
    stride_be,
    stride_bn,
    ACTIVATION: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Do what moe_up_kernel does, for each slot by itself."""
    program = tl.program_id(0)
    slot = program // columns
    expert = moe_expert(
        ids_ptr, map_ptr, slot, slot >= 0, top_k, stride_it, stride_ik, given, experts
    )
    if expert >= 0:
        N: tl.constexpr = 2 * BLOCK_N if GATES == "pairs" else BLOCK_N
        rows: tl.constexpr = N // BLOCK_N
        column = program - slot * columns
        n = tl.minimum(column * N + tl.arange(0, N), inner * rows - 1)
        k = tl.arange(0, BLOCK_K)
        at = n.to(tl.int64)[:, None] * stride_wn + k[None, :]
        gate_at = gate_ptr + expert.to(tl.int64) * stride_we + at
        up_at = up_ptr + expert.to(tl.int64) * stride_we + at
        x_at = x_ptr + (slot // top_k).to(tl.int64) * stride_xt + k
        a = tl.zeros((N, BLOCK_K), tl.float32)
        b = tl.zeros((1, 1), tl.float32)
        if GATES != "pairs":
            b = tl.zeros((N, BLOCK_K), tl.float32)
        for at_k in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
            mask = at_k + k < hidden
            x = moe_load(x_at, mask, WHOLE).to(tl.float32)[None, :]
            x_at += BLOCK_K
            a += moe_load(gate_at, mask[None, :], WHOLE).to(tl.float32) * x
            gate_at += BLOCK_K
            if GATES != "pairs":
                b += moe_load(up_at, mask[None, :], WHOLE).to(tl.float32) * x
                up_at += BLOCK_K
        if GATES == "pairs":
            total, total_up = tl.reshape(tl.sum(a, 1), (BLOCK_N, 2)).split()
        else:
            total = tl.sum(a, 1)
            total_up = tl.sum(b, 1)
        m = column * BLOCK_N + tl.arange(0, BLOCK_N)
        if gate_bias_ptr is not None:
            bias_at = expert.to(tl.int64) * stride_be + m * stride_bn
            total += tl.load(gate_bias_ptr + bias_at, mask=m < inner, other=0.0).to(tl.float32)
            total_up += tl.load(up_bias_ptr + bias_at, mask=m < inner, other=0.0).to(tl.float32)
        h = moe_activate(total, total_up, alpha, limit, ACTIVATION)
        h_at = h_ptr + slot.to(tl.int64) * inner + m
        tl.store(h_at, h.to(h_ptr.dtype.element_ty), mask=m < inner)


@triton.jit(do_not_specialize=[*_DECODE, "columns", "stride_rt", "stride_rk"])
def moe_decode_down_kernel(
    h_ptr,  # [slots, inner]
    w_ptr,  # [experts, hidden, inner]
    out_ptr,  # [tokens, hidden]
    bias_ptr,  # [experts, hidden] or None
    ids_ptr,  # [tokens, top_k]
    map_ptr,  # [given] or None
    weights_ptr,  # [tokens, top_k]
    columns,  # programs of a token
    top_k,
    given,
    experts,
    stride_it,
    stride_ik,
    stride_rt,
    stride_rk,
    hidden,
    inner,
    stride_we,
    stride_wn,
    stride_be,
    stride_bn,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Multiply a token's rows by their experts' weights and sum them, in order of the choices."""
    program = tl.program_id(0)
    token = program // columns
    n = (program - token * columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = tl.minimum(n, hidden - 1)
    k_in = tl.arange(0, BLOCK_K)
    n_at = n_in.to(tl.int64)[:, None] * stride_wn
    steps = tl.cdiv(inner, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    # One loop over all choices: the loads of the next one do not wait for this one's sum.
    for step in tl.range(0, top_k * steps, num_stages=STAGES):
        choice = step // steps
        k = (step - choice * steps) * BLOCK_K + k_in
        slot = token * top_k + choice
        expert = moe_expert(
            ids_ptr, map_ptr, slot, slot >= 0, top_k, stride_it, stride_ik, given, experts
        )
        there = expert >= 0
        weight_at = token.to(tl.int64) * stride_rt + choice * stride_rk
        weight = tl.load(weights_ptr + weight_at).to(tl.float32)
        w_at = w_ptr + tl.maximum(expert, 0).to(tl.int64) * stride_we + n_at + k[None, :]
        w = moe_load(w_at, (k < inner)[None, :], WHOLE)
        h_at = h_ptr + slot.to(tl.int64) * inner + k
        h = tl.load(h_at, mask=there & (k < inner), other=0.0).to(tl.float32)
        # A slot that is skipped adds nothing, whatever its weight.
        total += tl.where(there, w.to(tl.float32) * (h * weight)[None, :], 0.0)
    out = tl.sum(total, 1)
    if bias_ptr is not None:
        for choice in range(0, top_k):
            slot = token * top_k + choice
            expert = moe_expert(
                ids_ptr, map_ptr, slot, slot >= 0, top_k, stride_it, stride_ik, given, experts
            )
            weight_at = token.to(tl.int64) * stride_rt + choice * stride_rk
            weight = tl.load(weights_ptr + weight_at).to(tl.float32)
            at = tl.maximum(expert, 0).to(tl.int64) * stride_be + n * stride_bn
            bias = tl.load(bias_ptr + at, mask=(n < hidden) & (expert >= 0), other=0.0)
            out += tl.where(expert >= 0, weight, 0.0) * bias.to(tl.float32)
    at = out_ptr + token.to(tl.int64) * hidden + n
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=n < hidden)
