"""The script that tabulates the tasks of MPE."""

import csv

import mpe_table
import pytest

from marl_pool import train


def test_scripts_are_ahead_of_random_agents_on_both_sides():
    means = {
        (row["adversaries"], row["agents"], row["group"]): row["mean"]
        for row in mpe_table.rows("simple_push", [], 200)
    }
    # mpe2 shows the adversary no goal: it goes between the landmarks.
    assert means["heuristic", "random", "adversary"] > 5
    assert abs(means["random", "random", "adversary"]) < 5
    assert means["random", "heuristic", "agent"] > -10
    assert means["random", "random", "agent"] < -20


def test_scripts_that_hear_nothing_are_between_random_and_those_that_do():
    means = {
        row["agents"]: row["mean"]
        for row in mpe_table.rows("simple_reference", [], 200)
    }
    assert means["random"] < means["deaf"] - 5 < means["heuristic"] - 10


ROW = {"task": "simple_push", "agents": "trained", "adversaries": "random"}


def test_the_table_has_means_over_runs_and_half_of_the_t_interval():
    rows = [
        {**ROW, "group": group, "mean": mean, "run": run}
        for run, mean in (("a", 1.0), ("b", 2.0), ("c", 3.0))
        for group in ("adversary", "agent")
    ]
    # scipy.stats.t.interval(0.95, 2, 2, 3**-0.5) is 2 ± 2.484.
    assert mpe_table.table(rows).splitlines()[-1] == (
        "| simple_push | random |  |  |  | 2.0 ± 2.5; 2.0 ± 2.5 |"
    )
    assert mpe_table.table(rows[:1]).endswith("|  | 1.0 |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/table.csv", "run"], "there is no folder no"),
        (["table.csv", "missing"], "missing"),
        (["test.csv", "run"], "test.csv is there already: expected a new file"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.csv").touch()
    with pytest.raises(SystemExit) as ended:
        mpe_table.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert [file.name for file in tmp_path.iterdir()] == ["test.csv"]
    assert not (tmp_path / "test.csv").read_bytes()


@pytest.mark.slow
def test_a_run_plays_either_side_and_both(tmp_path, capsys):
    tiny = ["ppo.num_envs=4", "ppo.batch_size=64", "ppo.minibatch_size=32"]
    run = tmp_path / "run"
    train("experiment=simple_push", *tiny, "total_steps=1", run_dir=run)
    file = tmp_path / "table.csv"
    mpe_table.main([str(file), str(run), "--episodes", "3"])
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2 * 9
    assert [row["run"] for row in rows].count("run") == 2 * 5
    assert capsys.readouterr().out.count("| trained |") == 1
