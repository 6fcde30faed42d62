"""Runs with known evaluation results for tests of reports, and readers of reports."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.evaluation.report.evaluated import read_runs
from marl_pool.evaluation.report.frame import scores_frame
from marl_pool.evaluation.report.methods import methods_of
from marl_pool.evaluation.report.page import report
from marl_pool.evaluation.results import (
    DOCUMENT,
    RETURNS,
    Files,
    Result,
    write_json,
    write_returns,
)
from marl_pool.evaluation.settings import ReportSettings
from marl_pool.policies import make_policy
from marl_pool.policies.storage import save_policies
from marl_pool.runs.run import Run

EPISODES = 16
SMALL = ("env.max_steps=6", "env.num_noise=3", "encoder.num_layers=1")
SETTINGS = ReportSettings(videos=False, threads=1)
SCORES = {0.0: 0.8, 0.25: 0.75, 0.5: 0.6, 1.0: 0.2}
"""Scores under occlusion."""


# A factory of runs


def trained(path: Path, *overrides: str, seed: int = 0, rows: int = 5) -> Run:
    """Make a run with learning curves but no policy."""
    run = Run.create(path, {**deepcopy(composed(*overrides)), "seed": seed})
    lines = ["iteration,env_steps,return_mean", "1,64,"]
    lines += [f"{k},{64 * k},{-3 / k - 0.1 * seed}" for k in range(2, 2 + rows)]
    run.metrics_path.write_text("\n".join(lines) + "\n")
    return run


@cache
def composed(*overrides: str) -> dict[str, Any]:
    return compose("train", [*SMALL, *overrides])


def with_policy(run: Run) -> Run:
    config = run.config
    group = make_batched_env(num_envs=1, **config["env"]).groups["agent"]
    parts = {"encoder": config["encoder"], "pooling": config["pooling"]}
    policy = make_policy(group.tokens, group.action_space, **parts, seed=1)
    with run.save_policy_dir() as folder:
        save_policies({"agent": policy}, {"agent": "agent"}, folder)
    return run


def evaluated(
    run: Run,
    *,
    shift: float = 0.0,
    episodes: int = EPISODES,
    lost: Sequence[float] = (),
    scripted: bool = True,
    groups: Sequence[str] = ("agent",),
    fixed: Sequence[str] = (),
    severities: Sequence[float] = (0.5, 1.0),
    transfers: Mapping[str, tuple[Mapping[str, Any], float]] | None = None,
    **overrides: Any,
) -> Run:
    """Write an evaluation whose scores are `SCORES` plus ``shift``.

    ``transfers`` has environment options and a score for each label; ``fixed`` are the
    groups that did not learn; ``lost`` are the severities without results.

    Returns are -2 for the random policy and -1 for the scripted one, plus an
    offset for each episode, which cancels in scores.
    """
    offsets = np.random.default_rng(0).normal(size=episodes)
    results: list[Result] = []
    table: list[np.ndarray] = []

    def add(level: float, **row: Any) -> None:
        for group in groups:
            fields = {"policy": "trained", "stochastic": False, **row}
            fields["fixed"] = group in fixed
            results.append(Result(group=group, **fields))
            missing = np.full(episodes, np.nan)
            table.append(missing if row.get("missing") else level - 2 + offsets)

    clean = {"perturbation": "clean", "label": "clean", "severity": 0.0}
    add(SCORES[0.0] + shift, **clean)
    for severity in severities:
        reason = "a reason" if severity in lost else ""
        occlude = {"perturbation": "occlude", "label": "occlude", "severity": severity}
        add(SCORES[severity] + shift, **occlude, missing=reason)
    jitter = {"perturbation": "jitter", "label": "jitter", "severity": 0.2}
    add(0.7 + shift, **jitter, options={"features": None})
    if transfers is None:
        transfers = {"more noise": ({"num_noise": 9}, 0.4)}
    other = {"perturbation": "transfer", "severity": 0.0}
    envs = [
        ({**other, "label": label, "transfer_env": env}, score)
        for label, (env, score) in transfers.items()
    ]
    for transfer, score in envs:
        add(score + shift, **transfer)
    for policy, level in (("random", 0.0), ("heuristic", 1.0)):
        if policy == "random" or scripted:
            for condition in (clean, *(transfer for transfer, _ in envs)):
                add(level, policy=policy, **condition)
    files = Files(run.make_evaluation_dir())
    document: dict[str, Any] = {
        **{"run": run.path.name, "env": run.config["env"], "changed": {}, "seed": 0},
        **{"checkpoint": "best", "iteration": 3, "episodes": episodes},
        **{"commit": "0123abc", "package_version": "9"},
    }
    write_json(files.path(DOCUMENT), results, {**document, **overrides})
    write_returns(files.path(RETURNS), np.stack(table))
    return run


def several(folder: Path, heads: Sequence[str], seeds: int, *keys: str) -> list[Run]:
    """Make runs of several heads; scores rise by 0.1 a head and by 0.01 a seed."""
    mark = "".join(key.partition("=")[2] for key in keys)
    return [
        evaluated(
            trained(
                folder / f"{head}{mark}-{seed}", f"pooling={head}", *keys, seed=seed
            ),
            shift=0.1 * place + 0.01 * seed,
        )
        for place, head in enumerate(heads)
        for seed in range(seeds)
    ]


def frame_of(runs: Sequence[Run], group: str = "agent") -> pd.DataFrame:
    """Return the rows of a group in the runs' frame of scores."""
    frame = scores_frame(methods_of(read_runs(runs)))
    return frame[frame["group"] == group]


