"""Benchmarks of learning: one iteration, and the time to a goal."""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import TASKS, Row, Size, build, on, seconds
from benchmarks.sampling import floor_of
from marl_pool.config import compose
from marl_pool.training.ppo.module import build_policy
from marl_pool.training.ppo.runner import EPISODE_RETURNS
from marl_pool.training.ppo.train import RETURN_WINDOW

GOALS = {"time_to_return": -1.45, "time_to_skill": -0.72}
"""Mean returns: that of the published code after 18 iterations, and 0.8 of the way
from random actions (-1.89) to a controller that knows the centroid (-0.43)."""
PUBLISHED = {
    "time_to_return": "published code: 234 s, one seed, measured elsewhere",
    "time_to_skill": "published code: not reached",
}


def iteration(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure one iteration with the paper's batch and epochs, and its parts."""
    task = TASKS[name]

    def measure(size: Size) -> Iterator[Row]:
        config = task.iteration(size)
        algo = build(config)
        algo.train()
        ((module, spec),) = algo.config.rl_module_spec.rl_module_specs.items()
        policy = build_policy(spec.model_config).to(size.device)
        settings = config["ppo"]
        episodes = algo.env_runner.sample()
        learner = algo.learner_group._learner
        batch = learner._learner_connector(
            rl_module=learner.module, batch={}, episodes=episodes, shared_data={}
        )
        steps = settings["batch_size"] // settings["num_envs"]
        sample = floor_of(policy, task.make_env(size), steps)
        times, rests = [], []
        for _ in range(min(size.iterations, task.iterations)):
            times.append(seconds(algo.train))
            torch.set_num_threads(1)
            pure = seconds(sample)
            torch.set_num_threads(config["threads"])
            pure += seconds(lambda: gradients(learner, module, batch, settings))
            rests.append(1 - pure / times[-1])
        algo.stop()
        what = f"{settings['batch_size']} steps, {settings['num_epochs']} epochs"
        rest = 100 * statistics.median(rests)
        yield Row(
            f"iteration/{name}",
            statistics.median(times),
            "s",
            task.about("iteration"),
            note=f"{what}; not env, forward pass or gradient: {rest:.1f} %",
        )

    return measure


def two_learners(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure the same iteration by two learner processes of one thread each."""
    task = TASKS[name]

    def measure(size: Size) -> Iterator[Row]:
        config = task.iteration(size, num_learners=2)
        algo = build(config)
        algo.train()
        rounds = min(size.iterations, task.iterations)
        times = [seconds(algo.train) for _ in range(rounds)]
        algo.stop()
        settings = config["ppo"]
        what = f"{settings['batch_size']} steps, {settings['num_epochs']} epochs"
        yield Row(
            f"iteration/{name}/two_learners",
            statistics.median(times),
            "s",
            task.about("iteration"),
            note=f"{what}; 2 processes of one thread; memory is the driver's",
        )

    return measure


def gradients(
    learner: Any, module: str, batch: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Compute forward passes, RLlib's losses and gradients of all epochs."""
    for _ in range(settings["num_epochs"]):
        for microbatch, weights in learner._microbatches(batch):
            out = learner.module.forward_train(microbatch)
            loss = super(type(learner), learner).compute_loss_for_module(
                module_id=module,
                config=learner.config,
                batch=microbatch[module],
                fwd_out=out[module],
            )
            (loss * weights[module]).backward()


def time_to(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure seconds until the mean return reaches a goal at two checks in a row."""

    def measure(size: Size) -> Iterator[Row]:
        seeds = range(size.seeds)
        results = [climb(seed, size.limit, size.device)[name] for seed in seeds]
        reached = sorted(result for result in results if result is not None)
        failed = size.seeds - len(reached)
        ordered = [*reached, *[(None, None)] * failed]
        seconds_, steps = ordered[(size.seeds - 1) // 2]
        note = f"return >= {GOALS[name]}; {size.seeds} seeds"
        if reached:
            note += f": {reached[0][0]:.0f} to {reached[-1][0]:.0f} s"
        if steps is not None:
            note += f", {steps:,} env steps at the median"
        note += f"; {failed} failed within {size.limit:.0f} s"
        yield Row(f"{name}/simple_centroid", seconds_, "s", PUBLISHED[name], note=note)

    return measure


@functools.cache
def climb(seed: int, limit: float, device: str) -> dict[str, tuple[float, int] | None]:
    """Train with ``ppo=fast`` until every goal is reached or the time is up.

    The clock starts before the first iteration; a check is an iteration in which
    episodes ended. Returns the seconds and env steps for each goal.
    """
    algo = build(compose("train", [f"seed={seed}", *on(device)]))
    returns: list[float] = []
    result: dict[str, tuple[float, int] | None] = dict.fromkeys(GOALS)
    streaks = dict.fromkeys(GOALS, 0)
    began = time.perf_counter()
    while None in result.values() and time.perf_counter() - began < limit:
        sampled = algo.train()["env_runners"]
        finished = sampled.get(EPISODE_RETURNS, {}).get("agent")
        finished = (
            finished if isinstance(finished, list) else []
        )  # NaN without episodes
        returns = [*returns, *finished][-RETURN_WINDOW:]
        if not finished or len(returns) < RETURN_WINDOW:
            continue
        for name, goal in GOALS.items():
            reached = statistics.fmean(returns) >= goal
            streaks[name] = streaks[name] + 1 if reached else 0
            if streaks[name] >= 2 and result[name] is None:
                steps = int(sampled["num_env_steps_sampled_lifetime"])
                result[name] = time.perf_counter() - began, steps
    algo.stop()
    print(f"  seed {seed}: {result}", file=sys.stderr, flush=True)
    return result
