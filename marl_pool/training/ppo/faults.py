"""Detection of failed processes."""

import contextlib
import logging
import re
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from typing_extensions import override

from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError, described
from marl_pool.utils.text import print_line

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
        formatted = "".join(traceback.format_exception(error))
        # An input error explains itself; the others need the name of their class.
        line = str(error) if isinstance(error, InputError) else described(error)
        return cls(env, line, formatted)


@contextlib.contextmanager
def errors_to(run: Run) -> Iterator[None]:
    """Append RLlib's logs of dying processes to the run's ``error.txt``."""
    handler = _ErrorHandler(run)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    propagations = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, propagations, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagates


class _ErrorHandler(logging.Handler):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.run.write_error(self.format(record))


def last_line(text: str) -> str:
    """Extract the exception and its message from a traceback, as one line."""
    *_, unindented = re.split(r"^ .*$", text.strip(), flags=re.M)
    return " ".join(unindented.split())[-200:]


def wait_for_runner(runners: EnvRunnerGroup, seconds: float) -> None:
    """Wait until a runner is restarted, if all of them have died.

    Ray takes seconds to restart a process; RLlib would continue without data. The wait
    does not include runners that have used up their restarts.
    """
    deadline = time.monotonic() + seconds
    waiting = list(runners._worker_manager.actors().values())
    if not waiting or runners.num_healthy_remote_env_runners():
        return
    print_line(f"all runners died; waiting up to {seconds:g} s for a restart")
    # Ping all runners in turn until one answers or none can come back.
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
