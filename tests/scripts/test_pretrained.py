"""The shipped policies: complete cards, their page, and the script for both."""

import math
import shlex
import shutil
from pathlib import Path

import numpy as np
import pretrained
import pytest
from PIL import Image

import marl_pool.pretrained
from helpers.tables import yaml_cases
from marl_pool import load_policies
from marl_pool.cli.arguments import parse
from marl_pool.cli.main import main
from marl_pool.config import VERBS, compose
from marl_pool.evaluation.measure import EvaluationResults
from marl_pool.evaluation.pretrained_card import GroupCard, PretrainedCard
from marl_pool.evaluation.results import Result, SeverityAUC
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.files.manifest import is_intact_json, read_manifest
from marl_pool.files.reading import read_json
from marl_pool.policies.storage import WEIGHTS, load_env_config, load_modules
from marl_pool.pretrained import CARD, pretrained_names, pretrained_path
from marl_pool.runs.run import Run

NAMES = pretrained_names()
SPREAD = pretrained_path("simple_spread")
TINY = (
    "experiment=simple_speaker_listener env.max_steps=4 ppo.num_envs=4 "
    "ppo.batch_size=32 ppo.minibatch_size=32 ppo.num_epochs=1 total_steps=32 seed=0"
)
"""A training of two groups, too short to learn."""


