"""How long a trial takes, from a short piece of its own training."""

import contextlib
import copy
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
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
"""Steps of each world in the piece that is measured; an iteration has more."""
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
    """A text that is the same for configurations of the same speed."""
    kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
    return json.dumps(kept, sort_keys=True)


def measure(config: Mapping[str, Any]) -> Pace | None:
    """Measure how fast a trial trains; None if it cannot be trained.

    What keeps it from training is for the trial to report; the others go on.

    Args:
        config: of the trial, checked. Ray runs already.
    """
    try:
        return _priced(config) if "task" in config else _measure(config)
    except Exception:
        return None


def _priced(config: Mapping[str, Any]) -> Pace:
    """How long an epoch of a supervised run takes, its share of the tests included."""
    with _threads(config["threads"]), tempfile.TemporaryDirectory() as folder:
        cost = price(FitConfig.from_plain(config), Path(folder))
    epochs = cost.folds * cost.epochs
    return Pace(1, cost.seconds / epochs)


def _measure(config: Mapping[str, Any]) -> Pace:
    """Train a small piece of an iteration, and reckon how long a whole one takes.

    The piece has `STEPS` steps of every world and one pass over them, on the same
    path as training. Sampling is scaled by steps and learning by rows and passes; the
    rest of the iteration's time is taken as it is.
    """
    whole = algorithm_config(TrainConfig.from_plain(config))
    length = whole.rollout_fragment_length
    piece = copy.deepcopy(dict(config))
    ppo, part = piece["ppo"], min(STEPS, length)
    passes, ppo["num_epochs"] = ppo["num_epochs"], 1
    ppo["batch_size"] = ppo["batch_size"] // length * part
    if ppo["minibatch_size"] is not None:
        ppo["minibatch_size"] = min(ppo["minibatch_size"], ppo["batch_size"])
    with _threads(config["threads"]):
        algo = algorithm_config(TrainConfig.from_plain(piece)).build_algo()
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
    seconds = (sampling + learning * passes) * length / part + rest
    runners = max(1, config["resources"]["num_env_runners"])
    return Pace(length * ppo["num_envs"] * runners, seconds)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
