"""Plotting in one style for all figures, without pyplot's global state.

>>> @figure_style()
... def plot_returns(path):
...     figure = new_figure(6, 4)
...     axes = figure.subplots()
...     style_axes(axes)
...     save_png(figure, path)

matplotlib is an optional dependency and imported on the first call.
"""

import importlib.util
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from marl_pool.files.atomic import new_binary_file
from marl_pool.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID, FAINT = "#333333", "#e4e4e0", "#8a8a84"
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE = "#E69F00"
OKABE_ITO = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, "#56B4E9", "#444444")
"""Color-blind-safe palette (Okabe and Ito, 2008) without yellow."""
MARKERS = "osD^vPX*"
INSTALL_PLOTS = 'pip install "marl-pool[plots]"'
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the reader's own font
    "svg.hashsalt": "marl-pool",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,  # names chosen by users may contain dollars
    "text.color": INK,
    "axes.labelcolor": INK,
}


class LineStyle(NamedTuple):
    """Color and marker of one method in all figures."""

    color: str
    marker: str


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """Assign a color and a marker to each name; colors repeat after seven."""
    return {
        name: LineStyle(OKABE_ITO[i % len(OKABE_ITO)], MARKERS[i % len(MARKERS)])
        for i, name in enumerate(names)
    }


def has_matplotlib() -> bool:
    """Return True if the optional dependency is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def figure_style() -> Iterator[None]:
    """Use the package's style for figures made and saved inside; also a decorator."""
    import matplotlib as mpl

    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "backend": "agg"}):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """Create an empty figure with constrained layout; sizes are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: "Axes", grid: Literal["both", "x", "y"] = "both") -> None:
    """Draw a light grid behind the data, and hide the top and right spines."""
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8.5, color=FAINT)


def label_rows(axes: "Axes", names: Sequence[str]) -> None:
    """Label rows 0, 1, … of horizontal marks, from top to bottom."""
    axes.set_yticks(range(len(names)), [printable(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)


def mark_missing_row(axes: "Axes", row: int) -> None:
    """Write "not measured" in place of the marks of a row."""
    anchor = ("axes fraction", "data")
    style: dict[str, Any] = {"va": "center", "color": FAINT, "fontsize": 8}
    axes.annotate("not measured", (0.02, row), xycoords=anchor, **style)


def short_number(value: float, _: object = None) -> str:
    """Format a number as ``0.5``, ``50k`` or ``2M``; a tick formatter."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:.3g}"


def legend_below(
    figure: "Figure", handles: Iterable[Any], names: Iterable[str], columns: int = 6
) -> None:
    """Draw one legend below all axes."""
    labels = list(names)
    figure.legend(
        list(handles),
        labels,
        loc="outside lower center",
        ncols=min(len(labels), columns) or 1,
        frameon=False,
    )


def save_png(figure: "Figure", path: Path, dpi: int = 150) -> None:
    """Write a new PNG file."""
    with new_binary_file(path) as out:
        figure.savefig(out, dpi=dpi, format="png")


def to_svg(figure: "Figure") -> str:
    """Convert a figure to an SVG element that can be inlined in a page.

    The element has no prologue, no metadata and no ids that other figures repeat.
    """
    with io.StringIO() as out:
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=no_metadata)
        text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Keep Matplotlib's other ids, which are targets of references.
    text = re.sub(r' id="[a-zA-Z0-9]+_[0-9]+"', "", text)
    return text.replace(" xmlns:xlink=", " role='img' xmlns:xlink=", 1)
