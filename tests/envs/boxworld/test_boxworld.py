"""BoxWorld: rules, tokens, seeds, drawing, settings, golden episode.

``python tests/envs/boxworld/test_boxworld.py`` writes the golden file anew; a change in
it is a change of the dynamics, which asks for a higher ``BoxWorld.version``.
"""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.boxworld_rules import Level, draw, read, write
from helpers.paths import GOLDEN_FILES
from marl_pool.config import compose
from marl_pool.envs import make_heuristic
from marl_pool.envs.boxworld.codes import AGENT, HELD, KEY_COLORS
from marl_pool.envs.boxworld.env import BoxWorld
from marl_pool.policies import make_policy
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, Stream

GOLDEN = GOLDEN_FILES / "boxworld.json"
UP, DOWN, LEFT, RIGHT = range(4)
OBSERVATIONS = ("entities", "pixels")
CHAIN: dict[str, Any] = {"n": 9, "goal_length": 3, "distractor_length": 2}

# Two boxes on the path, a distractor box that the first key opens.
TWO_BOXES = draw(
    """
    @a...
    .....
    bA.cA
    .....
    .*B..
    """,
    "c",
)


def two_boxes(**options: Any) -> BoxWorld:
    return write(TWO_BOXES, goal_length=3, num_distractors=1, **options)


def rewards_of_moves(env: BoxWorld, *actions: int) -> list[float]:
    """Return the rewards of some moves in the first environment."""
    return [float(act(env, action)[0]) for action in actions]


def act(env: BoxWorld, action: int) -> tuple[float, bool, bool]:
    choice = torch.full((env.num_envs, 1), action)
    step = env.step({"agent": choice})
    reward = step.rewards["agent"][0, 0].item()
    return reward, bool(step.terminated[0]), bool(step.truncated[0])


def visible_tokens(env: BoxWorld, index: int = 0) -> Counter:
    """Count unpadded tokens by type, color, and cells down and right of self."""
    tokens = env.observe()["agent"].at((index, 0))
    names = env.groups["agent"].tokens.type_names
    return Counter(
        (
            names[kind],
            *(round(255 * part) for part in features[:3]),
            *(round((env.n + 1) * part) for part in features[3:]),
        )
        for features, kind, absent in zip(
            tokens.features.tolist(),
            tokens.types.tolist(),
            tokens.padding.tolist(),
            strict=True,
        )
        if not absent
    )


def expected(level: Level, observation: str) -> Counter:
    entities = level.pixels() if observation == "pixels" else level.entities()
    row, column = level.agent
    return Counter((kind, *rgb, r - row, c - column) for kind, rgb, (r, c) in entities)


# Rules


def test_keys_open_the_boxes_along_the_path_to_the_gem():
    assert read(env := two_boxes())
    assert rewards_of_moves(env, RIGHT) == [1]  # the loose key
    # Down to the lock of b, which opens; down again, and over to the lock of the gem.
    assert rewards_of_moves(env, DOWN, DOWN) == [0, 1]
    assert rewards_of_moves(env, DOWN, RIGHT) == [0, 0]
    assert act(env, DOWN) == (10, True, False)
    assert visible_tokens(env)["held", 255, 255, 255, -5, -3] == 1


def test_a_distractor_ends_the_episode():
    env = two_boxes()
    assert rewards_of_moves(env, *[RIGHT] * 4) == [1, 0, 0, 0]
    assert rewards_of_moves(env, DOWN) == [0]
    assert act(env, DOWN) == (-1, True, False)


def test_contents_and_locks_without_their_key_are_walls():
    env = two_boxes()
    for way, blocked in (
        ((), (UP, LEFT)),  # the room's wall
        ((DOWN,), (DOWN,)),  # content
        ((RIGHT,), (DOWN,)),  # a lock, without a key
        ((UP, DOWN, RIGHT, DOWN, DOWN), (DOWN,)),  # the lock of another color
    ):
        rewards_of_moves(env, *way)
        before = env.codes.clone()
        assert rewards_of_moves(env, *blocked) == [0] * len(blocked)
        assert torch.equal(env.codes, before)
    assert before[0, 0] == HELD


