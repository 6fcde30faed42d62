"""Evaluation: exact invariance, paired environments, gaps, files that stay."""

import csv
import io
import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.evaluated import evaluate, levels
from helpers.farm import FoxAndHens
from helpers.tables import yaml_cases
from marl_pool import evaluate as evaluate_model
from marl_pool.compiled import compile
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.description import describe_env
from marl_pool.evaluation import plots
from marl_pool.evaluation.cases import label, perturb, play
from marl_pool.evaluation.computing import computing
from marl_pool.evaluation.load import target_from_run
from marl_pool.evaluation.measure import measure
from marl_pool.evaluation.results import (
    NAMES,
    Files,
    Result,
    print_table,
    read_returns,
    write_csv,
    write_json,
)
from marl_pool.evaluation.settings import EvaluateSettings, TransferSettings
from marl_pool.evaluation.statistics.intervals import (
    bootstrap,
    interquartile_mean,
    paired_drop,
)
from marl_pool.evaluation.target import EvaluationTarget, to_float64
from marl_pool.perturbations import make_perturbation
from marl_pool.policies import make_policy
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.storage import load_policy, save_policies
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import EVALUATION_ENVS

ENV: dict[str, Any] = {"name": "simple_centroid", "num_noise": 4, "max_steps": 12}
EPISODES = 6
INVARIANT = ["ada", "avg", "cls", "max"]


def centroid(count: int = EPISODES, **options: Any) -> BatchedEnv:
    first = options.pop("first_env", EVALUATION_ENVS)
    return make_batched_env(num_envs=count, first_env=first, **{**ENV, **options})


def fox_and_hens() -> BatchedEnv:
    return FoxAndHens(EPISODES, first_env=EVALUATION_ENVS)


def policies(env: BatchedEnv, pooling: str = "ada") -> dict[str, Policy]:
    """Untrained policies; larger weights would exceed the environment's bounds."""
    options = {"init_std": 0.2, "seed": 1}
    return {
        name: make_policy(group.tokens, group.action_space, pooling=pooling, **options)
        for name, group in env.groups.items()
    }


def float64_policies(env: BatchedEnv, pooling: str = "ada") -> dict[str, Policy]:
    return to_float64(policies(env, pooling))


def rows_of(
    *entries: dict[str, Any], make: Any = centroid, pooling: str = "ada"
) -> list[Result]:
    """Results of untrained policies, clean and under perturbations."""
    players = float64_policies(make(), pooling)
    return list(measure(players, make, levels(*entries)).results)


# Episodes


