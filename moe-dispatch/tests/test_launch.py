"""Launches: grids, what is handed to Triton, and what tells one compiled kernel from another."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from .routing import part

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="host code, the same with and without the interpreter",
)
HALF, BFLOAT, FLOAT, LONG = torch.float16, torch.bfloat16, torch.float32, torch.int64


class Call:
    """What `launch.launch` was given."""

    def __init__(self, key, kernel, programs, tensors, scalars, constants, warps, registers=0):
        self.key, self.kernel, self.programs = key, kernel, programs
        self.tensors, self.scalars = tensors, scalars
        self.constants, self.warps, self.registers = constants, warps, registers
        self.name = kernel.__name__.removeprefix("moe_").removesuffix("_kernel")
        given = (*tensors, *scalars, *constants.values())
        names = [parameter.name for parameter in kernel.params]
        assert names[len(tensors) + len(scalars) :] == list(constants), self.name
        self.by_name = dict(zip(names, given, strict=True))

    def specialised(self) -> tuple[object, ...]:
        """Return all that Triton compiles by, alignment of pointers aside."""
        kinds: list[object] = []
        for each in self.tensors:
            box = getattr(each, "block_shape", None)
            base = each if box is None else each.base
            kinds.append(None if base is None else (base.dtype, box and tuple(box)))
        parameters = self.kernel.params[len(self.tensors) :]
        for value, parameter in zip(self.scalars, parameters, strict=False):
            wide = isinstance(value, int) and not -(2**31) <= value < 2**31
            kinds.append((type(value), wide))
            if isinstance(value, int) and not parameter.do_not_specialize:
                kinds.append((value == 1, value % 16 == 0))
        return (self.kernel, *kinds, tuple(sorted(self.constants.items())), self.warps,
                self.registers)  # fmt: skip


@pytest.fixture
def calls(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Launches that are noted instead of made, as on an H200 that is not there, tables and all."""
    made: list[Call] = []
    launch, config, ops, stage_ops = (
        part(kernel, name) for name in ("launch", "config", "ops", "stage_ops")
    )
    monkeypatch.setattr(launch, "launch", lambda *given: made.append(Call(*given)))
    monkeypatch.setattr(launch, "on_nvidia", lambda: True)
    for each in (ops, stage_ops):
        monkeypatch.setattr(each, "uses_triton", lambda _: True)
    monkeypatch.setattr(config, "of_device", lambda _: config.Device(132, 227 << 10, 90))
    monkeypatch.setattr(config, "device_name", lambda _: "NVIDIA_H200")
    cached = (config.gemm_config, config.score_config, config.decode_config, ops._plan)
    for each in cached:
        each.cache_clear()
    yield made
    for each in cached:
        each.cache_clear()


