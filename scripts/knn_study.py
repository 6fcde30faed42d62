"""Tabulate and draw a sweep of `task=knn_centroid`, with the AdaPool paper's numbers.

    python scripts/knn_study.py SWEEP [--out FILE.png]

The table has a row for each pooling head and baseline, and a column for each number of
neighbors or each aggregation. A cell is the mean ± standard deviation of the test loss
over the *folds* of one data set, not over seeds, and R² of the mean in parentheses;
published numbers of the same size follow a slash. The picture is Figure 4, against the
share of signal k / N.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from markdown_tables import markdown_table
from study_arguments import reported, study_parser

from marl_pool.files.figures import figure_style, new_figure, save_png, style_axes
from marl_pool.training.supervised.results import read_study
from marl_pool.utils.errors import InputError

METHODS = {"max": "MaxPool", "avg": "AvgPool", "cls": "ClsToken", "ada": "AdaPool"}
COLORS = {"MaxPool": "C1", "AvgPool": "C2", "ClsToken": "C3", "AdaPool": "C0"}
CORNER = "AdaPool, query [0]"
CONSTANT = "constant"
"""Baseline of which a loss is the share 1 - R²."""
BASELINES = {"centroid": "--", "target": ":", CONSTANT: "-."}

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
    """Cell of a table: mean, spread over folds, R² and the published mean."""

    mean: float
    sd: float | None = None
    r2: float | None = None
    published: float | None = None

    def __str__(self) -> str:
        spread = "" if self.sd is None else f" ± {self.sd:.4f}"
        r2 = "" if self.r2 is None else f" ({self.r2:.2f})"
        published = "" if self.published is None else f" / {self.published:g}"
        return f"{self.mean:.4f}{spread}{r2}{published}"


Column = int | str
Table = dict[str, dict[Column, Cell]]


def tabulate(trials: list[dict[str, Any]]) -> Table:
    """Arrange the measured losses, with rows in the paper's order.

    Raises:
        InputError: two runs for one cell, such as two seeds, or runs on other sets.
    """
    conditions = {str(_conditions(trial)): None for trial in trials}
    if len(conditions) > 1:
        sets = " and ".join(conditions)
        raise InputError(f"expected runs on the same sets, got {sets}")
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
        mean, constant = trial["mean"][metric], trial["baselines"].get(CONSTANT)
        table.setdefault(name, {})[column] = Cell(
            mean,
            sd=None if spread is None else spread[metric],
            r2=None if constant is None else 1 - mean / constant,
            published=published.get(name, {}).get(column),
        )
        for baseline, value in trial["baselines"].items():
            table.setdefault(baseline, {})[column] = Cell(
                value, published=published.get(baseline, {}).get(column)
            )
    rows = [*METHODS.values(), CORNER, *BASELINES]
    order = {name: place for place, name in enumerate(rows)}
    return dict(sorted(table.items(), key=lambda row: order.get(row[0], len(rows))))


def markdown(table: Table) -> str:
    """Format the table of a document."""
    columns = sorted({column for row in table.values() for column in row}, key=_place)
    names = [
        f"k = {column}" if isinstance(column, int) else column for column in columns
    ]
    rows = (
        [name, *(row.get(column, "") for column in columns)]
        for name, row in table.items()
    )
    return markdown_table(["", *names], rows)


def caveat(table: Table) -> str:
    """Return a warning about the table's published numbers, or an empty string."""
    cells = table.get("ClsToken", {}).items()
    if any(isinstance(k, int) and cell.published is not None for k, cell in cells):
        return ", ClsToken's of a network that cannot see the target: docs/findings.md"
    return ""


@figure_style()
def draw(table: Table, num_vectors: int, title: str, out: Path) -> None:
    """Plot the loss against k / N, both on logarithmic axes."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for name, row in table.items():
        places = sorted(column for column in row if isinstance(column, int))
        is_method = name in COLORS
        axes.errorbar(
            [place / num_vectors for place in places],
            [row[place].mean for place in places],
            [row[place].sd or 0.0 for place in places],
            color=COLORS.get(name, "0.4"),
            linestyle="-" if is_method else BASELINES.get(name, "-."),
            marker="o" if is_method else "x",
            markersize=4,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="signal, k / N", ylabel="test MSE")
    axes.set_title(title, fontsize=10)
    style_axes(axes)
    axes.legend(fontsize=8)
    save_png(figure, out, 120)


def _column(task: Mapping[str, Any]) -> Column:
    return int(task["k"]) if task["target"] == "nearest" else str(task["target"])


def _conditions(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that all runs of a table must share."""
    task = trial["task"]
    keys = ("num_vectors", "dim", "data_seed")
    kind = "nearest" if task["target"] == "nearest" else "aggregation"
    options = {key: task[key] for key in keys if key in task}
    return {**options, "target": kind, "scale": trial["scale"]}


def _place(column: Column) -> tuple[int, str]:
    return (column, "") if isinstance(column, int) else (0, column)


def _method(pooling: Mapping[str, Any]) -> str:
    name = METHODS.get(pooling["name"], pooling["name"])
    query = pooling.get("query")
    return name if query is None else f"{name}, query {query}"


def _published(trial: Mapping[str, Any]) -> Mapping[str, Mapping[Any, float]]:
    """Return the published losses for a trial's size."""
    task, encoder = trial["task"], trial["encoder"]
    size = tuple(task[key] for key in ("num_vectors", "dim"))
    whole = (*size, encoder["dim"], encoder.get("num_layers"))
    if task["target"] == "nearest":
        return PUBLISHED.get(whole, {})
    return AGGREGATION if whole == (128, 16, 16, 12) else {}


def main() -> None:
    """Read a sweep's runs, print a table and draw the picture."""
    parser = study_parser(__doc__)
    arguments = parser.parse_args()
    with reported(parser):
        trials = list(read_study(arguments.sweep, ("knn_centroid",)).values())
        table = tabulate(trials)
    task, folds = trials[0]["task"], len(trials[0]["folds"])
    title = (
        f"N = {task['num_vectors']}, d = {task['dim']}, scale={trials[0]['scale']}, "
        + (f"mean ± sd over {folds} folds" if folds > 1 else "one fold")
    )
    has_r2 = any(cell.r2 is not None for row in table.values() for cell in row.values())
    r2 = " (R²)" if has_r2 else ""
    print(f"{title}{r2}; published numbers behind a slash{caveat(table)}\n")
    print(markdown(table))
    if arguments.out:
        draw(table, task["num_vectors"], title, arguments.out)


if __name__ == "__main__":
    main()
