"""One trial: an ordinary run, begun or resumed in a process of ray."""

import contextlib
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from marl_pool.runs.mirrored import mirrored, restore
from marl_pool.runs.run import CONFIG, Run
from marl_pool.training.jobs import JOBS, validate_same
from marl_pool.training.sweep.halving import EarlyStopping
from marl_pool.utils.errors import InputError


class Outcome(NamedTuple):
    """End of a trial."""

    reason: str = ""
    """Reason of a failure, or an empty text."""
    saved: int = 0
    """Amount of training up to the last checkpoint."""
    was_worse: bool = False
    """True if the trial was stopped early because others were better."""


def run_trial(
    path: Path,
    verb: str,
    config: dict[str, Any],
    stop: Path,
    search: tuple[str, bool] | None,
) -> Outcome:
    """Begin or resume the run of a trial, and report its end.

    An exception is reported, not raised: only a trial whose process died is tried
    again.

    Args:
        path: folder of the run.
        verb: train or fit.
        config: checked configuration, as plain data.
        stop: file whose existence ends training.
        search: metric of a search, and whether to stop early, or None for a grid.
    """
    early = EarlyStopping(*search, verb, config) if search else None

    def should_stop(run: Run) -> bool:
        return stop.exists() or (early is not None and early.should_stop(run))

    try:
        reason = _train(path, config, verb, should_stop)
    except InputError as error:
        reason = str(error)
    except KeyboardInterrupt:  # the signal reached this process, too: the run is saved
        reason = ""
    if reason or not (path / CONFIG).is_file():
        return Outcome(reason)
    return Outcome(
        saved=JOBS[verb].saved(Run.open(path)),
        was_worse=bool(early and early.was_worse),
    )


def _train(
    path: Path,
    config: dict[str, Any],
    verb: str,
    should_stop: Callable[[Run], bool],
) -> str:
    """Train the run of a trial; return the reason of a failure, or an empty text."""
    # The trial may have been stopped on another machine.
    storage = config["storage"]
    restore(path, storage)
    run = open_or_create(path, config, verb)
    with run.lock(), contextlib.closing(run):
        try:
            function = JOBS[verb].load()
            with mirrored(run, storage) as mirror:
                function(run, config, should_stop=lambda: should_stop(run))
            return mirror.problem if mirror else ""
        except InputError:
            raise
        except Exception as error:
            # Report any failure, so that the other trials continue.
            file = run.write_error(traceback.format_exc())
            first = str(error).strip().partition("\n")[0]
            return f"{type(error).__name__}: {first}; traceback in {file}"


def open_or_create(path: Path, config: Mapping[str, Any], verb: str) -> Run:
    """Open the run of a trial, or create it at the trial's first start.

    Raises:
        InputError: the folder has a run of another configuration, as a storage may.
    """
    if not (path / CONFIG).is_file():
        return Run.create(path, config, verb)
    run = Run.open(path)
    validate_same(run, verb, dict(config))
    return run
