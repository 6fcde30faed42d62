"""AttentionAgent: chosen tokens, their positions, and when the order matters."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.tables import yaml_cases
from marl_pool.config import compose
from marl_pool.policies import make_agent
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool_studies.attention_neuron.attention_agent import AttentionAgent

N, F, STEPS = 9, 8, 4
SPEC = TokenSpec(N, F, ("patch",), has_self=False)
BOX = spaces.Box(-1, 1, (2,))
VISION = {"name": "vision_neuron", "num_codes": 16, "value_dim": 5, "frames": 2}
LSTM = {"name": "attention_neuron", "num_codes": 16}
KINDS: dict[str, dict[str, Any]] = {
    "alone": {"top_k": 3},
    "vision": {"top_k": 3, "pooling": VISION},
    "mixing": {"top_k": 3, "pooling": VISION, "mixing": True},
    "lstm": {"top_k": 3, "pooling": LSTM, "mixing": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, space: spaces.Space = BOX, **options: Any) -> AttentionAgent:
    agent = AttentionAgent(SPEC, space, seed=0, **{**KINDS[kind], **options}).double()
    with torch.no_grad():  # so that something is chosen for what it is
        for part in (agent.query.weight, agent.key.weight):
            part.mul_(5)
    return agent.eval()


def sets(batch: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, STEPS, N, F, generator=generator, dtype=torch.float64)


def tokens(features: Tensor, padding: Tensor | None = None) -> Tokens:
    """Make tokens of ``(E, N, F)`` features, one agent per environment."""
    types = torch.zeros(features.shape[:2], dtype=torch.int64)[:, None]
    hidden = types.bool() if padding is None else padding[:, None]
    return Tokens(features[:, None], types, hidden)


def act(agent: AttentionAgent, x: Tensor, padding: Tensor | None = None) -> Tensor:
    """The outputs for ``(E, T, N, F)``, step after step, ``(E, T, L)``."""
    state, outputs = agent.initial_state(len(x), 1, x.shape[2]), []
    for t in range(x.shape[1]):
        hidden = None if padding is None else padding[:, t]
        decision = agent.act(tokens(x[:, t], hidden), state)
        state = decision.state
        outputs.append(decision.logits[:, 0])
    return torch.stack(outputs, 1).detach()


@pytest.mark.parametrize(
    ("option", "patches", "width", "count"),
    [("attention_agent", 529, 147, 3667), ("attention_agent_pi", 256, 144, 7212)],
)
def test_the_published_sizes(option: str, patches: int, width: int, count: int) -> None:
    config = compose("evolve", ["env=cartpole", f"policy={option}"])["policy"]
    spec = TokenSpec(patches, width, ("patch",), has_self=False, dtype="uint8")
    agent = make_agent(spec, spaces.Box(-1, 1, (3,)), **config)
    assert sum(part.numel() for part in agent.parameters()) == count


def test_the_most_attended_tokens_are_chosen_and_give_positions() -> None:
    agent = make("alone")
    with torch.no_grad():
        for part in (agent.query, agent.key):
            part.weight.zero_()
            part.bias.zero_()
        agent.query.bias[0] = 1
        agent.key.weight[0, 0] = 1  # everyone attends to a large first feature
    x = torch.zeros(1, 1, N, F, dtype=torch.float64)
    for place, size in ((7, 3.0), (2, 2.0), (3, 1.0), (5, 0.5)):
        x[0, 0, place, 0] = size
    selection = agent._choose(x, None, torch.zeros(1, 1, 2), agent.initial_memory(1, N))
    assert selection.indices.tolist() == [[7, 2, 3]]
    expected = np.array([[2, 1, 0, 2, 1, 0]]) / 3  # rows and columns of a 3 × 3 grid
    np.testing.assert_allclose(agent._places(selection), expected)
    agent.first_place, agent.place_step = 3 / 96, 4 / 96
    centers = (3 + 4 * 3 * expected) / 96
    np.testing.assert_allclose(agent._places(selection), centers)
    weights = agent.attention_weights(tokens(x[:, 0]))
    assert weights is not None
    assert weights.shape == (1, 1, 1, N)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert weights[0, 0, 0].argsort(descending=True)[:3].tolist() == [7, 2, 3]
    assert int((weights > 0).sum()) == 3


def test_only_positions_of_chosen_tokens_are_read() -> None:
    agent, x = make("alone"), sets(1)
    larger = x.clone()
    outputs = act(agent, x)
    memory = agent.initial_memory(1, N)
    selection = agent._choose(x[:, :1], None, torch.zeros(1, 1, 2), memory)
    larger[0, 0, selection.indices[0, 0]] *= 1 + 1e-9
    torch.testing.assert_close(act(agent, larger), outputs, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["vision", "mixing"])
@given(seed=st.integers(0, 99), order=st.permutations(range(N)))
def test_a_sensory_layer_is_invariant_to_the_order(kind, seed, order) -> None:
    agent, x = make(kind), sets(seed=seed)
    torch.testing.assert_close(act(agent, x[:, :, order]), act(agent, x))


def test_lstms_are_invariant_to_an_order_of_the_episode_and_the_bare_agent_is_not():
    agent, x = make("lstm"), sets()
    torch.testing.assert_close(act(agent, x.flip(2)), act(agent, x))
    agent = make("alone")
    assert not torch.isclose(act(agent, x.flip(2)), act(agent, x)).any()


@pytest.mark.parametrize("batch", [3, 64])
def test_equal_codes_are_chosen_in_token_order_in_any_batch(batch: int) -> None:
    """In float32: at an episode's start nothing moves, and all codes are equal."""
    spec = TokenSpec(64, 18, ("patch",), has_self=False)
    pooling = {**VISION, "num_codes": 100, "affine": False}
    agent = AttentionAgent(spec, BOX, pooling=pooling, scale=False, seed=0)
    x = torch.rand(batch, 1, 64, 9).repeat(1, 1, 1, 2)
    for part in (x, x[:1], x.flip(2)):
        memory = agent.initial_memory(len(part), 64)
        selection = agent._choose(part, None, torch.zeros(len(part), 1, 2), memory)
        assert torch.equal(selection.indices, torch.arange(10).expand(len(part), 10))