def empty(*shape: int, dtype: torch.dtype = HALF, device: str = "meta") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def layer(
    tokens: int, experts: int, hidden: int, inner: int, dtype: torch.dtype = HALF,
    device: str = "meta", router: torch.dtype = FLOAT,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return x, the router and the experts' weights, without memory."""
    return (
        empty(tokens, hidden, dtype=dtype, device=device),
        empty(experts, hidden, dtype=router, device=device),
        empty(experts, inner, hidden, dtype=dtype, device=device),
        empty(experts, inner, hidden, dtype=dtype, device=device),
        empty(experts, hidden, inner, dtype=dtype, device=device),
    )


def experts_call(kernel: ModuleType, tokens: int, top_k: int = 2, **change: object) -> Tensor:
    """Call fused_experts on 8 experts of 32 x 48, on the meta device."""
    options: dict[str, object] = {
        "hidden_states": empty(tokens, 48), "gate_up_proj": empty(8, 64, 48),
        "down_proj": empty(8, 48, 32), "top_k_index": empty(tokens, top_k, dtype=LONG),
        "top_k_weights": empty(tokens, top_k, dtype=FLOAT), **change,
    }  # fmt: skip
    return kernel.fused_experts(**options)


GENERAL = ["score", "index", "up", "down", "combine"]


@pytest.mark.parametrize(
    ("tokens", "names"),
    (
        (1, ["score", "decode_up", "decode_down"]),
        (2, GENERAL),
        (16, GENERAL),
        (4096, GENERAL),
        (32768, GENERAL),
        (32769, 2 * GENERAL),
        (100_000, 4 * GENERAL),
    ),
)
def test_launches_of_a_layer(
    kernel: ModuleType, calls: list[Call], tokens: int, names: list[str]
) -> None:
    """Five launches, three for one token; more than 32768 tokens take several passes."""
    out, ids, weights = kernel.fused_moe_forward(*layer(tokens, 8, 48, 32), 8, 2)
    assert [call.name for call in calls] == names
    assert (out.shape, ids.shape, weights.shape) == ((tokens, 48), (tokens, 2), (tokens, 2))


def test_launches_of_the_other_functions(kernel: ModuleType, calls: list[Call]) -> None:
    x, router, gate, up, down = layer(16, 8, 48, 32)
    rows, places = empty(32, 48), empty(32, dtype=LONG)
    offsets, mix = empty(9, dtype=LONG), empty(16, 2, dtype=FLOAT)
    for call, names in (
        (lambda: kernel.route(empty(16, 8), 2), ["route"]),
        (lambda: kernel.moe_router(x, router, 2), ["score"]),
        (lambda: experts_call(kernel, 16), ["count", *GENERAL[1:]]),
        (lambda: experts_call(kernel, 1), ["decode_up", "decode_down"]),
        (lambda: kernel.grouped_gemm(rows, gate, offsets, 8), ["cut", "down"]),
        (lambda: kernel.unpermute_tokens(rows, mix, places, 16, 2), ["combine"]),
        (
            lambda: kernel.fused_expert_ffn(
                rows, gate, up, down, offsets, 8, mix, places, 16, 2
            ),
            ["cut", "up", "cut", "down", "combine"],
        ),
    ):  # fmt: skip
        calls.clear()
        call()
        assert [each.name for each in calls] == names


def test_no_launch_for_nothing(kernel: ModuleType, calls: list[Call]) -> None:
    """Case B44: a grid without programs is an error to a driver."""
    x, router, gate, up, down = layer(0, 8, 48, 32, FLOAT, "cpu")
    none, offsets = empty(0, dtype=LONG, device="cpu"), torch.zeros(9, dtype=LONG)
    mix, ids = empty(0, 2, dtype=FLOAT, device="cpu"), empty(0, 2, dtype=LONG, device="cpu")
    assert kernel.fused_moe_forward(x, router, gate, up, down, 8, 2)[0].shape == (0, 48)
    assert kernel.moe_router(x, router, 2)[2].shape == (0, 8)
    for shape in ((0, 8), (2, 0, 8)):
        assert kernel.route(torch.empty(shape), 2)[0].shape == (*shape[:-1], 2)
    both = torch.cat((gate, up), 1)
    assert kernel.fused_experts(x, both, down, ids, mix).shape == (0, 48)
    lead = (x.view(2, 0, 48), both, down, ids.view(2, 0, 2), mix.view(2, 0, 2))
    assert kernel.fused_experts(*lead).shape == (2, 0, 48)
    assert kernel.grouped_gemm(x, gate, offsets, 8).shape == (0, 32)
    assert kernel.unpermute_tokens(x, mix, none, 0, 2).shape == (0, 48)
    out = kernel.fused_expert_ffn(x, gate, up, down, offsets, 8, mix, none, 0, 2)
    assert out.shape == (0, 48)
    assert calls == []


@pytest.mark.parametrize("tokens", (1, 2, 4097, 65536, 1_100_000))
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inner"),
    ((1, 1, 16, 16), (8, 2, 4096, 14336), (256, 8, 7168, 2048), (1024, 32, 8192, 28672)),
)
def test_grid_fits(
    kernel: ModuleType, calls: list[Call], monkeypatch: pytest.MonkeyPatch, experts: int,
    top_k: int, hidden: int, inner: int, tokens: int,
) -> None:  # fmt: skip
    """Case B28, class 1: one axis, no number that 32 bits do not hold, enough counters."""
    arrivals = part(kernel, "_shared.arrivals")
    asked, counters = [], arrivals.counters

    def noted(device: torch.device, count: int) -> Tensor:
        asked.append(count)
        return counters(device, count)

    monkeypatch.setattr(arrivals, "counters", noted)
    kernel.fused_moe_forward(*layer(tokens, experts, hidden, inner), experts, top_k)
    kernel.route(empty(tokens, experts), top_k)
    experts_call(kernel, tokens)
    for call in calls:
        assert 1 <= call.programs < 2**31, call.name
        for value in call.scalars:
            assert isinstance(value, float) or 0 <= value < 2**31, (call.name, call.scalars)
    assert asked and max(asked) <= arrivals.MOST


