"""Problems of the sizes that only a GPU has room for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .oracle import Problem, problem

#: (experts, top_k, hidden, inner, layout, activation) of models.
MODELS = {
    "Mixtral-8x7B": (8, 2, 4096, 14336, "fused", "silu"),
    "Qwen3-30B-A3B": (128, 8, 2048, 768, "fused", "silu"),
    "gpt-oss-20b": (32, 4, 2880, 2880, "interleaved transposed", "swiglu_oai"),
}


def needs_memory(gib: float) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / 2**30:.0f} are free")


def model(tokens: int, name: str, dtype: torch.dtype, bias: torch.dtype | None = None) -> Problem:
    experts, top_k, hidden, inner, layout, activation = MODELS[name]
    return problem(
        tokens, experts=experts, top_k=top_k, hidden=hidden, inner=inner, dtype=dtype,
        device="cuda", layout=layout, activation=activation, bias=bias,
    )  # fmt: skip


def first_tokens(p: Problem, tokens: int) -> Problem:
    return p.but(x=p.x[:tokens], ids=p.ids[:tokens], weights=p.weights[:tokens])


def layer(
    tokens: int, dtype: torch.dtype, experts: int = 16, hidden: int = 512, inner: int = 256
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, the router, gates, ups (halves of one weight) and downs."""
    p = problem(
        tokens, experts=experts, hidden=hidden, inner=inner, dtype=dtype, device="cuda"
    )  # fmt: skip
    router = torch.randn(experts, hidden, device="cuda", dtype=dtype) * hidden**-0.5
    return p.x, router, *p.gate_up.chunk(2, 1), p.down
