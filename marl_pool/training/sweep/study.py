"""What a study is and what it could find, in words, before it starts."""

import math
from collections.abc import Mapping, Sequence

from marl_pool.sweeps import Grid, Trial
from marl_pool.training.sweep.power import smallest_difference
from marl_pool.training.verbs import Job

SEED = "seed"
"""The key whose values are repetitions; every combination of the others is a cell."""
ALPHA, POWER = 0.05, 0.8


def size_of(
    grid: Grid, trials: Sequence[Trial], done: Mapping[str, int], work: Job
) -> str:
    """How many runs and steps there are, in all and still to do."""
    axes = " x ".join(f"{key} ({len(values)})" for key, values in grid.items())
    left = {t.name: work.total(t.config) - done[t.name] for t in trials}
    finished = sum(steps <= 0 for steps in left.values())
    begun = sum(done[name] > 0 and steps > 0 for name, steps in left.items())
    total = sum(work.total(trial.config) for trial in trials)
    to_do = sum(max(steps, 0) for steps in left.values())
    return (
        f"{len(trials)} runs: {axes}\n"
        f"{finished} finished, {begun} to go on with, "
        f"{len(trials) - finished - begun} to begin\n"
        f"{total:,} {work.unit} in all, {to_do:,} to do"
    )


def detectable(grid: Grid, seed_sd: float | None) -> str:
    """The smallest difference between two cells that the study could detect.

    Args:
        grid: its ``seed`` says how many runs a cell has; one without it.
        seed_sd: standard deviation of the return between seeds, if known.
    """
    seeds = len(grid.get(SEED, [None]))
    if seeds < 2:
        return "one seed a cell: no difference between cells can be tested"
    smallest = smallest_difference(seeds, ALPHA, POWER)
    known = "" if seed_sd is None else f", {smallest * seed_sd:.3g} in the return"
    return (
        f"smallest difference between two cells that {seeds} seeds each would show: "
        f"{smallest:.2f} standard deviations between seeds{known} "
        f"(two-sided t test, alpha {ALPHA}, power {POWER})"
    )


def duration_of(seconds: Sequence[float], unknown: int, concurrency: int) -> str:
    """How many hours the runs take, so many at a time.

    Args:
        seconds: of each run that is to do, alone on its CPUs.
        unknown: runs to do whose time could not be measured.
        concurrency: runs at a time.
    """
    if not seconds:
        return "no run's time could be measured" if unknown else "nothing to do"
    # Runs can't be divided: the longest is a lower bound.
    longest = max([*seconds, sum(seconds) / concurrency])
    besides = f", and {unknown} that could not be measured" if unknown else ""
    return (
        f"about {hours(longest)} with {concurrency} at a time{besides} (reckoned from "
        "a short piece of each kind of run, alone on the machine)"
    )


def hours(seconds: float) -> str:
    """Seconds in words of a fitting size."""
    if seconds < 5400:
        return f"{max(math.ceil(seconds / 60), 1)} min"
    return f"{seconds / 3600:.1f} h"
