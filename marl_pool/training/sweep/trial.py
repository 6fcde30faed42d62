"""One trial, in a process that Ray Tune gives it."""

import json
import shutil
import traceback
from pathlib import Path
from typing import Any

from ray import tune

from marl_pool.errors import InputError
from marl_pool.runs import CONFIG, Run, is_unused
from marl_pool.training.verbs import JOBS

JOB = "job"
"""The key under which Tune hands over a job, as JSON: Tune would read meaning into
some mappings."""
REASON = "reason"
"""What a trial reports at its end: why it failed, or nothing."""


def run_trial(given: dict[str, Any]) -> None:
    """Begin a run or go on with it, and report how it ended.

    An exception is reported, not raised: Tune would begin the trial again. What it
    begins again is a trial whose process died, and then training goes on from the
    last checkpoint.

    Args:
        given: `JOB`: the ``verb``, ``path`` of the run folder, ``config``, and the
            file ``stop`` that ends training when it exists.
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
        # Whatever it is, the other trials go on.
        file = run.write_error(traceback.format_exc())
        first = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first}; traceback in {file}"
    finally:
        run.close()
    return ""


def _open_or_create(path: Path, config: dict[str, Any], verb: str) -> Run:
    if (path / CONFIG).is_file():
        return Run.open(path)
    # Killed before it wrote its configuration, a run left at most these behind.
    if path.is_dir() and is_unused(path):
        shutil.rmtree(path)
    return Run.create(path, config, verb)
