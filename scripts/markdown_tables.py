"""Markdown tables of the documents."""

from collections.abc import Iterable, Sequence
from statistics import mean, stdev

from scipy.stats import t


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table, without a newline at the end."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([str(text).replace("|", "\\|") for text in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def mean_of_seeds(values: Sequence[float], digits: int = 1) -> str:
    """Format a mean ± half of its 95 % t interval; nothing after one value alone."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.{digits}f} ± {half:.{digits}f}"
