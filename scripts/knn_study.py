"""Tabulate and draw a sweep of `task=knn_centroid`, beside the AdaPool paper's numbers.

    python scripts/knn_study.py SWEEP [--out FILE.png]

A row for each pooling head and baseline, a column for each number of neighbours or each
aggregation: mean ± standard deviation over the *folds* of one data set, not over seeds,
of the test loss; published numbers stand behind a slash where the paper has that very
size. The picture is that of Figure 4, against the share of signal k / N.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from marl_pool.training.supervised.results import read_study
from marl_pool.utils.errors import InputError
from marl_pool.utils.tables import markdown_table

METHODS = {"max": "MaxPool", "avg": "AvgPool", "cls": "ClsToken", "ada": "AdaPool"}
COLORS = {"MaxPool": "C1", "AvgPool": "C2", "ClsToken": "C3", "AdaPool": "C0"}
CORNER = "AdaPool, query [0]"

Size = tuple[int, int, int, int]
"""N, d, width of the network, layers."""


def _table(
    ks: tuple[int, ...], **rows: tuple[float, ...]
) -> dict[str, dict[int, float]]:
    return {
        METHODS.get(name, name): dict(zip(ks, row, strict=True))
        for name, row in rows.items()
    }


FEW = (1, 2, 4, 8, 16)
PUBLISHED: dict[Size, dict[str, dict[int, float]]] = {
    # Table 3.
    (128, 16, 16, 12): _table(
        (*FEW, 32, 64, 128),
        max=(0.066, 0.061, 0.050, 0.045, 0.047, 0.055, 0.068, 0.046),
        avg=(0.093, 0.071, 0.055, 0.043, 0.031, 0.016, 0.001, 0.000),
        cls=(0.102, 0.079, 0.063, 0.050, 0.038, 0.027, 0.016, 0.008),
        ada=(0.037, 0.019, 0.006, 0.004, 0.003, 0.002, 0.001, 0.000),
        centroid=(0.093, 0.071, 0.055, 0.043, 0.031, 0.020, 0.008, 0.000),
        target=(0.058, 0.044, 0.040, 0.041, 0.048, 0.060, 0.080, 0.126),
    ),
    # Tables 4 to 8.
    (32, 16, 16, 12): _table(
        FEW,
        max=(0.022, 0.014, 0.009, 0.006, 0.009),
        avg=(0.086, 0.049, 0.010, 0.005, 0.003),
        cls=(0.094, 0.066, 0.046, 0.030, 0.017),
        ada=(0.018, 0.011, 0.007, 0.004, 0.002),
    ),
    (32, 64, 16, 12): _table(
        FEW,
        max=(0.0056, 0.0025, 0.0025, 0.0018, 0.0018),
        avg=(0.0204, 0.0104, 0.0053, 0.0023, 0.0006),
        cls=(0.0229, 0.0126, 0.0069, 0.0036, 0.0017),
        ada=(0.0064, 0.0031, 0.0010, 0.0005, 0.0002),
    ),
    (32, 16, 32, 12): _table(
        FEW,
        max=(0.022, 0.011, 0.0023, 0.0006, 0.0003),
        avg=(0.048, 0.022, 0.0012, 0.0006, 0.0002),
        cls=(0.086, 0.057, 0.0371, 0.0214, 0.0082),
        ada=(0.003, 0.001, 0.0006, 0.0003, 0.0001),
    ),
    (32, 16, 64, 12): _table(
        FEW,
        max=(0.022, 0.0012, 0.0005, 0.00024, 0.00010),
        avg=(0.004, 0.0016, 0.0005, 0.00021, 0.00009),
        cls=(0.086, 0.0574, 0.0373, 0.02147, 0.00825),
        ada=(0.001, 0.0010, 0.0003, 0.00019, 0.00007),
    ),
    (32, 16, 16, 24): _table(
        FEW,
        max=(0.020, 0.011, 0.007, 0.005, 0.0056),
        avg=(0.061, 0.013, 0.006, 0.003, 0.0019),
        cls=(0.094, 0.066, 0.046, 0.030, 0.0165),
        ada=(0.017, 0.014, 0.014, 0.008, 0.0021),
    ),
}
"""Mean losses by size, row and k."""
AGGREGATION = {
    "MaxPool": {"max": 0.000, "mean": 0.026, "min": 0.297},
    "AvgPool": {"max": 0.003, "mean": 0.000, "min": 0.003},
    "ClsToken": {"max": 0.011, "mean": 0.008, "min": 0.011},
    "AdaPool": {"max": 0.002, "mean": 0.000, "min": 0.002},
}
"""Table 2, for sets of 128 vectors of 16 features."""


class Cell(NamedTuple):
    """One number of a table: mean, spread over folds, and the published one."""

    mean: float
    sd: float | None
    published: float | None

    def __str__(self) -> str:
        spread = "" if self.sd is None else f" ± {self.sd:.4f}"
        published = "" if self.published is None else f" / {self.published:g}"
        return f"{self.mean:.4f}{spread}{published}"


Column = int | str
Table = dict[str, dict[Column, Cell]]


def tabulate(trials: list[dict[str, Any]]) -> Table:
    """Rows and columns of what was measured, in the paper's order of rows.

    Raises:
        InputError: two runs for one cell, as those of two seeds are.
    """
    table: Table = {}
    for trial in trials:
        column = _column(trial["task"])
        published = _published(trial)
        name = _method(trial["pooling"])
        if column in table.get(name, {}):
            raise InputError(
                f"expected one run for each cell, got several for {name} at {column}"
            )
        metric, spread = trial["metric"], trial["sd_over_folds"]
        table.setdefault(name, {})[column] = Cell(
            trial["mean"][metric],
            None if spread is None else spread[metric],
            published.get(name, {}).get(column),
        )
        for baseline, value in trial["baselines"].items():
            table.setdefault(baseline, {})[column] = Cell(
                value, None, published.get(baseline, {}).get(column)
            )
    rows = [*METHODS.values(), CORNER, "centroid", "target"]
    order = {name: place for place, name in enumerate(rows)}
    return dict(sorted(table.items(), key=lambda row: order.get(row[0], len(rows))))


def markdown(table: Table) -> str:
    """Format the table of a document."""
    columns = sorted({column for row in table.values() for column in row}, key=_place)
    names = [f"k = {each}" if isinstance(each, int) else each for each in columns]
    rows = (
        [name, *(row.get(each, "") for each in columns)] for name, row in table.items()
    )
    return markdown_table(["", *names], rows)


def caveat(table: Table) -> str:
    """Return a warning about the table's published numbers, or an empty string."""
    cells = table.get("ClsToken", {}).items()
    if any(isinstance(k, int) and cell.published is not None for k, cell in cells):
        return ", ClsToken's of a network that cannot see the target: docs/results.md"
    return ""


