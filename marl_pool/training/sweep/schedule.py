"""Scheduling of the trials by Ray Tune."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from typing_extensions import override

from marl_pool.runs.mirrored import restore
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import Sweep, Trial
from marl_pool.training.jobs import JOBS, Job
from marl_pool.training.settings import ResourceSettings, SweepSettings, TrainConfig
from marl_pool.training.signals import Interruptible
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.training.sweep.progress import TrialState, TrialTable
from marl_pool.training.sweep.trial import (
    CONFIG,
    REASON,
    SAVED,
    TRIAL,
    UNKNOWN,
    run_trial,
    stop_file,
)
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.training.sweep.search import TrialSearch

MAX_DEATHS = 2
"""Restarts of a trial whose process died, from its last checkpoint."""
NOT_SHARED = (
    "its folder is not on this machine: nodes of a cluster must share the disk, or the "
    "sweep needs --storage"
)
"""Reason of a failure: the trial ended well, but on another disk."""
POLL_SECONDS = 1.0
"""Interval at which the metrics of the running trials are read."""
DRIVER_ENV = {
    # `Interruptible` handles Ctrl-C.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Runs log their own metrics.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    # A search's trial that fails or is stopped early on has no score.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # The new output prints a banner whatever the verbosity.
    "RAY_AIR_NEW_OUTPUT": "0",
}


def run_trials(
    sweep: Sweep,
    trials: Sequence[Trial],
    settings: SweepSettings,
    concurrency: int,
    table: TrialTable,
    on_end: Callable[[], None],
    search: "TrialSearch | None" = None,
) -> None:
    """Start or resume unfinished trials, until each has finished or failed.

    As many trials as ``concurrency`` run at the same time, each with the CPUs and GPUs
    of ``settings``. A search proposes more trials; ``on_end`` is called after the end
    of each trial.

    Raises:
        InputError: the runs lack the metric of the search.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the running trials have
            finished their iteration and saved a checkpoint; at once after a second one.
    """
    # Trials stop when the file `stop` exists, on whatever machine they run.
    root = sweep.path.absolute()
    stop, scratch = root / ".stop", root / ".tune"
    all_trials = trials if search is None else search.trials
    monitor = _TrialMonitor(sweep, all_trials, table, on_end, stop)
    configs = {trial.name: trial.config for trial in trials}
    # Tune passes the parameters to each process, beside the name of its trial.
    trainable = tune.with_parameters(
        run_trial,
        folder=root / "trials",
        verb=sweep.verb,
        configs=configs,
        stop=stop,
        metric=search and search.metric,
    )

    def placement(params: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        plain = params[CONFIG] if CONFIG in params else configs[params[TRIAL]]
        config = JOBS[sweep.verb].config.from_plain(plain)
        return tune.PlacementGroupFactory(
            [
                {kind: count for kind, count in bundle.items() if count}
                for bundle in bundles(config, settings)
            ]
        )

    # A grid is known, a search proposes its trials one by one.
    algorithm: dict[str, Any] = {}
    space = {TRIAL: tune.grid_search(list(configs))}
    if search is not None:
        from marl_pool.training.sweep.search import EarlyStopping, Proposer

        num_trials = len(trials) + max(0, settings.trials - len(search.proposals))
        space, proposer = {}, Proposer(search, trials, stop)
        algorithm = {"search_alg": proposer, "num_samples": num_trials}
        if settings.asha:
            algorithm["scheduler"] = EarlyStopping(
                search, lambda name: stop_file(stop, name).touch()
            )
    # Remove the leftovers of a killed sweep.
    _clear(stop, scratch)
    try:
        # Let Tune run the trials, each as soon as its CPUs and GPUs are free. A trial
        # whose process died starts again, and resumes from its last checkpoint.
        with _environment(DRIVER_ENV), monitor.interrupt:
            tune.Tuner(
                tune.with_resources(trainable, placement),
                param_space=space,
                tune_config=tune.TuneConfig(
                    **algorithm,
                    max_concurrent_trials=concurrency,
                    trial_name_creator=lambda trial: trial.trial_id,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name="tune",
                    storage_path=str(scratch),
                    failure_config=tune.FailureConfig(max_failures=MAX_DEATHS),
                    callbacks=[monitor],
                    stop=monitor,
                    verbose=0,
                ),
            ).fit()
    finally:
        _clear(stop, scratch)
    if monitor.unknown:
        raise InputError(monitor.unknown)
    monitor.interrupt.raise_if_requested()


def bundles(
    config: TrainConfig | FitConfig, settings: SweepSettings
) -> list[dict[str, float]]:
    """Return ``CPU`` and ``GPU`` of each process: main, runners, learners."""
    gpus = settings.gpus_per_trial
    # Ray hides the GPUs from a process that requests none.
    own_gpu = config.device != "cpu"
    # A fit has no other processes.
    resources = (
        ResourceSettings() if isinstance(config, FitConfig) else config.resources
    )
    # Without separate processes, learners and runners use the main one's GPUs.
    if not resources.num_learners:
        gpus = max(gpus, resources.num_gpus_per_learner)
    if not resources.num_env_runners:
        gpus = max(gpus, resources.num_gpus_per_env_runner)
    if not (resources.num_learners and resources.num_env_runners):
        gpus = gpus or own_gpu
    main = {"CPU": float(settings.cpus_per_trial), "GPU": float(gpus)}
    runner = {"CPU": 1.0, "GPU": float(resources.num_gpus_per_env_runner)}
    learner = {"CPU": 1.0, "GPU": float(resources.num_gpus_per_learner)}
    # Tune runs the trial itself in the first bundle.
    return [
        main,
        *[runner] * resources.num_env_runners,
        *[learner] * resources.num_learners,
    ]


@dataclass(eq=False)
class _TrialMonitor(tune.Callback, tune.Stopper):
    """Update the progress display, and end the experiment after Ctrl-C.

    After Ctrl-C, or if a search's metric is ``unknown``, ``awaited`` has the trials
    that are still running.
    """

    sweep: Sweep
    trials: Sequence[Trial]
    table: TrialTable
    on_end: Callable[[], None]
    stop: Path
    interrupt: Interruptible = field(default_factory=Interruptible, init=False)
    awaited: set[str] | None = field(default=None, init=False)
    unknown: str = field(default="", init=False)
    _last_poll: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.job = JOBS[self.sweep.verb]

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks to restore experiments, a feature not used here.
        return {}

    @override
    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False  # no result ends a trial

    @override
    def setup(self, *_: Any, **info: Any) -> None:
        # Tune has just replaced the handler of SIGUSR1, and would kill the trials.
        with contextlib.suppress(ValueError):  # only the main thread may handle signals
            self.interrupt.listen()

    @override
    def stop_all(self) -> bool:
        return self.awaited is not None and not self.awaited

    @override
    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        if self.awaited is None:
            sweep_trial = self._trial_of(trial)
            # A search may vary the length of its trials.
            self.table.rows[sweep_trial.name].total = self.job.total(sweep_trial.config)
            self.table.change(sweep_trial.name, TrialState.RUNNING)

    @override
    def on_trial_complete(
        self, iteration: int, trials: Any, trial: Any, **_: Any
    ) -> None:
        result = trial.last_result or {}
        self.unknown = self.unknown or result.get(UNKNOWN, "")
        if self.unknown:
            self._stop_all()
        self._end(self._trial_of(trial), result.get(REASON, ""), result.get(SAVED, 0))

    @override
    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        self._end(
            self._trial_of(trial),
            f"its process died {MAX_DEATHS + 1} times, perhaps for lack of memory",
        )

    @override
    def on_step_end(self, iteration: int, trials: Any, **_: Any) -> None:
        if self.interrupt.requested:
            self._stop_all()
        running = set(self.table.named(TrialState.RUNNING))
        # Read the runs' logs every few seconds.
        if self.table.clock() - self._last_poll >= POLL_SECONDS:
            self._last_poll = self.table.clock()
            self.table.advance(
                {
                    trial.name: self.job.logged(self.sweep.run(trial))
                    for trial in self.trials
                    if trial.name in running
                }
            )

    def _stop_all(self) -> None:
        """Let the running trials finish their iteration, and start no other."""
        if self.awaited is None:
            self.awaited = set(self.table.named(TrialState.RUNNING))
            self.stop.touch()

    def _end(self, trial: Trial, reason: str, saved_there: int = 0) -> None:
        # Another machine's run is in the storage.
        try:
            restore(self.sweep.run_path(trial), trial.config.get("storage"))
        except InputError as error:
            reason = reason or str(error)
        run = self.sweep.run(trial)
        # A run may have ended well on a disk that this machine cannot see, while this
        # one has the beginning of it, from an earlier session.
        if run is None or saved(self.job, run) < saved_there:
            reason = reason or NOT_SHARED
        steps = self.job.logged(run)
        self.table.advance({trial.name: steps})
        # Without a reason, a trial that is not finished was stopped.
        state = TrialState.FAILED if reason else TrialState.STOPPED
        if not reason and steps >= self.job.total(trial.config):
            state = TrialState.FINISHED
        self.table.change(trial.name, state, reason)
        # Ctrl-C waits for the trials that were running.
        if self.awaited is not None:
            self.awaited.discard(trial.name)
        self.on_end()

    def _trial_of(self, trial: Any) -> Trial:
        return next(t for t in self.trials if t.name == trial.config[TRIAL])


def saved(job: Job, run: Run | None) -> int:
    """Return the amount of training up to the checkpoint that a run resumes from."""
    if run is None:
        return 0
    # A user may delete the checkpoints of a finished run to free disk space.
    if not job.result and not run.checkpoints():
        return job.logged(run) if run.policy_dir.is_dir() else 0
    return job.saved(run)


def _clear(stop: Path, scratch: Path) -> None:
    for file in stop.parent.glob(f"{stop.name}*"):
        file.unlink()
    shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    previous = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(previous)
