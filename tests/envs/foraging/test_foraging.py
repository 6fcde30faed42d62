"""Level-based foraging: agreement with lbforaging, and the steps to food."""

from typing import Any

import numpy as np
import pytest
import torch
from lbforaging.foraging.environment import ForagingEnv
from torch import Tensor

from marl_pool import Rollout, make_batched_env, make_heuristic
from marl_pool.envs.foraging.env import LevelBasedForaging
from marl_pool.envs.foraging.steps import LOAD, NONE, step_beside
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.utils.errors import InputError

TASKS: dict[str, dict[str, Any]] = {
    "8x8-2p-2f-coop": {},
    "5x5-4p-2f": {"size": 5, "num_agents": 4, "cooperative": False},
    "7x7-3p-3f-1s-pen": {
        **{"size": 7, "num_agents": 3, "num_food": 3, "sight": 1},
        **{"cooperative": False, "penalty": 0.1, "max_level": 3},
    },
    "6x6-3p-2f-2s-coop": {"size": 6, "num_agents": 3, "sight": 2},
}


def published(env: LevelBasedForaging) -> ForagingEnv:
    """Return lbforaging's environment in the state of our batch of one."""
    size, agents, food = env.size, env.num_agents, env.num_food
    oracle = ForagingEnv(
        players=agents,
        min_player_level=1,
        max_player_level=env.max_level,
        min_food_level=1,
        max_food_level=None,
        field_size=(size, size),
        max_num_food=food,
        sight=env.sight or size,
        max_episode_steps=env.max_steps,
        force_coop=env.cooperative,
        penalty=env.penalty,
    )
    oracle.reset(seed=0)
    oracle.field[:] = 0
    places, levels = env.food_places[0].tolist(), env.food_levels[0].tolist()
    for (row, column), level in zip(places, levels, strict=True):
        oracle.field[row, column] = level
    for i, player in enumerate(oracle.players):
        place = tuple(env.places[0, i].tolist())
        player.setup(place, env.levels[0, i].item(), oracle.field_size)
    oracle._food_spawned = oracle.field.sum()
    oracle._gen_valid_moves()
    return oracle


def entities(numbers: np.ndarray) -> list[tuple[float, ...]]:
    """Return the entities that lbforaging's vector shows, in order."""
    rows = map(tuple, numbers.reshape(-1, 3).tolist())
    return sorted(row for row in rows if row[2] > 0)


def shown(env: LevelBasedForaging, agent: int) -> list[list[tuple[float, ...]]]:
    """Return food and agents of an observation as lbforaging numbers them.

    There the origin is the corner of what the agent sees.
    """
    tokens = env.observe()["agent"].at((0, agent))
    place, sight = tokens.features[0, :2], env.sight or env.size
    corner = torch.minimum(place, torch.full_like(place, sight))
    features = tokens.features.clone()
    features[1:, :2] += corner
    features[0, :2] = corner
    return [
        sorted(tuple(row) for row in features[kinds & ~tokens.padding].tolist())
        for kinds in (tokens.types == 2, tokens.types != 2)
    ]


