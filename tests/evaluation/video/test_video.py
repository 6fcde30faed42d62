"""Videos: what a frame shows, and files that a browser's codec can read back."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from helpers.farm import FoxAndHens
from helpers.pictures import read_video
from helpers.tables import yaml_cases
from helpers.videos import PLACES, STEPS, centroid, make_run, policy_for
from marl_pool.envs import make_batched_env
from marl_pool.envs.drawing.canvas import PAPER
from marl_pool.evaluation.settings import RenderSettings
from marl_pool.evaluation.video.frames import (
    Caption,
    with_caption,
    with_steps,
    write_frames,
)
from marl_pool.evaluation.video.render import (
    attention_of,
    episode_frames,
    first_env,
    render_run,
)
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.perception import Mark, Perception
from marl_pool.policies import make_policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys

HEADS = {"name": "ada", "num_heads": 4}


# Attention


INJECT = {"token_type": 3, "position_features": [0, 1]}


def perceive(
    perturbation: Perturbation | None, pooling: Any = "ada", head: Any = "mean"
) -> tuple[torch.Tensor | None, Perception]:
    """Return the attention to an observation, perturbed or not, and the latter."""
    env = centroid()
    policy = policy_for(env, pooling)
    env.reset()
    true = tokens = env.observe()["agent"]
    perceived = Perception.compare(true, true, torch.arange(PLACES).view(1, 1, -1), "")
    if perturbation is not None:
        keys = stream_keys(0, env.env_ids, env.episodes, Purpose.PERTURBATION)
        tokens, state = perturbation(tokens, perturbation.start(tokens, keys))
        perceived = perturbation.perceive(true, tokens, state)
    return attention_of(policy, tokens, head=head), perceived.at((0, 0))


def by_origin(perturbation: Perturbation | None, head: Any = "mean") -> torch.Tensor:
    pooling = "ada" if head == "mean" else HEADS
    weights, perceived = perceive(perturbation, pooling, head)
    assert weights is not None
    assert weights.shape == perceived.origin.shape
    return perceived.by_origin(weights)


def test_attention_under_a_shuffle_is_that_of_the_same_entities() -> None:
    clean, shuffled = by_origin(None), by_origin(make_perturbation("shuffle"))
    assert clean.std() > 1e-3
    torch.testing.assert_close(clean, shuffled)
    assert float(clean.sum()) == pytest.approx(1)


def test_attention_on_crossed_wires_goes_to_where_the_features_came_from() -> None:
    weights, perceived = perceive(make_perturbation("rewire"))
    assert weights is not None
    source_weights, true = perceived.by_origin(weights), perceived.true.features
    for place, features in enumerate(perceived.seen.features):
        source = (true == features).all(-1).nonzero().item()
        assert source_weights[source] == weights[place]


def test_attention_on_injected_tokens_is_counted_apart() -> None:
    weights, perceived = perceive(make_perturbation("inject", count=5, **INJECT))
    assert weights is not None
    share = float(weights[perceived.injected].sum())
    assert 0 < share < 1
    assert float(perceived.by_origin(weights).sum()) + share == pytest.approx(1)


def test_nothing_attends_to_occluded_tokens() -> None:
    weights = by_origin(make_perturbation("occlude", severity=1.0))
    assert weights.tolist() == [1.0, *[0.0] * (PLACES - 1)]


def test_one_head_or_the_mean_of_all() -> None:
    heads = [by_origin(None, head) for head in range(4)]
    assert not torch.allclose(heads[0], heads[1])
    mean, _ = perceive(None, HEADS, "mean")
    torch.testing.assert_close(mean, torch.stack(heads).mean(0))
    for head in (4, -1, "first"):
        with pytest.raises(InputError, match="head: expected mean or 0 to 3, got"):
            perceive(None, HEADS, head)


def test_a_pooling_head_without_weights_has_no_attention() -> None:
    assert perceive(None, "max")[0] is None
    tokens = centroid().observe()["agent"]
    random = RandomPolicy(centroid().groups["agent"].action_space)
    assert attention_of(random, tokens) is None


# Frames


def frames(
    perturbation: Perturbation | None = None, pooling: Any = "ada", **options: Any
) -> list[np.ndarray]:
    env = centroid()
    policies = {"agent": policy_for(env, pooling)}
    rollout = Rollout(env, policies, perturbation=perturbation)
    return list(episode_frames(rollout, **{"size": 96, **options}))


@pytest.fixture
def captions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The lines that are written below frames, in place of the frames' captions."""
    written: list[tuple[str, ...]] = []

    def note(image: np.ndarray, caption: Caption) -> np.ndarray:
        written.append(tuple(caption.lines))
        return image

    monkeypatch.setattr("marl_pool.evaluation.video.render.with_caption", note)
    return written


