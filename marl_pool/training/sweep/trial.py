"""One trial, in a process of Ray Tune."""

import contextlib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune

from marl_pool.runs import CONFIG, Run
from marl_pool.storage.runs import mirrored, restore
from marl_pool.training.jobs import JOBS
from marl_pool.utils.errors import InputError

TRIAL = "trial"
"""Key of a trial's name in Tune's configuration."""
REASON = "reason"
"""Key of a trial's result: the reason of its failure, or an empty text."""
SAVED = "saved"
"""Key of a trial's result: amount of training up to its last checkpoint."""


def run_trial(
    given: dict[str, Any],
    *,
    folder: Path,
    verb: str,
    configs: Mapping[str, dict[str, Any]],
    stop: Path,
) -> None:
    """Start or resume the run of a trial, and report its end.

    An exception is reported, not raised, because Tune would restart the trial. Only a
    trial whose process died is restarted; it resumes from its last checkpoint.

    Args:
        given: Tune's configuration, with the trial's name as `TRIAL`.
        folder: folder of all runs.
        verb: train or fit.
        configs: configuration of each trial by name, as plain data.
        stop: file whose existence ends training.
    """
    name = given[TRIAL]
    path = folder / name
    reason = _train(path, configs[name], verb, stop)
    saved = 0 if reason else JOBS[verb].saved(Run.open(path))
    tune.report({REASON: reason, SAVED: saved})


def _train(path: Path, config: dict[str, Any], verb: str, stop: Path) -> str:
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
                    function(run, config, should_stop=stop.exists)
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
    if (path / CONFIG).is_file():
        return Run.open(path)
    return Run.create(path, config, verb)
