"""The module in the place of `torch.nn.Linear`: what it holds, and how it moves and is saved."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from monorepo.numerics import check_tensor

from .checkpoint_formats import Layer, awq, compressed_tensors, gptq, random_layer

DTYPES = (torch.float16, torch.bfloat16)
#: Whether the layer has zeros, an order of its own, a bias.
KINDS = {
    "symmetric": (True, False, False),
    "symmetric, bias": (True, False, True),
    "asymmetric": (False, False, False),
    "act-order, bias": (False, True, True),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def layer_of(kind: str, n: int = 48, k: int = 160) -> tuple[Layer, Tensor | None]:
    """Return a layer of that kind, and its bias."""
    symmetric, act_order, bias = KINDS[kind]
    layer = random_layer(n, k, 64, symmetric=symmetric, act_order=act_order)
    return layer, torch.linspace(-2, 2, n).half() if bias else None


def module_of(kernel: ModuleType, kind: str, device: str, **sizes: int) -> nn.Module:
    layer, bias = layer_of(kind, **sizes)
    weight = kernel.from_gptq(**gptq(layer), zero_offset=1)
    return kernel.W4A16Linear(weight, bias).to(device)


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Assert that y is `x @ weight.T + bias`, for a weight in float64."""
    wide = None if bias is None else bias.double()
    narrow = None if bias is None else bias.to(x.dtype)
    exact = nn.functional.linear(x.double(), weight, wide)
    assert y.dtype is x.dtype
    check_tensor(y, exact, nn.functional.linear(x, weight.to(x.dtype), narrow))


@pytest.mark.kernels_ci
@each_kind
@each_dtype
def test_forward(kernel: ModuleType, device: str, kind: str, dtype: torch.dtype) -> None:
    """Case B136 too: scales and bias are float16, activations of either dtype."""
    layer, bias = layer_of(kind)
    module = module_of(kernel, kind, device)
    x = torch.randn(2, 3, 160).to(device, dtype)
    bias = None if bias is None else bias.to(device)
    check(module(x), x, layer.weight().to(device), bias)


