"""The layer that `kernelize` binds in gpt-oss."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from kernels import (
    LayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from monorepo.numerics import check_elements, check_tensor

from .models import gradients_of, in_float64, logits, mlps, prompt, small_model
from .oracle import INTERPRETED

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MODES = (
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
)
# The branch, not the number: a number is looked up at a Hub even where LOCAL_KERNELS answers.
LAYER = LayerRepository(
    "roofline-kernels/moe-dispatch", revision="v1", layer_name="MegaBlocksMoeMLP"
)
# transformers marks its class only for the versions of `kernels` that it knows.
replace_kernel_forward_from_hub(GptOssMLP, "MegaBlocksMoeMLP")


def bound(module: nn.Module, device: str, mode: Mode = Mode.INFERENCE) -> nn.Module:
    """A copy with our layers and nothing else."""
    mapping = {"MegaBlocksMoeMLP": {device: LAYER}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(copy.deepcopy(module), mode=mode, device=device)


def check_ours(module: nn.Module, kernel: ModuleType, count: int) -> None:
    """Each layer's forward is ours, and not what `kernelize` falls back to."""
    found = [layer.forward.__func__ for layer in mlps(module)]
    assert found == [kernel.layers.MegaBlocksMoeMLP.forward] * count


def one_layer(device: str, dtype: torch.dtype = torch.float32) -> GptOssMLP:
    return mlps(small_model("gpt-oss", device, dtype))[0]


def gradients(layer: nn.Module, x: Tensor, dout: Tensor, dscores: Tensor) -> tuple[Tensor, ...]:
    """Those of the tokens and of each parameter, from both results."""
    x = x.clone().requires_grad_()
    wanted = (x, *layer.requires_grad_(True).parameters())
    return torch.autograd.grad(layer(x), wanted, (dout, dscores))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_bound_in_every_mode(kernel: ModuleType, device: str, mode: Mode) -> None:
    layer = one_layer(device)
    ours = bound(layer, device, mode)
    check_ours(ours, kernel, 1)
    x = torch.randn(1, 1, 64, device=device)
    exact = in_float64(layer)(x.double())
    for got, reference, peer in zip(ours(x), exact, layer(x), strict=True):
        assert got.shape == reference.shape and got.dtype is torch.float32
        check_tensor(got, reference, peer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """As near to float64 as the plain model, with a prompt whose choices rounding cannot change."""
    plain = small_model("gpt-oss", device, dtype)
    exact, ours = in_float64(plain), bound(plain, device)
    check_ours(ours, kernel, 2)
    tokens = prompt(exact)
    check_tensor(*(logits(model, tokens) for model in (ours, exact, plain)))


def test_generation(kernel: ModuleType, device: str) -> None:
    """Several tokens first, then one at a time, which takes another path."""
    plain = small_model("gpt-oss", device, torch.float32)
    tokens = prompt(plain)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ours = bound(plain, device)
    got, wanted = ours.generate(tokens, **options), plain.generate(tokens, **options)
    check_ours(ours, kernel, 2)
    assert got.shape[1] == tokens.shape[1] + 4 and torch.equal(got, wanted)


def test_training(kernel: ModuleType, device: str) -> None:
    """The gradient of each parameter of a model, in its own code elsewhere."""
    plain = small_model("gpt-oss", device, torch.float32).train().requires_grad_(True)
    exact, ours = in_float64(plain), bound(plain, device, Mode.TRAINING)
    check_ours(ours, kernel, 2)
    tokens = prompt(exact)
    for model in (ours, exact, plain):
        model(tokens, labels=tokens).loss.backward()
    check_tensor(*gradients_of(ours, exact, plain))


def test_gradients_of_both_results(device: str) -> None:
    """The model drops the layer's second result, which has gradients all the same."""
    layer = one_layer(device)
    x, dout, dscores = (
        torch.randn(shape, device=device) for shape in ((1, 5, 64),) * 2 + ((5, 2),)
    )
    doubles = [tensor.double() for tensor in (x, dout, dscores)]
    exact = gradients(in_float64(layer), *doubles)
    found = gradients(bound(layer, device, Mode.TRAINING), x, dout, dscores)
    for got, reference, peer in zip(found, exact, gradients(layer, x, dout, dscores), strict=True):
        check_tensor(got, reference, peer)


@pytest.mark.skipif(INTERPRETED, reason="slow, and the kernels of test_logits")
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
def test_compiled(device: str, train: bool) -> None:
    """One graph, the same bits, and tokens of another number without an error."""
    mode = (Mode.TRAINING if train else Mode.INFERENCE) | Mode.TORCH_COMPILE
    layer = bound(one_layer(device), device, mode)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (4, 7):
        shapes = (1, tokens, 64), (1, tokens, 64), (tokens, 2)
        x, dout, dscores = (torch.randn(shape, device=device) for shape in shapes)
        results = []
        for module in (layer, compiled):
            with torch.set_grad_enabled(train):
                found = gradients(module, x, dout, dscores) if train else ()
            with torch.no_grad():
                results.append((*module(x), *found))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_router_is_exact(device: str) -> None:
    """Logits are float32, where the model rounds them: its weights are rounded once."""
    layer = one_layer(device, torch.float16)
    x = torch.randn(1, 64, 64, device=device).half()
    _, got = bound(layer, device)(x)
    _, exact = in_float64(layer)(x.double())
    assert got.dtype is torch.float16
    check_elements(got, exact, exact.half())


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_router_logits(kernel: ModuleType, device: str, mode: Mode) -> None:
    """What transformers takes from the router by a hook, for the auxiliary loss."""
    plain = small_model("gpt-oss", device, torch.float32)
    ours = bound(plain, device, mode)
    check_ours(ours, kernel, 2)
    tokens = prompt(plain)
    before = ours(tokens).logits
    models = (ours, in_float64(plain), plain)
    found = [model(tokens, labels=tokens, output_router_logits=True) for model in models]
    for name in ("logits", "aux_loss", "loss"):
        check_tensor(*(getattr(each, name) for each in found))
    for logits_of_layer in zip(*(each.router_logits for each in found), strict=True):
        check_tensor(*logits_of_layer)
    check_tensor(before, *(each.logits for each in found[1:]))


def test_wrong_tokens_are_refused(device: str) -> None:
    ours = bound(one_layer(device), device)
    with pytest.raises(TypeError, match="^MegaBlocksMoeMLP: hidden_states must be .*float64"):
        ours(torch.randn(1, 1, 64, device=device).double())
    with pytest.raises(TypeError, match="^MegaBlocksMoeMLP: gate_up_proj must have the dtype of"):
        ours(torch.randn(1, 1, 64, device=device).half())
    with pytest.raises(ValueError, match=r"^MegaBlocksMoeMLP: down_proj must be \[experts, 32, "):
        ours(torch.randn(1, 1, 32, device=device))


def test_no_tokens(device: str) -> None:
    out, scores = bound(one_layer(device), device)(torch.empty(2, 0, 64, device=device))
    assert out.shape == (2, 0, 64) and scores.shape == (0, 2)


def test_layer_states_what_it_can_do(kernel: ModuleType) -> None:
    layer = kernel.layers.MegaBlocksMoeMLP
    assert layer.has_backward is True and layer.can_torch_compile is True
    assert layer.__init__ is nn.Module.__init__ and layer.__doc__
    assert LAYER.load() is layer
