"""A small Llama quantised, saved as real checkpoints are, and loaded into `W4A16Linear`.

`load` is what a user writes to run such a checkpoint: it needs the kernel's public functions only.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from monorepo.built import load_file as load_python

formats = load_python(Path(__file__).with_name("checkpoint_formats.py"))

#: The `quantization_config` of each checkpoint; it says all that the writer and the reader need.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "GPTQ": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    },
    "GPTQ, act-order": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "desc_act": True,
        "damp_percent": 0.01,
        "true_sequential": True,
    },
    "GPTQ v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": -1,
        "sym": False,
        "desc_act": False,
        "checkpoint_format": "gptq_v2",
    },
    "AWQ": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 128,
                    "symmetric": True,
                    "actorder": None,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}


def small_llama() -> LlamaForCausalLM:
    """Return a float32 Llama with random weights, whose layers have 128 and 256 inputs."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif name.endswith("proj.weight"):
            # Not the 0.02 of the config, with which layers add next to nothing to their input.
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def projections(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that checkpoints quantise: those of attention and MLP, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def round_to_nearest(weight: Tensor, group: Tensor, symmetric: bool) -> formats.Layer:
    """Quantise a float32 weight `[n, k]` whose input features belong to these groups `[k]`."""
    columns = [weight[:, group == g] for g in range(int(group.max()) + 1)]
    high = torch.stack([column.amax(1) for column in columns], 1)
    low = torch.stack([column.amin(1) for column in columns], 1)
    if symmetric:
        scales = (torch.maximum(high, -low) / 7.5).half()
        zeros = torch.full_like(scales, 8).long()
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15).long()
    codes = (weight / scales.float()[:, group]).round().long() + zeros[:, group]
    return formats.Layer(codes.clamp(0, 15), scales, zeros, group)


def write(folder: Path, quantization: dict[str, Any], model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Save a checkpoint of `model` and return the weights that it stands for, in float64."""
    method = quantization["quant_method"]
    details = quantization
    if method == "compressed-tensors":
        details = quantization["config_groups"]["group_0"]["weights"]
    symmetric = details.get("sym", details.get("symmetric", False))
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    dense = {}
    for name, linear in projections(model).items():
        weight = linear.weight.float()
        group = formats.group_of(weight.shape[1], details["group_size"])
        if details.get("desc_act"):
            # Quantised in the order of importance, in groups; the file keeps the original order.
            group = group[weight.square().sum(0).argsort(descending=True).argsort()]
        layer = round_to_nearest(weight, group, symmetric)
        dense[name] = layer.weight()
        if method == "gptq":
            v2 = quantization.get("checkpoint_format") == "gptq_v2"
            parts = formats.gptq(layer, 0 if v2 else 1)
        elif method == "awq":
            parts = formats.awq(layer)
        else:
            parts = formats.compressed_tensors(layer)
        del tensors[f"{name}.weight"]
        tensors.update({f"{name}.{key}": part.contiguous() for key, part in parts.items()})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "dtype": "float16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return dense


def load(
    kernel: ModuleType, folder: Path, dtype: torch.dtype, device: torch.device
) -> LlamaForCausalLM:
    """Return the model of a checkpoint, its quantised layers as `W4A16Linear`.

    Args:
        kernel: The loaded package.
        folder: Holds config.json and model.safetensors.
        dtype: Of everything that is not quantised, and of the activations.
        device: Where the model goes.
    """
    config = LlamaConfig.from_pretrained(folder)
    quantization = config.quantization_config
    tensors = load_file(folder / "model.safetensors", device=str(device))
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    names = list(projections(model))
    for name in names:
        keys = [key for key in tensors if key.startswith(f"{name}.")]
        parts = {key.removeprefix(f"{name}."): tensors.pop(key) for key in keys}
        model.set_submodule(name, convert(kernel, quantization, parts).to(dtype))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [key for key in missing if key.rpartition(".")[0] not in names]
    if missing or unexpected:
        raise ValueError(f"load: wanted each tensor once, missing {missing}, left {unexpected}")
    return model.requires_grad_(False)


def convert(
    kernel: ModuleType, quantization: dict[str, Any], parts: dict[str, Tensor]
) -> nn.Module:
    """Return the layer of a checkpoint's tensors, which are named as in its file."""
    method = quantization["quant_method"]
    if method == "gptq":
        # Without `sym`, the zeros do not tell whether they are stored less one: the config does.
        offset: int | str = "auto"
        if not quantization["sym"]:
            offset = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
        return kernel.W4A16Linear.from_gptq(**parts, zero_offset=offset)
    if method == "awq":
        return kernel.W4A16Linear.from_awq(**parts)
    if method == "compressed-tensors":
        options = {"shape": parts.pop("weight_shape"), "g_idx": parts.pop("weight_g_idx", None)}
        return kernel.W4A16Linear.from_compressed_tensors(**parts, **options)
    raise ValueError(f"convert: quant_method must be one of those above, got {method!r}")


def with_weights(
    model: LlamaForCausalLM, dense: dict[str, Tensor], dtype: torch.dtype
) -> LlamaForCausalLM:
    """Return a copy of a loaded model in `dtype` whose layers hold these weights in full."""
    plain = LlamaForCausalLM(model.config).to(model.device, dtype).eval().requires_grad_(False)
    # What the packed layers have beside the bias has no place here, and their weights come next.
    plain.load_state_dict(model.state_dict(), strict=False)
    plain.load_state_dict(
        {f"{name}.weight": weight for name, weight in dense.items()}, strict=False
    )
    return plain


def logits(model: LlamaForCausalLM) -> Tensor:
    """Return the logits `[1, 8, vocabulary]` of eight tokens."""
    tokens = torch.arange(8, device=model.device)[None] * 31 % model.config.vocab_size
    with torch.no_grad():
        return model(tokens).logits
