"""The map of pooling heads: its cells, runs, tables and tested advice."""

import sys
from fractions import Fraction

import head_map
import head_map_tables as tables
import numpy as np
import pandas as pd
import pytest
from head_map import Cell
from head_map_tables import Advice

from marl_pool import train
from marl_pool.cli.arguments import parse
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.runs.run import Run

HALF, EIGHTH = Fraction(1, 2), Fraction(1, 8)
CELLS = [cell for stage in head_map.STAGES for cell in head_map.cells(stage)]
BOTH = ("0-1-4-3-ada-0", "1-1-1-6-max-0")
"""Names of runs."""


def scored(seeds=5, noise=0.0, **heads):
    """A table of one cell: ``heads`` has the score of each head in every seed."""
    generator = np.random.default_rng(0)
    rows = [
        {
            "run": f"{head}-{seed}",
            "depth": 0,
            "tokens": 8,
            "share": "1/2",
            "head": head,
            "seed": seed,
            "label": label,
            "score": score + noise * generator.normal(),
            "rise": 0.0,
        }
        for head, score in heads.items()
        for seed in range(seeds)
        for label in ("clean", "tokens x 4", "tokens x 8", "share 1/8")
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.depth}-{cell.counts}")
def test_a_cell_has_the_tokens_and_the_share_that_it_says(cell):
    env = make_batched_env("simple_centroid", num_envs=1, counts=cell.counts, seed=0)
    env.reset()
    types = env.observe()["agent"].types.flatten()
    signal = (types == env.groups["agent"].tokens.type_names.index("signal")).sum()
    assert len(types) == cell.tokens
    assert signal / len(types) == float(cell.share)


def test_a_thirty_second_of_eight_tokens_is_left_out():
    assert not Cell(0, 8, Fraction(1, 32)).is_possible
    assert len(CELLS) == 2 * (2 + 3) + 3


def test_other_environments_keep_the_share_or_the_tokens():
    assert Cell(0, 32, EIGHTH).elsewhere() == {
        "tokens x 1/4": "1-1-6",
        "tokens x 4": "1-16-111",
        "tokens x 8": "1-32-223",
        "share 1/2": "1-16-15",
        "share 1/32": "1-1-30",
    }
    assert "tokens x 1/4" not in Cell(0, 8, EIGHTH).elsewhere()


def test_all_runs_of_a_seed_are_before_those_of_the_next(tmp_path):
    commands = [*head_map.commands(tmp_path)]
    first = len(head_map.cells(head_map.STAGES[0])) * len(head_map.HEADS)
    for seed in head_map.SEEDS:
        block = commands[seed * first : (seed + 1) * first]
        assert len({command.rpartition(" ")[0] for command in block}) == first
        assert all(command.endswith(f" seed={seed}") for command in block)
    assert len(set(commands)) == len(commands)


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_a_command_is_understood_and_its_run_is_of_its_cell(tmp_path, number):
    per_seed = len(head_map.HEADS)
    words = [*head_map.commands(tmp_path)][number * (per_seed + 1)].split()
    namespace, overrides = parse(words[1:])
    config = compose(namespace.verb, overrides)
    run = Run(tmp_path, config)
    cell = head_map.cell_of(run)
    head, seed = config["pooling"]["name"], config["seed"]
    assert namespace.run_dir == f"{tmp_path}/{cell.depth}-{cell.counts}-{head}-{seed}"
    assert cell in CELLS
    assert config["encoder"]["dim"] == 8
    assert config["ppo"]["dropout"] == 0


@pytest.mark.parametrize(("start", "rise"), [(0.0, 0.0), (0.3, 0.1)])
def test_the_rise_is_that_of_the_last_fifth(tmp_path, start, rise):
    run = Run(tmp_path, {})
    for iteration in range(1, 101):
        late = max(iteration - 80, 0) / 20
        row = {"env_steps": 10 * iteration, "return_mean": -1 + start + rise * late}
        run.log({"iteration": iteration, **row})
    assert head_map.late_rise(run) == pytest.approx(rise)
