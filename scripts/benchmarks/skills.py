"""Benchmarks of presets: the time until a task is learned."""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from benchmarks.common import Row, Size, build, on
from marl_pool.config import compose
from marl_pool.runs.run import Run
from marl_pool.training.cloning.clone import clone
from marl_pool.training.ppo.runner import EPISODE_RETURNS
from marl_pool.training.ppo.train import RETURN_WINDOW


@dataclass(frozen=True)
class Skill:
    """A mean return between random actions and a scripted policy.

    Attributes:
        overrides: of the verb; for ``train``, ``total_steps`` sets the learning rate.
        group: name of the group that learns.
        random: mean return of random actions.
        scripted: mean return of the scripted policy.
        fraction: of the way from the one to the other.
        seeds: maximal number of seeds.
        limit: seconds after which a seed has failed.
        verb: ``train``, or ``clone`` for the most likely actions of a student.
    """

    overrides: tuple[str, ...]
    group: str
    random: float
    scripted: float
    fraction: float
    seeds: int = 5
    limit: float = 240.0
    verb: Literal["train", "clone"] = "train"

    @property
    def goal(self) -> float:
        """Mean training return to reach."""
        return self.random + self.fraction * (self.scripted - self.random)


SKILLS = {
    "simple_tag": Skill(
        ("experiment=simple_tag",),
        group="predator",
        random=26.0,
        scripted=275.0,
        fraction=0.8,
    ),
    # Summed over three agents; the script is greedy assignment by distance.
    "simple_spread": Skill(
        ("experiment=simple_spread",),
        group="agent",
        random=-79.0,
        scripted=-26.1,
        fraction=1.0,
        limit=600.0,
    ),
    "boxworld": Skill(
        ("experiment=boxworld_clone", "clone.play_every=1"),
        group="agent",
        random=0.5,
        scripted=11.0,
        fraction=0.8,
        verb="clone",
    ),
    "boxworld_pixels": Skill(
        ("experiment=boxworld_clone", "env.observation=pixels", "clone.play_every=1"),
        group="agent",
        random=0.5,
        scripted=11.0,
        fraction=0.8,
        verb="clone",
    ),
    "cartpole": Skill(
        ("experiment=cartpole_channels_clone", "clone.play_every=1"),
        group="agent",
        random=25.0,
        scripted=600.0,
        fraction=0.8,
        verb="clone",
    ),
}
"""Skills by task, each with the preset that is made for it."""


def time_to_skill(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure seconds until a task's `Skill` is reached at two checks in a row."""
    skill = SKILLS[name]

    def measure(size: Size) -> Iterator[Row]:
        seeds = min(size.seeds, skill.seeds)
        limit = min(size.limit, skill.limit) if size.tiny else skill.limit
        teach = learn if skill.verb == "train" else imitate
        results = [teach(skill, seed, limit, size.device) for seed in range(seeds)]
        reached = sorted(result for result in results if result is not None)
        middle = (seeds - 1) // 2
        took, steps = reached[middle] if middle < len(reached) else (None, None)
        note = [f"return >= {skill.goal:.3g}", f"{seeds} seeds"]
        if reached:
            note[-1] += f": {reached[0][0]:.0f} to {reached[-1][0]:.0f} s"
        if steps is not None:
            unit = "env steps" if skill.verb == "train" else "batches"
            note += [f"{steps:,} {unit} at the median"]
        failed = seeds - len(reached)
        note += [f"{failed} failed within {limit:.0f} s or the steps of the run"]
        scale = f"random actions {skill.random:g}, scripted {skill.scripted:g}"
        yield Row(f"time_to_skill/{name}", took, "s", scale, note="; ".join(note))

    return measure


def learn(
    skill: Skill, seed: int, limit: float, device: str
) -> tuple[float, int] | None:
    """Train until the goal is reached; None if the run or time ended first.

    The clock starts before the first iteration; a check is an iteration in which
    episodes ended. Returns the seconds and env steps.
    """
    overrides = [*skill.overrides, f"seed={seed}", "threads=1", *on(device)]
    config = compose("train", overrides)
    algo = build(config)
    returns: deque[float] = deque(maxlen=RETURN_WINDOW)
    result, streak, steps, began = None, 0, 0, time.perf_counter()
    # At `total_steps` the learning rate is zero.
    while (
        result is None
        and steps < config["total_steps"]
        and time.perf_counter() - began < limit
    ):
        sampled = algo.train()["env_runners"]
        steps = int(sampled["num_env_steps_sampled_lifetime"])
        finished = sampled.get(EPISODE_RETURNS, {}).get(skill.group)
        if not isinstance(finished, list):  # a NaN without episodes
            continue
        returns.extend(finished)
        full = len(returns) == returns.maxlen
        streak = streak + 1 if full and statistics.fmean(returns) >= skill.goal else 0
        if streak == 2:
            result = time.perf_counter() - began, steps
    algo.stop()
    print(f"  seed {seed}: {result}", file=sys.stderr, flush=True)
    return result


def imitate(
    skill: Skill, seed: int, limit: float, device: str
) -> tuple[float, int] | None:
    """Clone until the student's return is the goal; None if the run or time ended.

    The clock starts before the teacher plays. Returns the seconds and batches.
    """
    overrides = [*skill.overrides, f"seed={seed}", "threads=1", *on(device)]
    config = compose("clone", overrides)
    result, began = None, time.perf_counter()
    with TemporaryDirectory() as folder:
        run = Run.create(Path(folder, "run"), config, "clone")

        def should_stop() -> bool:
            nonlocal result
            rows, seconds = run.rows(), time.perf_counter() - began
            if rows and rows[-1]["return_mean"] >= skill.goal:
                result = seconds, int(rows[-1]["batches"])
            return result is not None or seconds >= limit

        clone(run, config, should_stop)
        run.close()
    print(f"  seed {seed}: {result}", file=sys.stderr, flush=True)
    return result
