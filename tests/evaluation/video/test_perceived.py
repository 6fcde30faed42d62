"""Perturbations leave their marks: in the record, the picture and the legend."""

from typing import Any

import numpy as np
import pytest
import torch

from helpers.perturbed import OBSERVED
from helpers.videos import centroid, policy_for
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.canvas import PAPER
from marl_pool.envs.drawing.marks import DRAWERS, draw_perceived_patches
from marl_pool.envs.patches import PatchGrid
from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.video import frames, render
from marl_pool.evaluation.video.frames import Caption, with_caption
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.perception import Mark, Perception
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Purpose, stream_keys

SIZE = 128
ENVS: dict[str, dict[str, Any]] = {
    "centroid": {"name": "simple_centroid", "num_noise": 4},
    "tag": {"name": "simple_tag", "num_obstacles": 4},
    "entities": {"name": "boxworld"},
    "pixels": {"name": "boxworld", "observation": "pixels"},
}
MARKS = {
    "bias": Mark.ALTERED,
    "confuse": Mark.RETYPED,
    "delay": Mark.ALTERED,
    "duplicate": Mark.REPEATED,
    "freeze": Mark.ALTERED,
    "inject": Mark.INJECTED,
    "jitter": Mark.ALTERED,
    "occlude": Mark.HIDDEN,
    "rewire": Mark.RETYPED,
    "scale": Mark.ALTERED,
    "shuffle": Mark.REORDERED,
}
"""The mark that each perturbation leaves, perhaps among others."""


def perceive(name: str, env: BatchedEnv, **options: Any) -> Perception:
    """Observe a moving environment through a perturbation for 4 steps."""
    if name == "inject":
        options["token_type"] = 2
    perturbation = perturb({"name": name, **options}, env)
    (group, agent_group) = next(iter(env.groups.items()))
    env.reset()
    keys = stream_keys(0, env.env_ids, env.episodes, Purpose.PERTURBATION)
    state = perturbation.start(env.observe()[group], keys)
    space = agent_group.action_space
    action = space.high if space.shape else np.array(1)
    actions = torch.as_tensor(action).expand(1, agent_group.num_agents, *action.shape)
    for _ in range(4):
        true = env.observe()[group]
        output, state = perturbation(true, state)
        perceived = perturbation.perceive(true, output, state).at((0, 0))
        if int(env.steps) == 3:
            break  # the environment stays as it was perceived
        env.step({group: actions})
    return perceived


def unperturbed(perceived: Perception) -> Perception:
    identity = torch.arange(perceived.true.num_tokens)
    return Perception.compare(perceived.true, perceived.true, identity, "")


def slots(perceived: Perception) -> np.ndarray:
    """The row of tokens below a blank picture."""
    blank = np.full((SIZE, SIZE, 3), PAPER, np.uint8)
    return with_caption(blank, Caption((), perception=perceived))


def test_every_perturbation_and_every_mark_is_tested() -> None:
    missing = {*OBSERVED} - {*MARKS}
    assert not missing, f"add {', '.join(sorted(missing))} to MARKS"
    assert {*MARKS} == {*OBSERVED}
    assert set(MARKS.values()) == set(Mark) == set(DRAWERS)


@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("name", MARKS)
def test_each_perturbation_leaves_its_mark(name: str, kind: str) -> None:
    env = make_batched_env(num_envs=1, seed=2, **ENVS[kind])
    perceived = perceive(name, env)
    assert MARKS[name] in perceived.marks()
    assert perceived.label not in ("", Perturbation.label)
    # An order, and repetitions of the very same token, are shown by the row as well.
    image = env.frame(size=SIZE, perception=perceived)
    if MARKS[name] is Mark.REORDERED:
        np.testing.assert_array_equal(image, env.frame(size=SIZE))
    else:
        assert (image != env.frame(size=SIZE)).any()
    if kind in ("centroid", "tag") and name != "confuse":
        assert slots(perceived).shape == slots(unperturbed(perceived)).shape
        assert (slots(perceived) != slots(unperturbed(perceived))).any()


@pytest.mark.parametrize("name", MARKS)
def test_without_severity_there_is_no_mark(name: str) -> None:
    env = make_batched_env(num_envs=1, seed=2, **ENVS["centroid"])
    perceived = perceive(name, env, severity=0.0)
    assert perceived.marks() == {}
    plain = env.frame(size=SIZE)
    np.testing.assert_array_equal(env.frame(size=SIZE, perception=perceived), plain)


def test_a_dead_sensor_is_crossed_out_and_seen_at_the_observer() -> None:
    env = make_batched_env(num_envs=1, seed=2, **ENVS["centroid"])
    perceived = perceive("occlude", env, mode="zero", severity=0.5)
    marks = perceived.marks()
    assert marks.keys() == {Mark.HIDDEN, Mark.ALTERED}
    assert torch.equal(marks[Mark.HIDDEN], marks[Mark.ALTERED])


