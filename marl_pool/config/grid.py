"""The trials of a sweep, composed and checked: of a grid, or of a search in ranges."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from marl_pool.config.batch import fit_batch
from marl_pool.config.checks import check, check_settings, show
from marl_pool.config.compose import compose_only
from marl_pool.envs.options import expand_counts
from marl_pool.options.overrides import MOST_VALUES, Override, parse, parse_any
from marl_pool.runs.sweep import (
    CHOICE,
    INT_UNIFORM,
    LOG_UNIFORM,
    UNIFORM,
    Grid,
    Space,
    naming,
    rounded,
    trial_name,
)
from marl_pool.training.jobs import with_absolute_folders
from marl_pool.training.settings import SweepSettings
from marl_pool.training.sweep.plan import MakeTrial, Plan, PlannedTrial, SearchPlan
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import print_line

STUDIES = {"train": "sweep", "fit": "sweep --verb fit"}
"""Primary configuration of a sweep, by the verb of its runs."""
SWEEP_KEYS = ("grid", "sweep")
"""Keys of a sweep that its trials lack."""
SET_BY = {"threads": "--cpus-per-trial", "resources.address": "--address"}
"""Keys of a trial that a sweep sets, and the flags that it sets them from."""
SEARCH_ONLY = ("sweep.trials", "sweep.metric", "sweep.asha")
"""Keys of a sweep that only a search has."""
CALL = re.compile(r"([^=]+)=(\w+)\((.*)\)", re.DOTALL)
"""An override whose value is the call of a function."""
MOST_PROBES = 64
"""Combinations that are tried until one with a value is valid."""
RANGES = (UNIFORM, LOG_UNIFORM, INT_UNIFORM)
EXPECTED = (
    f"{CHOICE}(a,b), {UNIFORM}(low,high), {LOG_UNIFORM}(low,high) or "
    f"{INT_UNIFORM}(low,high)"
)


def plan_sweep(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    verb: str = "train",
) -> Plan:
    """Compose and check every trial of a sweep.

    Args:
        overrides: ``key=value`` for all trials, ``key=value,value`` for the grid. A
            preset may have a grid; an override of one of its keys replaces the values
            of that key.
        config_dir: folder of the user's YAML files.
        verb: a key of `STUDIES`, the command that makes each run.

    Raises:
        InputError: bad syntax, no grid, or a trial with an unknown key or a wrong
            value, or two equal trials. The message names key and trial.
    """
    fixed, swept = _split(overrides, is_search=False)
    for key in (*swept, *(parse(text).key for text in fixed)):
        reject_search_key(key)
    composed = compose_only(STUDIES[verb], fixed, config_dir)
    grid = _whole_grid(composed, fixed, swept, verb)
    validate_free(fixed, grid)
    fixed = [text for text in fixed if parse(text).key not in grid]
    return plan_grid(grid, fixed, config_dir, verb)


def plan_grid(
    grid: Grid,
    fixed: Sequence[str],
    config_dir: str | Path | None = None,
    verb: str = "train",
) -> Plan:
    """Compose and check the trials of a grid; see `plan_sweep`."""
    settings, make = _composer(fixed, config_dir, verb)
    _validate_number("grid", math.prod(map(len, grid.values())))
    # Compose and check each combination.
    trials, names = [], dict[str, str]()
    for combination in product(*grid.values()):
        # Name the trial after its values in the grid.
        values = dict(zip(grid, combination, strict=True))
        trial = make(trial_name(values), values)
        # Two spellings of one configuration are the same run.
        expanded = trial.config.plain
        if "env" in expanded:
            expanded["env"] = expand_counts(expanded["env"])
        content = json.dumps(expanded, sort_keys=True)
        first = names.setdefault(content, trial.name)
        if first != trial.name:
            raise InputError(f"the trials {first} and {trial.name} are the same run")
        trials.append(trial)
    return Plan(grid, list(fixed), settings, trials)


def plan_search(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    verb: str = "train",
) -> SearchPlan:
    """Check a search: the ends of its ranges, and each of its choices.

    Args:
        overrides: ``key=value`` for all trials, and ranges such as
            ``key=log_uniform(1e-4,1e-2)``.
        config_dir: folder of the user's YAML files.
        verb: a key of `STUDIES`, the command that makes each run.

    Raises:
        InputError: bad syntax, no range, or an end or choice that no trial can have.
    """
    fixed, space = _split(overrides, is_search=True)
    _validate_space(space)
    validate_free(fixed, space)
    if grid := compose_only(STUDIES[verb], fixed, config_dir)["grid"]:
        raise InputError(f"grid: expected none with --search, got {show(grid)}")
    if not space:
        raise InputError(
            "--search: expected a range, such as ppo.lr=log_uniform(1e-4,1e-2) or "
            "pooling=choice(ada,max), got none"
        )
    plan = plan_space(space, fixed, config_dir, verb)
    for key, (kind, *ends) in space.items():
        if kind in (UNIFORM, LOG_UNIFORM):
            _validate_real(plan, key, kind, *ends)
    return plan


def plan_space(
    space: Space,
    fixed: Sequence[str],
    config_dir: str | Path | None = None,
    verb: str = "train",
) -> SearchPlan:
    """Check a search, without the trials that it proposed; see `plan_search`."""
    _validate_space(space)
    settings, make = _composer(fixed, config_dir, verb)
    _validate_number("sweep.trials", settings.trials)
    return SearchPlan(
        {},
        list(fixed),
        settings,
        [],
        space=space,
        probes=_probes(space, make),
        make=make,
    )


def _composer(
    fixed: Sequence[str], config_dir: str | Path | None, verb: str
) -> tuple[SweepSettings, MakeTrial]:
    """Return the settings of a sweep, and a function that composes its trials."""
    study = STUDIES[verb]
    composed = compose_only(study, fixed, config_dir)
    plain = check_settings(SweepSettings, composed["sweep"], "sweep")
    settings = SweepSettings(**plain)
    printed_lines = set[str]()  # what applies to many trials is printed once

    def make(name: str, values: Mapping[str, Any]) -> PlannedTrial:
        overrides = [Override(key, [value]) for key, value in values.items()]
        with naming(name):
            config = compose_only(study, [*fixed, *overrides], config_dir)
            # Remove the keys of the sweep from the trial's configuration.
            for key in SWEEP_KEYS:
                config.pop(key, None)
            config["threads"] = settings.cpus_per_trial
            typed: list[str | Override] = [*fixed, *overrides]
            fit, lines = fit_batch(study, check(verb, config, typed), typed, config_dir)
            for line in lines:
                if line not in printed_lines:
                    print_line(line)
                printed_lines.add(line)
            return PlannedTrial(name, dict(values), with_absolute_folders(fit))

    return settings, make


def reject_search_key(key: str) -> None:
    """Reject a key that only a search has."""
    if key in SEARCH_ONLY:
        raise InputError(f"{key}: expected --search, got a grid")


def validate_free(fixed: Sequence[str], swept: Iterable[str] = ()) -> None:
    """Reject keys that are not free, since the sweep sets them."""
    for key in (*swept, *(parse(text).key for text in fixed)):
        if key in SET_BY:
            raise InputError(f"{key}: a sweep sets it; use {SET_BY[key]}")


def _split(
    overrides: Sequence[str], is_search: bool
) -> tuple[list[str], dict[str, list[Any]]]:
    """Split overrides into those with one value, and the swept keys' values or ranges.

    In a search several values, such as ``key=a,b``, are a choice.
    """
    fixed, swept = list[str](), dict[str, list[Any]]()
    for text in overrides:
        if call := CALL.fullmatch(text):
            key, kind, arguments = call.groups()
            if kind in RANGES and not is_search:
                raise InputError(
                    f"{key}: expected values, such as a,b, got {kind}({arguments}); "
                    "a range needs --search"
                )
            if kind in RANGES:
                values = parse(f"{key}=[{arguments}]").value
                swept[key] = [kind, *(values if isinstance(values, list) else [values])]
                continue
            if is_search and kind not in (CHOICE, "range"):
                raise InputError(f"{key}: expected {EXPECTED}, got {kind}({arguments})")
        override = parse_any(text)
        if not override.swept:
            fixed.append(text)
            continue
        if not override.values:
            raise InputError(f"{override.key}: expected at least one value, got {text}")
        _validate_number(override.key, len(override.values))
        swept[override.key] = [*([CHOICE] if is_search else []), *override.values]
    return fixed, swept


def _validate_space(space: Space) -> None:
    """Reject invalid ranges: of an unknown kind, empty, or with log of 0 or less."""
    for key, (kind, *values) in space.items():
        text = f"{kind}({', '.join(map(show, values))})"
        if kind == CHOICE:
            if len(values) < 2 or any(values.count(value) > 1 for value in values):
                raise InputError(f"{key}: expected distinct values, got {text}")
            continue
        if kind not in RANGES:
            raise InputError(f"{key}: expected {EXPECTED}, got {text}")
        number = "an integer" if kind == INT_UNIFORM else "a number"
        types = (int,) if kind == INT_UNIFORM else (int, float)
        if len(values) != 2 or not all(
            type(value) in types and math.isfinite(value) for value in values
        ):
            raise InputError(
                f"{key}: expected {kind}(low,high), each {number}, got {text}"
            )
        low, high = values
        if low >= high:
            raise InputError(f"{key}: expected low < high, got {text}")
        if kind == LOG_UNIFORM and low <= 0:
            raise InputError(f"{key}: expected low > 0, got {text}")


def _probes(space: Space, make: MakeTrial) -> list[PlannedTrial]:
    """Compose a trial with each choice and with both ends of each range.

    A search skips values that do not fit each other, so a choice or end is valid if it
    fits some of the other keys' values.

    Raises:
        InputError: a choice or end that no trial can have.
    """
    ends = {key: values for key, (_, *values) in space.items()}
    probes: dict[str, PlannedTrial] = {}
    for key, values in ends.items():
        for value in values:
            probe = _first_valid({**ends, key: [value]}, make)
            probes.setdefault(probe.name, probe)
    return list(probes.values())


def _first_valid(ends: Mapping[str, Sequence[Any]], make: MakeTrial) -> PlannedTrial:
    """Return the first valid one of `MOST_PROBES` combinations."""
    reasons = []
    for combination in islice(product(*ends.values()), MOST_PROBES):
        values = dict(zip(ends, combination, strict=True))
        try:
            return make(trial_name(values), values)
        except InputError as error:
            reasons.append(error)
    raise reasons[0]


def _validate_real(plan: SearchPlan, key: str, kind: str, *ends: float) -> None:
    """Reject a range of numbers that are not whole for a key that takes integers."""
    low, high = ends
    value = rounded(low + (high - low) / math.pi, (kind, low, high))
    values = {**plan.probes[0].values, key: value}
    try:
        plan.make(trial_name({key: value}), values)
    except InputError as error:
        if float(value).is_integer():
            return  # it does not fit the values of other keys
        text = f"{kind}({show(low)}, {show(high)})"
        raise InputError(
            f"{error}, of {text}; for integers use {INT_UNIFORM}(low,high)"
        ) from error


def _validate_number(where: str, trials: int) -> None:
    if trials > MOST_VALUES:
        actual = f"{trials:,}" if where == "grid" else "more"
        raise InputError(
            f"{where}: expected at most {MOST_VALUES:,} trials, got {actual}"
        )


def _whole_grid(
    composed: Mapping[str, Any], fixed: list[str], swept: Grid, verb: str
) -> Grid:
    """Return the grid of the preset with the overrides of the command."""
    grid = composed["grid"]
    if not isinstance(grid, Mapping):
        raise InputError(f"grid: expected a mapping of keys to lists, got {show(grid)}")
    # An override with one value replaces the preset's list.
    single: Grid = {parse(text).key: [parse(text).value] for text in fixed}
    replacements: Grid = {key: single[key] for key in grid if key in single}
    full_grid: Grid = {**grid, **replacements, **swept}
    for key, values in full_grid.items():
        if not isinstance(key, str):
            raise InputError(f"grid: expected keys such as pooling, got {show(key)}")
        if not isinstance(values, list) or not values:
            raise InputError(
                f"grid.{key}: expected a list of at least one value, got {show(values)}"
            )
        if len({json.dumps(value) for value in values}) < len(values):
            raise InputError(f"{key}: expected distinct values, got {values}")
    # A sweep without a grid would be a single run.
    if not full_grid:
        preset = "adapool/figure4" if verb == "fit" else "adapool/figure5"
        raise InputError(
            f"sweep: expected a grid, such as seed=0,1,2 or experiment={preset}; "
            f"for a single run use `marl-pool {verb}`"
        )
    return full_grid
