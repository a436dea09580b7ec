"""What `scripts/tune.py` searches for this kernel: problems and the configurations to try."""

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from monorepo.search import Search

#: In x out features: the linear layers of Llama 2 and 3, Qwen3, DeepSeek-V3 (some fused).
SHAPES = (
    (8192, 28672),
    (5120, 25600),
    (7168, 18432),
    (4096, 11008),
    (7168, 2048),
    (4096, 4096),
    (4096, 6144),
    (4096, 28672),
    (14336, 4096),
    (11008, 4096),
    (5120, 5120),
    (25600, 5120),
    (8192, 8192),
    (8192, 10240),
    (28672, 8192),
    (18432, 7168),
)
#: float16 and bfloat16 take the same entries: what differs is a few instructions.
DTYPE = torch.float16
GROUP_SIZE = 128

# (tokens, rows, warps, stages, scale before, most registers) of tiles by bucket of tokens.
_DECODE = (
    (128, 2, 3), (128, 2, 4), (128, 4, 4), (64, 1, 4), (64, 1, 6), (64, 2, 3), (64, 2, 4),
    (32, 1, 4), (32, 1, 6), (256, 4, 3),
)  # fmt: skip
_LARGE = (
    (128, 128, 4, 3, True, 0), (128, 128, 4, 2, True, 0), (128, 128, 8, 3, True, 0),
    (128, 128, 8, 2, True, 128), (128, 256, 8, 3, True, 0), (128, 64, 4, 3, True, 0),
    (64, 128, 4, 4, True, 0), (64, 128, 4, 3, True, 168), (64, 256, 8, 4, True, 0),
)  # fmt: skip
TILES = {
    8: tuple((8, *tile, False, 0) for tile in _DECODE),
    16: (*((16, *tile, False, 0) for tile in _DECODE), (16, 256, 8, 3, False, 0)),
    32: (
        (32, 128, 4, 3, False, 0), (32, 128, 4, 4, False, 0), (32, 128, 4, 3, False, 168),
        (32, 128, 2, 3, False, 0), (32, 64, 4, 4, False, 0), (32, 64, 2, 4, False, 0),
        (32, 256, 4, 3, False, 0), (32, 256, 4, 4, False, 0), (32, 256, 8, 3, False, 128),
        (32, 256, 8, 4, False, 0),
    ),
    64: (
        (64, 128, 4, 3, True, 0), (64, 128, 4, 4, True, 0), (64, 128, 4, 3, True, 168),
        (64, 256, 8, 3, True, 0), (64, 256, 8, 4, True, 0), (64, 64, 4, 4, True, 0),
        (64, 64, 4, 3, True, 128), (64, 128, 4, 4, False, 0),
    ),
    128: _LARGE,
    256: (*_LARGE, (256, 128, 8, 2, True, 0), (256, 128, 8, 3, True, 0)),
    512: (*_LARGE, (256, 128, 8, 2, True, 0), (256, 128, 8, 3, True, 0)),
}  # fmt: skip


def candidates(kernel, tokens: int, k: int, n: int, multiprocessors: int) -> Iterator[object]:
    """Yield every tile of a bucket with every sensible number of programs."""
    steps = -(-k // 128)
    for tile in TILES[tokens]:
        config = kernel.config.GemmConfig(*tile, programs=1)
        count = kernel.config.tiles(tokens, n, config)
        found = {count}
        for split in (2, 3, 4, 6, 8, 12, 16):
            found.add(count * split)
        for resident in (1, 2, 3, 4, 6, 8):
            found.add(multiprocessors * resident)
        for programs in sorted(found):
            most = 12 if tokens < 64 else 4
            enough = multiprocessors // 2 <= programs <= most * multiprocessors
            if programs == count or (enough and count <= programs <= count * steps // 3):
                yield dataclasses.replace(config, programs=programs)
            elif enough and programs < count:
                yield dataclasses.replace(config, programs=programs)


def _prepare(kernel, tokens: int, k: int, n: int):
    def prepare(copies: int):
        scale = torch.full((-(-k // GROUP_SIZE), n), 0.01, device="cuda", dtype=DTYPE)
        shape = (-(-k // 128), n, 32)
        weights = [  # every pattern of bits is one of codes
            kernel.W4Weight(
                torch.randint(-(2**15), 2**15, shape, device="cuda", dtype=torch.int16),
                scale * torch.rand_like(scale), None, None, k, GROUP_SIZE,
            )
            for _ in range(copies)
        ]  # fmt: skip
        x = torch.randn(tokens, k, device="cuda", dtype=DTYPE)
        y = torch.full((copies, tokens, n), float("nan"), device="cuda", dtype=DTYPE)

        def run(i: int, config) -> list[torch.Tensor]:
            kernel.ops.fused(x, weights[i], None, y[i], config)
            return [y[i]]

        def wanted() -> list[torch.Tensor]:
            dense = kernel.dequantize(weights[0], torch.float32)
            return [x.double() @ dense.double().T]

        return run, wanted

    return prepare


def searches(kernel) -> Iterator[Search]:
    """Yield every problem, shape by shape."""
    multiprocessors = kernel.config.multiprocessor_count(torch.device("cuda", 0))
    for (k, n), tokens in itertools.product(SHAPES, TILES):
        moved = k * n // 2 + k * n // GROUP_SIZE * DTYPE.itemsize
        moved += tokens * (k + n) * DTYPE.itemsize
        yield Search(
            "gemm",
            f"{DTYPE.itemsize * 8}bit",
            f"{k}x{n}",
            tokens,
            moved,
            tuple(candidates(kernel, tokens, k, n, multiprocessors)),
            _prepare(kernel, tokens, k, n),
        )
