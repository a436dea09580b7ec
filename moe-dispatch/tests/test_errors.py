"""Bad arguments: an error that names function, argument, wanted and got, before any launch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from .routing import part

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="arguments are checked the same with and without the interpreter",
)
HALF, FLOAT, LONG = torch.float16, torch.float32, torch.int64


def of(*shape: int, dtype: torch.dtype = HALF, device: str | None = None) -> Callable:
    """Return what makes a tensor on a device that is known later."""
    return lambda there: torch.zeros(shape, dtype=dtype, device=device or there)


#: Good arguments: 6 tokens of 16 features, 4 experts of 8, 2 choices.
GOOD: dict[str, dict[str, object]] = {
    "route": {"logits": of(6, 4), "top_k": 2},
    "fused_experts": {
        "hidden_states": of(6, 16), "gate_up_proj": of(4, 16, 16), "down_proj": of(4, 16, 8),
        "top_k_index": of(6, 2, dtype=LONG), "top_k_weights": of(6, 2),
    },
    "fused_moe_forward": {
        "hidden_states": of(6, 16), "router_weight": of(4, 16), "w_gate": of(4, 8, 16),
        "w_up": of(4, 8, 16), "w_down": of(4, 16, 8), "num_experts": 4, "top_k": 2,
    },
    "moe_router": {"hidden_states": of(6, 16), "router_weight": of(4, 16), "top_k": 2},
    "compute_permutation_indices": {"top_k_indices": of(6, 2, dtype=LONG), "num_experts": 4},
    "permute_tokens": {
        "hidden_states": of(6, 16), "top_k_indices": of(6, 2, dtype=LONG), "num_experts": 4,
    },
    "unpermute_tokens": {
        "expert_outputs": of(12, 16), "top_k_weights": of(6, 2),
        "restore_idx": of(12, dtype=LONG), "num_tokens": 6, "top_k": 2,
    },
    "grouped_gemm": {
        "tokens": of(12, 16), "weights": of(4, 8, 16), "expert_offsets": of(5, dtype=LONG),
        "num_experts": 4,
    },
    "fused_expert_ffn": {
        "permuted_tokens": of(12, 16), "w_gate": of(4, 8, 16), "w_up": of(4, 8, 16),
        "w_down": of(4, 16, 8), "expert_offsets": of(5, dtype=LONG), "num_experts": 4,
        "top_k_weights": of(6, 2), "sorted_idx": of(12, dtype=LONG), "num_tokens": 6, "top_k": 2,
    },
}  # fmt: skip


def floats(function: str, *names: str) -> list[tuple]:
    """Return what no float tensor may be."""
    return [
        case
        for name in names
        for case in (
            (function, name, "nothing", TypeError, "a tensor", "'nothing' (str)"),
            (function, name, [[1.0]], TypeError, "a tensor", "(list)"),
            (function, name, of(6, 16, dtype=torch.float64), TypeError, "float32", "float64"),
            (function, name, of(6, 16, dtype=LONG), TypeError, "or float32", "torch.int64"),
        )
    ]


def integers(function: str, name: str, kinds: str = "int32 or int64") -> list[tuple]:
    """Return what no tensor of integers may be."""
    return [
        (function, name, None, TypeError, kinds, "None"),
        (function, name, [[0, 1]], TypeError, kinds, "(list)"),
        (function, name, of(6, 2), TypeError, kinds, "torch.float16"),
        (function, name, of(6, 2, dtype=torch.int16), TypeError, kinds, "torch.int16"),
    ]


def counts(function: str, name: str, most: int) -> list[tuple]:
    """Return what no number from 1 to `most` may be."""
    return [
        (function, name, 2.0, TypeError, "an integer", "2.0 (float)"),
        (function, name, True, TypeError, "an integer", "True (bool)"),
        (function, name, None, TypeError, "an integer", "None"),
        (function, name, "2", TypeError, "an integer", "'2' (str)"),
        (function, name, 0, ValueError, f"from 1 to {most}", "0"),
        (function, name, -1, ValueError, f"from 1 to {most}", "-1"),
        (function, name, most + 1, ValueError, f"from 1 to {most}", str(most + 1)),
    ]


def one_of(function: str, name: str, *wanted: str) -> list[tuple]:
    """Return what no choice of words may be."""
    return [
        (function, name, None, TypeError, "a string", "None"),
        (function, name, 1, TypeError, "a string", "1 (int)"),
        (function, name, "relu", ValueError, " or ".join(map(repr, wanted)), "'relu'"),
        (function, name, wanted[0].upper(), ValueError, repr(wanted[0]), repr(wanted[0].upper())),
    ]


def weights(function: str, *names: str) -> list[tuple]:
    """Return what no experts' weight may be, hidden_states being float16."""
    return [
        case
        for name in names
        for case in (
            (function, name, of(4, 8, 16, dtype=FLOAT), TypeError, "torch.float16", "float32"),
            (function, name, of(4, 8), ValueError, "3 dimensions", "(4, 8)"),
            (function, name, of(4, 8, 16, device="meta"), ValueError, "with hidden_states", "meta"),
        )
    ]


