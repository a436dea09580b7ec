"""One problem of `scripts/tune.py`, as each kernel's `benchmarks/tuning.py` states it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Search:
    """One problem: how to run a configuration on the copy of index i, into poisoned outputs.

    `prepare(copies)` returns `run` and `wanted`: `run(i, config)` returns the outputs on copy i,
    `wanted()` what those on copy 0 have to agree with. With one copy it is only compiled: what does
    not change the code may then be smaller.
    """

    operation: str
    dtype: str
    size: int | str
    rows: int
    bytes_per_call: int
    candidates: tuple[object, ...]
    prepare: Callable[
        [int],
        tuple[Callable[[int, object], list[torch.Tensor]], Callable[[], list[torch.Tensor]]],
    ]
