"""Compose the page and write it."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.loading import EvaluationTarget, cpu_threads
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.attention import attention
from marl_pool.evaluation.report.comparison import comparison
from marl_pool.evaluation.report.group_scores import group_scores
from marl_pool.evaluation.report.learning_curves import learning_curves
from marl_pool.evaluation.report.methods import (
    Method,
    files_of,
    methods_of,
    recorded,
)
from marl_pool.evaluation.report.robustness import areas, profiles, transfer
from marl_pool.evaluation.report.runs import load_policies, read_runs, trained_groups
from marl_pool.evaluation.report.summary import missing_values, overview, summary
from marl_pool.evaluation.report.theory import theory
from marl_pool.evaluation.report.videos import videos
from marl_pool.runs import Run
from marl_pool.utils.atomic import make_folder, new_file
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import trust
from marl_pool.utils.plotting import line_styles
from marl_pool.version import __version__, commit

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATE = "page.html.j2"
LONGEST = 80
"""Maximal length of the environment's name in a file name."""


def report(
    runs: Sequence[Run],
    out: str | None,
    settings: Mapping[str, Any],
    *,
    plugins: Collection[str] = (),
) -> Path:
    """Write one page about runs.

    Args:
        runs: at least one; see `read_runs` for which may be compared.
        out: a new file; None for one in ``reports/``.
        settings: of `ReportSettings`, as plain data.
        plugins: ``package.module:Class`` names that files of the runs may name.

    Returns:
        The file, HTML that needs nothing else.

    Raises:
        InputError: runs that cannot be compared, or the file exists.
    """
    path = new_page(out, runs)
    # Evaluations also name perturbations and environments.
    with cpu_threads(settings["threads"]), trust(plugins, "a run of the report"):
        methods = methods_of(read_runs(runs))
        content = _content(methods, settings, plugins)
    html = _templates().get_template(TEMPLATE).render(content)
    make_folder(path.parent)
    with new_file(path) as file:
        file.write(html)
    return path


def new_page(out: str | None, runs: Sequence[Run]) -> Path:
    """The path of the page, which must not exist.

    Raises:
        InputError: the one asked for exists, is a folder, or cannot be written; or a
            configuration names no env.
    """
    if out is not None:
        path = Path(out)
        try:
            taken = path.exists()
        except OSError as error:
            raise InputError(
                f"--out: expected a path, got {out}: {error.strerror}"
            ) from error
        if taken:
            raise InputError(f"{path} exists; choose another --out")
        _validate_folder(path)
        return path
    # The name comes from a file: it must not contain a path.
    env = re.sub(r"[^\w-]+", "-", runs[0].env["name"].rpartition(":")[2])[:LONGEST]
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{env}"
    path, number = Path("reports") / f"{stem}.html", 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{number}.html")
    _validate_folder(path)
    return path


def _validate_folder(path: Path) -> None:
    """Reject a path that cannot be written, before the page is computed."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise InputError(f"{path}: expected a path below folders, but {above} is none")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: {above} does not allow it")


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Everything but figures is escaped: names of runs come from users.
    made = Environment(
        loader=PackageLoader("marl_pool.evaluation.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (html.counted, html.listed, html.number, html.span, files_of, recorded)
    made.filters |= {function.__name__: function for function in filters}
    return made


def _content(
    methods: Sequence[Method], settings: Mapping[str, Any], plugins: Collection[str]
) -> dict[str, Any]:
    groups = group_scores(methods)
    styles = line_styles(list(dict.fromkeys(method.kind for method in methods)))
    runs = [one for method in methods for one in method.runs]

    # One section per group of agents that learned, or one of all methods.
    overviews = {name: [overview(methods, group)] for name, group in groups.items()}
    sections = html.by_group(overviews or {"": [overview(methods, None)]})
    sections.append(learning_curves(methods, styles))
    evaluated = {
        name: [
            profiles(group, styles),
            areas(group),
            *transfer(group),
            *comparison(group, styles),
        ]
        for name, group in groups.items()
    }
    sections += html.by_group(evaluated)
    sections += theory(methods)

    # Attention and videos need no evaluation, but policies that can be loaded.
    loaded = load_policies(runs, plugins)
    known = (one for one in loaded.values() if isinstance(one, EvaluationTarget))
    names = groups or dict.fromkeys(
        name for one in known for name in trained_groups(one)
    )
    at_work = {name: [attention(methods, loaded, name)] for name in names}
    for name, own in at_work.items() if settings["videos"] else ():
        own.append(videos(methods, loaded, groups.get(name), name))
    sections += html.by_group(at_work)
    sections.append(missing_values(methods, list(groups.values())))
    sections.append(html.PageSection("provenance"))
    return {
        "methods": methods,
        "runs": runs,
        "sections": sections,
        "summary": summary(methods, groups),
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "version": __version__ + (f", commit {commit()}" if commit() else ""),
    }
