"""Estimates before a sweep starts: size, detectable difference, duration."""

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ray.rllib.utils.metrics import ALL_MODULES, ENV_RUNNER_RESULTS, LEARNER_RESULTS

from marl_pool.compiled.choice import use_kernels
from marl_pool.runs.sweep import Grid
from marl_pool.training.jobs import Job
from marl_pool.training.ppo.config import algorithm_config
from marl_pool.training.ppo.learner import LEARN_SECONDS
from marl_pool.training.ppo.runner import SAMPLE_SECONDS
from marl_pool.training.settings import RunConfig, TrainConfig
from marl_pool.training.supervised.fit import duration, price
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.training.sweep.plan import PlannedTrial
from marl_pool.utils.devices import torch_threads, without_denormals

SEED = "seed"
"""Key whose values are repetitions; a cell combines values of the other keys."""
ALPHA, POWER = 0.05, 0.8
"""Probabilities of a false detection, and of detecting a difference."""
STEPS = 32
"""Timed steps of each environment; an iteration has more."""
IRRELEVANT = ("seed", "total_steps", "time_limit", "env_timeout", "checkpoint")
"""Keys that do not affect the throughput of a trial."""


def size_of(
    grid: Grid, trials: Sequence[PlannedTrial], done: Mapping[str, int], job: Job
) -> str:
    """Describe the number of runs and steps, in total and remaining."""
    axes = " x ".join(f"{key} ({len(values)})" for key, values in grid.items())
    remaining_steps = {t.name: job.total(t.config) - done[t.name] for t in trials}
    finished = sum(steps <= 0 for steps in remaining_steps.values())
    started = sum(
        done[name] > 0 and steps > 0 for name, steps in remaining_steps.items()
    )
    total = sum(job.total(trial.config) for trial in trials)
    to_do = sum(max(steps, 0) for steps in remaining_steps.values())
    return (
        f"{len(trials)} runs: {axes}\n"
        f"{finished} finished, {started} to resume, "
        f"{len(trials) - finished - started} to start\n"
        f"{total:,} {job.unit} in total, {to_do:,} remaining"
    )


def detectable(grid: Grid, seed_sd: float | None) -> str:
    """Describe the smallest difference between two cells that the sweep can detect.

    Args:
        grid: its number of ``seed`` values is the number of runs of a cell.
        seed_sd: standard deviation of the return between seeds, if known.
    """
    seeds = len(grid.get(SEED, [None]))
    if seeds < 2:
        return "one seed per cell: differences between cells cannot be tested"
    smallest = smallest_difference(seeds)
    effect = "" if seed_sd is None else f", {smallest * seed_sd:.3g} in the return"
    return (
        f"smallest difference between two cells detectable with {seeds} seeds each: "
        f"{smallest:.2f} standard deviations between seeds{effect} "
        f"(two-sided t test, alpha {ALPHA}, power {POWER})"
    )


def smallest_difference(seeds: int) -> float:
    """Return the smallest difference of two means that a two-sided t test detects.

    The test is Student's for two samples of the same size and variance. Under a
    difference d, in standard deviations, its statistic is noncentral t with
    2 (n - 1) degrees of freedom and noncentrality d sqrt(n / 2).

    Source: Cohen (1988), Statistical Power Analysis for the Behavioral Sciences,
    section 2.

    Args:
        seeds: n, the size of each sample.

    Returns:
        d, in standard deviations between seeds; infinite below two seeds.
    """
    from scipy import optimize, stats

    if seeds < 2:
        return math.inf
    # Reject equality where the statistic exceeds this value.
    freedom = 2 * (seeds - 1)
    critical = stats.t.isf(ALPHA / 2, freedom)

    def excess_power(noncentrality: float) -> float:
        statistic = stats.nct(freedom, noncentrality)
        return float(statistic.sf(critical) + statistic.cdf(-critical)) - POWER

    # The power tends to 1 far above the critical value.
    high = critical
    while excess_power(high) < 0:
        high *= 2
    noncentrality: float = optimize.brentq(excess_power, 0.0, high, xtol=1e-9)
    return noncentrality / math.sqrt(seeds / 2)


