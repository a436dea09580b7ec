"""The experts of transformers' models, by our kernels."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from .api import fused_experts

_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run a model's experts: an experts implementation for transformers.

    To be registered under a name that models are then loaded with::

        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register("roofline", experts_forward)
        model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="roofline")

    Args:
        self: The model's experts, with the attributes that `use_experts_implementation` gives
            them: fused or interleaved gates, transposed weights and biases are all taken.
        hidden_states: `[tokens, hidden]`.
        top_k_index: `[tokens, top_k]`; an id of `num_experts` or more is skipped.
        top_k_weights: `[tokens, top_k]`.

    Returns:
        `[tokens, hidden]`, differentiable as `fused_experts` is.

    Raises:
        NotImplementedError: The experts have no gate, a norm after them, or an activation that is
            not SiLU, GELU with tanh, or that of gpt-oss.
        TypeError: An argument is of another type or dtype.
        ValueError: A shape or device does not fit.

    Example:
        >>> ALL_EXPERTS_FUNCTIONS.register("roofline", experts_forward)
    """
    kind, module = type(self).__name__, cast(Any, self)
    if not module.has_gate or module.has_post_expert_norm:
        raise NotImplementedError(
            f"experts_forward: {kind} has no gate, or a norm after its experts; choose another "
            "experts_implementation"
        )
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    activation, alpha, limit = _activation(module)
    return fused_experts(
        hidden_states, gate_up, down, top_k_index, top_k_weights, activation=activation,
        gate_up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        alpha=alpha, limit=limit, interleaved=not module.is_concatenated,
    )  # fmt: skip


def _activation(module: Any) -> tuple[str, float, float]:
    """Return the activation of a model's experts, and its alpha and limit."""
    # By names: torch.compile follows them, and transformers need not be there to be imported.
    owner: Any = next(base for base in type(module).__mro__ if "_apply_gate" in base.__dict__)
    if owner.__name__ == "GptOssExperts":
        return "swiglu_oai", module.alpha, module.limit
    if owner._apply_gate.__name__ == "_default_apply_gate":
        function = module.act_fn
        if isinstance(function, torch.nn.GELU) and function.approximate == "tanh":
            return "gelu_tanh", 1.702, 7.0
        name = _ACTIVATIONS.get(type(function).__name__)
        if name is not None:
            return name, 1.702, 7.0
    raise NotImplementedError(
        f"experts_forward: the activation of {type(module).__name__} is not SiLU, GELU with tanh "
        "or that of gpt-oss; choose another experts_implementation"
    )
