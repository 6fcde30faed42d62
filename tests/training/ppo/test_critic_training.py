"""Training with team and state critics, and normalized values."""

import numpy as np
import pytest
import torch

pytest.importorskip("ray")

from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing

from helpers.farm import FoxAndHens, MortalHens, policies_of
from helpers.ppo import assert_same, resumed, rllib_config, run_of, weights_of
from helpers.tables import yaml_cases
from marl_pool.config import compose
from marl_pool.critics.team import TeamCritic
from marl_pool.policies.storage import load_policies
from marl_pool.rollout import Rollout
from marl_pool.training.ppo.batch import num_steps, prepare_rows
from marl_pool.training.ppo.trajectories import (
    estimate_advantages,
    share_rewards,
    to_teams,
    trajectory_rows,
)
from marl_pool.training.ppo.value_norm import ValueNorm
from marl_pool.training.settings import PPOSettings
from marl_pool.utils.errors import InputError, StoppedError

FARM = "env=helpers.farm:MortalHens"
TOY = [
    *("ppo.num_envs=4", "ppo.batch_size=48"),
    *("ppo.minibatch_size=12", "ppo.num_epochs=2", "total_steps=48"),
    *("checkpoint.every=1", "threads=1"),
]
SPREAD = ("env=simple_spread", "env.max_steps=3")
SPREAD_V3 = "pettingzoo env.module=mpe2.simple_spread_v3"
SLOW = (
    *("pong", "car_racing", "ant", "ant_bullet", "boxworld", "simple_reference"),
    *("mpev2_hunt", f"{SPREAD_V3} env.workers=2"),
)
"""Environments, with options, of slow tests."""


def config_of(*overrides: str) -> dict:
    layers = [] if "encoder=identity" in overrides else ["encoder.num_layers=1"]
    return compose("train", [*TOY, *layers, *overrides])


def fragment(steps: int = 9, num_envs: int = 3):
    """Steps of both groups, with dying hens and a critic for the hens."""
    env = MortalHens(num_envs, end_chance=0.15, max_steps=5)
    policies = policies_of(env)
    critic = TeamCritic(policies["hen"], env.groups["hen"].num_agents, 0).eval()
    rollout = Rollout(env, policies, explore=True, critics={"hen": critic})
    return rollout.steps(steps), critic


def test_a_rollout_records_the_values_of_the_critic():
    parts, critic = fragment()
    part = parts["hen"]
    assert not part.active.all()
    with torch.no_grad():
        values = critic(part.tokens, part.active)
    torch.testing.assert_close(part.values, values)
    # Within an episode the next value is the next step's.
    goes_on = ~(part.terminated | part.truncated)[:-1]
    expected = part.values[1:][goes_on]
    torch.testing.assert_close(part.next_values[:-1][goes_on], expected)


def test_rows_of_teams_hold_the_steps_of_their_agents():
    parts, _ = fragment()
    part = parts["hen"]
    estimates = estimate_advantages(part, 0.9, 0.9)
    agents = part.active.shape[2]
    single = trajectory_rows(part, *estimates)
    teams = trajectory_rows(*to_teams(part, *estimates, agents + 2))
    present = teams[Columns.LOSS_MASK]
    assert not present[:, agents:].any()
    assert num_steps(teams) == num_steps(single) == int(part.active.sum())
    for settings in (PPOSettings(), PPOSettings(normalize_value_loss=False)):
        prepared, expected = (prepare_rows(rows, settings) for rows in (teams, single))
        # Means exclude absent agents.
        for column in (Postprocessing.ADVANTAGES, Postprocessing.VALUE_TARGETS):
            numbers, reference = prepared[column][present], expected[column]
            torch.testing.assert_close(numbers.sort().values, reference.sort().values)


def test_agents_of_a_team_share_the_mean_of_their_rewards():
    parts, _ = fragment()
    shared = share_rewards(parts["hen"])
    rewards, active = parts["hen"].rewards, parts["hen"].active
    totals = (rewards * active).sum(-1)
    torch.testing.assert_close((shared.rewards * active).sum(-1), totals)
    assert (shared.rewards[~active] == 0).all()
    # All targets up to the end of an episode are equal.
    terminated = torch.zeros_like(shared.terminated)
    terminated[-1] = True
    single = shared._replace(
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
        active=torch.ones_like(active),
        next_active=torch.ones_like(active),
        next_values=shared.values.roll(-1, 0),
        rewards=shared.rewards.amax(-1, keepdim=True).expand_as(rewards),
    )
    _, targets = estimate_advantages(single, 0.9, 1.0)
    torch.testing.assert_close(targets, targets[..., :1].expand_as(targets))


