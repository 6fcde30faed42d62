"""Hyperparameter search: ranges, proposals, early stopping, and a search that runs."""

import json
import math
import shlex
import sys
from dataclasses import replace

import pytest

from helpers.tables import yaml_cases
from marl_pool.cli import main as cli
from marl_pool.config import parse, plan_search, plan_space
from marl_pool.options.overrides import written
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import Proposal, Sweep, read_table, rounded
from marl_pool.training.jobs import begun
from marl_pool.training.sweep.halving import EarlyStopping, rung_scores, score_of
from marl_pool.training.sweep.search import suggested
from marl_pool.training.sweep.trial import Outcome
from marl_pool.utils.errors import InputError

SPACE = ["ppo.lr=log_uniform(1e-4,1e-2)", "pooling=choice(ada,max)"]
pytestmark = pytest.mark.usefixtures("elsewhere")


@yaml_cases("arguments, parts")
def test_a_wrong_search_is_refused_in_one_line(refused, tmp_path, arguments, parts):
    error = refused("sweep", *arguments.replace("SPACE", " ".join(SPACE)).split())
    assert [part for part in parts if part not in error] == []
    assert not list(tmp_path.iterdir())


def test_a_missing_optuna_is_named_with_its_extra(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    extra = 'pip install "marl-pool[search]"'
    assert extra in refused("sweep", "--search", *SPACE)


def test_a_sweep_folder_keeps_ranges_and_proposals(tmp_path):
    space = plan_search(SPACE).space
    assert space["ppo.lr"] == ["log_uniform", 1e-4, 1e-2]
    assert space["pooling"] == ["choice", "ada", "max"]
    sweep = Sweep(tmp_path / "s", {}, ["seed=3"], space=space)
    sweep.path.mkdir()
    sweep.write()
    proposals = [Proposal({"ppo.lr": 0.001, "pooling": "max"}, stopped_early=True)]
    sweep.write_proposals(proposals)
    copy = Sweep.open(sweep.path)
    assert (copy.space, copy.proposals()) == (space, proposals)
    sweep.write_proposals([Proposal({"ppo.lr": 0.001})])
    with pytest.raises(InputError, match="expected values of ppo.lr, pooling"):
        copy.proposals()


@yaml_cases("changed, expected, actual")
def test_a_proposal_outside_its_range_is_refused(tmp_path, changed, expected, actual):
    space = plan_search([*SPACE, "seed=int_uniform(1,3)"]).space
    sweep = Sweep(tmp_path, {}, [], space=space)
    values = {"ppo.lr": 1e-3, "pooling": "max", "seed": 3}
    sweep.write_proposals([Proposal(values)])
    assert sweep.proposals() == [Proposal(values)]
    sweep.write_proposals([Proposal(values), Proposal(values | changed)])
    (key,) = changed
    message = f"{sweep.path}/proposals.yaml: {key}: expected {expected}.*got {actual}"
    with pytest.raises(InputError, match=message):
        sweep.proposals()


@pytest.fixture
def empty_search(tmp_path) -> Sweep:
    """The folder of a search without trials."""
    pytest.importorskip("ray")
    pytest.importorskip("optuna")
    plan = plan_search(SPACE)
    sweep = Sweep(tmp_path / "s", {}, plan.overrides, space=plan.space)
    sweep.path.mkdir()
    sweep.write()
    return sweep


COMMAND = ["sweep", "--search", *SPACE, "--sweep-dir", "s", "--or-resume"]


def test_a_class_in_a_proposal_is_not_imported(empty_search, tmp_path, refused):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    empty_search.write_proposals([Proposal({"ppo.lr": 1e-3, "pooling": "evil:Max"})])
    for arguments in (COMMAND, ["resume", "s"]):
        assert "proposals.yaml: pooling: expected one of" in refused(*arguments)


@pytest.mark.usefixtures("empty_search")
def test_an_existing_sweep_has_dry_runs(monkeypatch):
    calls = []
    run = "marl_pool.training.sweep.run.run_sweep"
    monkeypatch.setattr(run, lambda *args: calls.append(args) or {})
    assert cli.main([*COMMAND, "--dry-run"]) == 0
    ((_, _, dry_run),) = calls
    assert dry_run is True


# Optuna and ASHA


@pytest.fixture
def make_search(tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("optuna")
    from marl_pool.training.sweep.search import Search

    def make(name: str = "s", trials: int = 4, *overrides: str) -> Search:
        fixed = ["total_steps=1000", f"sweep.trials={trials}", *overrides]
        plan = plan_space(plan_search(SPACE).space, fixed)
        sweep = Sweep(tmp_path / name, {}, [], space=plan.space)
        (sweep.path / "trials").mkdir(parents=True, exist_ok=True)
        for proposal in sweep.proposals():
            plan.add(proposal.values)
        return Search(sweep, plan)

    return make


def scored(search, trial, *scores: float, steps: int = 1000) -> Run:
    """A run of a trial, with a row for each score at equal intervals."""
    run = Run.create(search.sweep.run_path(trial), trial.config.plain)
    for number, score in enumerate(scores, 1):
        env_steps = steps * number // len(scores)
        run.log({"iteration": number, "env_steps": env_steps, "return_mean": score})
    run.close()
    return run


def test_a_seed_fixes_what_is_proposed(make_search):
    def proposed(search) -> list[dict]:
        upcoming = search.upcoming([])
        return [next(upcoming).values for _ in range(2)]

    first = proposed(make_search("a"))
    assert first == proposed(make_search("b"))
    assert all(1e-4 <= item["ppo.lr"] <= 1e-2 for item in first)
    # A resumed search goes on with other values, and ends with its last trial.
    resumed = make_search("a")
    assert [trial.name for trial in resumed.trials] == ["0000", "0001"]
    assert not {str(item) for item in proposed(resumed)} & {str(item) for item in first}
    assert list(make_search("a").upcoming([])) == []


def test_a_resumed_search_continues_trials_and_knows_the_others(make_search):
    search = make_search()
    ended, pending = (
        search.propose({"ppo.lr": lr, "pooling": "max"}) for lr in (1e-3, 2e-3)
    )
    scored(search, ended, 1.5)
    upcoming = search.upcoming([pending])
    assert search.ended == set()
    assert next(upcoming) == pending
    assert search.ended == {ended.name}
    search.end(pending, Outcome())
    assert search.ended == {ended.name, pending.name}
    assert [trial.name for trial, _ in search.ranking] == [ended.name, pending.name]


def test_a_resumed_search_proposes_what_an_uninterrupted_one_does(make_search):
    """After Optuna's ten random trials, and after a failed one."""

    def run(search, count: int) -> list[dict]:
        failed = [trial for trial in search.trials if trial.name == "0001"]
        upcoming = search.upcoming(failed)
        for trial in [next(upcoming) for _ in failed]:
            search.end(trial, Outcome("no memory"))
        for number in range(len(search.trials), count):
            trial = next(upcoming)
            reason = "no memory" if number == 1 else ""
            scored(search, trial, round(1 - 100 * trial.values["ppo.lr"], 3))
            search.end(trial, Outcome(reason))
        return [trial.values for trial in search.trials]

    expected = run(make_search("whole", 14), 14)
    run(make_search("part", 14), 12)
    assert expected == run(make_search("part", 14), 14)
    # Later proposals follow from the scores.
    assert len({str(values) for values in expected}) == 14
    good = [values["ppo.lr"] for values in expected[10:]]
    assert max(good) < max(values["ppo.lr"] for values in expected[:10])


@pytest.mark.parametrize("batch", ["2048,512", "512,2048"])
@pytest.mark.parametrize("minibatch", ["256,1024", "1024,256"])
def test_a_search_skips_values_that_do_not_fit_each_other(
    tmp_path, capsys, batch, minibatch
):
    """A minibatch is no larger than the batch."""
    pytest.importorskip("ray")
    pytest.importorskip("optuna")
    from marl_pool.training.sweep.search import Search

    ranges = [f"ppo.batch_size=choice({batch})"]
    ranges += [f"ppo.minibatch_size=choice({minibatch})"]
    plan = plan_search([*ranges, "total_steps=4096", "sweep.trials=12"])
    (tmp_path / "s").mkdir()
    search = Search(Sweep(tmp_path / "s", {}, [], space=plan.space), plan)
    sizes = [
        (ppo.batch_size, ppo.minibatch_size)
        for ppo in (trial.config.ppo for trial in search.upcoming([]))
    ]
    assert sorted(sizes) == [(512, 256), (2048, 256), (2048, 1024)]
    assert search.sweep.proposals() == search.proposals
    # No values are left for the other trials.
    assert (
        "s: 100 suggestions after 3 trials had no new values" in capsys.readouterr().err
    )
    # With no valid values left, the search ends.
    plan.space["ppo.batch_size"] = ["choice", 512, 128]
    plan.space["ppo.minibatch_size"] = ["choice", 1024, 2048]
    search.settings = replace(search.settings, trials=13)
    with pytest.raises(InputError, match="100 suggestions are invalid: ppo.minibatch"):
        next(search.upcoming([]))


def test_a_search_tries_every_value_once(make_search):
    """Also after Optuna's ten random trials, where it prefers the good ones."""
    search = make_search("s", 20)
    search.plan.space.clear()
    search.plan.space |= {"seed": ["int_uniform", 1, 12], "pooling": ["choice", "max"]}
    for trial in search.upcoming([]):
        scored(search, trial, float(trial.values["seed"] == 3))
        search.end(trial, Outcome())
    assert sorted(trial.values["seed"] for trial in search.trials) == [*range(1, 13)]


def test_a_full_disk_is_no_invalid_suggestion(make_search, monkeypatch):
    search, writes = make_search(), []

    def fail(proposals):
        writes.append(len(proposals))
        raise InputError("proposals.yaml cannot be written: No space left on device")

    monkeypatch.setattr(Sweep, "write_proposals", lambda _, proposals: fail(proposals))
    with pytest.raises(InputError, match="No space left"):
        next(search.upcoming([]))
    assert writes == [1]


def test_numbers_that_round_to_integers_need_no_other_range() -> None:
    """Four digits of numbers from 4,096 on are whole, and so valid for integers."""
    plan = plan_search(["ppo.batch_size=log_uniform(4096,65536)", "ppo.num_envs=64"])
    assert plan.space == {"ppo.batch_size": ["log_uniform", 4096, 65536]}


def test_a_search_that_another_session_has_changed_is_refused(make_search):
    search, second_session = make_search(), make_search()
    search.validate_current()
    trial = second_session.propose({"ppo.lr": 1e-3, "pooling": "max"})
    with pytest.raises(InputError, match="expected 0 trials, .* got 1: another"):
        search.validate_current()
    search = make_search()
    second_session.end(trial, Outcome(was_worse=True))
    with pytest.raises(InputError, match="another session has changed the search"):
        search.validate_current()


def test_a_trial_does_not_train_a_run_of_other_values(make_search):
    search = make_search()
    trial = search.propose({"ppo.lr": 1e-3, "pooling": "max"})
    path = search.sweep.run_path(trial)
    assert begun(path, trial.config) is None
    Run.create(path, trial.config.plain).close()
    # With more steps it is still the same run.
    assert begun(path, replace(trial.config, total_steps=5)).path == path
    changed = search.plan.make(trial.name, {"ppo.lr": 2e-3, "pooling": "max"})
    with pytest.raises(InputError, match=r"0000: ppo\.lr: expected 0\.002, got 0\.001"):
        begun(path, changed.config)


def test_results_name_the_trials_that_were_stopped_early(make_search, capsys):
    search = make_search()
    for lr, was_worse in ((1e-3, False), (2e-3, True)):
        trial = search.propose({"ppo.lr": lr, "pooling": "max"})
        scored(search, trial, 1.0, steps=500 if was_worse else 1000)
        search.end(trial, Outcome(was_worse=was_worse))
    search.print_results({"0000": "finished", "0001": "stopped"})
    out = capsys.readouterr().out.splitlines()
    for name, state in (("0000", "finished"), ("0001", "stopped early")):
        assert [state in line for line in out if name in line.split()] == [True]
    assert Sweep(search.sweep.path, {}, [], space=search.plan.space).proposals() == [
        Proposal({"ppo.lr": 1e-3, "pooling": "max"}),
        Proposal({"ppo.lr": 2e-3, "pooling": "max"}, stopped_early=True),
    ]


def test_an_unknown_metric_of_earlier_runs_is_refused_at_once(make_search):
    search = make_search()
    scored(search, search.propose({"ppo.lr": 1e-3, "pooling": "max"}), 1.0)
    with pytest.raises(InputError, match="unknown sweep.metric 'retrun_mean'.*_mean'"):
        make_search("s", 4, "sweep.metric=retrun_mean")


@pytest.mark.parametrize("by", ["address", "variable"])
def test_early_stopping_needs_a_disk_that_is_shared(make_search, monkeypatch, by):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    joined = ["sweep.address=auto"] if by == "address" else []
    if by == "variable":
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    make_search("s", 4, *joined)
    storage = "storage=s3://bucket/runs"
    with pytest.raises(InputError, match="sweep.asha: expected false .* got true"):
        make_search("s", 4, *joined, storage)
    make_search("s", 4, *joined, storage, "sweep.asha=false")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    make_search("s", 4, storage)


@pytest.mark.parametrize(
    ("earlier_scores", "scores", "iteration"),
    [
        # Twenty rows are five percent each: comparisons after rows 2, 6 and 18.
        ([[1.0] * 20], [0.5] * 20, 2),
        ([[1.0] * 20], [2.0] * 20, None),
        ([[1.0] * 20], [1.0] * 20, None),
        # The best score so far counts.
        ([[1.0] * 20], [2.0] + [0.5] * 19, None),
        ([[3.0] + [0.0] * 19], [2.0] * 20, 2),
        ([[0.0] * 4 + [3.0] * 16], [2.0] * 20, 6),
        ([[0.0] * 16 + [3.0] * 4], [2.0] * 20, 18),
        # The best third continues.
        ([[1.0] * 20, [2.0] * 20, [4.0] * 20], [3.0] * 20, None),
        ([[1.0] * 20, [3.0] * 20, [4.0] * 20], [2.0] * 20, 2),
        # A late first row enters no early comparison.
        ([[3.0] * 2], [2.0] * 20, 6),
        ([[3.0]], [2.0] * 20, 18),
        ([], [2.0] * 20, None),
        ([[3.0] * 20], [math.nan] * 20, None),
        ([[3.0] * 20], [math.nan] * 3 + [2.0] * 17, 4),
    ],
)
def test_a_worse_trial_is_stopped(make_search, earlier_scores, scores, iteration):
    search = make_search()
    for trial_scores in earlier_scores:
        values = {"ppo.lr": 1e-3, "pooling": "max"}
        scored(search, search.propose(values), *trial_scores)
    trial = search.propose({"ppo.lr": 2e-3, "pooling": "ada"})
    run = Run.create(search.sweep.run_path(trial), trial.config.plain)

    def early(metric: str = "return_mean", enabled: bool = True) -> EarlyStopping:
        return EarlyStopping(metric, enabled, trial.config)

    session = early()
    assert not session.should_stop(run)
    for number, score in enumerate(scores, 1):
        row = {"iteration": number, "env_steps": 50 * number, "return_mean": score}
        run.log(row)
        assert session.should_stop(run) == session.was_worse == (number == iteration)
        # A resumed trial decides the same.
        assert early().should_stop(Run.open(run.path)) == session.was_worse
        assert not early(enabled=False).should_stop(run)
        assert early("retrun_mean").should_stop(run)
        if session.was_worse:
            break
    run.close()


@pytest.mark.parametrize(
    ("folds", "values", "score", "rungs"),
    [
        ([0, 0, 1, 1], [3.0, 1.0, 4.0, 5.0], -2.5, {10: -3, 30: -1, 90: -2.5}),
        ([0, 0, 1, 1], [3.0, 4.0, math.nan, 1.0], -2, {10: -3, 30: -3, 90: -2}),
        ([0, 0], [3.0, 2.0], -2, {10: -3, 30: -2}),
        # A fold that has just begun is not compared.
        ([0, 0, 1], [3.0, 1.0, 9.0], -1, {10: -3, 30: -1}),
        ([0, 1, 1, 2], [3.0, 5.0, 4.0, 2.0], -3, {10: -3, 30: -4, 90: -3}),
        ([None] * 4, [3.0, 1.0, 4.0, 5.0], -1, {10: -3, 30: -1, 90: -1}),
        ([], [], None, {}),
    ],
)
def test_the_score_of_a_fit_is_the_mean_over_its_folds(folds, values, score, rungs):
    rows = [
        {"loss": value, "done": done} | ({} if fold is None else {"fold": fold})
        for fold, value, done in zip(folds, values, [25, 50, 75, 100], strict=False)
    ]
    assert score_of(rows, "-loss") == score
    if folds == [0, 0, 1]:
        # Seconds, not epochs, may have ended the last fold of a finished run.
        assert score_of(rows, "-loss", has_ended=True) == -5
    assert rung_scores(rows, "-loss", lambda row: row["done"]) == rungs


@pytest.mark.parametrize(
    "value",
    [
        *("ada", "own:Pool", "a/b.c", "1-3-28", "true", "NULL", "nan", "Inf", "none"),
        *("it's", "a b", "", r"end\\", True, None, 3, 1e-5, float("inf"), [1, "true"]),
        {"name": "null", "size": [2, 3]},
    ],
)
def test_the_best_command_has_the_value_itself(value):
    read = parse(f"key={written(value)}").value
    assert (read, type(read)) == (value, type(value))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_search_runs_is_resumed_and_prints_the_best_command(capsys):
    pytest.importorskip("optuna")
    small = [
        *("env.counts=1-2-2", "env.max_steps=8", "encoder.num_layers=1"),
        *("ppo.num_envs=4", "ppo.batch_size=32", "ppo.minibatch_size=32"),
        *("ppo.num_epochs=1", "checkpoint.every=2", "total_steps=64"),
    ]
    command = ["sweep", "--search", *SPACE, *small, "--concurrency", "1"]
    command += ["--trials", "2", "--sweep-dir", "s", "--or-resume"]
    assert cli.main(command) == 0
    first = Sweep.open("s").proposals()
    assert len(first) == 2
    # The same command again has nothing to do; more trials go on where it ended.
    assert cli.main(command) == 0
    assert cli.main(["resume", "s", "sweep.trials=3"]) == 0
    out = capsys.readouterr().out
    assert "3 trials, 2 of them started, maximizing return_mean" in out
    proposals = Sweep.open("s").proposals()
    assert proposals[:2] == first
    table = read_table("s")
    assert {row["trial"] for row in table} == {"0000", "0001", "0002"}
    best = max(table, key=lambda row: row["return_mean"])
    words = shlex.split(out.rpartition("best: ")[2].splitlines()[0])
    values = proposals[int(best["trial"])].values
    assert words[:2] == ["marl-pool", "train"]
    assert {f"{key}={value}" for key, value in values.items()} < set(words)
    assert {*small, "threads=1"} < set(words)


@pytest.mark.parametrize(
    ("value", "range_", "expected"),
    [
        (0.0123456, ("log_uniform", 0.001, 0.1), 0.01235),
        (0.99995678, ("uniform", 0.99991, 0.99999), 0.99995678),
        (100004.56789, ("uniform", 100001, 100009), 100004.568),
        (0.0, ("uniform", -1, 1), 0.0),
        (2.00001, ("uniform", 1, 2), 2),
        (7, ("int_uniform", 1, 9), 7),
        (0.5, ("uniform", 0.5, 0.5), 0.5),
    ],
)
def test_proposals_have_four_digits_of_their_range(value, range_, expected):
    assert rounded(value, range_) == expected


def test_choices_may_be_lists_and_mappings():
    choices = [[32], [32, 32], {"name": "max"}, 1, True]
    space = {"a": ["choice", *choices]}
    scored = [({"a": choice}, float(k)) for k, choice in enumerate(choices)]
    value = suggested(space, scored, (0, 5))["a"]
    assert json.dumps(value) in map(json.dumps, choices)
