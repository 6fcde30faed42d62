"""The trials of a sweep: a grid of values, composed and checked one by one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf import DictConfig

from marl_pool import names
from marl_pool.config.checks import check, check_settings, show
from marl_pool.config.compose import (
    compose_only,
    compose_unresolved,
    parse,
    parse_any,
    resolve,
)
from marl_pool.config.sections import VERBS
from marl_pool.envs.options import counted
from marl_pool.errors import InputError
from marl_pool.sweeps import Grid, Sweep, Trial, trial_name
from marl_pool.training.settings import SweepSettings
from marl_pool.training.verbs import JOBS

STUDIES = {"train": "sweep", "fit": "sweep_fit"}
"""What a study of a verb's runs is composed as."""
OWN = ("grid", "sweep")
"""Keys of a study that its trials don't have."""
SET_BY = {"threads": "--cpus-per-trial", "resources.address": "--address"}
"""Keys of a trial that a sweep sets, and what it sets them from."""
RUN_CONTROL = (
    *("total_steps", "time_limit", "checkpoint", "resources", "threads"),
    *("data_dir", "download"),
)
"""Keys, with those below them, that change how far a run goes, not what it is."""


class Plan(NamedTuple):
    """A sweep, checked.

    Attributes:
        grid: key → values.
        overrides: of every trial, as they were typed.
        trials: every combination of the grid, the last key varying fastest.
        settings: of the sweep itself, keyword arguments of ``SweepSettings``.
    """

    grid: Grid
    overrides: list[str]
    trials: list[Trial]
    settings: dict[str, Any]


def plan_sweep(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    verb: str = "train",
) -> Plan:
    """Compose and check every trial of a sweep.

    Args:
        overrides: ``key=value`` for all trials, ``key=value,value`` for the grid, in
            Hydra's syntax. A preset may hold a grid of its own; an override of one of
            its keys takes the place of the key's values.
        config_dir: a folder of the user's own YAML files.
        verb: whose runs the trials are, a key of `STUDIES`.

    Raises:
        InputError: bad syntax, no grid, or a trial with an unknown key or a wrong
            value, or one that equals another. The message names key and trial.
    """
    fixed, swept = _split(overrides)
    composed, _ = compose_only(STUDIES[verb], fixed, config_dir)
    grid = _whole_grid(composed, fixed, swept, verb)
    for key in (*grid, *(parse(text).key_or_group for text in fixed)):
        if key in SET_BY:
            raise InputError(f"{key}: a sweep sets it; use {SET_BY[key]}")
    fixed = [text for text in fixed if parse(text).key_or_group not in grid]
    return plan_grid(grid, fixed, config_dir, verb)


def plan_grid(
    grid: Grid,
    fixed: Sequence[str],
    config_dir: str | Path | None = None,
    verb: str = "train",
) -> Plan:
    """Compose and check the trials of a grid; see `plan_sweep`."""
    compositions = _Compositions(fixed, config_dir, verb)
    settings = check_settings(
        SweepSettings, resolve(STUDIES[verb], compositions[()])["sweep"], "sweep"
    )
    trials = []
    for combination in product(*grid.values()):
        values = dict(zip(grid, combination, strict=True))
        trials.append(_trial(values, compositions, settings))
    _refuse_twins(trials)
    return Plan(grid, list(fixed), trials, settings)


