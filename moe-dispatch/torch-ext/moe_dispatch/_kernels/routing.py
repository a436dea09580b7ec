"""Triton bodies of the router: logits, and the choice of experts by them."""

import triton
import triton.language as tl

# Keys of experts that were chosen, that may not be, and of NaN: below those of all numbers.
_TAKEN = tl.constexpr(-(2**31))
_BARRED = tl.constexpr(-(2**31) + 1)
_NAN = tl.constexpr(-(2**31) + 2)
# A key with its column: one that is no longer there.
_GONE = tl.constexpr(-(2**63))


@triton.jit
def _moe_order(value):
    # float32 to int32 in the same order: NaN is the least, the two zeros are one.
    value = tl.where(value == 0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value != value, _NAN, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _moe_below(value, most):
    # value - most, where infinities that are the most count as 0.
    return tl.where(value == most, 0.0, value - most)


@triton.jit
def _moe_bar_groups(
    key,
    value,
    known,
    top_groups,
    SUM_OF_TWO: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Bar the experts of all but the best groups: by their best expert, or their best two.
    value = tl.where((value == value) & known[None, :], value, -float("inf"))
    value = tl.reshape(value, (TOKENS, GROUPS, GROUP))
    score = tl.max(value, 2)
    if SUM_OF_TWO:
        member = tl.arange(0, GROUP)[None, None, :]
        first = tl.min(tl.where(value == score[:, :, None], member, GROUP), 2)
        others = tl.where(member == first[:, :, None], -float("inf"), value)
        score += tl.max(others, 2)
    group = tl.arange(0, GROUPS)[None, :]
    real = tl.max(tl.reshape(known.to(tl.int32), (GROUPS, GROUP)), 1)
    group_key = tl.where((real > 0)[None, :], _moe_order(score), _TAKEN)
    for _ in range(0, top_groups):
        best = tl.max(group_key, 1)
        at = tl.min(tl.where(group_key == best[:, None], group, GROUPS), 1)
        group_key = tl.where(group == at[:, None], _TAKEN, group_key)
    # Groups that are no groups look chosen too; their experts are not known.
    chosen = tl.broadcast_to((group_key == _TAKEN)[:, :, None], (TOKENS, GROUPS, GROUP))
    chosen = tl.reshape(chosen, (TOKENS, GROUPS * GROUP))
    return tl.where(chosen | (key == _TAKEN), key, _BARRED)


@triton.jit
def _moe_gate(
    logits_ptr,  # [tokens, experts]
    bias_ptr,  # [experts] or None
    ids_ptr,  # [tokens, top_k] int64
    weights_ptr,  # [tokens, top_k] float32
    rounded_ptr,  # [tokens, top_k], the same in another dtype, or None
    slots_ptr,  # [tokens * top_k] int32, or None
    first,  # token, a multiple of TOKENS
    tokens,
    experts,
    top_k,
    group_size,
    top_groups,
    scale,
    stride_lt,
    stride_le,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Columns hold the experts, each group padded to GROUP of them. Returns, where slots are noted,
    # how often each column was chosen.
    COLUMNS: tl.constexpr = GROUPS * GROUP
    column = tl.arange(0, COLUMNS)
    expert = column
    known = column < experts
    if GROUPS > 1:
        expert = (column // GROUP) * group_size + column % GROUP
        known = (column % GROUP < group_size) & (expert < experts)
    token = first + tl.arange(0, TOKENS)
    inside = token < tokens
    line = logits_ptr + token.to(tl.int64)[:, None] * stride_lt
    here = inside[:, None] & known[None, :]
    logit = tl.load(
        line + expert.to(tl.int64)[None, :] * stride_le,
        mask=here,
        other=-float("inf"),
        cache_modifier=".cg",  # other multiprocessors wrote them
    ).to(tl.float32)
    finite = tl.where(logit == logit, logit, -float("inf"))
    most = tl.max(finite, 1)
    total = most
    if SCORING == "softmax":
        total = tl.sum(tl.where(here, tl.exp(_moe_below(finite, most[:, None])), 0.0), 1)
    value = logit
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)[None, :]
        if SCORING == "softmax":
            value = tl.exp(_moe_below(finite, most[:, None])) / total[:, None] + bias
        elif SCORING == "sigmoid":
            value = 1.0 / (1.0 + tl.exp(-finite)) + bias
        else:
            value = finite + bias
        value = tl.where(logit == logit, value, logit)
    key = tl.where(known[None, :], _moe_order(value), _TAKEN)
    if GROUPS > 1:
        TWO: tl.constexpr = bias_ptr is not None and GROUP > 1
        key = _moe_bar_groups(key, value, known, top_groups, TWO, TOKENS, GROUPS, GROUP)
    # Key and column in one number, so that one reduction finds the best: of those that are equal
    # the lowest column. What was chosen becomes the number of the choice, below all others.
    key = key.to(tl.int64) << 32 | (COLUMNS - 1 - column)[None, :].to(tl.int64)
    number = tl.full((1, 1), _GONE, tl.int64)
    for _ in range(0, top_k):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], number, key)
        number += 1
    chosen = (key < number) & here
    if SCORING == "softmax":
        weight = tl.exp(_moe_below(finite, most[:, None])) / total[:, None]
    elif SCORING == "sigmoid":
        weight = 1.0 / (1.0 + tl.exp(-finite))
    else:
        best = tl.max(tl.where(chosen, finite, -float("inf")), 1)
        weight = tl.where(chosen, tl.exp(_moe_below(finite, best[:, None])), 0.0)
        weight = weight / tl.sum(weight, 1)[:, None]
    if RENORMALIZE:
        weight = weight / (tl.sum(tl.where(chosen, weight, 0.0), 1)[:, None] + 1e-20)
    weight *= scale
    # From where they are to their places: nothing changes threads on the way.
    slot = token.to(tl.int64)[:, None] * top_k + (key - _GONE)
    tl.store(ids_ptr + slot, tl.broadcast_to(expert.to(tl.int64)[None, :], here.shape), mask=chosen)
    tl.store(weights_ptr + slot, weight, mask=chosen)
    if rounded_ptr is not None:
        tl.store(rounded_ptr + slot, weight.to(rounded_ptr.dtype.element_ty), mask=chosen)
    count = column
    if slots_ptr is not None:
        tl.store(slots_ptr + slot, tl.broadcast_to(expert[None, :], here.shape), mask=chosen)
        count = tl.sum(chosen.to(tl.int32), 0)
    return count


# The number of experts is a constant of a layer: lines of logits that it aligns are read 16 bytes
# at a time, and a line then lies in one warp.
_GATE = ["tokens", "top_k", "group_size", "top_groups", "scale"]


@triton.jit(do_not_specialize=_GATE)
def moe_route_kernel(
    logits_ptr,  # [tokens, experts]
    bias_ptr,  # [experts] or None
    ids_ptr,  # [tokens, top_k] int64
    weights_ptr,  # [tokens, top_k] float32
    tokens,
    experts,
    top_k,
    group_size,
    top_groups,
    scale,
    stride_lt,
    stride_le,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Choose experts by logits that are there."""
    _moe_gate(
        logits_ptr, bias_ptr, ids_ptr, weights_ptr, None, None, tl.program_id(0) * TOKENS,
        tokens, experts, top_k, group_size, top_groups, scale, stride_lt, stride_le, SCORING,
        RENORMALIZE, TOKENS, GROUPS, GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*_GATE, "splits", "span", "slabs", "tiles"])
def moe_score_kernel(
    x_ptr,  # [tokens, hidden]
    w_ptr,  # [experts, hidden]
    w_bias_ptr,  # [experts] or None: added to the logits
    logits_ptr,  # [tokens, experts] float32
    parts_ptr,  # [programs, BLOCK_T, BLOCK_E] float32
    arrivals_ptr,  # [tiles + token blocks] int32, zero
    bias_ptr,  # [experts] or None: added for the choice
    ids_ptr,  # [tokens, top_k] int64
    weights_ptr,  # [tokens, top_k] float32
    rounded_ptr,  # [tokens, top_k], the same in another dtype, or None
    slots_ptr,  # [tokens * top_k] int32, or None
    counts_ptr,  # [ceil(tokens / BLOCK), experts] int32, or None
    tokens,
    experts,
    top_k,
    group_size,
    top_groups,
    scale,
    splits,
    span,
    slabs,
    tiles,
    hidden,
    stride_xt,
    stride_we,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute logits, and choose experts by them.

    A tile of BLOCK_T tokens and BLOCK_E experts is shared by `splits` programs, `span` steps each;
    who comes last adds them up. Who comes last of all experts' programs chooses for the tokens.
    """
    program = tl.program_id(0)
    tile = program // splits
    block = tile // slabs
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = (tile - block * slabs) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = (program - tile * splits) * span * BLOCK_K + tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * stride_xt + k[None, :]
    w_at = w_ptr + tl.minimum(expert, experts - 1).to(tl.int64)[:, None] * stride_we + k[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for step in tl.range(0, span, num_stages=STAGES):
        inside = (k + step * BLOCK_K < hidden)[None, :]
        x = tl.load(x_at + step * BLOCK_K, mask=inside, other=0.0)
        w = tl.load(w_at + step * BLOCK_K, mask=inside, other=0.0)
        if x.dtype != w.dtype:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, w.T, total, input_precision="ieee")
    mask = (token < tokens)[:, None] & (expert < experts)[None, :]
    mine = program >= 0
    if splits > 1:
        SIZE: tl.constexpr = BLOCK_T * BLOCK_E
        offsets = tl.arange(0, BLOCK_T)[:, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
        tl.store(parts_ptr + program.to(tl.int64) * SIZE + offsets, total, mask=mask)
        tl.debug_barrier()  # every thread's part is written before the arrival is
        mine = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == splits - 1
        if mine:
            tl.store(arrivals_ptr + tile, 0)
            total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
            at = parts_ptr + tile.to(tl.int64) * splits * SIZE + offsets
            # PARTS are on their way at a time: their latency is most of what sharing costs.
            for _ in tl.range(0, splits, loop_unroll_factor=PARTS):
                # From L2: other multiprocessors wrote them.
                total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
                at += SIZE
    if mine:
        if w_bias_ptr is not None:
            bias = tl.load(w_bias_ptr + expert, mask=expert < experts, other=0.0)
            total += bias.to(tl.float32)[None, :]
        at = token.to(tl.int64)[:, None] * experts + expert[None, :]
        tl.store(logits_ptr + at, total, mask=mask)
        tl.debug_barrier()  # every thread's logits are written before the arrival is
        last = program >= 0
        if slabs > 1:
            arrived = tl.atomic_add(arrivals_ptr + tiles + block, 1, sem="acq_rel")
            last = arrived == slabs - 1
        if last:
            tl.store(arrivals_ptr + tiles + block, 0)
            column = tl.arange(0, GROUPS * GROUP)
            held = (column // GROUP) * group_size + column % GROUP
            known = (column % GROUP < group_size) & (held < experts)
            for start in range(block * BLOCK_T, block * BLOCK_T + BLOCK_T, BLOCK):
                if start < tokens:
                    count = tl.zeros((GROUPS * GROUP,), tl.int32)
                    for first in range(start, start + BLOCK, TOKENS):
                        count += _moe_gate(
                            logits_ptr, bias_ptr, ids_ptr, weights_ptr, rounded_ptr, slots_ptr,
                            first, tokens, experts, top_k, group_size, top_groups, scale, experts,
                            1, SCORING, RENORMALIZE, TOKENS, GROUPS, GROUP,
                        )  # fmt: skip
                    if counts_ptr is not None:
                        counts_at = counts_ptr + (start // BLOCK) * experts + held
                        tl.store(counts_at, count, mask=known)
