"""Markdown tables of the documents."""

import math
from collections.abc import Iterable, Sequence
from statistics import mean, stdev

from scipy.stats import t


def markdown_table(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table, without a newline at the end."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([str(text).replace("|", "\\|") for text in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % t interval of a mean; NaN for one value alone."""
    if len(values) < 2:
        return math.nan
    return float(t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5)


def mean_of_seeds(values: Sequence[float], digits: int = 1) -> str:
    """Format a mean ± half of its 95 % t interval; nothing after one value alone."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    return f"{mean(values):.{digits}f} ± {half_interval(values):.{digits}f}"
