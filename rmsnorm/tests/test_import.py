"""The public names, and what importing the package asks of a machine."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from imports import ROOT, check_described, fresh, fresh_without_triton, import_again, plain

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="importing is the same with and without the interpreter",
)
FUNCTIONS = {
    "rmsnorm": "(x, weight=None, eps=1e-06, *, bias=None, offset=0.0, rounding='once', "
    "out_dtype=None)",
    "rmsnorm_residual_fused": "(x, residual, weight=None, eps=1e-06, *, bias=None, offset=0.0, "
    "rounding='once', out_dtype=None)",
    "add_rmsnorm": "(x, residual, weight=None, eps=1e-06, *, residual_dtype=None, bias=None, "
    "offset=0.0, rounding='once', out_dtype=None)",
}


def test_public_names(kernel: ModuleType) -> None:
    assert sorted(kernel.__all__) == sorted([*FUNCTIONS, "RMSNorm", "layers"])
    layers = [name for name, value in vars(kernel.layers).items() if inspect.isclass(value)]
    assert sorted(layers) == ["GemmaRMSNorm", "RMSNorm"]
    for name in kernel.__all__:
        assert inspect.getdoc(getattr(kernel, name)), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_and_docstring(kernel: ModuleType, name: str) -> None:
    """The predecessor's arguments keep their order; everything else is by keyword."""
    function = getattr(kernel, name)
    assert plain(function) == FUNCTIONS[name]
    check_described(function, ("Args:", "Returns:", "Raises:"))


CALL = """
    import torch
    from kernels import get_kernel

    kernel = get_kernel("roofline-kernels/rmsnorm", version=1)
    assert not torch.cuda.is_initialized()
    x = torch.randn(3, 64, requires_grad=True)
    y = kernel.rmsnorm(x, torch.ones(64))
    y.sum().backward()
    assert x.grad is not None and kernel.RMSNorm(64)(x).shape == x.shape
"""


def test_import_without_a_gpu(kernel: ModuleType) -> None:
    """Case B109: with Triton there and no device to be seen; nothing starts CUDA."""
    fresh(CALL, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")


def test_import_starts_no_cuda(kernel: ModuleType) -> None:
    fresh(CALL)


def test_import_without_triton(kernel: ModuleType) -> None:
    """Case B109: the reference needs only torch."""
    fresh_without_triton(CALL)


@pytest.mark.parametrize("module", ("_shared.rows", "reference", "ops", "modules"))
def test_import_again_after_a_failure(kernel: ModuleType, module: str) -> None:
    """Case B104: what the first attempt left behind does not break the second."""
    import_again("roofline-kernels/rmsnorm", module, CALL)


def test_interpreter_after_triton_is_refused(tmp_path: Path) -> None:
    """Case B112: the tests say so, instead of failing in odd ways."""
    code = """
        import os, sys
        import triton
        os.environ["TRITON_INTERPRET"] = "1"
        import pytest
        sys.exit(pytest.main(["-q", "rmsnorm/tests/test_smoke.py"]))
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT
    )
    assert finished.returncode == pytest.ExitCode.USAGE_ERROR
    assert "came after triton was imported" in finished.stderr
