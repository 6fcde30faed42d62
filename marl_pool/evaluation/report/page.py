"""Compose the page and write it."""

import os
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.envs.options import env_label
from marl_pool.evaluation.computing import computing
from marl_pool.evaluation.report import html, sections
from marl_pool.evaluation.report.evaluated import read_runs
from marl_pool.evaluation.report.frame import scores_frame
from marl_pool.evaluation.report.methods import Method, commits_of, methods_of, recorded
from marl_pool.evaluation.report.summary import missing_values, overview, summary
from marl_pool.evaluation.report.videos import videos
from marl_pool.evaluation.settings import ReportSettings
from marl_pool.evaluation.templates import template
from marl_pool.files.atomic import make_folder, new_file
from marl_pool.files.figures import line_styles
from marl_pool.options.names import trust
from marl_pool.runs.metrics import free
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.paths import user_path
from marl_pool.utils.progress import Progress
from marl_pool.version import __version__, commit

if TYPE_CHECKING:
    from jinja2 import Template

ENV_CHARACTERS = 80
"""Maximum length of the environment's name in a file name."""


def report(
    runs: Sequence[Run],
    out: str | None,
    settings: ReportSettings,
    *,
    plugins: Collection[str] = (),
) -> Path:
    """Write a self-contained HTML page about runs, and return its path.

    See `read_runs` for which runs can be compared. ``out`` is the path of a new file,
    by default one in ``reports/``. ``plugins`` are the ``package.module:Class`` names
    that the runs' files may use.

    Raises:
        InputError: the runs cannot be compared, or the file exists.
    """
    path = new_page(out, runs)
    # Evaluations also name perturbations and environments.
    with (
        computing(settings.threads, env_timeout=settings.env_timeout),
        trust(plugins, "a run of the report"),
        Progress(0, unit="sections") as progress,
    ):
        progress.doing = f"writing {path.name}"
        methods = methods_of(read_runs(runs))
        content = _content(methods, settings, plugins)
    text = _template().render(content)
    make_folder(path.parent)
    with new_file(path) as file:
        # A file's name or content may hold what UTF-8 lacks.
        file.write(text.encode("utf-8", "backslashreplace").decode())
    return path


def new_page(out: str | None, runs: Sequence[Run]) -> Path:
    """Return the path of the page, which must not exist yet.

    Raises:
        InputError: ``out`` exists, is a folder, or cannot be written; or a
            configuration names no env.
    """
    # The name comes from a file: it must not contain a path.
    env = re.sub(r"[^\w-]+", "-", env_label(runs[0].env))
    time = f"{datetime.now():%Y%m%d-%H%M%S}"
    default = Path("reports") / f"{time}-{env[:ENV_CHARACTERS]}.html"
    path = free(default) if out is None else user_path(out)
    try:
        if path.exists():
            raise InputError(f"{path} exists; choose another --out")
        above = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        reason = f"--out: expected a path, got {out}: {error.strerror}"
        raise InputError(reason) from error
    # A path that cannot be written is rejected before the page is computed.
    if not above.is_dir():
        raise InputError(f"{path}: expected a path in a folder, but {above} is none")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: {above} does not allow it")
    return path


@cache
def _template() -> "Template":
    filters = (
        html.pluralize,
        html.join_words,
        html.format_number,
        html.format_interval,
        commits_of,
        recorded,
    )
    # Escape everything but figures: names of runs come from users.
    package = "marl_pool.evaluation.report"
    return template(package, "page.html.j2", autoescape=True, filters=filters)


def _content(
    methods: Sequence[Method], settings: ReportSettings, plugins: Collection[str]
) -> dict[str, Any]:
    frame = scores_frame(methods)
    groups = dict(list(frame.groupby("group", sort=False)))
    styles = line_styles(list(dict.fromkeys(method.kind for method in methods)))
    runs = [run for method in methods for run in method.runs]

    # One section per group of agents that learned, or one of all methods.
    overviews = {group: [overview(methods, rows)] for group, rows in groups.items()}
    page = html.label_groups(overviews or {"": [overview(methods, None)]})
    page.append(sections.learning_curves(methods, styles))
    evaluated = {
        group: [
            *(sections.profiles(rows, styles), sections.areas(rows)),
            *(*sections.transfer(rows), *sections.comparison(rows, styles)),
        ]
        for group, rows in groups.items()
    }
    page += html.label_groups(evaluated)

    # Videos need no evaluation, only policies that can be loaded.
    if settings.videos:
        page += videos(methods, groups, plugins)
    page.append(missing_values(methods, frame))
    page.append(html.PageSection("provenance"))
    return {
        "methods": methods,
        "runs": runs,
        "sections": page,
        "summary": summary(methods, frame),
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "version": __version__ + (f", commit {commit()}" if commit() else ""),
    }
