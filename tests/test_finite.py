"""Every way to play a rollout refuses NaN and infinity."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils._pytree import tree_leaves

import marl_pool
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.finite import NonFiniteError, validate_finite
from marl_pool.policies import make_policy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.randomness import EVALUATION_ENVS, place_in_batch

BAD_STEP = 2


class PoisonedEnv(BatchedEnv):
    """Two agents whose numbers are bad in one step of environment 1.

    Args:
        poison: where the bad value is: observations, padding or rewards.
        value: the bad value.
    """

    state_names = ("x",)

    def __init__(
        self,
        num_envs: int,
        *,
        poison: str = "rewards",
        value: float = math.nan,
        max_steps: int = 5,
        **common: Any,
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **common)
        spec = TokenSpec(2, 1, ("self", "other"))
        self.groups = {"pair": AgentGroup(2, spec, spaces.Discrete(3))}
        self.poison, self.value = poison, value
        self.x = torch.zeros(num_envs, 2, 2)

    def observe(self) -> dict[str, Tokens]:
        features = self.x[..., None].clone()
        types = torch.tensor([0, 1]).expand(self.num_envs, 2, 2)
        padding = torch.zeros(self.num_envs, 2, 2, dtype=torch.bool)
        padding[..., 1] = True
        if self.poison in ("observations", "padding"):
            slot = int(self.poison == "padding")
            bad = (self.env_ids % 4 == 1) & (self.steps == BAD_STEP)
            features[bad, 1, slot] = self.value
        return {"pair": Tokens(features, types, padding)}

    def place(self, rows: torch.Tensor, keys: torch.Tensor) -> None:
        self.x = self.x.index_copy(0, rows, self.sample_uniform(keys, 4).view(-1, 2, 2))

    def advance(self, actions: Any) -> Any:
        rewards = torch.ones(self.num_envs, 2)
        bad = (self.env_ids % 4 == 1) & (self.steps == BAD_STEP)
        if self.poison == "rewards":
            rewards[bad, 1] = self.value
        return {"pair": rewards}, torch.zeros(self.num_envs, dtype=torch.bool)


def rollout(sync_free: bool = False, **options: Any) -> Rollout:
    env = PoisonedEnv(3, **options)
    group = env.groups["pair"]
    policies = {"pair": make_policy(group.tokens, group.action_space, seed=0)}
    return Rollout(env, policies, sync_free=sync_free)


PLAYS: dict[str, Callable[[Rollout], Any]] = {
    "steps": lambda playing: playing.steps(4),
    "advance": lambda playing: playing.advance(4),
    "episodes": lambda playing: playing.episodes(),
}
plays = pytest.mark.parametrize("play", PLAYS)


@pytest.mark.parametrize("sync_free", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poison", ["observations", "rewards"])
@plays
def test_a_bad_number_is_named_with_its_place(play, poison, value, sync_free):
    playing = rollout(sync_free, poison=poison, value=value)
    message = (
        f"NaN or infinite: {poison} of 1 .*first: {poison} of agent 1 of group 'pair' "
        f"in environment 1 at step {BAD_STEP + (poison == 'rewards')}"
    )
    with pytest.raises(NonFiniteError, match=message):
        PLAYS[play](playing)


@plays
def test_padding_may_hold_anything(play):
    poisoned, clean = (PLAYS[play](rollout(poison=p)) for p in ("padding", "none"))
    if play == "steps":
        assert poisoned["pair"].tokens.features.isnan().any()
        poisoned, clean = (p["pair"]._replace(tokens=()) for p in (poisoned, clean))
    parts = zip(tree_leaves(poisoned), tree_leaves(clean), strict=True)
    assert all(a is b or a.equal(b) for a, b in parts)


def test_large_finite_numbers_are_fine():
    returns = rollout(value=3e38).episodes().returns["pair"]
    assert returns[1, 1] == pytest.approx(3e38)


@plays
def test_nan_weights_are_refused(play):
    playing = rollout(poison="none")
    with torch.no_grad():
        for parameter in playing.policies["pair"].parameters():
            parameter.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="NaN or infinite: action logits of "):
        PLAYS[play](playing)


def test_an_evaluation_refuses_nan():
    with pytest.raises(NonFiniteError, match="NaN or infinite: rewards"):
        marl_pool.evaluate(
            lambda observation: np.zeros(len(observation["types"]), np.int64),
            env={"name": f"{__name__}:PoisonedEnv"},
            suite={"perturbations": []},
            episodes=4,
        )


def test_environments_are_counted_from_zero_in_evaluations_too():
    assert [place_in_batch(first + 3) for first in (0, 1 << 40, 1 << 41)] == [3, 3, 3]
    bad = torch.full((1, 1, 1), math.nan)
    tokens = Tokens(torch.zeros(1, 1, 1, 1, 1), *[torch.zeros(1, 1, 1, 1).bool()] * 2)
    ids = torch.tensor([EVALUATION_ENVS + 7])
    with pytest.raises(NonFiniteError, match="in environment 7 at step 0"):
        validate_finite("pair", tokens, bad[..., None], bad, env_ids=ids)


def test_the_kind_that_was_bad_first_is_reported():
    tokens = Tokens(
        torch.ones(3, 1, 1, 2, 1),
        torch.zeros(3, 1, 1, 2, dtype=torch.int64),
        torch.zeros(3, 1, 1, 2, dtype=torch.bool),
    )
    logits, rewards = torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1)
    logits[0], tokens.features[1:], rewards[0] = math.nan, math.nan, math.nan
    message = (
        "observations of 2 steps, action logits of 3 steps, rewards of 1 steps; first: "
        "action logits of agent 0 of group 'pair' in environment 0 at step 0"
    )
    logits[1:] = math.nan
    with pytest.raises(NonFiniteError, match=message):
        validate_finite("pair", tokens, logits, rewards, env_ids=torch.zeros(1).long())
    # Logits of the same step follow from the observation.
    tokens.features[0] = math.nan
    with pytest.raises(NonFiniteError, match="; first: observations of agent 0 "):
        validate_finite("pair", tokens, logits, rewards, env_ids=torch.zeros(1).long())