def refuse_other_runs(sweep: Sweep, plan: Plan) -> None:
    """Refuse a folder in which a trial's place is taken by another run.

    Runs of the same settings are adopted, also those that `marl-pool train` made.

    Raises:
        InputError: a run's settings are not those of the trial, or it went further.
    """
    for trial in plan.trials:
        run = sweep.run(trial)
        if run is None:
            continue
        if run.verb != sweep.verb:
            raise InputError(f"{run.path} is no run of {sweep.verb} but of {run.verb}")
        try:
            # The run's own configuration may name no class that the trial's does not.
            with names.trust(names.texts_in(trial.config), run.path):
                differing = differences(
                    trial.config, run.config, list(plan.grid), sweep.verb
                )
        except names.UntrustedError:
            raise
        except InputError as error:
            raise InputError(f"{run.path}: {error}") from error
        job = JOBS[sweep.verb]
        rows = [] if run.metrics_problem() else run.metrics.readable_rows()
        limit = job.total(trial.config)
        counts = [job.count(row, trial.config) for row in rows[-2:]]
        if len(counts) > 1 and counts[0] >= limit:
            differing.append(f"{counts[1]} {job.unit} instead of {limit}")
        if differing:
            raise InputError(
                f"{run.path} is another run than the sweep's: {'; '.join(differing)}"
            )


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checked configuration in the one form that all its spellings share."""
    return {**config, "env": counted(config["env"])} if "env" in config else {**config}


def differences(
    wanted: Mapping[str, Any],
    found: Mapping[str, Any],
    swept: Sequence[str],
    verb: str = "train",
) -> list[str]:
    """How a run that exists differs from the trial that it should be.

    Args:
        wanted: the trial's configuration, checked.
        found: the run's, as it was written, maybe by an earlier version.
        swept: keys of the grid, which always count; of others, run control does not.
        verb: whose runs they are.

    Returns:
        One text for each key that differs; keys that only one of them knows don't
        count, unless a default of today gives them another value.
    """
    known = check(verb, _known(found, wanted))
    left, right = dict(_flat(canonical(known))), dict(_flat(canonical(wanted)))
    tops = {key.split(".")[0] for key in swept}
    controls = (*RUN_CONTROL, *JOBS[verb].controls)
    control = [key for key in controls if key not in tops]
    return [
        f"{key}={show(left.get(key))} instead of {show(value)}"
        for key, value in right.items()
        if key.split(".")[0] not in control and left.get(key) != value
    ]


class _Compositions(dict[tuple[str, ...], DictConfig]):
    """What the overrides and a choice of groups compose to, each made once.

    Hydra takes a tenth of a second, and a grid of a hundred trials has few choices.
    """

    def __init__(self, overrides: Sequence[str], config_dir: Any, verb: str) -> None:
        super().__init__()
        self.overrides, self.config_dir, self.verb = overrides, config_dir, verb

    def __missing__(self, chosen: tuple[str, ...]) -> DictConfig:
        lines = [*self.overrides, *chosen]
        study = STUDIES[self.verb]
        self[chosen], _ = compose_unresolved(study, lines, self.config_dir)
        return self[chosen]


def _split(overrides: Sequence[str]) -> tuple[list[str], Grid]:
    """Fixed overrides, and the grid of the others."""
    fixed, swept = [], {}
    for text in overrides:
        override = parse_any(text)
        if not override.is_sweep_override():
            fixed.append(text)
            continue
        key = override.key_or_group
        if override.package or getattr(override.value(), "shuffle", False):
            raise InputError(f"{text!r}: expected key=value,value in a fixed order")
        try:
            texts = list(override.sweep_string_iterator())
        except HydraException as error:
            raise InputError(
                f"{key}: expected values, such as a,b or range(0,3), got {text!r}"
            ) from error
        swept[key] = [parse(f"{key}={each}").value() for each in texts]
    return fixed, swept


def _whole_grid(
    composed: Mapping[str, Any], fixed: list[str], swept: Grid, verb: str
) -> Grid:
    """The preset's grid, with the keys that the command sets in place of its own."""
    grid = composed["grid"]
    if not isinstance(grid, Mapping):
        raise InputError(f"grid: expected a mapping of keys to lists, got {show(grid)}")
    single: Grid = {parse(text).key_or_group: [parse(text).value()] for text in fixed}
    whole: Grid = {**grid}
    whole |= {key: single[key] for key in grid if key in single}
    whole |= swept
    for key, values in whole.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"grid.{key}: expected a list, got {show(values)}")
        if len({json.dumps(value) for value in values}) < len(values):
            raise InputError(f"{key}: a value stands twice in the grid: {values}")
    if not whole:
        preset = "figure4" if verb == "fit" else "figure5"
        raise InputError(
            f"sweep: expected a grid, such as seed=0,1,2 or experiment={preset}; "
            f"for a single run use `marl-pool {verb}`"
        )
    return whole


def _trial(
    values: Mapping[str, Any], compositions: _Compositions, settings: Mapping[str, Any]
) -> Trial:
    name = trial_name(values)
    verb = compositions.verb
    groups = [key for key in values if key in VERBS[verb].config_groups]
    try:
        chosen = compositions[tuple(_choice(key, values[key]) for key in groups)]
        keys = {key: values[key] for key in values if key not in groups}
        config = resolve(STUDIES[verb], chosen, keys)
        for key in OWN:
            config.pop(key, None)
        config["threads"] = settings["cpus_per_trial"]
        return Trial(name, dict(values), _resolved(check(verb, config)))
    except InputError as error:
        raise InputError(f"{error} (trial {name})") from error


def _resolved(config: dict[str, Any]) -> dict[str, Any]:
    """Folders of frozen policies in full, as training writes them."""
    if config.get("fixed"):
        from marl_pool.training.fixed import with_absolute_folders

        config["fixed"] = with_absolute_folders(config["fixed"])
    return config


def _choice(group: str, option: Any) -> str:
    if not isinstance(option, str):
        raise InputError(f"{group}: expected the name of an option, got {show(option)}")
    return f"{group}={option}"


def _refuse_twins(trials: Sequence[Trial]) -> None:
    seen: dict[str, str] = {}
    for trial in trials:
        content = json.dumps(canonical(trial.config), sort_keys=True)
        if content in seen:
            raise InputError(
                f"the trials {seen[content]} and {trial.name} are the same run"
            )
        seen[content] = trial.name


def _known(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """``found`` without the keys that ``wanted`` has not heard of."""
    return {
        key: _known(value, wanted[key])
        if isinstance(value, Mapping) and isinstance(wanted[key], Mapping)
        else value
        for key, value in found.items()
        if key in wanted
    }


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield path + key, value