def test_cells_of_an_opened_box_are_walkable():
    env = two_boxes()
    rewards_of_moves(env, RIGHT, DOWN, DOWN)
    assert rewards_of_moves(env, LEFT, UP, DOWN, RIGHT) == [0] * 4
    assert int(env.codes[0, 1 + 2 * 5 + 1]) == AGENT
    names = [kind for kind, *_ in visible_tokens(env).elements()]
    # Self, held, c and its lock, the gem and its lock; a and b with its lock are gone.
    assert sorted(names) == ["gem", "held", "key", "lock", "lock", "self"]


@pytest.mark.parametrize("observation", OBSERVATIONS)
@given(st.data())
def test_it_agrees_with_the_rules_in_plain_python(observation, data):
    options = data.draw(
        st.sampled_from(
            [
                {},
                CHAIN,
                {"random_distractors": True},
                {"n": 4, "num_distractors": 0},
                {"n": 5, "num_distractors": 1},
            ]
        )
    )
    seed = data.draw(st.integers(0, 10_000))
    env = BoxWorld(2, seed=seed, observation=observation, **options)
    env.reset()
    levels = [read(env, 0), read(env, 1)]
    solver = make_heuristic("boxworld", env.groups["agent"])
    ended = [False, False]
    for _ in range(data.draw(st.integers(0, 25))):
        # Chance alone opens few boxes.
        choice = solver.act(env.observe()["agent"]).action
        if data.draw(st.booleans()):
            choice = torch.tensor([[data.draw(st.integers(0, 3))] for _ in range(2)])
        step = env.step({"agent": choice})
        for i in range(2):
            if ended[i]:
                continue  # the caller resets it
            levels[i], reward, ended[i] = levels[i].act(int(choice[i]))
            assert step.rewards["agent"][i].item() == reward
            assert bool(step.terminated[i]) == ended[i]
            assert visible_tokens(env, i) == expected(levels[i], observation)


def test_random_actions_score_as_in_the_published_env():
    """Measured there: 300 episodes, mean return 0.52, length 29.1, 6.3 % ended.

    Standard errors are near 0.15, 0.25 and 1.4 %; boxes stand a little closer there.
    """
    env = BoxWorld(2000, random_distractors=True)
    env.reset()
    chance = Stream(0, env.env_ids, Purpose.POLICY, 1)
    live, total = torch.ones(2000, dtype=torch.bool), torch.zeros(2000)
    length = torch.zeros(2000)
    for _ in range(30):
        step = env.step({"agent": (4 * chance.next()).long()})
        total += step.rewards["agent"][:, 0] * live
        length += live
        live &= ~step.terminated
    assert total.mean().item() == pytest.approx(0.52, abs=0.3)
    assert length.mean().item() == pytest.approx(29.1, abs=0.5)
    assert 1 - live.float().mean().item() == pytest.approx(0.063, abs=0.028)


# Tokens


def test_entity_tokens_are_in_fixed_order_and_padded():
    env = two_boxes()

    def names() -> list[str]:
        tokens = env.observe()["agent"].at((0, 0))
        type_names = env.groups["agent"].tokens.type_names
        return [
            "" if absent else type_names[kind]
            for kind, absent in zip(tokens.types, tokens.padding, strict=True)
        ]

    boxes = ["key", "lock", "key", "lock", "gem", "lock"]  # row by row: b, c, gem
    assert names() == ["self", "key", *boxes]
    rewards_of_moves(env, RIGHT)
    assert names() == ["self", "held", *boxes]
    rewards_of_moves(env, DOWN, DOWN)  # stands on what was the lock of b
    assert names() == ["self", "held", "", "", *boxes[2:]]


