"""The tests and analyses of the AttentionNeuron paper, with tiny untrained agents."""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import Tensor

from helpers.evaluated import evaluate
from helpers.tables import yaml_cases
from marl_pool import pretrained
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.patches import OUTLINE, PatchGrid
from marl_pool.evaluation.analyses import analyse_run
from marl_pool.evaluation.cases import label, play
from marl_pool.evaluation.evaluate import EvaluatedRun
from marl_pool.evaluation.load import target_from_run
from marl_pool.evaluation.measure import EvaluationResults
from marl_pool.evaluation.results import CLEAN, Files, Result
from marl_pool.evaluation.settings import EvaluateSettings, TargetSettings
from marl_pool.evaluation.target import EvaluationTarget, misfit, rescaled, to_float64
from marl_pool.evaluation.video.render import outline_top
from marl_pool.perturbations import make_perturbation
from marl_pool.policies import make_policy
from marl_pool.policies.agent import Population, to_vector
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.policies.sensory import FeedForward, Sensory
from marl_pool.policies.storage import save_policies, save_policy
from marl_pool.pooling import make_pooling
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError
from marl_pool_studies.attention_neuron import published
from marl_pool_studies.attention_neuron.analyses import r_squared, regress
from marl_pool_studies.attention_neuron.figures import embed
from marl_pool_studies.attention_neuron.recording import record

ENV: dict[str, Any] = {"name": "cartpole", "max_steps": 40}
NEURON = {"name": "attention_neuron", "num_codes": 4, "key_units": 3}
EPISODES = 5


def cartpole(count: int = EPISODES, **options: Any) -> BatchedEnv:
    # Starts so slow that episodes last until they are cut.
    return make_batched_env(num_envs=count, start_speed=0.5, **{**ENV, **options})


def sensory(env: BatchedEnv | None = None, **options: Any) -> Sensory:
    group = (env or cartpole(1)).groups["agent"]
    pooling = {**NEURON, **options}
    agent = Sensory(group.tokens, group.action_space, pooling=pooling, seed=1)
    with torch.no_grad():  # actions that differ from one another
        agent.body[-1].weight.mul_(3)
    return agent


def feed_forward(env: BatchedEnv | None = None) -> FeedForward:
    group = (env or cartpole(1)).groups["agent"]
    return FeedForward(group.tokens, group.action_space, hidden=(4,), seed=1)


def returns(policy: Policy, perturbation: Any = None, **options: Any) -> np.ndarray:
    players = to_float64({"agent": policy})
    return play(players, cartpole(**options), perturbation).returns["agent"]


# Memories that stay with their tokens


def token_policy() -> SpecifiedPolicy:
    group = cartpole(1).groups["agent"]
    options = {"encoder": "identity", "init_std": 0.2, "trunk": "separate", "seed": 1}
    return make_policy(group.tokens, group.action_space, pooling=NEURON, **options)


def population() -> Policy:
    agent = sensory()
    return Population(agent, to_vector(agent).double()[None])


@pytest.mark.parametrize("make", [sensory, token_policy, population, None])
def test_a_reshuffle_changes_only_policies_with_a_memory_for_each_token(make) -> None:
    policy = make() if make else sensory(memory="none")
    reshuffled = returns(policy, make_perturbation("shuffle", every=4))
    assert (reshuffled != returns(policy)).tolist() == [bool(make)] * EPISODES


# More tokens than in training


