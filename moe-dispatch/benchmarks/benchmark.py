"""Workloads of moe-dispatch, for `kernels benchmark` and for the repository's scripts/bench.py."""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import Benchmark
from torch import Tensor


def _models():
    """Return the module of the layers; this file is loaded by its path, outside any package."""
    name = "moe_dispatch_models"
    if name not in sys.modules:
        path = Path(__file__).with_name("models.py")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class MoeDispatchBenchmark(Benchmark):
    """A layer of 8 experts, for one token and for 128, checked against a loop over the experts."""

    seed = 0

    def setup(self) -> None:
        """Make a layer of 512 x 256; small enough for a CPU."""

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=self.device, dtype=torch.float16) * scale

        self.router = random(8, 512, scale=512**-0.5)
        self.gate, self.up = (random(8, 256, 512, scale=512**-0.5) for _ in range(2))
        self.down = random(8, 512, 256, scale=256**-0.5)
        self.token, self.prompt = random(1, 512), random(128, 512)

    def _ours(self, x: Tensor) -> Tensor:
        weights = self.router, self.gate, self.up, self.down
        return self.kernel.fused_moe_forward(x, *weights, 8, 2)[0]

    def _loop(self, x: Tensor) -> Tensor:
        gate_up = torch.cat((self.gate, self.up), 1).float()
        return loop(x.float(), self.router.float(), gate_up, self.down.float(), 2, "softmax").half()

    def benchmark_decode(self) -> None:
        """Time one token."""
        self.out = self._ours(self.token)

    def verify_decode(self) -> Tensor:
        """Return the same of a loop over the experts."""
        return self._loop(self.token)

    def benchmark_prompt(self) -> None:
        """Time 128 tokens."""
        self.out = self._ours(self.prompt)

    def verify_prompt(self) -> Tensor:
        """Return the same of a loop over the experts."""
        return self._loop(self.prompt)


@dataclass(frozen=True)
class Workload:
    """One layer on a number of tokens, with the implementations to time beside each other.

    Attributes:
        operation: The model, and how tokens are shared among its experts if not evenly.
        shape: (tokens, experts, choices, hidden, inner).
        dtype: dtype of tokens and weights.
        bytes: What has to move: experts touched, tokens in and out.
        flop: Arithmetic operations.
        floor_us: The least time that an H200 allows.
        prepare: From a number of copies of the weights to, for each rival, one call a copy.
        prepare_eager: The same, one call a rival, for those that no graph can hold.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    flop: int
    floor_us: float
    prepare: Callable[[int], dict[str, list[Callable[[], object]]]]
    prepare_eager: Callable[[], dict[str, Callable[[], object]]]


# ------------------------------------------------------------------------------------------- rivals
def choose(x: Tensor, router: Tensor, top_k: int, gating: str) -> tuple[Tensor, Tensor]:
    """Return indices and weights [tokens, top_k] as PyTorch code chooses them."""
    logits = F.linear(x.float(), router.float())
    scores = logits.sigmoid() if gating == "sigmoid" else logits.softmax(-1)
    weights, ids = scores.topk(top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if gating == "sigmoid" else weights


def loop(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, gating: str
) -> Tensor:
    """Return a layer's output by a loop over its experts."""
    ids, weights = choose(x, router, top_k, gating)
    out = torch.zeros_like(x)
    for expert in range(down.shape[0]):
        token, choice = torch.where(ids == expert)
        if token.numel():
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, token, (y * weights[token, choice, None]).to(x.dtype))
    return out