def shuffled_pair(
    pooling: str, double: bool = True, every: int | None = None, explore: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Clean and shuffled returns of episodes in which rounding errors accumulate."""
    envs = [centroid(16, num_noise=28, max_steps=32) for _ in range(2)]
    players = (float64_policies if double else policies)(envs[0], pooling)
    kinds = (None, make_perturbation("shuffle", every=every))
    clean, shuffled = (
        play(players, env, kind, explore=explore).returns["agent"]
        for env, kind in zip(envs, kinds, strict=True)
    )
    return clean, shuffled


@pytest.mark.parametrize(("explore", "every"), [(False, None), (True, 1)])
@pytest.mark.parametrize("pooling", INVARIANT)
def test_a_shuffle_changes_nothing_for_an_invariant_head(pooling, every, explore):
    clean, shuffled = shuffled_pair(pooling, every=every, explore=explore)
    assert clean.std() > 0
    np.testing.assert_array_equal(clean, shuffled)


def test_a_shuffle_changes_float32_returns_and_those_of_a_head_with_positions():
    """Otherwise the test above would test neither `to_float64` nor the shuffle."""
    clean, shuffled = shuffled_pair("ada", double=False, every=1)
    assert (clean != shuffled).any()
    clean, shuffled = shuffled_pair("flatten")
    assert np.abs(clean - shuffled).max() > 1e-3


def test_returns_are_those_of_a_loop_by_hand() -> None:
    env = centroid()
    players = {name: compile(policy) for name, policy in policies(env).items()}
    env.reset()
    total = torch.zeros(EPISODES, 1, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(env.max_steps):
            action = players["agent"].act(env.observe()["agent"]).action
            step = env.step({"agent": players["agent"].scale(action)})
            total += step.rewards["agent"]
    returns = play(players, centroid()).returns["agent"]
    np.testing.assert_array_equal(returns, total[:, 0].numpy())


def test_sampled_actions_play_other_episodes() -> None:
    players = policies(centroid())
    sampled, likely = (
        play(players, centroid(), explore=explore).returns["agent"]
        for explore in (True, False)
    )
    assert (sampled != likely).all()


def test_a_copy_in_double_leaves_the_policy_alone() -> None:
    players = policies(centroid())
    players["agent"].train()
    copied = to_float64(players)
    assert {p.dtype for p in players["agent"].parameters()} == {torch.float32}
    assert {p.dtype for p in copied["agent"].parameters()} == {torch.float64}
    assert players["agent"].training
    assert not copied["agent"].training
    # Groups that share a policy share its copy.
    copied = to_float64(dict.fromkeys(("one", "two"), players["agent"]))
    assert copied["one"] is copied["two"]


# The cases


def test_all_conditions_in_order_with_paired_drops() -> None:
    env = centroid()
    entries = levels(
        {"name": "jitter", "severities": [0.0, 0.5]},
        {"name": "occlude", "mode": "zero", "severities": [1.0]},
    )
    random = {"agent": RandomPolicy(env.groups["agent"].action_space)}
    options = {"baselines": {"random": random}, "stochastic": True}
    results = measure(float64_policies(env), centroid, entries, **options).results
    conditions = [("clean", 0.0), ("jitter", 0.0), ("jitter", 0.5), ("occlude", 1.0)]
    assert [(r.policy_label, r.perturbation, r.severity) for r in results] == [
        *(("trained", *condition) for condition in conditions),
        *(("trained, sampled", *condition) for condition in conditions),
        ("random", "clean", 0.0),
    ]
    assert results[3].label == "occlude mode=zero"
    assert results[3].options == {"mode": "zero"}
    for clean, zero, strong in (results[:3], results[4:7]):
        assert (zero.drop, zero.drop_low, zero.drop_high) == (0.0, 0.0, 0.0)
        # The drop is from clean episodes in float32, too; `clean` is in float64.
        assert strong.drop == pytest.approx(clean.mean - strong.mean, abs=1e-6)
        assert strong.drop_low < strong.drop < strong.drop_high
        assert np.isnan(clean.drop)
    assert results[0].mean != results[4].mean
    assert all(r.episodes == EPISODES and not r.missing for r in results)


def test_each_row_summarizes_its_returns() -> None:
    players = float64_policies(centroid())
    first, repeated, reseeded = (measure(players, centroid, seed=s) for s in (5, 5, 6))
    (row,), (returns,) = first.results, first.returns
    assert row == repeated.results[0]
    assert (row.mean, row.mean_low, row.mean_high) == bootstrap(returns, seed=5)
    iqm = bootstrap(returns, interquartile_mean, seed=5)
    assert (row.iqm, row.iqm_low, row.iqm_high) == iqm
    squares = ((returns - returns.mean()) ** 2).sum()
    assert row.std == pytest.approx(np.sqrt(squares / (EPISODES - 1)))
    assert row.mean_low != reseeded.results[0].mean_low
    assert row.iqm_low != reseeded.results[0].iqm_low


def test_one_episode_has_no_standard_deviation() -> None:
    players = float64_policies(centroid())
    (row,) = measure(players, lambda: centroid(1)).results
    assert row.episodes == 1
    assert np.isfinite([row.mean, row.iqm]).all()
    assert np.isnan([row.std, row.mean_low, row.iqm_high]).all()


def test_only_what_must_be_exact_is_measured_in_float64(monkeypatch):
    calls: list[tuple[Any, torch.dtype]] = []

    def note(policies: Any, env: BatchedEnv, change: Any = None, **options: Any) -> Any:
        (weights,) = {p.dtype for p in policies["agent"].parameters()}
        calls.append((None if change is None else type(change).__name__, weights))
        return play(policies, env, change, **options)

    monkeypatch.setattr("marl_pool.evaluation.measure.play", note)
    players = float64_policies(centroid())
    shuffle = {"name": "shuffle", "severities": [1.0]}
    rewire = {"name": "rewire", "severities": [0.0, 1.0]}
    measured = measure(players, centroid, levels(shuffle, rewire))
    assert calls == [
        (None, torch.float64),
        ("Shuffle", torch.float64),
        ("Rewire", torch.float64),
        ("Rewire", torch.float32),
        (None, torch.float32),
    ]
    assert len(measured.results) == len(measured.returns) == 4
    # The drop is from clean episodes in the same precision.
    single = {name: policy.float() for name, policy in players.items()}
    kinds = (None, make_perturbation("rewire", severity=1.0))
    clean, crossed = (play(single, centroid(), kind).returns["agent"] for kind in kinds)
    np.testing.assert_array_equal(measured.returns[3], crossed)
    assert measured.results[3].drop == (clean - crossed).mean()


def test_results_do_not_depend_on_other_conditions() -> None:
    players = float64_policies(centroid())
    noise = {"name": "jitter", "severities": [0.5]}
    rewire = {"name": "rewire", "severities": [1.0]}
    single = measure(players, centroid, levels(noise)).results
    several = measure(players, centroid, levels(rewire, noise), stochastic=True).results
    assert single[0].mean == several[0].mean
    assert single[1] == several[2]


def test_more_tokens_than_a_head_takes_are_a_gap_not_a_crash() -> None:
    inject = {"name": "inject", "token_type": "noise"}
    clean, none, injected, shuffled = rows_of(
        {**inject, "severities": [0.0, 1.0]},
        {"name": "shuffle", "severities": [1.0]},
        pooling="flatten",
    )
    assert "at most 8 tokens, got 40" in injected.missing
    assert np.isnan([injected.mean, injected.drop, injected.std]).all()
    assert injected.episodes == 0
    assert none.drop == 0.0
    assert shuffled.drop != 0.0
    assert {clean.missing, none.missing, shuffled.missing} == {""}
    # A wrong option is no gap.
    wrong = {**inject, "position_features": [9], "severities": [1.0]}
    with pytest.raises(InputError, match="position_features: expected numbers below 4"):
        rows_of(wrong)
    with pytest.raises(InputError, match="one for each group"):
        measure({}, centroid)


def test_a_type_that_the_env_lacks_is_a_gap_with_its_reason() -> None:
    kinds = ("noise", "hen")
    inject = {"name": "inject", "severities": [0.5]}
    results = rows_of(*({**inject, "token_type": k} for k in kinds), make=fox_and_hens)
    reasons = {(r.label, r.severity): r.missing for r in results if r.group == "fox"}
    assert "'noise': choose from fox, hen" in reasons["inject token_type=noise", 0.5]
    assert reasons["clean", 0.0] == reasons["inject token_type=hen", 0.5] == ""


@yaml_cases("entry, message")
def test_a_wrong_perturbation_is_refused_before_anything_is_played(entry, message):
    def on_progress(done: int, total: int) -> None:
        raise AssertionError("something was played")

    players, rows = float64_policies(centroid()), levels({"severities": [1.0], **entry})
    with pytest.raises(InputError, match=message):
        measure(players, centroid, rows, on_progress=on_progress)


def test_each_of_several_groups_has_its_rows() -> None:
    results = rows_of({"name": "rewire", "severities": [1.0]}, make=fox_and_hens)
    kinds = itertools.product(("clean", "rewire"), ("fox", "hen"))
    assert [(r.perturbation, r.group) for r in results] == list(kinds)
    # A group's return is the mean of its agents' sums of rewards.
    env = fox_and_hens()
    returns = play(float64_policies(env), env).returns
    assert returns["hen"].shape == (EPISODES,)
    assert results[1].mean == pytest.approx(returns["hen"].mean())
    # The groups agree on some options of a perturbation.
    inject = perturb({"name": "inject", "token_type": "hen"}, env)
    assert inject.type_index == 2
    assert perturb({"name": "occlude"}, env).protects


def test_labels_name_options_that_are_not_the_default() -> None:
    assert label("clean", {}) == "clean"
    assert label("shuffle", {"every": None}) == "shuffle"
    assert label("shuffle", {"every": 8}) == "shuffle every=8"
    options = {"mode": "drop", "protect_self": False, "every": None}
    assert label("occlude", options) == "occlude protect_self=False"
    assert label("inject", {"token_type": "noise"}) == "inject token_type=noise"


# Files


RESULTS = [
    Result("agent", "trained", False, "clean", "clean", 0.0, {}, 2, 1.5, 1.0, 2.0, 0.5),
    Result(
        "agent",
        "trained",
        stochastic=True,
        perturbation="occlude",
        label="occlude",
        severity=0.5,
        options={"mode": "drop"},
        missing="why",
    ),
]


def test_files_say_what_is_missing(tmp_path: Path) -> None:
    record = {"episodes": 2, "seed": 3, "env": {"name": "x"}}
    write_csv(tmp_path / "r.csv", RESULTS, record)
    with (tmp_path / "r.csv").open(newline="") as file:
        measured, lacking = csv.DictReader(file)
    assert (measured["mean"], measured["std"], measured["iqm"]) == ("1.5", "0.5", "")
    assert (lacking["mean"], lacking["missing"], lacking["seed"]) == ("", "why", "3")
    assert (measured["episodes"], lacking["episodes"]) == ("2", "0")
    assert json.loads(lacking["options"]) == {"mode": "drop"}
    assert json.loads(lacking["env"]) == {"name": "x"}

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    write_json(tmp_path / "r.json", RESULTS, {"seed": 3})
    text = (tmp_path / "r.json").read_text()
    content = json.loads(text, parse_constant=refuse)
    assert content["seed"] == 3
    measured, lacking = content["results"]
    assert (measured["mean"], measured["iqm"]) == (1.5, None)
    assert (lacking["mean"], lacking["missing"]) == (None, "why")


def test_new_files_never_have_the_name_of_one_that_exists(tmp_path: Path) -> None:
    assert [Files(tmp_path).path(name).name for name in NAMES] == list(NAMES)
    (tmp_path / "robustness.png").touch()
    (tmp_path / "codes-2.png").touch()
    files = Files(tmp_path)
    paths = [files.path(name).name for name in NAMES]
    assert paths[:3] == ["results-2.csv", "results-2.json", "returns-2.npz"]
    assert files.unused("codes.png").name == "codes-3.png"
    assert files.unused("latents.png").name == "latents-2.png"
    assert not any((tmp_path / name).exists() for name in paths)
    # The newest has the highest number, though the first was removed.
    (tmp_path / "results-2.json").touch()
    (tmp_path / "robustness.png").unlink()
    assert Files(tmp_path).path("results.json").name == "results-3.json"


def test_table_shows_numbers_and_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(RESULTS, "a title")
    output = capsys.readouterr().out
    for text in ("a title", "1.500", "1.000 to 2.000", "trained, sampled", "why"):
        assert text in output


def test_a_table_in_80_columns_has_return_deviation_and_drop(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for key, value in {"TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("sys.stdout", stream := Terminal())
    row = {"mean_low": -2.25, "mean_high": -1.75, "std": 0.5, "iqm": -1.875}
    row |= {"drop": 0.125, "drop_low": 0.0625, "drop_high": 0.25, "mean": -2.0}
    perturbed = {"perturbation": "occlude", "label": "occlude mode=zero"}
    result = Result("agent", "trained", False, severity=0.5, **perturbed, **row)
    print_table([result], "title")
    output = stream.getvalue()
    for number in ("-2.000", "0.500", "0.125"):
        assert number in output
    assert "-1.875" not in output
    assert "a wider terminal shows" in output


# Runs


SETTINGS: dict[str, Any] = {
    **asdict(EvaluateSettings()),
    "env": None,
    "episodes": 4,
    "perturbations": [
        {"name": "shuffle", "every": None, "severities": [1.0]},
        {"name": "inject", "token_type": "noise", "severities": [0.5, 1.0]},
    ],
    "threads": 1,
}


def make_run(folder: Path, pooling: str = "ada") -> Run:
    run = Run.create(folder / "run", {"env": ENV, "seed": 5})
    players = policies(centroid(), pooling)
    save_policies({"one": players["agent"]}, {"agent": "one"}, run.policy_dir)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_run_is_evaluated(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.policy_dir / "best.json").write_text('{"iteration": 7, "score": -1}')
    paths = evaluate(run, {**SETTINGS, "episodes": 16, "seed": 3})
    table, document, returns, picture = paths
    assert {path.parent for path in paths} == {run.path / "evaluation"}
    content = read(document)
    assert content["env"] == ENV
    assert (content["checkpoint"], content["iteration"]) == ("best", 7)
    assert content["seed"] == 3
    assert content["package_version"] == run.version
    rows = {(row["policy"], row["perturbation"]): row for row in content["results"]}
    assert rows["trained", "shuffle"]["drop"] == 0.0
    assert rows["trained", "shuffle"]["drop_high"] == 0.0
    assert rows["trained", "inject"]["drop"] != 0.0
    floor, ceiling = (rows[name, "clean"]["mean"] for name in ("random", "heuristic"))
    assert floor < ceiling
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    means = [row["mean"] for row in content["results"]]
    assert [float(line["mean"]) for line in lines] == means
    assert {line["iteration"] for line in lines} == {"7"}
    # Rows and returns are in one order; the seed reaches the intervals.
    clean, *_ = episode_returns = read_returns(returns)
    for row, values in zip(content["results"], episode_returns, strict=True):
        intervals = {"mean": bootstrap(values, seed=3)}
        if row["perturbation"] == "inject":
            intervals["drop"] = paired_drop(clean, values, seed=3)
        for name, interval in intervals.items():
            columns = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
            # Drops are from clean episodes in float32, which no row shows.
            assert columns == pytest.approx(list(interval), abs=1e-7)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "heuristic" in capsys.readouterr().out


def test_a_run_with_gaps_is_evaluated_and_drawn(tmp_path, capsys):
    paths = evaluate(make_run(tmp_path, "flatten"), SETTINGS)
    assert all(path.is_file() for path in paths)
    assert "not measured: inject token_type=noise" in capsys.readouterr().out


@yaml_cases("change, reason")
def test_a_row_that_does_not_fit_the_task_has_a_reason(change, reason) -> None:
    env = {"name": "simple_push", "max_steps": 9}
    policies = {
        name: RandomPolicy(group.action_space)
        for name, group in describe_env(env).groups.items()
    }
    target = EvaluationTarget(policies, env, "test", env)
    row = target.transfer_env(TransferSettings("row", change), 2)
    assert (row.missing or "").startswith(reason)
    assert bool(row.missing) is bool(reason)
    assert bool(row.baselines) is not bool(reason)


def tag_with_fixed_prey() -> dict[str, Policy]:
    """Random predators, and prey that samples otherwise than it acts by its mode."""
    groups = describe_env(TAG).groups
    predator, prey = groups["predator"], groups["prey"]
    fixed = make_policy(prey.tokens, prey.action_space, pooling="avg", seed=1)
    return {"predator": RandomPolicy(predator.action_space), "prey": fixed}


TAG = {"name": "simple_tag", "prey": "learned", "max_steps": 20}


def test_sampled_rows_are_scored_against_opponents_that_sample_too() -> None:
    policies, fixed = tag_with_fixed_prey(), frozenset({"prey"})
    target = EvaluationTarget(policies, TAG, "test", TAG, fixed=fixed)
    results = measure(
        target.policies,
        lambda: target.make_env(64),
        baselines=target.baselines(),
        fixed=fixed,
        stochastic=True,
    ).results
    rows = {
        (row.policy, row.stochastic): row for row in results if row.group == "predator"
    }
    assert rows["trained", False].mean != rows["trained", True].mean
    for stochastic in (False, True):
        trained, random = rows["trained", stochastic], rows["random", stochastic]
        assert (trained.mean, trained.score) == (random.mean, 0.0)


def test_a_transfer_env_without_one_of_the_groups_is_a_gap() -> None:
    policies = tag_with_fixed_prey()
    target = EvaluationTarget(policies, TAG, "test", TAG)
    transfer = TransferSettings("scripted", {"prey": "random"})
    row = target.transfer_env(transfer, 2)
    assert row.missing == "expected a group 'prey', got predator"


def test_a_transfer_row_cannot_be_called_clean() -> None:
    env = {**ENV, "num_noise": 2}
    target = EvaluationTarget(float64_policies(centroid()), env, "test", env)
    transfer = target.transfer_env(TransferSettings("clean", {"num_noise": 3}), 2)
    with pytest.raises(InputError, match="transfer: expected a label other than"):
        measure(target.policies, lambda: target.make_env(2), transfers=[transfer])


def test_a_record_has_the_chosen_kernels_and_only_true_changes() -> None:
    trained, env = ENV, {**ENV, "num_noise": 3, "reward_power": 0.5, "arrivals": []}
    target = EvaluationTarget({}, env, "test", trained)
    record = target.record(2, "torch")
    assert record["kernels"] == "torch"
    # An option that the configuration of training lacks had its default there.
    assert record["changed"] == {"num_noise": 3}


def test_a_wrong_arrival_rule_ends_the_evaluation() -> None:
    env = {"name": "simple_push", "max_steps": 9}
    target = EvaluationTarget({}, env, "test", env)
    with pytest.raises(InputError, match="step before the episode's end"):
        target.transfer_env(TransferSettings("row", {"arrivals": [{"step": 9}]}), 2)


def test_an_earlier_evaluation_stays_and_the_seed_chooses_the_envs(run: Run) -> None:
    settings = {**SETTINGS, "perturbations": []}
    first = evaluate(run, settings)
    before = [path.read_bytes() for path in first]
    second, third = (evaluate(run, {**settings, "seed": seed}) for seed in (0, 1))
    assert [path.read_bytes() for path in first] == before
    means = [read(paths[1])["results"][0]["mean"] for paths in (first, second, third)]
    assert means[0] == means[1] != means[2]
    names = ["results-2.csv", "results-2.json", "returns-2.npz", "robustness-2.png"]
    assert [path.name for path in second] == names


def test_evaluation_has_fixed_episodes_in_separate_envs(run: Run) -> None:
    subject = target_from_run(run, EvaluateSettings())
    env = subject.make_env(3, first=2)
    assert env.env_ids.tolist() == [EVALUATION_ENVS + i for i in (2, 3, 4)]
    small, large = (
        play(subject.policies, subject.make_env(count)).returns["agent"]
        for count in (2, 5)
    )
    np.testing.assert_array_equal(small, large[:2])


@yaml_cases("change, message")
def test_bad_settings_write_nothing(run, change, message):
    with pytest.raises(InputError, match=message):
        evaluate(run, {**SETTINGS, **change})
    assert not (run.path / "evaluation").exists()
    empty = Run.create(run.path.parent / "empty", {"env": ENV, "seed": 5})
    with pytest.raises(InputError, match="has no policy 'best'"):
        evaluate(empty, SETTINGS)


def test_an_unwritable_folder_is_refused_at_once(run, monkeypatch):
    (run.path / "evaluation").write_text("in the way")
    monkeypatch.setattr("marl_pool.evaluation.measure.play", None)
    with pytest.raises(InputError, match="evaluation cannot be written to"):
        evaluate(run, SETTINGS)


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with computing(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with computing(None):
        assert torch.get_num_threads() == before


def test_sampled_baselines_have_lines_of_their_own(tmp_path, monkeypatch):
    draw, names = plots.draw_panels, []

    def drawn(*args, lines, **options):
        names.extend(lines)
        return draw(*args, lines=lines, **options)

    monkeypatch.setattr(plots, "draw_panels", drawn)
    policy = load_policy("pretrained=simple_centroid")
    shuffle = {"name": "shuffle", "severities": [1.0]}
    suite = {"perturbations": [shuffle]}
    rows = evaluate_model(policy, "simple_centroid", suite=suite, episodes=2).results
    sampled = [replace(row, stochastic=True) for row in rows if row.policy == "random"]
    plots.plot_robustness([*rows, *sampled], tmp_path / "robustness.png", "title")
    assert names == ["random, clean", "heuristic, clean", "random, sampled, clean"]
