"""Evaluations of a run: read, checked once and joined."""

import json
import os
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from marl_pool.evaluation.results import DOCUMENT, RETURNS, read_returns
from marl_pool.runs import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import KEY, is_intact_json
from marl_pool.utils.reading import read_json

AS_TRAINED = "as trained"
IDENTITY = ["group", "policy", "stochastic", "perturbation", "label", "severity"]
IDENTITY += ["options", "transfer_env"]
"""Columns that identify a row of an evaluation."""
DAMAGE = (OSError, ValueError, LookupError, TypeError, RecursionError)
"""Errors on reading a file that is damaged or of another version."""


@dataclass(frozen=True)
class Evaluation:
    """An intact evaluation of a run, or several joined ones.

    Attributes:
        path: of its JSON file; of several, that of the newest.
        about: values common to all rows.
        rows: the records of the file, and three more columns: ``returns`` (an array of
            one return per episode; episode j is played in the same env in every row),
            ``path`` (of the file) and ``key`` (identifies it).
        protocol: settings that comparable evaluations share. The checkpoint is the kind
            that was asked for, such as "best": its iteration differs between runs.
    """

    path: Path
    about: dict[str, Any]
    rows: pd.DataFrame
    protocol: dict[str, Any]

    @property
    def paths(self) -> list[Path]:
        """The files that the rows come from, the newest first."""
        return list(self.rows["path"].unique())

    @property
    def written(self) -> str:
        """Modification time of its newest file, in UTC."""
        modified = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return f"{modified:%Y-%m-%d %H:%M}"

    def join(self, other: "Evaluation") -> "Evaluation":
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


def evaluation_of(run: Run) -> Evaluation | str:
    """The intact evaluations of a run as one, or the reason why there is none."""
    stem = Path(DOCUMENT).stem
    # Read ``results.json``, ``results-2.json`` …, the newest first.
    numbered = {
        int(found[1] or 1): path
        for path in run.evaluation_dir.glob(f"{stem}*.json")
        if (found := re.fullmatch(rf"{stem}(?:-([0-9]+))?\.json", path.name))
    }
    read = [_read(numbered[number]) for number in sorted(numbered)[::-1]]
    if intact := [one for one in read if isinstance(one, Evaluation)]:
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
    identities = [[row[key] for key in IDENTITY] for row in results]
    keys = [json.dumps(identity, sort_keys=True) for identity in identities]
    rows = rows.assign(returns=list(returns), path=path, key=keys)
    shared = ("seed", "episodes", "checkpoint")
    protocol = {key: content[key] for key in shared}
    protocol["env"] = content["changed"] or AS_TRAINED
    return Evaluation(path, content, rows, protocol)
