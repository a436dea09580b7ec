"""The order of slots and the cut into tiles, by the kernels themselves."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from .routing import part
from .test_config import tiles_of

#: Rows of a tile, what it may grow by, rows of a tall one.
HEIGHTS = ((16, 0, 0), (16, 16, 0), (16, 16, 64), (32, 0, 128), (64, 32, 128), (128, 0, 0))
GARBAGE = 0x7FFFFFFF


def choices(how: str, tokens: int, experts: int, top_k: int) -> Tensor:
    ids = torch.rand(tokens, experts).topk(top_k, -1).indices
    if how == "one expert":
        ids = torch.full_like(ids, experts - 1)
    elif how == "skewed":
        ids = torch.where(torch.rand(ids.shape) < 0.6, experts // 2, ids)
    elif how == "some skipped":
        ids[::3, 0], ids[1::4, -1] = -1, experts
    elif how == "all skipped":
        ids = torch.full_like(ids, -1)
    return ids


@pytest.mark.parametrize("heights", HEIGHTS, ids=str)
@pytest.mark.parametrize("how", ("even", "one expert", "skewed", "some skipped", "all skipped"))
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), ((1, 5, 2), (33, 7, 3), (300, 17, 2), (70, 130, 6))
)
def test_tiles_cover_every_row_once(
    kernel: ModuleType, device: str, uses_triton: bool, heights: tuple[int, int, int], how: str,
    tokens: int, experts: int, top_k: int,
) -> None:  # fmt: skip
    """Cases B35, B37, class 5: in order, of any number of experts, tables full of garbage before.

    Rows that no slot has stay as they were; the number of tiles never passes the grid's bound.
    """
    if not uses_triton:
        pytest.skip("the reference has no tiles")
    ops, config = part(kernel, "ops"), part(kernel, "config")
    tile = config.GemmConfig(*heights, 64, 64, 4, 2, False, False, False, False, 4)
    ids = choices(how, tokens, experts, top_k).to(device)
    block = config.block_tokens(config.bucket(tokens), top_k)
    most = config.most_tiles(ids.numel(), experts, tile.tokens)
    plan = ops._Plan(block, -(-tokens // block), tile, tile, most, most)
    tables = ops._tables(torch.empty(0, device=device), ids.numel(), experts, plan)
    for table in tables:
        table.fill_(GARBAGE)
    ops._count(tables, ids, None, experts, plan)
    ops._index(tables, experts, top_k, plan)

    flat = ids.flatten().cpu()
    known = (flat >= 0) & (flat < experts)
    assert torch.equal(tables.slots.cpu(), torch.where(known, flat, -1).int())
    order = torch.where(known, flat, experts).argsort(stable=True)[: int(known.sum())]
    assert torch.equal(tables.places.cpu()[: len(order)], order.int())
    assert bool((tables.places.cpu()[len(order) :] == GARBAGE).all())
    counts = flat[known].bincount(minlength=experts).tolist()
    wanted, first = [], 0
    for expert, count in enumerate(counts):
        for rows in tiles_of(count, *heights):
            wanted.append([expert, first, first + rows])
            first += rows
    assert tables.counted.cpu()[0] == len(wanted) <= most
    found = tables.up_tiles.cpu().view(-1, 4)
    assert found[: len(wanted), :3].tolist() == wanted
    assert bool((found[len(wanted) :] == GARBAGE).all())
