"""The runs of a report: their comparable evaluations, and their policies."""

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from itertools import count
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pandas as pd

from marl_pool.evaluation.comparable import validate_comparable
from marl_pool.evaluation.load import target_from_run
from marl_pool.evaluation.results import (
    CLEAN,
    DOCUMENT,
    RETURNS,
    TRAINED,
    TRANSFER,
    read_returns,
)
from marl_pool.evaluation.settings import TargetSettings
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.files.manifest import KEY, is_intact_json
from marl_pool.files.reading import read_json
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import printable

AS_TRAINED = "as trained"
IDENTITY = ["group", "policy", "stochastic", "perturbation", "label", "severity"]
IDENTITY += ["options", "transfer_env"]
"""Columns that identify a row of an evaluation."""
DAMAGE = (OSError, ValueError, LookupError, TypeError, RecursionError)
"""Errors raised by a file that is damaged or from another version."""


@dataclass(frozen=True)
class Evaluation:
    """An intact evaluation of a run, or several joined ones.

    Attributes:
        path: its JSON file, or the newest of several.
        record: values common to all rows.
        rows: the records of the file, and four more columns: ``returns`` (an array of
            one return per episode; episode j is played in the same env in every row),
            ``path`` and ``commit`` (of the file; empty if not recorded) and ``key``
            (identifies the row).
        protocol: settings that comparable evaluations share. The checkpoint is the one
            requested, such as "best", since iterations differ between runs.
    """

    path: Path
    record: dict[str, Any]
    rows: pd.DataFrame
    protocol: dict[str, Any]

    @property
    def written(self) -> str:
        """Modification time of its newest file, in UTC."""
        modified = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return f"{modified:%Y-%m-%d %H:%M}"

    def join(self, earlier: "Evaluation") -> "Evaluation":
        """Add the rows of an earlier evaluation that this one lacks.

        Both must have measured the same policy by the same protocol: their episodes
        are then played in the same environments, and remain paired.
        """
        # The digest distinguishes configurations at the same iteration.
        policy = ("iteration", "config_digest")
        same = all(self.record.get(key) == earlier.record.get(key) for key in policy)
        if not same or self.protocol != earlier.protocol:
            return self
        rows = pd.concat([self.rows, earlier.rows], ignore_index=True)
        return replace(self, rows=rows.drop_duplicates("key"))


@dataclass(frozen=True)
class ReportedRun:
    """A run with its metrics and evaluation, or the reasons why they are missing.

    Attributes:
        run: the run.
        name: the shortest end of its path that distinguishes it from the other runs.
        metrics: ``metrics.csv``; without rows if it cannot be read.
        metrics_missing: why it cannot be read; empty if it can.
        evaluation: its intact evaluations, joined; None without a comparable one.
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
        """The training seed."""
        return self.run.config.get("seed")

    @property
    def superseded(self) -> str:
        """The older policy that was evaluated, or "" if it is the current one."""
        return self.run.superseded(self.evaluation.record) if self.evaluation else ""

    def relative(self, path: Path) -> str:
        """Return the path of a file of the run, without the folders above the run."""
        return f"{self.name}/{path.relative_to(self.run.path).as_posix()}"

    def without_folders(self, message: object) -> str:
        """Return a message about the run, without the folders above the run."""
        text = str(message)
        for path in (self.run.path.resolve(), self.run.path):
            text = text.replace(str(path), self.name) if path.is_absolute() else text
        for folder, name in short_folders([self.run.config]).items():
            text = text.replace(folder, name)
        return text


def read_runs(runs: Sequence[Run]) -> list[ReportedRun]:
    """Read the evaluations of each of one or more runs.

    Evaluations whose protocol is not the most common one are left out, with the reason:
    their numbers cannot be compared.

    Raises:
        InputError: the runs cannot be compared, or one is given twice.
    """
    for run in runs:
        _ = run.env  # raises where a configuration has none
    validate_comparable(runs)
    # The most common protocol, or the first of several, decides which are compared.
    evaluations = [_evaluation_of(run) for run in runs]
    protocols = [e.protocol for e in evaluations if isinstance(e, Evaluation)]
    usual = max(protocols, key=protocols.count, default={})
    reported_runs = []
    for run, name, evaluation in zip(runs, _names(runs), evaluations, strict=True):
        problem = _incomparable_reason(evaluation, usual)
        intact = evaluation if isinstance(evaluation, Evaluation) else None
        comparable = None if problem else intact
        reported_runs.append(
            ReportedRun(run, name, *_metrics(run), comparable, problem)
        )
    return reported_runs


def usual_settings(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Return the keys of `evaluate` that repeat the measurements of evaluated runs.

    Returns:
        Keys and values; empty if no run was evaluated.
    """
    evaluations = [run.evaluation for run in runs if run.evaluation]
    if not evaluations:
        return {}
    protocol = dict(evaluations[0].protocol)
    env = protocol.pop("env")
    # Collect the severities of each perturbation, and the other environments.
    rows = pd.concat([evaluation.rows for evaluation in evaluations])
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
        "worst_of": max(e.record.get("worst_of", 1) for e in evaluations),
        "perturbations": list(perturbations.values()),
        "transfer": list(transfer.values()),
    }


