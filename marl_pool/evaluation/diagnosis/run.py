"""The AdaPool paper's theory on a trained policy: how much signal its head keeps."""

import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.diagnosis.files import (
    DOCUMENT,
    NAMES,
    PLOT,
    TABLE,
    from_plain,
    plain,
    print_table,
    write_csv,
    write_json,
)
from marl_pool.evaluation.diagnosis.measures import measure_cases, network_of
from marl_pool.evaluation.diagnosis.observations import Observed, observe
from marl_pool.evaluation.diagnosis.records import ALL, Diagnosis, diagnoses
from marl_pool.evaluation.loading import EvaluationTarget, cpu_threads
from marl_pool.evaluation.results import Files
from marl_pool.evaluation.settings import DiagnoseSettings
from marl_pool.evaluation.standalone import new_folder_for
from marl_pool.policies.base import Policy
from marl_pool.pooling import POOLING
from marl_pool.utils.atomic import make_folder
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.names import name_of

if TYPE_CHECKING:
    from marl_pool.runs import Run


def diagnose_run(
    run: "Run", settings: Mapping[str, Any], *, plugins: Collection[str] = ()
) -> list[Path]:
    """Measure what a run's pooling heads do with the signal that its world knows.

    The policy plays, unperturbed; see `Diagnosis` for what is measured. The files go
    to the run's ``evaluation/``; earlier ones stay (`Files`).

    Args:
        run: an earlier run.
        settings: of `DiagnoseSettings` and ``env``, as plain data.
        plugins: ``package.module:Class`` names that the run may use.

    Returns:
        The files written.

    Raises:
        InputError: no policy in the run, no such device, or a world that does not know
            its signal.
    """
    episodes = settings["episodes"]
    subject = EvaluationTarget.from_run(
        run,
        DiagnoseSettings.from_config(settings),
        env=settings["env"],
        plugins=plugins,
    )
    with cpu_threads(settings["threads"]):
        observed = observe(subject, episodes, settings["max_observations"])
        rows = [
            row
            for group, seen in observed.items()
            if group not in subject.fixed
            for row in diagnose(group, subject.policies[group], seen, subject.seed)
        ]
    named = [(_name(row, rows), row) for row in rows if _is_shown(row)]
    title = (
        f"{run.path.name}: {subject.env['name']}, {episodes} episodes, "
        f"checkpoint {subject.name}"
    )
    print_table(named, title)
    files = Files(run.make_evaluation_dir(), NAMES)
    told = subject.record(episodes)
    lines = [plain(row) for row in rows]
    write_csv(files.path(TABLE), [{**line, **told} for line in lines])
    write_json(files.path(DOCUMENT), lines, told)
    written = [files.path(TABLE), files.path(DOCUMENT)]
    return written + _draw(files.path(PLOT), named, title)


def diagnose(
    group: str, policy: Policy, observed: Observed, seed: int = 0
) -> list[Diagnosis]:
    """Measure one policy's head on observations.

    Args:
        group: of the agents.
        policy: in eval mode, and in float64 if its scores are to be exact.
        observed: what its agents saw.
        seed: of the bootstrap.

    Returns:
        A row for all heads together and one for each; one that is a gap if there is
        nothing to measure.
    """
    name = type(policy).__name__
    try:
        network = network_of(policy)
        name = name_of(type(network.pooling), POOLING)
        cases = measure_cases(network, observed)
    except UnfitTokensError as error:
        return [Diagnosis(group, name, ALL, gap=str(error))]
    return diagnoses(group, name, observed, cases, seed)


def compare(documents: Sequence[Path], out: str | None) -> list[Path]:
    """Show several runs' diagnoses in one table, and write it.

    Args:
        documents: their ``diagnosis.json``.
        out: a new folder; None for one in ``evaluations/``.

    Returns:
        The files written.

    Raises:
        InputError: the folder exists.
    """
    folder = new_folder_for("diagnosis") if out is None else Path(out)
    if folder.exists():
        raise InputError(f"{folder} exists; choose another --out")
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in documents]
    lines = [
        {"run": content["run"], **line}
        for content in contents
        for line in content["rows"]
        if line["head"] == ALL
    ]
    rows = [from_plain(line) for line in lines]
    several = len({row.group for row in rows}) > 1
    named = [
        (f"{line['run']}: {row.group}" if several else line["run"], row)
        for line, row in zip(lines, rows, strict=True)
    ]
    title = f"Diagnoses of {len(contents)} runs"
    print_table(named, title)
    make_folder(folder)
    write_csv(folder / TABLE, lines)
    origins = [{k: v for k, v in c.items() if k != "rows"} for c in contents]
    write_json(folder / DOCUMENT, lines, {"runs": origins})
    written = [folder / TABLE, folder / DOCUMENT]
    return written + _draw(folder / PLOT, named, title)


def _is_shown(row: Diagnosis) -> bool:
    """Whether it is of interest by itself: a single feature of MaxPool is not."""
    return row.head == ALL or row.checked > 0


def _name(row: Diagnosis, rows: Sequence[Diagnosis]) -> str:
    several = len({other.group for other in rows}) > 1
    which = "all heads" if row.head == ALL else f"head {row.head}"
    if row.heads <= 1:
        which = ""
    parts = (f"{row.group}:" if several else "", row.pooling, which)
    return " ".join(part for part in parts if part)


def _draw(path: Path, named: Sequence[tuple[str, Diagnosis]], title: str) -> list[Path]:
    if importlib.util.find_spec("matplotlib") is None:
        print('no plot: pip install "marl-pool[plots]"')
        return []
    from marl_pool.evaluation.diagnosis.plot import plot_diagnoses

    try:
        plot_diagnoses(named, path, title)
    except Exception as error:  # what was measured is written, and worth more
        print(f"no plot: {type(error).__name__}: {' '.join(str(error).split())}")
        return []
    return [path]
