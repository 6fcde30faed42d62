"""PPO training runs, and comparisons of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from safetensors.torch import load_file
from torch import Tensor

from helpers.samples import random_actions
from marl_pool.compiled.ppo import Coefficients
from marl_pool.policies.actions import ActionSpec
from marl_pool.runs.run import Run
from marl_pool.training.jobs import config_of
from marl_pool.training.ppo import train
from marl_pool.training.ppo.config import algorithm_config
from marl_pool.training.ppo.loss import PPOTerms
from marl_pool.training.ppo.trajectories import to_episodes
from marl_pool.training.settings import TrainConfig
from marl_pool.trajectory import Trajectory

CLOCKS = {"seconds", "sample_seconds", "learn_seconds", "steps_per_second"}


def run_of(path: Path, config: dict) -> Run:
    """Train in a new folder."""
    run = Run.create(path, config)
    try:
        train(run, config_of(run))
    finally:
        run.close()
    return run


def resumed(path: Path, total_steps: int) -> Run:
    run = Run.open(path)
    train(run, replace(config_of(run), total_steps=total_steps))
    run.close()
    return run


def rllib_config(config: dict) -> PPOConfig:
    return algorithm_config(TrainConfig.from_plain(config))


def local_learner(algo: PPO) -> Any:
    """Return the learner in this process."""
    (answer,) = algo.learner_group.foreach_learner(lambda learner: learner)
    return answer.get()


def episodes_of(
    name: str, part: Trajectory, *estimates: torch.Tensor, first_step: int = 0
) -> list[SingleAgentEpisode]:
    """Cut a group's fragment, with advantages and value targets, into episodes."""
    first_steps = np.full(part.terminated.shape[1], first_step)
    names = {"group": name, "module_id": name, "prefix": "p"}
    return to_episodes(part, *estimates, **names, first_steps=first_steps)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    weights, expected = weights_of(first), weights_of(second)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def assert_same(first: Run, second: Run) -> None:
    """Compare metrics, except for timings, and the last weights, bit for bit."""
    first_rows, second_rows = (
        [{k: v for k, v in row.items() if k not in CLOCKS} for row in run.rows()]
        for run in (first, second)
    )
    assert first_rows == second_rows
    assert_same_weights(first.policy_path("last"), second.policy_path("last"))


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Sample the same numbers in every dtype."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def recorded_columns(
    actions: ActionSpec, rows: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Any]:
    """Sample columns of a training batch; some ratios and errors are large."""
    return {
        Columns.ACTIONS: random_actions(actions, rows, generator, dtype),
        Columns.ACTION_LOGP: -2 + normal(generator, dtype, rows),
        Columns.ACTION_DIST_INPUTS: 0.5
        * normal(generator, dtype, rows, actions.num_logits),
        Postprocessing.ADVANTAGES: normal(generator, dtype, rows),
        Postprocessing.VALUE_TARGETS: normal(generator, dtype, rows),
    }


def torchs_loss(
    c: Coefficients,
    actions: ActionSpec,
    columns: dict[str, Any],
    logits: Tensor,
    values: Tensor,
) -> Tensor:
    """Compute PPO's loss with torch's operations."""
    config = PPOConfig().training(
        clip_param=c.clip, vf_clip_param=c.value_clip, use_kl_loss=c.kl > 0
    )
    terms = PPOTerms.of(config, actions, columns, logits, values)
    return terms.loss(c.value, c.entropy, c.kl)