def grouped_mm(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, gating: str
) -> Tensor:
    """Return a layer's output by torch's grouped product, without a word to the host."""
    ids, weights = choose(x, router, top_k, gating)
    experts = down.shape[0]
    ordered, order = ids.flatten().sort()
    bounds = torch.arange(1, experts + 1, device=x.device)
    offsets = torch.searchsorted(ordered, bounds).to(torch.int32)
    gate, up = torch._grouped_mm(x[order // top_k], gate_up.mT, offs=offsets).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=offsets)
    y = y * weights.flatten()[order, None].to(x.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=x.device)
    return y[back].view(*ids.shape, -1).sum(1)


# ---------------------------------------------------------------------------------------- workloads
@functools.lru_cache(1)
def _weights(model, dtype: torch.dtype, copies: int):
    """Return copies of a model's weights; the same for all numbers of tokens in a row."""
    return [_models().weights(model, dtype) for _ in range(copies)]


def _check(out: Tensor, exact: Tensor) -> None:
    error = float((out.float() - exact).norm() / exact.norm())
    # Roundings of h, of y and of the output, each half an ulp at most.
    if not error <= 2 * torch.finfo(out.dtype).eps:
        raise ValueError(f"off by {error:.2e}")


def _layer(kernel, model, tokens: int, dtype: torch.dtype) -> Workload:
    x = torch.randn(tokens, model.hidden, device="cuda", dtype=dtype)
    router = torch.randn(model.experts, model.hidden, device="cuda") * model.hidden**-0.5
    router = router.to(dtype)
    ids, _, _ = kernel.moe_router(x, router, model.top_k, model.gating)
    touched = ids.unique().numel()

    def halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up[:, : model.inner], gate_up[:, model.inner :]

    def prepare(copies: int) -> dict[str, list[Callable[[], object]]]:
        found = _weights(model, dtype, copies)
        ours = [
            functools.partial(
                kernel.fused_moe_forward, x, router, *halves(gate_up), down, model.experts,
                model.top_k, model.gating,
            )
            for gate_up, down, _, _ in found
        ]  # fmt: skip
        calls: dict[str, list[Callable[[], object]]] = {"ours": ours}
        if dtype is torch.bfloat16:
            calls["grouped_mm"] = [
                functools.partial(grouped_mm, x, router, each[0], each[1], model.top_k,
                                  model.gating)
                for each in found
            ]  # fmt: skip
        calls["router"] = [_router(kernel, model, x, router)] * copies
        gate_up, down = found[0][:2]
        few = x[: min(tokens, 64)]
        exact = loop(few.float(), router.float(), _Float(gate_up), _Float(down), model.top_k,
                     model.gating)  # fmt: skip
        _check(ours[0]()[0][: len(few)], exact)
        return calls

    def prepare_eager() -> dict[str, Callable[[], object]]:
        gate_up, down = _weights(model, dtype, 2)[0][:2]
        return {
            "loop": lambda: loop(x, router, gate_up, down, model.top_k, model.gating),
        }

    return Workload(
        model.name, (tokens, model.experts, model.top_k, model.hidden, model.inner), dtype,
        model.bytes(tokens, touched), model.flop(tokens), model.floor_us(tokens, touched), prepare,
        prepare_eager,
    )  # fmt: skip


class _Float:
    """Weights that become float32 expert by expert."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.shape = weight, weight.shape

    def __getitem__(self, expert: int) -> Tensor:
        return self.weight[expert].float()


def _router(kernel, model, x: Tensor, router: Tensor) -> Callable[[], object]:
    """Return the call of router, choice and dispatch alone."""
    ops, config = kernel.ops, kernel.ops.config
    tokens = x.shape[0]
    sizes = config.Sizes(model.experts, model.top_k, model.hidden, model.inner, 2)
    routing = ops.Routing(model.top_k, model.gating, model.gating == "sigmoid", 1, 1, 1.0)
    plan = ops._plan(tokens, sizes, x.device)
    decodes = config.decodes(tokens, sizes)

    def call() -> object:
        ids = x.new_empty(tokens, model.top_k, dtype=torch.int64)
        mix = x.new_empty(tokens, model.top_k, dtype=torch.float32)
        rounded = x.new_empty(tokens, model.top_k)
        tables = ops._tables(x, tokens * model.top_k, model.experts, plan)
        lists = (None, None) if decodes else (tables.slots, tables.counts)
        ops.score(x, router, None, routing, plan.block, ids, mix, rounded, *lists, sizes)
        if not decodes:
            ops._index(tables, model.experts, model.top_k, plan)
        return ids, mix, rounded, tables

    return call


def _skewed(kernel, model, tokens: int, dtype: torch.dtype, how: str) -> Workload:
    x = torch.randn(tokens, model.hidden, device="cuda", dtype=dtype)
    if how == "Zipf":
        chances = 1 / torch.arange(1, model.experts + 1, device="cuda").float()
        chances = chances[torch.randperm(model.experts, device="cuda")]
        ids = torch.multinomial(chances.expand(tokens, -1), model.top_k)
    else:  # every token to the same experts
        ids = torch.arange(model.top_k, device="cuda").repeat(tokens, 1)
    mix = torch.rand(tokens, model.top_k, device="cuda")
    touched = ids.unique().numel()

    def prepare(copies: int) -> dict[str, list[Callable[[], object]]]:
        found = _weights(model, dtype, copies)
        return {
            "ours": [
                functools.partial(kernel.fused_experts, x, gate_up, down, ids, mix)
                for gate_up, down, _, _ in found
            ]
        }

    return Workload(
        f"{model.name}, {how}", (tokens, model.experts, model.top_k, model.hidden, model.inner),
        dtype, model.bytes(tokens, touched), model.flop(tokens), model.floor_us(tokens, touched),
        prepare, dict,
    )  # fmt: skip


def _transposed(kernel, model, tokens: int, dtype: torch.dtype) -> Workload:
    """The experts of gpt-oss, routing given."""
    x = torch.randn(tokens, model.hidden, device="cuda", dtype=dtype)
    ids, mix = kernel.route(
        torch.randn(tokens, model.experts, device="cuda"), model.top_k, scoring="topk_softmax"
    )
    touched = ids.unique().numel()

    def prepare(copies: int) -> dict[str, list[Callable[[], object]]]:
        found = _weights(model, dtype, copies)
        return {
            "ours": [
                functools.partial(
                    kernel.fused_experts, x, gate_up, down, ids, mix, activation="swiglu_oai",
                    gate_up_bias=gate_up_bias, down_bias=down_bias, interleaved=True,
                )
                for gate_up, down, gate_up_bias, down_bias in found
            ]
        }  # fmt: skip

    return Workload(
        f"{model.name}, experts alone",
        (tokens, model.experts, model.top_k, model.hidden, model.inner), dtype,
        model.bytes(tokens, touched), model.flop(tokens), model.floor_us(tokens, touched), prepare,
        dict,
    )  # fmt: skip


def workloads(kernel) -> Iterator[Workload]:
    """Yield what to time."""
    models = _models()
    for dtype in (torch.bfloat16, torch.float16):
        for model in (models.MIXTRAL, models.QWEN3, models.DEEPSEEK):
            for tokens in models.TOKENS:
                yield _layer(kernel, model, tokens, dtype)
            if dtype is torch.bfloat16:
                for tokens in (512, 4096):
                    for how in ("Zipf", "the same experts"):
                        yield _skewed(kernel, model, tokens, dtype, how)
        if dtype is torch.bfloat16:
            for tokens in models.TOKENS:
                yield _layer(kernel, models.QWEN3_LARGE, tokens, dtype)
            for model in (models.GPT_OSS, models.GPT_OSS_LARGE):
                for tokens in models.TOKENS:
                    yield _transposed(kernel, model, tokens, dtype)


def host_calls(kernel) -> dict[str, Callable[[], object]]:
    """Return what to time on the host: a small layer, so that the GPU never holds it back."""
    dtype = torch.bfloat16
    x = torch.randn(1, 256, device="cuda", dtype=dtype)
    many = torch.randn(16, 256, device="cuda", dtype=dtype)
    router = torch.randn(8, 256, device="cuda", dtype=dtype)
    gate, up = (torch.randn(8, 128, 256, device="cuda", dtype=dtype) for _ in range(2))
    down = torch.randn(8, 256, 128, device="cuda", dtype=dtype)
    weights = router, gate, up, down
    return {
        "ours, 1 token": lambda: kernel.fused_moe_forward(x, *weights, 8, 2),
        "ours, 16 tokens": lambda: kernel.fused_moe_forward(many, *weights, 8, 2),
    }
