"""Launches: grids, what is handed to Triton, and what tells one compiled kernel from another."""

from __future__ import annotations

import itertools
import os
from types import ModuleType

import pytest
import torch

from .oracle import ZEROS, part, weight

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="host code, the same with and without the interpreter",
)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


class Call:
    """What `launch.launch` was given."""

    def __init__(self, key, kernel, programs, tensors, scalars, constants, warps, registers=0):
        self.key, self.kernel, self.programs = key, kernel, programs
        self.tensors, self.scalars = tensors, scalars
        self.constants, self.warps, self.registers = constants, warps, registers

    def specialised(self) -> tuple[object, ...]:
        """Return all that Triton compiles by, alignment aside."""
        dtypes = tuple(None if each is None else each.dtype for each in self.tensors)
        return (
            self.kernel, dtypes, tuple(sorted(self.constants.items())), self.warps, self.registers
        )  # fmt: skip


@pytest.fixture
def calls(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Launches that are noted instead of made, as on an H200 that is not there."""
    made: list[Call] = []
    launch, config, ops = (part(kernel, name) for name in ("launch", "config", "ops"))
    monkeypatch.setattr(launch, "launch", lambda *given: made.append(Call(*given)))
    monkeypatch.setattr(launch, "on_nvidia", lambda: True)
    monkeypatch.setattr(ops, "uses_triton", lambda _: True)
    monkeypatch.setattr(ops, "_tile", ops._tile.__wrapped__)
    monkeypatch.setattr(
        config,
        "gemm_config",
        lambda tokens, n, k, after, _: config.heuristic(
            tokens, n, k, after_only=after, multiprocessors=132, shared_memory=227 << 10, arch=90
        ),
    )
    launch._constants.cache_clear()
    yield made
    launch._constants.cache_clear()


def empty_weight(kernel: ModuleType, n: int, k: int, group_size: int = 128):
    """Return a weight of real sizes without memory."""
    groups = part(kernel, "weight").group_count(k, group_size)
    return kernel.W4Weight(
        torch.empty(-(-k // 128), n, 32, dtype=torch.int16, device="meta"),
        torch.empty(groups, n, dtype=HALF, device="meta"),
        None,
        None,
        k,
        group_size,
    )


@pytest.mark.parametrize("tokens", (1, 16, 512, 513, 65535, 65536, 1_100_000))
@pytest.mark.parametrize("size", ((8, 32), (28672, 8192), (128256, 4096), (2**24 - 32, 128)))
def test_grid_fits(
    kernel: ModuleType,
    calls: list[Call],
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    tokens: int,
) -> None:
    """Case B28: one axis, and no number handed over that 32 bits do not hold."""
    arrivals = part(kernel, "_shared.arrivals")
    asked = []

    def counters(device: torch.device, count: int) -> torch.Tensor:
        asked.append(count)
        return torch.empty(count, dtype=torch.int32, device=device)

    monkeypatch.setattr(arrivals, "counters", counters)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, lambda *_, **__: None)
    n, k = size
    x = torch.empty(tokens, k, dtype=HALF, device="meta")
    y = kernel.w4a16_gemm(x, empty_weight(kernel, n, k))
    assert y.shape == (tokens, n)
    assert calls
    for call in calls:
        assert 1 <= call.programs < 2**31
        assert all(0 <= scalar < 2**31 for scalar in call.scalars), call.scalars
    # B119: more tiles than there are counters are not shared.
    assert all(count <= arrivals.MOST for count in asked)


@pytest.mark.parametrize("programs", (1, 3, 100, 10**6))
@pytest.mark.parametrize("n", (64, 64 * 16384, 64 * 16385, 64 * 20000))
def test_tiles_without_counters_are_not_shared(kernel: ModuleType, n: int, programs: int) -> None:
    """Each program then takes whole tiles, so no part of one is left for another to add."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    most = part(kernel, "_shared.arrivals").MOST
    tile = config.GemmConfig(16, 64, 4, 2, False, 0, programs)
    for steps in (1, 5, 64):
        per, shared, size = ops._shares(1, n, steps, tile)
        tiles = config.tiles(1, n, tile)
        assert per * -(-tiles * steps // per) >= tiles * steps
        if tiles > most:
            assert per % steps == 0 and size == 0
        assert shared <= most
        assert (size == 0) == (per % steps == 0)


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("scales", (HALF, FLOAT), ids=str)
@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
def test_tensors_of_a_launch(
    kernel: ModuleType, calls: list[Call], dtype: torch.dtype, scales: torch.dtype, zeros: str
) -> None:
    """The operands themselves, x in place, and workspace and counters as large as said."""
    w = weight(kernel, 136, 416, group_size=64, zeros=zeros, scales=scales)
    x = torch.randn(5, 512, dtype=dtype)[:, 16:432]
    bias = torch.randn(136)
    y = kernel.w4a16_gemm(x, w, bias)
    (call,) = calls
    given_x, *operands, given_y, parts, counters = call.tensors
    assert given_x.data_ptr() == x.data_ptr() and given_x.stride(0) == 512
    assert all(a is b for a, b in zip(operands, (w.qweight, w.scales, w.zeros, bias), strict=True))
    assert given_y.data_ptr() == y.data_ptr()
    m, n8, k32, stride, shift, groups, steps, per, items, m_tiles = call.scalars
    assert (m, n8, k32, stride, groups, steps, m_tiles) == (5, 17, 13, 32, 7, 4, 1)
    assert items == steps * -(-136 // call.constants["BLOCK_N"])
    assert (call.programs - 1) * per < items <= call.programs * per
    assert counters.dtype is torch.int32 and not bool(counters.any())
    if per % steps:
        size = call.constants["BLOCK_M"] * call.constants["BLOCK_N"]
        assert parts.numel() == 2 * call.programs * size
        assert counters.numel() >= items // steps
    assert not (call.constants["SCALE_BEFORE"] and (zeros == "float" or scales is FLOAT))


@pytest.mark.parametrize(
    ("group_size", "group", "features"),
    ((32, 32, None), (64, 64, None), (128, 128, 128), (256, 128, 256), (512, 128, 512),
     (1024, 128, 1024), (-1, 128, None)),
)  # fmt: skip
def test_groups_of_a_launch(
    kernel: ModuleType, calls: list[Call], group_size: int, group: int, features: int | None
) -> None:
    """Large groups are blocks of 128 by a shift, a single one by a shift that leaves nothing."""
    w = weight(kernel, 8, 1152, group_size=group_size)
    kernel.w4a16_gemm(torch.randn(1, 1152, dtype=HALF), w)
    (call,) = calls
    shift = call.scalars[4]
    assert call.constants["GROUP"] == group
    for step in range(9):
        if features is not None:
            assert step >> shift == step * 128 // features
        elif group_size == -1:
            assert step >> shift == 0


def test_keys_tell_launches_apart(kernel: ModuleType, calls: list[Call]) -> None:
    """A compiled kernel is found again by its key: two that differ must have two."""
    for dtype, zeros, scales, bias, group_size, k, tokens in itertools.product(
        (HALF, BFLOAT), ZEROS, (HALF, BFLOAT, FLOAT), (None, HALF, FLOAT), (32, 128, 256, -1),
        (128, 160), (1, 9, 33, 64, 65),
    ):  # fmt: skip
        w = weight(kernel, 8, k, group_size=group_size, zeros=zeros, scales=scales)
        x = torch.empty(tokens, k, dtype=dtype)
        b = None if bias is None else torch.empty(8, dtype=bias)
        kernel.w4a16_gemm(x, w, b)
    for dtype, zeros, scales in itertools.product((HALF, BFLOAT, FLOAT), ZEROS, (HALF, FLOAT)):
        kernel.dequantize(weight(kernel, 8, 32, zeros=zeros, scales=scales), dtype)
    by_key: dict[object, set[object]] = {}
    for call in calls:
        by_key.setdefault(call.key, set()).add(call.specialised())
    assert all(len(found) == 1 for found in by_key.values())
    distinct = {call.specialised() for call in calls}
    assert len(distinct) > 100


def test_one_key_for_all_tokens_of_a_bucket(kernel: ModuleType, calls: list[Call]) -> None:
    """Case B65: numbers of tokens, features and strides are no part of what is compiled."""
    for first, last in ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128)):
        compiled = set()
        for n, k in ((136, 512), (520, 512), (136, 1024)):
            w = weight(kernel, n, k)
            calls.clear()
            for tokens in range(first, last + 1):
                kernel.w4a16_gemm(torch.empty(tokens, k + 32, dtype=HALF)[:, :k], w)
            assert len({call.key for call in calls}) == 1
            compiled |= {call.specialised() for call in calls}
        assert len(compiled) == 1  # as long as they get one tile, whose programs do not count


def test_no_launch_for_nothing(kernel: ModuleType, calls: list[Call]) -> None:
    """Case B44: a grid without programs is an error to a driver."""
    w = weight(kernel, 8, 32)
    for shape in ((0, 32), (2, 0, 32)):
        assert kernel.w4a16_gemm(torch.empty(shape, dtype=HALF), w).shape == (*shape[:-1], 8)
    assert calls == []