def test_codes_are_divided_by_the_share_of_tokens_that_are_there() -> None:
    torch.manual_seed(0)
    options = {"dim": 2, "num_codes": 3, "squash": False, "action_dim": 1}
    head = make_pooling("attention_neuron", **options).double()
    assert isinstance(head, AttentionNeuronPooling)
    x = torch.randn(4, 1, 6, 2, dtype=torch.float64)
    padding = torch.zeros(4, 1, 6, dtype=torch.bool)
    padding[1, 0, :4] = True
    padding[2] = True
    x = x.masked_fill(padding[..., None], 0.0)
    actions = torch.zeros(4, 1, 1, dtype=torch.float64)

    def codes(expected: int, hidden: Tensor | None) -> Tensor:
        head.expected_tokens = expected
        return head.unroll(x, hidden, actions, head.initial_memory(4, 6))[0]

    present = torch.tensor([6.0, 2.0, 1.0, 6.0], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(codes(3, padding), codes(0, padding) * 3 / present)
    torch.testing.assert_close(codes(3, None), codes(0, None) / 2)


def test_duplicated_inputs_change_nothing_after_rescaling() -> None:
    policy = sensory()
    plain = returns(policy)
    scaled = rescaled({"agent": policy})["agent"]
    assert policy.sensor.expected_tokens == 0  # a copy
    np.testing.assert_allclose(returns(scaled), plain)
    np.testing.assert_allclose(returns(scaled, duplicates=2), plain)
    assert not np.allclose(returns(policy, duplicates=2), plain)


def test_a_population_rescales_as_its_agent_does() -> None:
    agent = rescaled({"agent": sensory()})["agent"]
    assert isinstance(agent, Sensory)
    copies = Population(agent, torch.stack([to_vector(agent)] * 2).double())
    options = {"count": 4, "duplicates": 2}
    np.testing.assert_allclose(returns(copies, **options), returns(agent, **options))


def test_means_are_not_rescaled() -> None:
    mean = {"activation": "softmax", "squash": False}
    changed = rescaled({"agent": sensory(**mean), "other": feed_forward()})
    assert changed["agent"].sensor.expected_tokens == 0


# The suite


def suite(**changes: Any) -> dict[str, Any]:
    settings = compose("evaluate", ["suite=attention_neuron"])
    return {**settings, "episodes": 3, "threads": 1, "analyses": [], **changes}


def make_run(folder: Path, policy: SpecifiedPolicy, **config: Any) -> Run:
    run = Run.create(folder, {"env": ENV, "seed": 5, **config})
    save_policies({"one": policy}, {"agent": "one"}, run.policy_dir)
    return run


def rows_of(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    content = json.loads(paths[1].read_text())
    rows: dict[str, dict[str, Any]] = {}
    for row in content["results"]:
        if row["policy"] == "trained":
            severity = row["severity"] if row["label"] == "occlude" else ""
            rows[f"{row['label']} {severity}".strip()] = row
    return rows


def test_the_suite_has_a_row_for_every_published_number() -> None:
    settings = suite()
    labels = {CLEAN, *(change["label"] for change in settings["transfer"])}
    for entry in settings["perturbations"]:
        options = {k: v for k, v in entry.items() if k not in ("name", "severities")}
        labels.add(label(entry["name"], options))
    for table in published.TABLES:
        assert set(table.rows) <= labels


def test_an_attention_neuron_has_every_row_that_cartpole_knows(tmp_path: Path) -> None:
    paths = evaluate(make_run(tmp_path / "run", sensory()), suite())
    names = ["results.csv", "results.json", "returns.npz", "rows.png"]
    assert [path.name for path in paths] == names
    assert cv2.imread(str(paths[3])) is not None
    rows = rows_of(paths)
    gaps = {name: row["missing"] for name, row in rows.items() if row["missing"]}
    one_frame = (
        "perturbation.scope: expected token, since these tokens show a single frame, "
        "got frame"
    )
    pictures = ("checkers", "clouds", "stripes", "sunset")
    sticky = ("without sticky actions", "sticky actions")
    assert gaps == {
        **{
            f"shuffle every={n} scope=frame": one_frame for n in (25, 50, 100, 200, 500)
        },
        **dict.fromkeys(sticky, "env cartpole has no sticky_actions"),
        **{f"background {name}": "env cartpole has no background" for name in pictures},
    }
    assert rows["shuffle"]["drop"] == pytest.approx(0, abs=1e-4)
    doubled, clean = rows["two of each channel"], rows["clean"]
    assert doubled["mean"] == pytest.approx(clean["mean"], abs=1e-4)
    assert doubled["drop"] is None  # another env is another task
    assert rows["shuffle every=25"]["drop"] != 0
    assert {f"occlude {share}" for share in (0.2, 0.4, 0.6, 0.8)} <= set(rows)
    noisy = {"duplicates": 1, "noise_channels": 5}
    assert rows["five noise channels"]["transfer_env"] == noisy
    # Episodes of 40 steps are another task than the paper's.
    assert not (tmp_path / "run/evaluation/published.csv").exists()


def test_what_a_policy_cannot_do_is_a_gap(tmp_path: Path) -> None:
    rows = rows_of(evaluate(make_run(tmp_path / "run", feed_forward()), suite()))
    for name in ("two of each channel", "five noise channels"):
        assert "at most 5 tokens, got 10" in rows[name]["missing"]
    assert rows["shuffle"]["drop"] != 0
    frames = {"label": "frames", "env": {"num_frames": 2}, "rescale_codes": False}
    settings = suite(transfer=[frames], perturbations=[])
    rows = rows_of(evaluate(make_run(tmp_path / "sensory", sensory()), settings))
    assert "expected num_features = 2, got 1" in rows["frames"]["missing"]


def test_a_value_that_the_env_refuses_is_no_gap(tmp_path: Path) -> None:
    wrong = {"label": "none", "env": {"duplicates": 0}, "rescale_codes": False}
    run = make_run(tmp_path / "run", sensory())
    with pytest.raises(InputError, match="duplicates: expected an integer >= 1, got 0"):
        evaluate(run, suite(transfer=[wrong]))
    assert not (run.path / "evaluation").exists()


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        (sensory, {}, {CLEAN: 472, "shuffle": 471, "two of each channel": 471}),
        (feed_forward, {}, {CLEAN: 593, "shuffle": 38, "two of each channel": None}),
        (feed_forward, {"duplicates": 2}, {CLEAN: 593, "five noise channels": 137}),
        (feed_forward, {"duplicates": 3}, {CLEAN: None}),
        (sensory, {"max_steps": 999}, {CLEAN: None}),
        (token_policy, {}, {CLEAN: 472}),
    ],
)
def test_numbers_are_compared_where_the_task_is_the_papers(policy, options, expected):
    rows = published.published_for(policy(), {"name": "cartpole", **options})
    numbers = {name: rows[name][0] if name in rows else None for name in expected}
    assert numbers == expected


