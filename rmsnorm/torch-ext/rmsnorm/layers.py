"""Stateless layers that `kernelize` binds onto a model's own modules.

Only `forward` is bound: `self` is the model's module, with its weight and its epsilon.
"""

import torch
from torch import nn

from .api import rmsnorm


def _epsilon(module: nn.Module) -> float:
    """Return a norm's epsilon under either of the names that models use."""
    epsilon: float | None = getattr(module, "variance_epsilon", None)
    if epsilon is None:
        epsilon = getattr(module, "eps", None)
    if epsilon is None:
        raise ValueError(
            f"RMSNorm: {type(module).__name__} has neither variance_epsilon nor eps, "
            "or it is None; a number is needed"
        )
    return epsilon


class RMSNorm(nn.Module):
    """RMSNorm as Llama in transformers computes it: rounded before the weight.

    Not for models that multiply before they round (Olmo2, for example): those take the function
    with `rounding="once"`. Reads `weight` [n] and `variance_epsilon` or `eps`. The result has the
    dtype of `hidden_states` [..., n].
    """

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the norm of `hidden_states` [..., n] over its last dimension."""
        return rmsnorm(hidden_states, self.weight, _epsilon(self), rounding="before_weight")


class GemmaRMSNorm(nn.Module):
    """RMSNorm as Gemma computes it: times (1 + weight), all in float32, rounded once.

    Not for models that multiply before they round (Olmo2, for example): those take the function
    with `rounding="once"`. Reads `weight` [n] and `eps` or `variance_epsilon`.
    """

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the norm of `hidden_states` [..., n] over its last dimension."""
        return rmsnorm(hidden_states, self.weight, _epsilon(self), offset=1.0)