def pictures(images: list[np.ndarray]) -> list[np.ndarray]:
    """The frames without the text below."""
    return [image[:96] for image in images]


def test_a_frame_shows_the_env_in_which_the_policy_decided() -> None:
    env = centroid()
    policy = policy_for(env)
    env.reset()
    expected = []
    with torch.no_grad():
        for _ in range(STEPS):
            tokens = env.observe()["agent"]
            weights = attention_of(policy, tokens)
            expected.append(env.frame(attention=weights, group="agent", size=96))
            env.step({"agent": policy.scale(policy.act(tokens).action)})
    expected.append(env.frame(size=96))
    images = frames()
    assert {(image.shape, image.dtype) for image in images} == {
        ((len(images[0]), 96, 3), np.dtype(np.uint8))
    }
    for image, reference in zip(pictures(images), expected, strict=True):
        np.testing.assert_array_equal(image, reference)


def test_a_shuffled_episode_of_an_invariant_head_looks_the_same() -> None:
    clean = pictures(frames())
    shuffled = pictures(frames(make_perturbation("shuffle", every=2)))
    np.testing.assert_array_equal(clean, shuffled)
    crossed = pictures(frames(make_perturbation("rewire")))
    assert (clean[0] != crossed[0]).any()


def test_attention_is_drawn_only_if_asked_for_and_known() -> None:
    marked, bare = (pictures(frames(head=head)) for head in ("mean", None))
    assert all((a != b).any() for a, b in zip(marked[:-1], bare[:-1], strict=True))
    np.testing.assert_array_equal(marked[-1], bare[-1])
    assert len(frames(pooling="max")) == STEPS + 1


def test_text_is_written_below() -> None:
    plain, captioned = frames(), frames(text="rewire")
    assert all((a != b).any() for a, b in zip(plain, captioned, strict=True))
    for a, b in zip(pictures(plain), pictures(captioned), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "options"), [("action_noise", {}), ("drop_actions", {"instead": "zero"})]
)
def test_changed_actions_are_written_below(name, options, captions) -> None:
    frames(make_perturbation(name, severity=1.0, onset=2, end=4, **options))
    changed = ["action off by " in line for _, _, line in captions]
    # The last frame shows the final state, which no action follows.
    assert changed == [2 <= step < 4 for step in range(STEPS)] + [False]


def test_an_action_that_is_only_clipped_is_not_called_changed(captions: Any) -> None:
    policy = policy_for(centroid())
    with torch.no_grad():
        for parameter in policy.action_head.parameters():  # type: ignore[union-attr]
            parameter.mul_(20.0)
    # Far too rare to happen, but every action passes through it.
    drop = make_perturbation("drop_actions", severity=1e-12)
    played, drawn = (
        Rollout(centroid(), {"agent": policy}, perturbation=drop) for _ in range(2)
    )
    pairs = [(s.actions["agent"], s.executed["agent"]) for s in played.transitions()]
    assert not all(action.equal(executed) for action, executed in pairs)
    list(episode_frames(drawn, size=96))
    assert not any("action" in line for _, _, line in captions)


