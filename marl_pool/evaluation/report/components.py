"""The pieces that a page is put together from, and how its numbers are written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from marl_pool.evaluation.statistics import Interval

DARK = 0.72
"""Tone from which on blue is too dark for dark letters."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what stands in it.
        title: where the number comes from; shown when it is pointed at.
        tone: in [-1, 1], as a shade from orange over white to blue; None for none.
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
        """The shade as CSS: colours that the colour-blind tell apart.

        Dark shades come with white letters.
        """
        if self.tone is None:
            return ""
        end = (230, 159, 0) if self.tone < 0 else (0, 114, 178)
        mixed = [round(255 + (part - 255) * abs(self.tone)) for part in end]
        letters = "#fff" if self.tone > DARK else "#222"
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


def shade(score: float) -> float | None:
    """The tone of a score: white is 0 or less, blue is 1 or more; None for NaN."""
    return None if math.isnan(score) else min(1.0, max(0.0, score))


def gap(reason: str) -> Cell:
    """A cell for what could not be measured."""
    return Cell("gap", reason, gap=True)
