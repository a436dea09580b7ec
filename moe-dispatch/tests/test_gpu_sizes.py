"""Sizes of models, shipped tiles, and offsets past 32 bits, on a real GPU."""

from __future__ import annotations

import dataclasses
import json
from types import ModuleType

import pytest
import torch
from torch import Tensor

from monorepo.numerics import FACTOR, check_tensor

from .gpu import MODELS, first_tokens, layer, model, needs_memory
from .oracle import Allocations, Problem, check, check_call, choices, force, problem
from .routing import check_ids, part

pytestmark = pytest.mark.gpu
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)


def check_ends(p: Problem, out: Tensor) -> None:
    """Check the first and the last 64 tokens."""
    for ends in (slice(None, 64), slice(-64, None)):
        check(p.but(x=p.x[ends], ids=p.ids[ends], weights=p.weights[ends]), out[ends])


def test_gates_past_32_bits(kernel: ModuleType) -> None:
    """Case B01: tokens * top_k * 2 * inner > 2^31."""
    needs_memory(20)
    p = problem(
        135_000, experts=8, top_k=8, hidden=128, inner=1024, dtype=BFLOAT, device="cuda"
    )  # fmt: skip
    assert p.ids.numel() * 2 * 1024 > 2**31
    check_ends(p, p.call(kernel))


@pytest.mark.parametrize("size", ((2112, 64), (64, 2112)), ids=("outputs", "gates"))
def test_rows_past_32_bits(kernel: ModuleType, size: tuple[int, int]) -> None:
    """Case B05, class 1: more than 2^31 elements of y or of h in one pass."""
    needs_memory(24)
    hidden, inner = size
    tokens = part(kernel, "config").MOST_TOKENS
    p = problem(
        tokens, experts=32, top_k=32, hidden=hidden, inner=inner, dtype=BFLOAT, device="cuda"
    )  # fmt: skip
    assert tokens * 32 * max(size) > 2**31
    check_ends(p, p.call(kernel))


def test_tokens_past_32_bits(kernel: ModuleType) -> None:
    """Case B05, class 1: more than 2^31 elements of x and of the result, in one pass and two."""
    needs_memory(40)
    most, hidden = part(kernel, "config").MOST_TOKENS, 66_048
    for tokens in (most, most + 5000):
        p = problem(
            tokens, experts=3, top_k=1, hidden=hidden, inner=32, dtype=BFLOAT, device="cuda"
        )  # fmt: skip
        assert p.x.numel() > 2**31
        check_ends(p, p.call(kernel))
        router = torch.randn(3, hidden, device="cuda", dtype=BFLOAT) * hidden**-0.5
        gate, up = p.gate_up.chunk(2, 1)
        out, ids, mix = kernel.fused_moe_forward(p.x, router, gate, up, p.down, 3, 1)
        check_ends(p.but(ids=ids, weights=mix), out)
        del p, out


def test_rows_far_apart(kernel: ModuleType) -> None:
    """Class 1: strides of x that reach past 2^31 elements."""
    needs_memory(10)
    p = problem(100, experts=8, hidden=128, dtype=HALF, device="cuda")
    stride = 2**31 // 96
    stride -= stride % 8
    far = torch.empty(99 * stride + 128, device="cuda", dtype=HALF).as_strided(
        (100, 128), (stride, 1)
    )
    far.copy_(p.x)
    assert 99 * stride > 2**31
    for tokens in (1, 100):
        wanted = first_tokens(p, tokens).call(kernel)
        assert torch.equal(first_tokens(p.but(x=far), tokens).call(kernel), wanted)
    assert torch.equal(first_tokens(p.but(x=far[99:]), 1).call(kernel),
                       first_tokens(p.but(x=p.x[99:]), 1).call(kernel))  # fmt: skip


@pytest.mark.parametrize("layout", ("fused", "interleaved", "transposed"))
def test_expert_stride_past_32_bits(kernel: ModuleType, layout: str) -> None:
    """Case B02: expert 1 lies more than 2^31 elements after expert 0."""
    needs_memory(12)
    for dtype in (HALF, FLOAT) if layout == "fused" else (HALF,):
        p = problem(
            40, experts=2, top_k=1, hidden=32, inner=32, dtype=dtype, device="cuda", layout=layout
        )  # fmt: skip
        p = p.but(ids=torch.ones_like(p.ids))
        p.ids[3] = 0
        stride = 2**31 + 64
        whole = torch.empty(stride + 8192, device="cuda", dtype=dtype)
        views = []
        for lead, weight in ((0, p.gate_up), (4096, p.down)):
            strides = stride, *weight.stride()[1:]
            views.append(whole[lead:].as_strided(weight.shape, strides).copy_(weight))
        far = p.but(gate_up=views[0], down=views[1])
        for tokens in (1, 40):
            check_call(kernel, first_tokens(far, tokens))
            assert torch.equal(
                first_tokens(far, tokens).call(kernel), first_tokens(p, tokens).call(kernel)
            )
        del whole, views, far


