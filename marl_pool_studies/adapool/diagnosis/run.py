"""Diagnosis of trained policies by the AdaPool paper's theory."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.computing import computing
from marl_pool.evaluation.load import target_from_run
from marl_pool.evaluation.results import Files, write_sealed
from marl_pool.evaluation.standalone import results_folder
from marl_pool.files.atomic import make_folder
from marl_pool.files.figures import INSTALL_PLOTS, has_matplotlib
from marl_pool.files.tables import write_csv
from marl_pool.options.names import name_of
from marl_pool.policies.base import Policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pooling import POOLING
from marl_pool.utils.errors import UnfitTokensError
from marl_pool.utils.progress import Progress
from marl_pool_studies.adapool.diagnosis.measures import (
    GroupObservations,
    measure_head,
    record_observations,
)
from marl_pool_studies.adapool.diagnosis.records import (
    ALL,
    Diagnosis,
    Named,
    from_plain,
    print_table,
    summarize,
    to_plain,
)
from marl_pool_studies.adapool.diagnosis.settings import DiagnoseSettings

if TYPE_CHECKING:
    from marl_pool.runs.run import Run

NAMES = ("diagnosis.csv", "diagnosis.json", "diagnosis.png")
"""Files of a diagnosis: table, document and plot."""


def diagnose_run(
    run: "Run",
    settings: DiagnoseSettings,
    *,
    env: Mapping[str, Any] | None = None,
    plugins: Collection[str] = (),
) -> list[Path]:
    """Diagnose a run's trained policies in unperturbed episodes.

    The files are added to the run's ``evaluation/``; see `Diagnosis` for the numbers.
    Arguments and errors are as in `target_from_run`; an environment that
    defines no signal is an `InputError` too.

    Returns:
        The files written.
    """
    target = target_from_run(run, settings, env=env, plugins=plugins)
    with (
        computing(
            settings.threads, settings.kernels, settings.env_timeout, settings.device
        ),
        Progress(0, unit="diagnoses") as progress,
    ):
        progress.doing = f"playing {settings.episodes} episodes"
        observations = record_observations(
            target, settings.episodes, settings.max_observations
        )
        rows = []
        for group, recording in observations.items():
            if group not in target.fixed:
                progress.doing = f"measuring the head of {group}"
                rows += diagnose(group, target.policies[group], recording, target.seed)
    # Single heads of MaxPooling are features, too many to show.
    table_rows = [row for row in rows if row.head == ALL or row.checked]
    entries = list(zip(_names(table_rows), table_rows, strict=True))
    title = target.title(settings.episodes)
    print_table(entries, title)

    # Write all rows, including the heads that are not shown.
    files = Files(run.make_evaluation_dir(), NAMES)
    table, document, plot = map(files.path, NAMES)
    record = target.record(settings.episodes, settings.kernels)
    lines = [to_plain(row) for row in rows]
    write_csv(table, [*lines[0], *record], ({**line, **record} for line in lines))
    write_sealed(document, {**record, "rows": lines})
    return [table, document, *_plot(plot, entries, title)]


def diagnose(
    group: str, policy: Policy, observations: GroupObservations, seed: int = 0
) -> list[Diagnosis]:
    """Diagnose the pooling head of one policy on observations of its group.

    The policy is in eval mode, and in float64 for exact relation scores. The bootstrap
    uses ``seed``.

    Returns:
        One record of all heads and, if there are several, one of each; for a policy
        that cannot be diagnosed one record with the reason as `Diagnosis.missing`.
    """
    name = type(policy).__name__
    try:
        if not isinstance(policy, TokenPolicy):
            raise UnfitTokensError(f"expected a policy with a pooling head, got {name}")
        name = name_of(type(policy.network.pooling), POOLING)
        measures = measure_head(policy.network, observations)
    except UnfitTokensError as error:
        return [Diagnosis(group, name, ALL, missing=str(error))]
    return summarize(group, name, observations, measures, seed)


def compare(documents: Sequence[Path], out: str | None) -> list[Path]:
    """Print and write one table of several runs' ``diagnosis.json``; return its files.

    ``out`` is a new folder, or None for one in ``evaluations/``.

    Raises:
        InputError: the folder exists.
    """
    folder = results_folder("diagnosis", out)
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in documents]
    # Compare the rows of all heads together.
    lines = [
        {"run": content["run"], **line}
        for content in contents
        for line in content["rows"]
        if line["head"] == ALL
    ]
    # Name the group only if the runs have several.
    rows = [from_plain(line) for line in lines]
    several = len({row.group for row in rows}) > 1
    entries = [
        (f"{line['run']}: {row.group}" if several else line["run"], row)
        for line, row in zip(lines, rows, strict=True)
    ]
    title = f"Diagnoses of {len(contents)} runs"
    print_table(entries, title)
    make_folder(folder)
    table, document, plot = (folder / name for name in NAMES)
    write_csv(table, list(lines[0]), lines)
    runs = [{k: v for k, v in c.items() if k != "rows"} for c in contents]
    write_sealed(document, {"runs": runs, "rows": lines})
    return [table, document, *_plot(plot, entries, title)]


def _names(rows: Sequence[Diagnosis]) -> list[str]:
    """Return the parts that tell rows apart: group, pooling and attention head."""
    several = len({row.group for row in rows}) > 1
    names = []
    for row in rows:
        head = "all heads" if row.head == ALL else f"head {row.head}"
        parts = [f"{row.group}:" if several else "", row.pooling]
        parts.append(head if row.heads > 1 else "")
        names.append(" ".join(filter(None, parts)))
    return names


def _plot(path: Path, entries: Named, title: str) -> list[Path]:
    if not has_matplotlib():
        print(f"no plot: {INSTALL_PLOTS}")
        return []
    from marl_pool_studies.adapool.diagnosis.plot import plot_diagnoses

    try:
        plot_diagnoses(entries, path, title)
    except Exception as error:  # a failed figure must not lose the numbers
        print(f"no plot: {type(error).__name__}: {' '.join(str(error).split())}")
        return []
    return [path]