def test_pixel_tokens_are_row_major_after_the_held_key():
    env = two_boxes(observation="pixels")
    tokens = env.observe()["agent"].at((0, 0))
    assert tokens.padding.tolist() == [True] + [False] * 25
    assert tokens.types[1:6].tolist() == [0, 2, 1, 1, 1]
    down, right = (tokens.features[1:, 3:] * 6).round().long().unbind(1)
    assert down.tolist() == [row for row in range(5) for _ in range(5)]
    assert right.tolist() == list(range(5)) * 5
    rewards_of_moves(env, RIGHT)
    tokens = env.observe()["agent"].at((0, 0))
    assert not tokens.padding.any()
    assert tokens.types[:3].tolist() == [5, 1, 0]
    red, green, blue = (255 * tokens.features[0, :3]).tolist()
    assert (red, green, blue) == pytest.approx(KEY_COLORS[0])
    # Of the agent at (1, 2), the corner (0, 0) is up and left.
    assert tokens.features[0, 3:].tolist() == pytest.approx([-1 / 6, -2 / 6])


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_policy_ignores_values_under_padding(observation):
    """In the published env padding took part in attention."""
    env = BoxWorld(20, observation=observation)
    env.reset()
    group = env.groups["agent"]
    solver = make_heuristic("boxworld", group)
    for _ in range(12):
        env.step({"agent": solver.act(env.observe()["agent"]).action})
    env.reset(torch.arange(20) < 10)
    tokens = env.observe()["agent"]
    assert tokens.padding.any()
    parts: dict[str, Any] = {
        "encoder": {"name": "transformer", "dim": 6, "num_heads": 6},
        "pooling": {"name": "ada", "num_heads": 6},
    }
    options = {"init_std": 0.5, "seed": 0, **parts}
    policy = make_policy(group.tokens, group.action_space, **options)
    hidden = torch.where(tokens.padding[..., None], 99.0, tokens.features)
    types = tokens.types.masked_fill(tokens.padding, 0)
    same = Tokens(hidden, types, tokens.padding)
    with torch.no_grad():
        assert torch.equal(policy.act(tokens).logits, policy.act(same).logits)


# Seeds


def test_levels_are_determined_by_the_seed():
    first, repeat, second = (BoxWorld(50, seed=seed) for seed in (5, 5, 6))
    for env in (first, repeat, second):
        env.reset()
    assert torch.equal(first.codes, repeat.codes)
    assert (first.codes != second.codes).any(1).all()
    assert len({tuple(row) for row in first.codes.tolist()}) == 50
    before = first.codes.clone()
    first.reset()
    assert (first.codes != before).any(1).all()


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=20))
def test_levels_do_not_depend_on_when_others_reset(masks):
    env = BoxWorld(4, seed=2)
    env.reset()
    for mask in masks:
        env.reset(torch.tensor(mask))
    for number in range(4):
        episode = sum(mask[number] for mask in masks)
        single = BoxWorld(1, seed=2, first_env=number, first_episode=episode)
        single.reset()
        assert torch.equal(env.codes[number], single.codes[0])
        assert torch.equal(env.places[number], single.places[0])


# Wrong input


def test_more_keys_than_colors_are_refused():
    options: dict[str, Any] = {"n": 32, "num_distractors": 1}
    assert BoxWorld(1, goal_length=19, **options).generator.path == 18
    with pytest.raises(InputError, match=r"env\.goal_length: expected at most 19 col"):
        BoxWorld(1, goal_length=20, **options)


# Views, drawing, settings


