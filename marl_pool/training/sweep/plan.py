"""Plan of a sweep: its trials, and their common settings."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marl_pool.runs.sweep import TRIALS, Grid, Space, Sweep, Trial, proposal_name
from marl_pool.training.jobs import validate_same
from marl_pool.training.settings import SweepSettings

MakeTrial = Callable[[str, Mapping[str, Any]], Trial]
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
        common: settings that all trials share, as plain data.
    """

    grid: Grid
    overrides: list[str]
    settings: SweepSettings
    trials: list[Trial]
    space: Space | None = None
    common: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def examples(self) -> list[Trial]:
        """Trials of every kind, to validate and time before any trial runs."""
        return self.trials

    def share(self, **config: Any) -> None:
        """Give all trials the same settings."""
        self.common |= config
        for trial in (*self.trials, *self.examples):
            trial.config.update(config)


@dataclass(kw_only=True)
class SearchPlan(Plan):
    """A checked hyperparameter search.

    Attributes:
        space: key → range.
        probes: trials with both ends of each range and with each choice.
        make: composes a trial from its name and values.
    """

    space: Space
    probes: list[Trial]
    make: MakeTrial

    @property
    def examples(self) -> list[Trial]:
        """Trials of every kind; they are not run themselves."""
        return self.probes

    def add(self, values: Mapping[str, Any]) -> Trial:
        """Add the trial with the next number."""
        trial = self.make(proposal_name(len(self.trials)), values)
        trial.config.update(self.common)
        self.trials.append(trial)
        return trial


@contextmanager
def prepared(sweep: Sweep, plan: Plan, dry_run: bool) -> Iterator[None]:
    """Complete a plan with earlier proposals, storage and a folder of shared data.

    Raises:
        InputError: a run was made by another verb or with other settings, or the
            storage cannot be used.
    """
    from marl_pool.runs.mirrored import mirror_of, restore, restore_proposals

    config = plan.examples[0].config
    storage = config.get("storage")
    if storage is not None and not dry_run:
        sweep.mirror = mirror_of(sweep.path, storage)
        sweep.mirror.probe()
        restore_proposals(sweep, sweep.mirror)
        plan.share(storage=f"{sweep.mirror.url}/{TRIALS}")
    # A search continues with its earlier proposals.
    if isinstance(plan, SearchPlan):
        for proposal in sweep.proposals():
            plan.add(proposal.values)
    # Trials from other machines or earlier sessions are in the storage.
    for trial in plan.trials if sweep.mirror else ():
        restore(sweep.run_path(trial), trial.config.get("storage"))
    with tempfile.TemporaryDirectory() as scratch:
        # Trials share data that one of them generates; a dry run leaves none behind.
        if config.get("data_dir", scratch) is None:
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
            validate_same(run, sweep.verb, trial.config)
