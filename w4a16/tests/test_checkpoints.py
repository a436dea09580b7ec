"""Whole checkpoints, saved as real ones are and loaded: the same logits as in PyTorch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from monorepo.numerics import check_tensor

from .checkpoint_formats import group_of
from .checkpoints import (
    CHECKPOINTS,
    formats,
    load,
    logits,
    projections,
    round_to_nearest,
    small_llama,
    with_weights,
    write,
)

each_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)


@each_checkpoint
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_logits(
    kernel: ModuleType, device: str, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Case B136 too: the files hold float16, and run in either dtype."""
    dense = write(tmp_path, CHECKPOINTS[name], small_llama())
    model = load(kernel, tmp_path, dtype, torch.device(device))
    exact, peer = with_weights(model, dense, torch.float64), with_weights(model, dense, dtype)
    check_tensor(*(logits(m) for m in (model, exact, peer)))


@each_checkpoint
def test_layers(kernel: ModuleType, name: str, tmp_path: Path) -> None:
    """Each quantised layer is what was written; everything else is left as it was."""
    plain = small_llama()
    dense = write(tmp_path, CHECKPOINTS[name], plain)
    model = load(kernel, tmp_path, torch.float16, torch.device("cpu"))
    assert dense.keys() == projections(plain).keys() and len(dense) == 14
    for key, weight in dense.items():
        layer = model.get_submodule(key)
        assert isinstance(layer, kernel.W4A16Linear)
        assert torch.equal(kernel.dequantize(layer.weight, torch.float32), weight.float()), key
        assert (layer.bias is not None) == ("self_attn" in key)
        assert (layer.perm is not None) == ("act-order" in name)
    state = plain.state_dict()
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, state[key].half()), key
    kinds = {type(m).__name__ for key, m in model.named_modules() if key not in dense}
    assert "Linear" in kinds, "lm_head stays"


@each_checkpoint
def test_files_are_as_real_ones(name: str, tmp_path: Path) -> None:
    write(tmp_path, CHECKPOINTS[name], small_llama())
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0.self_attn.q_proj."
    names = {key.removeprefix(layer) for key in tensors if key.startswith(layer)}
    wanted = {
        "gptq": {"qweight", "qzeros", "scales", "g_idx", "bias"},
        "awq": {"qweight", "qzeros", "scales", "bias"},
        "compressed-tensors": {"weight_packed", "weight_scale", "weight_shape", "bias"},
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == CHECKPOINTS[name]
    assert names == wanted[config["quantization_config"]["quant_method"]]
    whole = ("lm_head", "model.embed_tokens", "model.norm", "model.layers.1.input_layernorm")
    assert {f"{key}.weight" for key in whole} <= tensors.keys()


def test_layers_that_are_not_quantised(kernel: ModuleType, tmp_path: Path) -> None:
    """Case B139: a weight where codes should be is refused by its dtype, or for what is missing."""
    write(tmp_path, CHECKPOINTS["AWQ"], small_llama())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.qweight"] = torch.ones(128, 256).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match="from_awq: qweight must .*bfloat16.*not quantised"):
        load(kernel, tmp_path, torch.float16, torch.device("cpu"))


def test_tensors_that_nobody_takes(kernel: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, CHECKPOINTS["AWQ"], small_llama())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.rest.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['model.norm.*left \['model.rest"):
        load(kernel, tmp_path, torch.float16, torch.device("cpu"))


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0", reason="slow, and the kernels of test_logits"
)
@each_checkpoint
def test_saved_again(kernel: ModuleType, device: str, name: str, tmp_path: Path) -> None:
    """A loaded model's state, packed as it is, loads into one of the same sizes."""
    write(tmp_path, CHECKPOINTS[name], small_llama())
    model = load(kernel, tmp_path, torch.float16, torch.device(device))
    save_file(model.state_dict(), tmp_path / "packed.safetensors")
    wanted = logits(model)
    for tensor in model.state_dict().values():
        tensor.zero_()
    state = load_file(tmp_path / "packed.safetensors", device=device)
    model.load_state_dict(state, strict=True)
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("symmetric", (True, False))
def test_writer_rounds_to_the_nearest(symmetric: bool) -> None:
    """No weight is further off than half a step, and what clipping and a rounded zero add."""
    weight, group = torch.randn(16, 96), group_of(96, 32)
    layer = round_to_nearest(weight, group, symmetric)
    assert isinstance(layer, formats.Layer)
    steps = ((layer.weight() - weight).abs() / layer.scales.double()[:, group]).max()
    assert steps < 1.01
