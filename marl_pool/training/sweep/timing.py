"""Timing: the duration of a trial, estimated from a short part of its training."""

import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ray.rllib.utils.metrics import ALL_MODULES, ENV_RUNNER_RESULTS, LEARNER_RESULTS

from marl_pool.kernels.native import use_kernels
from marl_pool.training.ppo.config import algorithm_config
from marl_pool.training.ppo.learner import LEARN_SECONDS
from marl_pool.training.ppo.runner import SAMPLE_SECONDS
from marl_pool.training.settings import TrainConfig
from marl_pool.training.supervised.fit import price
from marl_pool.training.supervised.settings import FitConfig

STEPS = 32
"""Timed steps of each environment; an iteration has more."""
IRRELEVANT = ("seed", "total_steps", "time_limit", "env_timeout", "checkpoint")
"""Keys that do not affect the throughput of a trial."""


class Throughput(NamedTuple):
    """Training speed of a trial.

    Attributes:
        steps: steps of one iteration, over all environments.
        seconds: duration of one iteration.
    """

    steps: int
    seconds: float

    def seconds_for(self, steps: int) -> float:
        """Return the duration of the iterations that complete ``steps`` steps."""
        return math.ceil(steps / self.steps) * self.seconds


def cell_of(config: Mapping[str, Any]) -> str:
    """Return a text that configurations of the same throughput share."""
    kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
    return json.dumps(kept, sort_keys=True)


def measure(config: TrainConfig | FitConfig) -> Throughput | None:
    """Measure the throughput of a trial; None if it cannot be trained.

    Ray must be initialized.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with use_kernels(config.kernels, config.device):
            if isinstance(config, FitConfig):
                return _time_fit(config)
            return _time_ppo(config)
    except Exception:
        # The trial itself reports the failure later, and the other trials continue.
        return None
    finally:
        torch.set_num_threads(threads)


def _time_fit(config: FitConfig) -> Throughput:
    """Estimate the duration of an epoch, including its part of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        cost = price(config, Path(folder))
    return Throughput(1, cost.seconds / (cost.folds * cost.epochs))


def _time_ppo(config: TrainConfig) -> Throughput:
    """Train for a short iteration and extrapolate to a whole one.

    The short iteration has `STEPS` steps of every environment and one pass over them.
    Sampling time is scaled by the steps, learning time by the rows and passes; the
    remaining time of an iteration is constant.
    """
    # Shorten the batch to a few steps, and take one pass over it.
    ppo, length = config.ppo, algorithm_config(config).rollout_fragment_length
    part = min(STEPS, length)
    batch = ppo.batch_size // length * part
    minibatch = None if ppo.minibatch_size is None else min(ppo.minibatch_size, batch)
    short = replace(ppo, num_epochs=1, batch_size=batch, minibatch_size=minibatch)
    algo = algorithm_config(replace(config, ppo=short)).build_algo()
    try:
        # Time the second iteration; the first one is slower.
        algo.train()
        start = time.perf_counter()
        result = algo.train()
        elapsed = time.perf_counter() - start
    finally:
        algo.stop()
    # Extrapolate to the steps and passes of a whole iteration.
    sampling = float(result[ENV_RUNNER_RESULTS][SAMPLE_SECONDS])
    learning = float(result[LEARNER_RESULTS][ALL_MODULES][LEARN_SECONDS])
    rest = max(elapsed - sampling - learning, 0.0)
    seconds = (sampling + learning * ppo.num_epochs) * length / part + rest
    runners = max(1, config.resources.num_env_runners)
    return Throughput(length * ppo.num_envs * runners, seconds)
