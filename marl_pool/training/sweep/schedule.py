"""Scheduling of the trials, as tasks of ray."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from marl_pool.runs.mirrored import restore
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import Sweep
from marl_pool.training.jobs import JOBS, Job
from marl_pool.training.settings import (
    ResourceSettings,
    RunConfig,
    SweepSettings,
    TrainConfig,
)
from marl_pool.training.signals import Interruptible
from marl_pool.training.sweep.plan import PlannedTrial
from marl_pool.training.sweep.progress import TrialState, TrialTable
from marl_pool.training.sweep.trial import Outcome, run_trial
from marl_pool.utils.errors import InputError, one_line

MAX_DEATHS = 2
"""Restarts of a trial whose process died, from its last checkpoint."""
DIED = f"its process died {MAX_DEATHS + 1} times, perhaps for lack of memory"
NOT_SHARED = (
    "its folder is not on this machine: nodes of a cluster must share the disk, or the "
    "sweep needs --storage"
)
"""Reasons of failures; the second is for a trial that succeeded on another disk."""
POLL_SECONDS = 1.0
"""Interval at which the metrics of the running trials are read."""


class TrialSlot(NamedTuple):
    """A trial that is running, or waiting for CPUs and GPUs."""

    trial: PlannedTrial
    group: PlacementGroup
    is_running: bool = False


class Scheduler:
    """Run trials, each as soon as its CPUs and GPUs are free.

    Args:
        sweep: sweep whose folder receives the runs.
        settings: CPUs and GPUs of each trial.
        table: display of the trials.
        search: metric of a search, and whether to stop early; None for a grid.
        on_end: called after the end of each trial, with its outcome.
    """

    def __init__(
        self,
        sweep: Sweep,
        settings: SweepSettings,
        table: TrialTable,
        search: tuple[str, bool] | None,
        on_end: Callable[[PlannedTrial, Outcome], None],
    ) -> None:
        self.sweep, self.settings, self.table = sweep, settings, table
        self.search, self.on_end = search, on_end
        self.job = JOBS[sweep.verb]
        # Trials stop once this file exists, on whichever machine they run.
        self.stop = sweep.path.absolute() / ".stop"
        self.slots = dict[ray.ObjectRef, TrialSlot]()
        self.deaths = Counter[str]()

    def run(self, trials: Iterator[PlannedTrial], concurrency: int) -> None:
        """Begin or resume trials, until each has finished or failed.

        Args:
            trials: unfinished trials; the next one is taken when it can start.
            concurrency: number of trials that run at the same time.

        Raises:
            InputError: from ``trials`` or ``on_end``, once running trials are saved.
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once the running trials have
                finished their iteration and saved a checkpoint; at once after a second
                one.
        """
        problem: InputError | None = None
        self.stop.unlink(missing_ok=True)  # a killed sweep may have left it
        try:
            with Interruptible() as interrupt:
                while True:
                    try:
                        if problem or interrupt.requested:
                            self._stop_all()
                        else:
                            self._fill(trials, concurrency)
                        if not self.slots:
                            break
                        self._wait()
                    except InputError as error:
                        problem = problem or error
        finally:
            for slot in self.slots.values():
                remove_placement_group(slot.group)
            self.stop.unlink(missing_ok=True)
        if problem:
            raise problem
        interrupt.raise_if_requested()

    def _fill(self, trials: Iterator[PlannedTrial], concurrency: int) -> None:
        while len(self.slots) < concurrency and (trial := next(trials, None)):
            self._reserve(trial)

    def _reserve(self, trial: PlannedTrial) -> None:
        """Ask ray for the CPUs and GPUs of a trial."""
        group = placement_group(
            [
                {kind: count for kind, count in bundle.items() if count}
                for bundle in bundles(trial.config, self.settings)
            ]
        )
        self.slots[group.ready()] = TrialSlot(trial, group)

    def _wait(self) -> None:
        """Wait for a trial to become ready or to end, at most `POLL_SECONDS`."""
        refs, _ = ray.wait(list(self.slots), timeout=POLL_SECONDS)
        for ref in refs:
            slot = self.slots.pop(ref)
            if slot.is_running:
                self._end(slot, ref)
            else:
                self._start(slot)
        running = [slot.trial for slot in self.slots.values() if slot.is_running]
        self.table.advance(
            {trial.name: self.job.logged(self.sweep.run(trial)) for trial in running}
        )

    def _start(self, slot: TrialSlot) -> None:
        """Start or resume a trial in the first bundle of its group."""
        trial, group = slot.trial, slot.group
        main, *_ = bundles(trial.config, self.settings)
        # Each trial has a process; its runners and learners use the other bundles.
        task = ray.remote(max_calls=1, max_retries=0)(run_trial).options(
            num_cpus=main["CPU"],
            num_gpus=main["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group,
                placement_group_bundle_index=0,
                placement_group_capture_child_tasks=True,
            ),
        )
        path = self.sweep.run_path(trial).absolute()
        ref = task.remote(path, trial.config, self.stop, self.search)
        self.slots[ref] = slot._replace(is_running=True)
        # A search may vary the length of its trials.
        self.table.rows[trial.name].total = self.job.total(trial.config)
        self.table.change(trial.name, TrialState.RUNNING)

    def _end(self, slot: TrialSlot, ref: ray.ObjectRef) -> None:
        """Handle the outcome of a trial; retry if its process died."""
        trial = slot.trial
        try:
            outcome: Outcome = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            outcome = Outcome(one_line(error.cause))
        except ray.exceptions.RayError:
            self.deaths[trial.name] += 1
            can_retry = self.deaths[trial.name] <= MAX_DEATHS
            if can_retry and not self.stop.exists():
                self.table.change(trial.name, TrialState.WAITING)
                self._reserve(trial)
                return
            outcome = Outcome() if can_retry else Outcome(DIED)
        finally:
            remove_placement_group(slot.group)
        self.end(trial, outcome)

    def end(self, trial: PlannedTrial, outcome: Outcome) -> None:
        """Display the end of a trial, and report it to ``on_end``."""
        state, reason = self._state(trial, outcome)
        self.table.change(trial.name, state, reason)
        self.on_end(trial, outcome)

    def _state(self, trial: PlannedTrial, outcome: Outcome) -> tuple[TrialState, str]:
        """Return the final state of a trial, and the reason of a failure."""
        reason = outcome.reason
        # A run from another machine is in the storage.
        try:
            restore(self.sweep.run_path(trial), trial.config.storage)
        except InputError as error:
            reason = reason or str(error)
        # A run may have succeeded on a disk that this machine cannot see, while this
        # one has its beginning, from an earlier session.
        run = self.sweep.run(trial)
        if saved(self.job, run) < outcome.saved:
            reason = reason or NOT_SHARED
        steps = self.job.logged(run)
        self.table.advance({trial.name: steps})
        if reason:
            return TrialState.FAILED, reason
        is_finished = steps >= self.job.total(trial.config)
        return TrialState.FINISHED if is_finished else TrialState.STOPPED, ""

    def _stop_all(self) -> None:
        """Let the running trials finish their iteration, and start no more."""
        self.stop.touch()
        for ref, slot in list(self.slots.items()):
            if not slot.is_running:
                remove_placement_group(slot.group)
                del self.slots[ref]


def bundles(config: RunConfig, settings: SweepSettings) -> list[dict[str, float]]:
    """Return ``CPU`` and ``GPU`` of each process: main, runners, learners."""
    gpus = settings.gpus_per_trial
    # Ray hides the GPUs from a process that requests none.
    needs_gpu = config.device != "cpu"
    resources = ResourceSettings()  # a fit has no other processes
    if isinstance(config, TrainConfig):
        resources = config.resources
    # Without separate processes, learners and runners use the main one's GPUs.
    if not resources.num_learners:
        gpus = max(gpus, resources.num_gpus_per_learner)
    if not resources.num_env_runners:
        gpus = max(gpus, resources.num_gpus_per_env_runner)
    if not (resources.num_learners and resources.num_env_runners):
        gpus = gpus or needs_gpu
    main = {"CPU": float(settings.cpus_per_trial), "GPU": float(gpus)}
    runner = {"CPU": 1.0, "GPU": float(resources.num_gpus_per_env_runner)}
    learner = {"CPU": 1.0, "GPU": float(resources.num_gpus_per_learner)}
    return [
        main,
        *[runner] * resources.num_env_runners,
        *[learner] * resources.num_learners,
    ]


def saved(job: Job, run: Run | None) -> int:
    """Return the amount of training up to the checkpoint from which a run resumes."""
    if run is None:
        return 0
    # A user may delete the checkpoints of a finished run to free disk space.
    if not job.result and not run.checkpoints():
        return job.logged(run) if run.policy_dir.is_dir() else 0
    return job.saved(run)
