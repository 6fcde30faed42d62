"""Several groups of agents: separate, shared and frozen modules.

Whole training runs in small environments; the parts are in test_ppo_parts.py.
"""

import contextlib
import csv
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray")

from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics import LEARNER_RESULTS

from helpers.evaluated import evaluate
from helpers.farm import (
    TOKENS,
    AlikeFoxAndHens,
    FoxAndHens,
    StillHens,
    policies_of,
)
from helpers.ppo import (
    assert_same,
    assert_same_weights,
    local_learner,
    resumed,
    rllib_config,
    run_of,
    weights_of,
)
from helpers.tables import yaml_cases
from helpers.training import RAY_WARNINGS
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.envs.scripted import is_plug_in, is_scripted, scripted_policy
from marl_pool.evaluation.load import target_from_run
from marl_pool.evaluation.settings import RenderSettings, TargetSettings
from marl_pool.evaluation.video.render import render_run
from marl_pool.policies import make_policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.storage import load_modules, save_policies, save_policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.runs.run import Run
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.fixed_policies import load_fixed
from marl_pool.training.jobs import with_absolute_folders
from marl_pool.training.ppo.config import assign_modules
from marl_pool.training.ppo.runner import RUNNER
from marl_pool.utils.errors import InputError

pytestmark = RAY_WARNINGS
slow = pytest.mark.slow

FARM = "env=helpers.farm:FoxAndHens"
TOY = [
    *("encoder.num_layers=1", "ppo.num_envs=4", "ppo.batch_size=48"),
    *("ppo.minibatch_size=12", "ppo.num_epochs=2", "total_steps=144"),
    *("checkpoint.every=1", "threads=1"),
]
"""48 agent steps are 12 steps of 4 environments for a fox alone, 4 for hens alone."""
STILL = "helpers.farm:StillHens"
SETTINGS = TargetSettings()


def config_of(*overrides: str) -> dict:
    env = [] if any(text.startswith("env=") for text in overrides) else [FARM]
    return compose("train", [*env, *TOY, *overrides])


def trained(path: Path, *overrides: str) -> Run:
    return run_of(path, config_of(*overrides))


def token_policy(group: str, **options) -> TokenPolicy:
    return policies_of(FoxAndHens(1), **options)[group]


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Run:
    """A run in which fox and hens learn."""
    return trained(tmp_path_factory.mktemp("runs") / "both")


@pytest.fixture(scope="module")
def against_frozen(parent, tmp_path_factory) -> Run:
    """A run in which the fox learns against the hens of `parent`."""
    path = tmp_path_factory.mktemp("runs") / "fox"
    with contextlib.chdir(parent.path.parent):
        return trained(path, f"fixed={{hen: {parent.path.name}}}")


# Groups, modules and frozen policies


def test_modules_are_those_of_the_groups_that_learn():
    groups = FoxAndHens(1).groups
    assert assign_modules(groups, None, {"hen": "random"}) == {"fox": "fox"}
    assert assign_modules(groups, {"hen": "m"}, {"fox": "random"}) == {"hen": "m"}
    shared = {"fox": "all", "hen": "all"}
    assert assign_modules(AlikeFoxAndHens(1).groups, shared) == shared


@yaml_cases("modules, fixed, message")
def test_groups_and_modules_that_do_not_match_are_refused(modules, fixed, message):
    with pytest.raises(InputError) as caught:
        assign_modules(FoxAndHens(1).groups, modules, fixed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_is_a_script_or_a_folder():
    for name in ("heuristic", "random", "a:B", "a.b:C"):
        assert is_scripted(name)
    for name in ("runs/a", "./random", "a:b/c", "heuristics", "a", ":", ""):
        assert not is_scripted(name)
    assert not is_plug_in("random")


def test_folders_become_absolute_and_scripts_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fixed = {"a": "runs/x", "b": "random", "c": STILL, "d": "/r", "e": "~/y"}
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "teacher").mkdir()
    config = CloneConfig.from_plain(compose("clone", ["teacher=teacher"]))
    config = replace(config, fixed=fixed)
    absolute = {**fixed, "a": str(tmp_path / "runs" / "x"), "e": "/home/me/y"}
    teacher = str(tmp_path / "teacher")
    expected = replace(config, fixed=absolute, teacher=teacher)
    assert with_absolute_folders(config) == expected
    scripted = replace(config, fixed=None, teacher="heuristic")
    assert with_absolute_folders(scripted) == scripted


