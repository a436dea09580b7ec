"""The router fused with the choice: logits, shared tiles, counts of the dispatch, counters."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from monorepo.numerics import FACTOR, FLOOR_ULP, check_tensor, spacing

from .routing import check_ids, choose, part, weigh

HALF, FLOAT = torch.float16, torch.float32
GATINGS = ("softmax", "sigmoid")


def problem(
    tokens: int, experts: int, hidden: int, device: str, dtype: torch.dtype, weight: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the router and its bias, with logits of unit scale."""
    x = torch.randn(tokens, hidden).to(device, dtype)
    router = (torch.randn(experts, hidden) / math.sqrt(hidden)).to(device, weight)
    return x, router, torch.randn(experts).to(device)


def check_router(
    x: Tensor, router: Tensor, bias: Tensor | None, top_k: int, gating: str,
    ids: Tensor, weights: Tensor, logits: Tensor | None,
) -> None:  # fmt: skip
    """Raise unless the choice, its weights and the logits are right for x and a router."""
    exact = F.linear(x.double(), router.double(), None if bias is None else bias.double())
    float_bias = None if bias is None else bias.float()
    peer = F.linear(x.float(), router.float(), float_bias)
    if logits is not None:
        assert logits.shape == exact.shape and logits.dtype is x.dtype and logits.is_contiguous()
        check_tensor(logits, exact, peer.to(x.dtype))
    assert ids.shape == weights.shape == (x.shape[0], top_k) and weights.dtype is x.dtype
    check_ids(ids, router.shape[0])
    # How far float32 logits may be off, relative to the largest: the rule of `check_tensor`.
    most = exact.abs().max()
    floor = FLOOR_ULP * spacing(most, FLOAT)
    off = max(FACTOR * (peer - exact).abs().max(), floor) / most
    sure = 0
    for line, found in zip(exact.tolist(), ids.tolist(), strict=True):
        wanted, decided = choose(line, top_k, gating, slack=2 * float(off))
        assert found == wanted or not decided, (found, wanted)
        sure += decided
    assert sure >= 0.9 * x.shape[0]
    how = (gating, gating == "sigmoid")
    check_tensor(weights, weigh(exact, ids, *how), weigh(peer, ids, *how).to(x.dtype))


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "top_k"),
    (
        (1, 5, 72, 2),
        (3, 64, 1000, 6),
        (16, 70, 333, 7),  # two slabs, the second with 6 experts
        (17, 256, 520, 8),
        (65, 130, 200, 5),
        (130, 5, 1024, 5),
        (1, 256, 2048, 8),
        (2, 1, 64, 1),
    ),
)
@pytest.mark.parametrize(
    ("dtype", "weight", "gating"),
    (
        (FLOAT, FLOAT, "softmax"),
        (HALF, HALF, "sigmoid"),
        (HALF, FLOAT, "softmax"),
        (torch.bfloat16, torch.bfloat16, "sigmoid"),
    ),
    ids=str,
)
def test_moe_router(
    kernel: ModuleType, device: str, dtype: torch.dtype, weight: torch.dtype, gating: str,
    tokens: int, experts: int, hidden: int, top_k: int,
) -> None:  # fmt: skip
    """Cases B35, B41, class 9: any sizes; logits and what follows are float32."""
    x, router, bias = problem(tokens, experts, hidden, device, dtype, weight)
    given = [each.clone() for each in (x, router, bias)]
    for more in (None, bias.to(weight)):
        ids, weights, logits = kernel.moe_router(x, router, top_k, gating, more)
        check_router(x, router, more, top_k, gating, ids, weights, logits)
    assert all(torch.equal(a, b) for a, b in zip(given, (x, router, bias), strict=True))


def test_close_logits(kernel: ModuleType, device: str) -> None:
    """Case B32: gaps of 1e-4 between float32 logits decide, though x has 16 bits."""
    for dtype in (HALF, torch.bfloat16):
        x, router = torch.zeros(3, 48, device=device, dtype=dtype), torch.zeros(128, 48)
        x[:, 5] = 1
        router[:, 5] = 2 + 1e-4 * torch.randperm(128)
        router = router.to(device)
        ids, _, logits = kernel.moe_router(x, router, 8)
        wanted = router[:, 5].topk(8).indices
        assert torch.equal(ids, wanted.expand(3, 8))
        assert torch.equal(logits, router[:, 5].to(dtype).expand(3, 128))  # rounded at the end


def strided(device: str) -> dict[str, tuple[Tensor, Tensor]]:
    x, router, _ = problem(6, 12, 80, device, HALF, HALF)
    wide, tall = (torch.cat((each, each), 1) for each in (x, router))
    return {
        "rows apart": (wide[:, 8:88], tall[:, 3:83]),
        "every second token": (torch.cat((x, x))[::2], torch.cat((router, router))[::2]),
        "every second feature": (wide[:, ::2], tall[:, ::2]),
        "transposed": (x.t().contiguous().t(), router.t().contiguous().t()),
        "one for all": (x[:1].expand(6, 80), router),
        "odd offset": (x.view(-1)[1:81].view(1, 80), router.view(-1)[3:883].view(11, 80)),
    }


