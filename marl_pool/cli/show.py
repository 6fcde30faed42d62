"""Verbs that describe runs on disk: show and ls."""

import operator
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.cli.common import next_commands, open_run, resume_command
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import printable

if TYPE_CHECKING:
    from marl_pool.runs.run import Run

OLDER = "an older policy's"
"""Mark of an evaluation after which training continued."""
ELSEWHERE = "in another environment"
"""Mark of an evaluation with other options of the environment."""
DEPTHS = ("", "*/", "*/*/", "*/*/*/", "*/*/trials/*/")
"""Places of runs below a folder: runs/NAME, sweeps/NAME/trials/NAME, …"""


def show(arguments: Namespace, overrides: list[str]) -> int:
    """Print a run's parts, progress, results and next commands; list a sweep's runs."""
    from marl_pool.runs.sweep import Sweep

    if arguments.run is not None and Sweep.is_at(arguments.run):
        return ls(Namespace(folder=arguments.run), [])
    run = open_run("show", arguments.run)
    done, total, unit = _progress(run)
    state = _state(run, done, total)
    lines = {
        "run": f"{run.path}, made by {run.verb} of marl_pool {run.version}",
        "parts": _parts(run),
        "state": f"{state}, {done:,} of {total:,} {unit}" if total else "no training",
    }
    if change := run.config_change():
        lines["edited"] = f"{change}: the lines above show what it says now"
    if run.verb == "fit":
        lines["results"] = _fit_results(run) or "none yet"
    else:
        lines["best"] = _best(run) or "none yet"
        lines["evaluation"] = _last_evaluation(run) or "none yet"
    for name, text in lines.items():
        print(f"{name + ':':<12}{printable(text)}")
    commands = next_commands(run)
    if total and done < total and state != "training":
        commands.insert(0, resume_command(run.path, run.config))
    for place, command in enumerate(commands):
        print(f"{'' if place else 'next:':<12}{command}")
    return 0


def ls(arguments: Namespace, overrides: list[str]) -> int:
    """Print a table of the runs in a folder."""
    from marl_pool.files.tables import print_table
    from marl_pool.runs.run import CONFIG

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder with runs, got none")
    runs = {file.parent for depth in DEPTHS for file in folder.glob(depth + CONFIG)}
    rows = [_row(path, folder) for path in sorted(runs)]
    if not rows:
        raise InputError(f"{folder}: expected a folder with runs, got none in it")
    columns = ["run", "parts", "state", "done", "best", "evaluated"]
    drop_first = [columns.index(name) for name in ("evaluated", "done", "parts")]
    print_table(columns, rows, title=str(folder), num_names=3, drop_first=drop_first)
    return 0


def _row(path: Path, folder: Path) -> list[str]:
    from marl_pool.runs.run import Run

    name = str(path.relative_to(folder)) if path != folder else path.resolve().name
    try:
        run = Run.open(path)
        done, total, _ = _progress(run)
        date, _, remark = _last_evaluation(run).partition(":")
        marks = {OLDER: "older", ELSEWHERE: "another env"}
        marked = [short for mark, short in marks.items() if mark in remark]
        evaluated = ", ".join([date, *marked])
        share = f"{min(done / total, 1):.0%}" if total else ""
        state = _state(run, done, total) if total else ""
        best = run.best.number if run.best else ""
        return [name, _parts(run), state, share, best, evaluated]
    except InputError as error:
        return [name, str(error)]


def _progress(run: "Run") -> tuple[int, int, str]:
    """Return the training done, the total and their unit; zeros without training."""
    from marl_pool.training.jobs import JOBS, config_of

    if run.verb not in JOBS:
        return 0, 0, ""
    job = JOBS[run.verb]
    try:
        # An edited total may be text, such as 5e6 in YAML.
        return job.logged(run), operator.index(job.total(config_of(run))), job.unit
    except (TypeError, KeyError, AttributeError) as error:  # of another version
        raise InputError(f"{run.path}: its configuration is not complete") from error


def _state(run: "Run", done: int, total: int) -> str:
    from marl_pool.files.atomic import locked
    from marl_pool.runs.run import LOCK

    if done >= total:
        return "finished"
    try:
        if (run.path / LOCK).is_file():
            with locked(run.path / LOCK, "training"):
                pass
    except InputError as error:
        return "training" if str(error) == "training" else "unfinished"
    return "failed" if _has_failed(run) else "unfinished"


def _has_failed(run: "Run") -> bool:
    """Return True if an error is newer than all checkpoints."""
    if not run.error_path.is_file():
        return False
    saved = (path.stat().st_mtime_ns for path in run.checkpoints())
    return run.error_path.stat().st_mtime_ns >= max(saved, default=0)


def _parts(run: "Run") -> str:
    """Name environment or task, policy, encoder, head, critic and seed."""
    sections = ("env", "task", "policy", "encoder", "pooling")
    configs = [run.config.get(name) for name in sections]
    # The module says which PettingZoo environment it is.
    labels = [
        " ".join(str(config[key]) for key in ("name", "module") if config.get(key))
        for config in configs
        if isinstance(config, dict) and "name" in config
    ]
    critic = run.config.get("critic")
    if isinstance(critic, dict) and critic.get("name") not in (None, "own"):
        labels.append(f"critic {critic['name']}")
    seed = run.config.get("seed")
    return ", ".join([*labels, *([] if seed is None else [f"seed {seed}"])])


def _fit_results(run: "Run") -> str:
    """Return the mean metrics on the test set, and the file that holds them."""
    from marl_pool.training.supervised.results import FILE, read_results

    if not (run.path / FILE).is_file():
        return ""
    try:
        means = read_results(run.path)["mean"]
    except InputError as error:
        return str(error)
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
    return f"{metrics} on the test set ({FILE})"


def _best(run: "Run") -> str:
    try:
        return str(run.best or "")
    except InputError as error:
        return str(error)


def _last_evaluation(run: "Run") -> str:
    """Return date, file and unperturbed return of the newest evaluation."""
    from marl_pool.files.reading import read_json

    files = sorted(
        run.evaluation_dir.glob("results*.json"), key=lambda file: file.stat().st_mtime
    )
    if not files:
        return ""
    date = f"{datetime.fromtimestamp(files[-1].stat().st_mtime):%Y-%m-%d %H.%M}"
    try:
        document = read_json(files[-1])
        rows: list[dict[str, Any]] = document["results"]
        superseded = run.superseded(document)
        changed: list[str] = sorted(document.get("changed") or ())
        clean = [
            f"{row['group']} {row['mean']:.4g}"
            for row in rows
            if (row["perturbation"], row["policy"]) == ("clean", "trained")
            and not (row.get("stochastic") or row.get("fixed"))
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{date}: {files[-1].name} cannot be read"
    older = superseded and f", {OLDER}, {superseded}"
    keys = ", ".join(f"env.{key}" for key in changed)
    elsewhere = keys and f", {ELSEWHERE} ({keys})"
    clean_returns = f"{', '.join(clean)}, unperturbed"
    return f"{date}: {clean_returns} ({files[-1].name}){elsewhere}{older}"
