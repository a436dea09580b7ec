"""Layers of real models, random weights for them, and what a layer has to move and compute."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: What an H200 reaches: bytes and 16-bit operations a second.
BYTES_PER_SECOND = 4.3e12
FLOP_PER_SECOND = 790e12


@dataclass(frozen=True)
class Model:
    """Sizes of a mixture-of-experts layer.

    Attributes:
        name: Of the model.
        experts: Experts of the layer.
        top_k: Choices of a token.
        hidden: Features of a token.
        inner: Features between the products.
        gating: How the router chooses.
        transposed: Whether weights lie as gpt-oss has them: [experts, in, out], gates and ups
            taking turns, with biases.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    gating: str = "softmax"
    transposed: bool = False

    def bytes(self, tokens: int, touched: int, itemsize: int = 2) -> int:
        """Return what has to move: the weights of the experts touched, tokens in and out, once."""
        weights = touched * 3 * self.hidden * self.inner
        return itemsize * (weights + 2 * tokens * self.hidden + self.experts * self.hidden)

    def flop(self, tokens: int) -> int:
        """Return the operations of the layer, its router included."""
        slots = tokens * self.top_k
        return 6 * slots * self.hidden * self.inner + 2 * tokens * self.hidden * self.experts

    def floor_us(self, tokens: int, touched: int) -> float:
        """Return the least time that an H200 allows, in microseconds."""
        memory = self.bytes(tokens, touched) / BYTES_PER_SECOND
        return 1e6 * max(memory, self.flop(tokens) / FLOP_PER_SECOND)


MIXTRAL = Model("Mixtral-8x7B", 8, 2, 4096, 14336)
QWEN3 = Model("Qwen3-30B-A3B", 128, 8, 2048, 768)
DEEPSEEK = Model("DeepSeek-V3", 256, 8, 7168, 2048, gating="sigmoid")
QWEN3_LARGE = Model("Qwen3-235B-A22B", 128, 8, 4096, 1536)
GPT_OSS = Model("gpt-oss-20b", 32, 4, 2880, 2880, transposed=True)
GPT_OSS_LARGE = Model("gpt-oss-120b", 128, 4, 2880, 2880, transposed=True)
MODELS = (MIXTRAL, QWEN3, DEEPSEEK, QWEN3_LARGE, GPT_OSS, GPT_OSS_LARGE)
TOKENS = (1, 8, 32, 128, 512, 2048, 4096, 16384)


def random(shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> Tensor:
    """Return normal random numbers; made expert by expert, so that nothing large is made twice."""
    out = torch.empty(shape, dtype=dtype, device="cuda")
    for part in out:
        part.normal_(std=scale)
    return out


def weights(
    model: Model, dtype: torch.dtype, experts: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return gate_up [experts, 2 inner, hidden], down [experts, hidden, inner] and the biases."""
    count, hidden, inner = experts or model.experts, model.hidden, model.inner
    if model.transposed:
        gate_up = random((count, hidden, 2 * inner), dtype, hidden**-0.5).mT
        down = random((count, inner, hidden), dtype, inner**-0.5).mT
        biases = random((count, 2 * inner), dtype, 0.1), random((count, hidden), dtype, 0.1)
        return gate_up, down, *biases
    gate_up = random((count, 2 * inner, hidden), dtype, hidden**-0.5)
    return gate_up, random((count, hidden, inner), dtype, inner**-0.5), None, None
