"""The map of pooling heads: its cells, runs, tables and tested advice."""

import shutil
import sys
from fractions import Fraction

import head_map
import head_map_tables as tables
import numpy as np
import pandas as pd
import pytest
from head_map import MapCell
from head_map_tables import Advice

from marl_pool import train
from marl_pool.cli.arguments import parse
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError

HALF, EIGHTH = Fraction(1, 2), Fraction(1, 8)
STAGES = {
    env: [(head_map.cells(*place), heads) for *place, heads in stages]
    for env, stages in head_map.STAGES.items()
}
CELLS = {
    env: [*dict.fromkeys(cell for cells, _ in stages for cell in cells)]
    for env, stages in STAGES.items()
}
PLACES = [(env, cell) for env, cells in CELLS.items() for cell in cells]
TINY = "experiment=simple_centroid total_steps=640 ppo.batch_size=64"
"""Too short to learn; eight steps of eight environments."""


def scored(seeds=5, noise=0.0, **heads):
    """A table of one cell: ``heads`` has the score of each head in every seed."""
    generator = np.random.default_rng(0)
    rows = [
        {
            "run": f"{head}-{seed}",
            "env": "simple_centroid",
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


@pytest.mark.parametrize(
    ("name", "cell"), PLACES, ids=[f"{e}-{c.depth}-{c.counts}" for e, c in PLACES]
)
def test_a_cell_has_the_tokens_and_the_share_that_it_says(name, cell):
    env = make_batched_env(name, num_envs=1, counts=cell.counts, seed=0)
    env.reset()
    (group,) = env.groups
    types, spec = env.observe()[group].types.flatten(), env.groups[group].tokens
    # The observing agent is one of the tokens, but no signal of the map.
    names = [spec.type_names[kind] for kind in types if kind]
    signal = sum(name in spec.signal_types for name in names)
    assert len(types) == cell.tokens
    assert signal / len(types) == float(cell.share)


def test_a_thirty_second_of_eight_tokens_is_left_out():
    assert not MapCell(0, 8, Fraction(1, 32)).is_possible
    assert len(CELLS["simple_centroid"]) == 2 * (2 + 3) + 3
    assert len(CELLS["simple_tag"]) == 2 * 3


def test_other_environments_keep_the_share_or_the_tokens():
    assert MapCell(0, 32, EIGHTH).elsewhere() == {
        "tokens x 1/4": "1-1-6",
        "tokens x 4": "1-16-111",
        "tokens x 8": "1-32-223",
        "share 1/2": "1-16-15",
        "share 1/32": "1-1-30",
    }
    assert "tokens x 1/4" not in MapCell(0, 8, EIGHTH).elsewhere()


@pytest.mark.parametrize("env", head_map.STAGES)
def test_all_runs_of_a_seed_are_before_those_of_the_next(tmp_path, env):
    commands = [*head_map.commands(tmp_path, env)]
    for cells, heads in STAGES[env]:
        runs = [(cell, head) for cell in cells for head in heads]
        blind = sum((cell.depth, head) == head_map.BLIND for cell, head in runs)
        for seed in head_map.SEEDS:
            block, commands = np.split(commands, [len(runs) - blind])
            assert len({line.rpartition(" ")[0] for line in block}) == len(block)
            assert all(line.endswith(f" seed={seed}") for line in block)
    assert not len(commands)


@pytest.mark.parametrize(
    ("env", "number"), [(env, n) for env in CELLS for n in range(len(CELLS[env]))]
)
def test_a_command_is_understood_and_its_run_is_of_its_cell(tmp_path, env, number):
    # The step is longer than a cell's heads and shares no factor with their numbers.
    commands = [*head_map.commands(tmp_path, env)]
    words = commands[33 * number % len(commands)].split()
    namespace, overrides = parse(words[1:])
    config = compose(namespace.verb, overrides)
    cell = head_map.cell_of(Run(tmp_path, config, ""))
    head, seed = config["pooling"]["name"], config["seed"]
    assert namespace.run_dir == f"{tmp_path}/{cell.depth}-{cell.counts}-{head}-{seed}"
    assert cell in CELLS[env]
    assert config["env"]["name"] == env
    assert config["encoder"]["dim"] == 8
    assert config["ppo"]["dropout"] == 0


def test_a_run_of_another_share_is_refused(tmp_path):
    run = Run(tmp_path, {"env": {"name": "simple_centroid", "counts": "1-3-28"}}, "")
    with pytest.raises(InputError, match=r"expected a share of 1/2, .*, got 3/32"):
        head_map.cell_of(run)


@pytest.mark.parametrize(("start", "rise"), [(0.0, 0.0), (0.3, 0.1)])
def test_the_rise_is_that_of_the_last_fifth(tmp_path, start, rise):
    run = Run(tmp_path, {}, "")
    for iteration in range(1, 101):
        late = max(iteration - 80, 0) / 20
        row = {"env_steps": 10 * iteration, "return_mean": -1 + start + rise * late}
        run.log({"iteration": iteration, **row})
    assert head_map.late_rise(run) == pytest.approx(rise)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs, one that has only started, and the table of the first two."""
    folder = tmp_path_factory.mktemp("runs")
    small = "ppo.minibatch_size=64 ppo.num_envs=8 env.max_steps=8 threads=1"
    for cell, head in ((MapCell(0, 8, HALF), "avg"), (MapCell(1, 8, EIGHTH), "gated")):
        words = [*cell.encoder.split(), f"env.counts={cell.counts}", f"pooling={head}"]
        name = f"{cell.depth}-{cell.counts}-{head}-0"
        train(*TINY.split(), *small.split(), *words, run_dir=folder / name)
    begun = {**Run.open(folder / name).config, "total_steps": 512}
    Run.create(folder / "begun", begun)
    head_map.collect(folder, folder / "map.csv", "clean")
    return folder


@pytest.mark.slow
def test_finished_runs_are_collected_once(runs):
    table = pd.read_csv(runs / "map.csv")
    head_map.collect(runs, runs / "map.csv", "clean")
    pd.testing.assert_frame_equal(pd.read_csv(runs / "map.csv"), table)
    assert [*table["run"].unique()] == ["0-1-4-3-avg-0", "1-1-1-6-gated-0"]
    clean = table[table["label"] == "clean"]
    assert [*clean["head"]] == ["avg", "gated"]
    assert [*clean["depth"]] == [0, 1]
    assert [*clean["share"]] == ["1/2", "1/8"]
    labels = {"clean", *MapCell(1, 8, EIGHTH).elsewhere()}
    assert set(table[table["run"] == "1-1-1-6-gated-0"]["label"]) == labels
    assert np.isfinite(table[["score", "rise"]]).all(axis=None)
    assert "2 runs, 1 seed of each head in a cell" in tables.report(table)


@pytest.mark.slow
def test_scores_under_perturbations_are_a_question_of_the_same_table(runs, tmp_path):
    out = tmp_path / "map.csv"
    shutil.copy(runs / "map.csv", out)
    for _ in range(2):  # the second time there is nothing to add
        head_map.collect(runs, out, tables.PERTURBED)
    table = pd.read_csv(out)
    added = table.iloc[len(pd.read_csv(runs / "map.csv")) :]
    suite = compose("evaluate", ["suite=standard"])["perturbations"]
    assert len(added) == 2 * len(suite)
    assert {"perturbed shuffle", "perturbed occlude among=signal"} < {*added["label"]}
    scores = tables.answered(table, tables.PERTURBED)
    means = added.groupby("head")["score"].mean()
    for head, score in means.items():
        assert scores[head].dropna().item() == pytest.approx(score)
    assert "mean over the perturbations of suite=standard" in tables.report(table)
    assert "perturbations" not in tables.report(pd.read_csv(runs / "map.csv"))


@pytest.mark.slow
def test_a_finished_run_is_not_listed_again(runs, tmp_path):
    listed, all_runs = (
        [*head_map.commands(folder, "simple_centroid")] for folder in (runs, tmp_path)
    )
    assert len(listed) == len(all_runs) - 2


def test_a_head_that_is_worse_matters_and_equal_ones_do_not():
    row = ("ada, avg", "0.300 (0.300 to 0.300)", "yes")
    assert tables.choice(answers(scored(ada=0.9, avg=0.6))) == row
    assert tables.choice(answers(scored(ada=0.9, avg=0.88)))[-1] == "no"


def test_the_best_of_equal_heads_is_not_better_on_seeds_that_did_not_choose_it():
    group = answers(scored(seeds=5, noise=0.1, **dict.fromkeys("abcdefgh", 0.8)))
    best, worst = tables.extremes(group)
    assert (group[best] - group[worst]).mean() > tables.MARGIN
    assert tables.choice(group)[-1] == "open"


def answers(table):
    return tables.answered(table, "clean")


def test_nothing_is_ranked_below_five_seeds():
    table = scored(seeds=4, ada=0.9, avg=0.6)
    assert tables.choice(answers(table)) == ("", "", "")
    assert not tables.losses(answers(table), "best")["head"].any()
    assert "| 0 | 8 | 1/2 | 4 | 0.900 | 0.600 |  |  |  |" in tables.report(table)


def test_a_head_of_few_seeds_takes_no_part():
    table = pd.concat([scored(ada=0.9, avg=0.6), scored(seeds=4, max=0.2)])
    assert tables.choice(answers(table))[0] == "ada, avg"
    assert [*tables.losses(answers(table), "worst")["head"]] == ["avg"]


def test_unequal_numbers_of_seeds_are_said():
    table = pd.concat([scored(seeds=5, ada=0.9), scored(seeds=3, avg=0.6)])
    assert "| 0 | 8 | 1/2 | 3 to 5 | 0.900 | 0.600 |  |  |  |" in tables.report(table)
    assert "8 runs, 3 to 5 seeds of each head in a cell" in tables.report(table)


def test_runs_that_still_rise_are_counted_and_named():
    table = scored(ada=0.9, avg=0.6)
    table.loc[table["run"] == "avg-1", "rise"] = 0.021
    assert "The return of 9 changes by at most 0.02" in tables.summary(table)
    assert "which are counted too: avg 1." in tables.summary(table)


def test_the_spread_over_seeds_says_what_five_of_them_detect():
    table = scored(ada=0.9, avg=0.6)
    table["score"] += 0.1 * (table["seed"] == 0)
    spread = np.std([0.1, 0, 0, 0, 0], ddof=1)
    assert f"between seeds is {spread:.3f}" in tables.summary(table)
    # Where the power of Student's test is 0.8, by scipy's noncentral t.
    assert f"a difference of {2.0244 * spread:.3f}" in tables.summary(table)
    assert "deviation" not in tables.summary(scored(seeds=1, ada=0.9))


def test_a_page_keeps_what_is_around_the_marks(tmp_path):
    page = tmp_path / "map.md"
    page.write_text("# Map\n<!-- measured -->\nold\n<!-- end -->\nmore\n")
    tables.write_page(page, "new")
    text = "# Map\n<!-- measured -->\n\nnew\n\n<!-- end -->\nmore\n"
    assert page.read_text() == text


def test_the_worst_and_the_best_head_lose_what_their_scores_lack():
    scores = answers(scored(ada=0.9, avg=0.6))
    for place, head, loss in (("best", "ada", 0.1), ("worst", "avg", 0.4)):
        (row,) = tables.losses(scores, place).itertuples(index=False)
        assert (row.head, row.loss) == (head, pytest.approx(loss))


SAYINGS = {
    "holds: 0.300": Advice("", "clean", "depth == 0", ("ada",), ("avg",)),
    "holds: 0.025": Advice("", "tokens", "depth == 0", ("ada",), ("max",), "no"),
    "fails: -0.250": Advice("", "share", "tokens == 8", ("avg",), ("max",)),
    "fails: 0.100": Advice("", "clean", "depth == 0", ("ada",), ("cls",), "no", (4,)),
    "open: 0.100": Advice("", "clean", "depth == 0", ("max",), ("cls",), "no"),
    # Heads that the seeds chose: the best is the last on the others.
    "fails: -0.300": Advice("", "clean", "depth == 0", (), (), "yes", (3, 4)),
    "not tested yet": Advice("", "clean", "depth == 3", ("ada",), ("avg",)),
}


@pytest.mark.parametrize("verdict", SAYINGS)
def test_advice_is_tested_on_the_seeds_that_did_not_make_it(verdict):
    table = scored(ada=0.9, max=0.85, avg=0.6, cls=0.8)
    table.loc[table["label"] == "tokens x 4", "score"] = 0.9
    advice = SAYINGS[verdict]
    # On the seeds that chose it, the result would be the opposite.
    is_seen = table["seed"].isin(advice.seeds)
    table.loc[is_seen, "score"] *= -1
    table.loc[(table["head"] == "cls") & (table["seed"] == 4), "score"] -= 0.1
    row = tables.advice_table(table, (advice,)).splitlines()[-1]
    assert f" | {verdict}" in row


def test_in_another_environment_advice_is_tested_on_all_seeds():
    table = scored(ada=0.9, avg=0.6)
    both = pd.concat([table, scored(ada=0.6, avg=0.8).assign(env="simple_tag")])
    row = tables.advice_table(both, (SAYINGS["holds: 0.300"],)).splitlines()[-1]
    assert row.endswith(
        "| 0, 1, 2 | holds: 0.300 (0.300 to 0.300), 2 cells and seeds "
        "| fails: -0.200 (-0.200 to -0.200), 5 cells and seeds |"
    )
    # Heads that seeds choose are tested on the other seeds everywhere.
    row = tables.advice_table(both, (SAYINGS["fails: -0.300"],)).splitlines()[-1]
    assert row.count("0.300 (0.300 to 0.300), 3 cells and seeds") == 1
    assert row.endswith("| holds: 0.200 (0.200 to 0.200), 3 cells and seeds |")
    report = tables.report(both)
    assert "**Score in simple_tag, as trained**" in report
    assert report.count("10 runs, 5 seeds of each head in a cell") == 2


@pytest.mark.parametrize("seeds", [1, 5])
def test_incomplete_maps_are_drawn(tmp_path, seeds):
    table = scored(seeds=seeds, ada=0.9, attention_neuron=0.6)
    cell = table[table["label"] == "clean"].assign(depth=1, tokens=32, share="1/32")
    tables.draw(pd.concat([table, cell]), tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["collect", "."], "--out: expected the CSV to extend"),
        (["collect", ".", "--out", "map.csv"], "expected finished runs, got none"),
        (["table", "map.csv"], "map.csv: no such file"),
        (["table", "map.csv", "--out", "no/map.png"], "there is no folder no"),
        (["table", "b.csv"], "b.csv: expected rows with the columns run, env, "),
        (["collect", ".", "--out", "b.csv"], "b.csv: expected rows with the columns"),
        (["table", "empty.csv"], "empty.csv: no table: No columns to parse"),
        (["list", "b.csv"], "b.csv: expected a folder, got a file"),
        (["table", "a.csv", "--page", "map.md"], "map.md: no such file"),
        (["table", "a.csv", "--page", "a.csv"], "a.csv: expected the marks <!--"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(monkeypatch, tmp_path, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    scored(ada=0.9).to_csv("a.csv", index=False)
    (tmp_path / "empty.csv").touch()
    pd.DataFrame({"run": ["x"]}).to_csv("b.csv", index=False)
    monkeypatch.setattr(sys, "argv", ["head_map.py", *words])
    with pytest.raises(SystemExit) as caught:
        head_map.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_without_layers_a_class_token_is_refused():
    depth, head = head_map.BLIND
    words = [*MapCell(depth, 8, HALF).encoder.split(), f"pooling={head}"]
    config = compose("train", ["experiment=simple_centroid", *words])
    env = make_batched_env("simple_centroid", num_envs=2, counts="1-4-3", seed=0)
    group = env.groups["agent"]
    parts = {"encoder": config["encoder"], "pooling": config["pooling"]}
    with pytest.raises(InputError, match="would not depend on the tokens"):
        TokenPolicy(group.tokens, group.action_space, **parts, seed=0)
