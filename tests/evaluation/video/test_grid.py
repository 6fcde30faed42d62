"""Grids of several episodes: in step, complete and distinct."""

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.pictures import read_video
from helpers.videos import STEPS, make_run
from marl_pool.cli.main import main
from marl_pool.evaluation.settings import RenderSettings
from marl_pool.evaluation.video.frames import GAP, grid_frames, write_frames
from marl_pool.evaluation.video.render import render_run
from marl_pool.runs.run import Run

SIZE = 96
HEADER = 18
"""Rows above a grid, where the number of the step is written."""
SETTINGS = RenderSettings(size=SIZE, threads=1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")


def counting(length: int, color: int) -> Iterator[np.ndarray]:
    """Frames of one color each, which counts up."""
    return (np.full((2, 2, 3), color + i, np.uint8) for i in range(length))


def test_tiles_play_together_and_wait_for_the_longest() -> None:
    grid = [[counting(2, 10), counting(4, 20)], [counting(3, 30), counting(1, 40)]]
    images = list(grid_frames(grid))
    far = 2 + GAP
    corners = [image[::far, ::far, 0].flatten().tolist() for image in images]
    assert corners == [
        *([10, 20, 30, 40], [11, 21, 31, 40]),
        *([11, 22, 32, 40], [11, 23, 32, 40]),
    ]
    assert (images[0][2:far] == 255).all()
    assert images[0].shape == (4 + GAP, 4 + GAP, 3)


def test_a_video_of_clean_and_perturbed_envs(run: Run) -> None:
    occlude = {"name": "occlude", "severity": 1.0}
    settings = replace(SETTINGS, beside_clean=True, rows=2)
    path = render_run(run, settings, perturbation=occlude)
    images = read_video(path)
    assert len(images) == STEPS + 1
    assert images[0].shape[1] == 2 * SIZE + GAP
    images = [image[HEADER:] for image in images]
    clean = [image[HEADER:] for image in read_video(render_run(run, SETTINGS))]
    # Frames went through a lossy codec, so they are compared roughly.
    for pair, single in zip(images, clean, strict=True):
        corner = pair[:SIZE, :SIZE].astype(int)
        assert np.abs(corner - single[:SIZE]).mean() < 6
    # At the end, the perturbed episode is in another state.
    side, last = SIZE + GAP, images[-1].astype(int)
    assert np.abs(last[:SIZE, :SIZE] - last[:SIZE, side : side + SIZE]).mean() > 0.5


def test_episodes_of_rows_do_not_repeat(run: Run) -> None:
    images = read_video(render_run(run, replace(SETTINGS, rows=2, episodes=2)))
    assert len(images) == 2 * (STEPS + 1)
    starts = [image[HEADER:].astype(int) for image in (images[0], images[STEPS + 1])]
    tops = [image[:SIZE] for image in starts]
    bottoms = [image[-image.shape[0] // 2 :][: SIZE // 2] for image in starts]
    assert np.abs(tops[0] - tops[1]).mean() > 0.5
    assert np.abs(bottoms[0] - bottoms[1]).mean() > 0.5


def test_several_runs_are_columns(run, tmp_path, refused, capsys):
    second_run = make_run(tmp_path / "other", "max")
    out = tmp_path / "both"
    options = ["perturbation=rewire", f"size={SIZE}", "--out", str(out)]
    command = ["render", str(run.path), str(second_run.path), *options]
    assert main(command) == 0
    (video,) = out.iterdir()
    assert video.name == "rewire.webm"
    assert capsys.readouterr().out.strip() == str(video)
    assert read_video(video)[0].shape[1] == 2 * SIZE + GAP
    assert f"{out} exists; choose another --out" in refused(*command)
    assert not list(run.path.glob("videos/*"))


def test_columns_are_named_by_run_and_not_by_what_was_typed(run, tmp_path, monkeypatch):
    make_run(tmp_path / "other")
    shown = []

    def note(folder: Path, targets: dict[str, Any], *_: Any) -> Path:
        shown.extend(targets)
        return folder

    monkeypatch.setattr("marl_pool.evaluation.video.render.render_side_by_side", note)
    monkeypatch.chdir(run.path)
    paths = [".", "../other", "policy", "../other/policy/"]
    assert main(["render", *paths, "env=simple_centroid", "--out", "film"]) == 0
    assert shown == [run.name, "other", f"{run.name} (2)", "other (2)"]


def test_one_run_may_be_several_columns(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "thrice"
    paths = 3 * [str(run.path)]
    assert main(["render", *paths, f"size={SIZE}", "--out", str(out)]) == 0
    assert read_video(out / "clean.webm")[0].shape[1] == 3 * SIZE + 2 * GAP


def test_runs_of_unlike_length_are_shown_to_the_end(run: Run, tmp_path: Path) -> None:
    longer = make_run(tmp_path / "long", max_steps=STEPS + 4)
    out = tmp_path / "both"
    paths = [str(run.path), str(longer.path)]
    assert main(["render", *paths, f"size={SIZE}", "--out", str(out)]) == 0
    assert len(read_video(out / "clean.webm")) == STEPS + 5


@pytest.mark.parametrize("suffix", ["webm", "mp4", "gif", "webp"])
def test_a_full_disk_leaves_no_half_video(run, tmp_path, capsys, suffix):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "film"
    words = ["render", str(run.path), f"size={SIZE}", "--format", suffix]
    # Simulates a nearly full disk, which OpenCV would not report.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        assert main([*words, "--out", str(out)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"marl-pool: {out}/clean.{suffix}: ")
    assert line.endswith("the disk may be full") or line.endswith("File too large")
    assert not out.exists()


def test_opencv_is_silent_on_a_full_disk(tmp_path, capfd):
    """It warns at every frame, unless the frames fit in its buffer."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 256, 256, 3), np.uint8)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="not all frames could be written"):
            write_frames(tmp_path / "noise.webm", noise, fps=10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capfd.readouterr().err == ""


def test_the_format_is_a_flag(run: Run, refused: Any) -> None:
    options = ["render", str(run.path), f"size={SIZE}", "threads=1", "--format"]
    assert main([*options, "gif"]) == 0
    (video,) = run.path.glob("videos/*")
    assert video.name == "clean.gif"
    message = "format: expected webm, mp4, gif or webp, got 'avi'"
    assert message in refused(*options, "avi")
