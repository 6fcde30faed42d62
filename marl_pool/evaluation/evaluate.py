"""Robustness evaluation of a run: measure, print, and write tables and a plot."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.cases import TransferEnv
from marl_pool.evaluation.computing import computing
from marl_pool.evaluation.load import target_from_run
from marl_pool.evaluation.measure import EvaluationResults, OnProgress, measure
from marl_pool.evaluation.results import (
    CURVES,
    DOCUMENT,
    RETURNS,
    ROWS,
    TABLE,
    TRANSFER,
    Files,
    write_csv,
    write_json,
    write_returns,
)
from marl_pool.evaluation.settings import EvaluateSettings
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.files.figures import INSTALL_PLOTS, has_matplotlib
from marl_pool.utils.progress import Progress

if TYPE_CHECKING:
    from marl_pool.runs.run import Run


@dataclass(frozen=True)
class EvaluatedRun:
    """Evaluation of a run, for analyses that follow it."""

    target: EvaluationTarget
    transfers: list[TransferEnv]
    results: EvaluationResults
    files: Files
    """Paths of this evaluation's files."""
    paths: list[Path]
    """Files written so far."""


def evaluate_run(
    run: "Run",
    settings: EvaluateSettings,
    *,
    env: Mapping[str, Any] | None = None,
    plugins: Collection[str] = (),
) -> EvaluatedRun:
    """Measure a run's policies, print a table, and write files to ``evaluation/``.

    These are CSV, JSON, each episode's return and a plot; earlier files stay (`Files`).
    Arguments and errors are as in `target_from_run`; a wrong perturbation is an
    `InputError` too.
    """
    # Loading finds most mistakes before any episode is played.
    target = target_from_run(run, settings, env=env, plugins=plugins)
    transfer_settings = settings.transfer_settings
    transfers = [
        target.transfer_env(transfer, settings.episodes)
        for transfer in transfer_settings
    ]
    with Progress(0, unit="episodes") as progress:

        def on_progress(done: int, total: int) -> None:
            # Fail before any episode if the folder cannot be written to, but leave no
            # folder behind for wrong settings, which have been rejected by now.
            if not done:
                run.make_evaluation_dir()
            progress.total = total * settings.episodes
            progress.update(done * settings.episodes)

        results = evaluate_target(target, settings, transfers, on_progress)

    title = target.title(settings.episodes)
    results.show(title)
    record = target.record(settings.episodes, settings.kernels)
    record["worst_of"] = settings.worst_of
    files = Files(run.evaluation_dir)
    paths = write_results(files, results, record, title)
    return EvaluatedRun(target, transfers, results, files, paths)


def evaluate_target(
    target: EvaluationTarget,
    settings: EvaluateSettings,
    transfers: Collection[TransferEnv] = (),
    on_progress: OnProgress = lambda done, total: None,
) -> EvaluationResults:
    """Measure policies, without writing or printing anything.

    The target has its own checkpoint, seed and device, and ``settings`` does not
    override them. ``transfers`` come from `EvaluationTarget.transfer_env`.

    Raises:
        InputError: a wrong perturbation.
        StoppedError: an environment exceeded ``env_timeout``.
    """
    # Only calls in the main thread can be interrupted.
    limit = settings.env_timeout
    workers = settings.threads if limit is None else 1
    # One thread per case beats several threads in the small operations of each.
    with computing(1, settings.kernels, limit, settings.device):
        return measure(
            target.policies,
            lambda: target.make_env(settings.episodes),
            settings.perturbation_levels,
            transfers=list(transfers),
            baselines=target.baselines(),
            fixed=target.fixed,
            stochastic=settings.stochastic,
            worst_of=settings.worst_of,
            seed=target.seed,
            workers=workers,
            on_progress=on_progress,
        )


def write_results(
    files: Files, results: EvaluationResults, record: Mapping[str, Any], title: str
) -> list[Path]:
    """Write CSV, JSON, each episode's return and a plot, and return their paths.

    ``record`` holds the entries of all rows; see `EvaluationTarget.record`.
    """
    rows = results.results
    paths = [files.path(name) for name in (TABLE, DOCUMENT, RETURNS)]
    table, document, returns = paths
    write_csv(table, rows, record)
    write_json(document, rows, record, results.aucs)
    write_returns(returns, results.returns)
    if not has_matplotlib():
        print(f"no plot: {INSTALL_PLOTS}")
        return paths
    from marl_pool.evaluation.plots import plot_robustness, plot_rows

    # Curves over severity have no place for other environments.
    has_transfer = any(row.perturbation == TRANSFER for row in rows)
    figure = files.path(ROWS if has_transfer else CURVES)
    plot = plot_rows if has_transfer else plot_robustness
    plot(rows, figure, title)
    return [*paths, figure]
