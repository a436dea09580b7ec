"""Triton bodies of a mixture-of-experts layer: routing, dispatch, experts, combination.

A *slot* is one choice of one token, numbered `token * top_k + choice`. A *row* is a slot's place
when slots are ordered by expert; rows that share an expert are cut into *tiles* of
(expert, first row, row after the last, unused).

`LAYOUT` says how a weight [experts, n, k] is read: "rows" (dense along k) and "columns" (dense
along n) by pointers, "row boxes" and "column boxes" through TMA descriptors.
`GATES` says where gate and up are: "apart" (two weights, two products), "halves" (one box of both,
one product) or "pairs" (rows 2n and 2n + 1 of one weight, one product).
"""

import triton
import triton.language as tl

# Keys of experts that were chosen, that may not be, and of NaN: below those of all numbers.
_TAKEN = tl.constexpr(-(2**31))
_BARRED = tl.constexpr(-(2**31) + 1)
_NAN = tl.constexpr(-(2**31) + 2)
# A key with its column: one that is no longer there.
_GONE = tl.constexpr(-(2**63))


# ---------------------------------------------------------------------------------------- routing
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


# --------------------------------------------------------------------------------------- dispatch
@triton.jit
def _moe_expert(ids_ptr, map_ptr, slot, mask, top_k, stride_it, stride_ik, given, experts):
    # The expert of a slot, or -1 for one to skip: an id of none of the `given`, or one that the
    # map gives to none of the `experts` here.
    token = slot // top_k
    at = token.to(tl.int64) * stride_it + (slot - token * top_k).to(tl.int64) * stride_ik
    expert = tl.load(ids_ptr + at, mask=mask, other=-1)
    known = (expert >= 0) & (expert < given)
    expert = tl.where(known, expert, 0).to(tl.int32)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=mask & known, other=-1)
        known = known & (expert >= 0) & (expert < experts)
    return tl.where(known, expert, -1).to(tl.int32)


