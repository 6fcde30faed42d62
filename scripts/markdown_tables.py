"""Markdown tables of the documents."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table, without a newline at the end."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([str(text).replace("|", "\\|") for text in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
