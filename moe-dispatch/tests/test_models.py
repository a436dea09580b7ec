"""Models of transformers that run their experts through `experts_forward`."""

from __future__ import annotations

import copy
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from monorepo.numerics import check_tensor

from .models import (
    MODELS,
    closest_choice,
    gradients_of,
    in_float64,
    logits,
    prompt,
    routers,
    small_model,
)
from .oracle import INTERPRETED

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
IDS, WEIGHTS = torch.tensor([[0, 1]]), torch.tensor([[0.75, 0.25]])

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="slow, and the kernels of test_logits")
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def calls(kernel: ModuleType) -> list[nn.Module]:
    """The experts that ran through our function, registered as "roofline", in order."""
    made: list[nn.Module] = []

    def counted(self: nn.Module, *arguments: Tensor) -> Tensor:
        made.append(self)
        return kernel.experts_forward(self, *arguments)

    ALL_EXPERTS_FUNCTIONS.register("roofline", counted)
    return made


def with_ours(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model)
    model.set_experts_implementation("roofline")
    return model


def small_experts(device: str, activation: str = "silu") -> MixtralExperts:
    """Experts alone: three of 32 features that run through our function."""
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_local_experts=3, hidden_act=activation,
        experts_implementation="roofline",
    )  # fmt: skip
    experts = MixtralExperts(config).requires_grad_(False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts.to(device)


def eager(experts: nn.Module, *arguments: Tensor) -> Tensor:
    """The model's own code on the same weights."""
    experts = copy.deepcopy(experts)
    experts.config._experts_implementation = "eager"
    return experts(*arguments)


@each_model
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits(device: str, calls: list[nn.Module], name: str, dtype: torch.dtype) -> None:
    """As near to float64 as the plain model, with a prompt whose choices rounding cannot change."""
    plain = small_model(name, device, dtype)
    exact, ours = in_float64(plain), with_ours(plain)
    tokens = prompt(exact)
    assert closest_choice(exact, tokens) > 0.03
    got = logits(ours, tokens)
    assert len(calls) == len(routers(ours)) == 2
    check_tensor(got, logits(exact, tokens), logits(plain, tokens))


@each_model
def test_experts_matter(device: str, name: str) -> None:
    """Without this, the logits of a model whose experts were wrong might pass."""
    plain = small_model(name, device, torch.float32)
    other = copy.deepcopy(plain)
    for key, parameter in other.named_parameters():
        if key.endswith("experts.down_proj"):
            parameter.copy_(parameter.roll(1, 0))
    tokens = prompt(plain)
    assert (logits(plain, tokens) - logits(other, tokens)).std() > 0.3


@not_interpreted
@each_model
def test_generation(device: str, calls: list[nn.Module], name: str) -> None:
    """Several tokens first, then one at a time, which takes another path."""
    plain = small_model(name, device, torch.float32)
    tokens = prompt(plain)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = plain.generate(tokens, **options)
    got = with_ours(plain).generate(tokens, **options)
    assert len(calls) == 2 * 4 and got.shape[1] == tokens.shape[1] + 4
    assert torch.equal(got, wanted)


@not_interpreted
@each_model
def test_gradients(device: str, calls: list[nn.Module], name: str) -> None:
    """Each parameter's, those of the routers and of experts that no token chose among them."""
    plain = small_model(name, device, torch.float32).train().requires_grad_(True)
    exact, ours = in_float64(plain), with_ours(plain)
    tokens = prompt(exact)
    for model in (ours, exact, plain):
        model(tokens, labels=tokens).loss.backward()
    assert len(calls) == 2
    check_tensor(*gradients_of(ours, exact, plain))


@each_model
def test_compiled(device: str, uses_triton: bool, name: str) -> None:
    """A whole model in one graph, and the same bits."""
    if uses_triton and device == "cpu":
        pytest.skip("takes the interpreter half a minute, and test_compiled of the layer is alike")
    ours = small_model(name, device, torch.float32)
    ours.set_experts_implementation("roofline")
    tokens = prompt(ours)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(tokens, use_cache=False).logits
    assert torch.equal(got, logits(ours, tokens))


@pytest.mark.parametrize("activation", ("silu", "gelu_pytorch_tanh"))
def test_activations(device: str, calls: list[nn.Module], activation: str) -> None:
    experts = small_experts(device, activation)
    x = torch.randn(5, 32, device=device)
    ids, weights = IDS.repeat(5, 1).to(device), WEIGHTS.repeat(5, 1).to(device)
    exact = eager(copy.deepcopy(experts).double(), x.double(), ids, weights.double())
    check_tensor(experts(x, ids, weights), exact, eager(experts, x, ids, weights))
    assert calls == [experts]


def test_ids_of_experts_elsewhere_are_skipped(device: str) -> None:
    """transformers gives the number of experts where an expert is on another device."""
    experts = small_experts(device)
    x = torch.randn(4, 32, device=device)
    ids = torch.tensor([[0, 3], [3, 3], [3, 2], [1, 0]], device=device)
    weights = torch.rand(4, 2, device=device)
    got, exact = (
        experts(x, ids, weights),
        eager(experts.double(), x.double(), ids, weights.double()),
    )
    check_tensor(got, exact, exact.float())
    assert got[1].eq(0).all()


@pytest.mark.parametrize("activation", ("relu", "gelu"))
def test_other_activations_are_refused(device: str, activation: str) -> None:
    experts = small_experts(device, activation)
    with pytest.raises(
        NotImplementedError,
        match="^experts_forward: the activation of MixtralExperts is not SiLU, GELU with tanh or "
        "that of gpt-oss; choose another experts_implementation$",
    ):
        experts(torch.randn(1, 32, device=device), IDS.to(device), WEIGHTS.to(device))


def test_gate_of_another_model_is_refused(device: str) -> None:
    """A model's own gate, of which only its code says what it does, whatever its activation."""

    class OwnGate(MixtralExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            return self.act_fn(gate.clamp(max=1.0)) * up

    experts = OwnGate(small_experts("cpu").config).to(device)
    with pytest.raises(NotImplementedError, match="the activation of OwnGate is not SiLU"):
        experts(torch.randn(1, 32, device=device), IDS.to(device), WEIGHTS.to(device))


@pytest.mark.parametrize("lacks", ({"has_gate": False}, {"has_post_expert_norm": True}), ids=str)
def test_other_structure_is_refused(device: str, lacks: dict[str, bool]) -> None:
    experts = small_experts(device)
    for name, value in lacks.items():
        setattr(experts, name, value)
    with pytest.raises(
        NotImplementedError,
        match="^experts_forward: MixtralExperts has no gate, or a norm after its experts; choose "
        "another experts_implementation$",
    ):
        experts(torch.randn(1, 32, device=device), IDS.to(device), WEIGHTS.to(device))


def test_alpha_and_limit_are_those_of_the_model(device: str) -> None:
    config = SimpleNamespace(
        intermediate_size=16, num_local_experts=2, hidden_size=16, swiglu_alpha=0.5,
        swiglu_limit=0.25, _experts_implementation="roofline",
    )  # fmt: skip
    experts = GptOssExperts(config).requires_grad_(False).to(device)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x, ids, weights = torch.randn(1, 16, device=device), IDS.to(device), WEIGHTS.to(device)
    exact = eager(copy.deepcopy(experts).double(), x.double(), ids, weights.double())
    check_tensor(experts(x, ids, weights), exact, eager(experts, x, ids, weights))
