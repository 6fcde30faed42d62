"""Policies from anywhere: functions of observations, measured like our policies."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import marl_pool
from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.callable_policy import CallablePolicy
from marl_pool.evaluation.measure import EvaluationResults
from marl_pool.observations.make import make_view
from marl_pool.policies import make_policy
from marl_pool.policies.base import Policy
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, UnfitTokensError

ENV: dict[str, Any] = {"name": "simple_centroid", "num_noise": 4, "max_steps": 12}
EPISODES = 6
Observation = dict[str, np.ndarray]


def centroid(**options: Any) -> BatchedEnv:
    return make_batched_env(num_envs=EPISODES, **{**ENV, **options})


def ada() -> Policy:
    group = centroid().groups["agent"]
    return make_policy(group.tokens, group.action_space, pooling="ada", seed=1)


def as_function(policy: Policy) -> Any:
    """Wrap a policy as a function, in the precision of an evaluation."""
    policy = policy.double()

    def act(observation: Observation) -> np.ndarray:
        tokens = Tokens(*(torch.as_tensor(part) for part in observation.values()))
        with torch.no_grad():
            return policy.scale(policy.act(tokens).action).numpy()

    return act


def noop(observation: Observation) -> np.ndarray:
    return np.zeros((len(observation["types"]), 5), np.float32)


def means(measured: EvaluationResults) -> dict[tuple[str, str, float], float]:
    return {(r.policy, r.label, r.severity): r.mean for r in measured.results}


def evaluate(policy: Any, **options: Any) -> EvaluationResults:
    arguments = {"env": ENV, "episodes": EPISODES, **options}
    return marl_pool.evaluate(policy, **arguments)


def test_a_function_scores_exactly_as_the_policy_behind_it() -> None:
    ours, function = means(evaluate(ada())), means(evaluate(as_function(ada())))
    exact = ("clean", "shuffle")  # under others ours is measured in float32
    assert {k: v for k, v in ours.items() if k[1] in exact} == {
        k: v for k, v in function.items() if k[1] in exact
    }
    assert ours == pytest.approx(function, rel=1e-6)


def test_a_function_sees_plain_arrays_of_many_agents() -> None:
    observations: list[Observation] = []

    def act(observation: Observation) -> np.ndarray:
        observations.append(observation)
        return noop(observation)

    evaluate(act, suite={"perturbations": []}, threads=1)
    spec = centroid().groups["agent"].tokens
    for name, space in spec.space().spaces.items():
        assert observations[0][name].dtype == space.dtype
        assert observations[0][name].shape == (EPISODES, *(space.shape or ()))


def test_actions_are_in_the_units_of_the_space() -> None:
    """The scripted policy's actions are; as a function it scores 1 by definition."""
    heuristic = make_heuristic(
        "simple_centroid", centroid().groups["agent"], role="agent"
    )

    def act(observation: Observation) -> np.ndarray:
        tokens = Tokens(*(torch.as_tensor(part) for part in observation.values()))
        return heuristic.scale(heuristic.act(tokens).action).numpy()

    clean = evaluate(act, suite={"perturbations": []}).results[0]
    assert clean.score == pytest.approx(1.0, abs=1e-5)


def test_a_discrete_env_takes_integers() -> None:
    measured = evaluate(
        lambda observation: np.zeros(len(observation["types"]), np.int64),
        env={**ENV, "continuous_actions": False},
        suite={"perturbations": []},
    )
    assert np.isfinite(measured.returns).all()


@pytest.mark.parametrize("kind", [np.int64, float])
def test_numbers_may_be_numpys_and_whole_floats(tmp_path, kind) -> None:
    numbers = {"episodes": EPISODES, "seed": 3, "worst_of": 2}
    transfer = [{"label": "empty", "env": {"num_noise": 0}}]
    options: dict[str, Any] = {"suite": {"transfer": transfer}, "threads": 1}
    for name, convert in (("plain", int), ("other", kind)):
        options |= {key: convert(value) for key, value in numbers.items()}
        evaluate(noop, out=tmp_path / name, **options)
    plain, other = (
        json.loads((tmp_path / name / "results.json").read_text())
        for name in ("plain", "other")
    )
    assert {key: other[key] for key in numbers} == numbers
    assert other["results"] == plain["results"]


