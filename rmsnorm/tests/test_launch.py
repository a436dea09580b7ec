"""Launches: each configuration alone, on guarded outputs; grids; offsets past 2^31 elements."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from imports import fresh

from .layouts import GUARD, guarded
from .oracle import DTYPES, part, problem
from .test_backward import check_gradients, random_like, use_backward_tile
from .test_forward import check_forward

ROWS = (1, 16, 64, 128, 1024, 4096, 65536)  # buckets of row counts
WIDTHS = (48, 64, 128, 1000, 2048, 4096, 5120, 16384, 16400)


class Outputs:
    """What a module allocates without a value: NaN instead, with NaN around it."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module.__name__
        self.given: list[Tensor] = []

    def instead_of(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def guarded_allocate(*args: object, **kwargs: object) -> Tensor:
            plain = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals["__name__"] != self.module:
                return plain
            self.given.append(guarded(plain.shape, plain.dtype, str(plain.device)))
            return self.given[-1]

        return guarded_allocate

    def check(self) -> None:
        """Raise if memory beside an output was written, or an element of one was not."""
        assert self.given
        for output in self.given:
            whole = torch.zeros(0, dtype=output.dtype, device=output.device)
            whole.set_(output.untyped_storage())
            assert bool(whole[:GUARD].isnan().all()) and bool(whole[-GUARD:].isnan().all())
            assert not bool(output.isnan().any())


@pytest.fixture
def outputs(kernel: ModuleType, uses_triton: bool, monkeypatch: pytest.MonkeyPatch) -> Outputs:
    if not uses_triton:
        pytest.skip("the reference has no configurations and writes into nothing")
    outputs = Outputs(part(kernel, "ops"))
    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, outputs.instead_of(getattr(owner, name)))
    return outputs


def shipped(config: ModuleType, operation: str, kind: type) -> set[tuple[int, object]]:
    """Return width and configuration of all that the tables name."""
    found = set()
    for path in sorted(config.CONFIGS.glob("*.json")):
        for by_size in json.loads(path.read_text()).get(operation, {}).values():
            for n, by_rows in by_size.items():
                found |= {(int(n), kind(**entry)) for entry in by_rows.values()}
    return found


@pytest.mark.parametrize("fused_add", (False, True), ids=("norm", "add and norm"))
@pytest.mark.parametrize("n", (*WIDTHS, "shipped"))
def test_each_forward_configuration(
    kernel: ModuleType,
    device: str,
    outputs: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    n: int | str,
    fused_add: bool,
) -> None:
    """Case B62: none relies on what another left in the output."""
    config = part(kernel, "config")
    where = torch.zeros(0, device=device).device
    if n == "shipped":
        operation = "add_forward" if fused_add else "forward"
        tiles = shipped(config, operation, config.ForwardConfig)
    else:
        tiles = {
            (n, config.forward_config(rows, n, dtype, fused_add, where))
            for rows in ROWS
            for dtype in (torch.float16, torch.float32)
        }
    for width, tile in tiles:
        monkeypatch.setattr(config, "forward_config", lambda *_, tile=tile: tile)
        rows = tile.block_m + 1  # the last tile of rows is partly empty
        residual = torch.float16 if fused_add else None
        given = problem((rows, width), torch.float16, device, residual=residual)
        outputs.given.clear()
        check_forward(kernel, given)
        assert len(outputs.given) == 1 + fused_add, tile
        outputs.check()


@pytest.mark.parametrize("n", (*WIDTHS, "shipped"))
def test_each_backward_configuration(
    kernel: ModuleType,
    device: str,
    outputs: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    n: int | str,
) -> None:
    """Case B62, with all outputs that a tile can be asked for."""
    config = part(kernel, "config")
    where = torch.zeros(0, device=device).device
    if n == "shipped":
        tiles = shipped(config, "backward", config.BackwardConfig)
    else:
        tiles = {
            (n, config.backward_config(rows, n, dtype, where))
            for rows in ROWS
            for dtype in (torch.float16, torch.float32)
        }
    for width, tile in tiles:
        monkeypatch.setattr(config, "backward_config", lambda *_, tile=tile: tile)
        shape = tile.block_m + 1, width
        given = problem(shape, torch.float16, device, weight=torch.float16, bias=torch.float16)
        outputs.given.clear()
        check_gradients(kernel, given, random_like(given.x))
        # y and rstd; dx, dweight, dbias, and perhaps partial sums of the last two.
        assert len(outputs.given) in (5, 7), tile
        outputs.check()