def test_published_rows_are_those_of_the_plain_trained_policy() -> None:
    results = [
        Result("agent", policy, stochastic, name, name, severity, episodes=2)
        for policy, name, severity, stochastic in (
            ("trained", CLEAN, 0.0, False),
            ("trained", "shuffle", 1.0, False),
            ("trained", "shuffle", 0.5, False),
            ("trained", "shuffle", 0.0, False),
            ("trained", CLEAN, 0.0, True),
            ("random", CLEAN, 0.0, False),
        )
    ]
    policies = {"agent": sensory()}
    rows = published.published_rows(results, policies, {"name": "cartpole"})
    numbers = [(r.label, r.published, r.published_std) for r in rows]
    assert numbers == [(CLEAN, 472, 426), ("shuffle", 471, 426)]
    lacking = [replace(results[0], missing="a reason")]
    assert not published.published_rows(lacking, policies, {"name": "cartpole"})


def test_published_numbers_stand_beside_the_results(tmp_path: Path, capsys: Any):
    run = make_run(tmp_path / "run", sensory(), env={"name": "cartpole"})
    shuffle = {"name": "shuffle", "severities": [1.0]}
    paths = evaluate(run, suite(perturbations=[shuffle], transfer=[], episodes=1))
    output = capsys.readouterr().out
    assert output.count("472 ± 426") == output.count("471 ± 426") == 1
    assert paths[-1] == run.path / "evaluation/published.csv"
    # One episode has no standard deviation.
    assert "nan" not in output + paths[-1].read_text()
    with paths[-1].open(newline="") as file:
        lines = list(csv.DictReader(file))
    numbers = [(line["label"], line["published"]) for line in lines]
    assert numbers == [("clean", "472"), ("shuffle", "471")]
    measured = rows_of(paths)
    assert all(float(line["mean"]) == measured[line["label"]]["mean"] for line in lines)


# Environments other than the trained one


def test_an_env_that_the_policy_cannot_see_is_refused(tmp_path: Path) -> None:
    centroid = make_batched_env("simple_centroid", num_envs=1)
    for env, message in (
        (cartpole(1), ""),
        (cartpole(1, num_frames=2), "expected num_features = 2, got 1"),
        (centroid, "'agent': expected num_features"),
    ):
        reason = misfit({"agent": sensory()}, env.groups)
        assert message in reason
        assert bool(reason) == bool(message)
    run = make_run(tmp_path / "run", feed_forward())
    change = suite(env={**ENV, "duplicates": 2}, perturbations=[], transfer=[])
    with pytest.raises(InputError, match="at most 5 tokens, got 10"):
        evaluate(run, change)