def refuse(count: int) -> np.ndarray:
    raise ValueError("expected 8 tokens")


@pytest.mark.parametrize(
    ("at_others", "reason"),
    [
        (refuse, "expected 8 tokens"),
        (
            lambda count: np.zeros((count, 4)),
            "policy: expected actions of shape (6, 5)",
        ),
        (lambda count: np.full((count, 5), np.nan), "policy: expected finite actions"),
    ],
)
def test_a_function_of_a_fixed_number_of_tokens_makes_a_gap(at_others, reason) -> None:
    def act(observation: Observation) -> np.ndarray:
        if observation["types"].shape[1] != 8:
            return at_others(len(observation["types"]))
        return noop(observation)

    inject = {"name": "inject", "token_type": "noise", "severities": [1.0]}
    rewire = {"name": "rewire", "severities": [1.0]}
    clean, injected, rewired, *_ = evaluate(
        act, suite={"perturbations": [inject, rewire]}
    ).results
    assert f"takes 8 tokens and fails on 40: {reason}" in injected.missing
    assert not clean.missing + rewired.missing


def test_a_function_of_a_fixed_number_of_features_makes_a_gap() -> None:
    def act(observation: Observation) -> np.ndarray:
        return noop(observation) if observation["features"].shape[2] == 4 else 1 / 0

    tokens, group = centroid().observe()["agent"], centroid().groups["agent"]
    wide = tokens._replace(features=tokens.features.repeat(1, 1, 1, 2))
    with pytest.raises(
        UnfitTokensError,
        match="takes 8 tokens of 4 features and fails on 8 of 8 features",
    ):
        CallablePolicy(act, group).act(wide)


def test_a_function_of_tokens_plays_no_other_space() -> None:
    tokens = centroid().groups["agent"]
    elements = replace(tokens, view=make_view(tokens.tokens.space()))
    policies = CallablePolicy(noop, tokens), CallablePolicy(noop, elements)
    reasons = [policy.mismatch(g) for policy in policies for g in (tokens, elements)]
    start = "expected observations as"
    assert reasons == [
        "",
        f"{start} elements of a space, got tokens",
        f"{start} tokens, got elements of a space",
        "",
    ]


DISCRETE = {"label": "discrete", "env": {"continuous_actions": False}}


def test_a_function_for_other_actions_makes_a_gap() -> None:
    clean, other, *_ = evaluate(noop, suite={"transfer": [DISCRETE]}).results
    assert not clean.missing
    assert "expected actions = a choice of 5, got numbers in" in other.missing


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"perturbations": [{"name": "jitter", "severities": [0.5]}]}, "'jitter' at"),
        ({"transfer": [{"label": "dark", "env": {"noise_offset": 2.0}}]}, "'dark'"),
    ],
)
def test_an_error_names_the_case(options, row) -> None:
    """The first case, clean, is played without it."""
    calls: list[int] = []

    def act(observation: Observation) -> np.ndarray:
        calls.append(len(calls))
        return np.zeros((EPISODES, 5 if len(calls) <= ENV["max_steps"] else 4))

    with pytest.raises(InputError, match=f"^{row}.*: policy: expected actions of"):
        evaluate(act, suite=options, threads=1)


def test_an_error_of_the_function_itself_comes_through() -> None:
    def act(observation: Observation) -> np.ndarray:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(act)


def test_several_groups_take_one_policy_each_or_one_for_all() -> None:
    tag = {"name": "simple_tag", "max_steps": 5, "continuous_actions": True}
    groups = make_batched_env(num_envs=1, **tag).groups
    plain = {"perturbations": []}
    shared = evaluate(noop, env=tag, suite=plain)
    separate = evaluate(dict.fromkeys(groups, noop), env=tag, suite=plain)
    assert means(shared) == means(separate)
    with pytest.raises(InputError, match="one for each group"):
        evaluate({"prey": noop}, env=tag)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    evaluate(noop, out="~/still", suite={"perturbations": []})
    assert (tmp_path / "home" / "still" / "results.json").is_file()
    assert [item.name for item in tmp_path.iterdir()] == ["home"]


