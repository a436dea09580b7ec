"""What `scripts/tune.py` searches for this kernel: problems and the configurations to try."""

import itertools
from collections.abc import Iterator

import torch

from monorepo.search import Search

#: rows x columns: decode to training batches of common hidden sizes, and per-head norms.
SHAPES = (
    *((rows, 128) for rows in (16, 1024, 65536)),
    *((rows, 2048) for rows in (1, 16, 256, 2048, 16384)),
    *((rows, 4096) for rows in (1, 16, 256, 2048, 8192)),
    *((rows, 5120) for rows in (1, 16, 256, 2048, 8192)),
    *((rows, 7168) for rows in (1, 16, 256, 2048, 8192)),
    *((rows, 8192) for rows in (1, 16, 256, 2048, 16384)),
    *((rows, 16384) for rows in (1, 16, 256, 4096)),
)
#: float16 takes the same entries: they are kept by width, and bytes are what counts.
DTYPE = torch.bfloat16


def _forward_tiles(kernel, rows: int, n: int) -> Iterator[object]:
    config = kernel.config
    cover = 1 << (n - 1).bit_length()
    for block_m, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32)):
        per_thread = block_m * cover / (32 * warps)
        if block_m <= rows and block_m * cover <= max(8192, cover) and 4 <= per_thread <= 64:
            yield config.ForwardConfig(block_m, cover, warps, 1, 1)
    pieces = {piece for piece in (1024, 2048, 4096) if piece < n} | {cover}
    for block_n, warps, unroll in itertools.product(sorted(pieces), (2, 4, 8, 16), (1, 2, 4)):
        if n >= 2048 and rows >= 256 and 8 <= block_n / (32 * warps) <= 32:
            if unroll == 1 or block_n * unroll < 2 * n:
                yield config.ForwardConfig(1, block_n, warps, 2, unroll)


def _backward_tiles(kernel, rows: int, n: int) -> Iterator[object]:
    config = kernel.config
    cover = 1 << (n - 1).bit_length()
    for block_m, warps, stages, programs in itertools.product(
        (1, 2, 4, 8, 16, 32, 64), (4, 8, 16), (1, 2, 3, 4), (1, 2, 4)
    ):
        per_thread = block_m * cover / (32 * warps)
        if (
            16 < rows
            and cover <= config.WIDEST_TILE
            and block_m <= rows
            and block_m * cover <= config.WIDEST_TILE
            and 8 <= per_thread <= 32
            and 8 <= programs * warps <= 32
            and programs * stages * block_m * cover * 4 <= 3 * 2**16
        ):
            yield config.BackwardConfig(block_m, cover, warps, stages, programs)
    if rows <= 256 or n > config.WIDEST_TILE:
        for block_m, block_n, warps in itertools.product(
            (8, 16, 32), (1024, 2048, 4096, 8192), (4, 8, 16)
        ):
            if block_n <= max(1024, cover) and 4 <= block_n / (32 * warps) <= 32:
                yield config.BackwardConfig(block_m, block_n, warps, 1, 0)


def _poisoned(shape, dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def _prepare_forward(kernel, rows, n, dtype, fused_add):
    def prepare(copies: int):
        x = [torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(copies)]
        residual = [torch.randn_like(each) for each in x] if fused_add else None
        weight = torch.randn(n, device="cuda", dtype=dtype)
        y = [_poisoned((rows, n), dtype) for _ in range(copies)]
        total = [_poisoned((rows, n), dtype) for _ in range(copies)] if fused_add else None

        def run(i: int, config) -> list[torch.Tensor]:
            period, (x_rows, r_rows) = kernel.ops.as_rows(x[i], residual[i] if fused_add else None)
            kernel.launch.forward(
                x_rows, r_rows, period, weight, None, 1e-6, 0.0, False, y[i],
                total[i] if fused_add else None, None, dtype, rows, config,
            )  # fmt: skip
            return [y[i], total[i]] if fused_add else [y[i]]

        def wanted() -> list[torch.Tensor]:
            norm, sum_, _ = kernel.reference.forward(
                x[0], residual[0] if fused_add else None, weight, None, 1e-6, 0.0, False, dtype,
                dtype if fused_add else None,
            )  # fmt: skip
            return [norm, sum_] if fused_add else [norm]

        return run, wanted

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
            if config.programs:
                function = kernel.launch.backward
                split = count = kernel.config.backward_programs(config, rows, processors)
            else:
                function = kernel.launch.backward_blocked
                split = kernel.config.backward_block(rows, n, dtype.itemsize)
                count = -(-rows // split)
            out = dweight if count == 1 else sums[:count]
            function(
                dy_rows, None, x_rows, period, weight, rstd, 0.0, False, dx[i], out, None, rows,
                split, config,
            )  # fmt: skip
            if count > 1:
                kernel.launch.sum_partials(out, dweight, kernel.config.SUM_TILE)
            return [dx[i], dweight]

        def wanted() -> list[torch.Tensor]:
            gradient, sum_, _ = kernel.reference.backward(
                dy[0], None, x[0], weight, rstd, 0.0, False, dtype
            )
            return [gradient, sum_.to(dtype)]

        return run, wanted

    return prepare


def searches(kernel) -> Iterator[Search]:
    """Yield every problem, shape by shape."""
    width = f"{DTYPE.itemsize * 8}bit"
    for rows, n in SHAPES:
        tensor = rows * n * DTYPE.itemsize
        forward = tuple(_forward_tiles(kernel, rows, n))
        yield Search(
            "forward", width, n, rows, 2 * tensor, forward,
            _prepare_forward(kernel, rows, n, DTYPE, False),
        )  # fmt: skip
        yield Search(
            "add_forward", width, n, rows, 4 * tensor, forward,
            _prepare_forward(kernel, rows, n, DTYPE, True),
        )  # fmt: skip
        yield Search(
            "backward", width, n, rows, 3 * tensor, tuple(_backward_tiles(kernel, rows, n)),
            _prepare_backward(kernel, rows, n, DTYPE),
        )  # fmt: skip