# Analyses


def subject_of(folder: Path, policy: SpecifiedPolicy, **env: Any) -> EvaluationTarget:
    run = make_run(folder, policy, env={**ENV, **env})
    return target_from_run(run, TargetSettings())


def test_a_recording_is_in_the_envs_own_order(tmp_path: Path) -> None:
    subject = subject_of(tmp_path / "run", sensory(), start_speed=0.5)
    plain, shuffled = (
        record(subject, range(2), shuffled=moved, max_steps=30, keep_envs=not moved)
        for moved in (False, True)
    )
    torch.testing.assert_close(plain.codes, shuffled.codes)
    torch.testing.assert_close(plain.inputs, shuffled.inputs)
    assert plain.inputs.shape == (60, 5)
    assert plain.codes.std(0).min() > 0
    assert not shuffled.envs
    # Environments are kept as they were when their first row was observed.
    observations = [env.observe()["agent"].features.flatten() for env in plain.envs]
    torch.testing.assert_close(torch.stack(observations), plain.inputs[::2])


def test_r_squared_is_that_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x[:, :1], torch.full((50, 1), 7.0)], 1)  # of lower rank
    noise = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    y = x[:, :2] * 5 + 1 + noise * torch.tensor([0.5, 20.0])
    scores = r_squared(x, torch.cat([y, torch.ones(50, 1)], 1))
    for column in range(2):
        fit = LinearRegression().fit(x.numpy(), y[:, column].numpy())
        expected = fit.score(x.numpy(), y[:, column].numpy())
        assert float(scores[column]) == pytest.approx(expected)
    assert torch.isnan(scores[2])


def test_every_input_and_every_code_is_fitted(tmp_path: Path) -> None:
    fits = regress(subject_of(tmp_path / "run", sensory()), episodes=4)
    names = ["position", "velocity", "cos", "sin", "angular_velocity"]
    assert [fit.name for fit in fits] == [*names, "0", "1", "2", "3"]
    assert [fit.published for fit in fits][:2] == [0.354, 0.620]
    assert all(0 <= fit.r_squared <= 1 for fit in fits)


def test_an_embedding_is_the_same_each_time() -> None:
    codes = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    first, repeated, reseeded = (embed(codes, seed) for seed in (0, 0, 1))
    assert first.shape == (40, 2)
    np.testing.assert_array_equal(first, repeated)
    assert np.isfinite(reseeded).all()


def test_analyses_of_cartpole(tmp_path: Path, capsys: Any) -> None:
    analyses = ["regression", "latents", "codes", "patches"]
    env = {**ENV, "start_speed": 0.5}
    settings = suite(perturbations=[], transfer=[], analyses=analyses, env=env)
    table, *pictures = evaluate(make_run(tmp_path / "run", sensory()), settings)[4:]
    assert table.name == "regression.csv"
    assert table.read_text().startswith("explained,name,r_squared,published\ninput,")
    assert [path.name for path in pictures] == ["latents.png", "codes.png"]
    assert all(cv2.imread(str(path)) is not None for path in pictures)
    out = capsys.readouterr().out
    assert "not made: patches: expected patches of a picture" in out
    assert "angular_velocity" in out
    assert "mean of the codes, on the inputs" in out


def test_an_impossible_analysis_gives_the_reason(tmp_path, capsys, monkeypatch):
    def analyse(target: EvaluationTarget, *names: str) -> list[Path]:
        settings = EvaluateSettings(episodes=2, analyses=list(names))
        results = EvaluationResults([], np.zeros((0, 2)), [])
        run = EvaluatedRun(target, [], results, Files(tmp_path), [])
        return analyse_run(run, settings)

    subject = subject_of(tmp_path / "fixed", feed_forward())
    assert analyse(subject, "regression", "latents", "codes") == []
    out = capsys.readouterr().out
    assert out.count("expected a sensory layer, which FeedForward has not") == 3
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    assert analyse(subject_of(tmp_path / "run", sensory()), "codes") == []
    out = capsys.readouterr().out
    assert "not made: codes: " in out
    assert 'pip install "marl-pool[analysis]"' in out


