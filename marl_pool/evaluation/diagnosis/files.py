"""Diagnoses as CSV, as JSON and as a table on screen."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from marl_pool.evaluation.diagnosis.records import NAN, Diagnosis
from marl_pool.utils import tables
from marl_pool.utils.text import printable

TABLE, DOCUMENT, PLOT = "diagnosis.csv", "diagnosis.json", "diagnosis.png"
NAMES = (TABLE, DOCUMENT, PLOT)
"""Files of a diagnosis."""
Named = Sequence[tuple[str, Diagnosis]]
"""Diagnoses with their names in tables and figures."""


def to_plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """Convert a diagnosis to plain data, with None for NaN."""
    return tables.without_nan(asdict(diagnosis))


def from_plain(values: Mapping[str, Any]) -> Diagnosis:
    """Invert `to_plain`; other keys are ignored."""
    names = [item.name for item in fields(Diagnosis)]
    known: dict[str, Any] = {
        name: NAN if values[name] is None else values[name] for name in names
    }
    return Diagnosis(**known)


COMMON = {
    "k of N": "{num_signal:.3g} of {num_tokens:.3g}",
    "loss": "{signal_loss:.3f}",
    "excess": "{excess:.3f}",
    "95 %": "{excess_low:.3f} to {excess_high:.3f}",
    "of mean": "{mean_excess:.3f}",
    "w signal": "{signal_weight:.3f}",
    "k/N": "{uniform_weight:.3f}",
    "w self": "{self_weight:.3f}",
}
"""Format of each column."""
SCORED = {
    "ε_s": "{signal_width:.2f}",
    "ε_η": "{noise_width:.2f}",
    "M": "{margin:.2f}",
    "D": "{distance:.2f}",
    "M > 0": "{margin_positive:.0%}",
    "U_s-L_s": "{signal_bound_width:.3f}",
    "U_η-L_η": "{noise_bound_width:.3f}",
    "outside": "{violations} of {checked:,}",
}
"""Columns of heads with relation scores."""


def print_table(named: Named, title: str) -> None:
    """Print diagnoses as a table, and the reasons for missing ones below it."""
    scored = any(row.checked for _, row in named)
    columns = {**COMMON, **(SCORED if scored else {})}
    lines = [[name, *_cells(row, columns)] for name, row in named]
    tables.print_table(["", *columns], lines, title=title, width=200)
    for name, row in named:
        if row.missing:
            print(f"not measured: {printable(name)}: {row.missing}")


def _cells(row: Diagnosis, columns: Mapping[str, str]) -> list[str]:
    if row.missing:
        return ["not measured"]
    blank = () if row.checked else SCORED
    texts = [
        "" if name in blank else form.format_map(vars(row))
        for name, form in columns.items()
    ]
    return ["" if "nan" in text else text for text in texts]
