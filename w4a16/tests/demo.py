"""What `make demo` shows of w4a16: products, and checkpoints of a small Llama in each form."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from monorepo.built import load_file
from monorepo.comparison import Comparison

checkpoints = load_file(Path(__file__).with_name("checkpoints.py"))

DTYPES = (torch.float16, torch.bfloat16)
#: Arguments of `quantize`, by what the weight is.
WEIGHTS = {
    "symmetric g=128": {"group_size": 128, "symmetric": True},
    "asymmetric g=64": {"group_size": 64, "symmetric": False},
    "per channel": {"group_size": -1, "symmetric": True},
}
TOKENS = (1, 17)
FEATURES = 512


def comparisons(kernel: ModuleType, device: torch.device) -> Iterator[Comparison]:
    """Compare the product with that of the dequantised weight, for one token and for several."""
    dense = torch.randn(FEATURES, FEATURES, device=device) * FEATURES**-0.5
    for name, options in WEIGHTS.items():
        weight = kernel.quantize(dense.half(), **options)
        values = kernel.dequantize(weight, torch.float32)
        for dtype in DTYPES:
            for tokens in TOKENS:
                x = torch.randn(tokens, FEATURES, device=device, dtype=dtype)
                y = kernel.w4a16_gemm(x, weight)
                exact, peer = x.double() @ values.double().T, x @ values.to(dtype).T
                yield Comparison("w4a16_gemm", name, tuple(x.shape), y, exact, peer, whole=True)


def in_models(
    kernel: ModuleType, repository: dict[str, object], device: torch.device
) -> Iterator[Comparison | str]:
    """Compare the logits of a small Llama, loaded from a checkpoint of each form."""
    llama = checkpoints.small_llama()
    count = 0
    for name, quantization in checkpoints.CHECKPOINTS.items():
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            dense = checkpoints.write(Path(folder), quantization, llama)
            models = [checkpoints.load(kernel, Path(folder), dtype, device) for dtype in DTYPES]
        for model, dtype in zip(models, DTYPES, strict=True):
            count = sum(isinstance(module, kernel.W4A16Linear) for module in model.modules())
            exact = checkpoints.with_weights(model, dense, torch.float64)
            peer = checkpoints.with_weights(model, dense, dtype)
            results = [checkpoints.logits(one) for one in (model, exact, peer)]
            shape = tuple(results[0].shape)
            yield Comparison(f"{name}, logits", "a small Llama", shape, *results, whole=True)
    yield f"(each form's {count} quantised layers were loaded into W4A16Linear)"