@pytest.mark.parametrize("patch", [6, 12])
def test_patches_are_outlined_where_they_are(patch: int) -> None:
    pytest.importorskip("ale_py")
    env: Any = make_batched_env("pong", num_envs=1, patch=patch)
    assert env.patch_grid == PatchGrid(84, patch, patch)
    row, column, side = 3, 5, 4 * patch
    env.screens = torch.zeros_like(env.screens)
    env.screens[0, -1, row * patch :, column * patch :][:patch, :patch] = 255
    weights = env.observe()["agent"].features[0, 0].float().mean(-1)
    image = outline_top(np.zeros((84 * 4, 84 * 4, 3), np.uint8), env, weights, 1)
    outline = (image == OUTLINE).all(-1)
    ys, xs = outline.nonzero()
    assert (ys.min(), xs.min()) == (row * side, column * side)
    assert (ys.max(), xs.max()) == (row * side + side - 1, column * side + side - 1)
    inside = slice(row * side + 3, row * side + side - 3)
    assert not outline[inside, xs.mean().astype(int)].any()


def test_overlapping_patches_have_their_corners() -> None:
    grid = PatchGrid(96, 7, 4)
    corners = [grid.corner(token) for token in (0, 1, 22, 23)]
    assert corners == [(0, 0), (4, 0), (88, 0), (0, 4)]


# Policies without a run, by the command


@pytest.fixture
def command(elsewhere: Path, capsys: Any) -> Any:
    """Run a command in an empty folder; return its status and the lines it printed."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return status, (captured.err if status else captured.out).splitlines()

    return run


QUICK = ("perturbations=[]", "transfer=[]", "episodes=2", "threads=1")


def test_a_policy_without_a_run_is_evaluated(command: Any, tmp_path: Path) -> None:
    save_policies({"p": sensory()}, {"agent": "p"}, "mine/policy", env=ENV)
    assert command("evaluate", "mine/policy", *QUICK, "--out", "results")[0] == 0
    run = Run.open("results")
    assert run.verb == "evaluate"
    assert run.config["policy_from"] == str(tmp_path / "mine/policy")
    assert run.config["env"]["max_steps"] == 40
    content = json.loads(Path("results/evaluation/results.json").read_text())
    assert content["changed"] == {}
    assert content["env"]["max_steps"] == 40
    # The folder is a run now; the first results stay.
    before = Path("results/evaluation/results.json").read_bytes()
    assert command("evaluate", "results", *QUICK)[0] == 0
    assert Path("results/evaluation/results.json").read_bytes() == before
    assert Path("results/evaluation/results-2.json").is_file()
    status, lines = command("evaluate", "mine/policy", *QUICK, "--out", "results")
    assert status == 2
    assert "results exists; choose another --out" in lines[0]


def test_the_env_of_a_policy_without_a_run_can_be_changed(command: Any) -> None:
    save_policies({"p": sensory()}, {"agent": "p"}, "mine/policy", env=ENV)
    keys = (*QUICK, "env.noise_channels=2")
    assert command("evaluate", "mine/policy", *keys)[0] == 0
    (folder,) = Path("evaluations").iterdir()
    assert folder.name.endswith("-mine")
    content = json.loads((folder / "evaluation/results.json").read_text())
    changes = {"noise_channels": 2}
    assert (content["changed"], content["env"]) == (changes, content["env"] | changes)


def test_a_policy_that_names_no_env_and_no_group(command: Any) -> None:
    save_policy(sensory(), "alone")
    status, (line,) = command("evaluate", "alone", *QUICK)
    assert status == 2
    assert "alone names no environment: expected env=NAME" in line
    assert command("evaluate", "alone", "env.duplicates=2")[0] == 2
    assert not Path("evaluations").exists()
    keys = ("env=cartpole", "env.max_steps=10", "--out", "results")
    assert command("evaluate", "alone", *QUICK, *keys)[0] == 0
    assert Run.open("results").config["env"]["max_steps"] == 10


@yaml_cases("keys, message")
@pytest.mark.usefixtures("elsewhere")
def test_what_is_refused_leaves_nothing(refused: Any, keys: str, message: str) -> None:
    save_policy(sensory(), "alone")
    words = (*QUICK, *keys.split(), "--out", "results")
    assert message in refused("evaluate", "alone", *words)
    assert not Path("results").exists()


def test_results_of_a_run_may_be_written_elsewhere(command, tmp_path, capsys) -> None:
    make_run(tmp_path / "run", sensory())
    assert cli.main(["evaluate", "run", *QUICK, "--out", "results"]) == 0
    assert Path("results/results.json").is_file()
    assert not Path("run/evaluation").exists()
    # The suggested command reads the run.
    assert "next: marl-pool render run\n" in capsys.readouterr().err
    status, lines = command("evaluate", "run", *QUICK, "--out", "results")
    assert status == 2
    assert lines[0].endswith("results exists; choose another --out")


def test_several_runs_have_separate_results(command: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_run(tmp_path / name, sensory())
    status, lines = command("evaluate", "one", *QUICK, "two", "--out", "map")
    refusal = "marl-pool: --out: expected a single policy, got several"
    assert (status, lines) == (2, [refusal])
    assert command("evaluate", "one", *QUICK, "two")[0] == 0
    for name in ("one", "two"):
        assert Path(name, "evaluation/results.json").is_file()


def test_a_policy_without_a_run_is_rendered(command: Any) -> None:
    save_policies({"p": sensory()}, {"agent": "p"}, "mine", env=ENV)
    keys = ("env.max_steps=3", "size=64", "env.duplicates=2", "--out", "film")
    status, lines = command("render", "mine", *keys)
    assert status == 0
    assert lines == ["film/clean.webm"]
    assert [file.name for file in Path("film").iterdir()] == ["clean.webm"]
    assert command("render", "mine", "head=77", "--out", "other")[0] == 2
    assert not Path("other").exists()
    status, lines = command("render", "mine", *keys)
    assert (status, lines) == (2, ["marl-pool: film exists; choose another --out"])
    # By default its run is new, and holds the video.
    assert command("render", "mine", *keys[:-2])[0] == 0
    (folder,) = Path("evaluations").iterdir()
    assert (folder / "videos/clean.webm").is_file()


def test_a_video_of_a_run_may_be_written_elsewhere(command: Any, tmp_path: Path):
    make_run(tmp_path / "run", sensory())
    keys = ("env.max_steps=3", "size=64", "--out", "videos")
    assert command("render", "run", *keys) == (0, ["videos/clean.webm"])
    assert not Path("run/videos").exists()
    status, lines = command("render", "run", *keys)
    assert (status, lines) == (2, ["marl-pool: videos exists; choose another --out"])


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the policies shipped with the package."""
    folder = tmp_path / "package"
    env = {"name": "cartpole", "max_steps": 12}
    save_policies({"p": sensory()}, {"agent": "p"}, folder / "tiny", env=env)
    card = {"groups": {"agent": {"score": [0.5, 0.4, 0.6]}}}
    (folder / "tiny" / "card.json").write_text(json.dumps(card))
    monkeypatch.setattr(pretrained, "FOLDER", folder)