def cell_of(
    frame: pd.DataFrame,
    test: str,
    label: str = "clean",
    *severities: float,
    method: str = "ada",
) -> Any:
    """Return a method's row for a level, an area over severities or another test."""
    ladder = (0.0, *severities) if test == "area" else ()
    level = severities[0] if test == "level" else 0.0
    rows = frame[(frame["method"] == method) & (frame["test"] == test)]
    rows = rows[(rows["label"] == label) & (rows["level"] == level)]
    (row,) = (row for row in rows.itertuples() if row.severities == ladder)
    return row


def points_of(*args: Any, **kwargs: Any) -> list[float]:
    """Return the score of each seed in the row that `cell_of` selects."""
    points: list[float] = cell_of(*args, **kwargs).scores.points[:, 0].tolist()
    return points


def written(runs: Sequence[Run], folder: Path, **settings: Any) -> str:
    path = report(runs, str(folder / "page.html"), replace(SETTINGS, **settings))
    return path.read_text(encoding="utf-8")


class Page(NamedTuple):
    """A written page, for tests that only read it."""

    runs: list[Run]
    html: str


def page_of(runs: list[Run], folder: Path, **settings: Any) -> Page:
    return Page(runs, written(runs, folder, **settings))


class Reader(HTMLParser):
    """A parsed page: its tags, attributes and text, and its table cells.

    A cell is a list of its section, text, title and class.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text, self.section, self.inside = "", "", False
        self.cells: list[list[str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes |= set(values)
        if tag == "section":
            self.section = values["id"]
        if tag == "td":
            self.inside = True
            title, kind = (values.get(name, "") for name in ("title", "class"))
            self.cells.append([self.section, "", title, kind])

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "td"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.inside:
            self.cells[-1][1] += data + " "


def cells(html: str, section: str) -> list[tuple[str, str, str]]:
    """Return text, title and class of each cell of a section."""
    rows = Reader(html).cells
    return [(text.strip(), *words) for place, text, *words in rows if place == section]


def gaps(html: str, section: str) -> list[str]:
    """Return the reasons in a section's cells without results."""
    return [title for _, title, kind in cells(html, section) if kind == "missing"]


def section_of(html: str, section: str) -> str:
    return html[html.index(f'id="{section}"') :].partition("</section>")[0]


def texts(html: str) -> str:
    """Return the visible text in one line."""
    return " ".join(
        re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", html, flags=re.S).split()
    )
