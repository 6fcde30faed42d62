"""Evaluations and diagnoses of a run: read, checked once and joined."""

import json
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd

from marl_pool.evaluation.diagnosis.files import DOCUMENT as DIAGNOSIS
from marl_pool.evaluation.diagnosis.records import ALL
from marl_pool.evaluation.results import DOCUMENT, RETURNS, read_returns
from marl_pool.runs import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import KEY, is_intact_json
from marl_pool.utils.reading import read_json

AS_TRAINED = "as trained"
IDENTITY = ["group", "policy", "stochastic", "perturbation", "label", "severity"]
IDENTITY += ["options", "transfer_env"]
"""Columns that identify a row of an evaluation."""
SUMMED = ("checked", "violations")
"""Counts, which are summed over heads and runs; other numbers are averaged."""
DAMAGE = (
    *(OSError, ValueError, LookupError, TypeError, EOFError, RecursionError),
    *(BadZipFile, zlib.error),
)
"""Errors on reading a file that is damaged or of another version."""


@dataclass(frozen=True)
class Document:
    """An intact evaluation or diagnosis of a run.

    Attributes:
        path: of its JSON file; of several joined evaluations, that of the newest.
        about: values common to all rows.
        rows: the records of the file. Those of an evaluation have three more columns:
            ``returns`` (an array of one return per episode; episode j is played in the
            same env in every row), ``path`` (of the file) and ``key`` (identifies it).
        protocol: settings that comparable documents share. The checkpoint is the kind
            that was asked for, such as "best": its iteration differs between runs.
    """

    path: Path
    about: dict[str, Any]
    rows: pd.DataFrame
    protocol: dict[str, Any]

    @property
    def paths(self) -> list[Path]:
        """The files that the rows of an evaluation come from, the newest first."""
        return list(self.rows["path"].unique())

    @property
    def written(self) -> str:
        """Modification time of its newest file, in UTC."""
        modified = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return f"{modified:%Y-%m-%d %H:%M}"

    def join(self, other: "Document") -> "Document":
        """Add the rows of an earlier evaluation that this one lacks.

        Both must have measured the same policy by the same protocol: their episodes
        are then played in the same environments, and remain paired.
        """
        # The digest tells policies of one iteration but other configurations apart.
        policy = ("iteration", "config_digest")
        same = all(self.about.get(key) == other.about.get(key) for key in policy)
        if not same or self.protocol != other.protocol:
            return self
        rows = pd.concat([self.rows, other.rows], ignore_index=True)
        return replace(self, rows=rows.drop_duplicates("key"))

    def numbers(self, group: str) -> dict[str, float] | str:
        """The numbers of a diagnosed group by name, or the reason for having none.

        A row for all heads takes precedence; without one, heads are averaged, and
        `SUMMED` columns summed.
        """
        own = self.rows[self.rows["group"] == group]
        if own.empty:
            return f"its diagnosis has no group {group!r}"
        whole = own["head"] == ALL
        own = own[whole | ~whole.any()]
        if reasons := list(filter(None, own["missing"])):
            return str(reasons[0])
        known = own.select_dtypes("number").dropna(axis="columns", how="all")
        return {name: joined(name, column) for name, column in known.items()}


def joined(name: object, values: pd.Series) -> float:
    """The sum of a `SUMMED` column, the mean of another one."""
    return float(values.sum() if name in SUMMED else values.mean())


def evaluation_of(run: Run) -> Document | str:
    """The intact evaluations of a run as one, or the reason why there is none."""
    read = _documents(run, DOCUMENT, _evaluation)
    if intact := [one for one in read if isinstance(one, Document)]:
        return reduce(Document.join, intact)
    if read:
        return f"no evaluation with each episode's return ({read[0]}); make one"
    return "not evaluated yet; do so by"


def diagnosis_of(run: Run) -> Document | str:
    """The newest intact diagnosis of a run.

    Returns:
        Without one, the reason; empty if the run was never diagnosed.
    """
    read = _documents(run, DIAGNOSIS, _diagnosis)
    if intact := [one for one in read if isinstance(one, Document)]:
        return intact[0]
    return f"{read[0]}; make another" if read else ""


def _documents(
    run: Run, name: str, parse: Callable[[Path, dict[str, Any]], Document]
) -> list[Document | str]:
    """Read the files ``NAME``, ``NAME-2`` … of a run's evaluations, newest first."""
    stem = Path(name).stem
    numbered = {
        int(found[1] or 1): path
        for path in run.evaluation_dir.glob(f"{stem}*.json")
        if (found := re.fullmatch(rf"{stem}(?:-([0-9]+))?\.json", path.name))
    }
    return [_read(numbered[number], parse) for number in sorted(numbered)[::-1]]


def _read(
    path: Path, parse: Callable[[Path, dict[str, Any]], Document]
) -> Document | str:
    """Read a document, or return why it cannot be used."""
    try:
        content = read_json(path)
        if KEY in content and is_intact_json(content):
            return parse(path, content)
        problem = "its checksum differs: it has changed since it was written"
    except DAMAGE as error:
        # The page does not show the folders above a run.
        reason = str(error).replace(f"{path.parent}{os.sep}", "")
        problem = f"it cannot be used: {type(error).__name__}, {reason}"
    return f"{path.name}: {problem}"


def _evaluation(path: Path, content: dict[str, Any]) -> Document:
    results = content.pop("results")
    rows = pd.DataFrame(results)[[*IDENTITY, "fixed", "missing"]]
    # The returns lie beside the document.
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
    # Make a key of each row's identity.
    keys = [
        json.dumps([row[key] for key in IDENTITY], sort_keys=True) for row in results
    ]
    rows = rows.assign(returns=list(returns), path=path, key=keys)
    protocol = _protocol(content, "seed", "episodes", "checkpoint", "rescale_codes")
    return Document(path, content, rows, protocol)


def _diagnosis(path: Path, content: dict[str, Any]) -> Document:
    text = dict.fromkeys(("group", "head", "missing"), str)
    rows = pd.DataFrame(content.pop("rows")).astype(text)
    return Document(path, content, rows, _protocol(content))


def _protocol(about: dict[str, Any], *keys: str) -> dict[str, Any]:
    chosen = {key: about[key] for key in keys or ("seed", "checkpoint")}
    return {**chosen, "env": about["changed"] or AS_TRAINED}
