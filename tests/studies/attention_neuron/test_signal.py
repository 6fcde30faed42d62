"""Tokens that matter for the task, as envs and their tokens' types say."""

from typing import Any

import pytest
import torch

from helpers.env_cases import CASES
from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.base import BatchedEnv
from marl_pool.policies import make_policy
from marl_pool.tokens import SELF_TYPE, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError


def test_signal_is_of_known_types() -> None:
    listed: Any = ["self"]
    spec = TokenSpec(3, 2, ("self", "wall"), signal_types=listed)
    assert spec.signal_types == ("self",)
    with pytest.raises(InputError, match="types: expected some of 'self', 'wall'"):
        TokenSpec(3, 2, ("self", "wall"), signal_types=("door",))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_env_knows_its_signal_or_says_so(name: str, options: Any) -> None:
    env = make_batched_env(name, 2, **options)
    env.reset()
    has_types = all(group.tokens.signal_types for group in env.groups.values())
    if not (has_types or env.overrides("signal")):
        with pytest.raises(UnfitTokensError, match="does not define the signal tokens"):
            env.signal()
        return
    signal, observations = env.signal(), env.observe()
    assert signal.keys() == env.groups.keys()
    for group, mask in signal.items():
        tokens = observations[group]
        assert mask.dtype == torch.bool
        assert mask.shape == tokens.types.shape
        assert not (mask & tokens.padding).any()
        if env.groups[group].tokens.has_self:
            self_mask = (tokens.types == SELF_TYPE) & ~tokens.padding
            assert (mask | ~self_mask).all()


def test_types_of_the_particle_envs() -> None:
    centroid = make_batched_env("simple_centroid", 1).groups["agent"].tokens
    assert centroid.signal_types == ("self", "signal")
    for collide, expected in (
        (False, ("self", "predator", "prey")),
        (True, ("self", "obstacle", "predator", "prey")),
    ):
        options = {"prey": "learned", "obstacles_collide": collide}
        tag = make_batched_env("simple_tag", 1, **options)
        for group in tag.groups.values():
            assert group.tokens.signal_types == expected


def test_channels_of_cartpole_with_and_without_ids() -> None:
    options = {"noise_channels": 2, "duplicates": 2}
    plain = make_batched_env("cartpole", 3, **options)
    with_ids = make_batched_env("cartpole", 3, **options, channel_ids=True)
    expected = [[[True] * 10 + [False] * 2]] * 3
    for env in (plain, with_ids):
        assert env.signal()["agent"].tolist() == expected
    # Types say the same where they tell the channels apart.
    with_ids.reset()
    assert BatchedEnv.signal(with_ids)["agent"].tolist() == expected
    assert plain.groups["agent"].tokens.signal_types == ()


def test_a_policy_fits_tokens_with_other_signal_types() -> None:
    group = make_batched_env("simple_centroid", 1).groups["agent"]
    bare = TokenSpec(32, 4, group.tokens.type_names)
    policy = make_policy(bare, group.action_space)
    assert policy.mismatch(group.tokens, group.action_space) == ""


# BoxWorld: the level tells

LEVELS = {"n": 12, "goal_length": 4, "num_distractors": 3, "distractor_length": 2}


def signal_tokens(env: BatchedEnv, index: int) -> list[tuple[float, ...]]:
    """Type and color of the signal tokens of an env."""
    tokens, mask = env.observe()["agent"], env.signal()["agent"][index, 0]
    kinds = tokens.types[index, 0][mask].double()[:, None]
    colors = tokens.features[index, 0, :, :3][mask].double()
    return sorted(map(tuple, torch.cat([kinds, colors], 1).tolist()))


def test_the_signal_of_a_level_is_its_path() -> None:
    """Everything that the solver walks onto, and nothing else, is signal."""
    entities = make_batched_env("boxworld", 16, **LEVELS)
    pixels = make_batched_env("boxworld", 16, observation="pixels", **LEVELS)
    group = entities.groups["agent"]
    solver = make_heuristic("boxworld", group)
    for env in (entities, pixels):
        env.reset()
    # Self, the loose key, and content and lock of three boxes.
    assert (entities.signal()["agent"].sum(-1) == 2 + 2 * 3).all()
    opened = torch.zeros(16)
    going = torch.ones(16, dtype=torch.bool)
    for _ in range(29):
        action = {"agent": solver.act(entities.observe()["agent"]).action}
        step = entities.step(action)
        pixels.step(action)
        opened += (step.rewards["agent"][:, 0] > 0) & going
        going &= ~step.terminated
        # A box opened is content and lock less; what it held is the held key.
        signal = entities.signal()["agent"].sum(-1)[:, 0]
        expected = 8 - 2 * (opened - 1).clamp(min=0)
        assert torch.equal(signal[going].float(), expected[going])
        for index in going.nonzero()[:, 0].tolist():
            assert signal_tokens(entities, index) == signal_tokens(pixels, index)
    assert (opened[~going] == 4).all()
    assert not going.all()


def test_branches_are_no_signal() -> None:
    env = make_batched_env("boxworld", 8, **LEVELS)
    env.reset()
    tokens, mask = env.observe()["agent"], env.signal()["agent"]
    locks = tokens.types == env.groups["agent"].tokens.type_names.index("lock")
    assert ((locks & ~tokens.padding).sum(-1) == 3 + 3 * 2).all()
    assert ((locks & mask).sum(-1) == 3).all()
    plain = make_batched_env("boxworld", 8, **{**LEVELS, "num_distractors": 0})
    plain.reset()
    assert torch.equal(plain.signal()["agent"], ~plain.observe()["agent"].padding)
