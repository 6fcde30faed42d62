"""Execution of a sweep, from its plan to its table."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from marl_pool.runs.sweep import Sweep, naming
from marl_pool.training import cluster
from marl_pool.training.callbacks import callback_classes
from marl_pool.training.errors import checkpoint_to_resume
from marl_pool.training.jobs import JOBS
from marl_pool.training.ppo.config import algorithm_config
from marl_pool.training.settings import SweepSettings
from marl_pool.training.supervised.fit import make_task, validate_data
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.training.sweep.estimate import cell_of, detectable, size_of, time_left
from marl_pool.training.sweep.plan import Plan, PlannedTrial, SearchPlan
from marl_pool.training.sweep.progress import TrialState, TrialTable
from marl_pool.training.sweep.schedule import Scheduler, bundles, saved
from marl_pool.training.sweep.trial import Outcome
from marl_pool.utils.devices import checked_device
from marl_pool.utils.errors import InputError, StoppedError
from marl_pool.utils.text import print_line, quoted

if TYPE_CHECKING:
    from marl_pool.training.sweep.search import Search

VALIDATE: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "train": (cluster.validate_device, algorithm_config),
    "fit": (lambda config: checked_device(config.device), make_task),
}
"""By verb, functions that reject a missing device and parts that do not fit."""


def run_sweep(sweep: Sweep, plan: Plan, dry_run: bool) -> dict[str, str]:
    """Print a summary of the sweep, run its unfinished trials, and write the table.

    Args:
        sweep: sweep whose folder is created here, except in a dry run.
        plan: completed plan; a search adds the trials that it proposes.
        dry_run: stop after the summary.

    Returns:
        Reasons of failed trials, by name.

    Raises:
        InputError: before any trial starts: parts of a trial do not fit each other, or
            there are too few CPUs or GPUs.
        KeyboardInterrupt: Ctrl-C; the sweep can be resumed.
    """
    trials, settings, job = plan.trials, plan.settings, JOBS[sweep.verb]
    with cluster.quiet():
        # Reject wrong parts and missing data before the first trial starts.
        _validate_parts(plan.examples, settings)
        search = None
        if isinstance(plan, SearchPlan):
            from marl_pool.training.sweep.search import Search  # loads optuna

            search = Search(sweep, plan)
        runs = {trial.name: sweep.run(trial) for trial in trials}
        done = {name: saved(job, run) for name, run in runs.items()}
        stopped = search.stopped_early if search else set()
        todo = [
            trial
            for trial in trials
            if done[trial.name] < job.total(trial.config)
            and trial.name not in stopped
            and not ((run := runs[trial.name]) and run.was_ended)
        ]
        # A search will add trials like its probes.
        num_new = max(0, settings.trials - len(trials)) if search else 0
        kinds = todo + plan.examples if num_new else todo
        # Machines of a cluster may have data that this one lacks.
        if settings.address is None:
            _validate_data(kinds)
        # Print the size, the detectable effect and the estimated duration.
        if search is not None:
            _say(*search.description)
        else:
            _say(size_of(sweep.grid, trials, done, job))
            _say(detectable(sweep.grid, settings.seed_sd))
        hint = f"resume with: marl-pool resume {quoted(sweep.path)}"
        with _resources(kinds, settings, "" if dry_run else hint) as concurrency:
            timed = todo + plan.examples[:1] * num_new
            _say(time_left(timed, done, concurrency, job))
            if not dry_run:
                return _run(sweep, plan, todo, done, concurrency, search)
    # A dry run lists the trials and the progress of each.
    for trial in trials:
        steps, total = done[trial.name], job.total(trial.config)
        _say(f"{steps:>12,} of {total:,} {job.unit}  {trial.name}")
    return {}


def _run(
    sweep: Sweep,
    plan: Plan,
    todo: Sequence[PlannedTrial],
    done: Mapping[str, int],
    concurrency: int,
    search: "Search | None",
) -> dict[str, str]:
    job = JOBS[sweep.verb]
    totals = {trial.name: job.total(trial.config) for trial in plan.trials}
    if search is not None:
        usual = job.total(plan.examples[0].config)
        totals = dict.fromkeys(search.names, usual) | totals
    table = TrialTable(totals, done, unit=job.unit)
    for trial in plan.trials:
        row = table.rows[trial.name]
        if trial not in todo and row.state == TrialState.WAITING:
            row.state = TrialState.STOPPED

    def write_table() -> None:
        sweep.write_table(plan.trials, table.states)

    def on_end(trial: PlannedTrial, outcome: Outcome) -> None:
        write_table()
        if search is not None:
            search.end(trial, outcome)

    with sweep.lock():
        if search is not None:
            search.validate_current()
        sweep.write()
        _report_damage(sweep, plan.trials, todo)
        upcoming = search.upcoming(todo) if search else iter(todo)
        stopping = (search.metric, plan.settings.asha) if search else None
        try:
            if table.named(TrialState.WAITING):
                with table:
                    Scheduler(sweep, plan.settings, table, stopping, on_end).run(
                        upcoming, concurrency
                    )
        except InputError:
            search = None  # the trials have no scores to rank them by
            raise
        finally:
            write_table()
            if search is not None:
                search.print_results(table.states)
    return {name: table.rows[name].note for name in table.named(TrialState.FAILED)}


def _report_damage(
    sweep: Sweep, trials: Sequence[PlannedTrial], todo: Sequence[PlannedTrial]
) -> None:
    """Report damaged trials, because the output of their processes is not shown."""
    for trial in trials:
        run = sweep.run(trial)
        if run is None:
            continue
        if trial in todo:
            # Without an intact checkpoint only this trial fails, later.
            with contextlib.suppress(StoppedError):
                checkpoint_to_resume(run)
        else:
            run.recover()
        if problem := run.metrics_problem():
            print_line(f"{run.path}: {problem}")


def _validate_parts(trials: Sequence[PlannedTrial], settings: SweepSettings) -> None:
    """Reject parts that do not fit each other, once for each kind of trial."""
    for trial in {cell_of(trial.config): trial for trial in trials}.values():
        validate_device, assemble = VALIDATE[trial.config.verb]
        with naming(trial.name):
            # Machines of a cluster may have devices that this one lacks.
            if settings.address is None:
                validate_device(trial.config)
            assemble(trial.config)
            # Import the modules here, which ships them to a cluster.
            callback_classes(trial.config.callbacks)


def _validate_data(trials: Sequence[PlannedTrial]) -> None:
    """Reject missing data of fits, once for all trials that share them."""
    readers = {}
    for trial in trials:
        config = trial.config
        if isinstance(config, FitConfig):
            shared = str((config.task, config.data_dir, config.download))
            readers[shared] = trial.name, config
    for name, config in readers.values():
        with naming(name):
            validate_data(config)


@contextlib.contextmanager
def _resources(
    trials: Sequence[PlannedTrial], settings: SweepSettings, resume: str
) -> Iterator[int]:
    """Start or join ray if there is a trial to run; yield the concurrency.

    ``resume`` is printed if ray ends this process.

    Raises:
        InputError: there are too few resources for a single trial.
    """
    if not trials:
        yield 1
        return
    # The largest trial determines how many run at a time.
    needed = [bundles(trial.config, settings) for trial in trials]
    largest = {
        kind: max(sum(bundle[kind] for bundle in processes) for processes in needed)
        for kind in ("CPU", "GPU")
    }
    cpus = int(largest["CPU"])
    count = settings.concurrency or max(1, len(os.sched_getaffinity(0)) // cpus)
    with cluster.ray_session(
        settings.address,
        num_cpus=count * cpus,
        key="sweep.address",
        resume=resume,
    ):
        # Reject trials that would wait forever for CPUs or GPUs.
        cluster.validate_cluster(largest, "sweep")
        # An autoscaler adds machines for the trials that wait.
        limit = max(1, int(ray.cluster_resources().get("CPU", 0)) // cpus)
        yield settings.concurrency or (len(trials) if cluster.may_grow() else limit)


def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
