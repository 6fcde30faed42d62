"""One trial, in a process of Ray Tune."""

import contextlib
import json
import shutil
import traceback
from pathlib import Path
from typing import Any, NamedTuple, Self

from ray import tune

from marl_pool.runs import CONFIG, Run, is_unused
from marl_pool.training.jobs import JOBS
from marl_pool.utils.errors import InputError

TRIAL = "trial"
"""Key of `TrialSettings` in Tune's configuration; a text, since Tune interprets some
mappings."""
REASON = "reason"
"""Key of a trial's result: the reason of its failure, or an empty text."""


class TrialSettings(NamedTuple):
    """Task of the process of a trial.

    Attributes:
        path: folder of the run.
        verb: train or fit.
        config: configuration of the run, as plain data.
        stop: path of a file whose existence ends training.
    """

    path: str
    verb: str
    config: dict[str, Any]
    stop: str

    def to_text(self) -> str:
        """Format as JSON."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the text of `to_text`."""
        return cls(*json.loads(text))

    @property
    def typed_config(self) -> Any:
        """Return the configuration as the dataclass of the verb."""
        return JOBS[self.verb].config.from_plain(self.config)


def run_trial(given: dict[str, Any]) -> None:
    """Start or resume the run of the `TrialSettings` in ``given``, and report its end.

    An exception is reported, not raised, because Tune would restart the trial. Only a
    trial whose process died is restarted; it resumes from its last checkpoint.
    """
    tune.report({REASON: _train(TrialSettings.from_text(given[TRIAL]))})


def _train(trial: TrialSettings) -> str:
    """Train the run of a trial; return the reason of a failure, or an empty text."""
    # Open the run, or create it if the trial starts for the first time.
    try:
        run = _open_or_create(Path(trial.path), trial.config, trial.verb)
        with run.lock(), contextlib.closing(run):
            try:
                function = JOBS[run.verb].load()
                function(run, trial.config, should_stop=Path(trial.stop).exists)
            except InputError:
                raise
            except Exception as error:
                # Report any failure, so that the other trials continue.
                file = run.write_error(traceback.format_exc())
                first = str(error).strip().partition("\n")[0]
                return f"{type(error).__name__}: {first}; traceback in {file}"
    except InputError as error:
        return str(error)
    return ""


def _open_or_create(path: Path, config: dict[str, Any], verb: str) -> Run:
    if (path / CONFIG).is_file():
        return Run.open(path)
    # A run that was killed before it wrote its configuration may be created again.
    if path.is_dir() and is_unused(path):
        shutil.rmtree(path)
    return Run.create(path, config, verb)
