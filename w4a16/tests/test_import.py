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

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="importing is the same with and without the interpreter",
)
ROOT = Path(__file__).resolve().parents[2]
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


def plain(function: object) -> str:
    """Return a signature without annotations."""
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_public_names(kernel: ModuleType) -> None:
    """DESIGN.md, "Public API, version 1"."""
    assert sorted(kernel.__all__) == sorted([*FUNCTIONS, *CLASSES])
    for name in kernel.__all__:
        assert inspect.getdoc(getattr(kernel, name)), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_and_docstring(kernel: ModuleType, name: str) -> None:
    function = getattr(kernel, name)
    assert plain(function) == FUNCTIONS[name]
    text = inspect.getdoc(function)
    for section in ("Args:", "Returns:"):
        assert section in text, section
    assert "Raises:" in text or name == "supports"
    for parameter in inspect.signature(function).parameters:
        assert f"    {parameter}: " in text, f"{parameter} is not described"


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


def fresh(code: str, **environment: str) -> None:
    """Run code in a new process that can load the kernel."""
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


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
    fresh("import sys\nsys.modules['triton'] = None\n" + textwrap.dedent(CALL))


RETRY = """
    import sys
    import torch
    from kernels import get_kernel

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("_w4a16") and name.endswith(MODULE):
                raise ImportError("refused for once")

    sys.meta_path.insert(0, Refuse())
    try:
        get_kernel("roofline-kernels/w4a16", version=1)
    except ImportError as error:
        assert "refused for once" in str(error)
    else:
        raise AssertionError("nothing was refused")
    del sys.meta_path[0]
    kernel = get_kernel("roofline-kernels/w4a16", version=1)
    x = torch.randn(3, 64).half().requires_grad_()
    kernel.w4a16_gemm(x, kernel.quantize(torch.randn(8, 64), 32)).sum().backward()
    assert x.grad is not None
"""


@pytest.mark.parametrize("module", ("_shared.arrivals", "ops"))
def test_import_again_after_a_failure(kernel: ModuleType, module: str) -> None:
    """Case B104: what the first attempt left behind does not break the second."""
    fresh(f"MODULE = {'.' + module!r}\n" + textwrap.dedent(RETRY))
