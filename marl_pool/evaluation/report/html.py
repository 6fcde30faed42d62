"""Components of the page, in HTML, and the format of its numbers."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd
from markupsafe import Markup

from marl_pool.evaluation.statistics.intervals import Interval
from marl_pool.files.figures import INSTALL_PLOTS, figure_style, has_matplotlib, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORANGE, BLUE = (230, 159, 0), (0, 114, 178)
"""Colors of the tones -1 and 1."""
DARK = 0.72
"""Above this tone the text is white."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: its first line.
        title: tooltip, with the provenance of a number or why it is missing.
        tone: shade in [-1, 1], from orange over white to blue; None for no shade.
        missing: the value could not be measured.
        small: a second line, such as an interval.
    """

    text: str
    title: str = ""
    tone: float | None = None
    missing: bool = False
    small: str = ""

    @property
    def style(self) -> str:
        """The shade as CSS, in colors that are safe for color blindness."""
        if self.tone is None:
            return ""
        color = ORANGE if self.tone < 0 else BLUE
        mixed = [round(255 + (channel - 255) * abs(self.tone)) for channel in color]
        text_color = "#fff" if self.tone > DARK else "#222"
        return f"background:rgb({mixed[0]},{mixed[1]},{mixed[2]});color:{text_color}"


Component: TypeAlias = "Markup | pd.DataFrame"
"""HTML, or a table: a frame of `Cell` whose first column holds the row headers."""


@dataclass
class PageSection:
    """A section of the page; the template holds its title and its introduction.

    Attributes:
        name: key of the title and introduction in ``sections.html.j2``.
        components: its content.
        facts: variables of the introduction.
        anchor: suffix of its anchor, where several sections share a name.
        group: group of agents, named in the heading; empty if the page has only one.
    """

    name: str
    components: list[Component] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    anchor: str = ""
    group: str = ""


def label_groups(sections: Mapping[str, Sequence[PageSection]]) -> list[PageSection]:
    """Return the sections of all groups, labelled if there are several groups."""
    if len(sections) == 1:
        return [*itertools.chain(*sections.values())]
    return [
        replace(section, group=group, anchor=f"{section.anchor}-group{place}")
        for place, (group, group_sections) in enumerate(sections.items())
        for section in group_sections
    ]


def missing_cell(reason: str) -> Cell:
    """Build a cell for a value that could not be measured."""
    return Cell("missing", reason, missing=True)


def missing_note(reason: str) -> Markup:
    """Build a paragraph in place of something that could not be measured."""
    return Markup('<p class="missing">{}</p>').format(reason)


def heading(text: str) -> Markup:
    """Build a heading inside a section."""
    return Markup("<h3>{}</h3>").format(text)


def figure(draw: Callable[[], "Figure"], caption: str, title: str = "") -> Markup:
    """Draw a figure as inline SVG; without matplotlib, return a note."""
    if not has_matplotlib():
        return missing_note(f"no figures: {INSTALL_PLOTS}")
    with figure_style():
        picture = Markup(to_svg(draw()))
    template = '<figure title="{}">{}<figcaption>{}</figcaption></figure>'
    return Markup(template).format(title, picture, caption)


def format_number(value: float) -> str:
    """Format with two decimals, one from 10 on, none from 100 on; NaN is a dash."""
    if math.isnan(value):
        return "–"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{digits}f}"
    text = text.removeprefix("-") if float(text) == 0 else text
    return text.replace("-", "\N{MINUS SIGN}")


def format_interval(interval: Interval) -> str:
    """Format ``low to high``; empty if the interval is unknown."""
    if math.isnan(interval.low):
        return ""
    return f"{format_number(interval.low)} to {format_number(interval.high)}"


def join_words(words: Sequence[str]) -> str:
    """Join as ``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def pluralize(count: int, noun: str) -> str:
    """Format ``1 seed`` or ``3 seeds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def score_tone(score: float) -> float | None:
    """Clip a score to a tone from 0, white, to 1, blue; None for NaN."""
    return None if math.isnan(score) else min(1.0, max(0.0, score))
