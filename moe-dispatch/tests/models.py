"""Small mixture-of-experts models of transformers, and the same computed in float64."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "experts_implementation": "eager",
}
MODELS = {
    "Mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            **SIZES, intermediate_size=48, num_local_experts=4, max_position_embeddings=64
        )
    ),
    "Qwen3-MoE": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=4,
            head_dim=16,
            norm_topk_prob=True,
            max_position_embeddings=64,
        )  # fmt: skip
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SIZES, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2, head_dim=16
        )
    ),
}
#: Tokens of a prompt, and how many prompts there are to choose from.
TOKENS, PROMPTS = 8, 64


def small_model(name: str, device: torch.device | str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with random weights, at a scale where all that it computes matters."""
    model = MODELS[name]().eval()
    for key, parameter in model.named_parameters():
        kind = key.rpartition(".")[2]
        if "norm" in key:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        elif kind.endswith("bias") or kind == "sinks":
            nn.init.normal_(parameter, std=0.5)
        elif "embed" in key:
            nn.init.normal_(parameter)
        else:
            transposed = name == "gpt-oss" and parameter.dim() == 3
            nn.init.normal_(parameter, std=parameter.shape[1 if transposed else -1] ** -0.5)
    return model.to(device, dtype).requires_grad_(False)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that computes in float64 what its own code does in float32."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(_norm, module)
    for router in routers(model):
        router.forward = functools.partial(_route, router)
    return model


def _norm(self: nn.Module, x: Tensor) -> Tensor:
    return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def _route(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The routing of all three models: a softmax that is renormalised is one of the chosen."""
    logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight, getattr(self, "bias", None))
    chosen, ids = logits.topk(self.top_k)
    return logits, chosen.softmax(-1), ids


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the model's routers, in order."""
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


def mlps(model: nn.Module) -> list[GptOssMLP]:
    """Return the layers of gpt-oss that `kernelize` binds, in order."""
    return [module for module in model.modules() if isinstance(module, GptOssMLP)]


def prompt(exact: PreTrainedModel) -> Tensor:
    """Return tokens `[1, 8]` whose routing does not depend on rounding.

    A model computed at another precision may choose other experts for a token if two of its logits
    are nearly equal, and then its output is another one altogether. So this takes, of many random
    prompts, the one whose closest choice is the widest: see `closest_choice`.
    """
    tokens = torch.randint(exact.config.vocab_size, (PROMPTS, TOKENS)).to(exact.device)
    best = closest_choice(exact, tokens).argmax()
    return tokens[best : best + 1]


def closest_choice(exact: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return, by prompt, the least distance of a chosen expert's logit from one not chosen."""
    gaps: list[Tensor] = []

    def keep(router: nn.Module, _: object, output: tuple[Tensor, ...]) -> None:
        ordered = output[0].sort(-1, descending=True).values
        gap = ordered[:, router.top_k - 1] - ordered[:, router.top_k]
        gaps.append(gap.view(len(tokens), -1).amin(-1))

    hooks = [router.register_forward_hook(keep) for router in routers(exact)]
    logits(exact, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(gaps).amin(0)


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the logits `[prompts, tokens, vocabulary]`."""
    with torch.no_grad():
        return model(tokens).logits


def gradients_of(ours: nn.Module, exact: nn.Module, plain: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters of each model in one tensor, each at a scale near 1.

    One by one, some of the many would be nearer to float64 in the plain model by chance alone.
    """
    found: list[list[Tensor]] = [[], [], []]
    for name, reference in exact.named_parameters():
        size = reference.grad.square().mean().sqrt()
        scale = torch.exp2(-size.log2().round()) if size > 0 else size + 1
        for grads, model in zip(found, (ours, exact, plain), strict=True):
            grad = model.get_parameter(name).grad
            assert grad is not None, name
            grads.append((grad * scale.to(grad.dtype)).flatten())
    return [torch.cat(grads) for grads in found]
