"""What `scripts/tune.py` searches for this kernel: problems and the configurations to try."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch

#: rows x columns: decode to training batches of common hidden sizes, and per-head norms.
SHAPES = (
    *((rows, 128) for rows in (16, 1024, 65536)),
    *((rows, 2048) for rows in (1, 16, 256, 2048, 16384)),
    *((rows, 4096) for rows in (1, 16, 256, 2048, 8192)),
    *((rows, 5120) for rows in (1, 16, 2048, 8192)),
    *((rows, 7168) for rows in (1, 16, 2048, 8192)),
    *((rows, 8192) for rows in (1, 16, 2048, 16384)),
    *((rows, 16384) for rows in (1, 16, 4096)),
)
DTYPES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Search:
    """One problem: how to run a configuration on the copy of index i, into poisoned outputs.

    `run(i, config)` returns the outputs; `reference(i)` what they have to agree with.
    """

    operation: str
    dtype: str
    size: int
    rows: int
    bytes_per_call: int
    candidates: tuple[object, ...]
    prepare: Callable[[int], tuple[Callable[[int, object], list[torch.Tensor]], object]]


def _forward_tiles(kernel, rows: int, n: int) -> Iterator[object]:
    config = kernel.config
    cover = 1 << (n - 1).bit_length()
    for block_m, warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)):
        per_thread = block_m * cover / (32 * warps)
        if block_m <= rows and block_m * cover <= max(8192, cover) and 4 <= per_thread <= 32:
            yield config.ForwardConfig(block_m, cover, warps)
            if rows >= 1024:
                for stages, programs in itertools.product((1, 2, 3), (1, 2, 4, 8)):
                    if 8 <= programs * warps <= 64:
                        yield config.ForwardConfig(block_m, cover, warps, stages, programs)
    for block_n, warps, stages in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16), (1, 2, 3)):
        if block_n < n and 8 <= block_n / (32 * warps) <= 32 and rows >= 1024:
            yield config.ForwardConfig(1, block_n, warps, stages)


def _backward_tiles(kernel, rows: int, n: int) -> Iterator[object]:
    config = kernel.config
    cover = 1 << (n - 1).bit_length()
    for block_m, warps, stages, programs in itertools.product(
        (1, 2, 4, 8, 16, 32, 64), (2, 4, 8, 16, 32), (1, 2, 3), (1, 2, 4, 8)
    ):
        per_thread = block_m * cover / (32 * warps)
        if (
            block_m <= rows
            and block_m * cover <= max(8192, cover)
            and 4 <= per_thread <= 32
            and 8 <= programs * warps <= 32
        ):
            yield config.BackwardConfig(block_m, cover, warps, stages, programs)
    if n >= 8192:
        for block_n, warps, stages in itertools.product((2048, 4096), (8, 16), (1, 2)):
            yield config.BackwardConfig(1, block_n, warps, stages, 2)


def _poisoned(shape, dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def _prepare_forward(kernel, rows, n, dtype, fused_add):
    def prepare(copies: int):
        x = [torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(copies)]
        residual = [torch.randn_like(each) for each in x] if fused_add else None
        weight = torch.randn(n, device="cuda", dtype=dtype)
        y = [_poisoned((rows, n), dtype) for _ in range(copies)]
        total = [_poisoned((rows, n), dtype) for _ in range(copies)] if fused_add else None

        processors = kernel.ops.multiprocessor_count(x[0].device)

        def run(i: int, config) -> list[torch.Tensor]:
            period, (x_rows, r_rows) = kernel.ops.as_rows(x[i], residual[i] if fused_add else None)
            kernel.launch.forward(
                x_rows, r_rows, period, weight, None, 1e-6, 0.0, False, y[i],
                total[i] if fused_add else None, None, dtype, rows,
                kernel.config.forward_programs(config, rows, n, processors), config,
            )  # fmt: skip
            return [y[i], total[i]] if fused_add else [y[i]]

        wanted, total_wanted, _ = kernel.reference.forward(
            x[0], residual[0] if fused_add else None, weight, None, 1e-6, 0.0, False, dtype,
            dtype if fused_add else None,
        )  # fmt: skip
        return run, [wanted, total_wanted] if fused_add else [wanted]

    return prepare


def _prepare_backward(kernel, rows, n, dtype):
    def prepare(copies: int):
        x = [torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(copies)]
        dy = [torch.randn_like(each) for each in x]
        weight = torch.randn(n, device="cuda", dtype=dtype)
        rstd = torch.rsqrt(x[0].float().pow(2).mean(-1) + 1e-6)
        dx = [_poisoned((rows, n), dtype) for _ in range(copies)]
        dweight = _poisoned((n,), dtype)
        processors = kernel.ops.multiprocessor_count(x[0].device)
        sums = _poisoned((processors * 32, n), torch.float32)

        def run(i: int, config) -> list[torch.Tensor]:
            period, (dy_rows, x_rows) = kernel.ops.as_rows(dy[i], x[i])
            programs = kernel.config.backward_programs(config, rows, n, processors)
            if config.block_n >= n:
                kernel.launch.backward(
                    dy_rows, None, x_rows, period, weight, rstd, 0.0, False, dx[i],
                    sums[:programs], None, rows, programs, config,
                )  # fmt: skip
            else:
                kernel.launch.backward_wide(
                    dy_rows, None, x_rows, period, weight, rstd, 0.0, dx[i], rows, config
                )
                kernel.launch.backward_weight(
                    dy_rows, x_rows, period, rstd, False, sums[:programs], None, rows, programs,
                    kernel.config.WIDE_WEIGHT_TILE,
                )  # fmt: skip
            kernel.launch.sum_partials(sums[:programs], dweight, kernel.config.SUM_TILE)
            return [dx[i], dweight]

        wanted, dweight_wanted, _ = kernel.reference.backward(
            dy[0], None, x[0], weight, rstd, 0.0, False, dtype
        )
        return run, [wanted, dweight_wanted.to(dtype)]

    return prepare


def searches(kernel) -> Iterator[Search]:
    """Yield every problem, largest candidates set first within a shape."""
    for dtype, (rows, n) in itertools.product(DTYPES, SHAPES):
        name = str(dtype).removeprefix("torch.")
        tensor = rows * n * dtype.itemsize
        forward = tuple(_forward_tiles(kernel, rows, n))
        yield Search(
            "forward", name, n, rows, 2 * tensor, forward,
            _prepare_forward(kernel, rows, n, dtype, False),
        )  # fmt: skip
        yield Search(
            "add_forward", name, n, rows, 4 * tensor, forward,
            _prepare_forward(kernel, rows, n, dtype, True),
        )  # fmt: skip
        yield Search(
            "backward", name, n, rows, 3 * tensor, tuple(_backward_tiles(kernel, rows, n)),
            _prepare_backward(kernel, rows, n, dtype),
        )  # fmt: skip
