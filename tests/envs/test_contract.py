"""The contract of `BatchedEnv`, kept by every environment written in torch."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from helpers.env_cases import CASES
from marl_pool.envs import ENVS, HEURISTICS, make_batched_env, make_heuristic
from marl_pool.envs.base import BatchedEnv
from marl_pool.options.names import resolve
from marl_pool.policies.base import Policy
from marl_pool.tokens import Tokens

KINDS = ("random", "flee", "learned")
TAG = "self obstacle predator prey"
CELLS = "self floor key lock gem held"
FLOAT, DOUBLE = torch.float32, torch.float64
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "simple_centroid": [
        {},
        *(
            {"num_agents": 2, "num_signal": signal, "num_noise": noise, "dtype": dtype}
            for signal, noise, dtype in ((3, 28, FLOAT), (31, 0, DOUBLE), (1, 2, FLOAT))
        ),
    ],
    "simple_tag": [
        {"prey": "random"},
        *({"prey": prey, "counts": "2-2-3"} for prey in KINDS[1:]),
    ],
    "cartpole": [
        {},
        {"duplicates": 2, "noise_channels": 3, "num_frames": 2},
        {"channel_ids": True, "duplicates": 2, "noise_channels": 1, "dtype": DOUBLE},
    ],
    "boxworld": [
        {"observation": "entities"},
        {"observation": "entities", "random_distractors": True},
        {"observation": "pixels", "n": 5},
    ],
    "pettingzoo": [{"module": "helpers.changing_agents:ChangingAgents"}],
}
COLLIDING: list[tuple[str, dict[str, Any]]] = [
    (
        "simple_tag",
        {"counts": "2-3-4", "prey": prey, "obstacles_collide": True, "dtype": dtype},
    )
    for prey, dtype in zip(KINDS, (FLOAT, DOUBLE, FLOAT), strict=True)
]
SHARED = [case.values for case in CASES if case.values[0] not in VARIANTS]
"""Cases of the other environments; simulators have tests of their own."""


def is_simulated(name: str) -> bool:
    return resolve(ENVS[name], {}, "env", BatchedEnv).simulated


each_env = pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in VARIANTS for options in VARIANTS[name]),
        *(case for case in SHARED if not is_simulated(case[0])),
    ],
)
LACKING = {
    "draw": set(),
    "glyphs": {"ant", "ant_bullet", "car_racing", "cartpole", "pong", "xor"},
    "signal": {"ant", "ant_bullet", "car_racing", "pong"},
    "positions": {"ant", "ant_bullet", "car_racing", "cartpole", "pong", "xor"},
}
"""Environments without a part that an environment should have where it can: tokens on
channels or patches have no places, and of a body or a screen none is known to matter.
"""


def make_started_env(
    name: str, num_envs: int, options: dict[str, Any], **overrides: Any
) -> BatchedEnv:
    env = make_batched_env(name, num_envs, seed=11, **options, **overrides)
    env.reset()
    return env


def actions_for(env: BatchedEnv, step: int) -> dict[str, Tensor]:
    """Return actions that depend only on environment number, agent and step."""
    actions = {}
    for name, group in env.groups.items():
        space = group.action_space
        shape = (env.num_envs, group.num_agents, *(space.shape or ()))
        place = torch.arange(torch.Size(shape[1:]).numel())
        wave = 7.0 * env.env_ids[:, None] + 3.0 * place.double() + 1.3 * step
        wave = wave.sin().view(shape)
        if isinstance(space, spaces.Discrete):
            actions[name] = ((wave + 1) / 2 * int(space.n)).long()
        else:
            actions[name] = wave.to(env.dtype)
    return actions


def obs(env: BatchedEnv) -> list[Tensor]:
    return [part for tokens in env.observe().values() for part in tokens.parts]


def run(env: BatchedEnv, steps: int, first: int = 0) -> list[Tensor]:
    """Return observations, rewards and ends, with the env as second dimension."""
    rows = []
    for number in range(first, first + steps):
        step = env.step(actions_for(env, number))
        rows.append([*obs(env), *step.rewards.values(), step.terminated])
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", sorted({*ENVS} - {"pettingzoo"}))
def test_an_environment_says_what_it_can_of_its_tokens(name):
    env = make_batched_env(name, 1)
    specs = [group.tokens for group in env.groups.values()]
    parts = {
        "draw": env.overrides("draw"),
        "glyphs": env.overrides("glyphs"),
        "signal": env.overrides("signal") or all(s.signal_types for s in specs),
        "positions": all(spec.positions for spec in specs),
    }
    for part, is_there in parts.items():
        hint = f"{name}: define {part}, or list it in LACKING as one that cannot"
        assert is_there == (name not in LACKING[part]), hint


def test_an_environment_without_a_script_is_a_known_exception():
    assert {*ENVS} - {*HEURISTICS} == {"ant", "ant_bullet", "car_racing", "pettingzoo"}


@pytest.mark.parametrize("name", HEURISTICS)
def test_registered_names_build_their_classes(name):
    env = make_batched_env(name, 2)
    assert type(env) is resolve(ENVS[name], {}, "env", BatchedEnv)
    for role, group in env.groups.items():
        assert isinstance(make_heuristic(name, group, role=role), Policy)


@pytest.mark.parametrize(("name", "options"), [*each_env.args[1], *COLLIDING])
def test_one_env_equals_the_same_env_among_many(name, options):
    batch = make_started_env(name, 37, options)
    start, expected = obs(batch), run(batch, 70)
    for number in (0, 3, 36):
        solo = make_started_env(name, 1, options, first_env=number)
        assert_equal(obs(solo), [part[number : number + 1] for part in start])
        assert_equal(run(solo, 70), [part[:, number : number + 1] for part in expected])


@each_env
def test_selected_envs_continue_exactly(name, options):
    env = make_started_env(name, 4, options)
    run(env, 9)
    rows = torch.tensor([3, 1])
    subset = env.select(rows)
    assert subset.num_envs == 2
    assert_equal(obs(subset), [part[rows] for part in obs(env)])
    expected = [part[:, rows] for part in run(env, 90, first=9)]
    assert_equal(run(subset, 90, first=9), expected)
    for instance in (env, subset):
        instance.reset()
    assert_equal(obs(subset), [part[rows] for part in obs(env)])


@each_env
def test_a_saved_state_continues_exactly_and_survives_its_use(name, options):
    env, twin = (make_started_env(name, 3, options) for _ in range(2))
    run(env, 7)
    saved = env.state_dict()
    expected = run(env, 80, first=7)
    for _ in range(2):  # twice: stepping must not write into what was saved
        twin.load_state_dict(saved)
        assert twin.steps.tolist() == [7] * 3
        assert_equal(run(twin, 80, first=7), expected)
    for where in (torch.tensor([True, False, True]), None):
        env.reset(where)
        twin.reset(where)
        assert_equal(obs(env), obs(twin))


@each_env
def test_a_partial_reset_leaves_the_other_envs_alone(name, options):
    env, calm = (make_started_env(name, 4, options) for _ in range(2))
    fresh = make_started_env(name, 4, options, first_episode=1)
    run(env, 10)
    run(calm, 10)
    where = torch.tensor([False, True, False, True])
    env.reset(where)
    assert env.steps.tolist() == [10, 0, 10, 0]
    assert_equal([part[where] for part in obs(env)], [p[where] for p in obs(fresh)])
    # The same actions at the same row; the streams of the restarted start anew.
    after, old, new = (run(instance, 80) for instance in (env, calm, fresh))
    assert_equal([part[:, ~where] for part in after], [part[:, ~where] for part in old])
    assert_equal([part[:, where] for part in after], [part[:, where] for part in new])


@each_env
def test_first_episode_is_where_a_restarted_runner_continues(name, options):
    env = make_started_env(name, 2, options)
    for episode in range(1, 12):
        run(env, 4)
        env.reset()
        later = make_started_env(name, 2, options, first_episode=episode)
        assert_equal(obs(later), obs(env))
    assert_equal(run(later, 4), run(env, 4))


@each_env
def test_an_observation_belongs_to_the_caller(name, options):
    env, twin = (make_started_env(name, 5, options) for _ in range(2))
    observation = obs(env)
    before = [part.clone() for part in observation]
    run(env, 10)
    assert_equal(observation, before)
    # Nor does what a caller writes into an observation change the environment.
    run(twin, 10)
    for tokens in env.observe().values():
        tokens.features.zero_()
    assert_equal(run(env, 3, first=10), run(twin, 3, first=10))


@pytest.mark.parametrize("name", sorted({*HEURISTICS} & {*VARIANTS, "pong"}))
def test_episodes_are_truncated_after_max_steps(name):
    env = make_started_env(name, 2, {"max_steps": 3})
    ends = [env.step(actions_for(env, step)) for step in range(3)]
    assert [end.truncated.tolist() for end in ends] == [[i == 2] * 2 for i in range(3)]
    if name in ("simple_centroid", "simple_tag"):
        assert not any(end.terminated.any() for end in ends)


DESCRIPTIONS: list[tuple[str, dict[str, Any], str, tuple[int, ...], str, Any]] = [
    *(
        ("simple_tag", {"counts": counts, "prey": prey}, "predator", sizes, TAG, 5)
        for prey in KINDS
        for counts, sizes in (
            ("1-3-28", (1, 32, 4)),
            ("1-1-0", (1, 2, 4)),
            ("3-2-1", (3, 6, 4)),
        )
    ),
    ("simple_tag", {"counts": "1-3-28", "prey": "learned"}, "prey", (3, 32, 4), TAG, 5),
    (
        "simple_centroid",
        {"num_agents": 3},
        "agent",
        (3, 34, 4),
        "self agent signal noise",
        spaces.Box(0, 1, (5,)),
    ),
    ("cartpole", {}, "agent", (1, 5, 1), "channel", spaces.Box(-1, 1, (1,))),
    (
        "cartpole",
        {"duplicates": 2, "noise_channels": 2, "num_frames": 3},
        "agent",
        (1, 12, 3),
        "channel",
        spaces.Box(-1, 1, (1,)),
    ),
    *(
        ("boxworld", options, "agent", (1, num_tokens, 5), CELLS, 4)
        for options, num_tokens in (
            ({}, 8),  # as in the paper
            ({"observation": "pixels"}, 50),
            ({"num_distractors": 0}, 4),
            ({"n": 5, "observation": "pixels"}, 26),
            ({"n": 9, "goal_length": 4, "distractor_length": 2}, 2 + 2 * (3 + 4)),
        )
    ),
    ("pong", {}, "agent", (1, 196, 144), "patch", 6),
    ("car_racing", {}, "agent", (1, 256, 144), "patch", spaces.Box(-1, 1, (3,))),
]


@pytest.mark.parametrize(
    ("name", "options", "group", "sizes", "types", "space"), DESCRIPTIONS
)
def test_groups_are_described(name, options, group, sizes, types, space):
    env = make_started_env(name, 2, options)
    description, tokens = env.groups[group], env.observe()[group]
    spec = description.tokens
    assert (description.num_agents, spec.num_tokens, spec.num_features) == sizes
    assert spec.type_names == tuple(types.split())
    assert spec.has_self == ("self" in types)
    expected = spaces.Discrete(space) if isinstance(space, int) else space
    assert description.action_space == expected
    spec.check(tokens)
    assert tokens.features.shape == (2, *sizes)
    columns = tokens.at((1, 0)).columns.items()
    assert spec.space().contains({key: part.numpy() for key, part in columns})


ORDERED = {"cartpole", "pong"}
"""Environments whose scripts read tokens by their places, as their docstrings say."""


@pytest.mark.parametrize(
    ("name", "options"),
    [case for case in CASES if case.values[0] in {*HEURISTICS} - ORDERED],
)
def test_heuristics_are_permutation_invariant(name, options):
    env = make_started_env(name, 6, options)
    run(env, 6)
    for role, tokens in env.observe().items():
        group, active = env.groups[role], env.active[role]
        policy = make_heuristic(name, group, role=role)
        order = torch.randperm(
            tokens.num_tokens, generator=torch.Generator().manual_seed(0)
        )
        mask = tokens.action_mask
        parts = [part[:, :, order] for part in tokens[:3]]
        if group.actions.selects:
            order = torch.cat([torch.tensor([0]), order + 1])
            mask = mask if mask is None else mask[..., order]
        actual = policy.act(Tokens(*parts, mask))
        expected = policy.act(tokens)
        if group.actions.selects:
            assert group.actions.num_fixed == 1
            actions = order[actual.action]
            assert torch.equal(actions[active], expected.action[active])
        else:
            pair = actual.logits[active], expected.logits[active]
            torch.testing.assert_close(*pair)
