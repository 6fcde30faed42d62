"""The PettingZoo and Gymnasium views, checked by those libraries' own checkers."""

import copy
import gc
import weakref
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from pettingzoo.utils import parallel_to_aec
from torch import Tensor

from helpers.env_cases import CASES
from marl_pool.envs import (
    VERSIONS,
    env_names,
    make_batched_env,
    make_env,
    registered_id,
)
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.canvas import Disc, Frame, Projection
from marl_pool.envs.particles.simple_centroid import SimpleCentroid
from marl_pool.envs.views import OneAgentView, ParallelView
from marl_pool.options.names import resolve
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError

ID = "marl_pool/simple_centroid-v0"
CUSTOM = "pettingzoo"
"""The name of environments that a user supplies."""
# Options of an environment that has several kinds of tokens or actions, or agents.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "boxworld": [{"observation": kind} for kind in ("entities", "pixels")],
    "lbforaging": [{"num_agents": 1, "choices": kind} for kind in ("moves", "food")],
    "simple_centroid": [{"continuous_actions": on} for on in (True, False)],
    "simple_spread": [{"num_agents": 1}],
    "simple_tag": [{"continuous_actions": on} for on in (True, False)],
}

# The checkers advise against dict observations and unbounded features.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Observation is not a NumPy array"),
    pytest.mark.filterwarnings("ignore:Observation space for each agent probably"),
    pytest.mark.filterwarnings("ignore:.*A Box observation space m"),
    # PettingZoo's own test package imports its deprecated modules.
    pytest.mark.filterwarnings("ignore:The old environment creation API"),
]


class Mortal(SimpleCentroid):
    """Agent 0 dies after its second step."""

    @property
    def active(self) -> dict[str, Tensor]:
        alive = torch.ones(self.num_envs, self.num_agents, dtype=torch.bool)
        alive[:, 0] = self.steps < 2
        return {"agent": alive}

    def advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        alive = self.active["agent"]
        rewards, ended = super().advance(actions)
        return {"agent": rewards["agent"] * alive}, ended


class ThreeStepTask(SimpleCentroid):
    """The task ends at the third step."""

    def advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        rewards, _ = super().advance(actions)
        return rewards, self.steps >= 2


# Slots of agents that never arrive are not terminated, since they never lived.
@pytest.mark.filterwarnings("ignore:No agents present but not all possible_agents")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_pettingzoo_checkers_accept_the_parallel_view(name, options):
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    parallel_api_test(make_env(name, **options), num_cycles=50)
    parallel_seed_test(lambda: make_env(name, **options))


@pytest.mark.filterwarnings("ignore:Agents have different observation space sizes")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_pettingzoo_checkers_accept_its_aec_form(name, options):
    from pettingzoo.test import api_test, seed_test

    def build():
        env = parallel_to_aec(make_env(name, **options))
        # The checker samples the actions, and seeds the spaces of the first agents.
        for number, agent in enumerate(env.possible_agents):
            env.action_space(agent).seed(number)
        return env

    api_test(build(), num_cycles=50)
    seed_test(build)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in VERSIONS for options in VARIANTS.get(name, [{}])],
)
def test_gymnasium_checker_accepts_the_view_of_one_agent(name, options):
    groups = make_batched_env(name, 1, **options).groups
    count = sum(group.num_agents for group in groups.values())
    if count > 1:
        with pytest.raises(InputError, match=f"expects one agent, got {count};"):
            gymnasium.make(registered_id(name), **options)
        return
    env = gymnasium.make(registered_id(name), render_mode="rgb_array", **options)
    check_env(env.unwrapped)


def test_ids_are_registered_with_both_libraries():
    view = pettingzoo.make("parallel", ID, num_noise=4, num_agents=2)
    assert view.possible_agents == ["agent_0", "agent_1"]
    assert view.observation_space("agent_1")["features"].shape == (9, 4)
    assert view.metadata["name"] == "simple_centroid_v0"
    env = gymnasium.make(ID, num_noise=4)
    assert env.observation_space["features"].shape == (8, 4)


