"""The pieces that a page is put together from, and how its numbers are written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from marl_pool.evaluation.statistics import Interval


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what stands in it.
        title: where the number comes from; shown when it is pointed at.
        tone: its place between the table's lowest and highest number, in [0, 1], as a
            shade; None for none.
        gap: it could not be measured.
        small: a second line, such as an interval.
    """

    text: str
    title: str = ""
    tone: float | None = None
    gap: bool = False
    small: str = ""

    @property
    def style(self) -> str:
        """The shade as CSS, from orange over white to blue: safe for the colour-blind.

        Dark shades come with white letters.
        """
        if self.tone is None:
            return ""
        end = (230, 159, 0) if self.tone < 0.5 else (0, 114, 178)
        share = abs(self.tone - 0.5) * 2
        mixed = [round(255 + (part - 255) * share) for part in end]
        letters = "#fff" if self.tone > 0.86 else "#222"
        return f"background:rgb({mixed[0]},{mixed[1]},{mixed[2]});color:{letters}"


@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row is its name."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Figure:
    """A picture as SVG that stands in the page itself."""

    svg: str
    caption: str
    title: str = ""
    kind: Literal["figure"] = "figure"


@dataclass(frozen=True)
class Film:
    """A video, WebM in base64; ``columns`` says what is side by side in it."""

    data: str
    columns: Sequence[str]
    caption: str
    title: str = ""
    kind: Literal["film"] = "film"


@dataclass(frozen=True)
class Note:
    """A paragraph; ``gap`` marks what could not be shown, and why."""

    text: str
    gap: bool = False
    kind: Literal["note"] = "note"


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str
    kind: Literal["heading"] = "heading"


Block = Table | Figure | Film | Note | Heading


@dataclass
class Section:
    """A part of the page with a heading.

    Attributes:
        id: of the anchor.
        title: the heading.
        lead: what the reader is looking at.
        blocks: what comes below.
    """

    id: str
    title: str
    lead: str = ""
    blocks: list[Block] = field(default_factory=list)


def number(value: float) -> str:
    """Two decimals below 10, fewer above, with a real minus; a dash for none."""
    if math.isnan(value):
        return "–"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{digits}f}"
    text = text.removeprefix("-") if float(text) == 0 else text
    return text.replace("-", "\N{MINUS SIGN}")


def span(interval: Interval) -> str:
    """Both ends of an interval in words; empty if it has none."""
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


def shaded(
    values: Sequence[float], low: float | None = None, high: float | None = None
) -> list[float | None]:
    """Each number's place between the lowest and the highest; None for NaN."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return [None] * len(values)
    bottom = min(known) if low is None else low
    length = (max(known) if high is None else high) - bottom
    return [
        None
        if math.isnan(value)
        else 0.5
        if length == 0
        else min(1.0, max(0.0, (value - bottom) / length))
        for value in values
    ]


def gap(reason: str) -> Cell:
    """A cell for what could not be measured."""
    return Cell("gap", reason, gap=True)
