"""The launches whose machine code is looked at: decoding, on the tiles that are taken for it."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType


def launches(kernel: ModuleType, shared_memory: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the launches of 1 and 16 tokens: the heuristic's, and those of the tables."""
    spec = importlib.util.spec_from_file_location("targets", Path(__file__).with_name("targets.py"))
    assert spec and spec.loader
    targets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(targets)
    call = targets.Calls(kernel, shared_memory)
    tiles = {(n, tile) for n, tile in (*call.by_heuristic(), *call.tuned()) if tile.block_m <= 16}
    for tokens, tile in sorted(tiles, key=str):
        for dtype in (targets.HALF, targets.BFLOAT):
            yield call.gemm(tokens, tile, dtype)
            yield call.gemm(tokens, tile, dtype, zeros=targets.torch.int16)
