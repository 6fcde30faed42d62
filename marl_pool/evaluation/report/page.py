"""Put the page together and write it."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from marl_pool.atomic import make_folder, new_file
from marl_pool.errors import InputError
from marl_pool.evaluation.report.attention_and_videos import (
    attention,
    learned,
    opened,
    videos,
)
from marl_pool.evaluation.report.comparison import versus
from marl_pool.evaluation.report.components import Section, counted
from marl_pool.evaluation.report.learning_curves import learning
from marl_pool.evaluation.report.methods import Method, methods_of
from marl_pool.evaluation.report.plots import looks_of
from marl_pool.evaluation.report.provenance import gaps, origins
from marl_pool.evaluation.report.robustness import areas, profiles
from marl_pool.evaluation.report.sources import Source, read_sources, require_envs
from marl_pool.evaluation.report.study import Study, groups_of
from marl_pool.evaluation.report.summary import overview, summary
from marl_pool.evaluation.report.theory import theory
from marl_pool.evaluation.report.transfer import elsewhere
from marl_pool.evaluation.subject import Subject, cpu_threads
from marl_pool.names import trust
from marl_pool.progress import Progress
from marl_pool.runs import Run
from marl_pool.version import __version__, commit

TEMPLATE = "page.html.j2"
LONGEST = 80
"""Characters of the environment's name in the name of a page."""
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
        runs: at least one; see `read_sources` for which may stand together.
        out: a new file; None for one in ``reports/``.
        settings: of `ReportSettings`, as plain data.
        plugins: ``package.module:Class`` names that the runs may use.

    Returns:
        The file, HTML that needs nothing else.

    Raises:
        InputError: runs that cannot be compared, or the file exists.
    """
    path = new_page(out, runs)
    # Evaluations name perturbations and environments, too.
    with cpu_threads(settings["threads"]), trust(plugins, "a run of the report"):
        methods = methods_of(read_sources(runs))
        content = _content(methods, settings, plugins)
    html = render(content)
    make_folder(path.parent)
    with new_file(path) as file:
        file.write(html)
    return path


def new_page(out: str | None, runs: Sequence[Run]) -> Path:
    """The path of the page, which no file has.

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
        _require_folder(path)
        return path
    require_envs(runs)
    # The name is a file's word: nothing in it may lead out of the folder.
    env = re.sub(r"[^\w-]+", "-", runs[0].env["name"].rpartition(":")[2])[:LONGEST]
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{env}"
    path, number = Path("reports") / f"{stem}.html", 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{number}.html")
    _require_folder(path)
    return path


def _require_folder(path: Path) -> None:
    """Refuse a path that no file can have, before the work that it is for."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise InputError(f"{path}: expected a path below folders, but {above} is none")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: {above} does not allow it")


def render(content: Mapping[str, Any]) -> str:
    """Fill in the template.

    Args:
        content: what it names.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # The environment escapes whatever is no figure: names of runs come from users.
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
    studies = {group: Study(methods, group) for group in groups_of(methods)}
    looks = looks_of(list(dict.fromkeys(method.kind for method in methods)))
    sections = [] if studies else [overview(methods, None, "")]
    for (group, study), suffix in _suffixed(studies):
        sections += _titled([overview(methods, study, suffix)], group, suffix)
    sections.append(learning(methods, looks))
    for (group, study), suffix in _suffixed(studies):
        own = [profiles(study, looks, suffix), areas(study, suffix)]
        own += [*elsewhere(study, suffix), *versus(study, looks, suffix)]
        sections += _titled(own, group, suffix)
    sections += theory(methods)
    sections += _at_work(methods, studies, settings, plugins)
    sections += [gaps(methods, list(studies.values())), origins(methods)]
    env = methods[0].sources[0].run.config["env"]["name"].rpartition(":")[2]
    return {
        "title": f"{env}: {', '.join(dict.fromkeys(m.kind for m in methods))}",
        "summary": summary(methods, studies),
        "facts": _facts(methods),
        "sections": sections,
    }


def _suffixed(groups: Mapping[str, T]) -> list[tuple[tuple[str, T], str]]:
    """Groups, each with what its sections' anchors end in: a name may be anything."""
    several = len(groups) > 1
    return [
        (item, f"-group{place}" if several else "")
        for place, item in enumerate(groups.items())
    ]


def _titled(sections: Sequence[Section], group: str, suffix: str) -> list[Section]:
    """Name the group in the headings, where there are several."""
    for section in sections:
        if suffix:
            section.title += f" ({group})"
    return list(sections)


def _at_work(
    methods: Sequence[Method],
    studies: Mapping[str, Study],
    settings: Mapping[str, Any],
    plugins: Collection[str],
) -> list[Section]:
    """Attention and videos, of each group that learned."""
    sources = [source for method in methods for source in method.sources]
    subjects = {}
    with Progress(len(sources), unit="runs") as progress:
        for done, source in enumerate(sources, start=1):
            subjects[source.run.path] = opened(source, plugins)
            progress.update(done)
    groups: dict[str, Study | None] = dict(studies)
    if not groups:
        known = [one for one in subjects.values() if isinstance(one, Subject)]
        groups = {name: None for one in known for name in learned(one)}
    sections = []
    for (group, study), suffix in _suffixed(groups):
        own = [attention(methods, subjects, group, suffix)]
        if settings["videos"]:
            own.append(videos(methods, subjects, study, group, suffix))
        sections += _titled(own, group, suffix)
    return sections


def _facts(methods: Sequence[Method]) -> list[str]:
    """What stands below the title."""
    sources: list[Source] = [s for method in methods for s in method.sources]
    lacking = sum(source.evaluation is None for source in sources)
    facts = [
        counted(len(methods), "method"),
        counted(len(sources), "run"),
        f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"by marl_pool {__version__}" + (f", commit {commit()}" if commit() else ""),
    ]
    return facts + ([f"{lacking} without an evaluation"] if lacking else [])
