"""The pages of results: snippets run, commands exist, links lead somewhere."""

import re
import shlex

import head_map_tables
import pandas as pd
import pytest

from helpers.paths import ROOT
from marl_pool.cli import arguments
from marl_pool.config import STUDIES, compose, compose_only
from marl_pool.training.jobs import JOBS

DOCS = ROOT / "docs"
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")
REPRODUCTION = (DOCS / "reproduction.md").read_text(encoding="utf-8")
FINDINGS = (DOCS / "findings.md").read_text(encoding="utf-8")
MAP = (DOCS / "map.md").read_text(encoding="utf-8")
PAGES = {
    "results.md": RESULTS,
    "reproduction.md": REPRODUCTION,
    "findings.md": FINDINGS,
    "map.md": MAP,
}
VERDICTS = (
    "reproduced",
    "direction only",
    "contradicted",
    "too early",
    "other settings",
    "not comparable",
    "not run",
    "by construction",
    "another experiment",
)
COUNTS = {
    "AdaPool": {"Table": 16, "Figure": 10},
    "SWARM": {"Table": 3, "Figure": 6},
    "AttentionNeuron": {"Table": 6, "Figure": 8},
    "Hierarchical transformers": {"Table": 3, "Figure": 5},
}
"""Tables and figures of each paper."""


def section(page: str, title: str) -> str:
    """Return the text under a heading of the second level."""
    sections = re.findall(rf"^## {title}.*?\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert len(sections) == 1, title
    return str(sections[0])


def snippets() -> list[tuple[str, str]]:
    """Each snippet of the published results, and the output that the page shows."""
    return re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", FINDINGS, re.S)


def commands() -> list[list[str]]:
    """The commands in the table of all results, split into words."""
    matches = re.findall(r"`(marl-pool [^`]+)`", REPRODUCTION)
    return [shlex.split(text)[1:] for text in dict.fromkeys(matches)]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its header."""
    lines = re.findall(r"^\| (.*) \|$", section(REPRODUCTION, title), re.M)
    return [line.split(" | ") for line in lines[1:]]


def rounded(printed: str) -> list[str]:
    """Return the lines, with numbers that are zero up to rounding replaced."""
    return re.sub(r"\de-1\d|0e\+00", "nothing", printed).split("\n")


def test_every_finding_has_a_snippet() -> None:
    findings = re.findall(r"^## \d\. .*?(?=^## )", FINDINGS, re.M | re.S)
    assert len(findings) == 5
    assert all("```python" in finding for finding in findings)
    assert len(snippets()) == 6


def test_the_page_of_results_is_short() -> None:
    assert len(RESULTS.splitlines()) <= 200


def test_the_map_has_the_tables_of_its_data() -> None:
    table = pd.read_csv(DOCS / "data" / "head_map.csv")
    assert head_map_tables.report(table) in MAP


@pytest.mark.parametrize("number", range(len(snippets())))
def test_a_snippet_runs_and_prints_what_the_page_says(number, capsys):
    code, printed = snippets()[number]
    exec(compile(code, f"findings {number}", "exec"), {})
    assert rounded(capsys.readouterr().out) == rounded(printed)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_is_understood(words: list[str]) -> None:
    namespace, overrides = arguments.parse(words)
    if namespace.verb == "sweep":
        study = STUDIES[namespace.trained_by]
        assert compose_only(study, [first_value(text) for text in overrides])
    elif namespace.verb in JOBS:
        compose(namespace.verb, overrides)
    else:
        assert namespace.verb == "evaluate"


def first_value(override: str) -> str:
    """Keep the first of several values: composing hundreds of trials takes minutes."""
    key, _, value = override.partition("=")
    if "," not in value:
        return override
    return f"{key}={value.removeprefix('range(').partition(',')[0]}"


@pytest.mark.parametrize("paper", COUNTS)
def test_every_published_result_has_a_verdict(paper: str) -> None:
    for row in rows(paper):
        assert any(verdict in row[-2] for verdict in VERDICTS), row[0]


@pytest.mark.parametrize("paper", COUNTS)
def test_every_table_and_figure_is_named(paper: str) -> None:
    for kind, count in COUNTS[paper].items():
        assert numbers_of(kind, section(REPRODUCTION, paper)) >= set(
            range(1, count + 1)
        )


def numbers_of(kind: str, text: str) -> set[int]:
    """The numbers in "Table 2", "Figures 4 and 5" and "Tables 1 to 3, 6 and 9"."""
    numbers: set[int] = set()
    for listing in re.findall(rf"{kind}s? (\d+(?:(?:, | and | to )\d+)*)", text):
        for part in re.split(r", | and ", listing):
            first, _, last = part.partition(" to ")
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_to_files_and_headings(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        file = DOCS / (name or page)
        assert file.is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M)
            assert anchor in map(slug, headings), link


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