@pytest.mark.parametrize("layout", tuple(strided("cpu")))
def test_layouts(kernel: ModuleType, device: str, layout: str) -> None:
    """Class 10: strides are honoured or copied, never misread."""
    x, router = strided(device)[layout]
    bias = torch.randn(router.shape[0]).to(device)
    check_router(x, router, bias, 3, "softmax", *kernel.moe_router(x, router, 3, "softmax", bias))


def test_strided_bias(kernel: ModuleType, device: str) -> None:
    """Class 10: the bias has strides as well."""
    x, router, bias = problem(6, 12, 80, device, HALF, HALF)
    for more in (torch.stack((bias, -bias), 1)[:, 0], bias[:1].expand(12)):
        found = kernel.moe_router(x, router, 3, "softmax", more)
        check_router(x, router, more, 3, "softmax", *found)


class Seen:
    """What the launches of the router were given."""

    def __init__(self) -> None:
        self.counters: list[Tensor] = []
        self.scores: list[tuple[object, ...]] = []


@pytest.fixture
def seen(kernel: ModuleType, uses_triton: bool, monkeypatch: pytest.MonkeyPatch) -> Seen:
    if not uses_triton:
        pytest.skip("the reference launches nothing")
    found, launch, arrivals = Seen(), part(kernel, "launch"), part(kernel, "_shared.arrivals")

    def noted(function: Callable, into: list) -> Callable:
        def wrapped(*given: object) -> object:
            result = function(*given)
            into.append(given if into is found.scores else result)
            return result

        return wrapped

    monkeypatch.setattr(arrivals, "counters", noted(arrivals.counters, found.counters))
    monkeypatch.setattr(launch, "score", noted(launch.score, found.scores))
    return found


#: Tokens and experts of a tile, step, programs that share one.
TILES = ((16, 16, 32, 1), (16, 16, 16, 5), (16, 32, 64, 2), (32, 16, 32, 3), (64, 64, 32, 32))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "hidden"), ((1, 5, 40), (17, 70, 136), (65, 20, 99)))
def test_shared_tiles(
    kernel: ModuleType, device: str, seen: Seen, monkeypatch: pytest.MonkeyPatch,
    tokens: int, experts: int, hidden: int, tile: tuple[int, ...],
) -> None:  # fmt: skip
    """Case B41: whoever comes last adds up and chooses, whatever the cut into tiles and steps."""
    config = part(kernel, "config")
    forced = config.ScoreConfig(*tile, 4, 2)
    monkeypatch.setattr(config, "score_config", lambda *_: forced)
    x, router, bias = problem(tokens, experts, hidden, device, HALF, HALF)
    check_router(x, router, bias, 3, "softmax", *kernel.moe_router(x, router, 3, "softmax", bias))
    assert len(seen.scores) == len(seen.counters) == 1
    assert not bool(seen.counters[0].any())  # as they were before


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"), ((1, 64, 2048), (3, 256, 1024), (130, 130, 520))
)
def test_counters_and_bits(
    kernel: ModuleType, device: str, seen: Seen, tokens: int, experts: int, hidden: int
) -> None:
    """Case B41: counters are zero again after each call, and calls repeat bit for bit."""
    x, router, bias = problem(tokens, experts, hidden, device, HALF, HALF)
    first = kernel.moe_router(x, router, 5, "sigmoid", bias)
    for _ in range(2):
        again = kernel.moe_router(x, router, 5, "sigmoid", bias)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not bool(seen.counters[-1].any())
    assert len(seen.counters) == 3
    splits = [given[-3] for given in seen.scores]
    assert len(set(splits)) == 1 and (tokens > 3 or splits[0] > 1)


