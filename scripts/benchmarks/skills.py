"""Benchmarks of presets: the time until a task is learned."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from benchmarks.common import Row, Size, on
from benchmarks.learning import median_of, reach
from marl_pool.config import compose
from marl_pool.runs.run import Run
from marl_pool.training.cloning.clone import clone
from marl_pool.training.cloning.settings import CloneConfig


@dataclass(frozen=True)
class Skill:
    """A mean return between random actions and a scripted policy.

    Attributes:
        overrides: of the verb; for ``train``, ``total_steps`` sets the learning rate.
        group: name of the group that learns.
        random: mean return of random actions, summed over the group.
        scripted: mean return of the scripted policy, likewise summed.
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
    "simple_centroid/converged": Skill(
        ("experiment=simple_centroid", "total_steps=1_000_000"),
        group="agent",
        random=-1.89,
        scripted=-0.23,
        fraction=0.9,
    ),
    # Summed over four agents.
    "simple_centroid/four_agents": Skill(
        ("experiment=simple_centroid", "env.counts=4-3-25", "total_steps=400_000"),
        group="agent",
        random=-7.62,
        scripted=-0.93,
        fraction=0.75,
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
SHORT = {
    "train": (
        *("env.max_steps=4", "ppo.num_envs=4", "ppo.batch_size=48"),
        "ppo.minibatch_size=null",
    ),
    "clone": (
        *("env.max_steps=20", "clone.episodes=8", "clone.validation_episodes=4"),
        "clone.rounds=0",
        *("clone.iteration_batches=2", "clone.play_episodes=4", "total_batches=8"),
    ),
}
"""Overrides at the tiny size, by verb."""


def time_to_skill(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure seconds until a task's `Skill` is reached at two checks in a row."""

    def measure(size: Size) -> Iterator[Row]:
        skill = SKILLS[name]
        if size.tiny:
            short = SHORT[skill.verb]
            skill = replace(skill, overrides=(*skill.overrides, *short))
        seeds = min(size.seeds, skill.seeds)
        limit = min(size.limit, skill.limit) if size.tiny else skill.limit
        teach = learn if skill.verb == "train" else imitate
        results = [teach(skill, seed, limit, size.device) for seed in range(seeds)]
        reached = sorted(result for result in results if result is not None)
        took, steps = median_of(results)
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

    Returns the seconds and env steps; see `reach`.
    """
    overrides = [*skill.overrides, f"seed={seed}", "threads=1", *on(device)]
    config = compose("train", overrides)
    # At `total_steps` the learning rate is zero.
    most_steps, goals = config["total_steps"], {"goal": skill.goal}
    return reach(config, skill.group, goals, limit, most_steps)["goal"]


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

        clone(run, CloneConfig.from_plain(config), should_stop)
        run.close()
    print(f"  seed {seed}: {result}", file=sys.stderr, flush=True)
    return result
