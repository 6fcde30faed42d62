"""Ray Tune runs the trials; this tells it which, with what, and when to stop."""

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
from marl_pool.training.settings import SweepSettings
from marl_pool.training.sweep.board import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    Board,
)
from marl_pool.training.sweep.trial import JOB, REASON, run_trial
from marl_pool.training.verbs import JOBS, Job

MAX_DEATHS = 2
"""How often a trial whose process died begins again, from its last checkpoint."""
ELSEWHERE = "its folder is not on this machine: nodes of a cluster must share the disk"
"""Why a trial failed that ended well, but on another disk than this one."""
POLL_SECONDS = 1.0
"""Between two looks at the metrics of the trials that run."""
DRIVER_ENV = {
    # Our handler lets trials finish their iteration.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Runs log their own metrics.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    # The new output prints a banner whatever the verbosity.
    "RAY_AIR_NEW_OUTPUT": "0",
}
WORKER_ENV = {
    # A user's own modules are found from where the command is given.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


def run_trials(
    sweep: Sweep,
    trials: Sequence[Trial],
    settings: SweepSettings,
    concurrency: int,
    board: Board,
    on_end: Callable[[], None],
) -> None:
    """Run trials, or go on with them, until each has finished or failed.

    Args:
        sweep: whose folder takes their runs.
        trials: those to run.
        settings: CPUs and GPUs of each.
        concurrency: trials at a time.
        board: is told what happens.
        on_end: called whenever a trial has ended.

    Raises:
        KeyboardInterrupt: after the first Ctrl-C, once the trials that ran have
            finished their iteration and saved themselves; at once after a second one.
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
    watch = _Watch(sweep, jobs, board, on_end, stop)
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
    """What a trial takes: its main process, its runners, its learners."""
    gpus = settings.gpus_per_trial
    resources = config.get("resources")
    if resources is None:
        # Ray hides the GPUs from a process that asks for none.
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
    """Sees what Tune does: tells the board, and ends the experiment on Ctrl-C.

    Attributes:
        awaited: trials that ran when Ctrl-C was pressed and have not ended since;
            None: it was not pressed.
    """

    def __init__(
        self,
        sweep: Sweep,
        jobs: Mapping[str, Trial],
        board: Board,
        on_end: Callable[[], None],
        stop: Path,
    ) -> None:
        self.sweep, self.jobs, self.board = sweep, jobs, board
        self.on_end, self.stop = on_end, stop
        self.awaited: set[str] | None = None
        self.work = JOBS[sweep.verb]
        self._looked = 0.0

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks, to restore an experiment, which we never do.
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No result ends a trial."""
        return False

    def stop_all(self) -> bool:
        """Whether Ctrl-C was pressed and nothing has to be waited for any more."""
        return self.awaited is not None and not self.awaited

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C finish the iterations; a second one stops at once."""

        def press(number: int, frame: FrameType | None) -> None:
            if self.awaited is not None:
                raise KeyboardInterrupt
            self.awaited = set(self.board.named(RUNNING))
            self.stop.touch()

        try:
            before = signal.signal(signal.SIGINT, press)
        except ValueError:  # not the main thread: signals are someone else's
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        """Mark it."""
        if self.awaited is None:
            self.board.change(self._ours(trial).name, RUNNING)

    def on_trial_complete(
        self, iteration: int, trials: Any, trial: Any, **_: Any
    ) -> None:
        """Mark how it ended."""
        reason = (trial.last_result or {}).get(REASON, "")
        self._end(self._ours(trial), reason)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        """Mark a trial whose process died too often."""
        self._end(
            self._ours(trial),
            f"its process died {MAX_DEATHS + 1} times, as it does without memory",
        )

    def on_step_end(self, iteration: int, trials: Any, **_: Any) -> None:
        """Look how far the trials are, now and then."""
        if self.board.clock() - self._looked < POLL_SECONDS:
            return
        self._looked = self.board.clock()
        running = set(self.board.named(RUNNING))
        self.board.advance(
            {
                trial.name: self.work.logged(self.sweep.run(trial))
                for trial in self.jobs.values()
                if trial.name in running
            }
        )

    def _end(self, trial: Trial, reason: str) -> None:
        run = self.sweep.run(trial)
        if run is None:
            reason = reason or ELSEWHERE
        steps = self.work.logged(run)
        self.board.advance({trial.name: steps})
        state = FAILED if reason else STOPPED
        if not reason and steps >= self.work.total(trial.config):
            state = FINISHED
        self.board.change(trial.name, state, reason)
        if self.awaited is not None:
            self.awaited.discard(trial.name)
        self.on_end()

    def _ours(self, trial: Any) -> Trial:
        return self.jobs[trial.config[JOB]]


def saved(work: Job, run: Run | None) -> int:
    """What a run has done when it goes on: up to its last checkpoint.

    A run that was killed after its last iteration, before it saved itself, is not
    finished. One whose checkpoints somebody removed, but not its policy or result, is
    what its metrics say.
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
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
