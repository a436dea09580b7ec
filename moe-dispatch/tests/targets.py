"""Launches to compile for GPUs that are not there: every tuned configuration, and the heuristic's.

Tensors are on the meta device: sizes and strides are real, memory is not.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
EXPERTS, TOP_K, HIDDEN, INNER = 64, 4, 2048, 1408
#: Rows an expert has, one for each step of the heuristic's ladders.
ROWS = (1, 16, 40, 100, 150, 1000)
#: What the devices that tables ship for are: H200.
TUNED_ON = 90

Launch = tuple[str, Callable[[], None]]


def launches(kernel: ModuleType, shared_memory: int) -> Iterator[Launch]:
    """Yield the name of each launch on a GPU with that much shared memory, and its call."""
    call = Calls(kernel, shared_memory)
    yield from call.gates()
    yield from call.tuned_scores()
    yield from call.dispatch()
    yield from call.decoding()
    seen = set()
    for gates, tile in (*call.by_heuristic(HALF), *call.tuned()):
        if (gates, tile) not in seen:
            seen.add((gates, tile))
            yield call.up(tile, HALF) if gates else call.down(tile, HALF)
    for gates, tile in call.by_heuristic(HALF, rows=(1, 40, 1000)):
        if gates:
            yield call.up(tile, BFLOAT, columns=True, pairs=True, bias=True, inner=2880)
        else:
            yield call.down(tile, BFLOAT, columns=True, bias=True, inner=2888)
    for gates, tile in call.by_heuristic(FLOAT, rows=(1, 1000)):
        yield call.up(tile, FLOAT) if gates else call.down(tile, FLOAT)
    # Sizes and layouts that no descriptor takes.
    for gates, tile in call.by_heuristic(HALF, rows=(16, 1000)):
        yield call.up(tile, HALF, inner=1407) if gates else call.down(tile, HALF, inner=1407)


class Calls:
    """The kernel's launch functions, called with tensors made to measure."""

    def __init__(self, kernel: ModuleType, shared_memory: int) -> None:
        self.config = importlib.import_module(f"{kernel.__name__}.config")
        self.launch = importlib.import_module(f"{kernel.__name__}.launch")
        self.layouts = importlib.import_module(f"{kernel.__name__}.layouts")
        self.ops = importlib.import_module(f"{kernel.__name__}.ops")
        device = importlib.import_module(f"{kernel.__name__}._shared.device")
        self.arch = device.target_arch()
        self.device = self.config.Device(132, shared_memory, self.arch)

    def by_heuristic(
        self, dtype: torch.dtype, rows: tuple[int, ...] = ROWS
    ) -> Iterator[tuple[bool, Any]]:
        for gates in (True, False):
            for each in rows:
                found = self.config.heuristic(each, dtype.itemsize, self.device, gates=gates)
                yield gates, found

    def tuned(self) -> Iterator[tuple[bool, Any]]:
        if self.arch != TUNED_ON:
            return  # no device of this target takes these tables
        for path in sorted(self.config.CONFIGS.glob("*.json")):
            table = json.loads(path.read_text())
            for operation, gates in (("up", True), ("down", False)):
                for by_size in table.get(operation, {}).values():
                    for by_tokens in by_size.values():
                        for entry in by_tokens.values():
                            yield gates, self.config.GemmConfig(**entry)

    def tuned_scores(self) -> Iterator[Launch]:
        if self.arch != TUNED_ON:
            return
        for path in sorted(self.config.CONFIGS.glob("*.json")):
            by_size = json.loads(path.read_text()).get("score", {}).get("16bit", {})
            for size, by_tokens in by_size.items():
                experts, top_k = map(int, size.split("x")[:2])
                routing = self.ops.Routing(top_k, "softmax", False, 1, 1, 1.0)
                for tokens, entry in by_tokens.items():
                    tile = self.config.ScoreConfig(**entry)
                    yield self._score(experts, int(tokens), routing, False, HALF, tile)

    def up(
        self, tile: Any, dtype: torch.dtype, *, columns: bool = False, pairs: bool = False,
        bias: bool = False, inner: int = INNER,
    ) -> Launch:  # fmt: skip
        both = _weight(dtype, 2 * inner, HIDDEN, columns)
        biases = _empty(dtype, EXPERTS, 2 * inner) if bias else None
        weights = self.layouts.Weights(both, None, _weight(dtype, HIDDEN, inner, False), biases)
        text = ("up", dtype, tile, columns, pairs, bias, inner)

        def launch() -> None:
            self.ops.up(
                _empty(dtype, 100, HIDDEN), self.layouts.gates(weights, pairs),
                _empty(dtype, 400, inner), _empty(torch.int32, 400),
                _empty(torch.int32, 400, 4), _empty(torch.int32, 2), TOP_K, 400,
                self.ops.Gating("swiglu_oai" if bias else "silu", 1.702, 7.0, pairs), tile,
                self.device,
            )  # fmt: skip

        return " ".join(map(str, text)), launch

    def down(
        self, tile: Any, dtype: torch.dtype, *, columns: bool = False, bias: bool = False,
        inner: int = INNER,
    ) -> Launch:  # fmt: skip
        text = ("down", dtype, tile, columns, bias, inner)

        def launch() -> None:
            self.ops.down(
                _empty(dtype, 400, inner), _weight(dtype, HIDDEN, inner, columns),
                _empty(dtype, EXPERTS, HIDDEN) if bias else None, _empty(dtype, 400, HIDDEN),
                _empty(torch.int32, 400), _empty(torch.int32, 400, 4), _empty(torch.int32, 2),
                400, tile, self.device,
            )  # fmt: skip

        return " ".join(map(str, text)), launch

    def gates(self) -> Iterator[Launch]:
        for experts, top_k, scoring, groups, bias, dtype in (
            (8, 2, "softmax", 1, False, HALF),
            (128, 8, "topk_softmax", 1, False, BFLOAT),
            (256, 8, "sigmoid", 8, True, BFLOAT),
            (1000, 32, "softmax", 1, False, FLOAT),
        ):
            routing = self.ops.Routing(top_k, scoring, True, groups, max(1, groups // 2), 1.0)
            for tokens in (1, 512, 16384):
                yield self._score(experts, tokens, routing, bias, dtype)
            block, warps = self.ops.route_block(experts, groups)
            numbers, constants = self.ops._gate(experts, block, routing)
            yield (
                f"route {experts} {scoring}",
                lambda e=experts, r=routing, b=bias, n=numbers, c=constants, w=warps: (
                    self.launch.route(
                        _empty(FLOAT, 100, e), _empty(FLOAT, e) if b else None,
                        _empty(torch.int64, 100, r.top_k), _empty(FLOAT, 100, r.top_k), n, c, w,
                    )
                ),
            )  # fmt: skip

    def _score(
        self, experts: int, tokens: int, routing: Any, bias: bool, dtype: torch.dtype,
        tile: Any = None,
    ) -> Launch:  # fmt: skip
        tile = tile or self.config.score_heuristic(
            tokens, experts, HIDDEN, dtype.itemsize, self.device
        )
        block = self.config.block_tokens(tokens, routing.top_k)
        top_k = routing.top_k
        gate = self.config.gate_tokens(block, experts, tile.num_warps)
        numbers, constants = self.ops._gate(experts, gate, routing)

        def launch() -> None:
            self.launch.score(
                _empty(dtype, tokens, HIDDEN), _empty(dtype, experts, HIDDEN),
                _empty(dtype, experts), _empty(FLOAT, tokens, experts), _empty(FLOAT, 16),
                _empty(torch.int32, 16), _empty(FLOAT, experts) if bias else None,
                _empty(torch.int64, tokens, top_k), _empty(FLOAT, tokens, top_k),
                _empty(dtype, tokens, top_k), _empty(torch.int32, tokens * top_k),
                _empty(torch.int32, 16), numbers, constants, block, tile.splits, 4, tile,
            )  # fmt: skip

        return f"score {experts} {tokens} {routing} {tile}", launch

    def dispatch(self) -> Iterator[Launch]:
        for experts, tokens, top_k in ((8, 100, 2), (256, 4096, 8), (1000, 100, 32)):
            sizes = self.config.Sizes(experts, top_k, HIDDEN, INNER, 2)
            block = self.config.block_tokens(tokens, top_k)
            ids, slots = _empty(torch.int64, tokens, top_k), _empty(torch.int32, tokens * top_k)
            table, few = _empty(torch.int32, 400, 4), _empty(torch.int32, 2)
            count, index, warps = self.ops.dispatch_constants(sizes.experts, block * top_k)
            heights = [self.config.GemmConfig(t, 0, 0, 64, 64, 4, 2, False, False, False, False, 0)
                       for t in (64, 128)]  # fmt: skip
            yield (
                f"count {experts}",
                lambda i=ids, s=slots, e=experts, b=block * top_k, c=count, w=warps, f=few: (
                    self.launch.count(i, _empty(torch.int32, 4 * e), s, f, e, 4 * e, b, c, w)
                ),
            )
            yield (
                f"index {experts}",
                lambda s=slots, e=experts, b=block * top_k, c=index, w=warps, f=few, h=heights, t=table: (  # noqa: E501
                    self.launch.index(s, f, s, t, t, f, b, 7, e, *h, c, w)
                ),
            )
        yield (
            "cut",
            lambda: self.launch.cut(
                _empty(torch.int64, 65), _empty(torch.int32, 400, 4), _empty(torch.int32, 1),
                400, 64, 8, 64,
            ),
        )  # fmt: skip
        for top_k in (1, 8, 32):
            yield (
                f"combine {top_k}",
                lambda k=top_k: self.launch.combine(
                    _empty(HALF, 10 * k, HIDDEN), _empty(torch.int32, 10 * k), None,
                    _empty(FLOAT, 10, k), _empty(HALF, 10, HIDDEN),
                    *self.ops.combine_block(HIDDEN),
                ),
            )  # fmt: skip

    def decoding(self) -> Iterator[Launch]:
        for dtype, pairs, inner in (
            (HALF, False, INNER),
            (BFLOAT, True, INNER),
            (FLOAT, True, 1407),
        ):
            both = _weight(dtype, 2 * inner, HIDDEN, False)
            down = _weight(dtype, HIDDEN, inner, False)
            biases = _empty(dtype, EXPERTS, 2 * inner) if pairs else None
            gates = self.layouts.gates(self.layouts.Weights(both, None, down, biases), pairs)
            config = self.config.decode_heuristic(dtype.itemsize)
            ids, x = _empty(torch.int64, 1, TOP_K), _empty(dtype, 1, HIDDEN)
            h = _empty(dtype, TOP_K, inner)
            yield (
                f"decode up {dtype} {pairs}",
                lambda g=gates, c=config, i=ids, x=x, h=h: self.launch.decode_up(
                    x, g.gate, g.up, h, g.gate_bias, g.up_bias, i, None, EXPERTS, "silu", 1.0,
                    7.0, c,
                ),
            )  # fmt: skip
            yield (
                f"decode down {dtype}",
                lambda g=gates, c=config, i=ids, x=x, h=h, d=down, p=pairs: self.launch.decode_down(
                    h, d, torch.empty_like(x), _empty(x.dtype, EXPERTS, HIDDEN) if p else None, i,
                    None, EXPERTS, _empty(FLOAT, 1, TOP_K), c,
                ),
            )  # fmt: skip


def _weight(dtype: torch.dtype, n: int, k: int, columns: bool) -> torch.Tensor:
    if columns:
        return _empty(dtype, EXPERTS, k, n).mT
    return _empty(dtype, EXPERTS, n, k)


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
