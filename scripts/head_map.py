"""The map of pooling heads: docs/data/head_map.csv, and the tables of docs/map.md.

    python scripts/head_map.py list RUNS --env simple_centroid | sh
    python scripts/head_map.py collect RUNS --out docs/data/head_map.csv
    python scripts/head_map.py disturb RUNS --out docs/data/head_map.csv
    python scripts/head_map.py table docs/data/head_map.csv --out head_map.png
        --page docs/map.md

A cell is a depth of the encoder, a number of tokens and the share of signal among them,
in one of the environments `STAGES`. `list` prints the commands of the unfinished runs,
stage by stage, and in a stage all cells of a seed before the next seed. `collect`
appends the scores of the finished runs that the file lacks, in their own environment
and out of distribution; 0 is random actions, 1 the scripted policy. `disturb` appends
their scores under each perturbation of ``suite=standard``. `table` prints and draws the
collected scores, and names a cell's best head only if at least two heads have
`RANKED_FROM` seeds.
"""

import itertools
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from head_map_tables import CELL, PERTURBED, draw, report, write_page
from study_arguments import new_file, read_rows, reported

from marl_pool import evaluate, load_policy
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError

SEEDS = range(5)
SHARES = (Fraction(1, 2), Fraction(1, 8), Fraction(1, 32))
FACTORS = (Fraction(1, 4), Fraction(4), Fraction(8))
"""Numbers of tokens out of distribution, as multiples of the cell's."""
IN_KERNEL = ("ada", "avg", "max", "cls")
"""Heads that the compiled kernel computes, in a third of the other heads' time."""
BOTH_DEPTHS = (0, 1)
Stage = tuple[Sequence[int], Sequence[int], Sequence[str]]
"""Depths, tokens and heads."""
STAGES: dict[str, tuple[Stage, ...]] = {
    "simple_centroid": (
        (BOTH_DEPTHS, (8, 32), (*IN_KERNEL, "gated", "power")),
        ((1,), (128,), IN_KERNEL),
        (BOTH_DEPTHS, (8, 32), ("attention_neuron", "pma")),
    ),
    "simple_tag": ((BOTH_DEPTHS, (32,), (*IN_KERNEL, "gated", "power")),),
}
"""Runs by environment; all seeds of a stage before the next stage."""
BLIND = (0, "cls")
"""Excluded depth and head: without layers the class token sees no other token."""
TOTAL_STEPS = 1_000_000
EPISODES = {"clean": 128, PERTURBED: 32}
"""Episodes of each environment, and of each perturbation and severity."""
ACTIONS = {"collect": "clean", "disturb": PERTURBED}
"""Action → key of `EPISODES` whose rows it appends."""
COLUMNS = ["run", "env", *CELL, "head", "seed", "label", "score", "rise"]


class MapCell(NamedTuple):
    """Place on the map.

    Attributes:
        depth: layers of the transformer; 0 is ``encoder=identity``, as wide.
        tokens: number of tokens that the agent observes, itself included.
        share: part of the tokens that are signal.
    """

    depth: int
    tokens: int
    share: Fraction

    @property
    def counts(self) -> str:
        """The environment's ``counts``: agents, signal, noise."""
        signal = self.tokens * self.share
        return f"1-{signal}-{self.tokens - 1 - signal}"

    @property
    def is_possible(self) -> bool:
        """True if the number of signals is a positive integer."""
        return (self.tokens * self.share).denominator == 1

    @property
    def encoder(self) -> str:
        """Overrides of the encoder."""
        if self.depth == 0:
            return "encoder=identity encoder.dim=8"
        return f"encoder=transformer encoder.num_layers={self.depth}"

    def elsewhere(self) -> dict[str, str]:
        """Return the counts of other environments, by their labels."""
        tokens = {
            f"tokens x {factor}": self._replace(tokens=int(self.tokens * factor))
            for factor in FACTORS
        }
        shares = {
            f"share {share}": self._replace(share=share)
            for share in SHARES
            if share != self.share
        }
        places = {**tokens, **shares}
        return {name: cell.counts for name, cell in places.items() if cell.is_possible}


def cells(depths: Sequence[int], tokens: Sequence[int]) -> list[MapCell]:
    """Return the possible cells of a stage."""
    combined = itertools.starmap(MapCell, itertools.product(depths, tokens, SHARES))
    return [cell for cell in combined if cell.is_possible]


def commands(runs: Path, env: str) -> Iterator[str]:
    """Yield a command for each run that is not finished, in the order to run them.

    Args:
        runs: folder of the runs of one environment.
        env: key of `STAGES`.

    Raises:
        InputError: ``runs`` is a file.
    """
    if runs.is_file():
        raise InputError(f"{runs}: expected a folder, got a file")
    for depths, tokens, heads in STAGES[env]:
        places = itertools.product(SEEDS, cells(depths, tokens), heads)
        for seed, cell, head in places:
            folder = runs / f"{cell.depth}-{cell.counts}-{head}-{seed}"
            if (cell.depth, head) == BLIND:
                continue
            if folder.is_dir() and is_finished(Run.open(folder)):
                continue
            yield (
                f"marl-pool train --run-dir {shlex.quote(str(folder))} --or-resume "
                f"experiment={env} total_steps={TOTAL_STEPS:_} threads=1 "
                f"{cell.encoder} env.counts={cell.counts} pooling={head} seed={seed}"
            )


