"""Layers that `kernelize` binds, and functions as `kernels` reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from kernels import (
    FuncRepository,
    LayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from monorepo.numerics import check_elements, check_tensor

from .oracle import DTYPES, Problem, part

MODES = (
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
)
# The branch, not the number: a number is looked up at a Hub even where LOCAL_KERNELS answers.
REPOSITORY = {"repo_id": "roofline-kernels/rmsnorm", "revision": "v1"}
LLAMA = LayerRepository(**REPOSITORY, layer_name="RMSNorm")
GEMMA = LayerRepository(**REPOSITORY, layer_name="GemmaRMSNorm")


# transformers marks its class only for the versions of `kernels` that it knows.
replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")


@use_kernel_forward_from_hub("RMSNorm")
class NormWithEps(nn.Module):
    """A norm whose epsilon has the other name."""

    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@use_kernel_forward_from_hub("GemmaRMSNorm")
class Gemma(GemmaRMSNorm):
    """Gemma's norm, which transformers leaves unmapped."""


@pytest.fixture
def calls(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The keyword arguments of each call that our layers make."""
    layers, made = part(kernel, "layers"), []
    function = layers.rmsnorm

    def counted(*args: object, **kwargs: object) -> Tensor:
        made.append(kwargs)
        return function(*args, **kwargs)

    monkeypatch.setattr(layers, "rmsnorm", counted)
    return made


def bind(
    module: nn.Module, device: str, mode: Mode, mapping: object = LLAMA, **options: object
) -> nn.Module:
    """Kernelize with our layers and nothing else."""
    gemma = {"GemmaRMSNorm": {device: GEMMA}}
    with use_kernel_mapping({"RMSNorm": {device: mapping}, **gemma}, inherit_mapping=False):
        return kernelize(module, mode=mode, device=device, **options)


def is_ours(module: nn.Module, kernel: ModuleType) -> bool:
    return module.forward.__func__.__module__ == f"{kernel.__name__}.layers"


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llama_norm(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    calls: list[dict[str, object]],
    mode: Mode,
    dtype: torch.dtype,
) -> None:
    """Cases B67, B106: bound in every mode, from our package, and called."""
    norm = LlamaRMSNorm(96, eps=1e-5).to(device, dtype)
    nn.init.normal_(norm.weight)
    ours = bind(copy.deepcopy(norm), device, mode, use_fallback=False)
    assert is_ours(ours, kernel)
    x = torch.randn(2, 7, 96).to(device, dtype)
    with torch.no_grad():
        got, wanted = ours(x), norm(x)
    assert calls == [{"rounding": "before_weight"}]
    exact = Problem(x, weight=norm.weight.detach(), eps=1e-5).exact()
    check_elements(got, exact, wanted)
    assert uses_triton or torch.equal(got, wanted)


@pytest.mark.parametrize("eps", (1e-6, 0.5))
def test_either_name_of_epsilon(
    kernel: ModuleType, device: str, calls: list[dict[str, object]], eps: float
) -> None:
    """norm.md 5, #15: `variance_epsilon` (Llama) or `eps`; a wrong one would show at 0.5."""
    x = torch.randn(3, 64, device=device)
    for norm in (NormWithEps(64, eps), LlamaRMSNorm(64, eps)):
        norm = norm.to(device).requires_grad_(False)
        wanted = norm(x)
        got = bind(norm, device, Mode.INFERENCE, use_fallback=False)(x)
        check_elements(got, Problem(x, weight=norm.weight, eps=eps).exact(), wanted)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemma_norm(
    kernel: ModuleType, device: str, calls: list[dict[str, object]], dtype: torch.dtype
) -> None:
    """Case B16: Gemma's weight is offset by 1, and its norm rounds once."""
    norm = Gemma(96).to(device, dtype).requires_grad_(False)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 7, 96).to(device, dtype)
    wanted = norm(x)
    ours = bind(norm, device, Mode.TRAINING | Mode.TORCH_COMPILE, use_fallback=False)
    assert is_ours(ours, kernel)
    got = ours(x)
    assert calls == [{"offset": 1.0}]
    check_elements(got, Problem(x, weight=norm.weight, offset=1.0).exact(), wanted)


