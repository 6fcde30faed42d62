"""Trainings by PPO, and comparisons of them."""

from pathlib import Path

import torch
from ray.rllib.algorithms.ppo import PPOConfig
from safetensors.torch import load_file

from marl_pool.runs.run import Run
from marl_pool.training.ppo import train
from marl_pool.training.ppo.config import algorithm_config
from marl_pool.training.settings import TrainConfig

CLOCKS = {"seconds", "sample_seconds", "learn_seconds", "steps_per_second"}


def run_of(path: Path, config: dict) -> Run:
    """Train in a new folder."""
    run = Run.create(path, config)
    try:
        train(run, run.config)
    finally:
        run.close()
    return run


def resumed(path: Path, total_steps: int) -> Run:
    run = Run.open(path)
    train(run, {**run.config, "total_steps": total_steps})
    run.close()
    return run


def rllib_config(config: dict) -> PPOConfig:
    return algorithm_config(TrainConfig.from_plain(config))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    weights, expected = weights_of(first), weights_of(second)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def assert_same(first: Run, second: Run) -> None:
    """The same metrics, clocks aside, and last weights, bit for bit."""
    first_rows, second_rows = (
        [{k: v for k, v in row.items() if k not in CLOCKS} for row in run.rows()]
        for run in (first, second)
    )
    assert first_rows == second_rows
    assert_same_weights(first.policy_path("last"), second.policy_path("last"))
