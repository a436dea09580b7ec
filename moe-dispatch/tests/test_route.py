"""`route`: which experts, with which weights, and the gradient of the weights."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from monorepo.numerics import check_tensor

from .routing import SCORINGS, check_ids, check_route, part, weigh

FLOAT = torch.float32
#: Experts and choices: each number of experts of case B35, choices that are no power of two.
SIZES = (
    (1, 1), (2, 1), (2, 2), (3, 2), (5, 4), (7, 3), (7, 7), (60, 4), (64, 6), (64, 8), (72, 5),
    (160, 6), (256, 8), (384, 8), (512, 10), (512, 22), (1024, 1), (1024, 32),
)  # fmt: skip


def random(*shape: int, device: str, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the same random numbers on every device."""
    return torch.randn(shape).to(device, dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_sizes(kernel: ModuleType, device: str, experts: int, top_k: int, scoring: str) -> None:
    """Case B35, class 7: any number of experts and choices."""
    logits, renormalize = random(5, experts, device=device) * 2, bool(top_k % 2)
    check_route(kernel, logits, top_k, scoring=scoring, renormalize=renormalize)
    bias = random(experts, device=device, dtype=(FLOAT, torch.float16)[top_k % 2])
    renormalize = not renormalize
    check_route(
        kernel, logits, top_k, scoring=scoring, renormalize=renormalize, bias=bias, scale=2.5
    )


@pytest.mark.parametrize("tokens", (1, 2, 63, 64, 65, 130))
def test_numbers_of_tokens(kernel: ModuleType, device: str, tokens: int) -> None:
    """Blocks of tokens that are full, and one that is not."""
    check_route(kernel, random(tokens, 8, device=device), 2)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    ("experts", "num_groups", "top_groups", "top_k"),
    (
        (8, 2, 1, 4),  # all of the one group
        (256, 8, 4, 8),  # DeepSeek-V3
        (160, 8, 3, 6),  # DeepSeek-V2: groups of 20
        (64, 4, 4, 6),  # every group: groups change nothing
        (21, 7, 2, 5),  # neither is a power of two
        (12, 3, 2, 8),
        (512, 16, 5, 22),
        (10, 5, 3, 2),
    ),
)
def test_groups(
    kernel: ModuleType,
    device: str,
    experts: int,
    num_groups: int,
    top_groups: int,
    top_k: int,
    scoring: str,
) -> None:
    """Class 8: the best expert speaks for a group; with a bias, the sum of the best two."""
    options = {"scoring": scoring, "num_groups": num_groups, "top_groups": top_groups}
    logits, bias = random(7, experts, device=device), random(experts, device=device)
    ids, _ = check_route(kernel, logits, top_k, **options)
    assert len({each for each in (ids[0] // (experts // num_groups)).tolist()}) <= top_groups
    check_route(kernel, logits, top_k, bias=bias, renormalize=False, scale=2.5, **options)
    # All below zero: an expert that may not be chosen is no expert with a score of 0.
    check_route(kernel, -logits.abs() - 5, top_k, **options)
    check_route(kernel, -logits.abs() - 5, top_k, bias=bias - 20, **options)


def test_best_two_of_a_group(kernel: ModuleType, device: str) -> None:
    """DeepSeek-V3: two good experts outweigh the best one; without a bias they do not."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0, 1.0, -1.0]], device=device)
    options = {"scoring": "topk_softmax", "num_groups": 3, "top_groups": 1}
    assert check_route(kernel, logits, 2, **options)[0].tolist() == [[0, 1]]
    zeros = torch.zeros(6, device=device)
    assert check_route(kernel, logits, 2, bias=zeros, **options)[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_groups_of_one_expert(kernel: ModuleType, device: str, bias: bool, scoring: str) -> None:
    """A group that has no second expert is as good as its only one."""
    logits = random(5, 6, device=device)
    given = random(6, device=device) if bias else None
    check_route(kernel, logits, 2, scoring=scoring, bias=given, num_groups=6, top_groups=3)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties(kernel: ModuleType, device: str, scoring: str) -> None:
    """Class 9: equal scores go to the lowest index; the two zeros are equal."""
    cycle = torch.tensor([0.0, -0.0, -0.0, 0.0, 0.0, -0.0, 0.0], device=device)
    for logits in (cycle, -cycle, torch.full((7,), 0.25, device=device)):
        for bias in (None, torch.full((7,), 0.5, device=device), -cycle):
            ids, _ = check_route(kernel, logits[None], 5, scoring=scoring, bias=bias, least_sure=1)
            assert ids.tolist() == [[0, 1, 2, 3, 4]]
    # Few values for many experts, and ties between groups.
    logits = torch.randint(-2, 3, (9, 60)).to(device, FLOAT) / 2
    check_route(kernel, logits, 12, scoring=scoring, least_sure=1)
    check_route(kernel, logits, 6, scoring=scoring, num_groups=6, top_groups=2, least_sure=1)
    check_route(kernel, logits.to(torch.float16), 12, scoring=scoring, least_sure=1)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("experts", (5, 60, 256))
def test_all_negative(kernel: ModuleType, device: str, experts: int, scoring: str) -> None:
    """Case B34: no expert that is only padding wins with a 0."""
    logits = -random(6, experts, device=device).abs() - 5
    ids, _ = check_route(kernel, logits, 4, scoring=scoring)
    assert torch.equal(ids, logits.topk(4).indices)
    check_route(kernel, logits - 80, 4, scoring=scoring, renormalize=False)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_close_logits(kernel: ModuleType, device: str, scoring: str) -> None:
    """Case B32: gaps of 1e-4 in float32 decide, whatever the scores round to."""
    logits = torch.stack([2 + 1e-4 * torch.randperm(128) for _ in range(6)]).to(device)
    ids, _ = check_route(kernel, logits, 8, scoring=scoring, least_sure=1)
    assert torch.equal(ids, logits.topk(8).indices)
    # Where the sigmoid is 1 in float32, logits still decide.
    ids, _ = check_route(kernel, logits + 30, 8, scoring=scoring, renormalize=False)
    assert torch.equal(ids, (logits + 30).topk(8).indices)


def test_large_bias(kernel: ModuleType, device: str) -> None:
    """Class 8: weights come from scores, not from scores plus bias minus bias."""
    logits, bias = random(6, 256, device=device) - 18, torch.full((256,), 12.0, device=device)
    _, weights = check_route(
        kernel, logits, 8, scoring="sigmoid", bias=bias, num_groups=8, top_groups=4, scale=2.5,
        least_sure=0,
    )  # fmt: skip
    assert bool((weights > 0).all())


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("logits_dtype", (torch.float16, torch.bfloat16, FLOAT), ids=str)
def test_dtypes(kernel: ModuleType, device: str, logits_dtype: torch.dtype, scoring: str) -> None:
    """Class 9: logits are taken as they are, and everything after is float32."""
    logits = random(6, 72, device=device, dtype=logits_dtype)
    for bias_dtype in (torch.float16, torch.bfloat16, FLOAT):
        bias = random(72, device=device, dtype=bias_dtype)
        check_route(kernel, logits, 5, scoring=scoring, bias=bias)
    check_route(kernel, logits * 30, 5, scoring=scoring, renormalize=False)


INFINITE, NAN = math.inf, math.nan


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", (False, True))
@pytest.mark.parametrize("groups", (1, 4))
def test_not_finite(
    kernel: ModuleType, device: str, groups: int, renormalize: bool, scoring: str
) -> None:
    """Class 2: whatever the logits are, ids are valid and differ, and weights are finite."""
    logits = random(12, 12, device=device)
    for row, value in enumerate((NAN, INFINITE, -INFINITE)):
        logits[row] = value
        logits[row + 3, :10] = value
        logits[row + 6, 4] = value
    logits[9, ::2], logits[9, 1::2] = NAN, -INFINITE
    logits[10, :3], logits[10, 3:6], logits[10, 6:] = INFINITE, NAN, -INFINITE
    for bias in (None, random(12, device=device)):
        ids, _ = check_route(
            kernel, logits, 5, scoring=scoring, renormalize=renormalize, num_groups=groups,
            top_groups=max(1, groups // 2), bias=bias,
        )  # fmt: skip
        # A row is not touched by its neighbours.
        alone, _ = kernel.route(
            logits[11:], 5, scoring=scoring, renormalize=renormalize, num_groups=groups,
            top_groups=max(1, groups // 2), bias=bias,
        )  # fmt: skip
        assert torch.equal(ids[11:], alone)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_bias_that_is_not_finite(kernel: ModuleType, device: str, scoring: str) -> None:
    """A bias of -inf takes an expert out as long as there are others; NaN does so first."""
    logits, bias = random(5, 7, device=device), torch.zeros(7, device=device)
    bias[1], bias[3], bias[5] = -INFINITE, NAN, INFINITE
    ids, weights = kernel.route(logits, 5, scoring=scoring, bias=bias)
    assert bool((ids[:, 0] == 5).all()) and not bool(((ids == 1) | (ids == 3)).any())
    for top_k in (6, 7):
        ids, weights = kernel.route(logits, top_k, scoring=scoring, bias=bias)
        check_ids(ids, 7)
        assert bool((ids[:, 5:] == torch.tensor((1, 3), device=device)[: top_k - 5]).all())
        assert bool(weights.isfinite().all())


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("tokens", (1, 5))
def test_one_choice(kernel: ModuleType, device: str, tokens: int, scoring: str) -> None:
    """Case B31: one choice keeps its dimension, and its weight is 1."""
    _, weights = check_route(kernel, random(tokens, 60, device=device), 1, scoring=scoring)
    assert weights.shape == (tokens, 1) and bool((weights == 1).all())


def layouts(device: str) -> dict[str, Tensor]:
    """Return logits of 12 experts in memory of many kinds."""
    return {
        "1-D": random(12, device=device),
        "3-D": random(2, 3, 12, device=device),
        "4-D": random(2, 1, 3, 12, device=device),
        "every second token": random(10, 12, device=device)[::2],
        "every second expert": random(5, 24, device=device)[:, ::2],
        "sliced": random(5, 30, device=device)[:, 3:15],
        "transposed": random(12, 5, device=device).t(),
        "permuted": random(3, 2, 12, device=device).transpose(0, 1),
        "3-D, transposed": random(2, 12, 3, device=device).mT,
        "one token for all": random(1, 12, device=device).expand(5, 12),
        "one logit for all": random(5, 1, device=device).expand(5, 12),
        "odd offset": random(61, device=device, dtype=torch.float16)[1:].view(5, 12),
    }


@pytest.mark.parametrize("layout", tuple(layouts("cpu")))
def test_layouts(kernel: ModuleType, device: str, layout: str) -> None:
    """Class 10: strides and leading dimensions are kept, and nothing is read beside them."""
    logits = layouts(device)[layout]
    bias = random(24, device=device)[::2]
    check_route(kernel, logits, 3)
    check_route(kernel, logits, 3, scoring="sigmoid", bias=bias, num_groups=3, top_groups=2)
    assert bias.stride() == (2,)


@pytest.mark.parametrize("shape", ((0, 12), (2, 0, 12), (0, 3, 12)))
@pytest.mark.parametrize("gradients", (False, True))
def test_no_tokens(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    gradients: bool,
) -> None:
    """Case B44, class 4: the right shapes, and no launch."""
    if uses_triton:
        monkeypatch.setattr(part(kernel, "launch"), "launch", lambda *_: pytest.fail("launched"))
    logits = torch.empty(shape, device=device, requires_grad=gradients)
    for scoring in SCORINGS:
        ids, weights = kernel.route(logits, 3, scoring=scoring, num_groups=3, top_groups=2)
        assert ids.shape == weights.shape == (*shape[:-1], 3)
        assert ids.dtype is torch.int64 and weights.dtype is FLOAT
        assert ids.device == weights.device == logits.device
        if gradients:
            weights.sum().backward()
            assert logits.grad is not None and logits.grad.shape == shape


@pytest.mark.parametrize("logits_dtype", (FLOAT, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("renormalize", (True, False))
@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradient(
    kernel: ModuleType, device: str, scoring: str, renormalize: bool, logits_dtype: torch.dtype
) -> None:
    """Case B56: of the logits, against autograd in float64; ids have none, nor has a bias."""
    for top_k, bias in ((6, None), (1, None), (4, random(24, device=device).requires_grad_())):
        logits = random(2, 3, 24, device=device, dtype=logits_dtype).requires_grad_()
        given = random(2, 3, top_k, device=device)
        ids, weights = kernel.route(
            logits, top_k, scoring=scoring, renormalize=renormalize, bias=bias, scale=1.5
        )
        assert weights.requires_grad and not ids.requires_grad
        inputs = (logits,) if bias is None else (logits, bias)
        grad, *others = torch.autograd.grad(weights, inputs, given, allow_unused=True)
        assert grad.shape == logits.shape and grad.dtype is logits_dtype and others in ([], [None])
        found = []
        for exact in (torch.float64, FLOAT):
            leaf = logits.detach().to(exact).requires_grad_()
            mixed = weigh(leaf, ids, scoring, renormalize, 1.5)
            found += torch.autograd.grad(mixed, leaf, given.to(exact))
        if top_k == 1 and renormalize:  # a constant 1: only rounding is left
            assert float(grad.abs().max()) <= 2 * float(given.abs().max()) * torch.finfo(FLOAT).eps
        else:
            check_tensor(grad, found[0], found[1].to(logits_dtype))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_values_are_those_without_gradients(kernel: ModuleType, device: str, scoring: str) -> None:
    """The operator and the plain call are one computation."""
    logits, bias = random(5, 24, device=device), random(24, device=device)
    options = {"scoring": scoring, "bias": bias, "num_groups": 4, "top_groups": 2, "scale": 2.5}
    plain = kernel.route(logits, 5, **options)
    graph = kernel.route(logits.clone().requires_grad_(), 5, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, graph, strict=True))
    with torch.no_grad():
        quiet = kernel.route(logits.clone().requires_grad_(), 5, **options)
    assert not quiet[1].requires_grad and torch.equal(quiet[1], plain[1])


def test_gradient_reaches_what_made_the_logits(kernel: ModuleType, device: str) -> None:
    """Case B56: a router learns; also through logits that are transposed."""
    x, router = random(5, 16, device=device), random(16, 12, device=device).requires_grad_()
    for logits in (x @ router, (router.t() @ x.t()).t()):
        ids, weights = kernel.route(logits, 3, scoring="sigmoid")
        (grad,) = torch.autograd.grad(weights.square().sum(), router)
        exact = []
        for dtype in (torch.float64, FLOAT):
            leaf = router.detach().to(dtype).requires_grad_()
            mixed = weigh(x.to(dtype) @ leaf, ids, "sigmoid")
            exact += torch.autograd.grad(mixed.square().sum(), leaf)
        check_tensor(grad, *exact)


@pytest.mark.parametrize("renormalize", (True, False))
@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradient_beside_what_is_not_finite(
    kernel: ModuleType, device: str, scoring: str, renormalize: bool
) -> None:
    """Class 2: a bad token takes no other with it."""
    logits = random(4, 12, device=device)
    (clean,) = _gradients(kernel, logits[2:], scoring, renormalize)
    logits[0], logits[1, 3] = NAN, NAN
    (grad,) = _gradients(kernel, logits, scoring, renormalize)
    assert bool(grad.isfinite().all()) and torch.equal(grad[2:], clean)


def _gradients(
    kernel: ModuleType, logits: Tensor, scoring: str, renormalize: bool
) -> tuple[Tensor, ...]:
    leaf = logits.clone().requires_grad_()
    _, weights = kernel.route(leaf, 3, scoring=scoring, renormalize=renormalize)
    return torch.autograd.grad(weights.square().sum(), leaf)


def test_same_bits_again(kernel: ModuleType, device: str) -> None:
    """Case B41; results never alias the logits, and are contiguous."""
    logits = random(130, 64, device=device)
    first = kernel.route(logits, 8)
    for _ in range(5):
        again = kernel.route(logits, 8)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # The operator's fake says so to whoever compiles.
    assert all(each.is_contiguous() for each in first)
    storages = {each.untyped_storage().data_ptr() for each in (logits, *first)}
    assert len(storages) == 3
