"""Critics of a team and of the state: what their values depend on."""

import pytest
import torch

from helpers.farm import FoxAndHens, policies_of
from marl_pool.compiled.choice import use_kernels
from marl_pool.critics.base import OwnCritic, of_present
from marl_pool.critics.state import StateCritic
from marl_pool.critics.team import TeamCritic
from marl_pool.envs import ENVS, make_batched_env
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import UnfitTokensError

HEADS = ("ada", "avg", "max", "cls", "pma")
AGENTS = 4


def observed(num_agents: int = AGENTS, num_envs: int = 3):
    env = make_batched_env(
        "simple_spread", num_envs=num_envs, num_agents=num_agents, num_landmarks=2
    )
    env.reset()
    return env, env.observe()["agent"]


def policy_of(env, name="agent", **options):
    return policies_of(env, seed=1, **options)[name].eval()


def critic_of(env, pooling="ada", **options):
    policy = policy_of(env, pooling=pooling)
    return TeamCritic(policy, env.groups["agent"].num_agents, 2, **options).eval()


def values_of(critic, tokens, present=None):
    if present is None:
        present = torch.ones(tokens.batch_shape, dtype=torch.bool)
    with torch.no_grad():
        return critic(tokens, present)


def moved(tokens: Tokens, agent: int) -> Tokens:
    """Change the observation of one agent."""
    features = tokens.features.clone()
    features[:, agent] += 5
    return tokens._replace(features=features)


@pytest.mark.parametrize("trunk", ["separate", "shared"])
@pytest.mark.parametrize("pooling", HEADS)
def test_a_value_depends_on_the_observations_of_the_whole_team(pooling, trunk):
    env, tokens = observed()
    critic = critic_of(env, pooling, trunk=trunk)
    difference = values_of(critic, moved(tokens, 0)) - values_of(critic, tokens)
    assert difference[:, 1:].abs().min() > 1e-6
    assert (difference != 0).all()


