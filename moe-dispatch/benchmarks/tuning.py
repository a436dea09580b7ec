"""What `scripts/tune.py` searches for this kernel: layers of real models, and tiles to try."""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from monorepo.built import load_file
from monorepo.search import Search

models = load_file(Path(__file__).with_name("models.py"))

#: float16 and bfloat16 take the same entries: what differs is a few instructions.
DTYPE = torch.bfloat16
#: Experts for compilation alone.
FEW = 2

# (tokens, extra, n, k, warps, stages, swap, boxes, rows by box, wide, group) up to so many rows an
# expert; False and True are 0 and 1.
UP = (
    (10, (
        (16, 0, 64, 128, 4, 3, 1, 1, 0, 0, 4), (16, 0, 64, 128, 4, 3, 1, 1, 0, 0, 0),
        (16, 0, 64, 128, 4, 3, 1, 0, 0, 0, 4), (16, 0, 64, 64, 4, 5, 1, 1, 0, 0, 4),
        (16, 0, 64, 128, 4, 4, 0, 1, 0, 0, 4), (16, 0, 32, 256, 4, 3, 0, 0, 0, 0, 4),
        (16, 0, 32, 128, 4, 4, 0, 1, 0, 0, 4), (16, 0, 128, 64, 8, 4, 1, 1, 0, 0, 4),
    )),
    (26, (
        (32, 0, 64, 64, 4, 5, 1, 1, 0, 0, 4), (32, 0, 64, 128, 4, 3, 0, 1, 0, 0, 4),
        (32, 0, 64, 128, 4, 3, 1, 1, 0, 0, 4), (16, 16, 64, 64, 4, 5, 1, 1, 0, 0, 4),
        (32, 0, 128, 64, 8, 4, 1, 1, 0, 0, 4), (32, 16, 64, 64, 4, 4, 1, 1, 0, 0, 4),
    )),
    (52, (
        (32, 16, 64, 64, 4, 4, 1, 1, 0, 0, 4), (64, 0, 64, 64, 4, 4, 1, 1, 0, 0, 4),
        (64, 0, 128, 64, 8, 4, 1, 1, 0, 0, 4), (32, 16, 128, 64, 8, 3, 1, 1, 0, 0, 4),
        (64, 0, 64, 64, 4, 4, 0, 1, 0, 1, 4), (32, 0, 64, 64, 4, 5, 1, 1, 0, 0, 4),
    )),
    (110, (
        (64, 32, 128, 64, 8, 4, 1, 1, 0, 0, 4), (64, 16, 128, 64, 8, 4, 1, 1, 0, 0, 4),
        (64, 0, 128, 64, 8, 4, 1, 1, 0, 0, 4), (64, 32, 64, 64, 4, 3, 1, 1, 0, 0, 4),
        (128, 0, 128, 64, 8, 4, 0, 1, 0, 1, 4),
    )),
    (180, (
        (128, 32, 128, 64, 8, 4, 1, 1, 0, 0, 4), (128, 64, 128, 64, 8, 3, 1, 1, 0, 0, 4),
        (64, 32, 128, 64, 8, 4, 1, 1, 0, 0, 4), (128, 0, 128, 64, 8, 4, 0, 1, 0, 1, 4),
        (128, 0, 64, 64, 4, 3, 0, 1, 0, 1, 4), (128, 0, 128, 64, 8, 4, 1, 1, 0, 0, 4),
    )),
    (320, (
        (128, 64, 128, 64, 8, 3, 1, 1, 0, 0, 4), (128, 32, 128, 64, 8, 4, 1, 1, 0, 0, 4),
        (128, 0, 128, 64, 8, 4, 0, 1, 0, 1, 8), (128, 0, 128, 64, 8, 4, 0, 1, 0, 1, 4),
        (128, 0, 64, 64, 4, 3, 0, 1, 0, 1, 8),
    )),
    (0, (
        (128, 0, 128, 64, 8, 4, 0, 1, 0, 1, 8), (128, 0, 128, 64, 8, 4, 0, 1, 0, 1, 16),
        (128, 0, 128, 64, 8, 3, 0, 1, 0, 1, 8), (128, 32, 128, 64, 8, 4, 1, 1, 0, 0, 8),
        (256, 0, 64, 64, 8, 4, 0, 1, 0, 1, 8),
    )),
)  # fmt: skip
DOWN = (
    (10, (
        (16, 0, 128, 128, 4, 3, 1, 1, 0, 0, 4), (16, 0, 128, 128, 4, 3, 1, 1, 0, 0, 0),
        (16, 0, 128, 128, 4, 3, 1, 0, 0, 0, 4), (16, 0, 64, 256, 4, 3, 1, 1, 0, 0, 4),
        (16, 0, 64, 128, 4, 4, 1, 1, 0, 0, 4), (16, 0, 128, 64, 4, 5, 1, 1, 1, 0, 4),
        (16, 0, 64, 256, 4, 3, 0, 0, 0, 0, 4),
    )),
    (26, (
        (32, 0, 128, 64, 4, 5, 1, 1, 0, 0, 4), (32, 0, 128, 64, 4, 5, 1, 1, 1, 0, 4),
        (32, 0, 128, 128, 4, 3, 1, 1, 0, 0, 4), (32, 0, 256, 64, 8, 3, 1, 1, 0, 0, 4),
        (16, 16, 128, 64, 4, 5, 1, 1, 0, 0, 4), (32, 16, 128, 64, 4, 4, 1, 1, 0, 0, 4),
    )),
    (52, (
        (64, 0, 128, 64, 4, 4, 1, 1, 1, 0, 4), (64, 0, 128, 64, 4, 4, 0, 1, 1, 0, 4),
        (32, 16, 128, 64, 4, 4, 1, 1, 0, 0, 4), (64, 0, 256, 64, 8, 3, 1, 1, 1, 0, 4),
        (32, 16, 256, 64, 8, 3, 1, 1, 0, 0, 4),
    )),
    (110, (
        (64, 32, 256, 64, 8, 4, 1, 1, 0, 0, 4), (64, 16, 256, 64, 8, 4, 1, 1, 0, 0, 4),
        (64, 0, 256, 64, 8, 4, 1, 1, 1, 0, 4), (64, 32, 128, 64, 4, 3, 1, 1, 0, 0, 4),
        (128, 0, 256, 64, 8, 4, 0, 1, 1, 0, 4), (128, 0, 128, 64, 4, 3, 0, 1, 1, 0, 4),
    )),
    (180, (
        (128, 32, 256, 64, 8, 3, 1, 1, 0, 0, 4), (128, 64, 128, 64, 8, 4, 1, 1, 0, 0, 4),
        (128, 0, 256, 64, 8, 4, 0, 1, 1, 0, 4), (64, 32, 256, 64, 8, 4, 1, 1, 0, 0, 4),
        (128, 0, 128, 64, 4, 3, 0, 1, 1, 0, 4),
    )),
    (320, (
        (128, 0, 256, 64, 8, 4, 0, 1, 1, 0, 8), (128, 0, 256, 64, 8, 4, 0, 1, 1, 0, 4),
        (128, 32, 256, 64, 8, 3, 1, 1, 0, 0, 4), (128, 0, 128, 64, 4, 3, 0, 1, 1, 0, 8),
        (128, 64, 128, 64, 8, 4, 1, 1, 0, 0, 4),
    )),
    (0, (
        (128, 0, 256, 64, 8, 4, 0, 1, 1, 0, 8), (128, 0, 256, 64, 8, 4, 0, 1, 1, 0, 16),
        (128, 0, 256, 64, 8, 3, 0, 1, 1, 0, 8), (256, 0, 128, 64, 8, 4, 0, 1, 1, 0, 8),
        (128, 0, 256, 64, 8, 4, 0, 1, 0, 0, 8),
    )),
)  # fmt: skip
# (n, k, warps, stages) of the kernels that serve one token.
DECODE = (
    (8, 512, 4, 1), (8, 1024, 8, 1), (16, 512, 8, 1), (16, 256, 4, 4), (8, 1024, 4, 1),
    (32, 128, 4, 5), (4, 1024, 4, 1), (16, 256, 4, 1),
)  # fmt: skip


