"""Summary of a sweep before it starts: size, detectable effect, duration."""

import math
from collections.abc import Mapping, Sequence

from marl_pool.sweeps import Grid, Trial
from marl_pool.training.jobs import Job
from marl_pool.training.sweep.power import smallest_difference

SEED = "seed"
"""Key whose values are repetitions; a cell is a combination of the other values."""
ALPHA, POWER = 0.05, 0.8


def size_of(
    grid: Grid, trials: Sequence[Trial], done: Mapping[str, int], job: Job
) -> str:
    """Describe the number of runs and steps, in total and remaining."""
    axes = " x ".join(f"{key} ({len(values)})" for key, values in grid.items())
    left = {t.name: job.total(t.config) - done[t.name] for t in trials}
    finished = sum(steps <= 0 for steps in left.values())
    started = sum(done[name] > 0 and steps > 0 for name, steps in left.items())
    total = sum(job.total(trial.config) for trial in trials)
    to_do = sum(max(steps, 0) for steps in left.values())
    return (
        f"{len(trials)} runs: {axes}\n"
        f"{finished} finished, {started} to resume, "
        f"{len(trials) - finished - started} to start\n"
        f"{total:,} {job.unit} in total, {to_do:,} remaining"
    )


def detectable(grid: Grid, seed_sd: float | None) -> str:
    """Describe the smallest difference between two cells that the sweep can detect.

    Args:
        grid: the number of its ``seed`` values is the number of runs of a cell.
        seed_sd: standard deviation of the return between seeds, if known.
    """
    seeds = len(grid.get(SEED, [None]))
    if seeds < 2:
        return "one seed per cell: differences between cells cannot be tested"
    smallest = smallest_difference(seeds, ALPHA, POWER)
    known = "" if seed_sd is None else f", {smallest * seed_sd:.3g} in the return"
    return (
        f"smallest difference between two cells detectable with {seeds} seeds each: "
        f"{smallest:.2f} standard deviations between seeds{known} "
        f"(two-sided t test, alpha {ALPHA}, power {POWER})"
    )


def duration_of(seconds: Sequence[float], unknown: int, concurrency: int) -> str:
    """Describe the estimated duration of the remaining runs.

    Args:
        seconds: of each remaining run, alone on its CPUs.
        unknown: remaining runs whose duration could not be estimated.
        concurrency: simultaneous runs.
    """
    if not seconds:
        return "the duration could not be estimated" if unknown else "nothing to do"
    # A run cannot be divided: the longest is a lower bound.
    longest = max([*seconds, sum(seconds) / concurrency])
    missing = f", without {unknown} runs that could not be timed" if unknown else ""
    return (
        f"about {hours(longest)} with {concurrency} at a time{missing} (estimated from "
        "a short part of each kind of run, alone on the machine)"
    )


def hours(seconds: float) -> str:
    """Format seconds in minutes or hours."""
    if seconds < 5400:
        return f"{max(math.ceil(seconds / 60), 1)} min"
    return f"{seconds / 3600:.1f} h"