def test_the_files_and_the_table_are_those_of_a_run(tmp_path, capsys):
    measured = evaluate(noop, out=tmp_path / "new" / "still", title="standing still")
    assert "standing still" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "new" / "still").iterdir()}
    assert names == {"results.csv", "results.json", "returns.npz", "robustness.png"}
    content = json.loads((tmp_path / "new" / "still" / "results.json").read_text())
    assert len(content["results"]) == len(measured.results)
    assert (content["episodes"], content["run"]) == (EPISODES, "standing still")


def test_a_custom_suite_is_measured_without_output(tmp_path, capsys):
    folder = tmp_path / "suite"
    folder.mkdir()
    entry = "perturbations:\n  - {name: occlude, severities: [0.25, 0.5]}\n"
    (folder / "mine.yaml").write_text(entry)
    measured = evaluate(noop, suite="mine", config_dir=tmp_path)
    occluded = [r.severity for r in measured.results if r.label == "occlude"]
    assert occluded == [0.25, 0.5]
    assert capsys.readouterr().out == ""  # without a title


def always(value: complex) -> Any:
    """Return a function whose actions all have the same value."""
    return lambda observation: np.full((len(observation["types"]), 5), value)


def suite(name: str, severities: Any) -> dict[str, Any]:
    return {"suite": {"perturbations": [{"name": name, "severities": severities}]}}


TWICE = [
    {"name": "occlude", "severities": [0.5]},
    {"name": "occlude", "every": None, "severities": [0.5, 1.0]},
]
NAMESAKES = [{"label": "x", "env": {"num_noise": n}} for n in (0, 1)]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (noop, {"env": "simple_centriod"}, "simple_centroid"),
        (noop, {"env": {**ENV, "num_nois": 1}}, "num_noise"),
        (noop, {"suite": "quik"}, "quick"),
        (noop, suite("ocklude", [1.0]), "occlude"),
        (noop, suite("occlude", [1.5]), "severit"),
        (lambda observation: np.zeros((3, 2)), {}, r"shape \(6, 5\), .*got \(3, 2\)"),
        ("ada", {}, "expected a function of observations, a model .*, got str"),
        (dict, {}, "policy: expected a model, got the class dict itself"),
        (noop, {"episodes": 0}, "episodes"),
        (noop, {"env": None}, "env: expected a name, an id .* got NoneType"),
        (noop, {"env": {}}, "env: expected one of"),
        (noop, {"suite": None}, "suite: expected a name or a mapping, got NoneType"),
        (noop, {"suite": {"episodes": 3}}, "unknown key of a suite 'episodes'"),
        (noop, suite("shuffle", np.linspace(0, 1, 3)), "expected plain numbers, text,"),
        (noop, {"out": 3}, "out: expected text, Path or null, got 3"),
        (noop, {"title": 3}, "title: expected text or null, got 3"),
        (noop, {"config_dir": 3}, "config_dir: expected text, Path or null, got 3"),
        (noop, {"device": "cuda:77"}, "device: expected one that is available"),
        (lambda observation: [[1.0], [1.0, 2.0]], {}, "expected an array of actions"),
        (always(np.nan), {}, "expected finite actions, got NaN or infinity"),
        (always(1j), {}, "expected actions of a real dtype, got complex128"),
        (
            lambda observation: np.zeros(len(observation["types"])),
            {"env": {**ENV, "continuous_actions": False}},
            "integer dtype",
        ),
        (ada(), {"env": "cartpole"}, "does not fit the env cartpole"),
        (
            noop,
            {"suite": {"perturbations": TWICE}},
            "'occlude' at severity 0.5: expected each row once, got it twice",
        ),
        (
            noop,
            {"suite": {"transfer": NAMESAKES}},
            "'x': expected each row once, got it twice",
        ),
    ],
)
def test_bad_input_is_refused_with_a_message(policy, options, message):
    with pytest.raises(InputError, match=message):
        evaluate(policy, **options)


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_played(tmp_path):
    (tmp_path / "file").write_text("")

    def act(observation: Observation) -> np.ndarray:
        raise AssertionError("something was played")

    with pytest.raises(InputError, match="out: .* cannot be made"):
        evaluate(act, out=tmp_path / "file")