def draw(table: Table, num_vectors: int, title: str, out: Path) -> None:
    """Write the picture: loss against k / N, both on logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, row in table.items():
        places = sorted(each for each in row if isinstance(each, int))
        x = [place / num_vectors for place in places]
        y = [row[place].mean for place in places]
        error = [row[place].sd or 0.0 for place in places]
        style = {"color": COLORS[name]} if name in COLORS else {"color": "0.4"}
        line = (
            "-" if name in COLORS else {"centroid": "--", "target": ":"}.get(name, "-.")
        )
        marker = "o" if name in COLORS else "x"
        axes.errorbar(x, y, error, ls=line, marker=marker, ms=4, label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="signal, k / N", ylabel="test MSE")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=120)


def _column(task: Mapping[str, Any]) -> Column:
    return int(task["k"]) if task["target"] == "nearest" else str(task["target"])


def _place(column: Column) -> tuple[int, str]:
    return (column, "") if isinstance(column, int) else (0, column)


def _method(pooling: Mapping[str, Any]) -> str:
    name = METHODS.get(pooling["name"], pooling["name"])
    query = pooling.get("query")
    return name if query is None else f"{name}, query {query}"


def _published(trial: Mapping[str, Any]) -> Mapping[str, Mapping[Any, float]]:
    """What the paper has for a trial's size."""
    task, encoder = trial["task"], trial["encoder"]
    size = tuple(task[key] for key in ("num_vectors", "dim"))
    whole = (*size, encoder["dim"], encoder.get("num_layers"))
    if task["target"] == "nearest":
        return PUBLISHED.get(whole, {})  # type: ignore[call-overload, no-any-return]
    return AGGREGATION if whole == (128, 16, 16, 12) else {}


def main() -> None:
    """Read a sweep's runs, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of a sweep")
    parser.add_argument("--out", type=Path, help="picture to write")
    arguments = parser.parse_args()
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}")
    try:
        trials = list(read_study(arguments.sweep, ("knn_centroid",)).values())
        table = tabulate(trials)
    except InputError as error:
        parser.error(str(error))
    task, folds = trials[0]["task"], len(trials[0]["folds"])
    title = (
        f"N = {task['num_vectors']}, d = {task['dim']}, scale={trials[0]['scale']}, "
        + (f"mean ± sd over {folds} folds" if folds > 1 else "one fold")
    )
    print(f"{title}; published numbers behind a slash{caveat(table)}\n")
    print(markdown(table))
    if arguments.out:
        draw(table, task["num_vectors"], title, arguments.out)


if __name__ == "__main__":
    main()