@pytest.mark.parametrize("options", TASKS.values(), ids=TASKS)
def test_steps_match_lbforaging(options: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    rewarded = 0
    for seed in range(6):
        env = LevelBasedForaging(
            1, seed=seed, max_steps=40, dtype=torch.float64, **options
        )
        heuristic = make_heuristic("lbforaging", env.groups["agent"])
        env.reset()
        oracle, done = published(env), False
        observed = oracle.test_make_gym_obs()
        while not done:
            for agent in range(env.num_agents):
                food, agents = np.split(observed[agent], [3 * env.num_food])
                expected = [entities(food), entities(agents)]
                assert shown(env, agent) == expected
            actions = heuristic.act(env.observe_state()["agent"]).action
            explored = torch.from_numpy(generator.integers(6, size=actions.shape))
            is_random = torch.from_numpy(generator.random(actions.shape) < 0.4)
            actions = torch.where(is_random, explored, actions)
            step = env.step({"agent": actions})
            observed, rewards, done, _, _ = oracle.step(actions[0].tolist())
            assert step.rewards["agent"][0].tolist() == rewards
            assert bool(step.terminated | step.truncated) == done
            rewarded += sum(rewards) != 0
    assert rewarded > 5


def test_episodes_begin_as_in_lbforaging() -> None:
    """Levels and places have the distributions of lbforaging's resets."""
    count = 1000
    env = LevelBasedForaging(count, size=5, num_agents=3, cooperative=False)
    env.reset()
    oracle = published(LevelBasedForaging(1, size=5, num_agents=3, cooperative=False))
    fields, levels, food = [], [], []
    for seed in range(count):
        oracle.reset(seed=seed)
        fields.append(oracle.field > 0)
        levels.append(sum(player.level for player in oracle.players))
        food.append(oracle.field.sum())
    ours = torch.zeros(count, 25)
    cells = env.food_places[..., 0] * 5 + env.food_places[..., 1]
    ours.scatter_(1, cells, (env.food_levels > 0).float())
    expected = torch.tensor(np.stack(fields)).float().mean(0).flatten()
    # Three standard errors of the difference of two frequencies are 0.07 at most.
    torch.testing.assert_close(ours.mean(0), expected, rtol=0, atol=0.07)
    for sums, values in ((levels, env.levels.sum(1)), (food, env.food_levels.sum(1))):
        mean = torch.tensor(np.array(sums)).double().mean()
        torch.testing.assert_close(values.double().mean(), mean, rtol=0.04, atol=0)


def test_agents_and_food_have_separate_cells() -> None:
    env = LevelBasedForaging(500, size=6, num_agents=4, num_food=4)
    env.reset()
    places = torch.cat([env.places, env.food_places], 1)
    present = torch.cat([env.levels, env.food_levels], 1) > 0
    same = (places[:, :, None] == places[:, None]).all(-1) & present[:, None]
    assert (same & present[..., None]).sum((1, 2)).equal(present.sum(1))


@pytest.mark.parametrize(
    ("place", "goal", "obstacles", "action"),
    [
        ((0, 0), (0, 3), [], 4),  # east
        ((3, 3), (1, 3), [], 1),  # north
        ((2, 3), (1, 3), [], LOAD),
        ((1, 1), (3, 2), [(2, 1)], 4),  # around an obstacle
        ((0, 0), (2, 2), [(0, 1), (1, 0)], NONE),  # enclosed
        ((0, 0), (2, 2), [(1, 2), (3, 2), (2, 1), (2, 3)], NONE),  # no free side
    ],
)
def test_a_step_leads_beside_a_cell(
    place: tuple[int, int],
    goal: tuple[int, int],
    obstacles: list[tuple[int, int]],
    action: int,
) -> None:
    parts = (torch.tensor(part) for part in (place, goal, [goal, *obstacles]))
    assert int(step_beside(*parts, size=5)) == action


@pytest.mark.parametrize("choices", ["moves", "food"])
def test_the_heuristic_loads_all_food_and_random_actions_do_not(choices: str) -> None:
    def mean_return(policy: Any) -> float:
        env = make_batched_env("lbforaging", 64, choices=choices, seed=3)
        returns = Rollout(env, {"agent": policy}).episodes().returns["agent"]
        return float(returns.sum(1).mean())

    group = make_batched_env("lbforaging", 1, choices=choices).groups["agent"]
    heuristic = make_heuristic("lbforaging", group)
    assert mean_return(heuristic) == pytest.approx(1.0)
    assert mean_return(RandomPolicy(group.action_space)) < 0.6


def test_loaded_food_is_padding_and_not_selectable() -> None:
    env = make_batched_env("lbforaging", 8, choices="food")
    group = env.groups["agent"]
    heuristic = make_heuristic("lbforaging", group)
    env.reset()
    eaten = torch.zeros(8, dtype=torch.bool)
    for _ in range(30):
        tokens = env.observe()["agent"]
        assert tokens.action_mask is not None
        present = tokens.types.eq(2) & ~tokens.padding
        assert tokens.action_mask[..., 1:].equal(present)
        eaten |= present[:, 0].sum(1) == 1
        env.step({"agent": heuristic.act(tokens).action})
    assert eaten.all()


def occupied(env: LevelBasedForaging) -> Tensor:
    same = (env.places[:, :, None] == env.places[:, None]).all(-1)
    return same.sum((1, 2)) > env.num_agents


def test_agents_never_collide_when_choosing_food() -> None:
    env = LevelBasedForaging(64, num_agents=4, num_food=3, size=6, choices="food")
    policy = RandomPolicy(env.groups["agent"].action_space)
    env.reset()
    for _ in range(40):
        env.step({"agent": policy.act(env.observe()["agent"]).action})
        assert not occupied(env).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, "env.size: expected 3 to 64, got 2"),
        (
            {"size": 3, "num_agents": 9},
            "env.num_agents: expected at most 8 on a grid of 3x3 cells, got 9",
        ),
        ({"choices": "foods"}, "env.choices: expected moves or food, got 'foods'"),
        ({"sight": 0}, "env.sight: expected"),
    ],
)
def test_inconsistent_options_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_batched_env("lbforaging", 1, **options)