def test_scripted_policies_are_built_for_their_group():
    group = FoxAndHens(1).groups["hen"]
    random = scripted_policy("random", env="x", role="hen", group=group)
    assert isinstance(random, RandomPolicy)
    assert random.actions.n == 3
    still = scripted_policy(STILL, env="x", role="hen", group=group)
    assert isinstance(still, StillHens)
    assert still.num_choices == 3
    centroid = make_batched_env("simple_centroid", 1).groups["agent"]
    options = {"env": "simple_centroid", "role": "agent", "group": centroid}
    heuristic = scripted_policy("heuristic", **options)
    assert type(heuristic).__name__ == "CentroidHeuristic"


@yaml_cases("policy, message")
def test_a_policy_that_is_not_there_is_refused(policy, message):
    with pytest.raises(InputError, match=message) as caught:
        rllib_config(config_of(f"fixed={{hen: {policy}}}"))
    assert "\n" not in str(caught.value)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        rllib_config(config_of(f"fixed={{hen: {path}}}"))
    message = str(caught.value)
    assert message.startswith("fixed.hen: ")
    assert "\n" not in message
    return message


def test_a_frozen_policy_must_fit_its_group(tmp_path):
    def spec(**changes):
        return TOKENS.__class__(**{**vars(TOKENS), **changes})

    def save_hen(tokens, folder, **options):
        actions = FoxAndHens(1).groups["hen"].action_space
        save_policy(make_policy(tokens, actions, **options), folder)

    save_policy(token_policy("fox"), tmp_path / "fox")
    message = refusal(tmp_path / "fox")
    assert "actions = a choice of 3, got numbers in [-1, 1]" in message
    for name, changes, message in (
        ("wide", {"num_features": 3}, "expected num_features = 2, got 3"),
        ("types", {"type_names": ("self", "hen")}, "expected type_names = ('self', 'f"),
        ("uint8", {"dtype": "uint8"}, "expected dtype = float32, got uint8"),
    ):
        save_hen(spec(**changes), tmp_path / name)
        assert message in refusal(tmp_path / name)
    short = spec(num_tokens=3)
    save_hen(short, tmp_path / "flat", pooling="flatten")
    assert "3" in refusal(tmp_path / "flat")
    # An invariant head may have been trained with another number of tokens.
    save_hen(short, tmp_path / "few")
    rllib_config(config_of(f"fixed={{hen: {tmp_path / 'few'}}}"))


def test_a_frozen_policy_with_a_plug_in_needs_permission(tmp_path):
    head, folder = "helpers.plug_in:SumPooling", tmp_path / "hen"
    save_policy(token_policy("hen", pooling=head), folder)
    assert f"plugins=['{head}']" in refusal(folder)
    rllib_config(config_of(f"plugins=['{head}']", f"fixed={{hen: {folder}}}"))


def test_a_frozen_policy_of_several_is_that_of_the_group(tmp_path):
    wrong = {"cat": token_policy("hen"), "dog": token_policy("hen")}
    save_policies(wrong, {"cat": "cat", "dog": "dog"}, tmp_path / "pets")
    message = refusal(tmp_path / "pets")
    assert "has no policy for this group, only for 'cat', 'dog'" in message
    right = {"cat": token_policy("fox"), "dog": token_policy("hen", seed=7)}
    save_policies(right, {"fox": "cat", "hen": "dog"}, tmp_path / "farm")
    config = rllib_config(config_of(f"fixed={{hen: {tmp_path / 'farm'}}}"))
    weights = config.env_config[RUNNER].fixed["hen"].state_dict()
    assert all(torch.equal(weights[k], v) for k, v in right["dog"].state_dict().items())


def test_a_group_that_was_scripted_may_be_frozen_on_resume(tmp_path):
    fox, hen = token_policy("fox"), token_policy("hen")
    save_policy(fox, tmp_path / "checkpoint")
    save_policy(hen, tmp_path / "source")
    policies = load_fixed(
        {"hen": str(tmp_path / "source")},
        FoxAndHens(1).groups,
        env="helpers.farm:FoxAndHens",
        plugins=[],
        saved=tmp_path / "checkpoint",
    )
    weights, expected = policies["hen"].state_dict(), hen.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_run_without_a_policy_and_a_damaged_one_are_refused(tmp_path):
    Run.create(tmp_path / "run", config_of())
    assert "has no policy 'best'" in refusal(tmp_path / "run")
    save_policy(token_policy("hen"), tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"{")
    assert "is damaged" in refusal(tmp_path / "cut")


def test_a_module_cannot_take_the_name_of_a_frozen_policy(tmp_path):
    save_policy(token_policy("hen"), tmp_path / "hen")
    overrides = [f"fixed={{hen: {tmp_path / 'hen'}}}", "modules={fox: frozen-hen}"]
    with pytest.raises(InputError, match="the name 'frozen-hen' is reserved for the"):
        rllib_config(config_of(*overrides))


