# Copied from shared/jit_split.py by scripts/sync_shared.py: edit it there.
"""Triton helpers for work that programs share by one number: items per program.

Work items are (tile, step) pairs in one line, and program c takes items [c * per, (c + 1) * per).
With a `per` that divides a tile's steps this is split-K, with any other it is stream-K, and with
all of a tile's steps it is a tile a program. A program that holds part of a tile leaves its sum in
float32; the one that arrives last adds the parts in the programs' order, so that results do not
depend on who came when. Nothing waits, and only the arrivals are counted atomically.
"""

import triton
import triton.language as tl


@triton.jit
def split_arrive(partial, tile, steps, per, program, parts_ptr, arrivals_ptr, offsets, mask, SIZE):
    # Leave this program's part of a tile; return whether all parts are there now.
    first = (tile * steps) // per
    last = ((tile + 1) * steps - 1) // per
    # A program holds parts of two tiles at most: the one it starts in and the one it ends in.
    slot = program * 2 + (tile != (program * per) // steps).to(tl.int32)
    tl.store(parts_ptr + slot.to(tl.int64) * SIZE + offsets, partial, mask=mask)
    tl.debug_barrier()  # every thread's part is written before the arrival is
    arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
    return arrived == last - first


@triton.jit
def split_collect(
    total,
    tile,
    steps,
    per,
    parts_ptr,
    arrivals_ptr,
    offsets,
    mask,
    SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    # Add all parts of a tile to `total`, in order, and make its counter ready for the next call.
    # UNROLL parts are on their way at a time: their latency is most of what sharing costs.
    first = (tile * steps) // per
    last = ((tile + 1) * steps - 1) // per
    for program in tl.range(first, last + 1, loop_unroll_factor=UNROLL):
        slot = program * 2 + (tile != (program * per) // steps).to(tl.int32)
        # From L2: other multiprocessors wrote them.
        at = parts_ptr + slot.to(tl.int64) * SIZE + offsets
        if mask is None:
            total += tl.load(at, cache_modifier=".cg")
        else:
            total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(arrivals_ptr + tile, 0)
    return total
