"""Tokens whose parts differ in shape or dtype are refused, whatever their values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from marl_pool.networks.set_network import SetNetwork
from marl_pool.policies import make_agent, make_policy
from marl_pool.policies.action_spaces import Selection
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

BATCH, SPEC = (3, 2), TokenSpec(5, 4, ("self", "friend"))
SPACE = spaces.Discrete(3)
NONE = torch.zeros(*BATCH, 5, dtype=torch.bool)
"""A padding mask that marks no token."""
ENCODER = {"name": "transformer", "num_layers": 1, "dim": 8}
POLICIES: dict[str, Callable[[], Any]] = {
    "max": lambda: make_policy(SPEC, SPACE, encoder=ENCODER, pooling={"name": "max"}),
    "ada": lambda: make_policy(SPEC, SPACE, encoder=ENCODER, pooling={"name": "ada"}),
    "two trunks": lambda: make_policy(
        SPEC, SPACE, encoder=ENCODER, pooling={"name": "avg"}, trunk="separate"
    ),
    "memory": lambda: make_policy(
        SPEC,
        SPACE,
        encoder={"name": "identity", "dim": 4},
        pooling={"name": "attention_neuron"},
    ),
    "feed forward": lambda: make_agent(SPEC, SPACE, "feed_forward"),
    "sensory": lambda: make_agent(SPEC, SPACE, "sensory"),
}
MISFITS: dict[str, tuple[str, Tensor]] = {
    "a token more": ("padding", torch.zeros(*BATCH, 6, dtype=torch.bool)),
    "one token": ("padding", NONE[..., :1]),
    "of one agent": ("padding", NONE[:, :1]),
    "of all agents": ("padding", NONE[0]),
    "of all sets": ("padding", NONE[0, 0]),
    "of sets": ("padding", NONE[..., 0]),
    "a flag": ("padding", torch.tensor(False)),
    "numbers": ("padding", NONE.long()),
    "types of one token": ("types", NONE.long()[..., :1]),
}
AGENTS = ("feed forward", "sensory")
"""Policies for evolution, which have no value function."""
CALLS = [
    *((name, "act") for name in POLICIES),
    *((name, "value") for name in POLICIES if name not in AGENTS),
    *((name, "attention_weights") for name in ("ada", "memory", "sensory")),
]


def tokens() -> Tokens:
    features = torch.randn(*BATCH, 5, 4, generator=torch.manual_seed(0))
    return Tokens(features, NONE.long(), NONE)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("name", "method"), CALLS)
def test_policies_refuse_parts_of_another_shape(name, method, grad) -> None:
    call = getattr(POLICIES[name](), method)
    with torch.set_grad_enabled(grad):
        call(tokens())
        for part, value in MISFITS.values():
            with pytest.raises(InputError, match=f"tokens: expected {part} of "):
                call(tokens()._replace(**{part: value}))
        for part, tensor in tokens().columns.items():
            with pytest.raises(InputError, match="expected torch tensors, got ndarray"):
                call(tokens()._replace(**{part: tensor.numpy()}))


ALLOWED = torch.zeros(*BATCH, 3, dtype=torch.bool)
ALLOWED[..., 0] = True
MASKED: dict[str, Callable[[], Any]] = {
    **POLICIES,
    "random": lambda: RandomPolicy(SPACE),
    "select": lambda: make_policy(
        SPEC, Selection(2, 5, ("friend",)), encoder=ENCODER, action="select"
    ),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("explore", [False, True])
def test_policies_refuse_action_masks_of_another_shape_or_dtype(name, explore) -> None:
    policy, width = MASKED[name](), 7 if name == "select" else 3
    mask = nn.functional.pad(ALLOWED, (0, width - 3))
    expected = rf"^action_mask: expected bool of shape \(3, 2, {width}\), got "
    assert not policy.act(tokens()._replace(action_mask=mask)).action.any()
    for misfit, actual in (
        (mask[..., :-1], rf"bool of shape \(3, 2, {width - 1}\)"),
        (nn.functional.pad(mask, (0, 3)), rf"bool of shape \(3, 2, {width + 3}\)"),
        (mask[:1], rf"bool of shape \(1, 2, {width}\)"),
        (mask[0], rf"bool of shape \(2, {width}\)"),
        (mask.to(torch.int8), rf"int8 of shape \(3, 2, {width}\)"),
    ):
        with pytest.raises(InputError, match=expected + actual):
            policy.act(tokens()._replace(action_mask=misfit), explore=explore)


@pytest.mark.parametrize("method", ["__call__", "encode", "weights"])
@pytest.mark.parametrize("pooling", ["max", "ada", "softmax"])
def test_networks_refuse_parts_of_another_shape(pooling, method) -> None:
    network = SetNetwork(SPEC, encoder=ENCODER, pooling={"name": pooling})
    call, sets = getattr(network, method), tokens().flatten_batch()
    call(sets)
    for misfit in ("a token more", "one token", "of all sets"):
        value = MISFITS[misfit][1]
        value = value.flatten(0, 1) if value.dim() == 3 else value
        with pytest.raises(InputError, match="tokens: expected padding of shape"):
            call(sets._replace(padding=value))
