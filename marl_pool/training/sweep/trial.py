"""One trial, in a process of Ray Tune."""

import contextlib
import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune

from marl_pool.options import names
from marl_pool.runs.mirrored import mirrored, restore
from marl_pool.runs.run import CONFIG as RUN_CONFIG
from marl_pool.runs.run import Run
from marl_pool.training.jobs import JOBS, Job, validate_same
from marl_pool.utils.errors import InputError

TRIAL = "trial"
"""Key of a trial's name in Tune's configuration."""
REASON = "reason"
"""Key of a trial's result: the reason of its failure, or an empty text."""
SAVED = "saved"
"""Key of a trial's result: amount of training up to its last checkpoint."""
CONFIG = "config"
"""Key of the configuration of a trial that a search proposes, in Tune's."""
UNKNOWN = "unknown"
"""Key of a trial's result: message on a metric that it lacks, or an empty text."""
SCORE, SHARE = "score", "share"
"""Keys of the results of a search's trial: the best score so far, higher is better, and
the percentage of training done."""


def run_trial(
    params: dict[str, Any],
    *,
    folder: Path,
    verb: str,
    configs: Mapping[str, dict[str, Any]],
    stop: Path,
    metric: str | None = None,
) -> None:
    """Start or resume the run of a trial, and report its end.

    An exception is reported, not raised, because Tune would restart the trial. Only a
    trial whose process died is restarted; it resumes from its last checkpoint.

    Args:
        params: Tune's configuration, with the trial's name as `TRIAL`.
        folder: folder of all runs.
        verb: train or fit.
        configs: configuration of each trial by name, as plain data.
        stop: file whose existence ends training. `stop_file` adds a name, to end one
            trial.
        metric: what a search optimizes, which is reported during training; see
            `score_of`. None for a grid.
    """
    name = params[TRIAL]
    config = params[CONFIG] if CONFIG in params else configs[name]
    path = folder / name
    reporter = _Reporter(metric, verb, config, (stop, stop_file(stop, name)))
    reason = _train(path, config, verb, reporter)
    last: dict[str, Any] = {REASON: reason, SAVED: 0}
    if not reason:
        run = Run.open(path)
        last[SAVED] = JOBS[verb].saved(run)
        last |= reporter.result(run) or {}
    tune.report(last | {UNKNOWN: reporter.unknown})


def stop_file(stop: Path, name: str) -> Path:
    """Return the file whose existence ends one trial."""
    return stop.with_name(f"{stop.name}-{name}")


def score_of(rows: Iterable[Mapping[str, Any]], metric: str) -> float | None:
    """Return the best value of a metric; None without a finite one.

    Args:
        rows: rows of ``metrics.csv``.
        metric: a column; with a minus in front its values are negated.

    Raises:
        InputError: the rows have no such column.
    """
    sign, column = (-1, metric[1:]) if metric.startswith("-") else (1, metric)
    values = []
    for row in rows:
        if column not in row:
            raise names.unknown("sweep.metric", column, row)
        values.append(sign * float(row[column]))
    return max(filter(math.isfinite, values), default=None)


def share_of(job: Job, row: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the percentage of training that is done at a row of metrics."""
    run_config = job.config.from_plain(config)
    return 100 * job.count(row, run_config) // job.limit(run_config)


@dataclass
class _Reporter:
    """Report the progress of a search's trial to Tune, percent by percent.

    A metric that the first row lacks stops the trial, and ``unknown`` is the message.
    """

    metric: str | None
    verb: str
    config: Mapping[str, Any]
    stops: Sequence[Path]
    reported_share: int = -1
    unknown: str = ""

    def result(self, run: Run) -> dict[str, float] | None:
        """Return score and share; None before the first score."""
        rows = run.metrics.readable_rows() if self.metric else []
        if not rows:
            return None
        share = share_of(JOBS[self.verb], rows[-1], self.config)
        try:
            score = score_of(rows, str(self.metric))
        except InputError as error:
            self.unknown = str(error)
            return None
        return None if score is None else {SCORE: score, SHARE: share}

    def should_stop(self, run: Run) -> bool:
        """Report, if a percent was completed; return True if a stop is requested."""
        row = run.metrics.last
        share = -1
        if self.metric and row:
            share = share_of(JOBS[self.verb], row, self.config)
        if share > self.reported_share and (result := self.result(run)):
            self.reported_share = share
            tune.report(result)
        return bool(self.unknown) or any(path.exists() for path in self.stops)


def _train(path: Path, config: dict[str, Any], verb: str, reporter: _Reporter) -> str:
    """Train the run of a trial; return the reason of a failure, or an empty text."""
    # Open the run, or create it if the trial starts for the first time.
    try:
        storage = config.get("storage")
        # The trial may have been stopped on another machine.
        restore(path, storage)
        run = _open_or_create(path, config, verb)
        with run.lock(), contextlib.closing(run):
            try:
                function = JOBS[run.verb].load()
                with mirrored(run, storage) as mirror:
                    stop = partial(reporter.should_stop, run)
                    function(run, config, should_stop=stop)
                return mirror.problem if mirror else ""
            except InputError:
                raise
            except Exception as error:
                # Report any failure, so that the other trials continue.
                file = run.write_error(traceback.format_exc())
                first = str(error).strip().partition("\n")[0]
                return f"{type(error).__name__}: {first}; traceback in {file}"
    except InputError as error:
        return str(error)


def _open_or_create(path: Path, config: dict[str, Any], verb: str) -> Run:
    if not (path / RUN_CONFIG).is_file():
        return Run.create(path, config, verb)
    run = Run.open(path)
    # The storage may have had a run of other values under this name.
    validate_same(run, verb, config)
    return run
