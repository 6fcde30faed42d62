"""Rows of worlds alone: steps a second, and levels a second."""

import itertools
import statistics
from collections.abc import Callable, Iterator

import torch

from benchmarks.common import TASKS, Row, Size, Task, random_actions, seconds
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.boxworld.levels import MOST_AHEAD

BUDGET = 20_000
"""World steps after which a slow simulator is known well enough."""


def env_alone(name: str) -> Callable[[Size], Iterator[Row]]:
    """Steps a second of a batch of worlds, observations and resets included."""
    task = TASKS[name]

    def measure(size: Size) -> Iterator[Row]:
        env = task.world(size)
        count = size.env_steps
        if name == "pong":  # someone else's simulator, hundreds of times slower
            count = min(count, BUDGET // task.num_envs)
        run = stepping(task, env, count)
        run()
        rates = [count * task.num_envs / seconds(run) for _ in range(size.rounds)]
        note = f"{task.num_envs} worlds"
        value = statistics.median(rates)
        yield Row(f"env/{name}", value, "env steps/s", task.about("env"), note=note)

    return measure


def stepping(task: Task, env: BatchedEnv, count: int) -> Callable[[], None]:
    """Step with random actions, observe, and begin ended worlds anew."""
    torch.set_num_threads(1)
    # Some few sets of actions, drawn once: drawing is no part of a world.
    actions = itertools.cycle([random_actions(env) for _ in range(16)])

    @torch.no_grad()
    def run() -> None:
        for _ in range(count):
            step = env.step(next(actions))
            ended = step.terminated | step.truncated
            if ended.any():
                env.reset(ended)
            env.observe()

    return run


def levels(size: Size) -> Iterator[Row]:
    """BoxWorld levels a second, drawn, checked and put into place."""
    task = TASKS["boxworld_pixels"]
    torch.set_num_threads(1)
    env = task.world(size)
    # Levels are drawn some episodes ahead: whole rounds of that pay for what they use.
    resets = MOST_AHEAD * size.level_draws

    def run() -> None:
        for _ in range(resets):
            env.reset()

    for _ in range(
        2 * MOST_AHEAD - 2
    ):  # the world's first reset was one; 1 + 2 + 4 + 8
        env.reset()
    count = resets * task.num_envs
    rates = [count / seconds(run) for _ in range(size.rounds)]
    note = f"{task.num_envs} worlds, {MOST_AHEAD} episodes ahead, resets included"
    yield Row("levels/boxworld", statistics.median(rates), "levels/s", note=note)