def test_gates_and_ups_far_apart(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B02 for weights of their own, further apart than 32 bits tell, in both orders."""
    needs_memory(8)
    x, router, gate, up, down = layer(70, HALF, experts=4, hidden=64, inner=32)
    whole = torch.empty(2**31 + 2 * gate.numel(), device="cuda", dtype=HALF)
    near = whole[: gate.numel()].view(gate.shape)
    far = whole[-gate.numel() :].view(gate.shape)
    tile = part(kernel, "config").GemmConfig(64, 0, 0, 64, 64, 4, 3, False, True, False, True, 0)
    for tokens, wide in ((1, False), (70, False), (70, True)):
        if wide:
            force(kernel, monkeypatch, tile, dataclasses.replace(tile, wide=False))
        wanted = kernel.fused_moe_forward(x[:tokens], router, gate, up, down, 4, 2)
        for low, high in ((near, far), (far, near)):
            low.copy_(gate)
            high.copy_(up)
            found = kernel.fused_moe_forward(x[:tokens], router, low, high, down, 4, 2)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_real_sizes(kernel: ModuleType, name: str, dtype: torch.dtype) -> None:
    """All experts, and only a few of them (class 14); the same bits again."""
    needs_memory(16)
    whole = model(2050, name, dtype, dtype if name.startswith("gpt-oss") else None)
    experts, top_k = whole.down.shape[0], whole.ids.shape[1]
    for tokens in (1, 2, 8, 33, 129, 513, 2050):
        p = first_tokens(whole, tokens)
        out = check_call(kernel, p)
        assert torch.equal(out, p.call(kernel))
        few = experts - 1 - choices(tokens, top_k + 1, top_k, "cuda")
        check_call(kernel, p.but(ids=few))


def shipped(kernel: ModuleType) -> list[tuple[str, str, str, int]]:
    """Return operation, width, layer and tokens of all entries of this device's table."""
    config = part(kernel, "config")
    name = part(kernel, "_shared.device").device_name(torch.device("cuda", 0))
    path = config.CONFIGS / f"{name}.json"
    if not path.exists():
        return []
    return [
        (operation, width, size, int(tokens))
        for operation, widths in json.loads(path.read_text()).items()
        for width, sizes in widths.items()
        for size, entries in sizes.items()
        for tokens in entries
    ]


def test_shipped_tiles(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases B08, B62: every entry of the table on its own layer, outputs full of NaN before."""
    entries = shipped(kernel)
    if not entries:
        pytest.skip("no table ships for this GPU")
    allocations = Allocations(kernel, monkeypatch)
    layers: dict[tuple[str, str], set[int]] = {}
    for operation, width, size, tokens in entries:
        if operation != "score":
            layers.setdefault((width, size), set()).add(tokens)
    for (width, size), counts in layers.items():
        experts, top_k, hidden, inner = (int(each) for each in size.split("x"))
        needs_memory(8 * experts * hidden * inner * int(width.removesuffix("bit")) / 8 / 2**30 + 16)
        for dtype in (HALF, BFLOAT) if width == "16bit" else (FLOAT,):
            whole = problem(
                max(counts), experts=experts, top_k=top_k, hidden=hidden, inner=inner, dtype=dtype,
                device="cuda",
            )  # fmt: skip
            for tokens in sorted(counts):
                for some in {tokens, max(tokens * 3 // 4, 1)}:
                    out = first_tokens(whole, some).call(kernel)
                    allocations.check()
                    check(first_tokens(whole, some), out)
            del whole, out


def test_shipped_routers(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the router's product; the experts' weights may be anything."""
    entries = [entry for entry in shipped(kernel) if entry[0] == "score"]
    if not entries:
        pytest.skip("no table ships for this GPU")
    allocations = Allocations(kernel, monkeypatch)
    for _, width, size, tokens in entries:
        experts, top_k, hidden, inner = (int(each) for each in size.split("x"))
        needs_memory(3 * experts * hidden * inner * int(width.removesuffix("bit")) / 8 / 2**30 + 8)
        for dtype in (HALF, BFLOAT) if width == "16bit" else (FLOAT,):
            x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
            router = torch.randn(experts, hidden, device="cuda", dtype=dtype) * hidden**-0.5
            gate, up = torch.empty(experts, 2 * inner, hidden, dtype=dtype, device="cuda").chunk(
                2, 1
            )
            down = torch.empty(experts, hidden, inner, dtype=dtype, device="cuda")
            _, ids, mix = kernel.fused_moe_forward(x, router, gate, up, down, experts, top_k)
            allocations.check()
            check_ids(ids, experts)
            exact, peer = x.double() @ router.double().T, x.float() @ router.float().T
            # Logits that differ by less than the rounding of both may be told apart either way.
            close = 2 * FACTOR * float((peer - exact).abs().max())
            least = exact.sort(-1, descending=True).values[:, top_k - 1 : top_k]
            assert bool((exact.gather(1, ids) >= least - close).all())
            weights = (each.softmax(-1).gather(1, ids) for each in (exact, peer))
            check_tensor(mix, next(weights), next(weights).to(dtype))
            del gate, up, down


@pytest.mark.parametrize("rows", (1, 8, 20, 40, 90, 150, 220))
def test_tiles_of_the_heuristic(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Case B62: the tiles for so many rows an expert, each alone on poisoned memory."""
    allocations = Allocations(kernel, monkeypatch)
    config = part(kernel, "config")
    device = config.of_device(torch.device("cuda", 0))
    for dtype in DTYPES:
        for layout in ("fused", "interleaved", "transposed"):
            with monkeypatch.context() as patch:
                tiles = (
                    config.heuristic(rows, dtype.itemsize, device, gates=gates)
                    for gates in (True, False)
                )
                force(kernel, patch, *tiles, decodes=False)
                # Full tiles, tiles with remainders of all kinds, and none at all.
                counts = (0, 1, rows, rows + 1, 2 * rows + 17, 129, 0, 64, 150, 200)
                ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])
                ids = ids[torch.randperm(len(ids))].to("cuda").unsqueeze(1)
                p = problem(
                    len(ids), experts=len(counts), top_k=1, hidden=520, inner=264, dtype=dtype,
                    device="cuda", layout=layout, bias=dtype,
                )  # fmt: skip
                p = p.but(ids=ids)
                out = p.call(kernel)
            allocations.check()
            check(p, out)
