"""Triton bodies of the grouped products, tile by tile, and of the sum of each token's outputs.

`LAYOUT` says how a weight [experts, n, k] is read: "rows" (dense along k) and "columns" (dense
along n) by pointers, "row boxes" and "column boxes" through TMA descriptors.
`GATES` says where gate and up are: "apart" (two weights, two products), "halves" (one box of both,
one product) or "pairs" (rows 2n and 2n + 1 of one weight, one product).
"""

import triton
import triton.language as tl


@triton.jit
def moe_activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
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
def moe_load(at, mask, WHOLE: tl.constexpr):
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
        return moe_load(at, mask, WHOLE)


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
            rows = moe_load(x_at, mask, WHOLE)
            x_at += K
        weight = _moe_weight(w, w_at, mask, expert, n, step * K, LAYOUT, GATES, N, K, WHOLE)
        a = _moe_dot(weight, rows, a, first, SWAP)
        more = rows
        if EXTRA > 0:
            more = moe_load(more_at, mask, WHOLE)
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
    h = moe_activate(a, b, alpha, limit, ACTIVATION).to(h_ptr.dtype.element_ty)
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
