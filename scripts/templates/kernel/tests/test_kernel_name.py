"""Values, gradients, compilation, layouts and errors, on the reference, interpreter or a GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from kernels.layer import use_kernel_forward_from_hub

from monorepo.manifest import Manifest
from monorepo.numerics import check_elements

from .smoke import smoke

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = ((), (1,), (7,), (1024,), (3, 1000), (2, 3, 4, 5))


@pytest.mark.kernels_ci
def test_smoke(kernel: ModuleType) -> None:
    smoke(kernel)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(
    kernel: ModuleType, device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(device, dtype)
    before = x.clone()
    y = kernel.kernel_name(x, 0.3)
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    assert y.data_ptr() != x.data_ptr() and torch.equal(x, before)
    check_elements(y, x.double() * 0.3, (x.float() * 0.3).to(dtype))


def test_any_layout(kernel: ModuleType, device: str) -> None:
    x = torch.randn(8, 12, device=device)
    for view in (x.t(), x[:, ::2], x[3], x[:1].expand(4, 12)):
        y = kernel.kernel_name(view, 3.0)
        assert torch.equal(y, 3 * view) and y.is_contiguous()


@pytest.mark.parametrize("shape", ((0,), (3, 0)), ids=str)
def test_no_elements(kernel: ModuleType, device: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.float16, device=device, requires_grad=True)
    y = kernel.kernel_name(x)
    assert (y.shape, y.dtype) == (shape, torch.float16)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape


def test_gradient(kernel: ModuleType, device: str) -> None:
    x = torch.randn(3, 5, device=device, requires_grad=True)
    dy = torch.randn(3, 5, device=device)
    (dx,) = torch.autograd.grad(kernel.kernel_name(x, 0.25), x, dy)
    assert torch.equal(dx, 0.25 * dy)


def test_operator(kernel: ModuleType, device: str) -> None:
    operator = getattr(kernel.ops.kernel_name, "_opoverload", kernel.ops.kernel_name)
    x = torch.randn(3, 5, device=device, requires_grad=True)
    torch.library.opcheck(operator, (x, 0.5))


def test_compiled_is_eager(kernel: ModuleType, device: str) -> None:
    x = torch.randn(3, 5, device=device)
    compiled = torch.compile(kernel.kernel_name, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, 0.3), kernel.kernel_name(x, 0.3))


def test_configuration_of_a_device_is_read(kernel: ModuleType) -> None:
    config = kernel.ops.config
    cpu = torch.device("cpu")
    assert config.forward_config(1024, torch.float32, cpu) == config.ForwardConfig(512, 1)
    heuristic = config.forward_heuristic(1024)
    assert (
        config.forward_config(1024, torch.float16, cpu) == heuristic != config.ForwardConfig(512, 1)
    )


@pytest.mark.parametrize(
    ("x", "factor", "error", "text"),
    (
        ([1.0], 1.0, TypeError, "kernel_name: x must be a tensor"),
        (torch.ones(2, dtype=torch.int32), 1.0, TypeError, "x must be float16, bfloat16 or"),
        (torch.ones(2), "2", TypeError, "factor must be a number"),
        (torch.ones(2), float("nan"), ValueError, "factor must be finite"),
    ),
    ids=("list", "integers", "text", "nan"),
)
def test_bad_arguments(
    kernel: ModuleType, x: object, factor: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kernel.kernel_name(x, factor)


@pytest.mark.parametrize("mode", (Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE), ids=str)
def test_layer_binds(kernel: ModuleType, device: str, request: pytest.FixtureRequest, mode) -> None:
    @use_kernel_forward_from_hub("KernelName")
    class Own(torch.nn.Module):
        factor = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the layer's forward was not bound")

    root = request.path.parents[2]
    (mine,) = (k for k in Manifest.load(root).kernels if k.path in request.path.parents)
    layer = LocalLayerRepository(mine.path, layer_name="KernelName")
    with use_kernel_mapping({"KernelName": {device: layer}}):
        model = kernelize(Own().to(device), mode=mode, device=device, use_fallback=False)
    x = torch.randn(3, 5, device=device)
    assert torch.equal(model(x), 0.5 * x)