def test_a_saturated_gate_keeps_codes_constant() -> None:
    agent, x = make("mixing"), sets(1)
    assert agent.gate is not None
    with torch.no_grad():
        agent.gate[-1].bias.fill_(50)
    state = agent.initial_state(1, 1, N)
    codes = []
    for t in range(3):
        state = agent.act(tokens(x[:, t]), state).state
        codes.append(state["memory"]["codes"])
    latent = agent.latent(tokens(x[:, 0]))
    assert latent is not None
    torch.testing.assert_close(codes[0].flatten(2), latent)  # nothing to hold yet
    torch.testing.assert_close(codes[2], codes[0])
    with torch.no_grad():
        agent.gate[-1].bias.fill_(-50)
    moved = agent.act(tokens(x[:, 3]), state).state["memory"]["codes"]
    fresh = agent.act(tokens(x[:, 3])).state["memory"]["codes"]
    torch.testing.assert_close(moved, fresh)


@each_kind
def test_padded_tokens_act_like_absent_ones(kind: str) -> None:
    agent, x = make(kind), sets()
    hidden = torch.zeros(2, STEPS, N, dtype=torch.bool)
    hidden[:, :, 5:] = True
    dirty = x.masked_fill(hidden[..., None], float("nan"))
    torch.testing.assert_close(act(agent, dirty, hidden), act(agent, x[:, :, :5]))


def test_missing_tokens_have_zero_positions() -> None:
    agent, x = make("alone"), sets()[:, :1]
    hidden = torch.ones(2, 1, N, dtype=torch.bool)
    hidden[0, 0, 4] = False
    prev_action = torch.zeros(2, 1, 2)
    selection = agent._choose(x, hidden, prev_action, agent.initial_memory(2, N))
    expected = torch.zeros(2, 6, dtype=torch.float64)
    expected[0, :2] = 1 / 3
    torch.testing.assert_close(agent._places(selection), expected)
    weights = agent.attention_weights(tokens(x[:, 0], hidden[:, 0]))
    assert weights is not None
    assert weights[0, 0, 0, 4] == 1
    assert not weights[1].any()


@each_kind
def test_weights_are_shares_of_the_tokens(kind: str) -> None:
    agent, x = make(kind), sets()
    state = agent.act(tokens(x[:, 0])).state
    hidden = torch.zeros(2, N, dtype=torch.bool)
    hidden[:, 3] = True
    weights = agent.attention_weights(tokens(x[:, 1], hidden), state)
    assert weights is not None
    assert weights.shape == (2, 1, 1, N)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert not weights[..., 3].any()


def test_tokens_permuted_with_their_lstms_give_the_same_answer() -> None:
    agent, x = make("lstm"), sets()
    order = [*range(1, N), 0]
    state = agent.act(tokens(x[:, 0])).state
    expected = agent.act(tokens(x[:, 1]), state).logits
    sensor = tuple(part[:, :, order] for part in state["memory"]["sensor"])
    carried = {**state, "memory": {**state["memory"], "sensor": sensor}}
    moved = tokens(x[:, 1][:, order])
    torch.testing.assert_close(agent.act(moved, carried).logits, expected)
    assert not torch.isclose(agent.act(moved, state).logits, expected).all()


def test_more_tokens_than_places_are_refused() -> None:
    doubled = sets()[:, :1].repeat(1, 1, 2, 1)
    with pytest.raises(UnfitTokensError, match="expected at most 9 tokens, got 18"):
        act(make("alone"), doubled)
    assert act(make("vision"), doubled).isfinite().all()


@yaml_cases("kind, options, message")
def test_bad_options_are_refused(kind: str, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(kind, **options)
