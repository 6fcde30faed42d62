"""Every environment from the command line: train, evaluate, render."""

import csv

import pytest

pytest.importorskip("ray")

from helpers.pictures import read_video, share_beside_background
from helpers.training import RAY_WARNINGS
from marl_pool.cli.main import main
from marl_pool.envs import env_names, make_batched_env

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), *RAY_WARNINGS]

SMALL = [
    *("env.max_steps=8", "encoder=transformer", "encoder.num_layers=1", "ppo=fast"),
    *("ppo.num_envs=2", "ppo.minibatch_size=16", "ppo.num_epochs=1", "total_steps=32"),
    "threads=1",
]
EXTRA = {"pettingzoo": ["env.module=mpe2.simple_spread_v3"]}
PLUGINS = {"pettingzoo": ["--plugin", "mpe2.simple_spread_v3"]}


def batch_size(name):
    """Return the steps of all agents in 32 steps of the environment."""
    options = dict(
        option.removeprefix("env.").split("=") for option in EXTRA.get(name, ())
    )
    groups = make_batched_env(name, 1, **options).groups
    return 32 * sum(group.num_agents for group in groups.values())


@pytest.mark.parametrize("name", env_names())
def test_every_env_trains_evaluates_and_renders(name, tmp_path, capsys):
    run, batch = tmp_path / "run", batch_size(name)
    arguments = [f"env={name}", *EXTRA.get(name, []), *SMALL, f"ppo.batch_size={batch}"]
    assert main(["train", *arguments, "--run-dir", str(run)]) == 0
    with (run / "metrics.csv").open() as lines:
        assert [row["env_steps"] for row in csv.DictReader(lines)] == ["32"]
    plugins = PLUGINS.get(name, [])
    quick = ["suite=quick", "episodes=2", "threads=1"]
    assert main(["evaluate", str(run), *quick, *plugins]) == 0
    assert (run / "evaluation").is_dir()
    assert main(["render", str(run), "size=96", "threads=1", *plugins]) == 0
    (video,) = (run / "videos").iterdir()
    frames = read_video(video)
    assert frames
    assert all(share_beside_background(frame, 30) > 0.02 for frame in frames)
    assert str(video) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "has_number"),
    [("simple_spread", True), ("simple_world_comm", True), ("mpev2_tag", False)],
)
def test_teams_change_in_the_suite_of_population(name, has_number, tmp_path):
    run, batch = tmp_path / "run", batch_size(name)
    sizes = [*SMALL, "env.max_steps=16", f"ppo.batch_size={batch}"]
    assert main(["train", f"env={name}", *sizes, "--run-dir", str(run)]) == 0
    suite = ["suite=population", "episodes=4", "threads=1"]
    assert main(["evaluate", str(run), *suite]) == 0
    with (run / "evaluation" / "results.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    reasons = {row["label"]: row["missing"] for row in rows if row["label"] != "clean"}
    changes = {"1 arrives", "2 arrive", "4 arrive", "1 leaves", "1 is replaced"}
    larger = {"4 agents", "1 of 4 leaves", "3 of 4 leave", "2 of 4 are replaced"}
    assert reasons.keys() == changes | larger
    assert not any(reasons[label] for label in changes)
    assert all(
        not reasons[label] if has_number else "num_agents" in reasons[label]
        for label in larger
    )
