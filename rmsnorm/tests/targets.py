"""Launches to compile for GPUs that are not there: every tuned configuration, and the heuristic's.

Tensors are on the meta device: sizes and strides are real, memory is not.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Those that each tile is compiled for: float16 differs from bfloat16 in the conversion alone.
TILE_DTYPES = DTYPES[1:]
# Widths where the heuristic's tile differs in kind: less than a line, heads, whole rows of a few
# thousand, the widest that fits registers, wider.
COLUMNS = (1, 64, 128, 1000, 2048, 4096, 5120, 8192, 16384, 32768)
ROWS = (1, 4096)
MULTIPROCESSORS = 132
# What the devices that tables ship for are: H200.
TUNED_ON = 90


def launches(kernel: ModuleType, shared_memory: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each launch on a GPU with that much shared memory, and its call."""
    call = Calls(kernel)
    seen = set()
    for operation, dtype, rows, n, tile in (
        *_heuristic(call, shared_memory),
        *_tuned(call),
    ):
        # The same tile compiles to the same code for all widths that are, or are not, one tile
        # and divide by 16.
        key = (operation, dtype, tile, n % 16 == 0, n == 1)
        if key not in seen:
            seen.add(key)
            name = f"{operation} {rows}x{n} {str(dtype).removeprefix('torch.')} {tile}"
            yield from call.named(name, operation, dtype, rows, n, tile)
    yield from call.options(shared_memory)


def _heuristic(
    call: "Calls", shared_memory: int
) -> Iterator[tuple[str, torch.dtype, int, int, Any]]:
    for dtype in TILE_DTYPES:
        for n in COLUMNS:
            for rows in ROWS:
                forward = call.config.forward_heuristic(rows, n, dtype.itemsize)
                yield "add_forward", dtype, rows, n, forward
                backward = call.config.backward_heuristic(rows, n, dtype.itemsize, shared_memory)
                yield "backward", dtype, rows, n, backward


def _tuned(call: "Calls") -> Iterator[tuple[str, torch.dtype, int, int, Any]]:
    if call.device.target_arch() != TUNED_ON:
        return  # no device of this target takes these tables
    for path in sorted(call.config.CONFIGS.glob("*.json")):
        for operation, by_dtype in json.loads(path.read_text()).items():
            kind = (
                call.config.BackwardConfig if operation == "backward" else call.config.ForwardConfig
            )
            for width, by_size in by_dtype.items():
                for dtype in (each for each in TILE_DTYPES if width == f"{each.itemsize * 8}bit"):
                    for n, by_rows in by_size.items():
                        for rows, entry in by_rows.items():
                            yield operation, dtype, int(rows), int(n), kind(**entry)


class Calls:
    """The kernel's launch functions, called with tensors made to measure."""

    def __init__(self, kernel: ModuleType) -> None:
        self.config = importlib.import_module(f"{kernel.__name__}.config")
        self.launch = importlib.import_module(f"{kernel.__name__}.launch")
        self.device = importlib.import_module(f"{kernel.__name__}._shared.device")
        self.as_rows = importlib.import_module(f"{kernel.__name__}._shared.rows").as_rows

    def named(
        self, name: str, operation: str, dtype: torch.dtype, rows: int, n: int, tile: Any
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the launches of one operation, with all the tensors it can take."""
        if operation == "forward":
            yield name, lambda: self.forward(dtype, rows, n, tile, residual=False, total=False)
        elif operation == "add_forward":
            yield name, lambda: self.forward(dtype, rows, n, tile)
        else:
            yield name, lambda: self.backward(dtype, rows, n, tile)

    def options(self, shared_memory: int) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what no configuration decides: optional tensors, layouts, rounding, sums."""
        rows, n = 4096, 4096
        for dtype in DTYPES:
            tile = self.config.forward_heuristic(rows, n, dtype.itemsize)
            wide = self.config.forward_heuristic(rows, 32768, dtype.itemsize)
            text = str(dtype).removeprefix("torch.")
            for option in ("weight", "bias", "residual", "total", "rstd", "before_weight", "flat"):
                yield (
                    f"forward {text} without {option}",
                    lambda dtype=dtype, option=option, tile=tile: self.forward(
                        dtype, rows, n, tile, **{option: False}
                    ),
                )
            yield (
                f"forward {text} wide, plain",
                lambda dtype=dtype, wide=wide: self.forward(
                    dtype, rows, 32768, wide, bias=False, residual=False, total=False
                ),
            )
            yield (
                f"sum {text}",
                lambda dtype=dtype: self.launch.sum_partials(
                    _empty(torch.float32, MULTIPROCESSORS, n),
                    _empty(dtype, n),
                    self.config.SUM_TILE,
                ),
            )
            yield (
                f"backward {text}, plain",
                lambda dtype=dtype: self.backward(
                    dtype,
                    rows,
                    n,
                    self.config.backward_heuristic(rows, n, dtype.itemsize, shared_memory),
                    plain=True,
                ),
            )
        # More rows than a 16-bit grid dimension holds, more elements than 31 bits.
        yield (
            "forward of 2^24 rows",
            lambda: self.forward(
                torch.bfloat16, 2**24, 256, self.config.forward_heuristic(2**24, 256, 2)
            ),
        )
        yield (
            "backward of a million columns",
            lambda: self.backward(
                torch.bfloat16,
                4096,
                2**20,
                self.config.backward_heuristic(4096, 2**20, 2, shared_memory),
            ),
        )

    def forward(
        self,
        dtype: torch.dtype,
        rows: int,
        n: int,
        tile: Any,
        *,
        weight: bool = True,
        bias: bool = True,
        residual: bool = True,
        total: bool = True,
        rstd: bool = True,
        before_weight: bool = True,
        flat: bool = True,
    ) -> None:
        x = _empty(dtype, rows, n) if flat else _heads(dtype, rows, n)
        period, (x_rows, residual_rows) = self.as_rows(x, torch.empty_like(x) if residual else None)
        self.launch.forward(
            x=x_rows,
            residual=residual_rows,
            period=period,
            weight=_empty(dtype, n) if weight else None,
            bias=_empty(dtype, n) if bias else None,
            eps=1e-6,
            offset=0.5,
            before_weight=before_weight,
            y=_empty(dtype, rows, n),
            total=_empty(dtype, rows, n) if residual and total else None,
            rstd=_empty(torch.float32, rows) if rstd else None,
            total_dtype=dtype,
            rows=rows,
            config=tile,
        )

    def backward(
        self, dtype: torch.dtype, rows: int, n: int, tile: Any, *, plain: bool = False
    ) -> None:
        x = _empty(dtype, rows, n)
        period, (dy, dtotal, h) = self.as_rows(x, None if plain else x, x)
        if tile.programs:
            launch = self.launch.backward
            split = sums = self.config.backward_programs(tile, rows, MULTIPROCESSORS)
        else:
            launch = self.launch.backward_blocked
            split = self.config.backward_block(rows, n, dtype.itemsize)
            sums = -(-rows // split)
        sum_dtype = dtype if sums == 1 else torch.float32
        launch(
            dy,
            dtotal,
            h,
            period,
            _empty(dtype, n),
            _empty(torch.float32, rows),
            0.5,
            not plain,
            x,
            _empty(sum_dtype, sums, n),
            None if plain else _empty(sum_dtype, sums, n),
            rows,
            split,
            tile,
        )


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _heads(dtype: torch.dtype, rows: int, n: int) -> torch.Tensor:
    """Rows that two strides describe: half of the heads of a fused projection."""
    return _empty(dtype, rows // 4, 8, n)[:, :4]
