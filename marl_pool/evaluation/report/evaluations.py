"""The evaluations of a run: read, validated and joined into one table."""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd

from marl_pool.evaluation.results import (
    CLEAN,
    DOCUMENT,
    RETURNS,
    TRAINED,
    read_returns,
)
from marl_pool.runs import Run
from marl_pool.utils.manifest import is_intact_json
from marl_pool.utils.reading import read_json

AS_TRAINED = "as trained"
KEY = ["group", "policy", "stochastic", "perturbation", "label", "severity"]
"""Keys that, with the options, identify a row of an evaluation."""
Kinds = Mapping[str, tuple[type, ...]]
ABOUT: Kinds = {
    "seed": (int,),
    "episodes": (int,),
    "checkpoint": (int, str),
    "env": (dict,),
    "changed": (dict,),
    "rescale_codes": (bool,),
}
ROW: Kinds = {
    **dict.fromkeys(("group", "policy", "perturbation", "label", "missing"), (str,)),
    **dict.fromkeys(("stochastic", "fixed"), (bool,)),
    **dict.fromkeys(("options", "transfer_env"), (dict,)),
    "severity": (int, float),
}
"""Required keys of a document and of its rows, and the types of their values."""
DEFAULTS: dict[str, Any] = {"changed": {}, "rescale_codes": False}
"""Values that evaluations of earlier versions left out."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run, or several joined.

    Attributes:
        path: of its ``results.json``; of several, that of the newest.
        about: values common to all rows.
        rows: one row per condition and policy, with the columns of ``results.json``,
            ``returns`` (an array of one return per episode; episode j is played in the
            same env in every row), ``path`` (its file) and ``key`` (identifies it).
    """

    path: Path
    about: dict[str, Any]
    rows: pd.DataFrame

    @property
    def protocol(self) -> dict[str, Any]:
        """Settings that comparable evaluations share.

        The checkpoint is the kind that was asked for, such as "best": its iteration
        differs between runs.
        """
        return {
            **{key: self.about[key] for key in ("seed", "episodes")},
            "env": self.about["changed"] or AS_TRAINED,
            "checkpoint": self.about["checkpoint"],
            "rescale_codes": self.about["rescale_codes"],
        }

    @property
    def learned(self) -> list[str]:
        """The groups of agents whose policies were trained."""
        return list(self.rows[is_trained(self.rows)]["group"].unique())

    @property
    def paths(self) -> list[Path]:
        """The files that its rows come from, the newest first."""
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
        for key in ("iteration", "config_digest"):
            if self.about.get(key) != other.about.get(key):
                return self
        if self.protocol != other.protocol:
            return self
        new = other.rows[~other.rows["key"].isin(self.rows["key"])]
        return replace(self, rows=pd.concat([self.rows, new], ignore_index=True))


def is_trained(rows: pd.DataFrame) -> pd.Series:
    """Mask of the rows of deterministic trained policies."""
    return (rows["policy"] == TRAINED) & ~rows["stochastic"] & ~rows["fixed"]


def numbered_files(run: Path, name: str) -> list[Path]:
    """The files ``NAME``, ``NAME-2`` … of a run's evaluations, the newest first."""
    stem, suffix = Path(name).stem, Path(name).suffix
    pattern = re.compile(rf"{stem}(?:-([0-9]+))?{re.escape(suffix)}")
    numbered = {
        int(found[1] or 1): path
        for path in (run / "evaluation").glob(f"{stem}*{suffix}")
        if (found := pattern.fullmatch(path.name))
    }
    return [numbered[number] for number in sorted(numbered, reverse=True)]


def evaluation_of(run: Run) -> Evaluation | str:
    """The complete evaluations of a run as one, or the reason why there is none."""
    documents = numbered_files(run.path, DOCUMENT)
    read = [_read(path) for path in documents]
    found = [one for one in read if isinstance(one, Evaluation)]
    if found:
        newest, *earlier = found
        for one in earlier:
            newest = newest.join(one)
        return newest
    if documents:
        reason = f"{documents[0].name}: {read[0]}"
        return f"no evaluation with each episode's return ({reason}); make one"
    return "not evaluated yet; do so by"


def read_document(path: Path) -> dict[str, Any] | str:
    """Read a JSON object, or return why it cannot be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError):
        return "it cannot be read as JSON"
    return content if isinstance(content, dict) else "expected a JSON object"


def checksum_problem(content: Mapping[str, Any]) -> str:
    """The reason to distrust a document; empty if its checksum is right."""
    if is_intact_json(content):
        return ""
    return "it has changed since it was written: its checksum differs"


def missing_key(content: Mapping[str, Any], kinds: Kinds) -> str:
    """The first key that is missing or has a value of another type; empty if none."""
    return next((k for k, own in kinds.items() if type(content.get(k)) not in own), "")


def _read(path: Path) -> Evaluation | str:
    """Read an evaluation, or return why it is not complete."""
    content = read_document(path)
    if isinstance(content, str):
        return content
    about = {**DEFAULTS, **content}
    rows = about.pop("results", None)
    key = missing_key(about, ABOUT)
    if key or not isinstance(rows, list):
        return f"it has no {key or 'results'} as expected"
    if not rows or any(type(r) is not dict or missing_key(r, ROW) for r in rows):
        return "its results are not rows as expected"
    name = path.name.replace(Path(DOCUMENT).stem, Path(RETURNS).stem)
    returns_path = path.with_name(name).with_suffix(Path(RETURNS).suffix)
    if not returns_path.is_file():
        return f"there is no {returns_path.name}"
    try:
        returns = read_returns(returns_path)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error):
        # A TypeError is raised for a file of one array in place of an archive.
        return f"{returns_path.name} cannot be read"
    if problem := _shape_problem(returns, len(rows), about["episodes"]):
        return problem
    frame = pd.DataFrame(
        {name: [row[name] for row in rows] for name in ROW}
        | {"returns": list(returns), "path": path, "key": [_key(row) for row in rows]}
    )
    # The checksum comes last: the other messages are more exact.
    problem = _row_problem(frame) or checksum_problem(content)
    return problem or Evaluation(path, about, frame)


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps(
        [row[k] for k in (*KEY, "options", "transfer_env")], sort_keys=True
    )


def _shape_problem(returns: np.ndarray, rows: int, episodes: int) -> str:
    if returns.shape == (rows, episodes) and returns.dtype.kind == "f" and episodes:
        return ""
    return (
        f"expected returns of {rows} rows and {episodes} episodes, got {returns.dtype} "
        f"of shape {returns.shape}"
    )


def _row_problem(rows: pd.DataFrame) -> str:
    """The reason to reject the rows of an evaluation; empty if there is none."""
    if not rows["severity"].between(0, 1).all():
        return "a severity is not in [0, 1]"
    measured = rows["missing"] == ""
    if not np.isfinite(np.concatenate([[0.0], *rows["returns"][measured]])).all():
        return "a return is not a finite number"
    trained = is_trained(rows)
    clean = trained & measured & (rows["perturbation"] == CLEAN)
    if not trained.any() or set(rows["group"][trained]) != set(rows["group"][clean]):
        return "a trained policy's unperturbed episodes are missing"
    return ""
