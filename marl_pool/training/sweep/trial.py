"""One trial: an ordinary run, begun or resumed in a process of ray."""

import traceback
from pathlib import Path
from typing import NamedTuple

from marl_pool.runs.run import CONFIG, Run
from marl_pool.training.jobs import JOBS, begun, perform
from marl_pool.training.settings import RunConfig
from marl_pool.training.sweep.halving import EarlyStopping
from marl_pool.utils.errors import InputError, first_line


class Outcome(NamedTuple):
    """End of a trial."""

    reason: str = ""
    """Reason of a failure, or an empty string."""
    saved: int = 0
    """Amount of training up to the last checkpoint."""
    was_worse: bool = False
    """True if the trial was stopped early because others were better."""


def run_trial(
    path: Path, config: RunConfig, stop: Path, search: tuple[str, bool] | None
) -> Outcome:
    """Begin or resume the run of a trial, and report its end.

    An exception is reported, not raised: only a trial whose process died is tried
    again.

    Args:
        path: folder of the run.
        config: checked configuration.
        stop: file whose existence ends training.
        search: metric of a search, and whether to stop early; None for a grid.
    """
    early = EarlyStopping(*search, config) if search else None

    def should_stop(run: Run) -> bool:
        return stop.exists() or (early is not None and early.should_stop(run))

    try:
        # The trial may have been stopped on another machine.
        run = begun(path, config) or Run.create(path, config.plain, config.verb)
        try:
            reason = perform(run, config, should_stop=lambda: should_stop(run))
        except InputError:
            raise
        except Exception as error:
            # Report any failure, so that the other trials continue.
            file = run.write_error(traceback.format_exc())
            text = f"{type(error).__name__}: {first_line(error)}"
            reason = f"{text}; traceback in {file}"
    except InputError as error:
        reason = str(error)
    except KeyboardInterrupt:  # the signal also reached this process: the run is saved
        reason = ""
    if reason or not (path / CONFIG).is_file():
        return Outcome(reason)
    was_worse = early is not None and early.was_worse
    return Outcome(saved=JOBS[config.verb].saved(Run.open(path)), was_worse=was_worse)
