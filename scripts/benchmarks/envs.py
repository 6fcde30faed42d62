"""Benchmarks of environments alone: steps and levels per second."""

import itertools
import statistics
from collections.abc import Callable, Iterator

import torch

from benchmarks.common import Row, Size, random_actions, seconds, task_of
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.boxworld.levels import MOST_AHEAD
from marl_pool.utils.devices import may_read

BUDGET = 5_000
"""Maximal number of steps of a slow simulator."""
NUM_ENVS = 16
"""Third-party environments in one batch."""
MODULES = {
    "simple_spread": "mpe2.simple_spread_v3",
    "multiwalker": "pettingzoo.sisl.multiwalker_v9",
    "knights_archers_zombies": "pettingzoo.butterfly.knights_archers_zombies_v11",
}
"""By label: a light environment and heavier ones."""


def env_alone(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure steps per second, observations and resets included."""

    def measure(size: Size) -> Iterator[Row]:
        task = task_of(name, size)
        env = task.make_env(size)
        count = size.env_steps
        if name == "pong":  # an external simulator, hundreds of times slower
            count = min(count, BUDGET // task.num_envs)
        run = stepping(env, count)
        run()
        rates = [count * task.num_envs / seconds(run) for _ in range(size.rounds)]
        note = f"{task.num_envs} environments"
        value = statistics.median(rates)
        yield Row(f"env/{name}", value, "env steps/s", task.about("env"), note=note)

    return measure


def workers(label: str) -> Callable[[Size], Iterator[Row]]:
    """Measure a PettingZoo environment in two processes, compared with one."""

    def measure(size: Size) -> Iterator[Row]:
        options = {"module": MODULES[label], "seed": 1}
        runs = []
        for processes in (2, 1):
            env = make_batched_env("pettingzoo", NUM_ENVS, workers=processes, **options)
            env.reset()
            runs.append(stepping(env, min(size.env_steps, BUDGET // NUM_ENVS)))
            runs[-1]()
        pairs = [[seconds(run) for run in runs] for _ in range(size.rounds)]
        steps = NUM_ENVS * min(size.env_steps, BUDGET // NUM_ENVS)
        several, single = (
            statistics.median(steps / pair[i] for pair in pairs) for i in (0, 1)
        )
        yield Row(
            f"env/pettingzoo_workers/{label}",
            several,
            "env steps/s",
            f"env.workers=1: {single:,.0f} env steps/s",
            statistics.median(pair[1] / pair[0] for pair in pairs),
            note=f"env.workers=2, {NUM_ENVS} environments",
        )

    return measure


def stepping(env: BatchedEnv, count: int) -> Callable[[], None]:
    """Return a function that steps with random actions, observes and resets."""
    torch.set_num_threads(1)
    # Sample a few sets of actions in advance, to keep sampling out of the time.
    actions = itertools.cycle([random_actions(env) for _ in range(16)])

    @torch.no_grad()
    def run() -> None:
        for _ in range(count):
            step = env.step(next(actions))
            ended = step.terminated | step.truncated
            if not may_read(ended) or ended.any():
                env.reset(ended)
            env.observe()

    return run


def levels(size: Size) -> Iterator[Row]:
    """Measure BoxWorld levels per second: sampled, checked and placed."""
    task = task_of("boxworld_pixels", size)
    torch.set_num_threads(1)
    env = task.make_env(size)
    # Levels are sampled several episodes ahead; measure whole rounds of that.
    resets = MOST_AHEAD * size.level_resets

    def run() -> None:
        for _ in range(resets):
            env.reset()

    # The number of episodes ahead doubles: 1 (the first reset), 2, 4, 8.
    for _ in range(2 * MOST_AHEAD - 2):
        env.reset()
    count = resets * task.num_envs
    rates = [count / seconds(run) for _ in range(size.rounds)]
    note = f"{task.num_envs} environments, {MOST_AHEAD} episodes ahead, resets included"
    yield Row("levels/boxworld", statistics.median(rates), "levels/s", note=note)
