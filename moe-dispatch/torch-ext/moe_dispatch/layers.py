"""Stateless layers that `kernelize` binds onto a model's own modules."""

from typing import Any

from torch import Tensor, nn

from . import layouts, ops
from ._shared.checks import check_float_tensor
from .api import check_beside, check_choices, check_weights, fused_experts, moe


class MegaBlocksMoeMLP(nn.Module):
    """The whole layer of gpt-oss: router, choice, experts, weighted sum.

    Reads `router` (`weight` [experts, hidden], `bias` [experts], `top_k`) and `experts`
    (`gate_up_proj` [experts, hidden, 2 * inner] interleaved, `down_proj` [experts, inner, hidden],
    their biases, `alpha`, `limit`) as transformers names them. Logits are float32; a router that
    has hooks is called, and computes them itself.
    """

    has_backward = True
    can_torch_compile = True

    router: nn.Module
    experts: nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [..., hidden] and the router weights [tokens, top_k]."""
        name = "MegaBlocksMoeMLP"
        check_float_tensor(name, "hidden_states", hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        router: Any = self.router
        experts: Any = self.experts
        weights = layouts.Weights(
            experts.gate_up_proj.mT, None, experts.down_proj.mT, experts.gate_up_proj_bias,
            experts.down_proj_bias,
        )  # fmt: skip
        check_weights(name, x, weights, ("gate_up_proj", "", "down_proj"))
        shape = weights.down.shape[0], x.shape[1]
        check_beside(name, "router.weight", router.weight, shape, "hidden_states", x)
        check_beside(name, "router.bias", router.bias, shape[:1], "hidden_states", x)
        check_choices(name, router.top_k, shape[0])
        if router._forward_hooks or router._forward_pre_hooks:
            # Somebody watches the router: transformers, for one, takes the logits of its
            # auxiliary loss (`output_router_logits`) by a hook.
            _, mix, ids = router(x)
            out = fused_experts(
                x, weights.gate_up, weights.down, ids, mix, activation="swiglu_oai",
                gate_up_bias=weights.gate_up_bias, down_bias=weights.down_bias,
                alpha=float(experts.alpha), limit=float(experts.limit), interleaved=True,
            )  # fmt: skip
            return out.view(hidden_states.shape), mix
        out, _, mix = moe(
            name, x, router.weight, router.bias, weights,
            ops.Routing(router.top_k, "topk_softmax", False, 1, 1, 1.0),
            ops.Gating("swiglu_oai", float(experts.alpha), float(experts.limit), True),
        )  # fmt: skip
        return out.view(hidden_states.shape), mix