@pytest.mark.parametrize("name", VERSIONS)
def test_ids_carry_the_version_of_their_env(name):
    from marl_pool.envs import ENVS

    assert VERSIONS[name] == resolve(name, ENVS, "env", BatchedEnv).version


def test_registered_names_and_ids_are_the_same_envs():
    # What `pettingzoo` adapts has other ids, or none.
    assert sorted([*VERSIONS, CUSTOM]) == env_names()


@pytest.mark.parametrize("name", env_names())
def test_a_batch_that_was_played_and_drawn_is_freed(name):
    module = "helpers.changing_agents:ChangingAgents"
    env = make_batched_env(name, 2, **({"module": module} if name == CUSTOM else {}))
    groups = env.groups.items()
    policies = {key: RandomPolicy(group.action_space) for key, group in groups}
    rollout = Rollout(env, policies)
    rollout.steps(2)
    env.draw(0, 32, None, next(iter(env.groups)), 0)
    freed = weakref.ref(env)
    del env, rollout, groups
    gc.collect()
    assert freed() is None


def test_a_perturbed_rollout_is_freed_without_garbage_collection():
    module = "helpers.changing_agents:ChangingAgents"
    env = make_batched_env(CUSTOM, 2, module=module)
    groups = env.groups.items()
    policies = {key: RandomPolicy(group.action_space) for key, group in groups}
    rollout = Rollout(env, policies, perturbation=make_perturbation("shuffle"))
    rollout.steps(2)
    # A copy goes on by itself.
    twin = copy.deepcopy(rollout)
    assert twin.steps(3)["hen"].tokens.types.equal(rollout.steps(3)["hen"].tokens.types)
    del twin
    freed = weakref.ref(env), weakref.ref(rollout)
    gc.disable()
    try:
        del env, rollout, groups
        assert [reference() for reference in freed] == [None, None]
    finally:
        gc.enable()


def test_the_view_shows_what_a_batched_env_shows():
    options: dict[str, Any] = {"num_agents": 2, "num_noise": 3}
    view = make_env("simple_centroid", **options)
    env = SimpleCentroid(1, seed=9, **options)
    env.reset()
    observations, _ = view.reset(seed=9)
    rng = np.random.default_rng(0)
    for _ in range(5):
        expected = env.observe()["agent"]
        for i in range(2):
            observation = observations[f"agent_{i}"]
            assert view.observation_space(f"agent_{i}").contains(observation)
            for name, part in expected.at((0, i)).columns.items():
                assert np.array_equal(observation[name], part.numpy())
        actions = rng.uniform(0, 1, (2, 5)).astype(np.float32)
        observations, rewards, *_ = view.step(
            {f"agent_{i}": actions[i] for i in range(2)}
        )
        step = env.step({"agent": torch.from_numpy(actions)[None]})
        assert list(rewards.values()) == step.rewards["agent"][0].tolist()


def test_episodes_follow_from_the_seed():
    def starts(view: ParallelView, seed: int | None) -> list[np.ndarray]:
        resets = [view.reset(seed=seed), view.reset(), view.reset()]
        return [observations["agent_0"]["features"] for observations, _ in resets]

    view = make_env("simple_centroid", seed=4)
    first, repeat = starts(view, None), starts(view, 4)
    reseeded = starts(view, 5)
    for i in range(3):
        assert np.array_equal(first[i], repeat[i])
        assert not np.array_equal(first[i], reseeded[i])
    assert not np.array_equal(first[0], first[1])


def test_fresh_views_without_a_seed_differ():
    def start(**seeds: int) -> np.ndarray:
        observations, _ = make_env("simple_centroid", **seeds).reset()
        return observations["agent_0"]["features"]

    assert not np.array_equal(start(), start())
    assert np.array_equal(start(seed=0), start(seed=0))
    view = make_env("simple_centroid")
    first, second = (view.reset()[0]["agent_0"]["features"] for _ in range(2))
    assert view.env.episodes.tolist() == [1]
    assert not np.array_equal(first, second)


