"""Hyperparameter search: ranges, proposals, early stopping, and a search that runs."""

import shlex
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from marl_pool.cli import main as cli
from marl_pool.config import parse, plan_search, plan_space
from marl_pool.options.overrides import written
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import Proposal, Sweep, read_table
from marl_pool.training.settings import SweepSettings
from marl_pool.utils.errors import InputError

SPACE = ["ppo.lr=log_uniform(1e-4,1e-2)", "pooling=choice(ada,max)"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["ppo.lr=unifrm(0,1)"], ["ppo.lr: expected choice(a,b)", "got unifrm(0,1)"]),
        (["ppo.lr=uniform(2,1)"], ["ppo.lr: expected low < high", "uniform(2, 1)"]),
        (["ppo.lr=uniform(1,1)"], ["ppo.lr: expected low < high", "uniform(1, 1)"]),
        (["ppo.lr=log_uniform(0,1)"], ["ppo.lr: expected low > 0", "(0, 1)"]),
        (["ppo.lr=log_uniform(-1,1)"], ["ppo.lr: expected low > 0", "(-1, 1)"]),
        (["ppo.lr=uniform(0.1)"], ["expected uniform(low,high)", "uniform(0.1)"]),
        (["ppo.lr=uniform(0,inf)"], ["expected uniform(low,high)", "inf"]),
        (["ppo.lr=uniform(a,b)"], ["ppo.lr: expected uniform(low,high)", "'a'"]),
        (["ppo.num_epochs=int_uniform(1,2.5)"], ["each an integer", "(1, 2.5)"]),
        (["pooling=choice(ada,ada)"], ["pooling: expected distinct values"]),
        (["pooling=choice(ada,adda)"], ["unknown pooling 'adda'"]),
        (["ppo.lrr=uniform(0,1)"], ["ppo.lrr: unknown key 'lrr'"]),
        (["ppo.lr=uniform(-1,1)"], ["ppo.lr: expected a number > 0", "-1"]),
        (["pooling=ada"], ["--search: expected a range", "got none"]),
        (["grid.seed=[0,1]", *SPACE], ["grid: expected none with --search"]),
        (["threads=int_uniform(1,2)"], ["threads: a sweep sets it"]),
        ([*SPACE, "ppo.lr=1e-3"], ["ppo.lr: expected one value", "and 1e-3"]),
        (["pooling=max", *SPACE], ["pooling: expected one option", "got max and"]),
        ([*SPACE, "--trials", "0"], ["sweep.trials: expected an integer", "got 0"]),
    ],
)
def test_a_wrong_search_is_refused_in_one_line(capsys, tmp_path, arguments, parts):
    assert cli.main(["sweep", "--search", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in parts:
        assert part in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["ppo.lr=uniform(0,1)"], "got uniform(0,1); a range needs --search"),
        (["seed=0,1", "--trials", "3"], "sweep.trials: expected --search"),
    ],
)
def test_a_grid_has_nothing_of_a_search(capsys, arguments, part):
    assert cli.main(["sweep", *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_a_missing_optuna_is_named_with_its_extra(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["sweep", "--search", *SPACE]) == 2
    assert 'pip install "marl-pool[search]"' in capsys.readouterr().err


def test_a_sweep_folder_keeps_ranges_and_proposals(tmp_path):
    space = plan_search(SPACE).search.space
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


@pytest.mark.parametrize(
    ("changed", "expected", "actual"),
    [
        ({"pooling": "evil:Max"}, "one of 'ada', 'max'", "'evil:Max'"),
        ({"pooling": True}, "one of 'ada', 'max'", "true"),
        ({"ppo.lr": 0.5}, "a number", "0.5"),
        ({"ppo.lr": float("nan")}, "a number", "nan"),
        ({"ppo.lr": "evil:lr"}, "a number", "'evil:lr'"),
        ({"seed": 2.5}, "an integer", "2.5"),
        ({"seed": 4}, "an integer", "4"),
    ],
)
def test_a_proposal_outside_its_range_is_refused(tmp_path, changed, expected, actual):
    space = plan_search([*SPACE, "seed=int_uniform(1,3)"]).search.space
    sweep = Sweep(tmp_path, {}, [], space=space)
    values = {"ppo.lr": 1e-3, "pooling": "max", "seed": 3}
    sweep.write_proposals([Proposal(values)])
    assert sweep.proposals() == [Proposal(values)]
    sweep.write_proposals([Proposal(values), Proposal(values | changed)])
    with pytest.raises(InputError) as caught:
        sweep.proposals()
    (key,) = changed
    for part in (
        f"{sweep.path}/proposals.yaml: {key}: expected",
        expected,
        f"got {actual}",
    ):
        assert part in str(caught.value)


def test_a_class_in_a_proposal_is_not_imported(tmp_path, capsys):
    pytest.importorskip("optuna")
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    plan = plan_search(SPACE)
    sweep = Sweep(tmp_path / "s", {}, plan.overrides, space=plan.search.space)
    sweep.path.mkdir()
    sweep.write()
    sweep.write_proposals([Proposal({"ppo.lr": 1e-3, "pooling": "evil:Max"})])
    command = ["sweep", "--search", *SPACE, "--sweep-dir", "s", "--or-resume"]
    for arguments in (command, ["resume", "s"]):
        assert cli.main(arguments) == 2
        assert "proposals.yaml: pooling: expected one of" in capsys.readouterr().err


def test_a_dry_run_of_a_sweep_that_exists_is_one(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    pytest.importorskip("optuna")
    plan = plan_search(SPACE)
    sweep = Sweep(tmp_path / "s", {}, plan.overrides, space=plan.search.space)
    sweep.path.mkdir()
    sweep.write()
    calls = []
    run = "marl_pool.training.sweep.run.run_sweep"
    monkeypatch.setattr(run, lambda *args: calls.append(args) or {})
    command = ["sweep", "--search", *SPACE, "--sweep-dir", "s", "--or-resume"]
    assert cli.main([*command, "--dry-run"]) == 0
    ((_, _, _, dry_run, _),) = calls
    assert dry_run is True


# Optuna and ASHA


@pytest.fixture
def make_search(tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("optuna")
    from marl_pool.training.sweep.search import TrialSearch

    def make(name: str = "s", trials: int = 4) -> TrialSearch:
        plan = plan_space(plan_search(SPACE).search.space, ["total_steps=1000"])
        sweep = Sweep(tmp_path / name, {}, [], space=plan.search.space)
        (sweep.path / "trials").mkdir(parents=True, exist_ok=True)
        old_trials = [
            plan.search.make(f"{number:04d}", proposal.values)
            for number, proposal in enumerate(sweep.proposals())
        ]
        return TrialSearch(sweep, plan.search, SweepSettings(trials=trials), old_trials)

    return make


def scored(search, trial, score: float, steps: int = 1000) -> None:
    run = Run.create(search.sweep.run_path(trial), trial.config)
    run.log({"iteration": 1, "env_steps": steps, "return_mean": score})
    run.close()


def test_a_seed_fixes_what_is_proposed(make_search, tmp_path):
    from marl_pool.training.sweep.search import Proposer

    def proposed(search) -> list[dict]:
        proposer, values = Proposer(search, [], tmp_path / "none"), []
        for number in range(2):
            proposer.suggest(str(number))
            values.append(search.proposals[-1].values)
            proposer.on_trial_complete(str(number), {"score": float(number)})
        return values

    first = proposed(make_search("a"))
    assert first == proposed(make_search("b"))
    assert all(1e-4 <= item["ppo.lr"] <= 1e-2 for item in first)
    # A resumed search goes on with other values, and ends with its last trial.
    resumed = make_search("a")
    assert [trial.name for trial in resumed.trials] == ["0000", "0001"]
    assert not {str(item) for item in proposed(resumed)} & {str(item) for item in first}
    assert Proposer(make_search("a"), [], tmp_path).suggest("x") is None
    assert Proposer(make_search("a"), [], tmp_path / "none").suggest("x") == "FINISHED"


def test_a_resumed_search_continues_trials_and_knows_the_others(make_search, tmp_path):
    from marl_pool.training.sweep.search import Proposer

    search = make_search()
    ended, pending = (
        search.propose({"ppo.lr": lr, "pooling": "max"}) for lr in (1e-3, 2e-3)
    )
    scored(search, ended, 1.5)
    proposer = Proposer(search, [pending], tmp_path / "none")
    assert proposer.suggest("a")["trial"] == pending.name
    proposer.on_trial_complete("a", {"score": 2.5})
    assert proposer.scores == {ended.name: 1.5, pending.name: 2.5}
    assert [trial.name for trial, _ in search.ranking] == [ended.name, pending.name]


def test_a_resumed_search_proposes_what_an_uninterrupted_one_does(
    make_search, tmp_path
):
    """Beyond Optuna's ten random trials, and after a failure."""
    from marl_pool.training.sweep.search import Proposer

    def run(search, proposer, numbers) -> list[dict]:
        for number in numbers:
            proposer.suggest(str(number))
            trial = search.trials[number]
            failed = {"reason": "no memory"} if number == 1 else {}
            score = round(1 - 100 * trial.values["ppo.lr"], 3)
            if not failed:
                scored(search, trial, score)
            proposer.on_trial_complete(str(number), {"score": score, **failed})
        return [trial.values for trial in search.trials]

    whole = make_search("whole", trials=14)
    expected = run(whole, Proposer(whole, [], tmp_path / "none"), range(14))
    part = make_search("part", trials=14)
    run(part, Proposer(part, [], tmp_path / "none"), range(12))
    part = make_search("part", trials=14)
    assert expected == run(part, Proposer(part, [], tmp_path / "none"), range(12, 14))
    # Later proposals follow from the scores.
    assert len({str(values) for values in expected}) == 14
    good = [values["ppo.lr"] for values in expected[10:]]
    assert max(good) < max(values["ppo.lr"] for values in expected[:10])


def test_a_search_that_another_session_has_changed_is_refused(make_search):
    search, rival = make_search(), make_search()
    search.validate_current()
    trial = rival.propose({"ppo.lr": 1e-3, "pooling": "max"})
    with pytest.raises(InputError, match="expected 0 trials, .* got 1: another"):
        search.validate_current()
    search = make_search()
    rival.stop_early(trial.name)
    with pytest.raises(InputError, match="another one has changed the search"):
        search.validate_current()


def test_a_trial_does_not_train_a_run_of_other_values(make_search):
    from marl_pool.training.sweep.trial import _open_or_create

    search = make_search()
    trial = search.propose({"ppo.lr": 1e-3, "pooling": "max"})
    path = search.sweep.run_path(trial)
    _open_or_create(path, trial.config, "train").close()
    # More steps are the same run.
    _open_or_create(path, trial.config | {"total_steps": 5}, "train").close()
    changed = search.plan.make(trial.name, {"ppo.lr": 2e-3, "pooling": "max"})
    with pytest.raises(InputError, match=r"0000: ppo\.lr: expected 0\.002, got 0\.001"):
        _open_or_create(path, changed.config, "train")


def test_a_trial_that_ended_first_was_not_stopped_early(make_search, capsys):
    search = make_search()
    first, second = (
        search.propose({"ppo.lr": lr, "pooling": "max"}) for lr in (1e-3, 2e-3)
    )
    for trial, steps in ((first, 1000), (second, 500)):
        scored(search, trial, 1.0, steps)
        search.stop_early(trial.name)
    search.print_results({first.name: "finished", second.name: "stopped"})
    out = capsys.readouterr().out.splitlines()
    (ended,) = [line for line in out if first.name in line.split()]
    (stopped,) = [line for line in out if second.name in line.split()]
    assert "stopped early" not in ended
    assert "stopped early" in stopped


def test_an_unknown_metric_of_earlier_runs_is_refused_at_once(make_search):
    search = make_search()
    trial = search.propose({"ppo.lr": 1e-3, "pooling": "max"})
    scored(search, trial, 1.0)
    settings = SweepSettings(metric="retrun_mean")
    with pytest.raises(InputError, match="unknown sweep.metric 'retrun_mean'.*_mean'"):
        replace(search, settings=settings)


@pytest.mark.parametrize("by", ["address", "variable"])
def test_early_stopping_needs_a_disk_that_is_shared(make_search, monkeypatch, by):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    search = make_search()
    joined = SweepSettings(address="auto" if by == "address" else None)
    if by == "variable":
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    replace(search, settings=joined)
    search.plan.probes[0].config["storage"] = "s3://bucket/runs"
    with pytest.raises(InputError, match="sweep.asha: expected false .* got true"):
        replace(search, settings=joined)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    replace(search, settings=SweepSettings())


def test_a_worse_trial_is_stopped_early_and_its_end_written_down(make_search):
    from marl_pool.training.sweep.search import EarlyStopping

    search, stopped = make_search(), []
    past = search.propose({"ppo.lr": 1e-3, "pooling": "max"})
    scored(search, past, 1.0)
    asha = EarlyStopping(search, stopped.append)
    for score, share in ((2.0, 20), (0.5, 20), (3.0, 100)):
        trial = search.propose({"ppo.lr": 2e-3, "pooling": "ada"})
        ray_trial = SimpleNamespace(trial_id=trial.name, config={"trial": trial.name})
        asha.on_trial_add(None, ray_trial)
        result = {"score": score, "share": share}
        assert asha.on_trial_result(None, ray_trial, result) == "CONTINUE"
    # Past: 1 at 90 percent. At 10 percent 2 is the first, 0.5 worse.
    assert stopped == ["0002"]
    assert [proposal.stopped_early for proposal in search.sweep.proposals()] == [
        *(False, False, True, False)
    ]


def test_earlier_rows_are_compared_by_the_best_so_far(make_search, monkeypatch):
    """Each row once: there may be thousands."""
    from marl_pool.training.sweep import search as module

    search, read, judged = make_search(), [], []
    past = search.propose({"ppo.lr": 1e-3, "pooling": "max"})
    run = Run.create(search.sweep.run_path(past), past.config)
    for number, score in enumerate((1.0, 3.0, 2.0), 1):
        row = {"iteration": number, "env_steps": 10 * number, "return_mean": score}
        run.log(row)
    run.close()
    score_of = module.score_of
    monkeypatch.setattr(
        module, "score_of", lambda rows, name: read.extend(rows) or score_of(rows, name)
    )
    monkeypatch.setattr(
        module.EarlyStopping,
        "_judge",
        lambda self, name, result: judged.append(result["score"]),
    )
    module.EarlyStopping(search, [].append)
    assert judged == [1.0, 3.0, 3.0]
    assert len(read) == 3


def test_a_late_report_enters_no_early_comparison(make_search):
    """This includes a trial that went on from another session."""
    from marl_pool.training.sweep.search import EarlyStopping

    search, stopped = make_search(), []
    resumed = search.propose({"ppo.lr": 1e-3, "pooling": "max"})
    asha = EarlyStopping(search, stopped.append)
    reports = [(resumed, 0.8, 41), (resumed, 0.9, 42)]
    reports.append((search.propose({"ppo.lr": 2e-3, "pooling": "ada"}), 0.3, 12))
    for trial, score, share in reports:
        ray_trial = SimpleNamespace(trial_id="1", config={"trial": trial.name})
        asha.on_trial_add(None, ray_trial)
        asha.on_trial_result(None, ray_trial, {"score": score, "share": share})
    assert stopped == []


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
@pytest.mark.usefixtures("no_cluster")
def test_a_search_runs_is_resumed_and_tells_the_best_command(capsys):
    pytest.importorskip("ray")
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
    assert {row["trial"] for row in table} == {0, 1, 2}
    best = max(table, key=lambda row: row["return_mean"])
    words = shlex.split(out.rpartition("best: ")[2].splitlines()[0])
    values = proposals[int(best["trial"])].values
    assert words[:2] == ["marl-pool", "train"]
    assert {f"{key}={value}" for key, value in values.items()} < set(words)
    assert {*small} < set(words)