def every_call(kernel: ModuleType) -> None:
    """Make calls that differ in all that a kernel can be compiled by."""
    for dtype, router, tokens, hidden, gating in itertools.product(
        (HALF, BFLOAT, FLOAT), (HALF, FLOAT), (1, 16, 300), (48, 40, 1024), ("softmax", "sigmoid")
    ):
        arguments = layer(tokens, 8, hidden, 32, dtype, router=router)
        kernel.fused_moe_forward(*arguments, 8, 2, gating)
        for bias in (None, HALF, FLOAT):
            more = None if bias is None else empty(8, dtype=bias)
            kernel.moe_router(*arguments[:2], 3, gating, more)
    for dtype, bias, scoring, renormalize, (experts, groups), top_k in itertools.product(
        (HALF, BFLOAT, FLOAT), (None, HALF, FLOAT), ("softmax", "topk_softmax", "sigmoid"),
        (False, True), ((8, 1), (8, 2), (60, 1), (387, 3), (516, 4), (1024, 1)), (1, 2, 3),
    ):  # fmt: skip
        kernel.route(
            empty(5, experts, dtype=dtype), top_k, scoring=scoring, renormalize=renormalize,
            bias=None if bias is None else empty(experts, dtype=bias), num_groups=groups,
            top_groups=max(1, groups - 1),
        )  # fmt: skip
    weights = {
        "rows": (empty(8, 64, 48), empty(8, 48, 32)),
        "columns": (empty(8, 48, 64).mT, empty(8, 32, 48).mT),
        "odd": (empty(8, 64, 49)[..., :48], empty(8, 48, 33)[..., :32]),
        "odd columns": (empty(8, 48, 65).mT[:, :64], empty(8, 32, 49).mT[:, :48]),
        "one": (empty(8, 48, 64).mT, empty(8, 48, 32)),
    }
    for (gate_up, down), activation, interleaved, bias, tokens in itertools.product(
        weights.values(), ("silu", "gelu_tanh", "swiglu_oai"), (False, True), (None, HALF, FLOAT),
        (1, 16, 300, 5000),
    ):  # fmt: skip
        biases = {}
        if bias is not None:
            biases = {
                "gate_up_bias": empty(8, 64, dtype=bias), "down_bias": empty(8, 48, dtype=bias)
            }  # fmt: skip
        experts_call(
            kernel, tokens, gate_up_proj=gate_up, down_proj=down, activation=activation,
            interleaved=interleaved, **biases,
        )  # fmt: skip
    for ids, mapped, mix, tokens, top_k in itertools.product(
        (torch.int32, LONG), (None, torch.int32, LONG), (HALF, FLOAT), (1, 16), (1, 3, 8)
    ):
        experts_call(
            kernel, tokens, top_k, top_k_index=empty(tokens, top_k, dtype=ids),
            top_k_weights=empty(tokens, top_k, dtype=mix),
            expert_map=None if mapped is None else empty(16, dtype=mapped),
        )  # fmt: skip
    for bias in ("gate_up_bias", "down_bias"):
        for tokens in (1, 16):
            shape = (8, 64) if bias == "gate_up_bias" else (8, 48)
            experts_call(kernel, tokens, **{bias: empty(*shape)})
            experts_call(kernel, tokens, **{bias: empty(8, 2 * shape[1])[:, ::2]})
            experts_call(kernel, tokens, hidden_states=empty(tokens, 64)[:, :48])
            experts_call(kernel, tokens, hidden_states=empty(tokens, 49)[:, :48])
            experts_call(kernel, tokens, top_k_index=empty(2, tokens, dtype=LONG).t())
    for dtype, mix in itertools.product((HALF, BFLOAT, FLOAT), (HALF, FLOAT)):
        rows, places = empty(32, 48, dtype=dtype), empty(32, dtype=LONG)
        gate, down = empty(8, 32, 48, dtype=dtype), empty(8, 48, 32, dtype=dtype)
        weights, offsets = empty(16, 2, dtype=mix), empty(9, dtype=LONG)
        kernel.unpermute_tokens(rows, weights, places, 16, 2)
        kernel.grouped_gemm(rows, gate, offsets, 8)
        kernel.fused_expert_ffn(rows, gate, gate, down, offsets, 8, weights, places, 16, 2)


