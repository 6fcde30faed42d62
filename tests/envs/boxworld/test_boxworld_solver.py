"""BoxWorld's solver: it proves that levels can be solved, and is the heuristic."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.boxworld_rules import draw, read, write
from marl_pool.envs import make_heuristic
from marl_pool.envs.boxworld.env import BoxWorld
from marl_pool.policies.base import Policy
from marl_pool.tokens import Tokens


def play(env: BoxWorld, limit: int = 200) -> tuple[Tensor, Tensor]:
    """Play the heuristic; return its episodes' returns and lengths."""
    policy = make_heuristic("boxworld", env.groups["agent"])
    returns = torch.zeros(env.num_envs)
    lengths = torch.zeros(env.num_envs, dtype=torch.int64)
    rows = torch.arange(env.num_envs)
    for _ in range(limit):
        step = env.step({"agent": policy.act(env.observe()["agent"]).action})
        returns[rows] += step.rewards["agent"][:, 0]
        lengths[rows] += 1
        rows = rows[~step.terminated]
        if not len(rows):
            break
        env = env.select((~step.terminated).nonzero()[:, 0])
    return returns, lengths


def solved(count: int, *, limit: int = 200, **options: Any) -> tuple[Tensor, Tensor]:
    env = BoxWorld(count, max_steps=200, **options)
    env.reset()
    return play(env, limit)


@pytest.mark.slow
def test_10000_levels_are_solved_within_30_steps():
    """The return of an episode shows that no distractor was opened."""
    returns, lengths = solved(10_000, observation="pixels")
    assert (returns == 11).all()
    assert lengths.max() == 23
    assert lengths.double().mean().item() == pytest.approx(10.2, abs=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 5, "random_distractors": True},
        {"n": 6, "goal_length": 3, "num_distractors": 1},
        {"n": 9, "goal_length": 4, "num_distractors": 2},
        {"n": 3, "num_distractors": 0},
        {"n": 7, "num_distractors": 3, "random_distractors": True},
        {"n": 12, "goal_length": 3, "num_distractors": 5, "distractor_length": 2},
    ],
)
def test_solution_is_the_shortest_path(options):
    """The oracle is a search over positions, keys and opened boxes in plain Python."""
    env = BoxWorld(30, max_steps=200, observation="pixels", seed=5, **options)
    env.reset()
    shortest = [read(env, index).shortest() for index in range(30)]
    returns, lengths = play(env)
    assert lengths.tolist() == shortest
    assert (returns == options.get("goal_length", 2) + 9).all()


def test_entity_tokens_solve_nearly_as_fast_as_pixels():
    returns, lengths = solved(500)
    assert (returns == 11).all()
    best = solved(500, observation="pixels")[1]
    assert (lengths >= best).all()
    assert (lengths == best).double().mean() > 0.95


def test_entities_without_distractors_may_leave_the_way_around_unknown():
    returns, _ = solved(1000, limit=40, num_distractors=0)
    assert 0.99 < (returns == 11).double().mean() < 1


@pytest.mark.parametrize("observation", ["entities", "pixels"])
def test_solver_walks_around_a_box(observation):
    level = draw(
        """
        .....
        @xAa.
        .....
        .....
        .*A..
        """,
        "x",
    )
    env = write(level, num_distractors=1, observation=observation, max_steps=50)
    returns, lengths = play(env)
    assert returns.item() == 11
    # Round the box to the key: 5; to the lock: 4, and the gem is taken there.
    assert lengths.item() == level.shortest() == 9


# Decisions from tokens


def policy_and_tokens(observation: str = "pixels") -> tuple[Policy, Tokens]:
    env = BoxWorld(30, observation=observation, seed=2)
    env.reset()
    policy = make_heuristic("boxworld", env.groups["agent"])
    for _ in range(6):
        env.step({"agent": policy.act(env.observe()["agent"]).action})
    return policy, env.observe()["agent"]


@pytest.mark.parametrize("observation", ["entities", "pixels"])
def test_batch_rows_are_independent(observation):
    policy, tokens = policy_and_tokens(observation)
    decision = policy.act(tokens)
    assert decision.action.shape == (30, 1)
    assert decision.action.dtype == torch.int64
    assert decision.logits.shape == (30, 1, 4)
    single = policy.act(tokens.at(slice(7, 8)))
    assert torch.equal(single.logits[0], decision.logits[7])
    assert torch.equal(policy.double().act(tokens).logits, decision.logits)


@pytest.mark.parametrize("observation", ["entities", "pixels"])
def test_values_under_padding_are_ignored(observation):
    policy, tokens = policy_and_tokens(observation)
    padding = tokens.padding.clone()
    padding[:, :, -2:] = True
    features = torch.where(padding[..., None], torch.nan, tokens.features)
    types = tokens.types.masked_fill(padding, 0)
    decision = policy.act(Tokens(features, types, padding))
    short = Tokens(
        tokens.features[:, :, :-2], tokens.types[..., :-2], padding[..., :-2]
    )
    assert torch.equal(decision.logits, policy.act(short).logits)


def test_actions_are_valid_for_any_tokens():
    policy, tokens = policy_and_tokens()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tokens.features.shape, generator=generator)
    mixed = torch.randint(0, 6, tokens.types.shape, generator=generator)
    for wild in (
        Tokens(tokens.features + noise, tokens.types, tokens.padding),
        Tokens(1e30 * noise, mixed, tokens.padding),
        Tokens(tokens.features, mixed, tokens.padding),
        Tokens(tokens.features, tokens.types, torch.ones_like(tokens.padding)),
    ):
        action = policy.act(wild).action
        assert ((action >= 0) & (action < 4)).all()
