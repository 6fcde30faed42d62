"""Several episodes in one picture: in step, complete, and each its own."""

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.videos import ENV, STEPS, centroid, policy_for, read
from marl_pool.cli.main import main
from marl_pool.envs import make_batched_env
from marl_pool.evaluation.settings import RenderSettings
from marl_pool.evaluation.video.frames import GAP, grid_frames
from marl_pool.evaluation.video.render import render_run
from marl_pool.policies import make_policy
from marl_pool.policies.storage import save_policies
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run

SIZE = 96
HEADER = 18
"""Rows above a grid, where the number of the step is written."""
SETTINGS = RenderSettings(size=SIZE, threads=1)


def make_run(path: Path, pooling: str = "ada", env: dict[str, Any] = ENV) -> Run:
    run = Run.create(path, {"env": env, "seed": 5})
    (group,) = make_batched_env(num_envs=1, **env).groups.values()
    policy = make_policy(group.tokens, group.action_space, pooling=pooling, seed=1)
    save_policies({"one": policy}, {"agent": "one"}, run.policy_dir)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")


def counting(length: int, color: int) -> Iterator[np.ndarray]:
    """Frames of one pixel colour, which counts."""
    return (np.full((2, 2, 3), color + i, np.uint8) for i in range(length))


def test_tiles_go_on_together_and_wait_for_the_longest() -> None:
    grid = [[counting(2, 10), counting(4, 20)], [counting(3, 30), counting(1, 40)]]
    images = list(grid_frames(grid))
    far = 2 + GAP
    corners = [
        [int(image[y, x, 0]) for y, x in ((0, 0), (0, far), (far, 0), (far, far))]
        for image in images
    ]
    assert corners == [
        [10, 20, 30, 40],
        [11, 21, 31, 40],
        [11, 22, 32, 40],
        [11, 23, 32, 40],
    ]
    assert (images[0][2:far] == 255).all()
    assert images[0].shape == (4 + GAP, 4 + GAP, 3)


def test_moments_are_those_of_whole_episodes() -> None:
    env = centroid(3)
    rollout = Rollout(env, {"agent": policy_for(env)})
    moment_rewards: list[torch.Tensor] = []
    whole = rollout.episodes(lambda m: moment_rewards.append(m.step.rewards["agent"]))
    transitions = Rollout(centroid(3), {"agent": policy_for(env)}).transitions()
    rewards = [transition.step.rewards["agent"] for transition in transitions]
    for reward, expected in zip(rewards, moment_rewards, strict=True):
        assert torch.equal(reward, expected)
    total = torch.stack(rewards).sum(0, dtype=torch.float64)
    assert torch.equal(total, whole.returns["agent"])


def test_a_video_of_clean_and_perturbed_envs(run: Run) -> None:
    occlude = {"name": "occlude", "severity": 1.0}
    settings = replace(SETTINGS, beside_clean=True, rows=2)
    path = render_run(run, settings, perturbation=occlude)
    images = read(path)
    assert len(images) == STEPS + 1
    assert images[0].shape[1] == 2 * SIZE + GAP
    images = [image[HEADER:] for image in images]
    alone, width = [image[HEADER:] for image in read(render_run(run, SETTINGS))], SIZE
    # Frames went through a lossy codec, so they are compared roughly.
    for pair, single in zip(images, alone, strict=True):
        corner = pair[:width, :width].astype(int)
        assert np.abs(corner - single[:width]).mean() < 6
    # Both start alike and only the perturbed one plays on otherwise.
    side = width + GAP
    last = images[-1].astype(int)
    assert np.abs(last[:width, :width] - last[:width, side : side + width]).mean() > 0.5


def test_episodes_of_rows_do_not_repeat(run: Run) -> None:
    images = read(render_run(run, replace(SETTINGS, rows=2, episodes=2)))
    assert len(images) == 2 * (STEPS + 1)
    half = SIZE
    starts = [images[0][HEADER:], images[STEPS + 1][HEADER:]]
    tops = [image[:half].astype(int) for image in starts]
    bottoms = [
        image[-image.shape[0] // 2 :][: half // 2].astype(int) for image in starts
    ]
    assert np.abs(tops[0] - tops[1]).mean() > 0.5
    assert np.abs(bottoms[0] - bottoms[1]).mean() > 0.5


def test_several_runs_are_columns(
    run: Run, tmp_path: Path, refused: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    second_run = make_run(tmp_path / "other", "max")
    out = tmp_path / "both"
    options = ["perturbation=rewire", f"size={SIZE}", "--out", str(out)]
    command = ["render", str(run.path), str(second_run.path), *options]
    assert main(command) == 0
    (video,) = out.iterdir()
    assert video.name == "rewire.webm"
    assert capsys.readouterr().out.strip() == str(video)
    assert read(video)[0].shape[1] == 2 * SIZE + GAP
    assert f"{out} exists; choose another --out" in refused(*command)
    assert not list(run.path.glob("videos/*"))


def test_runs_of_unlike_length_are_shown_to_the_end(run: Run, tmp_path: Path) -> None:
    longer = make_run(tmp_path / "long", env={**ENV, "max_steps": STEPS + 4})
    out = tmp_path / "both"
    paths = [str(run.path), str(longer.path)]
    assert main(["render", *paths, f"size={SIZE}", "--out", str(out)]) == 0
    assert len(read(out / "clean.webm")) == STEPS + 5


@pytest.mark.parametrize("suffix", ["webm", "mp4", "gif", "webp"])
def test_a_full_disk_leaves_no_half_video(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "film"
    words = ["render", str(run.path), f"size={SIZE}", "--format", suffix]
    # Stands for a disk with little space left, of which OpenCV would not tell.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        assert main([*words, "--out", str(out)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"marl-pool: {out}/clean.{suffix}: ")
    assert line.endswith("the disk may be full") or line.endswith("File too large")
    assert not out.exists()


def test_the_format_is_a_flag(run: Run, refused: Any) -> None:
    options = ["render", str(run.path), f"size={SIZE}", "threads=1", "--format"]
    assert main([*options, "gif"]) == 0
    (video,) = run.path.glob("videos/*")
    assert video.name == "clean.gif"
    message = "format: expected webm, mp4, gif or webp, got 'avi'"
    assert message in refused(*options, "avi")