@pytest.mark.parametrize("dtype", (torch.bfloat16,), ids=str)
def test_activations_beyond_float16(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Case B136: float16 scales and bfloat16 activations of 1e5, which float16 cannot hold."""
    layer, _ = layer_of("asymmetric")
    x = (torch.rand(4, 160) * 2e5 - 1e5).to(device, dtype)
    y = module_of(kernel, "asymmetric", device)(x)
    assert bool(y.isfinite().all())
    check(y, x, layer.weight().to(device), None)


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("bias", (True, False))
@each_dtype
def test_from_linear(
    kernel: ModuleType, device: str, dtype: torch.dtype, bias: bool, symmetric: bool
) -> None:
    linear = nn.Linear(128, 64, bias=bias).to(device, dtype).requires_grad_(False)
    before = copy.deepcopy(linear.state_dict())
    module = kernel.W4A16Linear.from_linear(linear, 32, symmetric)
    assert (module.in_features, module.out_features, module.group_size) == (128, 64, 32)
    weight = kernel.quantize(linear.weight, 32, symmetric)
    assert torch.equal(module.qweight, weight.qweight)
    x = torch.randn(3, 128).to(device, dtype)
    dense = kernel.dequantize(weight, torch.float32).double()
    check(module(x), x, dense, linear.bias)
    module.load_state_dict({name: part + 1 for name, part in module.state_dict().items()})
    assert all(torch.equal(before[name], now) for name, now in linear.state_dict().items())


def test_from_linear_by_default(kernel: ModuleType, device: str) -> None:
    module = kernel.W4A16Linear.from_linear(nn.Linear(256, 64, device=device))
    assert module.group_size == 128 and module.zeros is None


@pytest.mark.parametrize("bias", (True, False))
def test_from_checkpoints(kernel: ModuleType, device: str, bias: bool) -> None:
    """Each constructor takes the arguments of its function, and a bias."""
    layer = random_layer(48, 160, 64)
    given = torch.randn(48).half().to(device) if bias else None

    def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    module, packed = kernel.W4A16Linear, moved(compressed_tensors(layer))
    shape = packed.pop("weight_shape")
    modules = (
        module.from_gptq(*moved(gptq(layer)).values(), given, zero_offset=1),
        module.from_gptq(**moved(gptq(layer, 0)), bias=given, zero_offset=0),
        module.from_awq(*moved(awq(layer)).values(), given),
        module.from_compressed_tensors(*packed.values(), given, shape=shape),
        module.from_compressed_tensors(**packed, bias=given, shape=(48, 160), g_idx=None),
    )
    for module in modules:
        dense = kernel.dequantize(module.weight, torch.float32)
        assert torch.equal(dense.cpu(), layer.weight().float())
        assert (module.bias is not None) == bias
        if given is not None:
            assert torch.equal(module.bias, given)


# How it moves.

CONVERSIONS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "float": lambda module: module.float(),
    "double and half": lambda module: module.double().half(),
    "to": lambda module: module.to(torch.bfloat16),
    "to with a device": lambda module: module.to("cpu", torch.float16),
    "inside another": lambda module: nn.Sequential(module).to(torch.bfloat16)[0],
}


@each_kind
@pytest.mark.parametrize("scales", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_dtypes_are_part_of_the_format(
    kernel: ModuleType, kind: str, scales: torch.dtype, name: str
) -> None:
    """A conversion changes the bias alone, and no bit of the weight."""
    symmetric, act_order, _ = KINDS[kind]
    layer = random_layer(16, 64, 32, symmetric=symmetric, act_order=act_order, dtype=scales)
    module = kernel.W4A16Linear.from_gptq(**gptq(layer), bias=torch.ones(16), zero_offset=1)
    before = copy.deepcopy(dict(module.named_buffers()))
    after = CONVERSIONS[name](module)
    assert after is module
    for key, buffer in module.named_buffers():
        assert buffer.dtype is before[key].dtype and torch.equal(buffer, before[key]), key
    wanted = {"float": torch.float32, "half": torch.float16, "double and half": torch.float16}
    wanted["to with a device"] = torch.float16
    assert module.bias.dtype is wanted.get(name, torch.bfloat16)
    assert torch.equal(kernel.dequantize(module.weight, torch.float32), layer.weight().float())


def test_float_zeros_stay(kernel: ModuleType, device: str) -> None:
    """Those of HQQ are float32, whatever the module is converted to."""
    W_q = torch.arange(8 * 16).view(4, 32).to(torch.uint8)
    zero = torch.rand(8, 1) * 15
    weight = kernel.from_hqq(W_q, torch.ones(8, 1).half(), zero, shape=(8, 32))
    module = kernel.W4A16Linear(weight).to(device).half()
    assert module.zeros.dtype is torch.float32
    assert torch.equal(module.zeros.cpu().T, zero)


def test_moves(kernel: ModuleType, device: str) -> None:
    module = module_of(kernel, "act-order, bias", device)
    parts = {**dict(module.named_buffers()), "bias": module.bias}
    assert {part.device.type for part in parts.values()} == {device}
    assert module.weight.device.type == device
    module.to("meta")
    assert module.weight.device.type == "meta" and module.bias.is_meta
    module.to_empty(device=device)
    assert module.weight.device.type == device and module.bias.device.type == device


@pytest.mark.gpu
@each_kind
def test_moves_to_the_gpu(kernel: ModuleType, kind: str) -> None:
    module = module_of(kernel, kind, "cpu")
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(3, 160, device="cuda", dtype=torch.float16)
    y = module.cuda()(x)
    assert y.is_cuda and module.weight.device.type == "cuda"
    module.cpu()
    assert all(torch.equal(before[name], part) for name, part in module.state_dict().items())
    assert torch.equal(module.to("cuda")(x), y)


def test_weight_is_made_once(kernel: ModuleType, device: str) -> None:
    """A call costs four comparisons; a buffer that was swapped is seen all the same."""
    module = module_of(kernel, "act-order, bias", device)
    weight = module.weight
    assert module.weight is weight and isinstance(weight, kernel.W4Weight)
    for name in ("qweight", "scales", "zeros", "perm"):
        setattr(module, name, getattr(module, name).clone())
        assert module.weight is not weight
        weight = module.weight
        assert getattr(weight, name) is getattr(module, name)
        assert module.weight is weight
    x = torch.randn(2, 160).half().to(device)
    doubled = {"scales": module.scales * 2, "bias": module.bias * 2}
    y = torch.func.functional_call(module, doubled, (x,))
    check(y, x, kernel.dequantize(weight, torch.float32).double() * 2, module.bias * 2)
    assert module.weight.scales is module.scales


# How it is saved.


@each_kind
def test_safetensors(kernel: ModuleType, device: str, kind: str, tmp_path: Path) -> None:
    """What is saved loads into a module of the same sizes, and gives the same bits."""
    module = module_of(kernel, kind, device)
    symmetric, act_order, bias = KINDS[kind]
    optional = {"zeros": not symmetric, "perm": act_order, "bias": bias}
    wanted = {"qweight", "scales"} | {name for name, has in optional.items() if has}
    assert module.state_dict().keys() == wanted
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors", device=device)
    x = torch.randn(3, 160).half().to(device)
    for assign in (False, True):
        other = copy.deepcopy(module)
        for part in other.state_dict().values():
            part.zero_()
        other.load_state_dict(tensors, strict=True, assign=assign)
        for name, part in other.state_dict().items():
            assert part.dtype is tensors[name].dtype and torch.equal(part, tensors[name]), name
        assert torch.equal(other(x), module(x))


@pytest.mark.parametrize(
    ("kind", "sizes", "text"),
    (
        ("asymmetric", {"n": 56}, "size mismatch for qweight"),
        ("asymmetric", {"k": 288}, "size mismatch for qweight"),
        ("asymmetric", {"k": 224}, "size mismatch for scales"),
        ("symmetric", {}, 'Missing key.* "zeros"'),
        ("act-order, bias", {}, 'Unexpected key.* "perm"'),
    ),
)
def test_other_state_is_refused(
    kernel: ModuleType, kind: str, sizes: dict[str, int], text: str
) -> None:
    module = module_of(kernel, "asymmetric", "cpu")
    state = module_of(kernel, kind, "cpu", **sizes).state_dict()
    with pytest.raises(RuntimeError, match=f"(?s){text}"):
        module.load_state_dict(state, strict=True)


def through_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_kind
@pytest.mark.parametrize(
    "twin", (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), through_file)
)
def test_copies(kernel: ModuleType, device: str, kind: str, twin: object) -> None:
    module = module_of(kernel, kind, device)
    x = torch.randn(2, 160).half().to(device)
    y, other = module(x), twin(module)
    for part in module.state_dict().values():
        part.zero_()
    assert torch.equal(other(x), y)
    assert other.weight.qweight is other.qweight and other.qweight is not module.qweight


# What it is in a model.


@each_dtype
def test_gradient_of_the_input(kernel: ModuleType, device: str, dtype: torch.dtype) -> None:
    """An adapter before the layer learns; the layer itself has nothing that does."""
    module = module_of(kernel, "act-order, bias", device)
    assert [name for name, _ in module.named_parameters()] == ["bias"]
    assert not any(parameter.requires_grad for parameter in module.parameters())
    x = torch.randn(3, 160).to(device, dtype).requires_grad_()
    dy = torch.randn(3, 48).to(device, dtype)
    (dx,) = torch.autograd.grad(module(x), x, dy)
    dense = layer_of("act-order, bias")[0].weight().to(device)
    check_tensor(dx, dy.double() @ dense, dy @ dense.to(dtype))


@each_kind
def test_compiles(kernel: ModuleType, device: str, kind: str) -> None:
    """In one graph, for any number of tokens; and it sees that the state was loaded anew."""
    module = module_of(kernel, kind, device)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (2, 3, 5):
            x = torch.randn(tokens, 160).half().to(device)
            assert torch.equal(compiled(x), module(x))
        state = {name: part.clone() for name, part in module.state_dict().items()}
        state["scales"] *= 2
        for assign in (False, True):
            module.load_state_dict(state, assign=assign)
            assert torch.equal(compiled(x), module(x))
            state["scales"] *= 2


def test_says_what_it_is(kernel: ModuleType) -> None:
    assert repr(module_of(kernel, "act-order, bias", "cpu")) == (
        "W4A16Linear(in_features=160, out_features=48, bias=True, group_size=64, "
        "symmetric=False, act_order=True)"
    )
    assert kernel.W4A16Linear.__doc__


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    (
        (lambda weight: (torch.ones(8, 8),), TypeError, "weight must be a W4Weight"),
        (lambda weight: (None,), TypeError, "weight must be a W4Weight, got None"),
        (lambda weight: (weight, [0.0] * 48), TypeError, "bias must be a tensor"),
        (lambda weight: (weight, torch.ones(48).int()), TypeError, "bias must be float16"),
        (lambda weight: (weight, torch.ones(47)), ValueError, r"shape \(48,\) .*\(47,\)"),
        (lambda weight: (weight, torch.ones(1, 48)), ValueError, r"shape \(48,\)"),
        (lambda weight: (weight, torch.ones(48, device="meta")), ValueError, "on cpu .*meta"),
    ),
)
def test_bad_arguments(
    kernel: ModuleType, arguments: object, error: type[Exception], text: str
) -> None:
    """At construction, not at the first forward."""
    weight = kernel.from_gptq(**gptq(random_layer(48, 64, 32)), zero_offset=1)
    with pytest.raises(error, match=f"W4A16Linear: .*{text}"):
        kernel.W4A16Linear(*arguments(weight))


@pytest.mark.parametrize("value", (None, nn.Identity(), nn.Embedding(32, 32)))
def test_only_linear_layers(kernel: ModuleType, value: object) -> None:
    with pytest.raises(TypeError, match="W4A16Linear.from_linear: linear must be an nn.Linear"):
        kernel.W4A16Linear.from_linear(value)