def test_observations_belong_to_the_caller():
    view = make_env("simple_centroid")
    observation = view.reset(seed=0)[0]["agent_0"]
    for part in observation.values():
        part[...] = 0
    again = view.step({"agent_0": np.zeros(5, np.float32)})[0]["agent_0"]
    assert again["types"].any()


ALIVE = {"agent_0": False, "agent_1": False}


@pytest.mark.parametrize(
    ("name", "options", "ends", "remaining"),
    [
        ("simple_centroid", {"max_steps": 2}, [(ALIVE, False), (ALIVE, True)], []),
        (
            f"{__name__}:ThreeStepTask",
            {},
            [(ALIVE, False), (ALIVE, False), (dict.fromkeys(ALIVE, True), False)],
            [],
        ),
        (
            f"{__name__}:Mortal",
            {},
            [
                (ALIVE, False),
                ({**ALIVE, "agent_0": True}, False),
                ({"agent_1": False}, False),
            ],
            ["agent_1"],
        ),
    ],
)
def test_episode_ends_affect_all_agents_and_deaths_only_one(
    name, options, ends, remaining
):
    """By step, the terminations, and whether all are truncated."""
    view = make_env(name, num_agents=2, **options)
    view.reset(seed=0)
    for terminated, truncated in ends:
        actions = {agent: np.ones(5, np.float32) for agent in view.agents}
        observations, _, terminations, truncations, _ = view.step(actions)
        assert observations.keys() == actions.keys()
        assert terminations == terminated
        assert truncations == dict.fromkeys(terminated, truncated)
    assert view.agents == remaining
    view.reset()
    assert view.agents == [*ALIVE]


@pytest.mark.parametrize("size", [128, 512])
def test_render_draws_the_env_and_its_colors(size):
    env = SimpleCentroid(2, num_noise=5)
    env.reset()
    image = env.frame(1, size=size)
    assert image.shape == (size, size, 3)
    assert image.dtype == np.uint8
    for entity, kind in enumerate(env.entities):
        x, y = env.state[1, entity, :2].tolist()
        scale = size / (2 * env.extent)
        column, row = int(size / 2 + x * scale), int(size / 2 - y * scale)
        near = image[row - 1 : row + 2, column - 1 : column + 2].reshape(-1, 3)
        colors = {item.color for item in env.entities}  # one may hide another
        assert {tuple(int(c) for c in pixel) for pixel in near} & colors, kind.kind
    assert np.array_equal(image, env.frame(1, size=size))
    assert not np.array_equal(image, env.frame(0, size=size))


def test_a_frame_shows_no_step_which_the_caption_of_a_video_does():
    env = SimpleCentroid(1)
    env.reset()
    before = env.frame()
    env.steps += 1
    assert np.array_equal(env.frame(), before)


def test_the_legend_names_the_crosses():
    looks = [Disc("agent", (44, 160, 44), 0.1)]
    frames = [Frame(Projection(1.0, 512)) for _ in range(2)]
    blank = frames[0].image.copy()
    frames[0].legend(looks)
    frames[1].legend(looks, "goal")
    rows = [(frame.image != blank).any((1, 2)).nonzero()[0] for frame in frames]
    # The names are written upwards from the lower edge, a line each.
    assert rows[1].min() < rows[0].min() - 12
    cross = frames[1].image[rows[0].min() :, :24].astype(int)
    assert (cross.max(-1) < 100).any()  # dark, where a disc has a color
    assert not (frames[0].image[rows[0].min() :, :24].max(-1) < 100).any()


