"""What `make demo` shows of rmsnorm: the norms of real models, and a Llama that uses ours."""

import copy
import functools
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from kernels import (
    LayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from monorepo.comparison import Comparison

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Shape and epsilon of each norm, for a few tokens; Qwen3 also normalises each of its heads.
MODELS = {
    "Llama-3-8B": ((4, 4096), 1e-5),
    "Qwen3-30B": ((4, 2048), 1e-6),
    "Qwen3-30B heads": ((1, 32, 128), 1e-6),
    "DeepSeek-V3": ((4, 7168), 1e-6),
}

Norm = Callable[[Tensor, Tensor], Tensor]


def comparisons(kernel: ModuleType, device: torch.device) -> Iterator[Comparison]:
    """Compare the norm, the norm of a sum and the gradients at the sizes of each model."""
    for model, (shape, eps) in MODELS.items():
        ours = functools.partial(kernel.rmsnorm, eps=eps, rounding="before_weight")
        exact, llama = (functools.partial(norm, eps=eps) for norm in (_exact, _llama))
        for dtype in DTYPES:
            x, residual, dy = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
            weight = torch.randn(shape[-1:], device=device, dtype=dtype)
            results = ours(x, weight), exact(x, weight), llama(x, weight)
            yield Comparison("rmsnorm", model, shape, *results)

            y, total = kernel.add_rmsnorm(x, residual, weight, eps, rounding="before_weight")
            results = total, x.double() + residual.double(), x + residual
            yield Comparison("add_rmsnorm, sum", model, shape, *results)
            results = y, exact(total, weight), llama(total, weight)
            yield Comparison("add_rmsnorm, norm", model, shape, *results)

            doubles = x.double(), weight.double(), dy.double()
            gradients = (
                _gradients(ours, x, weight, dy),
                _gradients(exact, *doubles),
                _gradients(llama, x, weight, dy),
            )
            for name, results in zip(("dx", "dweight"), zip(*gradients, strict=True), strict=True):
                yield Comparison(f"rmsnorm backward, {name}", model, shape, *results, whole=True)


def in_models(
    kernel: ModuleType, repository: dict[str, object], device: torch.device
) -> Iterator[Comparison | str]:
    """Compare the logits of a small Llama with random weights, its norms swapped for ours."""
    # transformers marks its class only for the versions of `kernels` that it knows.
    replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
    layer = LayerRepository(**repository, layer_name="RMSNorm")
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2,
    )  # fmt: skip
    for dtype in DTYPES:
        plain = LlamaForCausalLM(config).to(device, dtype).eval()
        for norm in _norms(plain):
            torch.nn.init.normal_(norm.weight, mean=1.0, std=0.1)
        exact = copy.deepcopy(plain).double()
        for norm in _norms(exact):
            # Llama's own forward goes through float32, whatever the dtype.
            norm.forward = functools.partial(_exact, weight=norm.weight, eps=norm.variance_epsilon)
        ours = copy.deepcopy(plain)
        with use_kernel_mapping({"RMSNorm": {device.type: layer}}, inherit_mapping=False):
            ours = kernelize(ours, mode=Mode.INFERENCE, device=device.type)
        origin = _origin(kernel, ours)
        tokens = torch.randint(config.vocab_size, (1, 16), device=device)
        with torch.no_grad():
            logits = [model(tokens).logits for model in (ours, exact, plain)]
        yield Comparison("logits", "a small Llama", tuple(logits[0].shape), *logits, whole=True)
    yield f"(kernelize bound its {len(_norms(ours))} norms to {origin})"


def _exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm = LlamaRMSNorm(weight.numel(), eps)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def _gradients(norm: Norm, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, weight = (tensor.clone().requires_grad_() for tensor in (x, weight))
    y = norm(x, weight)
    return torch.autograd.grad(y, (x, weight), dy)


def _norms(model: torch.nn.Module) -> list[LlamaRMSNorm]:
    return [module for module in model.modules() if isinstance(module, LlamaRMSNorm)]


def _origin(kernel: ModuleType, model: torch.nn.Module) -> str:
    """Return the module that the forward of the model's norms comes from: ours."""
    origins = {norm.forward.__func__.__module__ for norm in _norms(model)}
    if origins != {f"{kernel.__name__}.layers"}:
        raise RuntimeError(f"kernelize: wanted norms of {kernel.__name__}.layers, got {origins}")
    return origins.pop()
