"""Environments around simulators: seeds and exact replays."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._pytree import tree_leaves

from helpers.counting_simulator import Counter
from marl_pool.cli.main import main
from marl_pool.envs import env_names, make_batched_env
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.simulation import LoggedSimulator, SimulatedEnv
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError


class Counted(SimulatedEnv):
    """An env of `Counter`."""

    def __init__(self, num_envs: int, **options: Any) -> None:
        context = {"max_steps": 20, "seed": 0, "first_env": 0, "first_episode": 0}
        context |= {"device": "cpu", "dtype": torch.float32, **options}
        form = {"shape": (2,), "observation_dtype": torch.float32}
        super().__init__(num_envs, build=Counter, **form, **context)

    @property
    def groups(self) -> dict[str, AgentGroup]:
        spec = TokenSpec(1, 2, ("count",), has_self=False)
        return {"agent": AgentGroup(1, spec, spaces.Box(-1, 1, (1,), np.float32))}

    def observe(self) -> dict[str, Tokens]:
        features = self.observations[:, None, None]
        types = torch.zeros(features.shape[:3], dtype=torch.int64)
        return {"agent": Tokens(features, types, types.bool())}

    def _to_native(self, actions: Tensor) -> Tensor:
        return actions


MAKERS = {
    "counted": Counted,
    "ant": partial(make_batched_env, "ant", num_frames=2),
    "ant_bullet": partial(make_batched_env, "ant_bullet", num_frames=2),
    "car_racing": partial(make_batched_env, "car_racing", num_frames=2),
}
# Its emulator steps all games of a batch at once, and is replayed by other code.
PONG = partial(make_batched_env, "pong", threads=1)
EACH_ENV = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
STICKY = partial(PONG, sticky_actions=0.25)
AND_STICKY = pytest.mark.parametrize(
    "make", [*MAKERS.values(), PONG, STICKY], ids=[*MAKERS, "pong", "sticky pong"]
)
AND_PONG = pytest.mark.parametrize(
    "make", [*MAKERS.values(), PONG], ids=[*MAKERS, "pong"]
)
Maker = Callable[..., BatchedEnv]


def begun(make: Maker, num_envs: int = 1, **options: Any) -> Any:
    env = make(num_envs, **options)
    env.reset()
    return env


def actions_for(env: BatchedEnv) -> dict[str, Tensor]:
    """Return actions in [-0.6, 1] that depend only on env, episode and step."""
    space = env.groups["agent"].action_space
    mixed = env.env_ids * 7 + env.episodes * 5 + env.steps * env.steps * 3
    if isinstance(space, spaces.Discrete):
        return {"agent": mixed[:, None] % int(space.n)}
    numbers = (mixed[:, None] + torch.arange(space.shape[0]) * 4) % 9
    return {"agent": (numbers / 5 - 0.6)[:, None]}


def run(env: BatchedEnv, steps: int) -> Tensor:
    """Play; return the observations ``(steps, num_envs, …)``."""
    features = []
    for _ in range(steps):
        env.step(actions_for(env))
        features.append(env.observe()["agent"].features.clone())
    return torch.stack(features)


def row_mask(*rows: int, of: int) -> Tensor:
    return torch.isin(torch.arange(of), torch.tensor(rows))


@AND_STICKY
def test_an_episode_follows_from_seed_env_and_number_alone(make):
    env = begun(make, 3, seed=3)
    histories: dict[tuple[int, int], list[Tensor]] = {}
    resets = {2: [1], 4: [0, 1], 6: [2]}
    for time_ in range(9):
        env.reset(row_mask(*resets.get(time_, []), of=3))
        features = run(env, 1)[0]
        for i in range(3):
            histories.setdefault((i, int(env.episodes[i])), []).append(features[i])
    for number, episode in ((0, 1), (1, 0), (1, 2), (2, 1)):
        single = begun(make, first_env=number, first_episode=episode, seed=3)
        expected = torch.stack(histories[number, episode])
        assert torch.equal(run(single, len(expected))[:, 0], expected)


@EACH_ENV
def test_starts_differ_between_seeds_envs_and_episodes(make):
    # Cars stand alike, and their tracks come into sight as the picture grows.
    def start(**options: int) -> bytes:
        return run(begun(make, **options), 8).numpy().tobytes()

    base = start(seed=1)
    assert start(seed=1) == base
    variants = {"seed": 2}, {"seed": 1, "first_env": 1}, {"seed": 1, "first_episode": 1}
    for options in variants:
        assert start(**options) != base


@AND_PONG
@pytest.mark.parametrize("rows", [[1], [1, 0], [1, 1]])
def test_selected_envs_continue_exactly_after_replay(make, rows):
    index = torch.tensor(rows)
    env, twin = begun(make, 2, seed=2), begun(make, 2, seed=2)
    run(env, 3)
    run(twin, 3)
    subset = twin.select(index)
    expected = run(env, 4)
    assert torch.equal(run(subset, 4), expected[:, index])
    # The one that it was taken from can still go on, by playing its episodes again.
    assert torch.equal(run(twin, 4), expected)
    for instance in (env, twin):
        instance.reset(row_mask(0, of=2))
    assert torch.equal(run(twin, 2), run(env, 2))


def test_a_step_of_an_environment_that_was_never_reset_is_refused():
    env = Counted(2)
    env.reset(row_mask(0, of=2))
    with pytest.raises(InputError, match="got none of environment 1"):
        run(env, 1)


@AND_PONG
def test_copies_of_one_env_diverge_with_their_actions(make):
    first, second = (begun(make, seed=2) for _ in range(2))
    for env in (first, second):
        run(env, 3)
    copies = first.select(torch.tensor([0, 0]))
    space = first.groups["agent"].action_space
    if isinstance(space, spaces.Discrete):
        actions = torch.tensor([2, 3])
    else:
        actions = torch.tensor([-0.6, 0.9])[:, None].expand(2, space.shape[0])
    for _ in range(5):
        for env, choice in ((copies, actions), (first, actions[:1])):
            env.step({"agent": choice[:, None]})
        second.step({"agent": actions[1:, None]})
    seen = copies.observe()["agent"].features
    assert torch.equal(seen[:1], first.observe()["agent"].features)
    assert torch.equal(seen[1:], second.observe()["agent"].features)
    assert not torch.equal(*seen)


@AND_STICKY
def test_a_saved_rollout_is_continued_exactly(make):
    def rollout() -> Rollout:
        env = make(2, seed=5, max_steps=4)
        space = env.groups["agent"].action_space
        if isinstance(space, spaces.Box):
            space = spaces.Box(-0.5, 1, space.shape)
        return Rollout(env, {"agent": RandomPolicy(space)}, explore=True)

    whole, resumed = rollout(), rollout()
    whole.steps(6)
    state = whole.state_dict()
    expected = whole.steps(6)["agent"]
    resumed.load_state_dict(state)
    trajectory = resumed.steps(6)["agent"]
    for name in ("tokens", "actions", "rewards"):
        pair = (tree_leaves(getattr(part, name)) for part in (expected, trajectory))
        for reference, leaf in zip(*pair, strict=True):
            assert reference is leaf is None or torch.equal(reference, leaf)


@AND_PONG
def test_a_state_from_before_the_first_episode_can_be_loaded(make):
    env = make(1)
    env.load_state_dict(make(1).state_dict())
    env.reset()
    assert torch.equal(run(env, 2), run(begun(make), 2))


@AND_PONG
def test_a_state_that_does_not_replay_is_refused(make):
    env = begun(make)
    run(env, 2)
    state = env.state_dict()
    name = "screens" if make is PONG else "observations"
    state["tensors"][name][..., -1] += 1
    with pytest.raises(InputError, match="expected .* saved state .* got different"):
        make(1).load_state_dict(state)


@AND_PONG
def test_what_was_seen_is_not_changed_by_later_steps(make):
    env = begun(make)
    features = env.observe()["agent"].features
    before = features.clone()
    run(env, 3)
    assert torch.equal(features, before)
    assert not torch.equal(env.observe()["agent"].features, before)


def test_a_env_that_has_ended_stands_still_until_it_is_reset():
    env = begun(Counted, 2)
    full = torch.ones(2, 1, 1)
    ends = []
    for _ in range(6):
        step = env.step({"agent": full * torch.tensor([1.0, 0.5])[:, None, None]})
        ends.append((step.terminated.tolist(), step.rewards["agent"][:, 0].tolist()))
    assert ends[2] == ([False, False], [1.0, 0.5])
    assert ends[3] == ([True, False], [1.0, 0.5])
    assert ends[5] == ([True, False], [0.0, 0.5])
    assert env.observations[:, 1].tolist() == [4.0, 3.0]
    # Led past its end, it has ended too.
    restored = Counted(2)
    restored.load_state_dict(env.state_dict())
    assert restored.over.tolist() == [True, False]
    restored.reset(restored.over)
    assert restored.observations[:, 1].tolist() == [0.0, 3.0]
    assert not restored.over.any()
    assert torch.equal(
        run(restored, 1)[0, 0], run(begun(Counted, first_episode=1), 1)[0, 0]
    )


def test_simulators_that_no_env_holds_are_used_again():
    Counter.built = 0
    env = begun(Counted, 2)
    for _ in range(5):
        env.reset()
        # Each makes one that stands where the env stood; it is dropped at once.
        run(env.select(torch.tensor([0, 0])), 1)
        run(env, 1)
    assert Counter.built <= 5


def test_dropping_ended_envs_repeats_nothing(monkeypatch):
    env = begun(Counted, 3)
    run(env, 1)
    begun_again: list[Any] = []
    monkeypatch.setattr(LoggedSimulator, "replay", lambda *a: begun_again.append(a))
    subset = env.select(torch.tensor([2, 0]))
    run(subset, 2)
    assert not begun_again


# Extras


@pytest.mark.parametrize(
    ("env", "module", "package", "name"),
    [
        ("car_racing", "Box2D", "Box2D", "box2d"),
        ("car_racing", "pygame", "pygame", "box2d"),
        ("ant", "mujoco", "mujoco", "mujoco"),
        ("ant", "imageio", "imageio", "mujoco"),
        ("ant_bullet", "pybullet", "pybullet", "bullet"),
        ("pong", "ale_py.vector_env", "ale_py", "atari"),
    ],
)
def test_a_missing_extra_is_one_line(
    env, module, package, name, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(sys.modules, module, None)
    assert env in env_names()
    with pytest.raises(ModuleNotFoundError, match=package):
        make_batched_env(env, 1)
    path = tmp_path / "run"
    assert main(["train", f"env={env}", "--run-dir", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"marl-pool: this needs {package}")
    assert line.endswith(f': pip install "marl-pool[{name}]"')
    assert not path.exists()
