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
    "w4a16_gemm": "(x, weight, bias=None)",
    "dequantize": "(weight, dtype)",
    "quantize": "(weight, group_size=128, symmetric=True)",
    "supports": "(*, in_features, out_features, bits=4, group_size=128, symmetric=True, "
    "desc_act=False, dtype=torch.float16)",
    "from_gptq": "(qweight, qzeros, scales, g_idx=None, *, zero_offset='auto')",
    "from_awq": "(qweight, qzeros, scales)",
    "from_compressed_tensors": "(weight_packed, weight_scale, weight_zero_point=None, *, shape, "
    "g_idx=None)",
    "from_hqq": "(W_q, scale, zero, *, shape, axis=1)",
}
CLASSES = ("W4Weight", "W4A16Linear")


def test_public_names(kernel: ModuleType) -> None:
    """DESIGN.md, "Public API, version 1"."""
    assert sorted(kernel.__all__) == sorted([*FUNCTIONS, *CLASSES])
    for name in kernel.__all__:
        assert inspect.getdoc(getattr(kernel, name)), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_and_docstring(kernel: ModuleType, name: str) -> None:
    function = getattr(kernel, name)
    assert plain(function) == FUNCTIONS[name]
    sections = ("Args:", "Returns:", "Raises:")
    # What says why not has nothing to raise.
    check_described(function, sections[:2] if name == "supports" else sections)


@pytest.mark.parametrize("name", CLASSES)
def test_methods_are_described(kernel: ModuleType, name: str) -> None:
    kind = getattr(kernel, name)
    own = [
        value for key, value in vars(kind).items()
        if not key.startswith("_")
        and (callable(value) or isinstance(value, (property, classmethod)))
    ]  # fmt: skip
    assert own
    for value in own:
        assert inspect.getdoc(value), value


CALL = """
    import torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/w4a16", version=1)
    assert not torch.cuda.is_initialized()
    weight = kernel.quantize(torch.randn(8, 64), 32)
    x = torch.randn(3, 64).half().requires_grad_()
    y = kernel.w4a16_gemm(x, weight)
    y.sum().backward()
    assert x.grad is not None and kernel.dequantize(weight, torch.float32).shape == (8, 64)
    assert kernel.W4A16Linear(weight)(x).shape == (3, 8)
    assert not torch.cuda.is_initialized()
"""


def test_import_without_a_gpu(kernel: ModuleType) -> None:
    """Case B109: with Triton there and no device to be seen; nothing starts CUDA."""
    fresh(CALL, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_import_starts_no_cuda(kernel: ModuleType) -> None:
    fresh(CALL)


def test_import_without_triton(kernel: ModuleType) -> None:
    """Case B109: the reference needs only torch, gradients and module included."""
    fresh_without_triton(CALL)


@pytest.mark.parametrize("module", ("_shared.arrivals", "ops"))
def test_import_again_after_a_failure(kernel: ModuleType, module: str) -> None:
    """Case B104: what the first attempt left behind does not break the second."""
    import_again("roofline-kernels/w4a16", module, CALL)
