"""Launches to compile for GPUs that are not there: every tuned configuration, and the heuristic's.

Tensors are on the meta device: sizes and strides are real, memory is not.
"""

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
#: Out x in features of the heuristic's launches, and the tokens of each bucket.
SIZES = (11008, 4096)
LARGE = (28672, 8192)
TOKENS = (1, 16, 32, 64, 128, 512)
MULTIPROCESSORS = 108
#: What the devices that tables ship for are: H200.
TUNED_ON = 90


def launches(kernel: ModuleType, shared_memory: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each launch on a GPU with that much shared memory, and its call."""
    call = Calls(kernel, shared_memory)
    seen = set()
    for tokens, tile in (*call.by_heuristic(), *call.tuned()):
        # Sizes and programs are numbers to the compiled code, bfloat16 a version of its own.
        tile = dataclasses.replace(tile, programs=MULTIPROCESSORS)
        if tile not in seen:
            seen.add(tile)
            for dtype in (HALF, BFLOAT):
                yield call.gemm(tokens, tile, dtype)
    for tokens in (8, 64, 128):
        tile = call.heuristic(tokens)
        for group_size in (32, 64):
            yield call.gemm(tokens, tile, HALF, group_size=group_size)
        yield call.gemm(tokens, tile, BFLOAT, zeros=torch.int16)
        yield call.gemm(tokens, tile, HALF, zeros=torch.int16, k=4064, bias=HALF)
        yield call.gemm(tokens, tile, HALF, zeros=torch.int16, group_size=32)
        if tokens > call.config.MOST_FUSED_AFTER:
            continue
        after = call.heuristic(tokens, after_only=True)
        yield call.gemm(tokens, after, HALF, zeros=torch.float32, scales=FLOAT, bias=FLOAT)
        yield call.gemm(
            tokens, after, BFLOAT, zeros=torch.float32, scales=FLOAT, group_size=32, k=4064
        )
    for dtype in (HALF, BFLOAT, FLOAT):
        yield call.dequantize(dtype, 128, None)
        yield call.dequantize(dtype, 32, torch.int16)
    yield call.dequantize(HALF, 64, torch.float32)


class Calls:
    """The kernel's launch functions, called with tensors made to measure."""

    def __init__(self, kernel: ModuleType, shared_memory: int) -> None:
        self.config = importlib.import_module(f"{kernel.__name__}.config")
        self.launch = importlib.import_module(f"{kernel.__name__}.launch")
        self.weight = importlib.import_module(f"{kernel.__name__}.weight")
        self.device = importlib.import_module(f"{kernel.__name__}._shared.device")
        self.shared_memory = shared_memory

    def heuristic(
        self, tokens: int, *, after_only: bool = False, sizes: tuple[int, int] = SIZES
    ) -> Any:
        return self.config.heuristic(
            self.config.bucket(tokens),
            *sizes,
            after_only=after_only,
            multiprocessors=MULTIPROCESSORS,
            shared_memory=self.shared_memory,
            arch=self.device.target_arch(),
        )

    def by_heuristic(self) -> Iterator[tuple[int, Any]]:
        for tokens in TOKENS:
            for sizes in (SIZES, LARGE):
                yield tokens, self.heuristic(tokens, sizes=sizes)

    def tuned(self) -> Iterator[tuple[int, Any]]:
        if self.device.target_arch() != TUNED_ON:
            return  # no device of this target takes these tables
        for path in sorted(self.config.CONFIGS.glob("*.json")):
            for by_size in json.loads(path.read_text())["gemm"].values():
                for by_tokens in by_size.values():
                    for tokens, entry in by_tokens.items():
                        yield int(tokens), self.config.tuned(entry)

    def gemm(
        self,
        tokens: int,
        tile: Any,
        dtype: torch.dtype,
        *,
        group_size: int = 128,
        zeros: torch.dtype | None = None,
        scales: torch.dtype | None = None,
        bias: torch.dtype | None = None,
        k: int = SIZES[1],
    ) -> tuple[str, Callable[[], None]]:
        n = SIZES[0]
        weight = self._weight(n, k, group_size, scales or dtype, zeros)
        text = ("gemm", tokens, dtype, tile, f"groups of {group_size}", zeros, scales, bias, k)

        def launch() -> None:
            words = _empty(torch.int32, 2 * MULTIPROCESSORS * tile.block_m * tile.block_n)
            self.launch.gemm(
                _empty(dtype, tokens, k),
                weight,
                _empty(bias, n) if bias else None,
                _empty(dtype, tokens, n),
                words,
                _empty(torch.int32, 16384),
                self.config.steps_per_program(tokens, n, weight.qweight.shape[0], tile),
                tile,
            )

        return " ".join(map(str, text)), launch

    def dequantize(
        self, dtype: torch.dtype, group_size: int, zeros: torch.dtype | None
    ) -> tuple[str, Callable[[], None]]:
        n, k = SIZES
        weight = self._weight(n, k, group_size, HALF, zeros)
        return f"dequantize {dtype} groups of {group_size} {zeros}", lambda: self.launch.dequantize(
            weight, _empty(dtype, n, k), 0, self.config.DEQUANTIZE
        )

    def _weight(
        self, n: int, k: int, group_size: int, scales: torch.dtype, zeros: torch.dtype | None
    ) -> Any:
        groups = -(-k // group_size)
        return self.weight.W4Weight(
            _empty(torch.int16, -(-k // 128), n, 32),
            _empty(scales, groups, n),
            _empty(zeros, groups, n) if zeros else None,
            None,
            k,
            group_size,
        )


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
