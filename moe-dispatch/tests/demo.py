"""What `make demo` shows of moe-dispatch: its functions, and models of transformers that use it."""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from kernels import (
    LayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from monorepo.built import load_file
from monorepo.comparison import Comparison

models = load_file(Path(__file__).with_name("models.py"))

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 64, 48


def comparisons(kernel: ModuleType, device: torch.device) -> Iterator[Comparison]:
    """Compare the choice, the experts, the whole layer and the gradients."""
    logits = torch.randn(17, 64, device=device)
    for scoring in ("softmax", "topk_softmax", "sigmoid"):
        actual = _spread(*kernel.route(logits, 6, scoring=scoring), 64)
        results = actual, _routing(logits.double(), scoring), _routing(logits, scoring)
        yield Comparison("route", scoring, tuple(logits.shape), *results)
    for dtype, activation in itertools.product(DTYPES, ("silu", "gelu_tanh", "swiglu_oai")):
        x, gate_up, down, ids, mix = _problem(17, device, dtype)
        out = kernel.fused_experts(x, gate_up, down, ids, mix, activation=activation)
        doubles = [tensor.double() for tensor in (x, gate_up, down)]
        exact = _experts(*doubles, ids, mix.double(), activation)
        results = out, exact, _experts(x, gate_up, down, ids, mix, activation)
        yield Comparison("fused_experts", activation, tuple(x.shape), *results, whole=True)
    for dtype, tokens in itertools.product(DTYPES, (1, 17)):
        x, gate_up, down, _, _ = _problem(tokens, device, dtype)
        router = torch.randn(EXPERTS, HIDDEN, device=device, dtype=dtype) / HIDDEN
        gate, up = gate_up.chunk(2, 1)
        shape = tuple(x.shape)
        out, *chosen = kernel.fused_moe_forward(x, router, gate, up, down, EXPERTS, TOP_K)
        exact = _routed(x.double(), router.double())
        ids, mix = _routed(x.float(), router.float())
        peer = ids, mix.to(dtype)
        doubles = [tensor.double() for tensor in (x, gate_up, down)]
        results = out, _experts(*doubles, *exact), _experts(x, gate_up, down, *peer)
        yield Comparison("fused_moe_forward", "random", shape, *results, whole=True)
        results = [_spread(*choice, EXPERTS) for choice in (chosen, exact, peer)]
        yield Comparison("fused_moe_forward, weights", "random", shape, *results, whole=True)
    for dtype in DTYPES:
        x, gate_up, down, ids, mix = _problem(17, device, dtype)
        tensors, dy = (x, gate_up, down, mix), torch.randn_like(x)
        gradients = (
            _gradients(kernel.fused_experts, tensors, ids, dy),
            _gradients(_experts, [tensor.double() for tensor in tensors], ids, dy.double()),
            _gradients(_experts, tensors, ids, dy),
        )
        names = ("dx", "dgate_up", "ddown", "dweights")
        for name, results in zip(names, zip(*gradients, strict=True), strict=True):
            what = f"fused_experts, {name}"
            yield Comparison(what, "silu", tuple(x.shape), *results, whole=True)


def in_models(
    kernel: ModuleType, repository: dict[str, object], device: torch.device
) -> Iterator[Comparison | str]:
    """Compare the logits of small models, their experts swapped for ours.

    Each of the three models compared has its own router, as users' models do, in its own dtype.
    The prompts are such that rounding changes no choice: see `models.prompt`.
    """
    calls = 0

    def counted(*arguments: object) -> Tensor:
        nonlocal calls
        calls += 1
        return kernel.experts_forward(*arguments)

    ALL_EXPERTS_FUNCTIONS.register("roofline", counted)
    for name, dtype in itertools.product(models.MODELS, DTYPES):
        plain = models.small_model(name, device, dtype)
        exact = models.in_float64(plain)
        tokens = models.prompt(exact)
        others = [models.logits(model, tokens) for model in (exact, plain)]
        ours, calls = copy.deepcopy(plain), 0
        ours.set_experts_implementation("roofline")
        results = models.logits(ours, tokens), *others
        if calls != len(models.routers(ours)):
            raise RuntimeError(f"{name}: wanted a call for each of its layers, got {calls}")
        shape = tuple(results[0].shape)
        yield Comparison("experts_forward, logits", f"a small {name}", shape, *results, whole=True)
        if name == "gpt-oss":
            ours = copy.deepcopy(plain)
            origin = _bind(kernel, repository, ours)
            results = models.logits(ours, tokens), *others
            what = "MegaBlocksMoeMLP, logits"
            yield Comparison(what, f"a small {name}", shape, *results, whole=True)
    yield f"(kernelize bound the {len(models.mlps(ours))} layers of gpt-oss to {origin})"


def _problem(tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return random x, gate_up, down, ids and weights."""
    x = torch.randn(tokens, HIDDEN)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER) * INNER**-0.5
    mix, ids = torch.randn(tokens, EXPERTS).softmax(-1).topk(TOP_K)
    x, gate_up, down, mix = (tensor.to(device, dtype) for tensor in (x, gate_up, down, mix))
    return x, gate_up, down, ids.to(device), mix


def _routed(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their part of the softmax over all."""
    weights, ids = F.linear(x, router).softmax(-1).topk(TOP_K)
    return ids, weights


def _routing(logits: Tensor, scoring: str) -> Tensor:
    """Return the weights `[tokens, experts]`, 0 for experts that are not chosen."""
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    weights, ids = scores.topk(6)
    # The softmax of the chosen logits is their part of the whole softmax, renormalised.
    return _spread(ids, weights / weights.sum(-1, keepdim=True), logits.shape[1])


def _spread(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Return weights `[tokens, experts]`, each in its expert's place: a wrong expert shows."""
    return weights.new_zeros(len(weights), experts).scatter(1, ids, weights)


def _experts(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, mix: Tensor, activation: str = "silu"
) -> Tensor:
    """The experts in PyTorch, at the dtype of x."""
    gate, up = torch.einsum("tkoh,th->tko", gate_up[ids], x).chunk(2, -1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        h = gate * (1.702 * gate).sigmoid() * (up + 1)
    else:
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        h = gate * up
    y = torch.einsum("tkhi,tki->tkh", down[ids], h)
    return (y * mix.to(y.dtype).unsqueeze(-1)).sum(1)


def _gradients(function, tensors, ids: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, gate_up, down, mix = tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(x, gate_up, down, ids, mix), tensors, dy)


def _bind(kernel: ModuleType, repository: dict[str, object], model: torch.nn.Module) -> str:
    """Kernelize a gpt-oss; return the module that the forward of its layers comes from: ours."""
    layers = models.mlps(model)
    # transformers does this itself, but only for the versions of `kernels` that it knows.
    replace_kernel_forward_from_hub(type(layers[0]), "MegaBlocksMoeMLP")
    layer = LayerRepository(**repository, layer_name="MegaBlocksMoeMLP")
    mapping = {"MegaBlocksMoeMLP": {model.device.type: layer}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=model.device.type)
    origins = {layer.forward.__func__.__module__ for layer in layers}
    if origins != {f"{kernel.__name__}.layers"}:
        raise RuntimeError(f"kernelize: wanted layers of {kernel.__name__}.layers, got {origins}")
    return origins.pop()
