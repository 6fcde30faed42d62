"""One trial, in a process of Ray Tune."""

import json
import shutil
import traceback
from pathlib import Path
from typing import Any

from ray import tune

from marl_pool.runs import CONFIG, Run, is_unused
from marl_pool.training.jobs import JOBS
from marl_pool.utils.errors import InputError

JOB = "job"
"""Key of a job in Tune's configuration; a JSON text, since Tune interprets some
mappings."""
REASON = "reason"
"""Key of a trial's result: the reason of its failure, or an empty text."""


def run_trial(given: dict[str, Any]) -> None:
    """Start or resume a run, and report how it ended.

    An exception is reported, not raised, because Tune would restart the trial. Only a
    trial whose process died is restarted; it resumes from its last checkpoint.

    Args:
        given: `JOB` with the ``verb``, the ``path`` of the run folder, the ``config``,
            and the path of a file ``stop`` whose existence ends training.
    """
    job = json.loads(given[JOB])
    tune.report({REASON: _train(job)})


def _train(job: dict[str, Any]) -> str:
    try:
        run = _open_or_create(Path(job["path"]), job["config"], job["verb"])
        with run.lock():
            return _train_run(run, job)
    except InputError as error:
        return str(error)


def _train_run(run: Run, job: dict[str, Any]) -> str:
    try:
        work = JOBS[run.verb].load()
        work(run, job["config"], should_stop=Path(job["stop"]).exists)
    except InputError:
        raise
    except Exception as error:
        # Whatever the failure is, the other trials continue.
        file = run.write_error(traceback.format_exc())
        first = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first}; traceback in {file}"
    finally:
        run.close()
    return ""


def _open_or_create(path: Path, config: dict[str, Any], verb: str) -> Run:
    if (path / CONFIG).is_file():
        return Run.open(path)
    # A run that was killed before it wrote its configuration may be created again.
    if path.is_dir() and is_unused(path):
        shutil.rmtree(path)
    return Run.create(path, config, verb)
