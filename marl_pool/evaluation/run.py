"""How much of its return a run's policy keeps when what it sees is perturbed."""

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.loading import EvaluationTarget, changed, cpu_threads
from marl_pool.evaluation.measure import Measured, measure
from marl_pool.evaluation.plots.heat_map import occluded_in_training
from marl_pool.evaluation.results import (
    CURVES,
    DOCUMENT,
    RETURNS,
    ROWS,
    TABLE,
    WORLD,
    Files,
    write_csv,
    write_json,
    write_returns,
)
from marl_pool.studies.attention_neuron.analyses import analyse
from marl_pool.studies.attention_neuron.published import with_published
from marl_pool.utils.progress import Progress
from marl_pool.version import __version__, commit

if TYPE_CHECKING:
    from marl_pool.runs import Run


def evaluate_run(
    run: "Run", settings: Mapping[str, Any], *, plugins: Collection[str] = ()
) -> list[Path]:
    """Measure a run's policy and write table, CSV, JSON and plot.

    The files go to the run's ``evaluation/``; earlier ones stay (`Files`).

    Args:
        run: an earlier run.
        settings: of `EvaluateSettings` and ``env``, as plain data.
        plugins: ``package.module:Class`` names that the run may use.

    Returns:
        The files written.

    Raises:
        InputError: no policy in the run, a wrong perturbation, no such device.
    """
    episodes, threads = settings["episodes"], settings["threads"]
    subject = EvaluationTarget.load(run, settings, plugins)
    others = subject.others(settings["worlds"], episodes)
    # One thread a case beats several threads in the small operations of each.
    with cpu_threads(1), Progress(0, unit="episodes") as progress:

        def watch(done: int, total: int) -> None:
            if not done:
                _ = run.evaluation_dir  # refused before anything is played
            progress.total = total * episodes
            progress.update(done * episodes)

        measured = measure(
            subject.policies,
            lambda: subject.make_env(episodes),
            settings["perturbations"],
            others=others,
            baselines=subject.baselines(),
            fixed=subject.fixed,
            stochastic=settings["stochastic"],
            seed=settings["seed"],
            workers=threads,
            watch=watch,
        )
    results = with_published(measured.results, subject.policies, subject.env)
    measured = replace(measured, results=results)
    title = (
        f"{run.path.name}: {subject.env['name']}, {episodes} episodes, "
        f"checkpoint {subject.name}"
    )
    measured.show(title)
    files = Files(run.evaluation_dir)
    told = {
        **about(subject, episodes, run=run.path.name),
        "config_digest": run.config_digest,
        "training_seed": run.config.get("seed"),
        "occluded_in_training": occluded_in_training(run.config),
        "rescale_codes": settings["rescale_codes"],
    }
    written = write_measured(files, measured, told, title)
    with cpu_threads(threads):
        return written + analyse(settings["analyses"], subject, others, episodes, files)


def about(subject: EvaluationTarget, episodes: int, *, run: str) -> dict[str, Any]:
    """What holds for all rows of an evaluation.

    Args:
        subject: whose.
        episodes: of each row.
        run: its name.
    """
    return {
        "run": run,
        "env": subject.env,
        "changed": changed(subject.trained_env, subject.env),
        "episodes": episodes,
        "seed": subject.seed,
        "checkpoint": subject.checkpoint,
        "iteration": subject.iteration,
        "package_version": __version__,
        "commit": commit(),
    }


def write_measured(
    files: Files, measured: Measured, told: Mapping[str, Any], title: str
) -> list[Path]:
    """Write what was measured: CSV, JSON, each episode's return, and a picture.

    Args:
        files: names them.
        measured: the rows.
        told: what holds for all of them; see `about`.
        title: of the picture.

    Returns:
        The files written.
    """
    results = measured.results
    paths = [files.path(name) for name in (TABLE, DOCUMENT, RETURNS)]
    table, document, returns = paths
    write_csv(table, results, told)
    write_json(document, results, told, measured.areas)
    write_returns(returns, measured.returns)
    if importlib.util.find_spec("matplotlib") is None:
        print('no plot: pip install "marl-pool[plots]"')
        return paths
    from marl_pool.evaluation.plots.robustness import plot_robustness
    from marl_pool.evaluation.plots.rows import plot_rows

    if any(result.perturbation == WORLD for result in results):
        plot_rows(results, files.path(ROWS), title)
        return [*paths, files.path(ROWS)]
    plot_robustness(results, files.path(CURVES), title)
    return [*paths, files.path(CURVES)]
