"""Detection of failed processes and of numbers that are not finite."""

import contextlib
import logging
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
"""Metrics: how many numbers of a sample were NaN or infinite, by kind."""
NON_FINITE_PLACE = "non_finite_place"
"""Metric: where one of them was seen, the world's number times 2^20 plus the step. A
runner that raised would be restarted by RLlib without a word; so it reports, and the
driver stops the run."""
LOGGERS = ("ray.rllib.utils.actor_manager", "ray.rllib.env.env_runner_group")
"""Loggers to which RLlib writes the tracebacks of its processes."""


class Failure(NamedTuple):
    """An exception that was raised while sampling."""

    world: str
    """Name of the world's class."""
    error: str
    """The exception and its message, one line."""
    traceback: str
    """For whoever debugs it."""

    @classmethod
    def of(cls, error: Exception, world: str) -> "Failure":
        """Describe ``error``, which came from sampling ``world``."""
        message = " ".join(str(error).split())[:200]
        return cls(
            world,
            f"{type(error).__name__}: {message}".removesuffix(": "),
            "".join(traceback.format_exception(error)),
        )


def failure_of(runner: Any) -> Failure | None:
    """Return the exception that a runner keeps; a function, so that it can be sent."""
    failure: Failure | None = runner.failure
    return failure


@contextlib.contextmanager
def errors_to(file: Path) -> Iterator[None]:
    """Append what RLlib logs about dying processes to ``file``, not to the screen."""
    handler = _Appending(file, delay=True, encoding="utf-8")
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagates
        handler.close()


class _Appending(logging.FileHandler):
    """A handler that follows no link."""

    def _open(self) -> Any:
        self._opened = contextlib.ExitStack()
        return self._opened.enter_context(appended(Path(self.baseFilename)))


def last_line(text: str) -> str:
    """The exception and its message at the end of a traceback, on one line."""
    lines: list[str] = []
    for line in reversed(text.strip().splitlines()):
        if line.startswith(" "):
            break
        lines.insert(0, line)
    return " ".join(" ".join(lines).split())[-200:]


def first_failure(runners: EnvRunnerGroup) -> Failure | None:
    """The exception that a runner kept, if any did."""
    return next(filter(None, runners.foreach_env_runner(failure_of)), None)


def wait_for_runner(runners: EnvRunnerGroup, seconds: float) -> None:
    """Wait, if all runners died, until one of them is there again.

    Ray starts a process anew, which takes it some seconds. RLlib would not wait, but go
    on without data. A runner that was started as often as it may be does not come back.

    Args:
        runners: of the algorithm.
        seconds: to wait at most.
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
    """Return True if no learner died; RLlib restarts none, and may not notice."""
    answers = algo.learner_group.foreach_learner(_answer)
    return sum(answer.ok for answer in answers) >= (algo.config.num_learners or 1)


def _answer(learner: Any) -> bool:
    # A function of the module, so that it can be sent to another process.
    return True


def bad_numbers(result: Mapping[str, Any]) -> str | None:
    """Say which numbers of an iteration are NaN or infinite, if any.

    Args:
        result: of RLlib's ``Algorithm.train``.
    """
    sampled = result[ENV_RUNNER_RESULTS]
    bad = {kind: n for kind, n in sampled.get(NON_FINITE, {}).items() if n > 0}
    if bad:
        world, step = divmod(int(sampled[NON_FINITE_PLACE]), 1 << 20)
        seen = ", ".join(f"{int(n)} {kind}" for kind, n in sorted(bad.items()))
        return (
            f"NaN or infinite: {seen}; one in world {world} at step {step} of the "
            "fragment"
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
    """Mark numbers of each kind that are not finite; kinds without any are left out."""
    features, _, padding = trajectory.tokens
    kinds = {"rewards": trajectory.rewards, "action logits": trajectory.logits}
    # Bytes are finite, and their sum as float64 would copy a batch at eight times
    # its size.
    if features.is_floating_point():
        kinds["observations"] = features.masked_fill(padding[..., None], 0)
    return {
        kind: ~torch.isfinite(tensor)
        for kind, tensor in kinds.items()
        # One sum is far cheaper than a test of each number, and as telling.
        if not torch.isfinite(tensor.sum(dtype=torch.float64))
    }
