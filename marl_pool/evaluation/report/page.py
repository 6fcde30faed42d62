"""Compose the page and write it."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from marl_pool.atomic import make_folder, new_file
from marl_pool.errors import InputError
from marl_pool.evaluation.report.attention import attention
from marl_pool.evaluation.report.comparison import comparison
from marl_pool.evaluation.report.components import PageSection, counted
from marl_pool.evaluation.report.group_scores import GroupScores, group_scores
from marl_pool.evaluation.report.learning_curves import learning_curves
from marl_pool.evaluation.report.loading import load_policies, trained_groups
from marl_pool.evaluation.report.methods import Method, methods_of
from marl_pool.evaluation.report.provenance import missing_values, provenance
from marl_pool.evaluation.report.robustness import areas, profiles
from marl_pool.evaluation.report.runs import read_runs, validate_envs
from marl_pool.evaluation.report.summary import overview, summary
from marl_pool.evaluation.report.theory import theory
from marl_pool.evaluation.report.transfer import transfer
from marl_pool.evaluation.report.videos import videos
from marl_pool.evaluation.subject import Subject, cpu_threads
from marl_pool.names import trust
from marl_pool.plotting import line_styles
from marl_pool.runs import Run
from marl_pool.version import __version__, commit

TEMPLATE = "page.html.j2"
LONGEST = 80
"""Maximal length of the environment's name in a file name."""
T = TypeVar("T")


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
    html = render(content)
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
    validate_envs(runs)
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


def render(content: Mapping[str, Any]) -> str:
    """Fill in the template."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Everything but figures is escaped: names of runs come from users.
    made = Environment(
        loader=PackageLoader("marl_pool.evaluation.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return made.get_template(TEMPLATE).render(content)


def _content(
    methods: Sequence[Method], settings: Mapping[str, Any], plugins: Collection[str]
) -> dict[str, Any]:
    groups = group_scores(methods)
    styles = line_styles(list(dict.fromkeys(method.kind for method in methods)))
    sections = [] if groups else [overview(methods, None, "")]
    for (name, group), suffix in _with_suffixes(groups):
        sections += _of_group([overview(methods, group, suffix)], name, suffix)
    sections.append(learning_curves(methods, styles))
    for (name, group), suffix in _with_suffixes(groups):
        own = [
            profiles(group, styles, suffix),
            areas(group, suffix),
            *transfer(group, suffix),
            *comparison(group, styles, suffix),
        ]
        sections += _of_group(own, name, suffix)
    sections += theory(methods)
    sections += _policies_at_work(methods, groups, settings, plugins)
    sections += [missing_values(methods, list(groups.values())), provenance(methods)]
    env = methods[0].runs[0].run.config["env"]["name"].rpartition(":")[2]
    return {
        "title": f"{env}: {', '.join(dict.fromkeys(m.kind for m in methods))}",
        "summary": summary(methods, groups),
        "facts": _facts(methods),
        "sections": sections,
    }


def _with_suffixes(groups: Mapping[str, T]) -> list[tuple[tuple[str, T], str]]:
    """Groups by name, each with a suffix for the anchors of its sections."""
    several = len(groups) > 1
    return [
        (item, f"-group{place}" if several else "")
        for place, item in enumerate(groups.items())
    ]


def _of_group(
    sections: Sequence[PageSection], group: str, suffix: str
) -> Sequence[PageSection]:
    """Name the group in the headings, if there are several."""
    for section in sections:
        section.group = group if suffix else ""
    return sections


def _policies_at_work(
    methods: Sequence[Method],
    scores: Mapping[str, GroupScores],
    settings: Mapping[str, Any],
    plugins: Collection[str],
) -> list[PageSection]:
    """Build the sections of attention and videos for each group that learned."""
    loaded = load_policies([one for m in methods for one in m.runs], plugins)
    groups: dict[str, GroupScores | None] = dict(scores)
    if not groups:
        known = [one for one in loaded.values() if isinstance(one, Subject)]
        groups = {name: None for one in known for name in trained_groups(one)}
    sections: list[PageSection] = []
    for (name, group), suffix in _with_suffixes(groups):
        own = [attention(methods, loaded, name, suffix)]
        if settings["videos"]:
            own.append(videos(methods, loaded, group, name, suffix))
        sections += _of_group(own, name, suffix)
    return sections


def _facts(methods: Sequence[Method]) -> list[str]:
    """The line below the title."""
    runs = [one for method in methods for one in method.runs]
    not_evaluated = sum(one.evaluation is None for one in runs)
    facts = [
        counted(len(methods), "method"),
        counted(len(runs), "run"),
        f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"by marl_pool {__version__}" + (f", commit {commit()}" if commit() else ""),
    ]
    missing = [f"{not_evaluated} without an evaluation"] if not_evaluated else []
    return facts + missing
