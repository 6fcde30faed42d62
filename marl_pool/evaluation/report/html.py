"""Components of the page, in HTML, and the format of its numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd
from markupsafe import Markup

from marl_pool.evaluation.statistics.intervals import Interval
from marl_pool.files.figures import INSTALL_PLOTS, figure_style, has_matplotlib, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK = 0.72
"""Tone from which on blue needs white letters."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: its first line.
        title: tooltip, with the provenance of a number or why it is missing.
        tone: in [-1, 1], as a shade from orange over white to blue; None for none.
        missing: it could not be measured.
        small: a second line, such as an interval.
    """

    text: str
    title: str = ""
    tone: float | None = None
    missing: bool = False
    small: str = ""

    @property
    def style(self) -> str:
        """The shade as CSS, in colours that the colour-blind tell apart."""
        if self.tone is None:
            return ""
        end = (230, 159, 0) if self.tone < 0 else (0, 114, 178)
        mixed = [round(255 + (channel - 255) * abs(self.tone)) for channel in end]
        letters = "#fff" if self.tone > DARK else "#222"
        return f"background:rgb({mixed[0]},{mixed[1]},{mixed[2]});color:{letters}"


Component: TypeAlias = "Markup | pd.DataFrame"
"""HTML, or a table: a frame of `Cell`, whose first column has the row headers."""


@dataclass
class PageSection:
    """A section of the page; the template holds its title and its introduction.

    Attributes:
        name: key of the title and introduction in ``sections.html.j2``.
        components: its content.
        facts: variables of the introduction.
        number: distinguishes the anchors of sections of the same name.
        group: group of agents, named in the heading; empty if the page has only one.
    """

    name: str
    components: list[Component] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    number: str = ""
    group: str = ""


def by_group(sections: Mapping[str, Sequence[PageSection]]) -> list[PageSection]:
    """The sections of each group of agents, told apart if there are several groups."""
    if len(sections) > 1:
        for place, (group, group_sections) in enumerate(sections.items()):
            for section in group_sections:
                section.group, section.number = group, f"{section.number}-group{place}"
    return [
        section for group_sections in sections.values() for section in group_sections
    ]


def missing(reason: str) -> Cell:
    """A cell for a value that could not be measured."""
    return Cell("missing", reason, missing=True)


def missing_note(reason: str) -> Markup:
    """A paragraph in place of something that could not be measured."""
    return Markup('<p class="missing">{}</p>').format(reason)


def heading(text: str) -> Markup:
    """A heading inside a section."""
    return Markup("<h3>{}</h3>").format(text)


def figure(draw: Callable[[], "Figure"], caption: str, title: str = "") -> Markup:
    """A picture as inline SVG; without matplotlib a note."""
    if not has_matplotlib():
        return missing_note(f"no figures: {INSTALL_PLOTS}")
    with figure_style():
        picture = Markup(to_svg(draw()))
    shape = '<figure title="{}">{}<figcaption>{}</figcaption></figure>'
    return Markup(shape).format(title, picture, caption)


def number(value: float) -> str:
    """Two decimals below 10, fewer above, with a typographic minus; a dash for NaN."""
    if math.isnan(value):
        return "–"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{digits}f}"
    text = text.removeprefix("-") if float(text) == 0 else text
    return text.replace("-", "\N{MINUS SIGN}")


def span(interval: Interval) -> str:
    """``low to high``; empty if the interval is unknown."""
    if math.isnan(interval.low):
        return ""
    return f"{number(interval.low)} to {number(interval.high)}"


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def counted(count: int, noun: str) -> str:
    """``1 seed`` or ``3 seeds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shade(score: float) -> float | None:
    """The tone of a score: white is 0 or less, blue is 1 or more; None for NaN."""
    return None if math.isnan(score) else min(1.0, max(0.0, score))
