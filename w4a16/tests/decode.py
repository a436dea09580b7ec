"""The launches whose machine code is looked at: decoding, on the tiles that are taken for it."""

import dataclasses
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
    tiles = {
        (tokens, dataclasses.replace(tile, programs=targets.MULTIPROCESSORS))
        for tokens, tile in (*call.by_heuristic(), *call.tuned())
        if tile.block_m <= 16
    }
    for tile in sorted({tile for _, tile in tiles}, key=str):
        yield call.gemm(tile.block_m, tile, targets.HALF)
        yield call.gemm(tile.block_m, tile, targets.BFLOAT, zeros=targets.torch.int16)