def tiles(kernel, ladder, rows: float) -> Iterator[object]:
    """Yield the tiles to try for so many rows an expert."""
    for most, found in ladder:
        if rows <= most or not most:
            for tokens, extra, n, k, *values in found:
                # For experts that are an exception: more rows a tile in the same memory.
                tall = 0 if tokens >= 128 else 64 if k > 64 else 128
                fields = [bool(v) if 2 <= i <= 5 else v for i, v in enumerate(values)]
                yield kernel.config.GemmConfig(tokens, extra, tall, n, k, *fields)
            return


def score_tiles(kernel, model, tokens: int) -> Iterator[object]:
    """Yield the router's tiles to try."""
    padded = max(16, kernel.config.power_of_two(model.experts))
    block_t = 16 if tokens <= 256 else 32 if tokens <= 8192 else 64
    for block_e in sorted({min(padded, each) for each in (16, 32, 64, 128, 256)}):
        block_k = 64 if block_t == 64 or block_e == 256 else 128
        count = -(-tokens // block_t) * -(-model.experts // block_e)
        steps = -(-model.hidden // block_k)
        programs = (64, 128, 256) if tokens <= 256 else (128, 256)
        for splits in sorted({max(1, min(each // count, steps, 32)) for each in programs}):
            for warps in (8 if block_t * block_e >= 2048 else 4, 16):
                # More warps choose faster among many experts.
                if count * splits >= 16 and (warps < 16 or padded >= 128 and tokens <= 4096):
                    yield kernel.config.ScoreConfig(block_t, block_e, block_k, splits, warps, 3)


class Layer:
    """A layer of random weights and the slots of random tokens, in order."""

    def __init__(self, kernel, model, tokens: int, copies: int) -> None:
        self.kernel, self.model, self.tokens = kernel, model, tokens
        self.experts = FEW if copies == 1 else model.experts
        top_k = min(model.top_k, self.experts)
        self.weights = weights(model, copies)
        self.x = torch.randn(tokens, model.hidden, device="cuda", dtype=DTYPE)
        self.ids = torch.rand(tokens, self.experts, device="cuda").topk(top_k, -1).indices
        self.sizes = kernel.config.Sizes(self.experts, top_k, model.hidden, model.inner, 2)
        self.gating = kernel.ops.Gating(
            "swiglu_oai" if model.transposed else "silu", 1.702, 7.0, model.transposed
        )
        self.tables: dict[object, object] = {}

    def parts(self, i: int):
        """Return the weights of copy i as the operators take them."""
        gate_up, down, gate_up_bias, down_bias = self.weights[i]
        return self.kernel.ops.layouts.Weights(gate_up, None, down, gate_up_bias, down_bias)

    def order(self, tile):
        """Return the tables of tiles of one height."""
        ops, config = self.kernel.ops, self.kernel.config
        key = tile.tokens, tile.extra
        if key not in self.tables:
            slots = self.ids.numel()
            block = config.block_tokens(self.tokens, self.sizes.top_k)
            most = config.most_tiles(slots, self.experts, tile.tokens)
            plan = ops._Plan(block, -(-self.tokens // block), tile, tile, most, most)
            tables = ops._tables(self.x, slots, self.experts, plan)
            ops._count(tables, self.ids, None, self.experts, plan)
            ops._index(tables, self.experts, self.sizes.top_k, plan)
            self.tables[key] = tables, most
        return self.tables[key]

    def rows(self) -> Tensor:
        """Return the slots in order."""
        return self.ids.flatten().sort(stable=True).indices

    def exact(self, of: Callable[[object, int, Tensor], Tensor]) -> Tensor:
        """Return one row a slot in order, `of` copy 0's weights, an expert and its slots."""
        rows = self.rows()
        counts = self.ids.flatten().bincount(minlength=self.experts).tolist()
        parts = zip(range(self.experts), rows.split(counts), strict=True)
        return torch.cat([of(self.parts(0), e, slots) for e, slots in parts if slots.numel()])


@functools.lru_cache(1)
def _weights(model, copies: int):
    experts = FEW if copies == 1 else None
    return [models.weights(model, DTYPE, experts) for _ in range(copies)]


def weights(model, copies: int):
    """Return copies of a model's weights; one copy, which is only compiled for, of few experts."""
    if copies > 1:
        copies = max(copies, 2)
    return _weights(model, copies)


def _prepare_up(kernel, model, tokens: int):
    def prepare(copies: int):
        layer = Layer(kernel, model, tokens, copies)
        ops, device = kernel.ops, kernel.config.of_device(layer.x.device)
        top_k = layer.sizes.top_k
        h = torch.empty(copies, layer.ids.numel(), model.inner, device="cuda", dtype=DTYPE)

        def run(i: int, tile) -> list[Tensor]:
            tables, most = layer.order(tile)
            ops.up(
                layer.x, ops.layouts.gates(layer.parts(i), model.transposed), h[i], tables.places,
                tables.up_tiles, tables.counted, top_k, most, layer.gating, tile, device,
            )  # fmt: skip
            return [h[i]]

        def of(parts, expert: int, slots: Tensor) -> Tensor:
            reference = kernel.reference
            gate, up = reference.halves(parts.gate_up[expert : expert + 1], model.transposed)
            x = layer.x[slots // top_k].float()
            g, u = x @ gate[0].float().T, x @ up[0].float().T
            if parts.gate_up_bias is not None:
                bias = parts.gate_up_bias[expert : expert + 1].float()
                gate_bias, up_bias = reference.halves(bias, model.transposed)
                g, u = g + gate_bias, u + up_bias
            return reference.activate(g, u, *layer.gating[:3])

        return run, lambda: [layer.exact(of)]

    return prepare


def _prepare_down(kernel, model, tokens: int):
    def prepare(copies: int):
        layer = Layer(kernel, model, tokens, copies)
        ops, device = kernel.ops, kernel.config.of_device(layer.x.device)
        h = torch.randn(layer.ids.numel(), model.inner, device="cuda", dtype=DTYPE)
        y = torch.empty(copies, layer.ids.numel(), model.hidden, device="cuda", dtype=DTYPE)
        row_of = torch.empty(layer.ids.numel(), dtype=torch.int64, device="cuda")
        row_of[layer.rows()] = torch.arange(layer.ids.numel(), device="cuda")

        def run(i: int, tile) -> list[Tensor]:
            tables, most = layer.order(tile)
            parts = layer.parts(i)
            ops.down(
                h, parts.down, parts.down_bias, y[i], tables.places, tables.up_tiles,
                tables.counted, most, tile, device,
            )  # fmt: skip
            return [y[i]]

        def of(parts, expert: int, slots: Tensor) -> Tensor:
            found = h[row_of[slots]].float() @ parts.down[expert].float().T
            return found if parts.down_bias is None else found + parts.down_bias[expert].float()

        return run, lambda: [layer.exact(of)[row_of]]

    return prepare


def _prepare_decode(kernel, model, gates: bool):
    def prepare(copies: int):
        layer = Layer(kernel, model, 1, copies)
        launch, ops = kernel.ops.launch, kernel.ops
        top_k = layer.sizes.top_k
        mix = torch.rand(1, top_k, device="cuda")
        h = torch.randn(copies, top_k, model.inner, device="cuda", dtype=DTYPE)
        out = torch.empty(copies, 1, model.hidden, device="cuda", dtype=DTYPE)

        def run(i: int, config) -> list[Tensor]:
            parts = layer.parts(i)
            found = ops.layouts.gates(parts, False)
            if gates:
                launch.decode_up(
                    layer.x, found.gate, found.up, h[i], None, None, layer.ids, None,
                    layer.experts, "silu", 1.702, 7.0, config,
                )  # fmt: skip
                return [h[i]]
            launch.decode_down(
                h[0], parts.down, out[i], None, layer.ids, None, layer.experts, mix, config
            )
            return [out[i]]

        def wanted() -> list[Tensor]:
            parts = layer.parts(0)
            gate, up = kernel.reference.halves(parts.gate_up, False)
            x, found = layer.x[0].float(), layer.ids[0].tolist()
            if gates:
                return [torch.stack([
                    torch.nn.functional.silu(gate[e].float() @ x) * (up[e].float() @ x)
                    for e in found
                ])]  # fmt: skip
            each = [parts.down[e].float() @ h[0, j].float() * mix[0, j]
                    for j, e in enumerate(found)]  # fmt: skip
            return [torch.stack(each).sum(0, keepdim=True)]

        return run, wanted

    return prepare


def _prepare_score(kernel, model, tokens: int):
    def prepare(copies: int):
        ops, config = kernel.ops, kernel.config
        copies = min(copies, 64)
        x = torch.randn(tokens, model.hidden, device="cuda", dtype=DTYPE)
        scale = model.hidden**-0.5
        shape = (copies, model.experts, model.hidden)
        router = (torch.randn(shape, device="cuda") * scale).to(DTYPE)
        routing = ops.Routing(model.top_k, model.gating, True, 1, 1, 1.0)
        block = config.block_tokens(tokens, model.top_k)
        blocks = -(-tokens // block)
        slots = torch.empty(tokens * model.top_k, device="cuda", dtype=torch.int32)
        counts = torch.empty(blocks * model.experts, device="cuda", dtype=torch.int32)
        mix = torch.empty(tokens, model.top_k, device="cuda")
        ids = torch.empty(tokens, model.top_k, device="cuda", dtype=torch.int64)
        rounded = torch.empty(tokens, model.top_k, device="cuda", dtype=DTYPE)

        def run(i: int, tile) -> list[Tensor]:
            ops.score_with(
                x, router[i % copies], None, routing, block, ids, mix, rounded, slots, counts, tile
            )
            return [rounded]

        def wanted() -> list[Tensor]:
            logits = x.double() @ router[0].double().T
            scores = logits.sigmoid() if model.gating == "sigmoid" else logits.softmax(-1)
            found = scores.topk(model.top_k, -1).values
            return [found / found.sum(-1, keepdim=True)]

        return run, wanted

    return prepare


def searches(kernel) -> Iterator[Search]:
    """Yield every problem, model by model."""
    for model in models.MODELS:
        size = kernel.config.Sizes(model.experts, model.top_k, model.hidden, model.inner, 2).name
        once = 2 * model.hidden * model.inner
        if not model.transposed:
            for tokens in models.TOKENS:
                moved = 2 * (model.experts + tokens) * model.hidden
                yield Search(
                    "score", "16bit", size, tokens, moved,
                    tuple(score_tiles(kernel, model, tokens)),
                    _prepare_score(kernel, model, tokens),
                )  # fmt: skip
            for gates in (True, False):
                yield Search(
                    "decode up" if gates else "decode down", "16bit", size, 1,
                    model.top_k * once * (2 if gates else 1),
                    tuple(kernel.config.DecodeConfig(*values) for values in DECODE),
                    _prepare_decode(kernel, model, gates),
                )  # fmt: skip
        for tokens, gates in itertools.product(models.TOKENS, (True, False)):
            rows = kernel.config.rows_per_expert(tokens, model.experts, model.top_k)
            if kernel.config.decodes(tokens, kernel.config.Sizes(
                    model.experts, model.top_k, model.hidden, model.inner, 2)):  # fmt: skip
                continue
            touched = round(tokens * model.top_k / rows)
            yield Search(
                "up" if gates else "down", "16bit", size, tokens,
                touched * once * (2 if gates else 1),
                tuple(tiles(kernel, UP if gates else DOWN, rows)),
                _prepare_up(kernel, model, tokens) if gates
                else _prepare_down(kernel, model, tokens),
            )  # fmt: skip