@pytest.mark.parametrize("existed", [False, True])
def test_a_failed_evaluation_leaves_no_new_folder(tmp_path, existed) -> None:
    out = tmp_path / "out"
    if existed:
        out.mkdir()
    with pytest.raises(InputError, match="expected actions of shape"):
        evaluate(lambda observation: np.zeros((3, 2)), out=out)
    assert out.exists() == existed


def test_a_function_is_asked_by_one_thread_at_a_time() -> None:
    """A function that writes into its own memory gives the same results as alone."""
    memory = np.zeros((EPISODES, 5), np.float32)

    def act(observation: Observation) -> np.ndarray:
        memory[:] = 0
        for step in range(200):
            memory[:, 1:3] += observation["features"][:, 1, :2] * (step % 2)
        return memory[: len(observation["types"])]

    serial, parallel = (means(evaluate(act, threads=threads)) for threads in (1, 2))
    assert serial == parallel


def test_actions_are_copied_before_another_thread_asks() -> None:
    env = centroid()
    tokens, calls, workers = env.observe()["agent"], [], []

    class Late:
        """Actions of another library that become numbers only when they are read."""

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            if not workers:
                workers.append(threading.Thread(target=policy.act, args=(tokens,)))
                workers[0].start()
                workers[0].join(0.2)
                assert len(calls) == 1
            return np.zeros((EPISODES, 5), np.float32)

    def act(observation: Observation) -> Any:
        calls.append(observation)
        return Late()

    policy = CallablePolicy(act, env.groups["agent"])
    policy.act(tokens)
    workers[0].join()
    assert len(calls) == 2


def test_a_transfer_env_has_a_score_and_no_drop() -> None:
    transfer = [{"label": "empty", "env": {"num_noise": 0}}]
    measured = evaluate(noop, suite={"transfer": transfer})
    (row,) = [
        r for r in measured.results if (r.policy, r.label) == ("trained", "empty")
    ]
    assert np.isnan(row.drop)
    assert np.isfinite(row.score)


def test_a_time_limit_needs_the_main_thread() -> None:
    """Signals reach only the main thread; elsewhere a limit would end the process."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(marl_pool.evaluate, ada(), ENV, env_timeout=3.0)
        with pytest.raises(InputError, match=r"env_timeout: expected None .* got 3\.0"):
            waiting.result()


def test_a_function_may_edit_what_it_observes():
    def act(observation: Observation, edits: bool) -> np.ndarray:
        seen = observation if edits else {k: v.copy() for k, v in observation.items()}
        seen["padding"] |= seen["types"] == 2
        seen["types"][seen["padding"]] = 0
        return as_function(ada())({**observation, **seen})

    plays = [
        means(evaluate(lambda observation, edits=edits: act(observation, edits)))
        for edits in (False, True)
    ]
    assert plays[0] == plays[1]


def test_a_function_may_select_a_token_that_a_perturbation_added():
    def last_allowed(observation: Observation) -> np.ndarray:
        mask = observation["action_mask"]
        return mask.shape[1] - 1 - mask[:, ::-1].argmax(1)

    suite = {"perturbations": [{"name": "duplicate", "severities": [1.0]}]}
    env = {"name": "lbforaging", "choices": "food", "max_steps": 6}
    results = marl_pool.evaluate(last_allowed, env, suite=suite, episodes=4, threads=1)
    (row,) = (row for row in results.results if row.perturbation == "duplicate")
    assert not row.missing