def test_values_are_normalized_as_published():
    generator = np.random.default_rng(0)
    norm, beta = ValueNorm(), 0.99999
    mean_sum = square_sum = debias = 0.0
    numbers = torch.tensor([-3.0, 0.0, 40.0])
    assert torch.equal(norm.normalize(numbers), numbers)
    for scale in (1.0, 5.0, 30.0):
        batch = scale * generator.standard_normal((7, 4)) - 20
        norm.update(torch.tensor(batch))
        mean_sum = beta * mean_sum + (1 - beta) * batch.mean()
        square_sum = beta * square_sum + (1 - beta) * (batch**2).mean()
        debias = beta * debias + (1 - beta)
        mean = mean_sum / debias
        deviation = np.sqrt(max(square_sum / debias - mean**2, 1e-2))
        expected = torch.tensor((numbers.numpy() - mean) / deviation)
        result = norm.normalize(numbers)
        torch.testing.assert_close(result, expected.float(), rtol=1e-4, atol=1e-4)
        restored = norm.denormalize(result)
        torch.testing.assert_close(restored, numbers, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        [*SPREAD, "critic=set", "ppo.value_norm=true"],
        [*SPREAD, "critic=state", "ppo.share_reward=true"],
        [FARM, "critic=set", "critic.trunk=shared", "ppo.value_norm=true"],
        [*SPREAD, "ppo.value_norm=true"],
    ],
    ids=["set", "state", "groups", "own"],
)
def test_a_resumed_run_continues_exactly_and_saves_no_critic(tmp_path, options):
    reference = run_of(tmp_path / "whole", config_of(*options, "total_steps=48"))
    first = run_of(tmp_path / "parts", config_of(*options, "total_steps=16"))
    second = resumed(first.path, 48)
    assert_same(second, reference)
    # A file that holds more than a policy is not loaded.
    assert load_policies(second.policy_path("last"))


@pytest.mark.parametrize(
    "env",
    [
        *("cartpole", "xor", SPREAD_V3),
        *(pytest.param(env, marks=pytest.mark.slow) for env in SLOW),
    ],
)
def test_three_iterations_with_a_critic_of_the_state(tmp_path, env):
    name, *options = env.split()
    config = config_of(
        *(f"env={name}", "env.max_steps=30", *options, "critic=state"),
        *("ppo.num_envs=2", "ppo.batch_size=24", "total_steps=72"),
    )
    run = run_of(tmp_path / "run", config)
    weights = weights_of(run.policy_path("last"))
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert not [key for key in weights if "critic" in key]


@pytest.mark.slow
def test_a_remote_learner_trains_with_a_critic(tmp_path, cluster):
    options = [*SPREAD, "critic=state", "ppo.value_norm=true"]
    config = config_of(*options, "total_steps=16", "resources.num_learners=1")
    run = run_of(tmp_path / "remote", config)
    weights = weights_of(run.policy_path("last")).values()
    assert all(tensor.isfinite().all() for tensor in weights)


@yaml_cases("overrides, message")
def test_a_critic_that_cannot_be_built_says_what_is_missing(overrides, message):
    with pytest.raises(InputError) as caught:
        rllib_config(config_of(*overrides))
    assert message in str(caught.value)


def test_a_wrong_encoder_of_a_critic_does_not_blame_the_head():
    encoder = "critic.encoder={name: transformer, dim: 7, num_heads: 2}"
    message = "^critic: encoder.num_heads: expected a divisor of dim = 7, got 2$"
    with pytest.raises(InputError, match=message):
        rllib_config(config_of("env=simple_spread", "critic=set", encoder))


class FaultyStates(FoxAndHens):
    """An environment whose state becomes NaN, or has no specification."""

    shows_state = True

    def __init__(self, num_envs, *, listed: bool = False, **common):
        super().__init__(num_envs, **common)
        self.listed = listed

    @property
    def state_specs(self):
        return ["fox", "hen"] if self.listed else super().state_specs

    def observe_state(self):
        late = (self.steps >= 2)[:, None, None, None]
        return {
            name: tokens._replace(features=tokens.features.masked_fill(late, torch.nan))
            for name, tokens in super().observe_state().items()
        }


def test_a_state_that_is_not_finite_is_named(tmp_path):
    config = config_of(f"env={__name__}:FaultyStates", "critic=state")
    message = (
        r"NaN or infinite: states of \d+ steps; first: states of agent 0 of group 'fox'"
    )
    with pytest.raises(StoppedError, match=message):
        run_of(tmp_path / "run", config)