def time_left(
    trials: Sequence[PlannedTrial], done: Mapping[str, int], concurrency: int, job: Job
) -> str:
    """Time a short part of each kind of run, and describe the remaining duration."""
    # Trials that differ only in seed and length are equally fast: time only one.
    kinds = {cell_of(trial.config): trial.config for trial in trials}
    measured = {cell: measure(config) for cell, config in kinds.items()}
    seconds = [
        min(
            speed.seconds_for(job.total(trial.config) - done.get(trial.name, 0)),
            trial.config.time_limit or math.inf,
        )
        for trial in trials
        if (speed := measured[cell_of(trial.config)])
    ]
    return duration_of(seconds, len(trials) - len(seconds), concurrency)


def duration_of(seconds: Sequence[float], unknown: int, concurrency: int) -> str:
    """Describe the estimated duration of the remaining runs.

    ``seconds`` has the duration of each run alone; ``unknown`` runs have no estimate.
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


class Throughput(NamedTuple):
    """Training speed of a trial."""

    steps: int
    """Steps of one iteration, over all environments."""
    seconds: float
    """Duration of one iteration."""
    start: float = 0.0
    """Seconds before the first iteration runs at that speed."""

    def seconds_for(self, steps: int) -> float:
        """Return the duration of the iterations that complete ``steps`` steps."""
        iterations = math.ceil(steps / self.steps)
        return self.start + iterations * self.seconds if iterations > 0 else 0.0


def cell_of(config: RunConfig) -> str:
    """Return a string that is equal for configurations of the same throughput."""
    settings = config.plain.items()
    kept = {key: value for key, value in settings if key not in IRRELEVANT}
    return json.dumps(kept, sort_keys=True)


def measure(config: RunConfig) -> Throughput | None:
    """Measure the throughput of a trial; None if it cannot be trained.

    Ray must be initialized.
    """
    try:
        with (
            torch_threads(config.threads),
            use_kernels(config.kernels, config.device),
            without_denormals(),
        ):
            if isinstance(config, TrainConfig):
                return _time_ppo(config)
            # For a fit, the duration of an epoch includes its share of the tests.
            assert isinstance(config, FitConfig)
            with tempfile.TemporaryDirectory() as folder:
                cost = price(config, Path(folder))
            return Throughput(1, cost.seconds / (cost.folds * cost.epochs))
    except Exception:
        # The trial itself reports the failure later, and the other trials continue.
        return None


def _time_ppo(config: TrainConfig) -> Throughput:
    """Train for a short iteration and extrapolate to a whole one.

    The short iteration has `STEPS` steps of every environment and one pass over them.
    Sampling time is scaled by the steps, learning time by the rows and passes; the
    remaining time of an iteration is constant.
    """
    ppo, length = config.ppo, algorithm_config(config).rollout_fragment_length
    short_length = min(STEPS, length)
    batch = ppo.batch_size // length * short_length
    minibatch = None if ppo.minibatch_size is None else min(ppo.minibatch_size, batch)
    short = replace(ppo, num_epochs=1, batch_size=batch, minibatch_size=minibatch)
    begin = time.perf_counter()
    algo = algorithm_config(replace(config, ppo=short)).build_algo()
    try:
        # Time the second iteration; the first one is slower.
        algo.train()
        middle = time.perf_counter()
        result = algo.train()
        elapsed = time.perf_counter() - middle
    finally:
        algo.stop()
    # Extrapolate to the steps and passes of a whole iteration.
    sampling = float(result[ENV_RUNNER_RESULTS][SAMPLE_SECONDS])
    learning = float(result[LEARNER_RESULTS][ALL_MODULES][LEARN_SECONDS])
    overhead = max(elapsed - sampling - learning, 0.0)
    seconds = (sampling + learning * ppo.num_epochs) * length / short_length + overhead
    runners = max(1, config.resources.num_env_runners)
    # The extra time of the first iteration counts as startup, like building.
    start = max(middle - begin - elapsed, 0.0)
    return Throughput(length * ppo.num_envs * runners, seconds, start)