def test_a_ghost_stands_where_its_features_say() -> None:
    env = centroid()
    perceived = perceive("freeze", env, severity=1.0)
    true, ghost = (
        env.glyphs(tokens, 0, group="agent", agent=0, size=SIZE)
        for tokens in (perceived.true, perceived.seen)
    )
    assert true is not None
    assert ghost is not None
    assert ghost.observer is not None
    # Positions are relative to the observer, which has moved since they froze.
    scale = SIZE / (2 * env.extent)  # type: ignore[attr-defined]
    offsets = 5 * scale * perceived.seen.features[:, :2].numpy() * (1, -1)
    np.testing.assert_allclose(ghost.places, ghost.observer + offsets, atol=1e-3)
    assert np.abs(ghost.places[1:] - true.places[1:]).max() > 0.5
    # The true places are where the entities stand.
    entities = env.token_entities("agent")[0]  # type: ignore[attr-defined]
    x, y = (env.state[0, entities, :2] * scale).T.numpy()  # type: ignore[attr-defined]
    middle = SIZE / 2 - 0.5
    expected = np.stack((middle + x, middle - y), 1)
    np.testing.assert_allclose(true.places, expected, atol=1e-3)


def test_lines_lead_to_injected_tokens() -> None:
    env = centroid()
    perceived = perceive("inject", env, place="near", spread=0.4)
    (injected,) = perceived.injected.nonzero().T
    weights = torch.eye(perceived.seen.num_tokens)[injected[0]]
    lines = env.frame(size=SIZE, perception=perceived, attention=weights)
    plain = env.frame(size=SIZE, perception=perceived)
    assert (lines != plain).any()


def test_patches_show_what_is_perceived_of_them() -> None:
    grid = PatchGrid(screen=12, patch=6, stride=6)
    true = torch.zeros(4, 2 * 36, dtype=torch.uint8)
    changed = true.clone()
    changed[1, 36:] = 200  # in the newest frame
    changed[2, :36] = 200  # in the oldest frame, which is not drawn
    padding = torch.tensor([False, False, False, True])
    types = torch.zeros(4, dtype=torch.int64)
    perceived = Perception.compare(
        Tokens(true, types, torch.zeros(4, dtype=torch.bool)),
        Tokens(changed, types, padding),
        torch.arange(4),
        "changed",
    )
    image = np.zeros((120, 120, 3), np.uint8)
    draw_perceived_patches(image, perceived, grid, num_frames=2)
    assert (image[:60, :60] == 0).all()
    assert (image[20:40, 80:100] == 200).all()
    assert (image[:5, 60:] == 0).all()  # its margin keeps the true picture
    assert (image[60:, :60] == 0).all()
    assert (image[60:, 60:] != 0).any()  # crossed out


@pytest.mark.parametrize("mark", Mark)
def test_the_legend_names_each_mark(mark, monkeypatch):
    texts: list[str] = []
    write = frames.write

    def note(image: np.ndarray, text: str, *arguments: Any) -> int:
        texts.append(text)
        return write(image, text, *arguments)

    monkeypatch.setattr(frames, "write", note)
    blank = np.full((400, 400, 3), PAPER, np.uint8)
    marked = with_caption(blank, Caption((), "frozen", {mark}, 1))
    assert texts == ["frozen:", mark.value]
    unmarked = with_caption(blank, Caption((), "", (), 1))
    assert (marked != unmarked).any()


def test_marks_stay_in_the_legend_once_they_occurred(monkeypatch):
    noted: list[set[Mark]] = []

    def note(image: np.ndarray, below: Caption) -> np.ndarray:
        noted.append(set(below.legend))
        assert below.label == "frozen"
        return image

    monkeypatch.setattr(render, "with_caption", note)
    env = centroid()
    freeze = perturb({"name": "freeze", "severity": 1.0, "every": 2}, env)
    rollout = Rollout(env, {"agent": policy_for(env)}, perturbation=freeze)
    list(render.episode_frames(rollout, size=SIZE))
    # What has just frozen is perceived as it is.
    assert noted[0] == set()
    assert all(marks == {Mark.ALTERED} for marks in noted[1:])


@pytest.mark.parametrize(("pooling", "note"), [("ada", False), ("max", True)])
def test_the_head_is_named_and_noted_if_it_has_no_weights(pooling, note, monkeypatch):
    titles: list[str] = []

    def keep(image: np.ndarray, below: Caption) -> np.ndarray:
        titles.append(below.lines[0])
        return image

    monkeypatch.setattr(render, "with_caption", keep)
    env = centroid()
    rollout = Rollout(env, {"agent": policy_for(env, pooling)})
    list(render.episode_frames(rollout, source="my-run", size=SIZE))
    (title,) = set(titles)
    assert title.startswith(f"my-run ({pooling})")
    assert title.endswith("no attention weights") == note
