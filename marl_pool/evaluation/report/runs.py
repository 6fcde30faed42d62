"""The runs of a report: their comparable evaluations, and their policies."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pandas as pd

from marl_pool.evaluation.comparable import validate_comparable
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.report.evaluations import (
    AS_TRAINED,
    Evaluation,
    evaluation_of,
)
from marl_pool.evaluation.results import CLEAN, TRAINED, TRANSFER
from marl_pool.evaluation.settings import TargetSettings
from marl_pool.runs import Run
from marl_pool.utils.errors import InputError

Protocol = Mapping[str, Any]


@dataclass(frozen=True)
class ReportedRun:
    """A run with its metrics and evaluation, or the reasons why they are missing.

    Attributes:
        run: its folder.
        name: the end of its path that tells it apart from the other runs.
        metrics: ``metrics.csv``; without rows if it cannot be read.
        metrics_missing: why it cannot be read; empty if it can.
        evaluation: its intact evaluations; None without a comparable one.
        evaluation_missing: why there is none; empty if there is one.
    """

    run: Run
    name: str
    metrics: pd.DataFrame
    metrics_missing: str
    evaluation: Evaluation | None
    evaluation_missing: str

    @property
    def seed(self) -> int | None:
        """The seed of the training."""
        return self.run.config.get("seed")

    @property
    def missing(self) -> list[str]:
        """The reasons why parts of it are missing."""
        return list(filter(None, (self.evaluation_missing, self.metrics_missing)))

    def relative(self, path: Path) -> str:
        """A file of the run, without the folders above the run."""
        return f"{self.name}/{path.relative_to(self.run.path).as_posix()}"

    def without_folders(self, message: object) -> str:
        """A message about the run, without the folders above the run."""
        text = str(message)
        for path in (self.run.path.resolve(), self.run.path):
            text = text.replace(str(path), self.name) if path.is_absolute() else text
        for folder, name in short_folders([self.run.config]).items():
            text = text.replace(folder, name)
        return text


def read_runs(runs: Sequence[Run]) -> list[ReportedRun]:
    """Read the evaluation of each run.

    Those made by another protocol than most are left out, with the reason: their
    numbers cannot be compared.

    Args:
        runs: at least one.

    Raises:
        InputError: runs that cannot be compared, or one that is given twice.
    """
    for run in runs:
        _ = run.env  # raises where a configuration has none
    validate_comparable(runs)
    # The protocol of most evaluations decides which of them are compared.
    evaluations = [evaluation_of(run) for run in runs]
    usual = _majority_protocol(evaluations)
    found = []
    for run, name, evaluation in zip(runs, _names(runs), evaluations, strict=True):
        problem = _incomparable_reason(evaluation, usual)
        own = evaluation if isinstance(evaluation, Evaluation) and not problem else None
        found.append(ReportedRun(run, name, *_metrics(run), own, problem))
    return found


def usual_settings(found: Sequence[ReportedRun]) -> dict[str, Any]:
    """The keys of `evaluate` that measure what the evaluated runs were measured by.

    Returns:
        Empty if none was evaluated.
    """
    evaluations = [one.evaluation for one in found if one.evaluation]
    if not evaluations:
        return {}
    protocol = dict(evaluations[0].protocol)
    env = protocol.pop("env")
    # Collect the severities of each perturbation, and the other environments.
    rows = pd.concat([each.rows for each in evaluations])
    perturbations: dict[str, dict[str, Any]] = {}
    transfer: dict[str, dict[str, Any]] = {}
    for row in rows[rows["policy"] == TRAINED].to_dict("records"):
        label, options = row["label"], row["options"]
        if row["perturbation"] == TRANSFER:
            transfer[label] = {"label": label, "env": row["transfer_env"], **options}
        elif row["perturbation"] != CLEAN:
            levels = {"name": row["perturbation"], **options, "severities": []}
            severities = perturbations.setdefault(label, levels)["severities"]
            if row["severity"] not in severities:
                severities.append(row["severity"])
    return {
        **protocol,
        **({} if env == AS_TRAINED else {"env": env}),
        "stochastic": bool(rows["stochastic"].any()),
        "worst_of": max(each.about.get("worst_of", 1) for each in evaluations),
        "perturbations": list(perturbations.values()),
        "transfer": list(transfer.values()),
    }


def load(one: ReportedRun, plugins: Collection[str]) -> EvaluationTarget | str:
    """Load the evaluated policies of a run; without an evaluation, the best ones."""
    about = one.evaluation.about if one.evaluation else {}
    try:
        return EvaluationTarget.from_run(
            one.run,
            TargetSettings.from_config(
                {key: about[key] for key in ("checkpoint", "seed") if about}
            ),
            env=about["env"] if about.get("changed") else None,
            plugins=plugins,
        )
    except InputError as error:
        return one.without_folders(error)


def _metrics(run: Run) -> tuple[pd.DataFrame, str]:
    try:
        rows = pd.DataFrame(run.rows(), dtype=float)
    except (OSError, ValueError, TypeError, AttributeError):
        # In a line of more fields than the header a list takes a number's place.
        return pd.DataFrame(), "metrics.csv holds what is no number"
    # A wrong number is found by the checksum alone.
    problem = run.metrics_problem()
    return (pd.DataFrame() if problem else rows), problem


def _names(runs: Sequence[Run]) -> list[str]:
    """The shortest ends of the runs' paths that are all different."""
    parts = [run.path.resolve().parts for run in runs]
    names = (["/".join(own[-depth:]) for own in parts] for depth in count(1))
    return next(own for own in names if len(set(own)) == len(runs))


def _majority_protocol(found: Sequence[Evaluation | str]) -> Protocol:
    """The most frequent protocol, the first one of equally frequent ones."""
    protocols = [one.protocol for one in found if isinstance(one, Evaluation)]
    return max(protocols, key=protocols.count, default={})


def _incomparable_reason(own: Evaluation | str, usual: Protocol) -> str:
    """The reason to leave out an evaluation; empty if it is comparable."""
    if isinstance(own, str):
        return own
    differs = [
        f"{key} {value} where the others have {usual[key]}"
        for key, value in own.protocol.items()
        if value != usual[key]
    ]
    reason = "its evaluation cannot be compared with the others: "
    return f"{reason}{', '.join(differs)}" if differs else ""


def short_folders(configs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A short name for each absolute folder in the configurations of all runs.

    A page that is sent to others does not show the folders of its author.

    Returns:
        By folder its last part, numbered where several folders end alike.
    """
    short: dict[str, str] = {}
    used: Counter[str] = Counter()
    for text in filter(_is_folder, dict.fromkeys(_texts(configs))):
        last = re.split(r"[\\/]", text.rstrip("\\/"))[-1] or "folder"
        used[last] += 1
        short[text] = last if used[last] == 1 else f"{last} ({used[last]})"
    return short


def with_short_folders(value: Any, short: Mapping[str, str]) -> Any:
    """Nested data with `short_folders` in place of folders."""
    if isinstance(value, str):
        return short.get(value, value)
    if isinstance(value, Mapping):
        return {key: with_short_folders(part, short) for key, part in value.items()}
    if isinstance(value, list):
        return [with_short_folders(part, short) for part in value]
    return value


def _is_folder(text: str) -> bool:
    paths = (PurePosixPath(text), PureWindowsPath(text))
    return text.startswith("~") or any(path.is_absolute() for path in paths)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
