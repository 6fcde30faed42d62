"""Summary of a sweep before it starts: size, detectable effect, duration."""

import math
from collections.abc import Mapping, Sequence

from marl_pool.sweeps import Grid, Trial
from marl_pool.training.jobs import Job
from marl_pool.training.supervised.fit import duration

SEED = "seed"
"""Key whose values are repetitions; a cell is a combination of the other values."""
ALPHA, POWER = 0.05, 0.8


def size_of(
    grid: Grid, trials: Sequence[Trial], done: Mapping[str, int], job: Job
) -> str:
    """Describe the number of runs and steps, in total and remaining."""
    axes = " x ".join(f"{key} ({len(values)})" for key, values in grid.items())
    # Sort the trials by what is left of them.
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

    ``seconds`` are those of each run alone; ``unknown`` runs have no estimate.
    """
    if not seconds:
        return "the duration could not be estimated" if unknown else "nothing to do"
    # A run cannot be divided: the longest is a lower bound.
    longest = max([*seconds, sum(seconds) / concurrency])
    missing = f", without {unknown} runs that could not be timed" if unknown else ""
    return (
        f"about {duration(longest)} with {concurrency} at a time{missing} (estimated "
        "from a short part of each kind of run, alone on the machine)"
    )


def smallest_difference(seeds: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """Return the smallest difference of two means that a two-sided t test detects.

    The test is Student's for two samples of the same size and variance. Under a
    difference d, in standard deviations, its statistic is noncentral t with
    2 (n - 1) degrees of freedom and noncentrality d sqrt(n / 2).

    Source: Cohen (1988), Statistical Power Analysis for the Behavioral Sciences,
    section 2.

    Args:
        seeds: n, the size of each sample.
        alpha: probability of a false detection, in (0, 1).
        power: probability of detecting the difference, in (alpha, 1).

    Returns:
        d, in standard deviations between seeds; infinite below two seeds.
    """
    from scipy import optimize, stats

    if seeds < 2:
        return math.inf
    # Reject equality where the statistic exceeds this value.
    freedom = 2 * (seeds - 1)
    critical = stats.t.isf(alpha / 2, freedom)

    def excess_power(noncentrality: float) -> float:
        statistic = stats.nct(freedom, noncentrality)
        return float(statistic.sf(critical) + statistic.cdf(-critical)) - power

    # The power tends to 1 far above the critical value.
    high = critical
    while excess_power(high) < 0:
        high *= 2
    noncentrality: float = optimize.brentq(excess_power, 0.0, high, xtol=1e-9)
    return noncentrality / math.sqrt(seeds / 2)