def middle(image: np.ndarray, level: Level, row: int, column: int) -> tuple[int, ...]:
    side = len(image) / (level.n + 2)
    return tuple(image[int((row + 0.5) * side), int((column + 0.5) * side)].tolist())


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("size", [64, 512])
def test_a_frame_shows_every_cell(observation, size):
    env = two_boxes(observation=observation)
    level, image = TWO_BOXES, env.frame(size=size)
    assert image.shape == (size, size, 3)
    assert image.dtype == np.uint8
    for _, color, cell in level.pixels():
        assert middle(image, level, *cell) == color
    wall = middle(image, level, 0, 0)
    assert max(wall) < 50
    assert middle(image, level, 3, 6) == middle(image, level, 0, 3) == wall
    rewards_of_moves(env, RIGHT)
    held = env.frame(size=size)
    assert middle(held, level, 0, 0) == KEY_COLORS[0]
    assert middle(held, level, 1, 2) == (128, 128, 128)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_attention_is_drawn_as_a_rim_around_cells(observation):
    env = two_boxes(observation=observation)
    rewards_of_moves(env, RIGHT)
    plain, level = env.frame().astype(int), TWO_BOXES.act(RIGHT)[0]
    tokens = env.observe()["agent"].at((0, 0))
    side = 512 / 7
    for token in range(env.groups["agent"].tokens.num_tokens):
        weights = torch.zeros_like(tokens.padding, dtype=torch.float32)
        weights[token] = 1.0
        image = env.frame(attention=weights)
        changed = np.abs(image - plain).sum(-1).nonzero()
        cells = {tuple((point / side).astype(int)) for point in np.stack(changed, 1)}
        away = (tokens.features[token, 3:] * 6).round().long().tolist()
        row, column = (point + d for point, d in zip(level.agent, away, strict=True))
        assert cells == {(row, column)}
        # What the cell holds is still seen.
        assert middle(image, level, row, column) == middle(plain, level, row, column)


def test_rim_widens_with_attention():
    env = two_boxes()
    plain = env.frame().astype(int)
    even = torch.full((8,), 1 / 8)
    strong = torch.full((8,), 0.02)
    strong[0] = 0.86

    def rim(weights: Tensor) -> int:
        """Pixels that change in the agent's own cell."""
        change = np.abs(env.frame(attention=weights) - plain).sum(-1)
        return int(np.count_nonzero(change[73:146, 73:146]))

    assert 0 < 2 * rim(even) < rim(strong) < 73**2


def test_experiment_boxworld_matches_tables_14_and_15():
    config = compose("train", ["experiment=boxworld"])
    encoder = {"dim": 6, "num_layers": 6, "num_heads": 6, "dim_ff": 24}
    policy = {"type_embedding": 0, "head_hidden": [32, 32], "init_std": 0.02}
    env = {"n": 7, "goal_length": 2, "num_distractors": 2, "distractor_length": 1}
    env |= {"max_steps": 30, "random_distractors": False}
    for section, table in (("encoder", encoder), ("policy", policy), ("env", env)):
        assert {key: config[section][key] for key in table} == table
    assert config["pooling"]["num_heads"] == 6
    assert config["total_steps"] == 3000 * 14_400
    paper = compose("train", ["ppo=paper"])["ppo"]
    differs = {"num_envs": 96, "batch_size": 14_400, "num_epochs": 32}
    assert config["ppo"] == {**paper, **differs, "value_coeff": 0.01}


# Golden


def golden_episode() -> dict[str, Any]:
    """The solver's path through a level of a chain and branches, and all it sees."""
    env = BoxWorld(2, seed=3, max_steps=60, **CHAIN)
    env.reset()
    solver = make_heuristic("boxworld", env.groups["agent"])
    start, steps = env.codes.tolist(), []
    for _ in range(25):
        action = solver.act(env.observe()["agent"]).action
        step = env.step({"agent": action})
        tokens = env.observe()["agent"]
        steps.append(
            {
                "actions": action[:, 0].tolist(),
                "rewards": step.rewards["agent"][:, 0].tolist(),
                "terminated": step.terminated.tolist(),
                "types": tokens.types[:, 0].tolist(),
                "padding": tokens.padding[:, 0].tolist(),
            }
        )
    colors = (tokens.features[:, 0, :, :3] * 255).round().int().tolist()
    away = (tokens.features[:, 0, :, 3:] * (env.n + 1)).round().int().tolist()
    return {"start": start, "steps": steps, "colors": colors, "away": away}


def test_golden_episode():
    assert json.loads(GOLDEN.read_text()) == golden_episode()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_episode()) + "\n")
