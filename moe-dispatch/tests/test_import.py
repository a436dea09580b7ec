"""The public names, and what importing the package asks of a machine."""

from __future__ import annotations

import inspect
import os
from types import ModuleType

import pytest

from imports import check_described, fresh, fresh_without_triton, import_again, plain

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="importing is the same with and without the interpreter",
)
FUNCTIONS = {
    "fused_moe_forward": "(hidden_states, router_weight, w_gate, w_up, w_down, num_experts, top_k, "
    "gating='softmax')",
    "moe_router": "(hidden_states, router_weight, top_k, gating='softmax', router_bias=None)",
    "compute_permutation_indices": "(top_k_indices, num_experts)",
    "permute_tokens": "(hidden_states, top_k_indices, num_experts)",
    "unpermute_tokens": "(expert_outputs, top_k_weights, restore_idx, num_tokens, top_k)",
    "grouped_gemm": "(tokens, weights, expert_offsets, num_experts)",
    "fused_expert_ffn": "(permuted_tokens, w_gate, w_up, w_down, expert_offsets, num_experts, "
    "top_k_weights, sorted_idx, num_tokens, top_k)",
    "route": "(logits, top_k, *, scoring='softmax', renormalize=True, bias=None, num_groups=1, "
    "top_groups=1, scale=1.0)",
    "fused_experts": "(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, *, "
    "activation='silu', gate_up_bias=None, down_bias=None, alpha=1.702, limit=7.0, "
    "interleaved=False, expert_map=None)",
    "experts_forward": "(self, hidden_states, top_k_index, top_k_weights)",
}
LAYERS = ("MegaBlocksMoeMLP",)


def test_public_names(kernel: ModuleType) -> None:
    """DESIGN.md, "Public API, version 1"."""
    assert sorted(kernel.__all__) == sorted([*FUNCTIONS, "layers"])
    for name in kernel.__all__:
        assert inspect.getdoc(getattr(kernel, name)), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_and_docstring(kernel: ModuleType, name: str) -> None:
    function = getattr(kernel, name)
    assert plain(function) == FUNCTIONS[name]
    check_described(function, ("Args:", "Returns:", "Raises:", "Example:"))


@pytest.mark.parametrize("name", LAYERS)
def test_layer(kernel: ModuleType, name: str) -> None:
    """What `kernelize` binds: no state of its own, and what it says of itself."""
    layer = getattr(kernel.layers, name)
    assert inspect.getdoc(layer) and inspect.getdoc(layer.forward)
    assert "__init__" not in vars(layer)
    assert layer.has_backward is True and layer.can_torch_compile is True


CALL = """
    import torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/moe-dispatch", version=1)
    assert not torch.cuda.is_initialized()
    x, router = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16)
    weights = torch.randn(8, 8, 16), torch.randn(8, 8, 16), torch.randn(8, 16, 8)
    out, ids, mix = kernel.fused_moe_forward(x, router, *weights, 8, 2)
    out.sum().backward()
    assert x.grad is not None and ids.shape == mix.shape == (4, 2)
    ids, mix = kernel.route(torch.randn(4, 8), 2)
    both = torch.cat(weights[:2], 1)
    assert kernel.fused_experts(x.detach(), both, weights[2], ids, mix).shape == (4, 16)
    rows, offsets, order, restore = kernel.permute_tokens(x.detach(), ids, 8)
    y = kernel.fused_expert_ffn(rows, *weights, offsets, 8, mix, order, 4, 2)
    assert y.shape == kernel.unpermute_tokens(rows, mix, restore, 4, 2).shape == (4, 16)
    assert not torch.cuda.is_initialized()
"""


def test_import_without_a_gpu(kernel: ModuleType) -> None:
    """Case B109: with Triton there and no device to be seen; nothing starts CUDA."""
    fresh(CALL, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_import_starts_no_cuda(kernel: ModuleType) -> None:
    fresh(CALL)


def test_import_without_triton(kernel: ModuleType) -> None:
    """Case B109: the reference needs only torch, gradients included."""
    fresh_without_triton(CALL)


@pytest.mark.parametrize("module", ("_shared.arrivals", "ops"))
def test_import_again_after_a_failure(kernel: ModuleType, module: str) -> None:
    """Case B104: what the first attempt left behind does not break the second."""
    import_again("roofline-kernels/moe-dispatch", module, CALL)
