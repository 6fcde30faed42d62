"""Shared by the tests of perturbations: variants, tokens, and sequences of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation, PerturbationState
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec
from marl_pool.utils.randomness import Purpose, stream_keys

NOISE = 3
TYPE_NAMES = ("self", "agent", "signal", "noise")
SPEC = TokenSpec(9, 4, TYPE_NAMES, signal_types=("self", "signal"), positions=(0, 1))
OPTIONS: dict[str, dict[str, Any]] = {
    "confuse": {"type_names": TYPE_NAMES},
    "inject": {"token_type": NOISE, "count": 6, "positions": SPEC.positions},
    "occlude": {"type_names": TYPE_NAMES, "signal_types": SPEC.signal_types},
    "shuffle": {"num_frames": 2},
}
"""Required options of perturbations, for the tests' tokens."""

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bias", {}),
    ("bias", {"features": [1, 3], "every": 2}),
    ("confuse", {}),
    ("confuse", {"every": 2, "protect_self": False}),
    ("delay", {}),
    ("delay", {"steps": 2, "protect_self": False}),
    ("duplicate", {}),
    ("duplicate", {"every": 2, "protect_self": False}),
    ("freeze", {}),
    ("freeze", {"every": 3, "protect_self": False}),
    ("freeze", {"onset": 2}),
    ("inject", {}),
    ("inject", {"place": "far"}),
    ("inject", {"place": "near", "onset": 1, "end": 99}),
    ("jitter", {}),
    ("jitter", {"protect_self": False}),
    ("jitter", {"features": [0]}),
    ("occlude", {}),
    ("occlude", {"mode": "zero", "every": 2}),
    ("occlude", {"among": "signal", "protect_self": False}),
    ("occlude", {"among": ["agent", "noise"]}),
    ("rewire", {}),
    ("rewire", {"every": 2, "protect_self": True}),
    ("scale", {}),
    ("scale", {"features": [2], "protect_self": False}),
    ("shuffle", {}),
    ("shuffle", {"every": 2, "protect_self": True}),
    ("shuffle", {"every": 2, "scope": "frame"}),
]
ACTION_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("action_noise", {}),
    ("action_noise", {"every": 2, "onset": 1}),
    ("drop_actions", {}),
    ("drop_actions", {"every": 2, "instead": "zero"}),
]
"""Perturbations of actions, which leave tokens as they are."""
OBSERVED = sorted({name for name, _ in VARIANTS})
"""Perturbations of observations."""
variants = pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=[f"{n}-{o}" for n, o in VARIANTS]
)
SEEN_IN_LOOPS = [case for case in VARIANTS if "scope" not in case[1]]
"""Variants without stacked frames, which the environment of `in_the_loop` lacks."""
in_loops = pytest.mark.parametrize(
    ("name", "options"), [*SEEN_IN_LOOPS, *ACTION_VARIANTS]
)
severities = st.floats(0, 1)
seeds = st.integers(0, 2**31)


def build(name: str, **options: Any) -> Perturbation:
    return make_perturbation(name, **{**OPTIONS.get(name, {}), **options})


def make_tokens(seed: int, envs: int = 3, agents: int = 2, places: int = 9) -> Tokens:
    """Make tokens with one self token and some padding, whose features are NaN."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(envs, agents, places, 4, generator=generator)
    types = torch.randint(1, 4, (envs, agents, places), generator=generator)
    types[..., 0] = SELF_TYPE
    padding = torch.rand(envs, agents, places, generator=generator) < 0.2
    padding[..., 0] = False
    features[padding] = torch.nan
    return Tokens(features, types, padding)


def keys(envs: int = 3, seed: int = 0, first: int = 0, episode: int = 0) -> Tensor:
    env_ids = torch.arange(envs) + first
    episodes = torch.full_like(env_ids, episode)
    return stream_keys(seed, env_ids, episodes, Purpose.PERTURBATION)


def at_time(tokens: Tokens, time: int) -> Tokens:
    """Return the tokens ``time`` steps later: each feature drifts at its own rate."""
    features = tokens.features
    if not time:
        return tokens
    drift = torch.linspace(-1, 1, features[0, 0].numel()).view(features.shape[2:])
    return tokens._replace(features=features + time * drift)


def play(
    perturbation: Perturbation,
    tokens: Tokens,
    steps: int = 5,
    moves: bool = False,
    **options: Any,
) -> list[Tokens]:
    """Return the perturbed tokens of each step; ``moves`` lets the clean ones drift."""
    return [view for view, _ in states(perturbation, tokens, steps, moves, **options)]


def states(
    perturbation: Perturbation,
    tokens: Tokens,
    steps: int = 5,
    moves: bool = False,
    **options: Any,
) -> Iterator[tuple[Tokens, PerturbationState]]:
    state = perturbation.start(tokens, keys(len(tokens.types), **options))
    for time in range(steps):
        current = at_time(tokens, time) if moves else tokens
        perturbed, state = perturbation(current, state)
        yield perturbed, state


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def same(a: Tokens, b: Tokens) -> bool:
    """Compare tokens bit for bit, including NaN and the sign of zero."""
    return all(
        torch.equal(bits(x), bits(y)) for x, y in zip(a.parts, b.parts, strict=True)
    )


def present_bag(tokens: Tokens) -> list[list[tuple[float, ...]]]:
    """Return each row's unpadded tokens as a sorted list, to compare them as sets."""
    flat = tokens.flatten_batch()
    return [
        sorted(
            (*map(float, features), int(kind))
            for features, kind, padded in zip(*row, strict=True)
            if not padded
        )
        for row in zip(*flat.parts, strict=True)
    ]


def first_slots(tokens: Tokens, places: int) -> Tokens:
    return tokens.map(lambda part: part[:, :, :places])


def centroid(num_envs: int = 4, first_env: int = 0, **options: Any) -> BatchedEnv:
    return make_batched_env(
        "simple_centroid",
        num_envs,
        counts="2-3-4",
        max_steps=5,
        first_env=first_env,
        **options,
    )


def in_the_loop(
    name: str, options: dict[str, Any], severity: Any, env: BatchedEnv | None = None
) -> Rollout:
    env = env or centroid()
    group = env.groups["agent"]
    extra = {"inject": {"token_type": "signal"}}.get(name, {})
    perturbation = make_perturbation(
        name, specs={"agent": group.tokens}, severity=severity, **{**extra, **options}
    )
    policy = {"agent": RandomPolicy(group.action_space)}
    return Rollout(env, policy, perturbation=perturbation)
