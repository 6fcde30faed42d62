"""Plan of a sweep: its trials, and their common settings."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marl_pool.runs.sweep import (
    TRIALS,
    Grid,
    Space,
    Sweep,
    Trial,
    proposal_name,
    stopped_early,
)
from marl_pool.training.jobs import config_of, has_ended, validate_same
from marl_pool.training.settings import RunConfig, SweepSettings
from marl_pool.training.supervised.settings import FitConfig


@dataclass(frozen=True)
class PlannedTrial(Trial):
    """A trial that can be trained.

    Attributes:
        config: checked configuration of the run.
    """

    config: RunConfig


MakeTrial = Callable[[str, Mapping[str, Any]], PlannedTrial]
"""Composes a trial from its name and values."""


@dataclass
class Plan:
    """A checked sweep.

    Attributes:
        grid: key → values; empty for a search.
        overrides: overrides common to all trials, as typed.
        settings: settings of the execution.
        trials: all combinations of the grid, the last key varying fastest; for a
            search, the proposed trials.
        space: key → range of a search, or None for a grid.
        common: settings that all trials share, by key.
    """

    grid: Grid
    overrides: list[str]
    settings: SweepSettings
    trials: list[PlannedTrial]
    space: Space | None = None
    common: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def examples(self) -> list[PlannedTrial]:
        """Trials of every kind, to validate and time before any trial runs."""
        return self.trials

    def share(self, **settings: Any) -> None:
        """Give all trials the same settings."""
        self.common |= settings
        for trials in (self.trials, self.examples):
            trials[:] = map(self._with_common, trials)

    def _with_common(self, trial: PlannedTrial) -> PlannedTrial:
        return replace(trial, config=replace(trial.config, **self.common))


@dataclass(kw_only=True)
class SearchPlan(Plan):
    """A checked hyperparameter search.

    Attributes:
        space: key → range.
        probes: trials with both ends of each range and with each choice.
        make: composes a trial from its name and values.
    """

    space: Space
    probes: list[PlannedTrial]
    make: MakeTrial

    @property
    def examples(self) -> list[PlannedTrial]:
        """Trials of every kind; they are not run themselves."""
        return self.probes

    def add(self, values: Mapping[str, Any]) -> PlannedTrial:
        """Add the trial with the next number."""
        trial = self.make(proposal_name(len(self.trials)), values)
        self.trials.append(self._with_common(trial))
        return self.trials[-1]


@contextmanager
def prepared(sweep: Sweep, plan: Plan, dry_run: bool) -> Iterator[None]:
    """Complete a plan with earlier proposals, storage and a folder of shared data.

    Raises:
        InputError: a run was made by another verb or with other settings, or the
            storage has another sweep or cannot be used.
    """
    from marl_pool.runs.mirrored import (
        mirror_of,
        restore,
        restore_proposals,
        validate_same_sweep,
    )

    config = plan.examples[0].config
    if config.storage is not None and not dry_run:
        sweep.mirror = mirror_of(sweep.path, config.storage)
        validate_same_sweep(sweep, sweep.mirror)
        sweep.mirror.probe()
        restore_proposals(sweep, sweep.mirror)
        plan.share(storage=f"{sweep.mirror.url}/{TRIALS}")
    # A search continues with its earlier proposals.
    if isinstance(plan, SearchPlan):
        for proposal in sweep.proposals():
            plan.add(proposal.values)
    # Trials from other machines or earlier sessions are in the storage.
    for trial in plan.trials if sweep.mirror else ():
        restore(sweep.run_path(trial), trial.config.storage)
    with tempfile.TemporaryDirectory() as scratch:
        # Trials share data that one of them generates; a dry run leaves none behind.
        if isinstance(config, FitConfig) and config.data_dir is None:
            data = Path(scratch) if dry_run else (sweep.path / "data").absolute()
            plan.share(data_dir=str(data))
        validate_runs(sweep, plan)
        yield


def validate_runs(sweep: Sweep, plan: Plan) -> None:
    """Reject a plan whose settings differ from the sweep's runs.

    Raises:
        InputError: a run was made by another verb, or with other settings.
    """
    # Defaults and presets may have changed since the runs were made.
    for trial in plan.trials:
        if run := sweep.run(trial):
            validate_same(run, trial.config)


def is_done(sweep: Sweep, plan: Plan) -> bool:
    """Return True unless a trial has to be resumed, as its time limit ended it."""
    ended = stopped_early(sweep.proposals())
    runs = [sweep.run(trial) for trial in plan.trials if trial.name not in ended]
    return all(run is not None and has_ended(run, config_of(run)) for run in runs)
