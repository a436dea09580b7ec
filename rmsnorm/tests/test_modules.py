"""The module with parameters of its own, in the place of `torch.nn.RMSNorm`."""

from __future__ import annotations

import copy
import pickle
from types import ModuleType

import pytest
import torch
from torch import nn

from .oracle import DTYPES, Problem
from .test_forward import check_forward


def test_takes_the_place_of_torch(kernel: ModuleType, device: str) -> None:
    """State of one loads into the other, and the results agree."""
    theirs = nn.RMSNorm(64, eps=1e-5, device=device).requires_grad_(False)
    nn.init.normal_(theirs.weight)
    ours = kernel.RMSNorm(64, eps=1e-5, device=device).requires_grad_(False)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys() == {"weight"}
    x = torch.randn(3, 64, device=device)
    check_forward(Returns(ours(x)), Problem(x, weight=theirs.weight, eps=1e-5))


class Returns:
    """Stands for the kernel in `check_forward`: the result is there already."""

    def __init__(self, y: torch.Tensor) -> None:
        self.rmsnorm = lambda *_, **__: y


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("offset", (0.0, 1.0))
@pytest.mark.parametrize("rounding", ("once", "before_weight"))
def test_options(
    kernel: ModuleType, device: str, rounding: str, offset: float, affine: bool, bias: bool
) -> None:
    module = kernel.RMSNorm(
        48, elementwise_affine=affine, bias=bias, offset=offset, rounding=rounding, device=device
    )
    wanted = [name for name, has in (("weight", affine), ("bias", bias)) if has]
    assert [name for name, _ in module.named_parameters()] == wanted
    x = torch.randn(5, 48).to(device, torch.float16)
    check_forward(Returns(module(x).detach()), Problem(x, rounding=rounding))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    weight, bias_ = (None if p is None else p.detach() for p in (module.weight, module.bias))
    given = Problem(x, None, weight, bias_, offset=offset, rounding=rounding)
    check_forward(Returns(module(x).detach()), given)
    module.reset_parameters()
    check_forward(Returns(module(x).detach()), Problem(x, rounding=rounding))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_of_parameters(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Parameters have the dtype that is asked for, results that of the input."""
    module = kernel.RMSNorm(32, bias=True, device=device, dtype=dtype)
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert {p.device.type for p in module.parameters()} == {device}
    x = torch.randn(2, 32).to(device, torch.float16)
    assert module(x).dtype is torch.float16
    assert kernel.RMSNorm(32, device="meta").to_empty(device=device).weight.device.type == device


def test_learns(kernel: ModuleType, device: str) -> None:
    """Case B56: a step of the optimiser moves what lies before and in the norm."""
    model = nn.Sequential(nn.Linear(16, 32), kernel.RMSNorm(32, bias=True)).to(device)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 16, device=device)).square().sum().add(model[1].bias.sum()).backward()
    optimizer.step()
    assert all(not torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_says_what_it_is(kernel: ModuleType, device: str) -> None:
    text = repr(kernel.RMSNorm(32, eps=1e-5, offset=1.0, rounding="before_weight"))
    assert text == "RMSNorm((32,), eps=1e-05, offset=1.0, rounding='before_weight')"
    assert kernel.RMSNorm.__doc__


def test_copies(kernel: ModuleType, device: str) -> None:
    module = kernel.RMSNorm(32, device=device)
    nn.init.normal_(module.weight)
    x = torch.randn(2, 32, device=device)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))


@pytest.mark.parametrize("shape", (64, (64,), [64], torch.Size([64])))
def test_arguments_of_torch(kernel: ModuleType, shape: object) -> None:
    module = kernel.RMSNorm(normalized_shape=shape, eps=1e-5, elementwise_affine=True)
    assert module.normalized_shape == nn.RMSNorm(shape).normalized_shape == (64,)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    (
        (((4, 64),), ValueError, "one size"),
        ((0,), ValueError, "at least 1"),
        ((64, None), TypeError, "eps must be a number"),
        ((64, -1.0), ValueError, "eps must be finite"),
    ),
)
def test_bad_arguments(
    kernel: ModuleType, arguments: tuple[object, ...], error: type[Exception], text: str
) -> None:
    """At construction, not at the first forward."""
    with pytest.raises(error, match=f"RMSNorm: .*{text}"):
        kernel.RMSNorm(*arguments)
