"""The contract of agents: every agent × sequences, populations and saved files.

Populations in rollouts are in test_agents.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.policies import AGENTS, make_agent
from marl_pool.policies.agent import Agent, Population, load_vector, to_vector
from marl_pool.policies.storage import load_policy, save_policy
from marl_pool.tokens import Tokens, TokenSpec

ENVS, STEPS = 2, 4
CHANNELS = TokenSpec(5, 1, ("channel",), has_self=False)
NUMBERS = TokenSpec(9, 8, ("patch",), has_self=False)
BYTES = TokenSpec(12, 6, ("patch",), has_self=False, dtype="uint8")
SENSOR = {"name": "attention_neuron", "key_units": 4}
PATCHES = {"name": "vision_neuron", "num_codes": 16, "value_dim": 5, "frames": 2}
VISION: dict[str, Any] = {
    "pooling": {"name": "vision_neuron", "num_codes": 9, "value_dim": 4, "frames": 2},
    **{"convolutions": [(5, 2, 1)], "hidden": [7]},
}
LSTM = {"name": "attention_neuron", "num_codes": 16}
CHOSEN: dict[str, dict[str, Any]] = {
    "alone": {},
    "vision": {"pooling": PATCHES},
    "mixing": {"pooling": PATCHES, "mixing": True},
    "lstm": {"pooling": LSTM, "mixing": True},
}
VARIANTS: dict[str, tuple[TokenSpec, str, dict[str, Any]]] = {
    "sensory": (
        CHANNELS,
        "sensory",
        {"pooling": {**SENSOR, "scale": False, "bias": False}},
    ),
    "sensory, deep": (CHANNELS, "sensory", {"pooling": SENSOR, "hidden": [5]}),
    "sensory, frames": (
        *(CHANNELS, "sensory"),
        {"pooling": {**SENSOR, "memory": "none"}},
    ),
    "feed forward": (CHANNELS, "feed_forward", {"hidden": [7, 3]}),
    **{
        f"attention agent, {kind}": (NUMBERS, "attention_agent", {"top_k": 3, **parts})
        for kind, parts in CHOSEN.items()
    },
    "vision": (BYTES, "vision", VISION),
    "vision, numbers": (BYTES, "vision", VISION),
    "vision, memory": (BYTES, "vision", {**VISION, "memory": 5}),
    "vision, readout": (BYTES, "vision", {**VISION, "memory": 5, "readout": [6, 4]}),
}
variants = pytest.mark.parametrize("variant", VARIANTS)
both_spaces = pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (2,)), spaces.Discrete(3)], ids=["box", "choice"]
)
with_and_without_padding = pytest.mark.parametrize("padded", [False, True])


def make(variant: str, space: spaces.Space, seed: int = 0) -> Agent:
    spec, name, options = VARIANTS[variant]
    agent = make_agent(spec, space, name, seed=seed, **options).double().eval()
    with torch.no_grad():  # so that tokens are chosen for what they are
        for label, parameter in agent.named_parameters():
            if name == "attention_agent" and label in ("query.weight", "key.weight"):
                parameter.mul_(5)
    return agent


def observations(variant: str, envs: int = ENVS, *, padded: bool = True) -> Tokens:
    """Sample tokens of ``(envs, steps)``; of bytes there are few distinct ones."""
    spec, generator = VARIANTS[variant][0], torch.Generator().manual_seed(0)
    shape = (envs, STEPS, spec.num_tokens)
    if spec.dtype == "uint8":
        palette = torch.randint(0, 256, (4, spec.num_features), generator=generator)
        features = palette[torch.randint(0, 4, shape, generator=generator)].byte()
        features = features / 255 if "numbers" in variant else features
    else:
        features = torch.randn(*shape, spec.num_features, generator=generator)
    padding = (torch.rand(shape, generator=generator) < 0.2) & padded
    if features.is_floating_point():
        features = features.double()
    return Tokens(features, torch.zeros(shape, dtype=torch.int64), padding)


def act(agent: Any, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return outputs and previous actions, step after step, ``(envs, steps, L)``."""
    envs, steps, num_tokens = tokens.types.shape
    state, outputs, before = agent.initial_state(envs, 1, num_tokens), [], []
    for step in range(steps):
        before.append(state["action"][:, 0] if "action" in state else None)
        decision = agent.act(tokens.map(lambda part, t=step: part[:, t, None]), state)
        state = decision.state
        outputs.append(decision.logits[:, 0])
    previous = torch.stack(before, 1) if before[0] is not None else torch.empty(0)
    return torch.stack(outputs, 1).detach(), previous


def test_every_registered_agent_is_tried_here() -> None:
    assert {name for _, name, _ in VARIANTS.values()} == set(AGENTS)


@variants
@both_spaces
@with_and_without_padding
def test_a_sequence_is_its_steps(variant, space, padded) -> None:
    agent, tokens = make(variant, space), observations(variant, padded=padded)
    single, previous = act(agent, tokens)
    memory = agent.initial_memory(ENVS, VARIANTS[variant][0].num_tokens)
    padding = tokens.padding if padded else None
    outputs, _ = agent.unroll(tokens.features, padding, previous, memory)
    torch.testing.assert_close(outputs.detach(), single)


@variants
@both_spaces
@with_and_without_padding
def test_a_population_acts_as_its_members(variant, space, padded) -> None:
    agent, tokens = make(variant, space), observations(variant, 6, padded=padded)
    generator = torch.Generator().manual_seed(1)
    vector = to_vector(agent)
    noise = torch.randn(3, len(vector), generator=generator).to(vector)
    vectors = vector + 0.3 * noise
    together, _ = act(Population(agent, vectors), tokens)
    for number, member in enumerate(vectors):
        load_vector(agent, member)
        rows = slice(2 * number, 2 * number + 2)
        torch.testing.assert_close(act(agent, tokens.at(rows))[0], together[rows])
    assert not torch.isclose(together[:2], together[2:4]).all()


@variants
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 4]),
        spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 4]))),
        spaces.Box(-1, 1, (2,)),
    ],
    ids=["choice", "choices", "both", "box"],
)
def test_log_probabilities_are_those_of_sampled_choices(variant, space) -> None:
    agent = make(variant, space)
    tokens = observations(variant, 16).at((slice(None), slice(1)))
    state = agent.initial_state(16, 1, tokens.num_tokens)
    assert not agent.act(tokens, state).log_prob.any()
    decision = agent.act(tokens, state, explore=True)
    sizes, expected = agent.actions.sizes, torch.zeros(16, 1).double()
    choices = decision.action.view(16, 1, -1)
    options = decision.logits[..., : sum(sizes)].split(sizes, -1) if sizes else ()
    for number, logits in enumerate(options):
        distribution = torch.distributions.Categorical(logits=logits)
        expected = expected + distribution.log_prob(choices[..., number])
    torch.testing.assert_close(decision.log_prob, expected)


@variants
def test_a_loaded_agent_acts_as_the_saved_one(variant, tmp_path: Path) -> None:
    agent = make(variant, spaces.Box(-1, 1, (2,))).float()
    save_policy(agent, tmp_path)
    loaded = load_policy(tmp_path)
    assert type(loaded) is type(agent)
    assert loaded.config == agent.config
    tokens = observations(variant)
    if tokens.features.is_floating_point():
        tokens = tokens._replace(features=tokens.features.float())
    assert torch.equal(act(loaded, tokens)[0], act(agent, tokens)[0])