def layer(
    tokens: int, experts: int, hidden: int, inner: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return x, the router and the experts' weights."""
    x, router, _ = problem(tokens, experts, hidden, device, dtype, FLOAT)
    gate, up = (torch.randn(2, experts, inner, hidden) / math.sqrt(hidden)).to(device, dtype)
    down = (torch.randn(experts, hidden, inner) / math.sqrt(inner)).to(device, dtype)
    return x, router, gate, up, down


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    ((1, 64, 6), (3, 5, 2), (17, 130, 1), (33, 64, 1), (130, 3, 2)),
)
@pytest.mark.parametrize(("dtype", "gating"), ((FLOAT, "softmax"), (HALF, "sigmoid")), ids=str)
def test_choice_of_a_layer(
    kernel: ModuleType, device: str, dtype: torch.dtype, gating: str,
    tokens: int, experts: int, top_k: int,
) -> None:  # fmt: skip
    """fused_moe_forward chooses as moe_router does, and says so in the dtype of x."""
    x, router, *rest = layer(tokens, experts, 72, 8, device, dtype)
    out, ids, weights = kernel.fused_moe_forward(x, router, *rest, experts, top_k, gating)
    assert out.shape == x.shape and out.dtype is dtype
    check_router(x, router, None, top_k, gating, ids, weights, None)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    ((2, 2, 1), (3, 5, 2), (17, 70, 3), (33, 256, 2), (129, 7, 5), (130, 1, 1)),
)
def test_counts_for_the_dispatch(
    kernel: ModuleType, device: str, seen: Seen, tokens: int, experts: int, top_k: int
) -> None:
    """Class 5: what is padding is counted for no expert; each slot is noted once."""
    x, router, *rest = layer(tokens, experts, 40, 8, device, HALF)
    _, ids, _ = kernel.fused_moe_forward(x, router, *rest, experts, top_k)
    (given,) = seen.scores
    slots, counts, block = given[10], given[11], given[14]
    assert torch.equal(slots.view(tokens, top_k).long(), ids)
    counts = counts.view(-1, experts)
    assert counts.shape[0] == -(-tokens // block)
    for number, line in enumerate(counts):
        mine = ids[number * block : (number + 1) * block].reshape(-1)
        assert torch.equal(line.long(), mine.bincount(minlength=experts))
    assert not bool(seen.counters[0].any())


def test_not_finite(kernel: ModuleType, device: str, seen: Seen) -> None:
    """Class 2: a padded token of NaN or infinity has valid experts, and counts as any other."""
    x, router, *rest = layer(20, 12, 40, 16, device, HALF)
    x[3], x[7], x[19] = math.nan, math.inf, -math.inf
    out, ids, weights = kernel.fused_moe_forward(x, router, *rest, 12, 4)
    check_ids(ids, 12)
    assert bool(weights.isfinite().all())
    assert int(seen.scores[0][11].sum()) == 20 * 4
    good = [each for each in range(20) if each not in (3, 7, 19)]
    assert bool(out[good].isfinite().all())


@pytest.mark.parametrize("gradients", (False, True))
def test_no_tokens(
    kernel: ModuleType, device: str, uses_triton: bool, monkeypatch: pytest.MonkeyPatch,
    gradients: bool,
) -> None:  # fmt: skip
    """Case B44: an idle rank gets results of the right shapes."""
    if uses_triton:
        monkeypatch.setattr(part(kernel, "launch"), "launch", lambda *_: pytest.fail("launched"))
    x, router, *rest = layer(0, 12, 40, 16, device, HALF)
    x.requires_grad_(gradients)
    ids, weights, logits = kernel.moe_router(x, router, 3)
    assert (ids.shape, weights.shape, logits.shape) == ((0, 3), (0, 3), (0, 12))
    assert weights.dtype is logits.dtype is HALF and ids.dtype is torch.int64
    out, ids, weights = kernel.fused_moe_forward(x, router, *rest, 12, 3)
    assert (out.shape, ids.shape, weights.shape) == ((0, 40), (0, 3), (0, 3))
    assert out.dtype is weights.dtype is HALF and out.device == x.device
    if gradients:
        (out.sum() + weights.sum()).backward()
        assert x.grad is not None and x.grad.shape == (0, 40)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("dtype", (FLOAT, HALF), ids=str)
def test_gradients(kernel: ModuleType, device: str, dtype: torch.dtype, gating: str) -> None:
    """Case B56: of x, the router and its bias, through weights and logits."""
    tensors = problem(5, 12, 40, device, dtype, FLOAT)
    dweights, dlogits = torch.randn(5, 3).to(device), torch.randn(5, 12).to(device)

    def gradients(exact: torch.dtype | None, ids: Tensor | None = None) -> tuple[Tensor, ...]:
        leaves = [each.detach().to(exact or each.dtype).requires_grad_() for each in tensors]
        if ids is None:
            ids, weights, logits = kernel.moe_router(leaves[0], leaves[1], 3, gating, leaves[2])
        else:
            logits = F.linear(*leaves)
            weights = weigh(logits, ids, gating, gating == "sigmoid")
        results = (weights, logits)
        given = (dweights.to(weights.dtype), dlogits.to(logits.dtype))
        return ids, *torch.autograd.grad(results, leaves, given)

    ids, *found = gradients(None)
    _, *exact = gradients(torch.float64, ids)
    _, *peer = gradients(FLOAT, ids)
    # What goes back is rounded to the dtype of x first: the peer does the same.
    if dtype is HALF:
        dweights, dlogits = (each.half().float() for each in (dweights, dlogits))
        _, *exact = gradients(torch.float64, ids)
        _, *peer = gradients(FLOAT, ids)
    for got, wanted, other, leaf in zip(found, exact, peer, tensors, strict=True):
        assert got.dtype is leaf.dtype
        check_tensor(got, wanted, other.to(leaf.dtype))


def test_values_are_those_without_gradients(kernel: ModuleType, device: str) -> None:
    """The graph's path keeps the same rule, and the same experts are chosen."""
    x, router, bias = problem(9, 70, 136, device, HALF, HALF)
    plain = kernel.moe_router(x, router, 5, "sigmoid", bias)
    graph = kernel.moe_router(x, router.clone().requires_grad_(), 5, "sigmoid", bias)
    assert torch.equal(plain[0], graph[0])
    check_router(x, router, bias, 5, "sigmoid", *(each.detach() for each in graph))