@triton.jit(
    do_not_specialize=["slots", "size", "top_k", "stride_it", "stride_ik", "given", "experts"]
)
def moe_count_kernel(
    ids_ptr,  # [tokens, top_k], int32 or int64
    map_ptr,  # [given] or None
    slots_ptr,  # [slots] int32
    counts_ptr,  # [blocks, experts] int32
    slots,
    size,  # slots of a block
    top_k,
    stride_it,
    stride_ik,
    given,
    experts,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Note each slot's expert, and count the slots of each expert in a block."""
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    i = tl.arange(0, SIZE)
    slot = block * size + i
    mask = (i < size) & (slot < slots)
    found = _moe_expert(ids_ptr, map_ptr, slot, mask, top_k, stride_it, stride_ik, given, experts)
    tl.store(slots_ptr + slot, found, mask=mask)
    count = tl.histogram(tl.maximum(found, 0), EXPERTS, mask=mask & (found >= 0))
    tl.store(counts_ptr + block * experts + expert, count, mask=expert < experts)


@triton.jit
def _moe_cut(
    tiles_ptr,  # [tiles, 4] int32
    count_ptr,  # [1] int32
    total,
    start,
    expert,
    height,
    extra,
    tall,
    block,
    blocks,
):
    # Cut each expert's rows into tiles of `height`. What remains grows tiles by up to `extra` rows
    # if that suffices; if not, the rows are shared evenly by one tile more. An expert with more
    # than `tall` rows is an exception among the others: its tiles are that high.
    many = (tall > 0) & (total > tall)
    high = tl.where(many, tall, height)
    full = total // high
    rest = total - full * high
    grown = (rest > 0) & (rest <= full * extra) & (many == 0)
    count = tl.where(grown | (rest == 0), full, full + 1)
    end = tl.cumsum(count, 0)
    if block == 0:
        tl.store(count_ptr, tl.sum(count, 0))
    even = total // tl.maximum(count, 1)
    odd = total - even * count
    step = tl.where(grown, height, even)
    for j in range(block, tl.max(count, 0), blocks):
        more = tl.where(grown, tl.minimum(j * extra, rest), tl.minimum(j, odd))
        after = tl.where(grown, tl.minimum((j + 1) * extra, rest), tl.minimum(j + 1, odd))
        first = start + j * step + more
        last = start + (j + 1) * step + after
        at = tiles_ptr + (end - count + j) * 4
        tl.store(at, expert, mask=j < count)
        tl.store(at + 1, first, mask=j < count)
        tl.store(at + 2, last, mask=j < count)


@triton.jit(
    do_not_specialize=[
        "slots", "size", "blocks", "experts", "up_height", "up_extra", "up_tall", "down_height",
        "down_extra", "down_tall",
    ]
)  # fmt: skip
def moe_index_kernel(
    slots_ptr,  # [slots] int32: experts, or -1
    counts_ptr,  # [blocks, experts] int32
    sorted_ptr,  # [slots] int32
    up_tiles_ptr,  # [.., 4] int32
    down_tiles_ptr,  # [.., 4] int32; unused if ONE
    counted_ptr,  # [2] int32: tiles of up and of down
    slots,
    size,  # slots of a block
    blocks,
    experts,
    up_height,
    up_extra,
    up_tall,
    down_height,
    down_extra,
    down_tall,
    ONE: tl.constexpr,  # up and down have the same tiles
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Order slots by expert, each expert's by number, and cut the experts' rows into tiles."""
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    all_counts = tl.zeros((ROWS, EXPERTS), tl.int32)
    earlier = tl.zeros((ROWS, EXPERTS), tl.int32)
    # Unrolled: what counts is how many loads are on their way.
    for first in tl.range(0, blocks, ROWS, loop_unroll_factor=4):
        row = first + tl.arange(0, ROWS)
        mask = (row < blocks)[:, None] & (expert < experts)[None, :]
        count = tl.load(counts_ptr + row[:, None] * experts + expert[None, :], mask=mask, other=0)
        all_counts += count
        earlier += tl.where((row < block)[:, None], count, 0)
    total = tl.sum(all_counts, 0)
    start = tl.cumsum(total, 0) - total
    i = tl.arange(0, SIZE)
    found = tl.load(
        slots_ptr + block * size + i, mask=(i < size) & (block * size + i < slots), other=-1
    )
    before = tl.zeros((SIZE, CHUNK), tl.int32)
    for first in tl.range(0, size, CHUNK, loop_unroll_factor=4):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(
            slots_ptr + block * size + j, mask=(j < size) & (block * size + j < slots), other=-1
        )
        same = (found[:, None] == other[None, :]) & (j[None, :] < i[:, None])
        before += same.to(tl.int32)
    place = tl.gather(start + tl.sum(earlier, 0), tl.maximum(found, 0), 0) + tl.sum(before, 1)
    tl.store(sorted_ptr + place, block * size + i, mask=found >= 0)
    _moe_cut(
        up_tiles_ptr, counted_ptr, total, start, expert, up_height, up_extra, up_tall, block, blocks
    )  # fmt: skip
    if not ONE:
        _moe_cut(
            down_tiles_ptr, counted_ptr + 1, total, start, expert, down_height, down_extra,
            down_tall, block, blocks,
        )  # fmt: skip


@triton.jit
def _moe_greater(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["rows", "experts", "height", "blocks"])
def moe_cut_kernel(
    offsets_ptr,  # [experts + 1] int64: first row of each expert
    tiles_ptr,  # [.., 4] int32
    counted_ptr,  # [1] int32
    rows,
    experts,
    height,
    blocks,
    EXPERTS: tl.constexpr,
):
    """Cut rows that are in order already into tiles."""
    expert = tl.arange(0, EXPERTS)
    mask = expert < experts
    first = tl.load(offsets_ptr + expert, mask=mask, other=0)
    after = tl.load(offsets_ptr + expert + 1, mask=mask, other=0)
    # Offsets that leave the rows or go back name none, and no tile may.
    first = tl.minimum(tl.maximum(first, 0), rows).to(tl.int32)
    after = tl.minimum(tl.maximum(after, 0), rows).to(tl.int32)
    start = tl.associative_scan(first, 0, _moe_greater)
    total = tl.where(mask, tl.associative_scan(after, 0, _moe_greater) - start, 0)
    _moe_cut(tiles_ptr, counted_ptr, total, start, expert, height, 0, 0, tl.program_id(0), blocks)


# ---------------------------------------------------------------------------------------- experts
@triton.jit
def _moe_activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    # Comparisons instead of minima: they keep NaN.
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-z)) * up
    else:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def _moe_place(program, tiles_ptr, tiles, columns, GROUP: tl.constexpr):
    # The tile and the column of a program: columns fastest, or GROUP tiles side by side, so that
    # they find a column's weights in L2.
    if GROUP == 0:
        tile = program // columns
        column = program - tile * columns
    else:
        group = program // (GROUP * columns)
        size = tl.minimum(tiles - group * GROUP, GROUP)
        rest = program - group * GROUP * columns
        column = rest // size
        tile = group * GROUP + rest - column * size
    expert = tl.load(tiles_ptr + tile * 4)
    first = tl.load(tiles_ptr + tile * 4 + 1)
    last = tl.load(tiles_ptr + tile * 4 + 2)
    return expert, first, last, column


@triton.jit
def _moe_load(at, mask, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _moe_weight(
    w, at, mask, expert, n, k, LAYOUT: tl.constexpr, GATES: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # One step's weights [N, K], rows from n on.
    if LAYOUT == "row boxes":
        if GATES == "halves":
            box = w.load([expert, 0, n, k])
        else:
            box = w.load([expert, n, k])
        return tl.reshape(box, (N, K))
    elif LAYOUT == "column boxes":
        return tl.reshape(w.load([expert, k, n]), (K, N)).T
    else:
        return _moe_load(at, mask, WHOLE)


@triton.jit
def _moe_dot(w, x, total, first, SWAP: tl.constexpr):
    # w [n, k], x [tokens, k]. Swapped, weights are the left operand: its 64 rows are then full
    # whatever the number of tokens.
    if w.dtype == tl.float32:
        # Each step is summed by itself: one long chain of float32 additions is less exact. What it
        # starts from is 0, but the compiler, which would make one chain again, does not know.
        zero = tl.zeros_like(total) + (first < 0).to(tl.float32)
        if SWAP:
            return total + tl.dot(w, x.T, zero, input_precision="ieee")
        else:
            return total + tl.dot(x, w.T, zero, input_precision="ieee")
    elif SWAP:
        return tl.dot(w, x.T, total)
    else:
        return tl.dot(x, w.T, total)


@triton.jit
def _moe_zeros(TOKENS: tl.constexpr, N: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        return tl.zeros((N, TOKENS), tl.float32)
    else:
        return tl.zeros((TOKENS, N), tl.float32)


@triton.jit
def _moe_products(
    x, x_at, more_at, w, w_at, up, up_at, first, expert, n, size, step_w,
    TWO: tl.constexpr, LAYOUT: tl.constexpr, GATES: tl.constexpr, X_BOXES: tl.constexpr,
    TOKENS: tl.constexpr, EXTRA: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Sums over k: of w and (if TWO) of up, for TOKENS rows and for EXTRA more.
    k = tl.arange(0, K)
    a = _moe_zeros(TOKENS, N, SWAP)
    b = tl.zeros((1,), tl.float32)
    c = tl.zeros((1,), tl.float32)
    d = tl.zeros((1,), tl.float32)
    if TWO:
        b = _moe_zeros(TOKENS, N, SWAP)
    if EXTRA > 0:
        c = _moe_zeros(EXTRA, N, SWAP)
        if TWO:
            d = _moe_zeros(EXTRA, N, SWAP)
    for step in tl.range(0, tl.cdiv(size, K), num_stages=STAGES):
        mask = (step * K + k < size)[None, :]
        if X_BOXES:
            rows = x.load([first, step * K])
        else:
            rows = _moe_load(x_at, mask, WHOLE)
            x_at += K
        weight = _moe_weight(w, w_at, mask, expert, n, step * K, LAYOUT, GATES, N, K, WHOLE)
        a = _moe_dot(weight, rows, a, first, SWAP)
        more = rows
        if EXTRA > 0:
            more = _moe_load(more_at, mask, WHOLE)
            more_at += K
            c = _moe_dot(weight, more, c, first, SWAP)
        if LAYOUT == "rows" or LAYOUT == "columns":
            w_at += step_w
        if TWO:
            weight = _moe_weight(up, up_at, mask, expert, n, step * K, LAYOUT, GATES, N, K, WHOLE)
            b = _moe_dot(weight, rows, b, first, SWAP)
            if EXTRA > 0:
                d = _moe_dot(weight, more, d, first, SWAP)
            if LAYOUT == "rows" or LAYOUT == "columns":
                up_at += step_w
    return a, b, c, d


@triton.jit
def _moe_store_up(
    a, b, h_ptr, gate_bias_ptr, up_bias_ptr, row, last, expert, column, inner, stride_be, stride_bn,
    alpha, limit, ACTIVATION: tl.constexpr, GATES: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, SWAP: tl.constexpr, UP_FIRST: tl.constexpr,
):  # fmt: skip
    # Activate the sums of gate and up and store them as rows of h.
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATES == "halves":
        a, b = tl.reshape(a, (TOKENS, 2, BLOCK_N)).permute(0, 2, 1).split()
        if UP_FIRST:
            swapped = a
            a = b
            b = swapped
    elif GATES == "pairs":
        if SWAP:
            a, b = tl.reshape(a, (BLOCK_N, 2, TOKENS)).permute(0, 2, 1).split()
        else:
            a, b = tl.reshape(a, (TOKENS, BLOCK_N, 2)).split()
    if gate_bias_ptr is not None:
        at = expert.to(tl.int64) * stride_be + n * stride_bn
        gate_bias = tl.load(gate_bias_ptr + at, mask=n < inner, other=0.0).to(tl.float32)
        up_bias = tl.load(up_bias_ptr + at, mask=n < inner, other=0.0).to(tl.float32)
        if SWAP:
            a += gate_bias[:, None]
            b += up_bias[:, None]
        else:
            a += gate_bias[None, :]
            b += up_bias[None, :]
    h = _moe_activate(a, b, alpha, limit, ACTIVATION).to(h_ptr.dtype.element_ty)
    if SWAP:
        h = h.T
    mask = (row < last)[:, None] & (n < inner)[None, :]
    tl.store(h_ptr + row.to(tl.int64)[:, None] * inner + n[None, :], h, mask=mask)


@triton.jit
def _moe_up_tile(
    x_ptr, gate, up, h_ptr, gate_bias_ptr, up_bias_ptr, sorted_ptr, expert, first, last, column,
    top_k, inner, hidden, stride_xt, stride_we, stride_wn, stride_wk, stride_be, stride_bn, alpha,
    limit, ACTIVATION: tl.constexpr, LAYOUT: tl.constexpr, GATES: tl.constexpr,
    UP_FIRST: tl.constexpr, TOKENS: tl.constexpr, EXTRA: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Rows first to last of h, TOKENS and EXTRA at most, in one column of the weights.
    TWO: tl.constexpr = GATES == "apart"
    N: tl.constexpr = BLOCK_N if TWO else 2 * BLOCK_N
    n0 = column * N if GATES == "pairs" else column * BLOCK_N
    k = tl.arange(0, BLOCK_K)
    row = first + tl.arange(0, TOKENS)
    token = tl.minimum(row, last - 1)
    if sorted_ptr is not None:
        token = tl.load(sorted_ptr + token) // top_k
    x_at = x_ptr + token.to(tl.int64)[:, None] * stride_xt + k[None, :]
    more_at = x_at
    more_row = row
    if EXTRA > 0:
        more_row = first + TOKENS + tl.arange(0, EXTRA)
        more = tl.minimum(more_row, last - 1)
        if sorted_ptr is not None:
            more = tl.load(sorted_ptr + more) // top_k
        more_at = x_ptr + more.to(tl.int64)[:, None] * stride_xt + k[None, :]
    w_at = gate
    up_at = up
    step_w = 0
    if LAYOUT == "rows" or LAYOUT == "columns":
        n = tl.minimum(n0 + tl.arange(0, N), inner * (2 if GATES == "pairs" else 1) - 1)
        if LAYOUT == "rows":
            at = n.to(tl.int64)[:, None] * stride_wn + k[None, :]
            step_w = BLOCK_K
        else:
            at = n[:, None] + k.to(tl.int64)[None, :] * stride_wk
            step_w = stride_wk.to(tl.int64) * BLOCK_K
        w_at = gate + expert.to(tl.int64) * stride_we + at
        if TWO:
            up_at = up + expert.to(tl.int64) * stride_we + at
    a, b, c, d = _moe_products(
        x_ptr, x_at, more_at, gate, w_at, up, up_at, first, expert, n0, hidden, step_w, TWO, LAYOUT,
        GATES, False, TOKENS, EXTRA, N, BLOCK_K, STAGES, SWAP, WHOLE,
    )  # fmt: skip
    _moe_store_up(
        a, b, h_ptr, gate_bias_ptr, up_bias_ptr, row, last, expert, column, inner, stride_be,
        stride_bn, alpha, limit, ACTIVATION, GATES, TOKENS, BLOCK_N, SWAP, UP_FIRST,
    )  # fmt: skip
    if EXTRA > 0:
        _moe_store_up(
            c, d, h_ptr, gate_bias_ptr, up_bias_ptr, more_row, last, expert, column, inner,
            stride_be, stride_bn, alpha, limit, ACTIVATION, GATES, EXTRA, BLOCK_N, SWAP, UP_FIRST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["top_k", "alpha", "limit"])
def moe_up_kernel(
    x_ptr,  # [tokens, hidden], dense along hidden
    gate,  # [experts, inner, hidden]; halves and pairs: both
    up,  # [experts, inner, hidden]; unused unless they are apart
    h_ptr,  # [rows, inner]
    gate_bias_ptr,  # [experts, inner] or None
    up_bias_ptr,  # [experts, inner] or None
    sorted_ptr,  # [rows] int32: slots, or None if row and token are one
    tiles_ptr,  # [tiles, 4] int32
    counted_ptr,  # [1] int32
    top_k,
    inner,
    hidden,
    stride_xt,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    LAYOUT: tl.constexpr,
    GATES: tl.constexpr,
    UP_FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    EXTRA: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TALL_STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,  # hidden is a multiple of BLOCK_K
):
    """Gather tokens, multiply by gate and up, activate: h = act(x gate^T, x up^T)."""
    program = tl.program_id(0)
    tiles = tl.load(counted_ptr)
    columns = tl.cdiv(inner, BLOCK_N)
    if program < tiles * columns:
        expert, first, last, column = _moe_place(program, tiles_ptr, tiles, columns, GROUP)
        # A loop for each height that tiles have here.
        if TALL > 0 and last - first > TOKENS + EXTRA:
            _moe_up_tile(
                x_ptr, gate, up, h_ptr, gate_bias_ptr, up_bias_ptr, sorted_ptr, expert, first, last,
                column, top_k, inner, hidden, stride_xt, stride_we, stride_wn, stride_wk, stride_be,
                stride_bn, alpha, limit, ACTIVATION, LAYOUT, GATES, UP_FIRST, TALL, 0, BLOCK_N,
                BLOCK_K, TALL_STAGES, SWAP, WHOLE,
            )  # fmt: skip
        elif EXTRA > 0 and last - first > TOKENS:
            _moe_up_tile(
                x_ptr, gate, up, h_ptr, gate_bias_ptr, up_bias_ptr, sorted_ptr, expert, first, last,
                column, top_k, inner, hidden, stride_xt, stride_we, stride_wn, stride_wk, stride_be,
                stride_bn, alpha, limit, ACTIVATION, LAYOUT, GATES, UP_FIRST, TOKENS, EXTRA,
                BLOCK_N, BLOCK_K, STAGES, SWAP, WHOLE,
            )  # fmt: skip
        else:
            _moe_up_tile(
                x_ptr, gate, up, h_ptr, gate_bias_ptr, up_bias_ptr, sorted_ptr, expert, first, last,
                column, top_k, inner, hidden, stride_xt, stride_we, stride_wn, stride_wk, stride_be,
                stride_bn, alpha, limit, ACTIVATION, LAYOUT, GATES, UP_FIRST, TOKENS, 0, BLOCK_N,
                BLOCK_K, STAGES, SWAP, WHOLE,
            )  # fmt: skip


@triton.jit
def _moe_store_down(
    total, y_ptr, bias_ptr, sorted_ptr, row, last, expert, column, hidden, stride_be, stride_bn,
    BLOCK_N: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        at = expert.to(tl.int64) * stride_be + n * stride_bn
        bias = tl.load(bias_ptr + at, mask=n < hidden, other=0.0).to(tl.float32)
        if SWAP:
            total += bias[:, None]
        else:
            total += bias[None, :]
    slot = row
    if sorted_ptr is not None:
        slot = tl.load(sorted_ptr + row, mask=row < last, other=0)
    y = total.to(y_ptr.dtype.element_ty)
    if SWAP:
        y = y.T
    mask = (row < last)[:, None] & (n < hidden)[None, :]
    tl.store(y_ptr + slot.to(tl.int64)[:, None] * hidden + n[None, :], y, mask=mask)


@triton.jit
def _moe_down_tile(
    h, h_ptr, w, y_ptr, bias_ptr, sorted_ptr, expert, first, last, column, hidden, inner,
    stride_ht, stride_we, stride_wn, stride_wk, stride_be, stride_bn, LAYOUT: tl.constexpr,
    H_BOXES: tl.constexpr, TOKENS: tl.constexpr, EXTRA: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Rows first to last of h, TOKENS and EXTRA at most, times one column of the weights.
    n0 = column * BLOCK_N
    k = tl.arange(0, BLOCK_K)
    row = first + tl.arange(0, TOKENS)
    h_at = h_ptr + tl.minimum(row, last - 1).to(tl.int64)[:, None] * stride_ht + k[None, :]
    more_at = h_at
    more_row = row
    if EXTRA > 0:
        more_row = first + TOKENS + tl.arange(0, EXTRA)
        more = tl.minimum(more_row, last - 1)
        more_at = h_ptr + more.to(tl.int64)[:, None] * stride_ht + k[None, :]
    w_at = w
    step_w = 0
    if LAYOUT == "rows" or LAYOUT == "columns":
        n = tl.minimum(n0 + tl.arange(0, BLOCK_N), hidden - 1)
        if LAYOUT == "rows":
            at = n.to(tl.int64)[:, None] * stride_wn + k[None, :]
            step_w = BLOCK_K
        else:
            at = n[:, None] + k.to(tl.int64)[None, :] * stride_wk
            step_w = stride_wk.to(tl.int64) * BLOCK_K
        w_at = w + expert.to(tl.int64) * stride_we + at
    a, b, c, d = _moe_products(
        h, h_at, more_at, w, w_at, w, w_at, first, expert, n0, inner, step_w, False, LAYOUT,
        "apart", H_BOXES, TOKENS, EXTRA, BLOCK_N, BLOCK_K, STAGES, SWAP, WHOLE,
    )  # fmt: skip
    _moe_store_down(
        a, y_ptr, bias_ptr, sorted_ptr, row, last, expert, column, hidden, stride_be, stride_bn,
        BLOCK_N, SWAP,
    )  # fmt: skip
    if EXTRA > 0:
        _moe_store_down(
            c, y_ptr, bias_ptr, sorted_ptr, more_row, last, expert, column, hidden, stride_be,
            stride_bn, BLOCK_N, SWAP,
        )  # fmt: skip


@triton.jit
def moe_down_kernel(
    h,  # [rows, inner], a descriptor if H_BOXES
    h_ptr,  # [rows, inner]
    w,  # [experts, hidden, inner]
    y_ptr,  # [slots, hidden]
    bias_ptr,  # [experts, hidden] or None
    sorted_ptr,  # [rows] int32: slots, or None if row and slot are one
    tiles_ptr,  # [tiles, 4] int32
    counted_ptr,  # [1] int32
    hidden,
    inner,
    stride_ht,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    LAYOUT: tl.constexpr,
    H_BOXES: tl.constexpr,
    TOKENS: tl.constexpr,
    EXTRA: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TALL_STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,  # inner is a multiple of BLOCK_K
):
    """Multiply rows by their expert's weight and store them by slot: y = h w^T + bias."""
    program = tl.program_id(0)
    tiles = tl.load(counted_ptr)
    columns = tl.cdiv(hidden, BLOCK_N)
    if program < tiles * columns:
        expert, first, last, column = _moe_place(program, tiles_ptr, tiles, columns, GROUP)
        # A loop for each height that tiles have here.
        if TALL > 0 and last - first > TOKENS + EXTRA:
            _moe_down_tile(
                h, h_ptr, w, y_ptr, bias_ptr, sorted_ptr, expert, first, last, column, hidden,
                inner, stride_ht, stride_we, stride_wn, stride_wk, stride_be, stride_bn, LAYOUT,
                False, TALL, 0, BLOCK_N, BLOCK_K, TALL_STAGES, SWAP, WHOLE,
            )  # fmt: skip
        elif EXTRA > 0 and last - first > TOKENS:
            _moe_down_tile(
                h, h_ptr, w, y_ptr, bias_ptr, sorted_ptr, expert, first, last, column, hidden,
                inner, stride_ht, stride_we, stride_wn, stride_wk, stride_be, stride_bn, LAYOUT,
                False, TOKENS, EXTRA, BLOCK_N, BLOCK_K, STAGES, SWAP, WHOLE,
            )  # fmt: skip
        else:
            _moe_down_tile(
                h, h_ptr, w, y_ptr, bias_ptr, sorted_ptr, expert, first, last, column, hidden,
                inner, stride_ht, stride_we, stride_wn, stride_wk, stride_be, stride_bn, LAYOUT,
                H_BOXES, TOKENS, 0, BLOCK_N, BLOCK_K, STAGES, SWAP, WHOLE,
            )  # fmt: skip


# ------------------------------------------------------------------------------------ combination
@triton.jit(do_not_specialize=["rows", "parts", "stride_wt", "stride_wk"])
def moe_combine_kernel(
    y_ptr,  # [slots, hidden], by slot, or by place if places_ptr is there
    slots_ptr,  # [slots] int32: experts, -1 for a slot without output; or None
    places_ptr,  # [slots] int64, or None
    weights_ptr,  # [tokens, top_k]
    out_ptr,  # [tokens, hidden]
    rows,
    parts,  # programs of a token
    hidden,
    stride_wt,
    stride_wk,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum each token's outputs by weight, in float32, in the order of its choices."""
    program = tl.program_id(0)
    token = (program // parts).to(tl.int64)
    n = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        there = slot >= 0
        if slots_ptr is not None:
            there = tl.load(slots_ptr + slot) >= 0
        place = slot
        if places_ptr is not None:
            place = tl.load(places_ptr + slot).to(tl.int64)
            there = (place >= 0) & (place < rows)
        weight = tl.load(weights_ptr + token * stride_wt + choice * stride_wk).to(tl.float32)
        y = tl.load(y_ptr + place * hidden + n, mask=(n < hidden) & there, other=0.0)
        # A slot that is skipped adds nothing, whatever its weight.
        total += tl.where(there, weight, 0.0) * y.to(tl.float32)
    tl.store(out_ptr + token * hidden + n, total.to(out_ptr.dtype.element_ty), mask=n < hidden)


# --------------------------------------------------------------------------------- a few tokens
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
    expert = _moe_expert(
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
            x = _moe_load(x_at, mask, WHOLE).to(tl.float32)[None, :]
            x_at += BLOCK_K
            a += _moe_load(gate_at, mask[None, :], WHOLE).to(tl.float32) * x
            gate_at += BLOCK_K
            if GATES != "pairs":
                b += _moe_load(up_at, mask[None, :], WHOLE).to(tl.float32) * x
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
        h = _moe_activate(total, total_up, alpha, limit, ACTIVATION)
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
        expert = _moe_expert(
            ids_ptr, map_ptr, slot, slot >= 0, top_k, stride_it, stride_ik, given, experts
        )
        there = expert >= 0
        weight_at = token.to(tl.int64) * stride_rt + choice * stride_rk
        weight = tl.load(weights_ptr + weight_at).to(tl.float32)
        w_at = w_ptr + tl.maximum(expert, 0).to(tl.int64) * stride_we + n_at + k[None, :]
        w = _moe_load(w_at, (k < inner)[None, :], WHOLE)
        h_at = h_ptr + slot.to(tl.int64) * inner + k
        h = tl.load(h_at, mask=there & (k < inner), other=0.0).to(tl.float32)
        # A slot that is skipped adds nothing, whatever its weight.
        total += tl.where(there, w.to(tl.float32) * (h * weight)[None, :], 0.0)
    out = tl.sum(total, 1)
    if bias_ptr is not None:
        for choice in range(0, top_k):
            slot = token * top_k + choice
            expert = _moe_expert(
                ids_ptr, map_ptr, slot, slot >= 0, top_k, stride_it, stride_ik, given, experts
            )
            weight_at = token.to(tl.int64) * stride_rt + choice * stride_rk
            weight = tl.load(weights_ptr + weight_at).to(tl.float32)
            at = tl.maximum(expert, 0).to(tl.int64) * stride_be + n * stride_bn
            bias = tl.load(bias_ptr + at, mask=(n < hidden) & (expert >= 0), other=0.0)
            out += tl.where(expert >= 0, weight, 0.0) * bias.to(tl.float32)
    at = out_ptr + token.to(tl.int64) * hidden + n
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=n < hidden)