@pytest.mark.parametrize("gradients", (False, True), ids=("inference", "training"))
def test_compiled_layer(kernel: ModuleType, device: str, gradients: bool) -> None:
    mode = (Mode.TRAINING if gradients else Mode.INFERENCE) | Mode.TORCH_COMPILE
    norm = bind(LlamaRMSNorm(96).to(device), device, mode, use_fallback=False)
    norm.requires_grad_(gradients)
    x = torch.randn(3, 96, device=device, requires_grad=gradients)
    results = []
    for function in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
        y = function(x)
        found = torch.autograd.grad(y.square().sum(), (x, norm.weight)) if gradients else ()
        results.append((y, *found))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mode_chain(kernel: ModuleType, device: str) -> None:
    """Case B67: which forward is used for what is registered, as `kernels` documents it."""
    registered = {
        "inference": {Mode.INFERENCE: LLAMA},
        "training": {Mode.TRAINING: LLAMA},
        "training with compile": {Mode.TRAINING | Mode.TORCH_COMPILE: LLAMA},
        "any": LLAMA,
    }
    norm = LlamaRMSNorm(8).to(device)
    bound = {
        name: [is_ours(bind(copy.copy(norm), device, mode, what), kernel) for mode in MODES]
        for name, what in registered.items()
    }
    assert bound == {
        "inference": [True, False, False, False],
        "training": [True, True, False, False],
        "training with compile": [True, True, True, True],
        "any": [True, True, True, True],
    }


def llama(device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, dtype)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)
    return model


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
def test_llama_model(
    kernel: ModuleType,
    device: str,
    uses_triton: bool,
    calls: list[dict[str, object]],
    train: bool,
    dtype: torch.dtype,
) -> None:
    """norm.md 5, #6: the model's logits and gradients stay as near to float64 as they were."""
    plain = llama(device, dtype).train(train)
    exact = copy.deepcopy(plain).double()
    for module in exact.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = float64_norm(module)
    ours = copy.deepcopy(plain)
    bind(ours, device, Mode.TRAINING if train else Mode.INFERENCE)
    norms = [module for module in ours.modules() if isinstance(module, LlamaRMSNorm)]
    assert len(norms) == 5 and all(is_ours(module, kernel) for module in norms)
    tokens = torch.randint(128, (2, 16), device=device)
    logits = {}
    for name, model in (("plain", plain), ("exact", exact), ("ours", ours)):
        with torch.set_grad_enabled(train):
            output = model(tokens, labels=tokens) if train else model(tokens)
        logits[name] = output.logits.detach()
        if train:
            output.loss.backward()
    assert len(calls) == 5
    check_tensor(logits["ours"], logits["exact"], logits["plain"])
    assert uses_triton or torch.equal(logits["ours"], logits["plain"])
    if train:
        parameters = zip(
            ours.named_parameters(), exact.parameters(), plain.parameters(), strict=True
        )
        for (name, got), reference, peer in parameters:
            assert got.grad is not None, name
            check_tensor(got.grad, reference.grad, peer.grad)


def float64_norm(module: LlamaRMSNorm) -> Callable[[Tensor], Tensor]:
    """Llama's own forward goes through float32, whatever the dtype."""

    def forward(x: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return module.weight * x / (mean + module.variance_epsilon).sqrt()

    return forward


@pytest.mark.parametrize("name", ("rmsnorm", "rmsnorm_residual_fused", "add_rmsnorm"))
def test_functions_state_what_they_can_do(kernel: ModuleType, name: str) -> None:
    function = getattr(kernel, name)
    assert function.has_backward is True and function.can_torch_compile is True
    layer = FuncRepository(**REPOSITORY, func_name=name).load()
    assert layer.has_backward is True and layer.can_torch_compile is True


@pytest.mark.parametrize("name", ("RMSNorm", "GemmaRMSNorm"))
def test_layers_state_what_they_can_do(kernel: ModuleType, name: str) -> None:
    layer = getattr(kernel.layers, name)
    assert layer.has_backward is True and layer.can_torch_compile is True
    assert layer.__init__ is nn.Module.__init__ and layer.__doc__
    assert LayerRepository(**REPOSITORY, layer_name=name).load() is layer
