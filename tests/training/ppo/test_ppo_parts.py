"""The parts of PPO that need no running algorithm."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")

from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)

from helpers.farm import FoxAndHens, policies_of
from helpers.ppo import episodes_of
from marl_pool.config import compose
from marl_pool.policies.actions import log_prob
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.training.ppo.batch import (
    VALUE_SCALE,
    episode_rows,
    minibatches,
    prepare_rows,
)
from marl_pool.training.ppo.learner import FIRST_KL
from marl_pool.training.ppo.runner import SAMPLE_SECONDS
from marl_pool.training.ppo.train import PPOMethod
from marl_pool.training.ppo.trajectories import estimate_advantages
from marl_pool.training.settings import PPOSettings, TrainConfig
from marl_pool.trajectory import Trajectory


def trajectory(steps: int = 9) -> tuple[dict[str, Trajectory], Rollout]:
    env = FoxAndHens(3, end_chance=0.15, max_steps=5)
    rollout = Rollout(env, policies_of(env), explore=True)
    return rollout.steps(steps), rollout


def brute_force(part: Trajectory, gamma: float, lam: float) -> np.ndarray:
    """Sum the discounted temporal differences, one agent and one start at a time."""
    steps, num_envs, agents = part.rewards.shape
    result = np.zeros((steps, num_envs, agents))
    for env in range(num_envs):
        for agent in range(agents):
            for start in range(steps):
                weight = 1.0
                for t in range(start, steps):
                    follow = float(part.next_values[t, env, agent])
                    if part.terminated[t, env]:
                        follow = 0.0
                    reward = float(part.rewards[t, env, agent])
                    error = reward + gamma * follow - float(part.values[t, env, agent])
                    result[start, env, agent] += weight * error
                    weight *= gamma * lam
                    if part.terminated[t, env] or part.truncated[t, env]:
                        break
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_advantages_equal_the_sum_of_temporal_differences(gamma, lam):
    parts, _ = trajectory()
    ended = parts["hen"].terminated | parts["hen"].truncated
    assert parts["hen"].terminated.any()
    assert (parts["hen"].truncated & ~parts["hen"].terminated).any()
    assert ended.any(0).all()
    for part in parts.values():
        advantages, targets = estimate_advantages(part, gamma, lam)
        expected = brute_force(part, gamma, lam)
        np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(targets, advantages + part.values)


def single_agent_fragment() -> Trajectory:
    """Random episodes, some terminated and some truncated, of the one fox."""
    parts, _ = trajectory(steps=30)
    part, generator = parts["fox"], torch.Generator().manual_seed(0)
    values = torch.randn(31, *part.values.shape[1:], generator=generator)
    chance = torch.rand(part.terminated.shape, generator=generator)
    terminated, truncated = chance < 0.1, (chance >= 0.1) & (chance < 0.2)
    # The value after an episode's last step is not that before the next one.
    ends = (terminated | truncated)[..., None]
    return part._replace(
        rewards=torch.randn(part.rewards.shape, generator=generator),
        values=values[:-1],
        next_values=torch.where(ends, 3 + values[1:], values[1:]),
        terminated=terminated,
        truncated=truncated,
        next_active=torch.ones_like(part.next_active),
    )


def test_advantages_are_torchrls() -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    part = single_agent_fragment()
    ends = (part.terminated | part.truncated)[..., None]
    columns = (part.values, part.next_values, part.rewards, ends)
    by_env = [
        column.transpose(0, 1) for column in (*columns, part.terminated[..., None])
    ]
    expected = functional.generalized_advantage_estimate(0.97, 0.93, *by_env)
    for estimate, column in zip(
        estimate_advantages(part, 0.97, 0.93), expected, strict=True
    ):
        torch.testing.assert_close(
            estimate, column.transpose(0, 1), rtol=1e-5, atol=1e-5
        )


def test_advantages_are_stable_baselines3s() -> None:
    """Its buffer adds the value after a truncation to the reward, as its PPO does."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    part = single_agent_fragment()
    steps, num_envs, _ = part.rewards.shape
    space = gym.spaces.Box(-1, 1, (1,))
    options = {"gamma": 0.97, "gae_lambda": 0.93, "n_envs": num_envs, "device": "cpu"}
    buffer = buffers.RolloutBuffer(steps, space, space, **options)
    ends = (part.terminated | part.truncated).numpy()
    starts = np.concatenate([np.zeros((1, num_envs)), ends[:-1]])
    after = torch.where(part.truncated[..., None], part.next_values, 0.0)
    rewards = (part.rewards + 0.97 * after)[..., 0].numpy()
    zeros = np.zeros((num_envs, 1))
    for t in range(steps):
        row = (rewards[t], starts[t], part.values[t, :, 0], torch.zeros(num_envs))
        buffer.add(zeros, zeros, *row)
    buffer.compute_returns_and_advantage(part.next_values[-1, :, 0], ends[-1])
    advantages, _ = estimate_advantages(part, 0.97, 0.93)
    np.testing.assert_allclose(
        advantages[..., 0].numpy(), buffer.advantages, rtol=1e-4, atol=1e-5
    )