def test_the_return_so_far_is_that_of_the_steps_before(captions: Any) -> None:
    inject = make_perturbation("inject", severity=0.5, **INJECT)
    frames(inject)
    env = centroid()
    rollout = Rollout(env, {"agent": policy_for(env)}, perturbation=inject)
    total = float(rollout.episodes().returns["agent"])
    first, *_, last = (line for _, _, line in captions)
    assert first.startswith("step 0   return 0.000   attention on injected ")
    assert last == f"step {STEPS}   return {total:.3f}"


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_selected_token_is_marked(captions: Any, shuffled: bool) -> None:
    shuffle = make_perturbation("shuffle", severity=1.0) if shuffled else None

    def rollout() -> Rollout:
        env = make_batched_env("lbforaging", 1, choices="food", max_steps=12)
        group = env.groups["agent"]
        policy = make_policy(group.tokens, group.action_space, action="select", seed=0)
        return Rollout(env, {"agent": policy}, explore=True, perturbation=shuffle)

    images = list(episode_frames(rollout(), size=160, head=None))
    twin, selects = rollout(), []
    env = first_env(twin.env)
    for image, transition in zip(images, twin.transitions(), strict=False):
        slot = int(transition.executed["agent"][0, 0]) - 1
        selects.append(slot >= 0)
        plain = env.frame(size=160)
        assert np.array_equal(image, plain) == (slot < 0)
        if slot >= 0:
            tokens = env.observe()["agent"].map(lambda part: part[0, 0])
            glyphs = env.glyphs(tokens, 0, group="agent", agent=0, size=160)
            x, y = (glyphs.places[slot] + [glyphs.radii[slot] + 4, 0]).round()
            assert image[int(y), int(x)].max() < plain[int(y), int(x)].min()
        env = first_env(transition.env)
    assert {True, False} == set(selects)
    assert ["selects food" in line for _, _, line in captions] == [*selects, False]
    # The same token at another place is the same choice.
    assert not any("action" in line for _, _, line in captions)


@pytest.mark.parametrize("size", [64, 65, 301])
def test_captions_make_a_higher_image_of_even_sides(size: int) -> None:
    image = np.random.default_rng(0).integers(0, 255, (size, size, 3), np.uint8)
    framed = with_caption(image, Caption(("one", "two")))
    assert framed.shape[0] % 2 == framed.shape[1] % 2 == 0
    assert framed.shape[0] > size
    np.testing.assert_array_equal(framed[:size, :size], image)
    assert (framed[size:] != with_caption(image, Caption(("", "")))[size:]).any()


@pytest.mark.parametrize("size", [200, 400, 512, 641])
@pytest.mark.parametrize("legend_rows", [0, 2])
def test_no_letter_is_cut_at_the_lower_edge(size: int, legend_rows: int) -> None:
    blank = np.full((size, size, 3), PAPER, np.uint8)
    legend = {Mark.HIDDEN, Mark.ALTERED} if legend_rows else set()
    caption = Caption(("jpgqy", "jpgqy"), "jpgqy", legend, legend_rows)
    framed = with_caption(blank, caption)
    written = (framed[size:] != PAPER).any((1, 2)).nonzero()[0]
    lowest = framed.shape[0] - size - 1 - written.max()
    assert lowest >= 2


def test_a_long_line_is_written_smaller() -> None:
    blank = np.full((96, 96, 3), 252, np.uint8)
    short, long = (with_caption(blank, Caption((n * "word ",))) for n in (1, 40))
    assert short.shape == long.shape
    assert (long[96:, 92:] == long[-1, -1]).all()


def test_the_step_is_written_once_above_a_whole_grid() -> None:
    blank = np.full((64, 96, 3), 252, np.uint8)
    numbered = list(with_steps(iter([blank] * 3)))
    heads = [image[:-64] for image in numbered]
    assert len(heads[0]) % 2 == 0
    assert (heads[0] != heads[1]).any()
    assert (heads[1] != heads[2]).any()
    for image in numbered:
        np.testing.assert_array_equal(image[-64:], blank)


# Files


def test_a_file_holds_the_frames_in_their_colors(tmp_path, capfd):
    colors = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
    plain = (np.full((64, 96, 3), color, np.uint8) for color in colors)
    write_frames(tmp_path / "a.webm", plain, fps=7)
    assert capfd.readouterr().err == ""
    images = read_video(tmp_path / "a.webm")
    assert [image.shape for image in images] == [(64, 96, 3)] * 3
    for image, color in zip(images, colors, strict=True):
        assert np.abs(image.astype(int) - color).mean() < 10
    assert cv2.VideoCapture(str(tmp_path / "a.webm")).get(cv2.CAP_PROP_FPS) == 7
    # The signature of Matroska, and the codec's name.
    content = (tmp_path / "a.webm").read_bytes()
    assert content.startswith(b"\x1aE\xdf\xa3")
    assert b"V_VP8" in content


