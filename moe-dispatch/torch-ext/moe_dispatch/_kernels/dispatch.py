"""Triton bodies of the dispatch: slots counted and ordered by expert, rows cut into tiles."""

import triton
import triton.language as tl


@triton.jit
def moe_expert(ids_ptr, map_ptr, slot, mask, top_k, stride_it, stride_ik, given, experts):
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
    found = moe_expert(ids_ptr, map_ptr, slot, mask, top_k, stride_it, stride_ik, given, experts)
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