def test_a_truncation_bootstraps_and_a_termination_does_not():
    parts, _ = trajectory(steps=1)
    part = parts["fox"]
    values = {"next_values": torch.full_like(part.next_values, 100.0)}
    flags = torch.tensor([[True, False, False]])
    changed = part._replace(**values, terminated=flags, truncated=flags.roll(1))
    advantages, _ = estimate_advantages(changed, 0.9, 0.95)
    plain = (part.rewards - part.values)[0, :, 0]
    expected = plain + torch.tensor([0.0, 90.0, 90.0])
    torch.testing.assert_close(advantages[0, :, 0], expected)


def test_a_dead_agent_gets_nothing_from_after_its_death():
    parts, _ = trajectory(steps=2)
    part = parts["hen"]
    off = torch.zeros_like(part.terminated)
    lives = torch.ones_like(part.next_active)
    lives[0, 0, 0] = False
    changed = part._replace(terminated=off, truncated=off, next_active=lives)
    advantages, _ = estimate_advantages(changed, 0.9, 0.95)
    expected = (part.rewards - part.values)[0, 0, 0]
    torch.testing.assert_close(advantages[0, 0, 0], expected)


def all_episodes(
    parts: dict[str, Trajectory], first_step: int = 0
) -> list[SingleAgentEpisode]:
    episodes = []
    for name, part in parts.items():
        fragment = (part, *estimate_advantages(part, 0.9, 0.9))
        episodes += episodes_of(name, *fragment, first_step=first_step)
    return episodes


def test_episodes_hold_every_row_once_and_rllib_accepts_them():
    parts, _ = trajectory()
    episodes = all_episodes(parts)
    for name, part in parts.items():
        module_episodes = [e for e in episodes if e.module_id == name]
        assert sum(map(len, module_episodes)) == part.rewards.numel()
        rewards = np.concatenate([e.get_rewards() for e in module_episodes])
        assert sorted(rewards) == sorted(part.rewards.flatten().tolist())
    assert len({episode.id_ for episode in episodes}) == len(episodes)
    for episode in episodes:
        episode.validate()
        assert len(episode.get_observations()["types"]) == len(episode) + 1


def test_episodes_end_where_environments_ended_and_count_their_steps():
    parts, _ = trajectory()
    hens = [e for e in all_episodes(parts) if e.agent_id == "hen_1"]
    part = parts["hen"]
    assert sum(e.is_terminated for e in hens) == int(part.terminated.sum())
    cut = part.truncated & ~part.terminated
    assert sum(e.is_truncated and not e.is_terminated for e in hens) == int(cut.sum())
    later = [e for e in all_episodes(parts, first_step=2) if e.agent_id == "hen_1"]
    firsts = [e for e in later if e.id_.endswith("-0")]
    assert [e.t_started for e in firsts] == [2, 2, 2]
    assert all(e.t_started == 0 for e in later if not e.id_.endswith("-0"))


def test_dead_agents_leave_no_rows():
    parts, _ = trajectory(steps=4)
    part = parts["hen"]
    active = torch.ones_like(part.active)
    active[1:3, 0, 2] = False
    episodes = all_episodes({"hen": part._replace(active=active)})
    dead = [e for e in episodes if e.agent_id == "hen_2" and "-0-hen" in e.id_]
    assert sum(map(len, dead)) == 2
    assert sum(map(len, episodes)) == part.rewards.numel() - 2


def multi_batch(**counts):
    return {name: {Columns.ACTIONS: torch.arange(n)} for name, n in counts.items()}


PLAIN = {"max_seq_len": 1, "normalize_value_loss": False}


def batch_of(episodes, **settings):
    rows, ppo = episode_rows(episodes), PPOSettings(**(PLAIN | settings))
    return {name: prepare_rows(columns, ppo) for name, columns in rows.items()}


def test_learners_in_step_have_rows_of_every_module_in_every_minibatch():
    batch = multi_batch(few=2, many=9)
    generator = torch.Generator().manual_seed(0)
    settings = {"num_epochs": 2, "num_minibatches": 4, "generator": generator}
    parts = list(minibatches(batch, in_step=True, **settings))
    assert len(parts) == 2 * 4
    assert all(set(part) == {"few", "many"} for part in parts)
    many = torch.cat([part["many"][Columns.ACTIONS] for part in parts])
    assert torch.equal(many.bincount(), torch.full((9,), 2))
    few = torch.cat([part["few"][Columns.ACTIONS] for part in parts])
    assert torch.equal(few.bincount(), torch.full((2,), 4))


