"""4-bit weights times 16-bit activations, from the checkpoints people have, in Triton."""

from .api import dequantize, quantize, supports, w4a16_gemm
from .formats import from_awq, from_compressed_tensors, from_gptq, from_hqq
from .modules import W4A16Linear
from .weight import W4Weight

__all__ = [
    "W4A16Linear",
    "W4Weight",
    "dequantize",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "from_hqq",
    "quantize",
    "supports",
    "w4a16_gemm",
]