def load(reported: ReportedRun, plugins: Collection[str]) -> EvaluationTarget | str:
    """Load the evaluated policies of a run, by default the best, or say why not."""
    record = reported.evaluation.record if reported.evaluation else {}
    try:
        return target_from_run(
            reported.run,
            TargetSettings.from_config(
                {key: record[key] for key in ("checkpoint", "seed") if record}
            ),
            env=record["env"] if record.get("changed") else None,
            plugins=plugins,
        )
    except InputError as error:
        return reported.without_folders(error)


def _metrics(run: Run) -> tuple[pd.DataFrame, str]:
    try:
        rows = pd.DataFrame(run.rows(), dtype=float)
    except (OSError, ValueError, TypeError, AttributeError):
        # A line with more fields than the header has a list in place of a number.
        return pd.DataFrame(), "metrics.csv holds a cell that is not a number"
    # Only the checksum reveals a wrong number.
    problem = run.metrics_problem()
    return (pd.DataFrame() if problem else rows), problem


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the shortest ends of the runs' paths that are all different."""
    # Tables hold only names that are UTF-8.
    paths = [tuple(map(printable, run.path.resolve().parts)) for run in runs]
    names = (["/".join(path[-depth:]) for path in paths] for depth in count(1))
    return next(labels for labels in names if len(set(labels)) == len(runs))


def _evaluation_of(run: Run) -> Evaluation | str:
    """Join the intact evaluations of a run, or return why there is none."""
    stem = Path(DOCUMENT).stem
    # Read `results.json`, `results-2.json` …, the newest first.
    numbered = {
        int(match[1] or 1): path
        for path in run.evaluation_dir.glob(f"{stem}*.json")
        if (match := re.fullmatch(rf"{stem}(?:-([0-9]+))?\.json", path.name))
    }
    read = [_read(numbered[number]) for number in sorted(numbered)[::-1]]
    if intact := [e for e in read if isinstance(e, Evaluation)]:
        return reduce(Evaluation.join, intact)
    if read:
        return f"no evaluation with each episode's return ({read[0]})"
    return "not evaluated yet"


def _read(path: Path) -> Evaluation | str:
    """Read an evaluation, or return why it cannot be used."""
    try:
        content = read_json(path)
        if KEY in content and is_intact_json(content):
            return _parse(path, content)
        problem = "its checksum differs: it has changed since it was written"
    except DAMAGE as error:
        # The page does not show the folders above a run.
        reason = str(error).replace(f"{path.parent}{os.sep}", "")
        problem = f"it cannot be used: {type(error).__name__}, {reason}"
    return f"{path.name}: {problem}"


def _parse(path: Path, content: dict[str, Any]) -> Evaluation:
    results = content.pop("results")
    rows = pd.DataFrame(results)[[*IDENTITY, "fixed", "missing"]]
    # The file of returns has the same number as the document.
    name = path.name.replace(Path(DOCUMENT).stem, Path(RETURNS).stem)
    returns = read_returns(path.with_name(name).with_suffix(Path(RETURNS).suffix))
    expected = (len(rows), content["episodes"])
    # The checksum of the document does not cover the returns.
    if returns.shape != expected or returns.dtype.kind != "f":
        raise InputError(
            f"expected returns of {expected[0]} rows and {expected[1]} episodes, got "
            f"{returns.dtype} of shape {returns.shape}"
        )
    if not np.isfinite(returns[rows["missing"] == ""]).all():
        raise InputError("a return is not a finite number")
    identities = [[row[key] for key in IDENTITY] for row in results]
    keys = [json.dumps(identity, sort_keys=True) for identity in identities]
    commit = str(content.get("commit") or "")
    rows = rows.assign(returns=list(returns), path=path, commit=commit, key=keys)
    shared = ("seed", "episodes", "checkpoint")
    protocol = {key: content[key] for key in shared}
    protocol["env"] = content["changed"] or AS_TRAINED
    return Evaluation(path, content, rows, protocol)


def _incomparable_reason(evaluation: Evaluation | str, usual: Mapping[str, Any]) -> str:
    """Return why an evaluation is left out; empty if it is comparable."""
    if isinstance(evaluation, str):
        return evaluation
    differs = [
        f"{key} {value} where the others have {usual[key]}"
        for key, value in evaluation.protocol.items()
        if value != usual[key]
    ]
    reason = "its evaluation cannot be compared with the others: "
    return f"{reason}{', '.join(differs)}" if differs else ""


def short_folders(configs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Choose a short name for each absolute folder in the configurations of all runs.

    A page that is sent to others must not show the folders of its author.

    Returns:
        By folder, its last part, numbered where several folders end alike.
    """
    short: dict[str, str] = {}
    used: Counter[str] = Counter()
    for text in filter(_is_folder, dict.fromkeys(_texts(configs))):
        last = re.split(r"[\\/]", text.rstrip("\\/"))[-1] or "folder"
        used[last] += 1
        short[text] = last if used[last] == 1 else f"{last} ({used[last]})"
    return short


def with_short_folders(value: Any, short: Mapping[str, str]) -> Any:
    """Replace folders in nested data by their `short_folders`."""
    if isinstance(value, str):
        return short.get(value, value)
    if isinstance(value, Mapping):
        return {key: with_short_folders(item, short) for key, item in value.items()}
    if isinstance(value, list):
        return [with_short_folders(item, short) for item in value]
    return value


def _is_folder(text: str) -> bool:
    paths = (PurePosixPath(text), PureWindowsPath(text))
    return text.startswith("~") or any(path.is_absolute() for path in paths)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