def test_a_batch_concatenates_by_module_and_standardises():
    parts, rollout = trajectory()
    batch = batch_of(all_episodes(parts))
    assert set(batch) == {"fox", "hen"}
    for name, part in parts.items():
        rows = batch[name]
        count = part.rewards.numel()
        assert rows[Columns.OBS]["features"].shape == (count, 4, 2)
        advantages = rows[Postprocessing.ADVANTAGES]
        assert abs(advantages.mean()) < 1e-5
        torch.testing.assert_close(advantages.std(correction=0), torch.tensor(1.0))
        # Rows stay together: each row's action has its own log-probability.
        policy = rollout.policies[name]
        logits = rows[Columns.ACTION_DIST_INPUTS]
        log_probs = log_prob(policy.actions, logits, rows[Columns.ACTIONS])
        torch.testing.assert_close(log_probs, rows[Columns.ACTION_LOGP])


@given(
    counts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 60), min_size=1),
    epochs=st.integers(1, 4),
    number=st.integers(1, 70),
    shuffle=st.booleans(),
)
def test_every_epoch_has_each_row_once(counts, epochs, number, shuffle):
    generator = torch.Generator().manual_seed(0) if shuffle else None
    settings = {"num_epochs": epochs, "num_minibatches": number}
    iterator = minibatches(multi_batch(**counts), generator=generator, **settings)
    number = min(number, max(counts.values()))
    visits = {name: Counter() for name in counts}
    passed = 0
    for minibatch in iterator:
        passed += 1
        for name, rows in minibatch.items():
            assert len(rows[Columns.ACTIONS]) <= -(-counts[name] // number)
            visits[name].update(rows[Columns.ACTIONS].tolist())
    assert passed == epochs * number
    for name, count in counts.items():
        assert visits[name] == dict.fromkeys(range(count), epochs)


def test_a_shuffle_changes_the_order_and_its_seed_fixes_it():
    def order(seed):
        settings = {"num_epochs": 2, "num_minibatches": 2}
        generator = torch.Generator().manual_seed(seed)
        iterator = minibatches(multi_batch(a=40), generator=generator, **settings)
        parts = [m["a"][Columns.ACTIONS] for m in iterator]
        return torch.cat(parts).tolist()

    assert order(1) == order(1) != order(2)
    assert order(1)[:40] != order(1)[40:]


def test_a_normalized_value_loss_does_not_depend_on_the_unit_of_reward():
    def scaled_errors(unit):
        parts, _ = trajectory()
        part = parts["hen"]
        names = ("rewards", "values", "next_values")
        part = part._replace(**{name: unit * getattr(part, name) for name in names})
        batch = batch_of(all_episodes({"hen": part}), normalize_value_loss=True)
        rows = batch["hen"]
        predicted = rows[VALUE_SCALE] * rows[Columns.VF_PREDS]
        return predicted - rows[Postprocessing.VALUE_TARGETS]

    errors = scaled_errors(1.0)
    torch.testing.assert_close(scaled_errors(100.0), errors, rtol=1e-3, atol=1e-4)
    assert 0 < errors.square().mean() <= 1


def test_seconds_include_an_iteration_without_steps(tmp_path, monkeypatch):
    config = compose("train", ["encoder.num_layers=1", "threads=1"])
    run = Run.create(tmp_path / "run", config)
    method = PPOMethod(run, TrainConfig.from_plain(config), None)
    monkeypatch.setattr(method, "_train", lambda iteration: {})
    clock = SimpleNamespace(monotonic=itertools.count(step=3).__next__)
    monkeypatch.setitem(PPOMethod.step.__globals__, "time", clock)
    assert method.step(1) is None
    assert method.seconds == 3


def test_a_module_without_rows_hides_no_extreme_divergence(
    tmp_path, monkeypatch, capsys
):
    words = ["env=helpers.farm:FoxAndHens", "encoder.num_layers=1", "threads=1"]
    config = compose("train", words)
    run = Run.create(tmp_path / "run", config)
    method = PPOMethod(run, TrainConfig.from_plain(config), None)
    sampled = {NUM_ENV_STEPS_SAMPLED_LIFETIME: 8, SAMPLE_SECONDS: 1.0}
    learned = {"fox": {FIRST_KL: math.nan}, "hen": {FIRST_KL: 1e9}}
    result = {ENV_RUNNER_RESULTS: sampled, LEARNER_RESULTS: learned}
    monkeypatch.setattr(method, "_train", lambda iteration: result)
    method.step(1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "first_kl of module 'hen' is 1e+09 instead of 0" in line


def test_without_a_finished_episode_the_newest_checkpoint_is_the_best():
    method: Any = object.__new__(PPOMethod)
    without_score, with_score = (
        SimpleNamespace(score=score) for score in (-math.inf, -9.0)
    )
    for best, score, is_better in [
        (None, -math.inf, True),
        (without_score, -math.inf, True),
        (without_score, -9.0, True),
        (with_score, -math.inf, False),
        (with_score, -9.0, False),
    ]:
        method.run = SimpleNamespace(best=best)
        assert method.accept(score) == is_better