def test_the_table_has_what_ships_and_it_is_small():
    assert {*NAMES} <= {*pretrained.COMMANDS}
    files = [file for name in NAMES for file in pretrained_path(name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 600_000


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_complete_and_of_its_policy(name):
    folder = pretrained_path(name)
    card = PretrainedCard.read(folder)
    assert is_intact_json(read_json(folder / CARD))
    assert card.weights == read_manifest(folder)["files"][WEIGHTS]["sha256"]
    assert card.commands == pretrained.COMMANDS[name]
    assert card.commit
    assert card.measured
    modules, groups = load_modules(folder)
    weights = [w for module in modules.values() for w in module.state_dict().values()]
    assert card.parameters == sum(weight.numel() for weight in weights)
    assert {*card.groups} == {*groups}
    is_timed = name in pretrained.trainable()
    assert (card.seconds is not None) == is_timed
    is_counted = is_timed and card.commands[-1].startswith(pretrained.TRAIN)
    assert (card.env_steps is not None) == is_counted
    for group in card.groups.values():
        assert group.returns.low <= group.returns.value <= group.returns.high
        assert math.isnan(group.score.value) == (len(groups) > 1)
        assert len(group.areas) == 14
        assert not math.isnan(group.areas["jitter scale=0.25"])


@pytest.mark.parametrize("name", NAMES)
def test_a_command_of_a_card_is_understood(name):
    for line in PretrainedCard.read(pretrained_path(name)).commands:
        program, *words = shlex.split(line)
        namespace, overrides = parse(words)
        assert program == "marl-pool"
        if namespace.verb in VERBS:
            config = compose(namespace.verb, overrides)
    if name in pretrained.trainable():
        # The training of the very environment that the policy is shipped with.
        assert config["env"] == load_env_config(pretrained_path(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_return_of_a_card_is_measured_again(name, monkeypatch):
    # Random actions and the scripted policy are not measured.
    monkeypatch.setattr(EvaluationTarget, "baselines", lambda *_, **__: {})
    folder = pretrained_path(name)
    card = PretrainedCard.read(folder)
    results = marl_pool.evaluate(
        load_policies(folder),
        load_env_config(folder),
        suite={"perturbations": []},
        episodes=card.episodes,
        threads=1,
    )
    clean = {row.group: row.mean for row in results.results if row.policy == "trained"}
    for group, numbers in card.groups.items():
        # Another processor may round differently and choose another action.
        assert numbers.returns.low < clean[group] < numbers.returns.high


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_moves_and_is_small(name):
    file = pretrained.PICTURES / f"{name}.webp"
    assert file.stat().st_size <= 150_000
    with Image.open(file) as picture:
        assert 20 <= picture.n_frames <= 60
        assert 192 <= picture.width <= 256


def test_the_page_is_of_the_cards(monkeypatch, tmp_path, capsys):
    assert pretrained.main(["page", "--check"]) == 0
    old = tmp_path / "pretrained.md"
    old.write_text(pretrained.PAGE.read_text(encoding="utf-8").replace("1.09", "1.99"))
    monkeypatch.setattr(pretrained, "PAGE", old)
    assert pretrained.main(["page", "--check"]) == 1
    assert capsys.readouterr().out == "pretrained.md is stale\n"
    assert pretrained.main(["page"]) == 0
    assert pretrained.main(["page", "--check"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_printed(capsys, name):
    assert main(["list", "pretrained", name]) == 0
    printed = capsys.readouterr().out
    card = PretrainedCard.read(pretrained_path(name))
    assert all(command in printed for command in card.commands)
    for group in card.groups.values():
        assert group.returns.text() in printed
        assert group.score.text() in printed
    assert "nan" not in printed


def test_numbers_that_are_missing_stay_so(tmp_path):
    group = GroupCard.from_results(returns_only(), "a")
    card = PretrainedCard.read(SPREAD)
    group_cards = {"a": group, "b": card.groups["agent"]}
    card = PretrainedCard(**{**vars(card), "groups": group_cards, "seconds": None})
    card.write(tmp_path)
    assert repr(PretrainedCard.read(tmp_path)) == repr(card)


def returns_only():
    """Rows of a group that has no score, with returns 4, 3 and 0 over severity."""
    rows = [
        Result("a", "trained", False, "clean", "clean", 0, mean=4.0),
        Result("a", "random", False, "clean", "clean", 0, mean=1.0),
        Result("a", "trained", False, "jitter", "jitter", 0.5, mean=3.0),
        Result("a", "trained", False, "jitter", "jitter", 1.0, mean=0.0),
        Result("a", "trained", False, "inject", "inject", 1.0, missing="no room"),
    ]
    areas = [
        SeverityAUC("a", "trained", False, name, name, {}, [0, 0.5, 1.0])
        for name in ("jitter", "inject")
    ]
    return EvaluationResults(rows, np.zeros((len(rows), 1)), areas)


def test_an_area_without_a_score_is_a_mean_return():
    group = GroupCard.from_results(returns_only(), "a")
    # By hand: the mean of two trapezoids.
    assert group.areas["jitter"] == pytest.approx((3.5 + 1.5) / 2)
    assert math.isnan(group.areas["inject"])
    assert group.area_name == "mean return over severity"
    assert group.baselines == "random 1.000"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package of two policies, the second without a card, and an empty page."""
    folder = tmp_path / "package"
    shutil.copytree(SPREAD, folder / "simple_spread")
    shutil.copytree(SPREAD, folder / "tiny", ignore=shutil.ignore_patterns(CARD))
    for module in (marl_pool.pretrained, pretrained):
        monkeypatch.setattr(module, "FOLDER", folder)
    monkeypatch.setattr(pretrained, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(pretrained, "PAGE", tmp_path / "page.md")
    monkeypatch.chdir(tmp_path)
    return folder


@yaml_cases("arguments, message")
def test_a_mistake_is_one_line(package, capsys, arguments, message):
    begun = compose("train", pretrained.stages("simple_push", Path("runs"))[-1].words)
    other = compose("train", ["env=lbforaging", "total_steps=8"])
    for name, config in (("simple_push", begun), ("lbforaging", other)):
        run = Run.create(f"runs/{name}", config)
        run.log({"iteration": 1, "env_steps": 8, "seconds": 1})
    files = {file: file.stat().st_mtime_ns for file in package.rglob("*")}
    with pytest.raises(SystemExit) as caught:
        pretrained.main(arguments.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert files == {file: file.stat().st_mtime_ns for file in package.rglob("*")}


@pytest.mark.slow
def test_what_is_trained_ships_with_a_card_and_is_measured_again(
    package, monkeypatch, capsys
):
    monkeypatch.setitem(pretrained.COMMANDS, "talk", (f"{pretrained.TRAIN}{TINY}",))
    monkeypatch.setattr(pretrained, "EPISODES", 2)
    pretrained.main(["train", "runs", "talk"])
    assert pretrained.main(["ship", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(package / "talk")
    card = PretrainedCard.read(package / "talk")
    assert (card.env_steps, card.episodes) == (32, 2)
    assert {*card.groups} == {"speaker", "listener"}
    assert pretrained.main(["page"]) == 0
    assert "| [`talk`](#talk) |" in pretrained.PAGE.read_text(encoding="utf-8")
    # A finished training run is not repeated.
    commits = pretrained.commits_file(package.parent / "runs", "talk")
    text = commits.read_text()
    pretrained.main(["train", "runs", "talk"])
    assert commits.read_text() == text
    # The facts about training are kept when the policy is measured again.
    monkeypatch.setattr(pretrained, "EPISODES", 3)
    pretrained.main(["card", "talk", "--replace"])
    again = PretrainedCard.read(package / "talk")
    assert (again.episodes, again.seconds) == (3, card.seconds)
    assert again.commit == card.commit
    pretrained.main(["ship", "runs", "talk", "--replace"])
    assert PretrainedCard.read(package / "talk").episodes == 3