def test_mp4_is_vp9(tmp_path: Path) -> None:
    write_frames(tmp_path / "a.mp4", [np.full((64, 96, 3), 90, np.uint8)] * 3, fps=10)
    assert len(read_video(tmp_path / "a.mp4")) == 3
    assert b"vp09" in (tmp_path / "a.mp4").read_bytes()


@pytest.mark.parametrize(
    ("suffix", "fps", "duration"),
    [
        *[("gif", 20, 50), ("gif", 15, 70), ("gif", 30, 30), ("gif", 250, 20)],
        *[("webp", 20, 50), ("webp", 15, 67)],
    ],
)
def test_animations_repeat_at_their_speed(tmp_path, suffix, fps, duration) -> None:
    path = tmp_path / f"a.{suffix}"
    grays = [40, 120, 200]
    write_frames(path, (np.full((64, 96, 3), g, np.uint8) for g in grays), fps=fps)
    with Image.open(path) as image:
        assert (image.format, image.size) == (suffix.upper(), (96, 64))
        assert image.n_frames == len(grays)  # type: ignore[attr-defined]
        assert image.info["loop"] == 0
        for frame, gray in enumerate(grays):
            image.seek(frame)
            image.load()
            assert image.info["duration"] == duration
            assert np.abs(np.asarray(image.convert("L")).astype(int) - gray).max() < 8


def test_a_failed_video_leaves_no_file(tmp_path: Path) -> None:
    def interrupted() -> Iterator[np.ndarray]:
        yield np.zeros((64, 64, 3), np.uint8)
        assert list(tmp_path.iterdir()) != []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_frames(tmp_path / "a.webm", interrupted(), fps=10)
    assert list(tmp_path.iterdir()) == []
    # Without frames no video is written.
    write_frames(tmp_path / "a.webm", [], fps=10)
    assert list(tmp_path.iterdir()) == []


# Runs


SETTINGS = RenderSettings(size=96, fps=10, threads=1)
NONE = {"name": "none"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")


def test_a_run_is_rendered_and_nothing_overwritten(run: Run) -> None:
    first = render_run(run, SETTINGS, perturbation=NONE)
    before = first.read_bytes()
    second = render_run(run, replace(SETTINGS, episodes=2, stochastic=True))
    assert [first.name, second.name] == ["clean.webm", "clean-2.webm"]
    assert first.parent == second.parent == run.path / "videos"
    assert first.read_bytes() == before
    images, more_images = read_video(first), read_video(second)
    assert (len(images), len(more_images)) == (STEPS + 1, 2 * (STEPS + 1))
    assert images[0].shape[1] == 96


def test_a_perturbation_names_the_file_and_is_written_in_it(run, captions):
    inject = {"name": "inject", "token_type": "noise", "severity": 0.5}
    path = render_run(run, replace(SETTINGS, episodes=2), perturbation=inject)
    assert path.name == "inject.webm"
    assert not any("step" in line for lines in captions for line in lines)
    assert {lines[:2] for lines in captions} == {
        ("run (ada)", f"episode {number} of 2   inject token_type=noise   severity 0.5")
        for number in (1, 2)
    }


@yaml_cases("perturbation, change, message")
def test_bad_settings_leave_no_file(run, perturbation, change, message):
    with pytest.raises(InputError, match=message):
        render_run(run, replace(SETTINGS, **change), perturbation=perturbation)
    assert not list(run.path.glob("videos/*"))


def test_an_env_that_cannot_be_drawn() -> None:
    env = FoxAndHens(1)
    policies = {name: RandomPolicy(g.action_space) for name, g in env.groups.items()}
    with pytest.raises(InputError, match="FoxAndHens .*does not define draw"):
        list(episode_frames(Rollout(env, policies)))
