"""The stages one by one, as the predecessor has them: order, copies, grouped products, sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from monorepo.numerics import check_tensor

from .oracle import INTERPRETED
from .routing import part

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
NAN = math.nan


def ids_of(kind: str, tokens: int, experts: int, top_k: int, device: str) -> Tensor:
    """Return choices: at random, all the same few experts, or none of every second one."""
    if kind == "one":
        ids = (experts - 1 - torch.arange(top_k)).expand(tokens, top_k).clone()
    else:
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
        if kind == "gaps" and experts >= 2 * top_k:
            ids = torch.stack([torch.randperm(experts // 2)[:top_k] * 2 + 1 for _ in range(tokens)])
    return ids.to(device)


def randn(*shape: int, device: str, dtype: torch.dtype = FLOAT, scale: int = 1) -> Tensor:
    """Return random numbers, divided by the root of a size that sums go over."""
    return (torch.randn(shape) / math.sqrt(scale)).to(device, dtype)


def by_expert(offsets: Tensor) -> list[tuple[int, int, int]]:
    """Return experts, their first rows and the rows after their last."""
    bounds = offsets.tolist()
    return [
        (e, first, last) for e, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]


# ------------------------------------------------------------------------------------------- order
@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind", ("random", "one", "gaps"))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    ((1, 1, 1), (3, 5, 2), (129, 60, 4), (1025, 7, 3), (17, 384, 8), (2, 1024, 32)),
)
def test_permutation_indices(
    kernel: ModuleType, device: str, tokens: int, experts: int, top_k: int, dtype: torch.dtype,
    kind: str,
) -> None:  # fmt: skip
    """Case B35, class 5: every slot once, by expert and then by number."""
    ids = ids_of(kind, tokens, experts, top_k, device)
    before = ids.clone()
    order, offsets, restore = kernel.compute_permutation_indices(ids.to(dtype), experts)
    assert order.dtype is offsets.dtype is restore.dtype is torch.int64
    flat = ids.reshape(-1).tolist()
    wanted = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert order.tolist() == wanted
    assert offsets.tolist() == [
        sum(1 for each in flat if each < expert) for expert in range(experts + 1)
    ]
    slots = torch.arange(len(flat), device=device)
    assert torch.equal(order[restore], slots) and torch.equal(restore[order], slots)
    assert torch.equal(ids, before)


def test_permutation_of_strided_ids(kernel: ModuleType, device: str) -> None:
    """Class 10."""
    ids = ids_of("random", 9, 12, 4, device)
    wanted = kernel.compute_permutation_indices(ids, 12)
    for strided in (ids.t().contiguous().t(), torch.stack((ids, -ids), -1)[..., 0]):
        found = kernel.compute_permutation_indices(strided, 12)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", (HALF, BFLOAT, FLOAT), ids=str)
def test_permute(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Rows are copies of tokens, bit by bit, NaN included."""
    x, ids = randn(9, 24, device=device, dtype=dtype), ids_of("gaps", 9, 12, 3, device)
    x[4, 3] = NAN
    rows, offsets, order, restore = kernel.permute_tokens(x, ids, 12)
    indices = kernel.compute_permutation_indices(ids, 12)
    assert all(torch.equal(a, b) for a, b in zip((order, offsets, restore), indices, strict=True))
    assert rows.dtype is dtype and rows.shape == (27, 24)
    for row, slot in enumerate(order.tolist()):
        assert torch.equal(rows[row].nan_to_num(7.0), x[slot // 3].nan_to_num(7.0))
    for expert, first, last in by_expert(offsets):
        assert bool((ids.reshape(-1)[order[first:last]] == expert).all())
    rows.zero_()
    assert bool((x != 0).any())  # never an alias


def test_permute_gradient(kernel: ModuleType, device: str) -> None:
    """Case B56: a token's gradient is the sum of those of its rows."""
    x, ids = randn(9, 24, device=device).requires_grad_(), ids_of("random", 9, 12, 3, device)
    rows, _, _, restore = kernel.permute_tokens(x, ids, 12)
    given = randn(27, 24, device=device)
    (grad,) = torch.autograd.grad(rows, x, given)
    exact = given.double()[restore].view(9, 3, 24).sum(1)
    check_tensor(grad, exact, given[restore].view(9, 3, 24).sum(1))


# --------------------------------------------------------------------------------------------- sums
@pytest.mark.parametrize("hidden", (1, 24, 1025))
@pytest.mark.parametrize("top_k", (1, 3))
@pytest.mark.parametrize("dtype", (HALF, BFLOAT, FLOAT), ids=str)
def test_unpermute(
    kernel: ModuleType, device: str, dtype: torch.dtype, top_k: int, hidden: int
) -> None:
    """The weighted sum in float32; weights of any float dtype and strides."""
    rows = randn(7 * top_k, hidden, device=device, dtype=dtype)
    restore = torch.randperm(7 * top_k).to(device)
    for weights in (
        randn(7, top_k, device=device),
        randn(7, top_k, device=device, dtype=HALF),
        randn(top_k, 7, device=device).t(),
    ):
        out = kernel.unpermute_tokens(rows, weights, restore, 7, top_k)
        assert out.shape == (7, hidden) and out.dtype is dtype and out.is_contiguous()
        picked = rows[restore].view(7, top_k, hidden)
        exact = (picked.double() * weights.double().unsqueeze(-1)).sum(1)
        check_tensor(out, exact, (picked.float() * weights.float().unsqueeze(-1)).sum(1).to(dtype))


def test_unpermute_strided(kernel: ModuleType, device: str) -> None:
    """Class 10: rows and places that are not dense."""
    rows, weights = randn(21, 40, device=device), randn(7, 3, device=device)
    restore = torch.randperm(21).to(device)
    wanted = kernel.unpermute_tokens(rows, weights, restore, 7, 3)
    places = torch.stack((restore, -restore), 1)[:, 0]
    wide = torch.cat((rows, rows), 1)[:, 40:]
    for each in (rows.t().contiguous().t(), wide, torch.stack((rows, -rows), 2)[..., 0]):
        assert torch.equal(kernel.unpermute_tokens(each, weights, places, 7, 3), wanted)


@pytest.mark.parametrize("dtype", (HALF, FLOAT), ids=str)
def test_unpermute_gradient(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Case B56: of the rows and of the weights; the values are those without a graph."""
    rows, weights = randn(21, 40, device=device, dtype=dtype), randn(7, 3, device=device)
    restore, given = torch.randperm(21).to(device), randn(7, 40, device=device, dtype=dtype)
    leaves = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    out = kernel.unpermute_tokens(*leaves, restore, 7, 3)
    exact = (rows.double()[restore].view(7, 3, 40) * weights.double().unsqueeze(-1)).sum(1)
    check_tensor(out.detach(), exact, exact.float().to(dtype))
    found = torch.autograd.grad(out, leaves, given)
    for leaf, grad, which in zip(leaves, found, (0, 1), strict=True):
        expected = []
        for kind in (torch.float64, FLOAT):
            own = [each.to(kind).requires_grad_() for each in (rows.detach(), weights.detach())]
            total = (own[0][restore].view(7, 3, 40) * own[1].unsqueeze(-1)).sum(1)
            expected.append(torch.autograd.grad(total, own[which], given.to(kind))[0])
        assert grad.dtype is leaf.dtype
        check_tensor(grad, expected[0], expected[1].to(leaf.dtype))


@pytest.mark.parametrize("kind", ("random", "one", "gaps"))
@pytest.mark.parametrize(("tokens", "experts", "top_k"), ((1, 1, 1), (5, 7, 3), (33, 60, 4)))
def test_round_trip(
    kernel: ModuleType, device: str, tokens: int, experts: int, top_k: int, kind: str
) -> None:
    """What is put in order comes back: with weights that are powers of two, bit by bit."""
    x, ids = randn(tokens, 24, device=device), ids_of(kind, tokens, experts, top_k, device)
    rows, _, _, restore = kernel.permute_tokens(x, ids, experts)
    weights = torch.zeros(tokens, top_k, device=device)
    weights[:, top_k // 2] = 0.5
    assert torch.equal(kernel.unpermute_tokens(rows, weights, restore, tokens, top_k), x / 2)


# ---------------------------------------------------------------------------------------- products
#: Rows of each expert, and rows of none at the end.
CUTS = (((5,), 0), ((0, 3, 0), 0), ((17, 0, 1, 33), 0), ((0, 0), 4), ((2, 0, 40), 3))


def linear(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return each row times its expert's weight, in the dtype of both."""
    y = x.new_zeros(x.shape[0], weights.shape[1])
    for expert, first, last in by_expert(offsets):
        y[first:last] = F.linear(x[first:last], weights[expert])
    return y


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("counts", "rest"), CUTS, ids=str)
@pytest.mark.parametrize(("n", "k"), ((40, 72), (130, 33)))
@pytest.mark.parametrize("dtype", (HALF, BFLOAT, FLOAT), ids=str)
def test_grouped_gemm(
    kernel: ModuleType, device: str, dtype: torch.dtype, n: int, k: int, counts: tuple[int, ...],
    rest: int,
) -> None:  # fmt: skip
    """Empty experts, all rows for one, ragged sizes; rows that have no expert give zeros."""
    experts, rows = len(counts), sum(counts) + rest
    x = randn(rows, k, device=device, dtype=dtype)
    weights = randn(experts, n, k, device=device, dtype=dtype, scale=k)
    offsets = torch.tensor((0, *counts)).cumsum(0).to(device)
    if rest:
        x[-rest:] = NAN  # read by nobody
    y = kernel.grouped_gemm(x, weights, offsets, experts)
    assert y.shape == (rows, n) and y.dtype is dtype and y.is_contiguous()
    assert not bool(y[rows - rest :].any())
    exact = linear(x.double(), weights.double(), offsets)
    check_tensor(y, exact, linear(x.float(), weights.float(), offsets).to(dtype))


@pytest.mark.parametrize(
    "offsets", ([0, 2, 2, 50], [-9, 2, 2, 9], [0, 9, 3, 9], [5, 2, 9, 1], [0, 2**40, 2**40, 9])
)
def test_offsets_that_are_none(kernel: ModuleType, device: str, offsets: list[int]) -> None:
    """Nothing outside of the rows is read or written, and no row is computed twice."""
    x, weights = randn(9, 24, device=device), randn(3, 40, 24, device=device, scale=24)
    given = torch.tensor(offsets, device=device)
    kept = given.clamp(0, 9).cummax(0).values
    out = kernel.grouped_gemm(x, weights, given, 3)
    assert torch.equal(out, kernel.grouped_gemm(x, weights, kept, 3))
    check_tensor(out, linear(x.double(), weights.double(), kept), linear(x, weights, kept))
    ffn = (weights[:, :24], weights[:, :24], weights[:, :24])
    rest = 3, randn(9, 1, device=device), torch.arange(9, device=device), 9, 1
    found = kernel.fused_expert_ffn(x, *ffn, given, *rest)
    assert torch.equal(found, kernel.fused_expert_ffn(x, *ffn, kept, *rest))


def weight_layouts(dense: Tensor) -> dict[str, Tensor]:
    """Return the same weight in memory of many kinds."""
    doubled = torch.cat((dense, dense), 1)
    odd = torch.cat((dense.reshape(-1)[:1], dense.reshape(-1)))[1:]
    return {
        "transposed": dense.mT.contiguous().mT,
        "half of another": doubled[:, : dense.shape[1]],
        "experts inside": dense.transpose(0, 1).contiguous().transpose(0, 1),
        "neither": torch.stack((dense, -dense), -1)[..., 0],
        "odd offset": odd.view(dense.shape),
    }


LAYOUTS = tuple(weight_layouts(torch.zeros(2, 2, 2)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", (64, 33))
def test_layouts_of_grouped_gemm(kernel: ModuleType, device: str, k: int, layout: str) -> None:
    """Case B55, class 10: weights and rows are read as they lie, or copied."""
    x, weights = (
        randn(12, k, device=device, dtype=HALF),
        randn(3, 40, k, device=device, dtype=HALF, scale=k),
    )
    offsets = torch.tensor((0, 5, 5, 12), device=device)
    wanted = linear(x.double(), weights.double(), offsets)
    peer = linear(x.float(), weights.float(), offsets).half()
    given = weight_layouts(weights)[layout]
    assert torch.equal(given, weights)
    for rows in (x, x.t().contiguous().t(), torch.cat((x, x), 1)[:, k:]):
        check_tensor(kernel.grouped_gemm(rows, given, offsets, 3), wanted, peer)
    strided = torch.stack((offsets, -offsets), 1)[:, 0]
    check_tensor(kernel.grouped_gemm(x, given, strided, 3), wanted, peer)


@pytest.mark.parametrize("rows", (0, 4))
def test_no_rows_with_an_expert(kernel: ModuleType, device: str, rows: int) -> None:
    """Case B44."""
    x, weights = randn(rows, 16, device=device), randn(2, 24, 16, device=device)
    y = kernel.grouped_gemm(x, weights, torch.zeros(3, dtype=torch.int64, device=device), 2)
    assert y.shape == (rows, 24) and not bool(y.any())


def ffn(
    rows: Tensor, weights: tuple[Tensor, ...], offsets: Tensor, mix: Tensor, order: Tensor,
    dtype: torch.dtype, half: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the sum by token in `dtype`, with h and y rounded to `half` on their way."""
    gate, up, down = (each.to(dtype) for each in weights)
    x = rows.to(dtype)
    h = F.silu(linear(x, gate, offsets)) * linear(x, up, offsets)
    y = linear(h.to(half).to(dtype), down, offsets).to(half).to(dtype)
    placed = torch.empty_like(y)
    placed[order] = y
    tokens, top_k = mix.shape
    return (placed.view(tokens, top_k, -1) * mix.to(dtype).unsqueeze(-1)).sum(1)


#: The interpreter, which is slow, takes float32 once: it is ordered by the same code.
KINDS_AND_DTYPES = [
    (kind, dtype)
    for kind in ("random", "one", "gaps")
    for dtype in (HALF, BFLOAT, FLOAT)
    if not INTERPRETED or dtype is not FLOAT or kind == "random"
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    ((1, 1, 1, 16, 8), (5, 7, 3, 40, 33), (33, 6, 2, 65, 20)),
)
@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES, ids=str)
def test_fused_expert_ffn(
    kernel: ModuleType, device: str, dtype: torch.dtype, tokens: int, experts: int, top_k: int,
    hidden: int, inner: int, kind: str,
) -> None:  # fmt: skip
    """The whole after the order, at unit scale (the predecessor's tests pass for zeros)."""
    x, ids = (
        randn(tokens, hidden, device=device, dtype=dtype),
        ids_of(kind, tokens, experts, top_k, device),
    )
    gate, up = (randn(experts, inner, hidden, device=device, dtype=dtype, scale=hidden)
                for _ in range(2))  # fmt: skip
    down = randn(experts, hidden, inner, device=device, dtype=dtype, scale=inner)
    mix = torch.rand(tokens, top_k).to(device)
    rows, offsets, order, restore = kernel.permute_tokens(x, ids, experts)
    out = kernel.fused_expert_ffn(rows, gate, up, down, offsets, experts, mix, order, tokens, top_k)
    assert out.shape == (tokens, hidden) and out.dtype is dtype
    exact = ffn(rows, (gate, up, down), offsets, mix, order, torch.float64, torch.float64)
    peer = ffn(rows, (gate, up, down), offsets, mix, order, FLOAT, dtype).to(dtype)
    check_tensor(out, exact, peer)
    # The stages one by one come to the same as the fused call.
    y = kernel.grouped_gemm(
        (F.silu(kernel.grouped_gemm(rows, gate, offsets, experts).float())
         * kernel.grouped_gemm(rows, up, offsets, experts).float()).to(dtype),
        down, offsets, experts,
    )  # fmt: skip
    staged = kernel.unpermute_tokens(y, mix, restore, tokens, top_k)
    peer = F.silu(linear(rows, gate, offsets)) * linear(rows, up, offsets)
    peer = kernel.unpermute_tokens(linear(peer, down, offsets), mix, restore, tokens, top_k)
    check_tensor(staged, exact, peer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_fused_expert_ffn(kernel: ModuleType, device: str, layout: str) -> None:
    """Case B55: halves of one weight, transposed ones, and rows that are strided."""
    x, ids = randn(6, 48, device=device, dtype=HALF), ids_of("random", 6, 4, 2, device)
    gate, up = (randn(4, 32, 48, device=device, dtype=HALF, scale=48) for _ in range(2))
    down, mix = randn(4, 48, 32, device=device, dtype=HALF, scale=32), torch.rand(2, 6).to(device)
    rows, offsets, order, _ = kernel.permute_tokens(x, ids, 4)
    weights, mix = (gate, up, down), mix.t()
    exact = ffn(rows, weights, offsets, mix, order, torch.float64, torch.float64)
    peer = ffn(rows, weights, offsets, mix, order, FLOAT, HALF).half()
    given = [weight_layouts(each)[layout] for each in weights]
    for each in (rows, rows.t().contiguous().t(), torch.cat((rows, rows), 1)[:, 48:]):
        out = kernel.fused_expert_ffn(each, *given, offsets, 4, mix, order, 6, 2)
        check_tensor(out, exact, peer)
    both = torch.cat((gate, up), 1)
    out = kernel.fused_expert_ffn(
        rows, both[:, :32], both[:, 32:], given[2], offsets, 4, mix, order, 6, 2
    )
    check_tensor(out, exact, peer)
    # gate and up that lie differently
    out = kernel.fused_expert_ffn(rows, given[0], up, given[2], offsets, 4, mix, order, 6, 2)
    check_tensor(out, exact, peer)


def test_same_bits_again(kernel: ModuleType, device: str) -> None:
    """Case B41."""
    x, ids = randn(20, 40, device=device, dtype=HALF), ids_of("random", 20, 6, 3, device)
    weights = [randn(6, 40, 40, device=device, dtype=HALF, scale=40) for _ in range(3)]
    rows, offsets, order, _ = kernel.permute_tokens(x, ids, 6)
    mix = torch.rand(20, 3).to(device)
    given = [each.clone() for each in (rows, *weights, offsets, mix, order)]
    found = [
        kernel.fused_expert_ffn(rows, *weights, offsets, 6, mix, order, 20, 3) for _ in range(3)
    ]
    assert all(torch.equal(found[0], each) for each in found)
    now = (rows, *weights, offsets, mix, order)
    assert all(torch.equal(a, b) for a, b in zip(given, now, strict=True))  # never changed


# ------------------------------------------------------------------------------- nothing, gradients
def test_no_tokens(
    kernel: ModuleType, device: str, uses_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B44: shapes, dtypes and devices of an idle rank, and no launch."""
    if uses_triton:
        monkeypatch.setattr(part(kernel, "launch"), "launch", lambda *_: pytest.fail("launched"))
    x = torch.empty(0, 24, device=device, dtype=HALF)
    ids = torch.empty(0, 3, device=device, dtype=torch.int64)
    rows, offsets, order, restore = kernel.permute_tokens(x, ids, 5)
    assert rows.shape == (0, 24) and offsets.tolist() == [0] * 6 and order.shape == restore.shape
    mix = torch.empty(0, 3, device=device)
    weights = [torch.ones(5, 24, 24, device=device, dtype=HALF)] * 3
    for out in (
        kernel.grouped_gemm(rows, weights[0], offsets, 5),
        kernel.fused_expert_ffn(rows, *weights, offsets, 5, mix, order, 0, 3),
        kernel.unpermute_tokens(rows, mix, restore, 0, 3),
    ):
        assert out.shape == (0, 24) and out.dtype is HALF and out.device == x.device


def test_no_tokens_with_gradients(kernel: ModuleType, device: str) -> None:
    """Case B44: an idle rank's backward pass is one too."""
    x = torch.empty(0, 24, device=device, requires_grad=True)
    ids = torch.empty(0, 3, device=device, dtype=torch.int64)
    rows, _, _, restore = kernel.permute_tokens(x, ids, 5)
    mix = torch.empty(0, 3, device=device, requires_grad=True)
    out = kernel.unpermute_tokens(rows, mix, restore, 0, 3)
    assert out.shape == (0, 24) and out.requires_grad
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 24)
    assert mix.grad is not None and mix.grad.shape == (0, 3)


def calls(kernel: ModuleType, device: str) -> dict[str, tuple[Callable, list[Tensor]]]:
    """Return what has no gradient, with the tensors that could want one."""
    x, ids = randn(4, 16, device=device), ids_of("random", 4, 3, 2, device)
    rows, offsets, order, _ = kernel.permute_tokens(x, ids, 3)
    weights = [randn(3, 16, 16, device=device) for _ in range(3)]
    mix = torch.rand(4, 2).to(device)
    return {
        "grouped_gemm": (
            lambda x, w: kernel.grouped_gemm(x, w, offsets, 3), [rows, weights[0]]
        ),
        "fused_expert_ffn": (
            lambda x, gate, up, down, mix: kernel.fused_expert_ffn(
                x, gate, up, down, offsets, 3, mix, order, 4, 2
            ),
            [rows, *weights, mix],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("function", ("grouped_gemm", "fused_expert_ffn"))
def test_gradients_are_refused(kernel: ModuleType, device: str, function: str) -> None:
    """Case B56: nothing stops learning without a word; without a graph all is well."""
    call, tensors = calls(kernel, device)[function]
    wanted = call(*tensors)
    for place, tensor in enumerate(tensors):
        given = [*tensors]
        given[place] = tensor.clone().requires_grad_()
        with pytest.raises(RuntimeError, match=f"{function}: there is no gradient; .*no_grad"):
            call(*given)
        with torch.no_grad():
            assert torch.equal(call(*given), wanted)
