"""Detection of failed processes and of numbers that are not finite."""

import contextlib
import logging
import operator
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import ActorDiedError, RayError
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, LEARNER_RESULTS
from torch import Tensor

from marl_pool.rollout import Trajectory
from marl_pool.training.ppo.learner import NON_FINITE_LOSS
from marl_pool.utils.atomic import appended

NON_FINITE = "non_finite"
"""Metrics: count of NaN and infinite numbers in a sample, by kind."""
NON_FINITE_PLACE = "non_finite_place"
"""Metric: place of one of them, the environment's number times 2^20 plus the step.

RLlib would silently restart a runner that raised. So the runner reports a metric, and
the driver stops the run."""
LOGGERS = ("ray.rllib.utils.actor_manager", "ray.rllib.env.env_runner_group")
"""Loggers to which RLlib writes the tracebacks of its processes."""


class Failure(NamedTuple):
    """An exception that was raised while sampling."""

    env: str
    """Name of the environment's class."""
    error: str
    """The exception and its message, in one line."""
    traceback: str
    """The formatted traceback."""

    @classmethod
    def of(cls, error: Exception, env: str) -> "Failure":
        """Describe an exception; ``env`` is the name of the environment's class."""
        message = " ".join(str(error).split())[:200]
        return cls(
            env,
            f"{type(error).__name__}: {message}".removesuffix(": "),
            "".join(traceback.format_exception(error)),
        )


@contextlib.contextmanager
def errors_to(file: Path) -> Iterator[None]:
    """Append what RLlib logs about dying processes to ``file``, not to the screen."""
    handler = _Appending(file, delay=True, encoding="utf-8")
    propagating = {name: logging.getLogger(name).propagate for name in LOGGERS}
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    try:
        yield
    finally:
        for name, propagates in propagating.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).propagate = propagates
        handler.close()


class _Appending(logging.FileHandler):
    """File handler that follows no symbolic link."""

    def _open(self) -> Any:
        self._opened = contextlib.ExitStack()
        return self._opened.enter_context(appended(Path(self.baseFilename)))


def last_line(text: str) -> str:
    """Extract the exception and its message from a traceback, as one line."""
    *_, unindented = re.split(r"^ .*$", text.strip(), flags=re.M)
    return " ".join(unindented.split())[-200:]


def first_failure(runners: EnvRunnerGroup) -> Failure | None:
    """Return the failure of one of the runners, or None."""
    failures = runners.foreach_env_runner(operator.attrgetter("failure"))
    return next(filter(None, failures), None)


def wait_for_runner(runners: EnvRunnerGroup, seconds: float) -> None:
    """Wait until a runner is restarted, if all of them have died.

    Ray needs some seconds to restart a process; RLlib would continue without data. A
    runner that has used up its restarts is not waited for.
    """
    deadline = time.monotonic() + seconds
    waiting = list(runners._worker_manager.actors().values())
    if runners.num_healthy_remote_env_runners():
        return
    while waiting and time.monotonic() < deadline:
        for runner in list(waiting):
            try:
                ray.get(runner.ping.remote(), timeout=1.0)
                return
            except ActorDiedError:
                waiting.remove(runner)
            except (RayError, TimeoutError):
                time.sleep(0.2)


def all_learners_live(algo: PPO) -> bool:
    """Return True if no learner died; RLlib never restarts one and may not notice."""
    answers = algo.learner_group.foreach_learner(lambda learner: True)
    return sum(answer.ok for answer in answers) >= (algo.config.num_learners or 1)


def bad_numbers(result: Mapping[str, Any]) -> str | None:
    """Describe the NaN or infinite numbers in a result of ``Algorithm.train``."""
    sampled = result[ENV_RUNNER_RESULTS]
    bad = {kind: n for kind, n in sampled.get(NON_FINITE, {}).items() if n > 0}
    if bad:
        env_id, step = divmod(int(sampled[NON_FINITE_PLACE]), 1 << 20)
        seen = ", ".join(f"{int(n)} {kind}" for kind, n in sorted(bad.items()))
        return (
            f"NaN or infinite: {seen}; one in environment {env_id} at step {step} of "
            "the fragment"
        )
    for module, metrics in result[LEARNER_RESULTS].items():
        if metrics.get(NON_FINITE_LOSS, 0) > 0:
            loss = float(metrics.get("total_loss", float("nan")))
            return (
                f"loss or gradient of module {module!r} is NaN or infinite (loss "
                f"{loss:g}); try a smaller ppo.lr or ppo.grad_clip"
            )
    return None


def non_finite(trajectory: Trajectory) -> dict[str, Tensor]:
    """Return the masks of NaN and infinite numbers by kind, for kinds that have any."""
    features, _, padding = trajectory.tokens
    kinds = {"rewards": trajectory.rewards, "action logits": trajectory.logits}
    # Bytes are always finite, and their sum in float64 would copy the batch at eight
    # times its size.
    if features.is_floating_point():
        kinds["observations"] = features.masked_fill(padding[..., None], 0)
    return {
        kind: ~torch.isfinite(tensor)
        for kind, tensor in kinds.items()
        # One sum detects them as surely as a test of each number, and is far cheaper.
        if not torch.isfinite(tensor.sum(dtype=torch.float64))
    }
