"""Scheduling of the trials by Ray Tune."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ray import tune

from marl_pool.runs import Run
from marl_pool.sweeps import Sweep, Trial
from marl_pool.training.jobs import JOBS, Job
from marl_pool.training.settings import SweepSettings
from marl_pool.training.sweep.progress import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    TrialTable,
)
from marl_pool.training.sweep.trial import JOB, REASON, run_trial

MAX_DEATHS = 2
"""Restarts of a trial whose process died, from its last checkpoint."""
NOT_SHARED = "its folder is not on this machine: nodes of a cluster must share the disk"
"""Reason of a failure: the trial ended well, but on another disk."""
POLL_SECONDS = 1.0
"""Interval at which the metrics of the running trials are read."""
DRIVER_ENV = {
    # `_Watch` lets trials finish their iteration.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Runs log their own metrics.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    # The new output prints a banner whatever the verbosity.
    "RAY_AIR_NEW_OUTPUT": "0",
}
WORKER_ENV = {
    # Plug-ins are imported from the working directory of the command.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


def run_trials(
    sweep: Sweep,
    trials: Sequence[Trial],
    settings: SweepSettings,
    concurrency: int,
    table: TrialTable,
    on_end: Callable[[], None],
) -> None:
    """Start or resume trials, until each has finished or failed.

    Args:
        sweep: whose folder holds the runs.
        trials: unfinished trials.
        settings: CPUs and GPUs of each trial.
        concurrency: simultaneous trials.
        table: progress display.
        on_end: called after the end of each trial.

    Raises:
        KeyboardInterrupt: after the first Ctrl-C, once the running trials have finished
            their iteration and saved a checkpoint; at once after a second one.
    """
    root = sweep.path.absolute()
    stop, scratch = root / ".stop", root / ".tune"
    jobs = {
        json.dumps(
            {
                "path": str(root / sweep.run_path(trial).relative_to(sweep.path)),
                "verb": sweep.verb,
                "config": trial.config,
                "stop": str(stop),
            }
        ): trial
        for trial in trials
    }
    watch = _Watch(sweep, jobs, table, on_end, stop)
    _clear(stop, scratch)
    try:
        with _environment(DRIVER_ENV), watch.interruptible():
            tune.Tuner(
                tune.with_resources(run_trial, lambda given: _bundles(given, settings)),
                param_space={JOB: tune.grid_search(list(jobs))},
                tune_config=tune.TuneConfig(
                    max_concurrent_trials=concurrency,
                    trial_name_creator=lambda trial: trial.trial_id,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name="tune",
                    storage_path=str(scratch),
                    failure_config=tune.FailureConfig(max_failures=MAX_DEATHS),
                    callbacks=[watch],
                    stop=watch,
                    verbose=0,
                ),
            ).fit()
    finally:
        _clear(stop, scratch)
    if watch.awaited is not None:
        raise KeyboardInterrupt


def bundles(
    config: Mapping[str, Any], settings: SweepSettings
) -> list[dict[str, float]]:
    """List the resources of a trial: its main process, its runners, its learners."""
    gpus = settings.gpus_per_trial
    resources = config.get("resources")
    if resources is None:
        # Ray hides the GPUs from a process that requests none.
        gpus = gpus or (config["device"] != "cpu")
        return [{"CPU": float(settings.cpus_per_trial), "GPU": float(gpus)}]
    if not resources["num_learners"]:
        gpus = max(gpus, resources["num_gpus_per_learner"])
    if not resources["num_env_runners"]:
        gpus = max(gpus, resources["num_gpus_per_env_runner"])
    first = {"CPU": float(settings.cpus_per_trial), "GPU": float(gpus)}
    return [
        first,
        *(
            {"CPU": 1.0, "GPU": float(resources[f"num_gpus_per_{kind}"])}
            for kind in ("env_runner", "learner")
            for _ in range(resources[f"num_{kind}s"])
        ),
    ]


def _bundles(given: Mapping[str, Any], settings: SweepSettings) -> Any:
    config = json.loads(given[JOB])["config"]
    return tune.PlacementGroupFactory(
        [
            {kind: count for kind, count in bundle.items() if count}
            for bundle in bundles(config, settings)
        ]
    )


class _Watch(tune.Callback, tune.Stopper):
    """Update the progress display, and end the experiment after Ctrl-C.

    Attributes:
        awaited: trials that were running at Ctrl-C and have not ended since; None
            before Ctrl-C.
    """

    def __init__(
        self,
        sweep: Sweep,
        jobs: Mapping[str, Trial],
        table: TrialTable,
        on_end: Callable[[], None],
        stop: Path,
    ) -> None:
        self.sweep, self.jobs, self.table = sweep, jobs, table
        self.on_end, self.stop = on_end, stop
        self.awaited: set[str] | None = None
        self.work = JOBS[sweep.verb]
        self._last_poll = 0.0

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks to restore experiments, a feature not used here.
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False: no result ends a trial."""
        return False

    def stop_all(self) -> bool:
        """Return whether all trials have ended after Ctrl-C."""
        return self.awaited is not None and not self.awaited

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let trials finish their iteration at Ctrl-C; stop at once at the second."""

        def press(number: int, frame: FrameType | None) -> None:
            if self.awaited is not None:
                raise KeyboardInterrupt
            self.awaited = set(self.table.named(RUNNING))
            self.stop.touch()

        try:
            previous = signal.signal(signal.SIGINT, press)
        except ValueError:  # only the main thread may handle signals
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        """Mark the trial as running."""
        if self.awaited is None:
            self.table.change(self._trial_of(trial).name, RUNNING)

    def on_trial_complete(
        self, iteration: int, trials: Any, trial: Any, **_: Any
    ) -> None:
        """Record the end of a trial."""
        reason = (trial.last_result or {}).get(REASON, "")
        self._end(self._trial_of(trial), reason)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        """Record a trial whose process died too often."""
        self._end(
            self._trial_of(trial),
            f"its process died {MAX_DEATHS + 1} times, perhaps for lack of memory",
        )

    def on_step_end(self, iteration: int, trials: Any, **_: Any) -> None:
        """Read the progress of the running trials every `POLL_SECONDS`."""
        if self.table.clock() - self._last_poll < POLL_SECONDS:
            return
        self._last_poll = self.table.clock()
        running = set(self.table.named(RUNNING))
        self.table.advance(
            {
                trial.name: self.work.logged(self.sweep.run(trial))
                for trial in self.jobs.values()
                if trial.name in running
            }
        )

    def _end(self, trial: Trial, reason: str) -> None:
        run = self.sweep.run(trial)
        if run is None:
            reason = reason or NOT_SHARED
        steps = self.work.logged(run)
        self.table.advance({trial.name: steps})
        state = FAILED if reason else STOPPED
        if not reason and steps >= self.work.total(trial.config):
            state = FINISHED
        self.table.change(trial.name, state, reason)
        if self.awaited is not None:
            self.awaited.discard(trial.name)
        self.on_end()

    def _trial_of(self, trial: Any) -> Trial:
        return self.jobs[trial.config[JOB]]


def saved(work: Job, run: Run | None) -> int:
    """Return the progress from which a run resumes, that of its last checkpoint.

    A run that was killed between its last iteration and its last checkpoint is not
    finished. For a run with a policy whose checkpoints were deleted it is the progress
    in its metrics.
    """
    if run is None:
        return 0
    if not work.result and not run.checkpoints():
        return work.logged(run) if run.policy_dir.is_dir() else 0
    return work.saved(run)


def _clear(stop: Path, scratch: Path) -> None:
    stop.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
