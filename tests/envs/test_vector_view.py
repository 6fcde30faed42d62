"""Gymnasium's vector view of a batch of environments."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import marl_pool.envs
from marl_pool.envs import make_batched_env
from marl_pool.envs.vector_view import OneAgentVectorView
from marl_pool.utils.errors import InputError

CENTROID = "marl_pool/simple_centroid-v0"
NUM_ENVS, STEPS = 3, 9


def actions(view: OneAgentVectorView, steps: int = STEPS) -> np.ndarray:
    view.action_space.seed(5)
    return np.stack([view.action_space.sample() for _ in range(steps)])


def test_make_vec_builds_the_view_and_takes_options():
    view = gymnasium.make_vec(CENTROID, num_envs=NUM_ENVS, counts="1-2-1")
    assert isinstance(view.unwrapped, OneAgentVectorView)
    assert view.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    observations, infos = view.reset(seed=1)
    assert view.observation_space.contains(observations)
    assert observations["features"].shape == (NUM_ENVS, 4, 4)
    assert infos == {}


def test_vector_view_plays_the_episodes_of_the_batched_env():
    options = {"counts": "1-2-1", "max_steps": 4}
    view = OneAgentVectorView("simple_centroid", NUM_ENVS, **options)
    env = make_batched_env("simple_centroid", NUM_ENVS, seed=7, **options)
    first, _ = view.reset(seed=7)
    env.reset()
    assert np.array_equal(first["features"], env.observe()["agent"].features[:, 0])
    for action in actions(view):
        observed, rewards, terminated, truncated, infos = view.step(action)
        step = env.step({"agent": torch.from_numpy(action)[:, None]})
        last = env.observe()["agent"].features[:, 0]
        over = step.terminated | step.truncated
        assert np.array_equal(rewards, step.rewards["agent"][:, 0].double())
        assert np.array_equal(terminated, step.terminated)
        assert np.array_equal(truncated, step.truncated)
        assert ("final_obs" in infos) == bool(over.any())
        if over.any():
            assert np.array_equal(infos["_final_obs"], over)
            for row, final in enumerate(infos["final_obs"]):
                assert np.array_equal(final["features"], last[row])
            env.reset(over)
        expected = env.observe()["agent"].features[:, 0]
        assert np.array_equal(observed["features"], expected)


def test_reset_with_a_seed_repeats_and_without_one_continues():
    view = OneAgentVectorView("simple_centroid", NUM_ENVS)
    first, _ = view.reset(seed=3)
    repeat, _ = view.reset(seed=3)
    following, _ = view.reset()
    assert np.array_equal(first["features"], repeat["features"])
    assert not np.array_equal(first["features"], following["features"])
    resets = [OneAgentVectorView("simple_centroid", 1).reset()[0] for _ in range(2)]
    assert not np.array_equal(resets[0]["features"], resets[1]["features"])


def test_writing_into_observations_does_not_change_the_env():
    view = OneAgentVectorView("simple_centroid", NUM_ENVS)
    observed, _ = view.reset(seed=3)
    observed["features"][:] = 0
    action = actions(view, 1)[0]
    changed = view.step(action)[0]
    view.reset(seed=3)
    assert np.array_equal(changed["features"], view.step(action)[0]["features"])


def test_a_mask_that_the_space_lacks_is_in_the_infos():
    view = OneAgentVectorView("simple_centroid", 2, seed=0, continuous_actions=False)
    observe, mask = view.env.observe, torch.tensor([True, False, True, True, True])

    def masked():
        tokens = observe()["agent"]
        return {"agent": tokens._replace(action_mask=mask.expand(2, 1, -1))}

    view.env.observe = masked
    observations, infos = view.reset()
    assert view.observation_space.contains(observations)
    later, *_, infos_later = view.step(np.array([0, 4]))
    assert later.keys() == observations.keys()
    for parts in (infos, infos_later):
        assert parts["action_mask"].tolist() == [mask.int().tolist()] * 2
        assert parts["_action_mask"].all()


def test_environments_cannot_be_reset_by_a_mask():
    view = OneAgentVectorView("simple_centroid", 2)
    with pytest.raises(InputError, match="^reset: expected no reset_mask"):
        view.reset(options={"reset_mask": np.array([True, False])})


def test_frames_are_drawn_if_asked_for():
    pytest.importorskip("cv2")
    view = OneAgentVectorView("simple_centroid", 2, render_mode="rgb_array")
    view.reset(seed=0)
    frames = view.render()
    assert [frame.shape for frame in frames] == [(512, 512, 3)] * 2
    assert OneAgentVectorView("simple_centroid", 2).render() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "simple_tag", "prey": "learned"}, "expects one agent, got 4"),
        ({"name": "simple_centroid", "num_noize": 3}, "num_noize"),
        ({"name": "simple_centroid", "render_mode": "human"}, "render_mode: expected"),
        ({"name": "simple_centroid", "dtype": torch.bfloat16}, "dtype: expected float"),
    ],
)
def test_a_wrong_view_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        OneAgentVectorView(num_envs=2, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda action: action[:1], r"got the shape \(1, 5\) and float32"),
        (lambda action: action.astype(str), r"got the shape \(2, 5\) and <U"),
        (lambda action: action * np.nan, "got numbers outside of it, NaN or infinity"),
    ],
)
def test_a_wrong_action_is_refused(change, message):
    view = OneAgentVectorView("simple_centroid", 2)
    view.reset(seed=0)
    with pytest.raises(InputError, match=message):
        view.step(change(actions(view, 1)[0]))
    with pytest.raises(InputError, match="reset: expected one seed, from which each"):
        view.reset(seed=[1, 2])


def test_an_episode_is_begun_first():
    view = OneAgentVectorView("simple_centroid", 2, render_mode="rgb_array")
    with pytest.raises(InputError, match=r"step: expected reset\(\) first, got no"):
        view.step(actions(view, 1)[0])
    with pytest.raises(InputError, match=r"render: expected reset\(\) first, got no"):
        view.render()


def test_discrete_actions_are_held_to_their_space():
    view = OneAgentVectorView("simple_centroid", 2, continuous_actions=False)
    view.reset(seed=0)
    assert view.step(np.array([0, 4]))[1].shape == (2,)
    with pytest.raises(InputError, match="actions: expected MultiDiscrete"):
        view.step(np.array([0, 5]))


assert marl_pool.envs  # registers the ids