def test_own_critic_depends_only_on_the_own_observation():
    env, tokens = observed()
    critic = OwnCritic(policy_of(env))
    difference = values_of(critic, moved(tokens, 0)) - values_of(critic, tokens)
    assert difference[:, 1:].abs().max() < 1e-6
    assert difference[:, 0].abs().min() > 1e-6


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("pooling", HEADS)
def test_values_follow_the_order_of_the_agents(pooling, kernels):
    env, tokens = observed()
    critic = critic_of(env, pooling)
    order = torch.tensor([2, 0, 3, 1])
    with use_kernels(kernels):
        values = values_of(critic, tokens)
        reordered = values_of(critic, tokens.map(lambda part: part[:, order]))
    torch.testing.assert_close(reordered, values[:, order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", HEADS)
def test_one_critic_serves_every_number_and_an_absent_agent_changes_nothing(pooling):
    env, tokens = observed()
    critic = critic_of(env, pooling)
    whole = values_of(critic, tokens)
    for number in range(1, AGENTS):
        few = tokens.map(lambda part, n=number: part[:, :n])
        present = torch.arange(AGENTS).expand(3, -1) < number
        # Neither what an absent agent sees nor that it has no token matters.
        absent = ~present[..., None]
        features = tokens.features.masked_fill(absent[..., None], 7.0)
        shown = Tokens(features, tokens.types, tokens.padding | absent)
        values = values_of(critic, shown, present)
        assert values.isfinite().all()
        assert (values - whole)[:, :number].abs().max() > 1e-6, "presence counts"
        torch.testing.assert_close(
            values[:, :number], values_of(critic, few), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("pooling", "changes"), [("max", False), ("sum", True), ("avg", True)]
)
def test_copy_of_a_teammate_changes_only_values_of_some_heads(pooling, changes):
    env, tokens = observed()
    encoder = {"name": "identity"}
    critic = critic_of(env, pooling, encoder=encoder, trunk="shared")
    with_copy = tokens.map(lambda part: torch.cat([part, part[:, -1:]], 1))
    values, expected = values_of(critic, with_copy)[:, :-2], values_of(critic, tokens)
    assert torch.allclose(values, expected[:, :-1], atol=1e-5) is not changes


def test_no_gradient_reaches_the_policy_from_a_separate_trunk():
    env, tokens = observed()
    for trunk, reaches in (("separate", False), ("shared", True)):
        critic = critic_of(env, trunk=trunk)
        present = torch.ones(tokens.batch_shape, dtype=torch.bool)
        critic(tokens, present).sum().backward()
        gradients = [p.grad is not None for p in critic.policy.network.parameters()]
        assert any(gradients) is reaches
        assert all(p.grad is not None for p in critic.parameters())


@pytest.mark.parametrize("critic", ["set", "state"])
def test_the_compiled_kernel_gives_the_values_of_torch(critic):
    env, tokens = observed()
    spec = env.state_specs["agent"]
    made = critic_of(env) if critic == "set" else StateCritic(policy_of(env), spec, 2)
    with use_kernels("torch"):
        expected = values_of(made, tokens)
    torch.testing.assert_close(values_of(made, tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["simple_spread", "simple_tag", "simple_centroid"])
def test_all_agents_are_shown_one_state(name):
    env = make_batched_env(name, num_envs=3)
    env.reset()
    for group, tokens in env.observe_state().items():
        env.state_specs[group].check(tokens)
        assert (tokens.types == 0).sum(-1).unique().tolist() == [1]
        state = env.state / env.feature_scale
        expected = state.sort(1).values[:, None].expand_as(tokens.features)
        assert torch.equal(tokens.features.sort(2).values, expected)
        # The first token is the agent itself.
        agents = env.token_entities(group)[:, 0]
        assert torch.equal(tokens.features[:, :, 0], state[:, agents])


SPEAKING = [
    *("simple_adversary", "simple_push", "simple_reference"),
    *("simple_speaker_listener", "simple_world_comm"),
]


@pytest.mark.parametrize("name", SPEAKING)
def test_the_state_shows_goals_and_messages_to_all(name):
    env = make_batched_env(name, num_envs=3)
    env.reset()
    env.words = torch.rand_like(env.words)
    for group, tokens in env.observe_state().items():
        env.state_specs[group].check(tokens)
        assert tokens.num_tokens == len(env.entities)
        assert (tokens.types == 0).sum(-1).unique().tolist() == [1]
        last = tokens.features.shape[-1] - env.num_words
        places, goals = tokens.features[..., :2], tokens.features[..., 4:last]
        if name == "simple_reference":
            # Vectors to goals: the observer, which knows the other's goal, is first.
            assert torch.equal(goals[:, :, 1:-1], torch.zeros_like(goals[:, :, 1:-1]))
            ends = (places + goals)[:, :, [0, -1]]
            torch.testing.assert_close(ends[:, 0], env.goal_places().flip(1))
            torch.testing.assert_close(ends[:, 1], env.goal_places())
        elif env.num_goals:
            assert torch.equal(goals.sum(2), torch.ones_like(goals[:, :, 0]))
            expected = env.goal_places().expand_as(places[:, :, 0])
            torch.testing.assert_close((goals * places).sum(2), expected)
        else:
            assert goals.shape[-1] == 0
        messages = tokens.features[..., last:].sum(2)
        spoken = env.words.sum(1)[:, None].expand_as(messages)
        assert torch.allclose(messages, spoken)


def test_the_state_of_guard_shows_where_targets_go():
    env = make_batched_env("mpev2_guard", num_envs=3)
    env.reset()
    assert (env.observe_state()["agent"].features[..., 4:] == 0).all()
    env.step({"agent": torch.zeros(3, env.groups["agent"].num_agents).long()})
    env.step({"agent": torch.zeros(3, env.groups["agent"].num_agents).long()})
    tokens = env.observe_state()["agent"]
    env.state_specs["agent"].check(tokens)
    kind = env.state_specs["agent"].type_names.index("target")
    ways = tokens.features[..., 4:]
    is_target = (tokens.types == kind) & ~tokens.padding
    assert is_target.any()
    assert (ways[is_target] != 0).all()
    assert (ways[tokens.types != kind] == 0).all()


TEAMS = {
    "simple_spread": "agent",
    "simple_tag": "predator",
    "simple_adversary": "agent",
    "simple_reference": "agent",
    "simple_world_comm": "adversary",
    "mpev2_guard": "agent",
}


@pytest.mark.parametrize("name", TEAMS)
def test_values_of_a_state_follow_agents_that_are_exchanged(name):
    group = TEAMS[name]
    env = make_batched_env(name, num_envs=3)
    env.reset()
    env.state.copy_(torch.rand_like(env.state))
    if name in SPEAKING:
        env.words = torch.rand_like(env.words)
    agents = env._slices[group]
    policy = policy_of(env, group)
    critic = StateCritic(policy, env.state_specs[group], seed=0)
    before = values_of(critic, env.observe_state()[group])
    env.state[:, agents] = env.state[:, agents].flip(1)
    if env.lives is not None:
        env.lives[:, agents] = env.lives[:, agents].flip(1)
    if name == "simple_reference":
        env.words, env.goal = env.words.flip(1), env.goal.flip(1)
    after = values_of(critic, env.observe_state()[group])
    torch.testing.assert_close(after.flip(1), before, rtol=1e-4, atol=1e-6)
    assert before.std() > 0


@pytest.mark.parametrize(
    "name", ["simple_spread", "simple_tag", "simple_adversary", "simple_world_comm"]
)
def test_an_entity_that_is_absent_is_padding_of_the_state(name):
    env = make_batched_env(name, num_envs=3, arrivals=[{"step": 2}])
    env.reset()
    for step in range(3):
        for group, tokens in env.observe_state().items():
            hidden = env.observe()[group].padding.sum(-1)
            assert torch.equal(tokens.padding.sum(-1), hidden)
            assert tokens.padding.any() == (step < 2)
        env.step(
            {n: torch.zeros(3, g.num_agents).long() for n, g in env.groups.items()}
        )


@pytest.mark.parametrize("name", ["boxworld", "xor"])
def test_an_environment_that_shows_its_state_has_one(name):
    env = make_batched_env(name, num_envs=3)
    env.reset()
    for group, tokens in env.observe_state().items():
        env.state_specs[group].check(tokens)
        observation = env.observe()[group]
        assert all(map(torch.equal, tokens[:3], observation[:3]))


@pytest.mark.parametrize(
    "name", ["cartpole", "pong", "car_racing", "ant", "ant_bullet"]
)
def test_sensors_and_patches_of_a_state_have_separate_types(name):
    env = make_batched_env(name, num_envs=2)
    env.reset()
    spec, tokens = env.state_specs["agent"], env.observe_state()["agent"]
    observed = env.observe()["agent"]
    spec.check(tokens)
    assert torch.equal(tokens.features, observed.features)
    assert (observed.types == 0).all()
    assert (tokens.types == torch.arange(spec.num_types)).all()
    assert spec.num_types == spec.num_tokens
    critic = StateCritic(policy_of(env), spec, 0).eval()
    reordered = tokens._replace(features=tokens.features.flip(-2))
    assert not torch.equal(values_of(critic, tokens), values_of(critic, reordered))


def test_all_environments_of_the_package_have_a_state():
    for name in ENVS.built_in.keys() - {"pettingzoo"}:
        env = make_batched_env(name, num_envs=1)
        hint = f"{name}: define observe_state, or set shows_state"
        assert env.state_specs.keys() == env.groups.keys(), hint


def test_an_environment_without_a_state_says_so():
    env = FoxAndHens(1)
    with pytest.raises(UnfitTokensError, match="FoxAndHens does not define observe_s"):
        env.observe_state()


@pytest.mark.parametrize("kind", ["team", "state"])
def test_a_critic_computes_the_agents_that_are_present(kind):
    env, tokens = observed()
    if kind == "team":
        critic = critic_of(env)
    else:
        tokens = env.observe_state()["agent"]
        critic = StateCritic(policy_of(env), env.state_specs["agent"], 2).eval()
    present = torch.tensor([True, False, True, True]).expand(tokens.batch_shape)
    computed, parts = [], critic._parts

    def counted(network):
        def compute(tokens):
            computed.append(len(tokens.types))
            return network(tokens)

        return compute

    critic._parts = (*map(counted, parts[:-1]), parts[-1])
    values_of(critic, tokens, present)
    assert set(computed) == {int(present.sum())}


@pytest.mark.parametrize(
    ("pooling", "encoder", "expected"),
    [("ada", False, True), ("pma", False, False), ("pma", True, True)],
)
def test_is_compiled_reports_what_the_kernel_computes(pooling, encoder, expected):
    env, _ = observed()
    policy = policy_of(env)
    critic = TeamCritic(policy, AGENTS, 2, pooling=pooling)
    assert critic.is_compiled(encoder=encoder) == expected


def test_rows_of_absent_agents_are_not_computed():
    env, tokens = observed()
    critic, rows = critic_of(env), tokens.flatten_batch()
    present = torch.arange(len(rows.types)) % 3 != 0
    computed = []

    def pooled(rows: Tokens) -> torch.Tensor:
        computed.append(len(rows.types))
        return critic.agent_network(rows)

    vectors = of_present(pooled, rows, present)
    assert computed == [int(present.sum())]
    assert not vectors[~present].any()
    torch.testing.assert_close(vectors[present], pooled(rows)[present])


def test_nothing_under_the_padding_of_an_absent_agent_is_read(monkeypatch):
    # A GPU computes the rows of absent agents, too.
    def of_all(function, tokens, present):
        return function(tokens.flatten_batch()).unflatten(0, present.shape)

    monkeypatch.setattr("marl_pool.critics.team.of_present", of_all)
    env, tokens = observed()
    critic = critic_of(env)
    present = torch.ones(tokens.batch_shape, dtype=torch.bool)
    present[:, 1] = False
    absent = ~present[..., None]
    features = tokens.features.masked_fill(absent[..., None], torch.nan)
    types = tokens.types.masked_fill(absent, 99)
    padding = tokens.padding | absent
    with use_kernels("torch"):
        values = critic(Tokens(features, types, padding), present)
        values[present].sum().backward()
    assert values[present].isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in critic.parameters())