def check_keys(calls: list[Call]) -> None:
    """Raise if Triton would compile more than one kernel for a key."""
    by_key: dict[object, set[object]] = {}
    for call in calls:
        by_key.setdefault(call.key, set()).add(call.specialised())
    wrong = {key[0] for key, found in by_key.items() if len(found) > 1}
    assert not wrong, wrong


def test_keys_tell_launches_apart(kernel: ModuleType, calls: list[Call]) -> None:
    """A compiled kernel is found again by its key: two that differ must have two."""
    every_call(kernel)
    check_keys(calls)
    assert len({call.specialised() for call in calls}) > 300


def test_keys_tell_numbers_of_warps_apart(
    kernel: ModuleType, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps are compiled in, and come from tables: they alone make another kernel."""
    config, ops = part(kernel, "config"), part(kernel, "ops")
    of_config = [
        (name, getattr(config, name)) for name in ("gemm_config", "score_config", "decode_config")
    ]
    of_ops = [
        (name, getattr(ops, name))
        for name in ("route_block", "combine_block", "dispatch_constants")
    ]

    def with_warps(choose: Callable, warps: int) -> Callable:
        def chosen(*given: object) -> object:
            found = choose(*given)
            if isinstance(found, tuple):
                return (*found[:-1], warps)
            return dataclasses.replace(found, num_warps=warps)

        return chosen

    for warps in (2, 4, 8):
        ops._plan.cache_clear()
        for module, known in ((config, of_config), (ops, of_ops)):
            for name, choose in known:
                monkeypatch.setattr(module, name, with_warps(choose, warps))
        for tokens in (1, 16):
            kernel.fused_moe_forward(*layer(tokens, 8, 48, 32), 8, 2)
            experts_call(kernel, tokens)
        kernel.route(empty(16, 8), 2)
    seen: dict[str, set[int]] = {}
    for call in calls:
        seen.setdefault(call.name, set()).add(call.warps)
    names = {*GENERAL, "count", "route", "decode_up", "decode_down"}
    assert seen == dict.fromkeys(names, {2, 4, 8})
    check_keys(calls)


def test_keys_tell_halves_from_what_lies_the_other_way(
    kernel: ModuleType, calls: list[Call]
) -> None:
    """One box over gate and up: which of them comes first is compiled in."""
    both = empty(8, 64, 64, device="cpu")
    x, down = empty(5000, 64, device="cpu"), empty(8, 64, 32, device="cpu")
    router = empty(8, 64, device="cpu")
    found = []
    for gate, up in ((both[:, :32], both[:, 32:]), (both[:, 32:], both[:, :32])):
        kernel.fused_moe_forward(x, router, gate, up, down, 8, 2)
        (call,) = (each for each in calls if each.name == "up")
        found.append(call)
        calls.clear()
    assert [each.constants["GATES"] for each in found] == ["halves", "halves"]
    assert found[0].key != found[1].key and found[0].specialised() != found[1].specialised()
    for each, first in zip(found, (False, True), strict=True):
        assert each.constants["UP_FIRST"] is first
        box = each.by_name["gate"]
        assert box.base.data_ptr() == both.data_ptr()
        assert list(box.shape) == [8, 2, 32, 64] and list(box.strides) == [4096, 2048, 64, 1]


@pytest.mark.parametrize("stride", (2**31 - 16, 2**31, 2**33))
def test_strides_of_64_bits(kernel: ModuleType, calls: list[Call], stride: int) -> None:
    """Class 1: a stride that takes 64 bits is another parameter to Triton, so another key."""
    small = torch.empty_strided((16, 8), (8, 1), device="meta")
    large = torch.empty_strided((16, 8), (stride, 1), device="meta")
    for logits in (small, large):
        kernel.route(logits, 2)
    for tokens, strides in itertools.product((1, 16), ((2, 1), (stride, 1), (1, stride))):
        weights = torch.empty_strided((tokens, 2), strides, device="meta")
        ids = torch.empty_strided((tokens, 2), strides, dtype=LONG, device="meta")
        experts_call(kernel, tokens, top_k_index=ids)
        experts_call(kernel, tokens, top_k_weights=weights)
    check_keys(calls)


@pytest.mark.parametrize("first", (1, 2, 3, 5, 9, 17, 33, 129, 2049, 4097))
def test_one_key_for_all_tokens_of_a_bucket(
    kernel: ModuleType, calls: list[Call], first: int
) -> None:
    """Case B65, class 16: numbers of tokens are no part of what is compiled."""
    last = part(kernel, "config").bucket(first)
    found = set()
    for tokens in sorted({first, first + 1, (first + last) // 2, last - 1, last}):
        if first <= tokens <= last:
            calls.clear()
            kernel.fused_moe_forward(*layer(tokens, 60, 1024, 48), 60, 6)
            experts_call(kernel, tokens)
            kernel.route(empty(tokens, 60), 6)
            found.add(tuple((call.key, call.specialised()) for call in calls))
    assert len(found) == 1


def test_keys_are_few(kernel: ModuleType, calls: list[Call]) -> None:
    """Class 16: a layer that is called with any number of tokens is compiled a few times."""
    for tokens in (*range(1, 70), 100, 128, 129, 1000, 1024, 1025, 5000, 20000, 32768, 65537):
        kernel.fused_moe_forward(*layer(tokens, 60, 1024, 48), 60, 6)
    keys: dict[str, set[object]] = {}
    for call in calls:
        keys.setdefault(call.name, set()).add(call.key)
    # As many as there are tiles, or sizes of a block, to choose from.
    counts = {name: len(found) for name, found in keys.items()}
    assert counts.pop("score") <= 8 and counts.pop("up") <= 6 and counts.pop("down") <= 6
    assert counts.pop("index") <= 6
    assert counts == {"combine": 1, "decode_up": 1, "decode_down": 1}


@pytest.mark.parametrize("dtype", (HALF, FLOAT), ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), ((2, 8, 2), (5, 60, 3), (130, 7, 7), (4097, 256, 8))
)
def test_tensors_of_a_layer(
    kernel: ModuleType, calls: list[Call], dtype: torch.dtype, tokens: int, experts: int, top_k: int
) -> None:
    """Operands in place, and tables as large as the kernels' comments say."""
    config = part(kernel, "config")
    hidden, inner, slots = 1024, 48, tokens * top_k
    arguments = layer(tokens, experts, hidden, inner, dtype, "cpu")
    out, ids, weights = kernel.fused_moe_forward(*arguments, experts, top_k)
    score, index, up, down, combine = (call.by_name for call in calls)
    x, router = arguments[:2]
    assert score["x_ptr"].data_ptr() == x.data_ptr() and score["w_ptr"] is router
    assert score["ids_ptr"].data_ptr() == ids.data_ptr() and score["w_bias_ptr"] is None
    rounded = score["weights_ptr" if dtype is FLOAT else "rounded_ptr"]
    assert rounded.data_ptr() == weights.data_ptr() and weights.dtype is dtype
    assert (score["rounded_ptr"] is None) == (dtype is FLOAT)
    assert score["logits_ptr"].shape == (tokens, experts) and score["logits_ptr"].dtype is FLOAT
    programs, tile = calls[0].programs, score["BLOCK_T"] * score["BLOCK_E"]
    blocks = -(-tokens // score["BLOCK_T"])
    assert score["slabs"] == -(-experts // score["BLOCK_E"])
    assert score["tiles"] == blocks * score["slabs"]
    assert programs == score["tiles"] * score["splits"]
    steps = -(-hidden // score["BLOCK_K"])
    assert (score["splits"] - 1) * score["span"] < steps <= score["splits"] * score["span"]
    if score["splits"] > 1:
        assert score["parts_ptr"].numel() == programs * tile
        assert score["parts_ptr"].dtype is FLOAT
    assert score["arrivals_ptr"].numel() >= score["tiles"] + blocks
    assert not bool(score["arrivals_ptr"].any())
    # The tables, which the router fills and the ordering reads.
    block = score["BLOCK"]
    assert score["BLOCK_T"] % block == 0 and block % score["TOKENS"] == 0
    assert index["size"] == block * top_k <= index["SIZE"] and index["blocks"] == calls[1].programs
    assert index["blocks"] == -(-tokens // block)
    for name, size in (("slots_ptr", slots), ("counts_ptr", index["blocks"] * experts)):
        assert score[name].data_ptr() == index[name].data_ptr()
        assert score[name].numel() == index[name].numel() == size
        assert score[name].dtype is torch.int32
    assert index["sorted_ptr"].numel() == slots and index["EXPERTS"] >= experts
    for kind, height, call in (("up", "up_height", calls[2]), ("down", "down_height", calls[3])):
        most = config.most_tiles(slots, experts, index[height])
        columns = -(-(inner if kind == "up" else hidden) // call.constants["BLOCK_N"])
        assert call.programs == most * columns
        extra = index[f"{kind}_extra"]
        cut = index[height], extra, index[f"{kind}_tall"]
        assert tuple(call.constants[name] for name in ("TOKENS", "EXTRA", "TALL")) == cut
        tiles = call.by_name["tiles_ptr"]
        named = "up" if kind == "up" or index["ONE"] else "down"
        assert tiles.data_ptr() == index[f"{named}_tiles_ptr"].data_ptr()
        assert tiles.numel() >= 4 * most
        at = index["counted_ptr"].data_ptr() + (4 if named == "down" else 0)
        assert call.by_name["counted_ptr"].data_ptr() == at
        assert call.by_name["sorted_ptr"].data_ptr() == index["sorted_ptr"].data_ptr()
    assert up["h_ptr"].shape == (slots, inner) and up["h_ptr"].dtype is dtype
    h = down["h"] if isinstance(down["h"], Tensor) else down["h"].base
    assert h.data_ptr() == down["h_ptr"].data_ptr() == up["h_ptr"].data_ptr()
    assert down["y_ptr"].shape == (slots, hidden)
    assert combine["y_ptr"].data_ptr() == down["y_ptr"].data_ptr()
    assert combine["slots_ptr"].data_ptr() == index["slots_ptr"].data_ptr()
    assert combine["weights_ptr"].data_ptr() == score["weights_ptr"].data_ptr()
    assert combine["out_ptr"].data_ptr() == out.data_ptr() and combine["TOP_K"] == top_k
    assert calls[4].programs == tokens * -(-hidden // combine["BLOCK"])
    # No two tables share memory, and each starts at a multiple of 16 bytes.
    tables = [index[name] for name in list(index)[:6]]
    assert all(each.data_ptr() % 16 == 0 for each in tables)
    spans = sorted((each.data_ptr(), each.data_ptr() + 4 * each.numel()) for each in tables)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_tensors_of_one_token(kernel: ModuleType, calls: list[Call]) -> None:
    """Each slot reads its own weights: nothing is ordered, nothing is counted."""
    arguments = layer(1, 60, 1024, 50, HALF, "cpu")
    out, ids, weights = kernel.fused_moe_forward(*arguments, 60, 6)
    score, up, down = (call.by_name for call in calls)
    assert score["slots_ptr"] is None and score["counts_ptr"] is None
    assert up["ids_ptr"].data_ptr() == down["ids_ptr"].data_ptr() == ids.data_ptr()
    assert up["gate_ptr"].data_ptr() == arguments[2].data_ptr()
    assert up["up_ptr"].data_ptr() == arguments[3].data_ptr()
    assert up["h_ptr"].shape == (6, 50) and down["h_ptr"].data_ptr() == up["h_ptr"].data_ptr()
    assert calls[1].programs == 6 * up["columns"] and up["columns"] == -(-50 // up["BLOCK_N"])
    assert calls[2].programs == down["columns"] == -(-1024 // down["BLOCK_N"])
    assert down["weights_ptr"].dtype is FLOAT  # not those that were rounded
    assert down["weights_ptr"].data_ptr() == score["weights_ptr"].data_ptr()
    assert down["out_ptr"].data_ptr() == out.data_ptr()
    assert (up["given"], up["experts"], down["given"], down["experts"]) == (60, 60, 60, 60)


def test_passes_share_the_tokens(kernel: ModuleType, calls: list[Call]) -> None:
    """More tokens than a pass takes: each is given the next ones, and its part of the result."""
    tokens, most = 80_000, part(kernel, "config").MOST_TOKENS
    out, ids, _ = kernel.fused_moe_forward(*layer(tokens, 8, 16, 16, HALF, "cpu"), 8, 2)
    combined = [call.by_name for call in calls if call.name == "combine"]
    scores = [call.by_name for call in calls if call.name == "score"]
    sizes = [each["out_ptr"].shape[0] for each in combined]
    assert sizes == [most, most, tokens - 2 * most] == [each["tokens"] for each in scores]
    first = 0
    for size, score, combine in zip(sizes, scores, combined, strict=True):
        assert combine["out_ptr"].data_ptr() == out[first:].data_ptr()
        assert score["ids_ptr"].data_ptr() == ids[first:].data_ptr()
        first += size
