"""Duration of a trial, estimated from a short part of its own training."""

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ray.rllib.utils.metrics import ALL_MODULES, ENV_RUNNER_RESULTS, LEARNER_RESULTS

from marl_pool.training.ppo.algorithm import algorithm_config
from marl_pool.training.ppo.learner import LEARN_SECONDS
from marl_pool.training.ppo.runner import SAMPLE_SECONDS
from marl_pool.training.settings import TrainConfig
from marl_pool.training.supervised.fit import price
from marl_pool.training.supervised.settings import FitConfig

STEPS = 32
"""Steps of each environment that are timed; an iteration has more."""
IRRELEVANT = ("seed", "total_steps", "time_limit", "checkpoint")
"""Keys that leave the speed of a trial as it is."""


class Pace(NamedTuple):
    """How fast a trial trains.

    Attributes:
        steps: of one iteration, over all worlds.
        seconds: that it takes.
    """

    steps: int
    seconds: float

    def seconds_for(self, steps: int) -> float:
        """Seconds for the iterations that take at least ``steps`` steps."""
        return math.ceil(steps / self.steps) * self.seconds


def cell_of(config: Mapping[str, Any]) -> str:
    """Return a text that is the same for configurations of the same speed."""
    kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
    return json.dumps(kept, sort_keys=True)


def measure(config: Mapping[str, Any]) -> Pace | None:
    """Measure how fast a trial trains; None if it cannot be trained.

    What keeps it from training is for the trial to report; the others go on.

    Args:
        config: of the trial, checked. Ray runs already.
    """
    try:
        if "task" in config:
            return _priced(FitConfig.from_plain(config))
        return _measure(TrainConfig.from_plain(config))
    except Exception:
        return None


def _priced(config: FitConfig) -> Pace:
    """Estimate the seconds of an epoch of a fit, its share of the tests included."""
    with _threads(config.threads), tempfile.TemporaryDirectory() as folder:
        cost = price(config, Path(folder))
    epochs = cost.folds * cost.epochs
    return Pace(1, cost.seconds / epochs)


def _measure(config: TrainConfig) -> Pace:
    """Time a shortened iteration, and extrapolate to a whole one.

    The short one has `STEPS` steps of every environment and one pass over them, on the
    same path as training. Sampling is scaled by steps and learning by rows and passes;
    the rest of the iteration's time is taken as it is.
    """
    ppo, length = config.ppo, algorithm_config(config).rollout_fragment_length
    part = min(STEPS, length)
    batch = ppo.batch_size // length * part
    minibatch = None if ppo.minibatch_size is None else min(ppo.minibatch_size, batch)
    short = replace(ppo, num_epochs=1, batch_size=batch, minibatch_size=minibatch)
    with _threads(config.threads):
        algo = algorithm_config(replace(config, ppo=short)).build_algo()
        try:
            algo.train()  # the first one is slower
            began = time.perf_counter()
            result = algo.train()
            elapsed = time.perf_counter() - began
        finally:
            algo.stop()
    sampling = float(result[ENV_RUNNER_RESULTS][SAMPLE_SECONDS])
    learning = float(result[LEARNER_RESULTS][ALL_MODULES][LEARN_SECONDS])
    rest = max(elapsed - sampling - learning, 0.0)
    seconds = (sampling + learning * ppo.num_epochs) * length / part + rest
    runners = max(1, config.resources.num_env_runners)
    return Pace(length * ppo.num_envs * runners, seconds)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
