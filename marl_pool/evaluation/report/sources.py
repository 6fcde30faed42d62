"""What a report is made of: runs, and the evaluations of each that belong together."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from marl_pool.errors import InputError
from marl_pool.evaluation.results import DOCUMENT, RETURNS, TRAINED, read_returns
from marl_pool.runs import Run

DIAGNOSIS = "diagnosis.json"
SUBJECT = ("checkpoint", "iteration", "config_digest")
"""What tells whom an evaluation measured."""
CONDITION = ("group", "policy", "stochastic", "perturbation", "label", "severity")
"""What tells a row from the others of an evaluation, beside its options."""
SHARED = ("name", "max_steps")
"""Options of the env that all runs of a report share, beside those of the reward."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that a run holds, or several of them as one.

    Attributes:
        path: of its ``results.json``; of several, that of the newest.
        about: what holds for all rows.
        rows: the results.
        returns: ``(rows, episodes)``, column j is the same world in every row.
    """

    path: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    returns: np.ndarray
    earlier: tuple[Path, ...] = ()
    """Of several, those that have rows of their own here."""

    @property
    def protocol(self) -> dict[str, Any]:
        """What evaluations that are compared share, beside what they measure."""
        chosen = {key: self.about[key] for key in ("seed", "episodes")}
        return {**chosen, "env": self.about.get("changed") or "as trained"}

    def with_rows_of(self, other: "Evaluation") -> "Evaluation":
        """Add the rows that this one lacks, if both measured the same policy alike.

        The episodes are those of the same worlds, so that they are paired as well as
        if all had been measured at once.
        """
        subjects = [
            {**one.protocol, **{key: one.about.get(key) for key in SUBJECT}}
            for one in (self, other)
        ]
        known = {_condition(row) for row in self.rows}
        new = [i for i, row in enumerate(other.rows) if _condition(row) not in known]
        if subjects[0] != subjects[1] or not new:
            return self
        return replace(
            self,
            rows=[*self.rows, *(other.rows[i] for i in new)],
            returns=np.concatenate([self.returns, other.returns[new]]),
            earlier=(*self.earlier, other.path),
        )

    @property
    def written(self) -> str:
        """When, in UTC."""
        moment = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return f"{moment:%Y-%m-%d %H:%M}"


@dataclass(frozen=True)
class Source:
    """A run, and what there is to say of it.

    Attributes:
        run: the run.
        evaluation: what its complete ones hold; None if there is none that counts.
        gap: why there is none; empty where there is one.
    """

    run: Run
    evaluation: Evaluation | None = None
    gap: str = ""

    @property
    def name(self) -> str:
        """The run's folder."""
        return self.run.path.name

    @property
    def seed(self) -> int | None:
        """Of the training."""
        return self.run.config.get("seed")

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of its ``metrics.csv``."""
        return self.run.rows()

    @property
    def diagnosis(self) -> Path | None:
        """The newest ``diagnosis.json``, if there is one."""
        return next(iter(_newest(self.run.path, DIAGNOSIS)), None)


def read_sources(runs: Sequence[Run]) -> list[Source]:
    """Find what each run offers.

    Runs whose evaluation was made in another way than most are left with a gap: their
    numbers must not stand beside the others'.

    Args:
        runs: at least one.

    Raises:
        InputError: runs that cannot be compared, or one that is given twice.
    """
    _require_comparable(runs)
    found = [(run, *_evaluation(run)) for run in runs]
    protocols = [repr(own.protocol) for _, own, _ in found if own]
    if not protocols:
        return [Source(run, None, gap) for run, _, gap in found]
    usual = Counter(protocols).most_common(1)[0][0]
    model = next(own for _, own, _ in found if own and repr(own.protocol) == usual)
    return [_judged(run, own, gap, model.protocol) for run, own, gap in found]


def not_evaluated(runs: Sequence[Run]) -> list[Run]:
    """The runs without an evaluation that can stand in a report.

    Raises:
        InputError: as `read_sources`.
    """
    return [source.run for source in read_sources(runs) if source.evaluation is None]


def _judged(
    run: Run, own: Evaluation | None, gap: str, usual: Mapping[str, Any]
) -> Source:
    if own is None:
        wanted = f" episodes={usual['episodes']} seed={usual['seed']}"
        return Source(run, None, f"{gap}{wanted}")
    differs = [
        f"{key} {own.protocol[key]} where the others have {value}"
        for key, value in usual.items()
        if own.protocol[key] != value
    ]
    if not differs:
        return Source(run, own)
    reason = f"its evaluation cannot stand beside the others': {', '.join(differs)}"
    return Source(run, None, reason)


def _require_comparable(runs: Sequence[Run]) -> None:
    """Refuse runs of different tasks."""
    first, *rest = runs
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise InputError("report: expected different runs, got one of them twice")
    for run in rest:
        one, other = first.config["env"], run.config["env"]
        keys = [*SHARED, *(key for key in one if key.startswith("reward"))]
        for key in keys:
            if one.get(key) != other.get(key):
                raise InputError(
                    f"runs that cannot be compared: env.{key} is {one.get(key)} in "
                    f"{first.path} and {other.get(key)} in {run.path}"
                )


def _newest(run: Path, name: str) -> list[Path]:
    """The files ``NAME``, ``NAME-2`` … of a run's evaluations, the newest first."""
    stem, suffix = Path(name).stem, Path(name).suffix
    numbered = {
        int(path.stem.removeprefix(stem).removeprefix("-") or 1): path
        for path in (run / "evaluation").glob(f"{stem}*{suffix}")
        if (path.stem.removeprefix(stem).removeprefix("-") or "1").isdigit()
    }
    return [numbered[number] for number in sorted(numbered, reverse=True)]


def _evaluation(run: Run) -> tuple[Evaluation | None, str]:
    """The complete evaluations as one, or None and why there is none."""
    documents = _newest(run.path, DOCUMENT)
    found = [own for own in map(_read, documents) if own is not None]
    if found:
        newest, *rest = found
        for other in rest:
            newest = newest.with_rows_of(other)
        return newest, ""
    command = f"marl-pool evaluate {run.path}"
    if documents:
        return None, f"no evaluation with each episode's return; make one: {command}"
    return None, f"not evaluated yet; do so by: {command}"


def _condition(row: Mapping[str, Any]) -> str:
    """Of a row: who played, and what was done to what they saw, or where."""
    told = {key: row[key] for key in CONDITION}
    rest = {key: row.get(key) or {} for key in ("options", "world")}
    return json.dumps({**told, **rest}, sort_keys=True)


def _read(path: Path) -> Evaluation | None:
    """Read an evaluation; None for one that is not whole, or of an earlier version."""
    returns = path.with_name(path.name.replace(Path(DOCUMENT).stem, Path(RETURNS).stem))
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        rows = about.pop("results")
        table = read_returns(returns.with_suffix(Path(RETURNS).suffix))
    except (OSError, ValueError, KeyError, AttributeError, BadZipFile):
        return None
    whole = "episodes" in about and len(table) == len(rows)
    if not whole or not any(row["policy"] == TRAINED for row in rows):
        return None
    return Evaluation(path, about, rows, table)
