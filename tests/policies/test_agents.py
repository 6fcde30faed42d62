"""Agents, and populations of them in rollouts; see also test_agent_contract.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl_pool.envs import make_batched_env
from marl_pool.envs.cartpole.env import CartPole
from marl_pool.kernels.functional import batched_linear, tanh
from marl_pool.policies import make_agent
from marl_pool.policies.agent import Agent, Population, load_vector, to_vector
from marl_pool.policies.sensory import FeedForward, Sensory
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, UnfitTokensError

SENSOR = {"name": "attention_neuron", "scale": False, "bias": False}
FRAMES = {"name": "attention_neuron", "memory": "none", "key_units": 4}


def env(count: int = 6, **options) -> CartPole:
    options = {"max_steps": 100, **options}  # most episodes end sooner, some do not
    cartpole = make_batched_env("cartpole", num_envs=count, **options)
    assert isinstance(cartpole, CartPole)
    return cartpole


def agents() -> dict[str, Agent]:
    group = env().groups["agent"]
    args = (group.tokens, group.action_space)
    return {
        "sensory": Sensory(*args, pooling=SENSOR, seed=0),
        "sensory_deep": Sensory(
            *args, pooling={"name": "attention_neuron"}, hidden=[5], seed=0
        ),
        "sensory_frames": Sensory(*args, pooling=FRAMES, seed=0),
        "feed_forward": FeedForward(*args, hidden=[7, 3], seed=0),
    }


NAMES = sorted(agents())


def readings() -> Tokens:
    """Sample three readings of five channels."""
    types = torch.zeros(3, 1, 5, dtype=torch.int64)
    return Tokens(torch.randn(3, 1, 5, 1), types, types.bool())


def vectors(agent: Agent, count: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    vector = to_vector(agent)
    return vector + 0.3 * torch.randn(count, len(vector)).to(vector)


def test_parameter_counts_are_the_published_ones() -> None:
    policies = agents()
    assert len(to_vector(policies["sensory"])) == 913
    group = env().groups["agent"]
    baseline = FeedForward(group.tokens, group.action_space, hidden=[16])
    assert len(to_vector(baseline)) == 5 * 16 + 16 + 16 + 1


@pytest.mark.parametrize("name", NAMES)
def test_a_population_acts_as_its_members_one_by_one(name: str) -> None:
    agent = agents()[name].double()
    members = vectors(agent, 3)
    population = Population(agent, members)
    episodes = Rollout(env(6, dtype=torch.float64), {"agent": population}).episodes()
    for number, vector in enumerate(members):
        load_vector(agent, vector)
        alone = Rollout(
            env(2, dtype=torch.float64, first_env=2 * number), {"agent": agent}
        ).episodes()
        rows = slice(2 * number, 2 * number + 2)
        torch.testing.assert_close(
            alone.returns["agent"], episodes.returns["agent"][rows]
        )
        assert alone.lengths.equal(episodes.lengths[rows])


@pytest.mark.parametrize("name", NAMES)
def test_a_population_acts_the_same_when_sync_free(name: str) -> None:
    agent = agents()[name].double()
    records = []
    for sync_free in (False, True):
        population = Population(agent, vectors(agent, 3))
        rollout = Rollout(
            env(6, dtype=torch.float64), {"agent": population}, sync_free=sync_free
        )
        records.append(
            [rollout.advance(7)["agent"], rollout.episodes().returns["agent"]]
        )
    torch.testing.assert_close(records[0], records[1])


def test_idling_of_ended_envs_changes_no_episode() -> None:
    agent = agents()["sensory"].double()
    population = Population(agent, vectors(agent, 4))
    reference, *idling = (
        Rollout(env(16, dtype=torch.float64), {"agent": population}).episodes(idle=i)
        for i in (0.0, 0.1, 0.5, 1.0)
    )
    for episodes in idling:
        torch.testing.assert_close(
            reference.returns["agent"], episodes.returns["agent"]
        )
        assert reference.lengths.equal(episodes.lengths)


def test_only_envs_that_step_past_their_end_may_idle() -> None:
    toy = make_batched_env("simple_centroid", num_envs=2)
    agent = FeedForward(toy.groups["agent"].tokens, toy.groups["agent"].action_space)
    rollout = Rollout(toy, {"agent": agent})
    with pytest.raises(InputError, match=r"idle: .*steps_past_end"):
        rollout.episodes(idle=0.2)


def test_a_population_needs_a_multiple_of_its_size_in_envs() -> None:
    agent = agents()["sensory"]
    population = Population(agent, vectors(agent, 4))
    with pytest.raises(InputError, match="num_envs: expected a multiple .* 4, got 6"):
        Rollout(env(6), {"agent": population})


def test_vectors_of_another_length_are_refused() -> None:
    agent = agents()["sensory"]
    with pytest.raises(
        InputError, match=r"expected the shape \(P, 913\), got \(2, 9\)"
    ):
        Population(agent, torch.zeros(2, 9))
    with pytest.raises(InputError, match="expected 913 numbers"):
        load_vector(agent, torch.zeros(912))


@pytest.mark.parametrize("name", NAMES)
def test_to_vector_returns_the_loaded_vector(name: str) -> None:
    agent = agents()[name]
    vector = vectors(agent, 1)[0]
    load_vector(agent, vector)
    assert to_vector(agent).equal(vector)


def test_order_and_number_of_channels_matter_to_the_baseline_alone() -> None:
    policies, tokens = agents(), readings()
    turned = tokens.map(lambda part: part.flip(2))
    double = tokens.map(lambda part: torch.cat([part, part], dim=2))
    for name in ("sensory", "sensory_deep"):
        ours = policies[name].double()
        torch.testing.assert_close(ours.act(turned).action, ours.act(tokens).action)
        assert ours.act(double).action.shape == (3, 1, 1)
    baseline = policies["feed_forward"]
    assert not torch.allclose(baseline.act(turned).action, baseline.act(tokens).action)
    with pytest.raises(UnfitTokensError, match="at most 5 tokens, got 10"):
        baseline.act(double)


def test_choices_are_sampled_only_when_exploring() -> None:
    toy = make_batched_env("boxworld", num_envs=64)
    group = toy.groups["agent"]
    agent = FeedForward(group.tokens, group.action_space, seed=0)
    toy.reset()
    tokens = toy.observe()["agent"]
    decided = agent.act(tokens)
    assert decided.action.equal(decided.logits.argmax(-1))
    torch.manual_seed(0)
    assert not agent.act(tokens, explore=True).action.equal(decided.action)


@pytest.mark.parametrize("hidden", [[0], [4, -1]])
def test_widths_below_one_are_refused(hidden: list[int]) -> None:
    group = env().groups["agent"]
    with pytest.raises(InputError, match=r"policy.hidden: .* integer >= 1\), got"):
        make_agent(group.tokens, group.action_space, "feed_forward", hidden=hidden)


def test_a_sensory_layer_has_to_take_the_previous_action() -> None:
    group = env().groups["agent"]
    with pytest.raises(InputError, match="must be a subclass of"):
        Sensory(group.tokens, group.action_space, pooling={"name": "max"})
    with pytest.raises(InputError, match="expected a mapping with a name"):
        Sensory(group.tokens, group.action_space, pooling={})


@given(st.floats(-40, 40))
def test_tanh_is_that_of_torch(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    torch.testing.assert_close(tanh(value), value.tanh(), rtol=0, atol=1e-15)


@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_product_for_one_or_many(
    rows: int, members: int, batched: bool, with_bias: bool
) -> None:
    lead = (members,) if batched else ()
    x = torch.randn(*lead, 2, rows, 4)
    weight, bias = torch.randn(*lead, 4, 3), torch.randn(*lead, 3)
    result = batched_linear(x, weight, bias if with_bias else None)
    for number in range(members) if batched else [...]:
        expected = x[number] @ weight[number]
        expected = expected + bias[number] if with_bias else expected
        torch.testing.assert_close(result[number], expected)