# Function, argument, value (made by calling it with the device, if it is a function), error, what
# the text says was wanted, what it says came.
BAD = (
    *floats("route", "logits", "bias"),
    ("route", "logits", of(), ValueError, "[..., experts] with 1 to 1024", "()"),
    ("route", "logits", of(6, 0), ValueError, "[..., experts] with 1 to 1024", "(6, 0)"),
    ("route", "logits", of(6, 1025), ValueError, "[..., experts] with 1 to 1024", "(6, 1025)"),
    *counts("route", "top_k", 4),
    *one_of("route", "scoring", "softmax", "topk_softmax", "sigmoid"),
    ("route", "renormalize", 1, TypeError, "True or False", "1 (int)"),
    ("route", "renormalize", None, TypeError, "True or False", "None"),
    ("route", "bias", of(3), ValueError, "shape (4,)", "(3,)"),
    ("route", "bias", of(1, 4), ValueError, "shape (4,)", "(1, 4)"),
    ("route", "bias", of(4, device="meta"), ValueError, "with logits", "on meta"),
    *counts("route", "num_groups", 4),
    ("route", "num_groups", 3, ValueError, "divide 4 experts", "3"),
    *counts("route", "top_groups", 1),
    ("route", "scale", "1", TypeError, "a number", "'1' (str)"),
    ("route", "scale", None, TypeError, "a number", "None"),
    ("route", "scale", True, TypeError, "a number", "True (bool)"),
    ("route", "scale", math.nan, ValueError, "finite", "nan"),
    ("route", "scale", math.inf, ValueError, "finite", "inf"),
    ("route", "scale", -1e39, ValueError, "finite", "-1e+39"),
    *floats(
        "fused_experts", "hidden_states", "gate_up_proj", "down_proj", "top_k_weights",
        "gate_up_bias", "down_bias",
    ),
    ("fused_experts", "hidden_states", of(), ValueError, "[..., hidden]", "()"),
    ("fused_experts", "hidden_states", of(6, 0), ValueError, "[..., hidden]", "(6, 0)"),
    *weights("fused_experts", "gate_up_proj", "down_proj"),
    ("fused_experts", "gate_up_proj", of(4, 15, 16), ValueError, "(4, 16, 16)", "(4, 15, 16)"),
    ("fused_experts", "gate_up_proj", of(3, 16, 16), ValueError, "(4, 16, 16)", "(3, 16, 16)"),
    ("fused_experts", "gate_up_proj", of(4, 16, 15), ValueError, "(4, 16, 16)", "(4, 16, 15)"),
    ("fused_experts", "gate_up_proj", of(4, 8, 16), ValueError, "(4, 16, 16)", "(4, 8, 16)"),
    ("fused_experts", "down_proj", of(4, 15, 8), ValueError, "[experts, 16, inner]", "(4, 15, 8)"),
    ("fused_experts", "down_proj", of(4, 16, 0), ValueError, "[experts, 16, inner]", "(4, 16, 0)"),
    ("fused_experts", "down_proj", of(0, 16, 8), ValueError, "1 to 1024 experts", "(0, 16, 8)"),
    ("fused_experts", "down_proj", of(1025, 16, 8), ValueError, "1 to 1024", "(1025, 16, 8)"),
    *integers("fused_experts", "top_k_index"),
    ("fused_experts", "top_k_index", of(5, 2, dtype=LONG), ValueError, "(6, 'top_k')", "(5, 2)"),
    ("fused_experts", "top_k_index", of(6, dtype=LONG), ValueError, "(6, 'top_k')", "(6,)"),
    ("fused_experts", "top_k_index", of(6, 0, dtype=LONG), ValueError, "1 to 32", "(6, 0)"),
    ("fused_experts", "top_k_index", of(6, 33, dtype=LONG), ValueError, "1 to 32", "(6, 33)"),
    ("fused_experts", "top_k_index", of(6, 2, dtype=LONG, device="meta"), ValueError, "on", "meta"),
    ("fused_experts", "top_k_weights", of(6, 3), ValueError, "shape (6, 2)", "(6, 3)"),
    ("fused_experts", "top_k_weights", of(12), ValueError, "shape (6, 2)", "(12,)"),
    ("fused_experts", "top_k_weights", of(6, 2, device="meta"), ValueError, "with", "on meta"),
    *one_of("fused_experts", "activation", "silu", "gelu_tanh", "swiglu_oai"),
    ("fused_experts", "gate_up_bias", of(4, 8), ValueError, "shape (4, 16)", "(4, 8)"),
    ("fused_experts", "gate_up_bias", of(16), ValueError, "shape (4, 16)", "(16,)"),
    ("fused_experts", "down_bias", of(4, 8), ValueError, "shape (4, 16)", "(4, 8)"),
    ("fused_experts", "down_bias", of(4, 16, device="meta"), ValueError, "with", "on meta"),
    ("fused_experts", "alpha", None, TypeError, "a number", "None"),
    ("fused_experts", "alpha", math.inf, ValueError, "finite", "inf"),
    ("fused_experts", "limit", "7", TypeError, "a number", "'7' (str)"),
    ("fused_experts", "limit", -1.0, ValueError, "at least 0", "-1.0"),
    ("fused_experts", "limit", math.nan, ValueError, "finite", "nan"),
    ("fused_experts", "interleaved", None, TypeError, "True or False", "None"),
    *integers("fused_experts", "expert_map")[1:],
    ("fused_experts", "expert_map", of(2, 2, dtype=LONG), ValueError, "[all experts]", "(2, 2)"),
    ("fused_experts", "expert_map", of(0, dtype=LONG), ValueError, "[all experts]", "(0,)"),
    ("fused_experts", "expert_map", of(4, dtype=LONG, device="meta"), ValueError, "with", "meta"),
    *floats(
        "fused_moe_forward", "hidden_states", "router_weight", "w_gate", "w_up", "w_down"
    ),
    ("fused_moe_forward", "hidden_states", of(16), ValueError, "[tokens, hidden]", "(16,)"),
    ("fused_moe_forward", "hidden_states", of(2, 3, 16), ValueError, "[tokens, hidden]", "(2, 3,"),
    ("fused_moe_forward", "hidden_states", of(6, 0), ValueError, "[tokens, hidden]", "(6, 0)"),
    ("fused_moe_forward", "router_weight", of(3, 16), ValueError, "shape (4, 16)", "(3, 16)"),
    ("fused_moe_forward", "router_weight", of(4, 15), ValueError, "shape (4, 16)", "(4, 15)"),
    *weights("fused_moe_forward", "w_gate", "w_up", "w_down"),
    ("fused_moe_forward", "w_gate", of(4, 7, 16), ValueError, "(4, 8, 16)", "(4, 7, 16)"),
    ("fused_moe_forward", "w_up", of(4, 8, 15), ValueError, "(4, 8, 16)", "(4, 8, 15)"),
    ("fused_moe_forward", "w_down", of(4, 15, 8), ValueError, "[experts, 16", "(4, 15, 8)"),
    *counts("fused_moe_forward", "num_experts", 1024),
    *counts("fused_moe_forward", "top_k", 4),
    *one_of("fused_moe_forward", "gating", "softmax", "sigmoid"),
    *floats("moe_router", "hidden_states", "router_weight", "router_bias"),
    ("moe_router", "hidden_states", of(6, 0), ValueError, "[tokens, hidden]", "(6, 0)"),
    ("moe_router", "hidden_states", of(16), ValueError, "[tokens, hidden]", "(16,)"),
    ("moe_router", "router_weight", of(4, 15), ValueError, "shape (4, 16)", "(4, 15)"),
    ("moe_router", "router_weight", of(4, 16, device="meta"), ValueError, "with", "on meta"),
    ("moe_router", "router_bias", of(3), ValueError, "shape (4,)", "(3,)"),
    *counts("moe_router", "top_k", 4),
    *one_of("moe_router", "gating", "softmax", "sigmoid"),
    *integers("compute_permutation_indices", "top_k_indices"),
    ("compute_permutation_indices", "top_k_indices", of(6, dtype=LONG), ValueError, "1 to 32", "6"),
    ("compute_permutation_indices", "top_k_indices", of(6, 33, dtype=LONG), ValueError, "1 to 32",
     "(6, 33)"),
    *counts("compute_permutation_indices", "num_experts", 1024),
    *floats("permute_tokens", "hidden_states"),
    ("permute_tokens", "hidden_states", of(5, 16), ValueError, "[6, hidden]", "(5, 16)"),
    ("permute_tokens", "hidden_states", of(6), ValueError, "[6, hidden]", "(6,)"),
    *integers("permute_tokens", "top_k_indices"),
    ("permute_tokens", "top_k_indices", of(6, 2, dtype=LONG, device="meta"), ValueError, "with",
     "on meta"),
    *counts("permute_tokens", "num_experts", 1024),
    *floats("unpermute_tokens", "expert_outputs", "top_k_weights"),
    ("unpermute_tokens", "expert_outputs", of(11, 16), ValueError, "[12, hidden]", "(11, 16)"),
    ("unpermute_tokens", "expert_outputs", of(6, 2, 16), ValueError, "[12, hidden]", "(6, 2, 16)"),
    ("unpermute_tokens", "top_k_weights", of(2, 6), ValueError, "shape (6, 2)", "(2, 6)"),
    *integers("unpermute_tokens", "restore_idx", "int64"),
    ("unpermute_tokens", "restore_idx", of(12, dtype=torch.int32), TypeError, "int64", "int32"),
    ("unpermute_tokens", "restore_idx", of(11, dtype=LONG), ValueError, "shape (12,)", "(11,)"),
    ("unpermute_tokens", "restore_idx", of(12, dtype=LONG, device="meta"), ValueError, "", "meta"),
    ("unpermute_tokens", "num_tokens", 6.0, TypeError, "an integer", "6.0 (float)"),
    ("unpermute_tokens", "num_tokens", True, TypeError, "an integer", "True (bool)"),
    ("unpermute_tokens", "num_tokens", -6, ValueError, "from 0", "-6"),
    *counts("unpermute_tokens", "top_k", 32),
    *floats("grouped_gemm", "tokens", "weights"),
    ("grouped_gemm", "tokens", of(12), ValueError, "[rows, k]", "(12,)"),
    ("grouped_gemm", "tokens", of(12, 0), ValueError, "[rows, k]", "(12, 0)"),
    ("grouped_gemm", "weights", of(4, 8, 16, dtype=FLOAT), TypeError, "torch.float16", "float32"),
    ("grouped_gemm", "weights", of(4, 8, 15), ValueError, "[4, n, 16]", "(4, 8, 15)"),
    ("grouped_gemm", "weights", of(3, 8, 16), ValueError, "[4, n, 16]", "(3, 8, 16)"),
    ("grouped_gemm", "weights", of(4, 0, 16), ValueError, "[4, n, 16]", "(4, 0, 16)"),
    ("grouped_gemm", "weights", of(4, 16), ValueError, "[4, n, 16]", "(4, 16)"),
    ("grouped_gemm", "weights", of(4, 8, 16, device="meta"), ValueError, "with", "on meta"),
    *integers("grouped_gemm", "expert_offsets", "int64"),
    ("grouped_gemm", "expert_offsets", of(4, dtype=LONG), ValueError, "shape (5,)", "(4,)"),
    *counts("grouped_gemm", "num_experts", 1024),
    *floats("fused_expert_ffn", "permuted_tokens", "w_gate", "w_up", "w_down", "top_k_weights"),
    ("fused_expert_ffn", "permuted_tokens", of(11, 16), ValueError, "[12, hidden]", "(11, 16)"),
    ("fused_expert_ffn", "permuted_tokens", of(12, 0), ValueError, "[12, hidden]", "(12, 0)"),
    ("fused_expert_ffn", "w_gate", of(4, 7, 16), ValueError, "(4, 8, 16)", "(4, 7, 16)"),
    ("fused_expert_ffn", "w_up", of(4, 8, 16, dtype=FLOAT), TypeError, "float16", "float32"),
    *integers("fused_expert_ffn", "expert_offsets", "int64"),
    *integers("fused_expert_ffn", "sorted_idx", "int64"),
    ("fused_expert_ffn", "expert_offsets", of(4, dtype=LONG), ValueError, "shape (5,)", "(4,)"),
    ("fused_expert_ffn", "sorted_idx", of(11, dtype=LONG), ValueError, "shape (12,)", "(11,)"),
    ("fused_expert_ffn", "top_k_weights", of(6, 3), ValueError, "shape (6, 2)", "(6, 3)"),
    ("fused_expert_ffn", "num_tokens", 6.0, TypeError, "an integer", "6.0 (float)"),
    ("fused_expert_ffn", "num_tokens", -6, ValueError, "from 0", "-6"),
    *counts("fused_expert_ffn", "num_experts", 1024),
    *counts("fused_expert_ffn", "top_k", 32),
)  # fmt: skip