def is_finished(run: Run) -> bool:
    """Return True if a run took all of its steps."""
    rows = run.rows()
    return bool(rows) and rows[-1]["env_steps"] >= run.config["total_steps"]


def collect(runs: Path, out: Path, question: str) -> None:
    """Append the rows of the finished runs that the file lacks.

    Args:
        runs: folder of runs.
        out: CSV to extend.
        question: key of `EPISODES`.

    Raises:
        InputError: no run is finished.
    """
    table = read_rows(out, COLUMNS) if out.is_file() else pd.DataFrame(columns=COLUMNS)
    is_answer = table["label"].str.split().str[0] == question
    present = {*table[is_answer].groupby(["env", "run"]).groups}
    opened = [run for run in map(Run.open, sorted(runs.glob("*/"))) if is_finished(run)]
    if not opened and table.empty:
        raise InputError(f"{runs}: expected finished runs, got none")
    for run in opened:
        if (run.env["name"], run.path.name) in present:
            continue
        rows = evaluated(run, question).round(4)
        rows.to_csv(out, mode="a", header=not out.is_file(), index=False)


def evaluated(run: Run, question: str) -> pd.DataFrame:
    """Play a run's policy: a row for each environment or each perturbation."""
    cell = cell_of(run)
    transfer = [
        {"label": label, "env": {"counts": counts}}
        for label, counts in cell.elsewhere().items()
    ]
    elsewhere = {"perturbations": [], "transfer": transfer}
    results = evaluate(
        load_policy(run.policy_dir),
        run.env,
        suite="standard" if question == PERTURBED else elsewhere,
        episodes=EPISODES[question],
        threads=1,
    ).to_pandas()
    means = results[results["perturbation"] == "clean"].set_index("policy")["mean"]
    rows = results[results["policy"] == "trained"]
    if question == PERTURBED:
        # The mean over severities.
        rows = rows[rows["perturbation"] != "clean"]
        rows = rows.groupby("label", sort=False, as_index=False)["score"].mean()
        rows["label"] = f"{PERTURBED} " + rows["label"]
    rise = late_rise(run) / (means["heuristic"] - means["random"])
    values = dict(zip(CELL, cell, strict=True))
    return rows[["label", "score"]].assign(
        run=run.path.name,
        env=run.env["name"],
        **values,
        head=run.config["pooling"]["name"],
        seed=run.config["seed"],
        rise=rise,
    )[COLUMNS]


def cell_of(run: Run) -> MapCell:
    """Return the place of a run on the map.

    Raises:
        InputError: a share of signal that is not on the map.
    """
    numbers = [int(number) for number in str(run.env["counts"]).split("-")]
    tokens = sum(numbers)
    share = Fraction(numbers[1], tokens)
    if share not in SHARES:
        shares = ", ".join(map(str, SHARES))
        raise InputError(f"{run.path}: expected a share of {shares}, got {share}")
    return MapCell(run.config["encoder"].get("num_layers", 0), tokens, share)


def late_rise(run: Run) -> float:
    """Return the rise of the return over the last fifth, by a fitted line."""
    table = run.to_pandas()
    last = table[table["env_steps"] > 0.8 * table["env_steps"].max()]
    slope, _ = np.polyfit(last["env_steps"], last["return_mean"], 1)
    return float(slope * 0.2 * table["env_steps"].max())


def tabulate(source: Path, out: Path | None, page: Path | None) -> None:
    """Print the tables or write them into a page, and draw the maps.

    Raises:
        InputError: no such file, or none of the map.
    """
    table = read_rows(source, COLUMNS)
    if page is not None and not page.is_file():
        raise InputError(f"{page}: no such file")
    if page is None:
        print(report(table))
    else:
        write_page(page, report(table))
    if out is not None:
        draw(table, out)


def main() -> None:
    """List the runs, collect them, or tabulate and draw what was collected."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["list", *ACTIONS, "table"])
    parser.add_argument("source", type=Path, help="folder of runs, or the CSV")
    parser.add_argument("--env", choices=STAGES, default="simple_centroid")
    parser.add_argument("--out", type=new_file, help="CSV or picture to write")
    parser.add_argument("--page", type=Path, help="page whose tables to replace")
    arguments = parser.parse_args()
    source, out = arguments.source, arguments.out
    with reported(parser):
        if arguments.action == "list":
            print(*commands(source, arguments.env), sep="\n")
        elif arguments.action in ACTIONS:
            if out is None:
                raise InputError("--out: expected the CSV to extend")
            collect(source, out, ACTIONS[arguments.action])
        else:
            tabulate(source, out, arguments.page)


if __name__ == "__main__":
    main()