def test_a_batch_counts_the_agents_that_learn():
    for fixed, steps in (("null", 3), ("{hen: random}", 12), ("{fox: random}", 4)):
        config = rllib_config(config_of(f"fixed={fixed}"))
        assert config.rollout_fragment_length == steps
    with pytest.raises(InputError, match="a multiple of 12 .* × agents that learn"):
        rllib_config(config_of("ppo.batch_size=40", "fixed={fox: random}"))


# Training


SHARED = ["env=helpers.farm:AlikeFoxAndHens", "modules={fox: all, hen: all}"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"fox": 12, "hen": 36}),
        (["fixed={hen: random}"], {"fox": 48}),
        ([f"fixed={{hen: {STILL}}}"], {"fox": 48}),
        (["fixed={fox: random}", "modules={hen: m}"], {"m": 48}),
        (SHARED, {"all": 48}),
    ],
)
def test_each_epoch_has_every_row_of_a_module(build, overrides, expected):
    algo = build(config_of("ppo.num_epochs=3", *overrides))
    learner = local_learner(algo)
    log_probs: dict[str, list[torch.Tensor]] = {name: [] for name in expected}
    update = learner._update

    def count(minibatch):
        for module_id, rows in minibatch.items():
            log_probs[module_id].append(rows[Columns.ACTION_LOGP].detach())
        return update(minibatch)

    learner._update = count
    result = algo.train()
    assert set(algo.env_runner.module.keys()) == set(expected)
    assert set(learner.module.keys()) == set(expected)
    assert set(result[LEARNER_RESULTS]) - {"__all_modules__"} == set(expected)
    # The module with the most rows has minibatches of 12.
    number = max(expected.values()) // 12
    for name, rows in expected.items():
        assert [*map(len, log_probs[name])] == [rows // number] * 3 * number
        # Each of three epochs holds each row once: thrice the same numbers.
        epochs = torch.cat(log_probs[name]).view(3, rows).sort(dim=1).values
        assert (epochs == epochs[0]).all()
        assert epochs[0].unique().numel() > 1


@slow
def test_the_metrics_name_every_group_and_module(parent):
    rows = parent.rows()
    assert [row["env_steps"] for row in rows] == list(range(12, 145, 12))
    for row in rows[-3:]:
        total = row["fox/return_mean"] + row["hen/return_mean"]
        assert row["return_mean"] == pytest.approx(total)
        assert row["fox/return_mean"] < 0 < row["hen/return_mean"]
    assert {"fox/policy_loss", "hen/policy_loss"} <= set(rows[0])
    modules = load_modules(parent.policy_dir)[0]
    # The order of a set of names would follow Python's hash seed.
    assert list(modules) == ["fox", "hen"]
    assert modules["fox"].actions.low
    assert modules["hen"].actions.n == 3
    # The fox's gain is the hens' loss: the newest of several modules counts as best.
    newest = parent.checkpoints()[-1]
    assert parent.best.iteration == 12
    assert_same_weights(parent.policy_dir, newest / "policy")


@slow
def test_a_shared_module_learns_from_all_its_groups(tmp_path):
    run = trained(tmp_path / "run", *SHARED)
    modules, groups = load_modules(run.policy_dir)
    assert groups == {"fox": "all", "hen": "all"}
    assert set(modules) == {"all"}
    last = run.rows()[-1]
    assert {"all/policy_loss", "fox/return_mean", "hen/return_mean"} <= set(last)
    # One module has one score: the best is the checkpoint of the highest mean.
    scores = {row["iteration"]: row["return_mean"] for row in run.rows()}
    finite_scores = {i: score for i, score in scores.items() if not math.isnan(score)}
    assert run.best.iteration == max(finite_scores, key=finite_scores.get)


@slow
@pytest.mark.parametrize(("policy", "runners"), [("random", 0), (STILL, 1)])
def test_scripted_groups_play_and_do_not_learn(tmp_path, cluster, policy, runners):
    overrides = [f"fixed={{hen: {policy}}}", f"resources.num_env_runners={runners}"]
    run = trained(tmp_path / "run", *overrides)
    rows = run.rows()
    assert [row["env_steps"] for row in rows] == [48, 96, 144]
    assert rows[-1]["return_mean"] == rows[-1]["fox/return_mean"]
    assert rows[-1]["hen/return_mean"] > 0
    assert rows[0]["fox/first_ratio_error"] < 1e-5
    assert not [name for name in rows[0] if name.startswith("hen/") and "loss" in name]
    assert load_modules(run.policy_dir)[1] == {"fox": "fox"}
    plugins = ["helpers.farm:FoxAndHens"]
    if policy == STILL:  # it is not imported without permission
        with pytest.raises(InputError, match=f"policy '{STILL}', which is not pa"):
            target_from_run(run, SETTINGS, plugins=plugins)
        plugins.append(STILL)
    subject = target_from_run(run, SETTINGS, plugins=plugins)
    expected = RandomPolicy if policy == "random" else StillHens
    assert isinstance(subject.policies["hen"], expected)


@slow
def test_a_frozen_group_plays_and_never_changes(parent, against_frozen, tmp_path):
    run = against_frozen
    # A relative folder is written as an absolute one.
    assert Run.open(run.path).config["fixed"] == {"hen": str(parent.path)}
    source = load_modules(parent.policy_dir)[0]["hen"].state_dict()
    for folder in (run.policy_dir, *(c / "policy" for c in run.checkpoints())):
        modules, groups = load_modules(folder)
        assert groups == {"fox": "fox", "hen": "frozen-hen"}
        frozen = modules["frozen-hen"].state_dict()
        assert frozen.keys() == source.keys()
        assert all(torch.equal(frozen[name], source[name]) for name in source)
    changes = [weights_of(c / "policy") for c in run.checkpoints()]
    learned = [name for name in changes[0] if name.startswith("fox/")]
    assert learned
    for before, after in itertools.pairwise(changes):
        assert any(not torch.equal(before[name], after[name]) for name in learned)
    # A frozen policy samples its own actions, unlike the random policy.
    random = trained(tmp_path / "random", "fixed={hen: random}")
    assert run.rows()[0]["hen/return_mean"] != random.rows()[0]["hen/return_mean"]


@slow
def test_a_run_resumes_bit_for_bit_when_its_frozen_source_has_moved(parent, tmp_path):
    source = tmp_path / "source"
    policies, groups = load_modules(parent.policy_dir)
    save_policies(policies, groups, source)
    reference = trained(tmp_path / "whole", f"fixed={{hen: {source}}}")
    half = trained(tmp_path / "half", f"fixed={{hen: {source}}}", "total_steps=96")
    source.rename(tmp_path / "moved")
    assert_same(resumed(half.path, 144), reference)
    # A run that has no checkpoint yet does need the source.
    with pytest.raises(InputError, match=r"fixed.hen: expected .* got .*source"):
        trained(tmp_path / "late", f"fixed={{hen: {source}}}")


# Reading such a run


@slow
def test_a_run_with_fixed_groups_is_evaluated(against_frozen, tmp_path, capsys):
    plugins = ["helpers.farm:FoxAndHens", STILL]
    settings = compose("evaluate", ["episodes=4", "perturbations=[]"])
    still = trained(tmp_path / "still", f"fixed={{hen: {STILL}}}")
    for run in (against_frozen, still):
        before = target_from_run(run, SETTINGS, plugins=plugins)
        assert before.fixed == {"hen"}
        # A baseline takes the fox's place; the hens stay as trained.
        random = before.baselines()["random"]
        assert isinstance(random["fox"], RandomPolicy)
        assert type(random["hen"]) is type(before.policies["hen"])
        assert not isinstance(random["hen"], RandomPolicy)
        table = evaluate(run, settings, plugins)[0]
        with table.open() as lines:
            rows = list(csv.DictReader(lines))
        fixed = {(row["group"], row["fixed"]) for row in rows}
        assert fixed == {("fox", "False"), ("hen", "True")}
        assert "hen: fixed, beside random" in capsys.readouterr().out


@slow
@pytest.mark.parametrize("prey", ["learned", "heuristic"])
def test_predators_against_prey(tmp_path, prey):
    tag = [
        *("env=simple_tag", "env.counts=2-1-1", "env.prey=learned", "env.max_steps=6"),
        *("ppo.batch_size=48", "total_steps=72"),
    ]
    overrides = [] if prey == "learned" else [f"fixed={{prey: {prey}}}"]
    run = trained(tmp_path / "run", *tag, *overrides)
    row = run.rows()[-1]
    assert {"predator/return_mean", "prey/return_mean", "predator/entropy"} <= set(row)
    assert ("prey/entropy" in row) == (prey == "learned")
    settings = compose("evaluate", ["episodes=3", "perturbations=[]"])
    evaluate(run, settings)
    pytest.importorskip("cv2")
    from helpers.pictures import read_video, share_beside_background

    frames = read_video(render_run(run, RenderSettings(size=64)))
    assert frames
    assert all(share_beside_background(frame, 30) > 0.02 for frame in frames)