@pytest.mark.parametrize("tile", ("whole rows", "blocks"))
@pytest.mark.parametrize("block_m", (1, 2, 8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_tile_is_right(
    kernel: ModuleType,
    device: str,
    outputs: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    block_m: int,
    tile: str,
) -> None:
    """A configuration decides the speed, never the values: rows at once or in pieces."""
    config = part(kernel, "config")
    use_backward_tile(kernel, monkeypatch, tile, block_m)
    for n in (15, 64, 70):
        for block_n in (128, 32):
            passes = 1 if block_n >= n and tile == "whole rows" else 2
            forward = config.ForwardConfig(block_m, block_n, num_warps=1, passes=passes, unroll=2)
            monkeypatch.setattr(config, "forward_config", lambda *_, forward=forward: forward)
            given = problem((7, n), dtype, device, residual=dtype, bias=dtype, weight=dtype)
            check_forward(kernel, given)
        check_gradients(kernel, given, random_like(given.x), random_like(given.x))
    outputs.check()


class Recorder:
    """Stands for a Triton kernel: notes the grids, runs nothing."""

    def __init__(self, grids: list[tuple[int, ...]]) -> None:
        self.grids = grids

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.grids.append(grid)
        return lambda *_, **__: None


@pytest.mark.parametrize(
    "shape",
    ((65535, 16), (65536, 16), (1_100_000, 16), (2**22, 2), (70_000, 128), (3, 2**21)),
    ids=str,
)
def test_grid_fits(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    """Case B28: axes 1 and 2 hold at most 65535 programs, whatever the number of rows."""
    kernels, grids = part(kernel, "_kernels"), []
    for name in vars(kernels):
        if name.endswith("_kernel"):
            monkeypatch.setattr(kernels, name, Recorder(grids))
    monkeypatch.setattr(part(kernel, "ops"), "uses_triton", lambda _: True)
    x = torch.zeros((), dtype=torch.float16).expand(shape).requires_grad_()
    weight = torch.ones(shape[-1], requires_grad=True)
    y, total = kernel.add_rmsnorm(x, x, weight)
    torch.autograd.backward((y, total), (x.detach(), x.detach()))
    assert len(grids) >= 2
    for grid in grids:
        axes = (*grid, 1, 1)[:3]
        assert 1 <= axes[0] < 2**31 and all(1 <= axis <= 65535 for axis in axes[1:]), grid


FAR = """
    import sys, torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/rmsnorm", version=1)
    rows, n, stride = 3, 64, 2**30 + 8
    def far(name):
        # A file of holes: only the pages that are touched take memory.
        size = (rows - 1) * stride + n
        flat = torch.from_file(f"{sys.argv[1]}/{name}", shared=True, size=size, dtype=torch.float16)
        view = flat.as_strided((rows, n), (stride, 1))
        view.copy_(torch.randn(rows, n))
        return view

    x, residual, dy, dtotal = (far(name) for name in ("x", "residual", "dy", "dtotal"))
    def run(x, residual, dy, dtotal):
        leaves = [t.detach().requires_grad_() for t in (x, residual)]
        weight = torch.ones(n, requires_grad=True)
        y, total = kernel.add_rmsnorm(*leaves, weight)
        alone = kernel.rmsnorm(leaves[0], weight)
        torch.autograd.backward((y, total, alone), (dy, dtotal, dy))
        return [y, total, alone, weight.grad, *(leaf.grad.contiguous() for leaf in leaves)]

    near = run(*(t.contiguous() for t in (x, residual, dy, dtotal)))
    for got, wanted in zip(run(x, residual, dy, dtotal), near, strict=True):
        assert torch.equal(got, wanted)
    assert x.stride(0) * (rows - 1) > 2**31
"""


def test_rows_past_2_to_the_31_elements(kernel: ModuleType, device: str, tmp_path: Path) -> None:
    """Cases B01, B04; norm.md 5, #1: offsets are 64-bit. A wrong one would end the process."""
    if device == "cuda":
        pytest.skip("on a GPU test_gpu.py does this with real memory")
    fresh(FAR, str(tmp_path))


def test_large_storage_is_left_to_triton_on_amd(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There Triton compiles 32-bit addresses for storage below 2 GB: B04 by the way of a cache."""
    launcher = part(kernel, "_shared.launcher")
    monkeypatch.setattr(launcher, "_SHORT_ADDRESSES", 1024)
    monkeypatch.setattr(launcher, "_compiled", {})
    asked = []

    class Compiles:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*_: object, **__: object) -> object:
                asked.append(grid)
                return Compiled()

            return launch

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_: None

    small, large = torch.empty(16), torch.empty(1024)
    for tensor, compilations in ((small, 1), (small, 1), (large, 2), (large[:16], 3), (small, 3)):
        launcher.launch("key", Compiles(), 1, (tensor, None), (), {}, 1)
        assert len(asked) == compilations