@pytest.fixture
def nothing_runs(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if anything is computed."""

    def computed(*_: object, **__: object) -> None:
        pytest.fail("something was computed before the arguments were checked")

    for module, names in (
        ("ops", ("choose", "route", "run", "experts", "moe", "moe_operator")),
        ("stage_ops", ("router", "unpermute", "grouped_gemm", "grouped_gemm_operator",
                       "expert_ffn", "expert_ffn_operator")),
        ("reference", ("route", "experts", "linear", "combine")),
        ("launch", ("launch",)),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(part(kernel, module), name, computed)


def made(arguments: dict[str, object], device: str) -> dict[str, object]:
    return {name: of(device) if callable(of) else of for name, of in arguments.items()}


@pytest.mark.kernels_ci
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("function", "argument", "value", "error", "wanted", "got"),
    BAD,
    ids=[f"{case[0]}-{case[1]}-{case[5]}" for case in BAD],
)
def test_bad_argument(
    kernel: ModuleType, device: str, function: str, argument: str, value: object,
    error: type[Exception], wanted: str, got: str,
) -> None:  # fmt: skip
    for gradients in (False, True):
        arguments = made({**GOOD[function], argument: value}, device)
        if gradients:
            for each in arguments.values():
                if isinstance(each, Tensor) and each.is_floating_point():
                    each.requires_grad_()
        with pytest.raises(error) as caught:
            getattr(kernel, function)(**arguments)
        text = str(caught.value)
        assert type(caught.value) is error
        assert text.startswith(f"{function}: {argument} must "), text
        before, _, after = text.partition(", got ")
        assert wanted in before and got in after, text


@pytest.mark.parametrize("function", GOOD)
def test_good_arguments(kernel: ModuleType, device: str, function: str) -> None:
    """What the table above spoils is taken as it is, and so is None for what may be left out."""
    arguments = made(GOOD[function], device)
    getattr(kernel, function)(**arguments)
    optional = {
        "route": ("bias",), "moe_router": ("router_bias",),
        "fused_experts": ("gate_up_bias", "down_bias", "expert_map"),
    }.get(function, ())  # fmt: skip
    getattr(kernel, function)(**arguments, **dict.fromkeys(optional))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("function", GOOD)
def test_unknown_argument(kernel: ModuleType, device: str, function: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        getattr(kernel, function)(**made(GOOD[function], device), out=None)


@pytest.mark.usefixtures("nothing_runs")
def test_choices_beyond_the_groups(kernel: ModuleType, device: str) -> None:
    """More choices than the groups hold: the text says how many there are, and why."""
    logits = torch.zeros(6, 12, device=device)
    with pytest.raises(ValueError) as caught:
        kernel.route(logits, 7, num_groups=4, top_groups=2)
    text = "route: top_k must be at most 6, the experts of top_groups=2 groups, got 7"
    assert str(caught.value) == text
    with pytest.raises(ValueError, match=r"route: top_groups must be from 1 to 4, got 5"):
        kernel.route(logits, 2, num_groups=4, top_groups=5)
    with pytest.raises(ValueError, match=r"route: top_k must be from 1 to 32, got 33"):
        kernel.route(torch.zeros(2, 64, device=device), 33)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("function", ("fused_moe_forward", "fused_expert_ffn"))
def test_experts_of_the_weights(kernel: ModuleType, device: str, function: str) -> None:
    """Weights of another number of experts than is said."""
    arguments = made(GOOD[function], device)
    for name in ("w_gate", "w_up", "w_down"):
        arguments[name] = arguments[name][:3]
    with pytest.raises(
        ValueError, match=f"{function}: w_down must hold num_experts=4 .*got .*3, 16"
    ):
        getattr(kernel, function)(**arguments)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("change", "text"),
    (
        ({"has_gate": False}, "has no gate, or a norm after"),
        ({"has_post_expert_norm": True}, "has no gate, or a norm after"),
        ({"act_fn": torch.nn.ReLU()}, "the activation of .* is not SiLU"),
        ({"act_fn": torch.nn.GELU()}, "the activation of .* is not SiLU"),
    ),
)
def test_experts_that_are_not_served(
    kernel: ModuleType, device: str, change: dict[str, object], text: str
) -> None:
    """Case B67: nothing is computed by another formula than the model's."""

    class Experts(SimpleNamespace):
        def _apply_gate(self) -> None: ...

    Experts._apply_gate.__name__ = "_default_apply_gate"
    check_not_served(kernel, device, Experts, change, text)


@pytest.mark.usefixtures("nothing_runs")
def test_own_activation_of_a_subclass(kernel: ModuleType, device: str) -> None:
    """Case B67: what a class changes in gpt-oss's experts is not ignored."""

    class Experts(SimpleNamespace):
        def _apply_gate(self) -> None: ...

    class GptOssExperts(Experts): ...

    check_not_served(kernel, device, GptOssExperts, {}, "the activation of GptOssExperts is not")


def check_not_served(
    kernel: ModuleType, device: str, kind: type, change: dict[str, object], text: str
) -> None:
    given = made(GOOD["fused_experts"], device)
    module = kind(
        has_gate=True, has_post_expert_norm=False, is_transposed=False, has_bias=False,
        is_concatenated=True, act_fn=torch.nn.SiLU(), gate_up_proj=given["gate_up_proj"],
        down_proj=given["down_proj"],
    )  # fmt: skip
    for name, value in change.items():
        setattr(module, name, value)
    arguments = [given[name] for name in ("hidden_states", "top_k_index", "top_k_weights")]
    with pytest.raises(NotImplementedError, match=f"experts_forward: .*{text}"):
        kernel.experts_forward(module, *arguments)


@pytest.mark.parametrize("transform", (False, True), ids=("dual", "jvp"))
@pytest.mark.parametrize(
    ("function", "carrier"),
    (("route", "logits"), ("route", "bias"), ("fused_experts", "hidden_states"),
     ("fused_experts", "top_k_weights"), ("fused_moe_forward", "router_weight"),
     ("moe_router", "hidden_states"), ("grouped_gemm", "tokens"), ("grouped_gemm", "weights"),
     ("fused_expert_ffn", "permuted_tokens"), ("fused_expert_ffn", "top_k_weights"),
     ("unpermute_tokens", "expert_outputs"), ("unpermute_tokens", "top_k_weights")),
)  # fmt: skip
def test_forward_mode_is_refused(
    kernel: ModuleType, device: str, function: str, carrier: str, transform: bool
) -> None:
    """A tangent is not dropped silently, whoever attached it."""
    arguments = made(GOOD[function], device)
    if carrier == "bias":
        arguments["bias"] = torch.zeros(4, device=device)
    value = arguments[carrier]
    if transform:
        with pytest.raises(NotImplementedError, match=f"{function}: .*forward-mode"):
            torch.func.jvp(
                lambda each: getattr(kernel, function)(**{**arguments, carrier: each}),
                (value,), (torch.ones_like(value),),
            )  # fmt: skip
        return
    with torch.autograd.forward_ad.dual_level():
        getattr(kernel, function)(**arguments)  # nothing to differentiate
        arguments[carrier] = torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(NotImplementedError, match=f"{function}: .*forward-mode"):
            getattr(kernel, function)(**arguments)


def test_no_limit(kernel: ModuleType, device: str) -> None:
    """An infinite limit clamps nothing."""
    arguments = made(GOOD["fused_experts"], device) | {"activation": "swiglu_oai"}
    arguments = {
        name: torch.randn_like(value) if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }  # fmt: skip
    wanted = kernel.fused_experts(**arguments, limit=torch.finfo(FLOAT).max)
    assert torch.equal(kernel.fused_experts(**arguments, limit=math.inf), wanted)


def test_tensors_without_data(kernel: ModuleType) -> None:
    """On the meta device each function returns shapes and dtypes."""
    for function, given in GOOD.items():
        found = getattr(kernel, function)(**made(given, "meta"))
        for each in found if isinstance(found, tuple) else (found,):
            assert each.is_meta, function
