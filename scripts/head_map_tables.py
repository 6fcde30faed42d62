"""Tables, heat maps and tested advice of the map of pooling heads (`head_map.py`).

Heads are chosen on some seeds and compared on others: the best of eight is better than
the worst on the seeds that chose them, even if all are equal.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from markdown_tables import markdown_table

from marl_pool.evaluation.statistics.intervals import (
    Interval,
    bootstrap,
    interquartile_mean,
)
from marl_pool.evaluation.statistics.scores import RANKED_FROM
from marl_pool.files.figures import INK, figure_style, new_figure, save_png
from marl_pool.training.sweep.estimate import smallest_difference
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

CELL = ["depth", "tokens", "share"]
PERTURBED = "perturbed"
QUESTIONS = {
    "clean": "as trained",
    "tokens": "other numbers of tokens",
    "share": "other shares of signal",
    PERTURBED: "mean over the perturbations of suite=standard",
}
"""First word of a row's label → title; a question's score is the mean over its rows."""
SOURCE = "simple_centroid"
"""Environment from whose runs advice is derived."""
CHOOSING = (0, 1, 2)
"""Seeds from which advice is derived; the others test it."""
MARGIN = 0.05
"""Smallest difference of scores that matters."""
MARKS = "<!-- measured -->", "<!-- end -->"
"""Marks in a page around the output of `report`."""
FLAT = 0.02
"""Largest change of the training return in the last fifth of a flat run."""
WORST = 0.5
"""Loss at the dark end of the colors."""


class Advice(NamedTuple):
    """A piece of advice, and the difference of scores that it claims.

    Attributes:
        sentence: the advice as printed on the page.
        question: key of `QUESTIONS`.
        cells: condition on `CELL`, for `pandas.DataFrame.query`.
        better: heads; empty for the best head of each cell on ``seeds``, among the
            heads that were run on other seeds.
        worse: heads; empty for the worst of each cell, likewise.
        matters: "yes" if their mean difference is claimed to be `MARGIN` or more, else
            "no".
        seeds: seeds from which it was derived, none for a prediction; the other seeds
            test it.
    """

    sentence: str
    question: str
    cells: str
    better: tuple[str, ...]
    worse: tuple[str, ...]
    matters: str = "yes"
    seeds: tuple[int, ...] = CHOOSING


ADVICE = (
    Advice(
        "Behind one layer, tested as trained, any head will do.",
        "clean",
        "depth == 1",
        (),
        (),
        "no",
        seeds=(0,),
    ),
    Advice(
        "If the share of signal will change, use ada rather than avg.",
        "share",
        "depth < 2",
        ("ada",),
        ("avg",),
        seeds=(),
    ),
    Advice(
        "If the share of signal will change, use ada rather than max.",
        "share",
        "depth < 2",
        ("ada",),
        ("max",),
        seeds=(0,),
    ),
    Advice(
        "Without layers, tested as trained, use ada rather than avg or max.",
        "clean",
        "depth == 0",
        ("ada",),
        ("avg", "max"),
        seeds=(0, 1),
    ),
    Advice(
        "If one token is signal in training and more will come, use power rather "
        "than ada.",
        "share",
        "(tokens == 8 and share == '1/8') or (tokens == 32 and share == '1/32')",
        ("power",),
        ("ada",),
        seeds=(0, 1),
    ),
    Advice(
        "Behind one layer, if the number of tokens will change, use ada rather than "
        "cls.",
        "tokens",
        "depth == 1",
        ("ada",),
        ("cls",),
        seeds=(0, 1, 2, 3),
    ),
    Advice(
        "Without layers, if several tokens are signal and their share will change, "
        "use gated rather than ada.",
        "share",
        "depth == 0 and (share == '1/2' or (tokens == 32 and share == '1/8'))",
        ("gated",),
        ("ada",),
        seeds=(0,),
    ),
)
"""The first two were written before any score of the map was seen (the heads of the
first are chosen by its seeds), the others before the seeds that test them were
available. The last states what the page had said about gated's first seed, and was
written when all seeds were available."""


def answered(table: pd.DataFrame, question: str) -> pd.DataFrame:
    """Return the score of each run for a question: index cell and seed, column head."""
    rows = table[table["label"].str.split().str[0] == question]
    keys = [*CELL, "seed"]
    scores = rows.pivot_table(index=keys, columns="head", values="score")
    return scores.sort_index(key=_in_order)


def _in_order(values: pd.Index) -> pd.Index:
    return values.map(_place)


def _place(value: int | str) -> int:
    """Order shares by their divisors: as strings, 1/32 would be before 1/8."""
    return int(str(value).removeprefix("1/"))


def report(table: pd.DataFrame) -> str:
    """Return the whole report as Markdown."""
    parts = []
    for env, rows in table.groupby("env"):
        parts += [f"*{env}*: {summary(rows)}"]
        for question, title in QUESTIONS.items():
            scores = answered(rows, question)
            if len(scores):
                parts += [f"**Score in {env}, {title}**", score_table(scores)]
    return "\n\n".join([*parts, "**Advice**", advice_table(table)])


def summary(table: pd.DataFrame) -> str:
    """Say how many runs there are, and how many of them end flat."""
    runs = table.drop_duplicates("run")
    rising = runs.loc[runs["rise"].abs() > FLAT, "head"].value_counts()
    seeds = runs.groupby([*CELL, "head"])["seed"].nunique()
    names = ", ".join(f"{head} {count}" for head, count in rising.items())
    spread = answered(table, "clean").groupby(level=CELL).std().median(axis=None)
    power = ""
    if spread == spread:
        detected = smallest_difference(RANKED_FROM) * spread
        power = (
            f" The median standard deviation between seeds is {spread:.3f}, at which "
            f"{RANKED_FROM} seeds detect a difference of {detected:.3f} (power 0.8)."
        )
    return (
        f"{len(runs)} runs, {_seeds(seeds)} of each head in a cell. The return of "
        f"{len(runs) - rising.sum()} changes by at most {FLAT:g} of the score over "
        f"their last fifth. Other runs, which are counted too: {names or 'none'}."
        f"{power}"
    )


def _seeds(numbers: pd.Series) -> str:
    low, high = numbers.min(), numbers.max()
    text = f"{low}" if low == high else f"{low} to {high}"
    return f"{text} seed" if high == 1 else f"{text} seeds"


def score_table(scores: pd.DataFrame) -> str:
    """Format the score of each head in each cell, a row for each cell.

    It is an interquartile mean, with the mean in brackets where the two differ by
    `MARGIN` or more. The last columns are what `choice` returns.
    """
    rows = []
    for cell, group in scores.groupby(level=CELL, sort=False):
        counts = group.notna().sum()
        seeds = _seeds(counts[counts > 0]).removesuffix("s").removesuffix(" seed")
        values = map(_score, iqm(group), group.mean())
        rows.append([*cell, seeds, *values, *choice(group)])
    head = [*CELL, "seeds", *scores, "best, worst", "difference", "matters"]
    return markdown_table(head, rows)


def _score(middle: float, mean: float) -> str:
    """Format an interquartile mean, and the mean if they differ by `MARGIN`."""
    if middle != middle:
        return ""
    apart = f" ({mean:.3f})" * (abs(mean - middle) >= MARGIN)
    return f"{middle:.3f}{apart}"


def iqm(group: pd.DataFrame) -> pd.Series:
    """Return the interquartile mean of each column without its missing values."""
    values = {head: group[head].dropna().to_numpy() for head in group}
    means = {head: interquartile_mean(v) for head, v in values.items() if len(v)}
    return pd.Series(means).reindex(group.columns)


def choice(group: pd.DataFrame) -> tuple[str, str, str]:
    """Compare a cell's best and worst head, chosen for each seed on the other seeds.

    Returns:
        The heads of the highest and the lowest interquartile mean; the difference of
        the two that the other seeds would choose, its mean over seeds and interval; and
        whether it is at least `MARGIN`: "yes", "no", or "open" if the interval
        contains it. Empty strings for fewer than two heads with `RANKED_FROM` seeds;
        heads with fewer seeds are ignored.
    """
    group = ranked(group)
    if group.shape[1] < 2:
        return "", "", ""
    values = []
    for seed in group.index:
        best, worst = extremes(group.drop(index=seed))
        values.append(group.loc[seed, best] - group.loc[seed, worst])
    interval = bootstrap(values)
    return ", ".join(extremes(group)), _between(interval), _against(interval, MARGIN)


def ranked(group: pd.DataFrame) -> pd.DataFrame:
    """Select the heads with `RANKED_FROM` seeds, and their common seeds."""
    return group.loc[:, group.notna().sum() >= RANKED_FROM].dropna()


def extremes(group: pd.DataFrame) -> tuple[str, str]:
    """Return the heads with the highest and the lowest interquartile mean."""
    means = iqm(group)
    return str(means.idxmax()), str(means.idxmin())


def _between(interval: Interval) -> str:
    value, low, high = interval
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def advice_table(table: pd.DataFrame, advice: tuple[Advice, ...] = ADVICE) -> str:
    """Test each sentence on the seeds from which it was not derived.

    In environments other than `SOURCE`, these are all seeds, unless seeds choose heads.
    """
    rows = []
    envs = sorted({*table["env"]})
    for item in advice:
        verdicts = []
        for env in envs:
            is_foreign = env != SOURCE and item.better and item.worse
            tested = item._replace(seeds=()) if is_foreign else item
            verdicts.append(verdict(tested, table[table["env"] == env]))
        seeds = ", ".join(map(str, item.seeds)) or "none"
        rows.append([item.sentence, item.question, seeds, *verdicts])
    titles = [
        f"on other seeds of {env}" if env == SOURCE else f"in {env}" for env in envs
    ]
    return markdown_table(["advice", "question", "derived from seeds", *titles], rows)


def verdict(advice: Advice, table: pd.DataFrame) -> str:
    """Say whether the advice holds in one environment, with the mean difference."""
    values = differences(advice, table)
    if len(values) < 2:
        return "not tested yet"
    interval = bootstrap(values)
    text = {advice.matters: "holds", "open": "open"}.get(
        _against(interval, MARGIN), "fails"
    )
    return f"{text}: {_between(interval)}, {len(values)} cells and seeds"


def differences(advice: Advice, table: pd.DataFrame) -> np.ndarray:
    """Return the difference of better and worse in each cell and unseen seed."""
    scores = answered(table, advice.question).query(advice.cells)
    values = []
    for _, group in scores.groupby(level=CELL):
        is_seen = group.index.get_level_values("seed").isin(advice.seeds)
        better, worse = advice.better, advice.worse
        if not (better and worse):
            if not is_seen.any() or is_seen.all():
                continue
            is_tested = group[~is_seen].notna().any()
            best, worst = extremes(group.loc[is_seen, is_tested])
            better, worse = better or (best,), worse or (worst,)
        unseen = group.loc[~is_seen].reindex(columns=[*{*better, *worse}]).dropna()
        values += [*(unseen[[*better]].mean(axis=1) - unseen[[*worse]].mean(axis=1))]
    return np.array(values)


def _against(interval: Interval, margin: float) -> str:
    """Say whether a number is at least the margin."""
    if interval.low >= margin:
        return "yes"
    return "no" if interval.high < margin else "open"


@figure_style()
def draw(table: pd.DataFrame, out: Path) -> None:
    """Draw what the best and the worst head lose in `SOURCE`, a row a question."""
    table = table[table["env"] == SOURCE]
    depths = sorted(table["depth"].unique())
    # Perturbations were measured in too few cells for a map.
    questions = [question for question in QUESTIONS if question != PERTURBED]
    sides = [sorted(table[key].unique(), key=_place) for key in ("share", "tokens")]
    panels = [(depth, place) for depth in depths for place in ("best", "worst")]
    figure = new_figure(2.3 * len(panels) + 1, 2.2 * len(questions))
    grid = figure.subplots(len(questions), len(panels), squeeze=False)
    for row, question in zip(grid, questions, strict=True):
        scores = answered(table, question)
        for axes, (depth, place) in zip(row, panels, strict=True):
            cells = scores[scores.index.get_level_values("depth") == depth]
            image = _heat_map(axes, losses(cells, place), sides)
            layers = "1 layer" if depth == 1 else f"{depth} layers"
            axes.set_title(
                f"{place} head, {layers}\n{QUESTIONS[question]}", fontsize=8.5
            )
    figure.colorbar(image, ax=grid, label="score lost relative to the scripted policy")
    save_png(figure, out, 110)


def losses(scores: pd.DataFrame, place: str) -> pd.DataFrame:
    """Return what the best or the worst head loses in each cell, 1 - its score.

    Columns: ``tokens``, ``share``, ``loss``, and ``head``, empty unless it matters.
    """
    rows = []
    for (_, tokens, share), group in scores.groupby(level=CELL, sort=False):
        matters = choice(group)[-1]
        best, worst = extremes(ranked(group) if matters else group)
        head = best if place == "best" else worst
        name = head if matters == "yes" else ""
        rows.append((tokens, share, 1 - iqm(group)[head], name))
    return pd.DataFrame(rows, columns=["tokens", "share", "loss", "head"])


def _heat_map(
    axes: "Axes", cells: pd.DataFrame, sides: Sequence[Sequence[int | str]]
) -> "AxesImage":
    grid = pd.DataFrame(np.nan, *sides)
    for row in cells.itertuples():
        grid.loc[row.share, row.tokens] = row.loss
    image = axes.imshow(grid, vmin=0, vmax=WORST, cmap="YlOrRd", aspect="auto")
    for row in cells.itertuples():
        place = (grid.columns.get_loc(row.tokens), grid.index.get_loc(row.share))
        name = row.head.replace("_", "\n")
        axes.annotate(
            f"{row.loss:.2f}\n{name}".strip(),
            place,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if row.loss > 0.7 * WORST else INK,
        )
    axes.set_xticks(range(grid.shape[1]), [f"{tokens}" for tokens in grid.columns])
    axes.set_yticks(range(grid.shape[0]), grid.index)
    axes.set_xlabel("tokens")
    axes.set_ylabel("share of signal")
    return image


def write_page(page: Path, text: str) -> None:
    """Replace the text between the two marks of a page.

    Raises:
        InputError: it lacks the marks.
    """
    before, _, tail = page.read_text("utf-8").partition(MARKS[0])
    _, mark, after = tail.partition(MARKS[1])
    if not mark:
        raise InputError(f"{page}: expected the marks {' and '.join(MARKS)}")
    content = f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}"
    page.write_text(content, "utf-8")