def test_render_draws_attention_where_it_goes():
    env = SimpleCentroid(1, num_signal=1, num_noise=1)
    env.reset()
    start = [[0.0, 0, 0, 0], [2, 0, 0, 0], [0, 2, 0, 0]]  # agent, signal, noise
    env.state.copy_(torch.tensor([start]))
    plain = env.frame().astype(int)
    changed = {}
    for token, name in enumerate(("self", "noise", "signal")):
        image = env.frame(attention=torch.eye(3)[token])
        changed[name] = np.abs(image - plain).sum(-1) > 0
    # Half way from the agent in the middle to the signal, right, and the noise, up.
    right = (slice(250, 262), slice(310, 340))
    up = (slice(172, 202), slice(250, 262))
    assert changed["signal"][right].any()
    assert not changed["signal"][up].any()
    assert changed["noise"][up].any()
    assert not changed["noise"][right].any()
    assert not changed["self"][up].any()
    assert not changed["self"][right].any()
    assert changed["self"].any()
    weak = env.frame(attention=torch.tensor([0.0, 0.1, 0.9])).astype(int)
    strength = np.abs(weak - plain).sum(-1)
    assert 0 < strength[up].sum() < strength[right].sum()


def test_attention_must_have_a_weight_for_each_token():
    env = SimpleCentroid(1)
    env.reset()
    with pytest.raises(InputError, match=r"each of 32 tokens, got the shape \(5,\)"):
        env.frame(attention=torch.ones(5))


def test_a_view_without_a_render_mode_draws_nothing():
    view = make_env("simple_centroid")
    view.reset()
    assert view.render() is None
    drawn = make_env("simple_centroid", render_mode="rgb_array")
    drawn.reset()
    image = drawn.render()
    assert image is not None
    assert image.shape == (512, 512, 3)


def test_wrong_input_is_refused():
    with pytest.raises(InputError, match="render_mode: expected None or 'rgb_array'"):
        make_env("simple_centroid", render_mode="human")
    with pytest.raises(InputError, match="expects one agent, got 2"):
        OneAgentView("simple_centroid", num_agents=2)
    with pytest.raises(InputError, match="env.num_envs: expected .*, got 4"):
        make_env("simple_centroid", num_envs=4)
    view = make_env("simple_centroid")
    view.reset()
    with pytest.raises(InputError, match=r"action of 'agent_0': expected Box.*got 1"):
        view.step({"agent_0": 1})
    with pytest.raises(InputError, match=r"action of 'agent_0': expected Box.*nan"):
        view.step({"agent_0": np.full(5, np.nan)})
    with pytest.raises(InputError, match=r"action of 'agent_0': .*'left'"):
        view.step({"agent_0": ["left"] * 5})
    with pytest.raises(InputError, match=r"action of 'agent_0': expected Box.*none"):
        view.step({})
    chooser = make_env("simple_centroid", continuous_actions=False)
    chooser.reset()
    with pytest.raises(InputError, match=r"expected Discrete\(5\), got 5"):
        chooser.step({"agent_0": 5})


def test_a_seed_may_be_numpys():
    view = OneAgentView("simple_centroid")
    first, _ = view.reset(seed=np.int64(3))
    again, _ = view.reset(seed=3)
    assert np.array_equal(first["features"], again["features"])


def test_a_step_needs_an_episode_and_actions_of_its_agents():
    view = make_env("simple_centroid", max_steps=2)
    action = {"agent_0": view.action_space("agent_0").sample()}
    with pytest.raises(InputError, match="step: expected reset"):
        view.step(action)
    with pytest.raises(InputError, match="render: expected reset"):
        make_env("simple_centroid", render_mode="rgb_array").render()
    view.reset(seed=1)
    with pytest.raises(InputError, match="actions: expected a dict by agent, got None"):
        view.step(None)
    with pytest.raises(InputError, match="expected agents of agent_0, got 'agent_7'"):
        view.step({**action, "agent_7": action["agent_0"]})
    view.step(action)
    view.step(action)
    assert view.agents == []
    with pytest.raises(InputError, match="step: expected reset"):
        view.step({})