@pytest.mark.usefixtures("shipped")
def test_pretrained_policies_are_listed_loaded_and_played(command: Any) -> None:
    status, lines = command("list", "pretrained")
    assert status == 0
    assert lines[0].split(maxsplit=1) == ["tiny", "sensory in cartpole, score 0.50"]
    keys = ("pretrained=tiny", "size=64", "--out", "film")
    assert command("render", *keys)[1][-1] == "film/clean.webm"
    assert command("evaluate", "pretrained=tiny", *QUICK, "--out", "results")[0] == 0
    results = Run.open("results").config
    assert results["policy_from"] == "pretrained=tiny"
    assert results["env"]["max_steps"] == 12
    status, lines = command("evaluate", "pretrained=tinny", *QUICK)
    assert status == 2
    assert "Did you mean 'tiny'?" in lines[0]


# The configuration


@yaml_cases("override, message")
def test_wrong_keys_are_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        compose("evaluate", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_env_is_named_or_only_its_options_are_changed() -> None:
    assert compose("evaluate")["env"] is None
    assert compose("render", ["env.duplicates=2"])["env"] == {"duplicates": 2}
    env = compose("evaluate", ["env=cartpole", "env.duplicates=2"])["env"]
    assert (env["duplicates"], env["max_steps"]) == (2, 1000)
    name = "marl_pool.envs.cartpole.env:CartPole"
    assert compose("evaluate", [f"env={name}"])["env"]["name"] == name
