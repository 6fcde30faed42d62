"""BoxWorld's levels: random choices, placement, and random streams."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.boxworld_rules import Cell, Level, read
from marl_pool.envs.boxworld.codes import COLORS, KEY_COLORS
from marl_pool.envs.boxworld.env import BoxWorld
from marl_pool.envs.boxworld.levels import (
    LevelGenerator,
    choose,
    choose_several,
)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3, "num_distractors": 0},
    {"n": 5},
    {"n": 7, "num_distractors": 3},
    {"n": 7, "goal_length": 5, "num_distractors": 0},
    {"n": 12, "goal_length": 5, "num_distractors": 4, "distractor_length": 2},
    {"n": 8, "num_distractors": 5, "random_distractors": True},
]


def levels(count: int, **options: Any) -> list[Level]:
    env = BoxWorld(count, **options)
    env.reset()
    return [read(env, index) for index in range(count)]


def touch(first: list[Cell], second: list[Cell]) -> bool:
    return any(max(abs(r - s), abs(c - d)) <= 1 for r, c in first for s, d in second)


def chi_squared(counts: Tensor) -> float:
    even = counts.sum() / len(counts)
    return float(((counts - even) ** 2 / even).sum())


# Random choices


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.floats(1e-9, 1.0))
def test_what_is_chosen_is_legal(legal, number):
    place, none = choose(torch.tensor([legal]), torch.tensor([[number]]))
    assert bool(none) == (not any(legal))
    assert legal[int(place)] or none


def test_choice_is_uniform_among_legal_options():
    legal = torch.tensor([False, True, True, False, True]).expand(300, -1)
    numbers = (torch.arange(300) + 0.5)[:, None] / 300
    place, _ = choose(legal, numbers)
    assert place[:, 0].bincount(minlength=5).tolist() == [0, 100, 100, 0, 100]


@given(st.integers(1, 5), st.integers(0, 100))
def test_several_choices_differ(count, seed):
    numbers = torch.rand(20, count, generator=torch.Generator().manual_seed(seed))
    legal = torch.ones(20, 5, dtype=torch.bool)
    choices = choose_several(legal, numbers)
    assert all(len(set(row)) == count for row in choices.tolist())
    remainders = [set(row.nonzero()[:, 0].tolist()) for row in legal]
    for row, remainder in zip(choices.tolist(), remainders, strict=True):
        assert remainder == set(range(5)) - set(row)


# Structure of levels


@pytest.mark.parametrize("options", OPTIONS)
def test_boxes_do_not_touch_and_lie_within_the_walls(options):
    for level in levels(60, **options):
        assert level.loose is not None
        things = [[box.cell, box.lock_cell] for box in level.boxes]
        things.append([level.loose[0]])
        for i, thing in enumerate(things):
            assert all(1 <= part <= level.n for cell in thing for part in cell)
            assert not any(touch(thing, neighbor) for neighbor in things[:i])
            assert level.agent not in thing


@pytest.mark.parametrize("options", OPTIONS)
def test_the_path_is_a_chain_and_branches_begin_on_it(options):
    goal_length = options.get("goal_length", 2)
    length = options.get("distractor_length", 1)
    for level in levels(60, **options):
        assert level.loose is not None
        path, key = [level.loose[1]], level.loose[1]
        boxes = {box.lock: box for box in level.boxes if not box.trap}
        assert len(boxes) == goal_length - 1
        while (key := boxes[key].content) != "gem":
            path.append(key)
        assert len(path) == len(set(path)) == goal_length - 1
        traps = [box for box in level.boxes if box.trap]
        assert not {box.content for box in traps} & {*path, "gem"}
        roots = [box for box in traps if box.lock in path]
        if not options.get("random_distractors"):
            assert len(traps) == length * options.get("num_distractors", 2)
        assert len(roots) * length == len(traps)
        # Every other lock of a branch opens with the content of a box of a branch.
        later = Counter(box.lock for box in traps if box.lock not in path)
        assert not later - Counter(box.content for box in traps)


def test_every_color_root_and_cell_is_drawn_evenly():
    sample = levels(3000, n=7, goal_length=3, num_distractors=1)
    loose = Counter(level.loose[1] for level in sample if level.loose)
    assert len(loose) == len(KEY_COLORS) == COLORS
    # 18 degrees of freedom; 47 is exceeded once in four thousand.
    assert chi_squared(torch.tensor(list(loose.values())).double()) < 47
    first = [
        next(box.lock for box in level.boxes if box.trap) == level.loose[1]
        for level in sample
        if level.loose
    ]
    assert sum(first) / 3000 == pytest.approx(0.5, abs=0.04)
    cells = {(row, column) for row in range(1, 8) for column in range(1, 8)}
    assert {level.agent for level in sample} == cells
    assert {level.loose[0] for level in sample if level.loose} == cells
    contents = {box.cell for level in sample for box in level.boxes}
    assert contents == {cell for cell in cells if cell[1] < 7}


def test_the_first_box_is_placed_uniformly():
    sample = levels(4000, num_distractors=0)
    counts = Counter(box.cell for level in sample for box in level.boxes)
    assert len(counts) == 7 * 6
    # 41 degrees of freedom; 80 is exceeded once in four thousand.
    assert chi_squared(torch.tensor(list(counts.values())).double()) < 80


def test_the_number_of_branches_is_exact_or_uniform():
    assert {len(level.boxes) for level in levels(200)} == {3}
    counts = Counter(
        len(level.boxes) for level in levels(3000, random_distractors=True)
    )
    assert set(counts) == {1, 2, 3}
    # 2 degrees of freedom; 17 is exceeded once in five thousand.
    assert chi_squared(torch.tensor(list(counts.values())).double()) < 17


# Random streams


def test_levels_without_room_are_redrawn_from_their_own_stream():
    """On 5 × 5 cells the third box or the key finds no room in one level of seven."""
    env = BoxWorld(400, n=5, seed=7)
    draws: list[tuple[int, int]] = []

    def draw(keys: Tensor, count: int, start: int = 0) -> Tensor:
        draws.append((len(keys), start))
        return BoxWorld.sample_uniform(env, keys, count, start)

    env.sample_uniform = draw  # type: ignore[method-assign]
    env.reset()
    numbers = env.generator.numbers
    assert [start for _, start in draws] == [numbers * i for i in range(len(draws))]
    assert 30 < draws[1][0] < 90
    for number in range(0, 400, 23):
        single = BoxWorld(1, n=5, seed=7, first_env=number)
        single.reset()
        assert torch.equal(single.codes[0], env.codes[number])


def test_default_levels_always_have_room():
    """Each box blocks at most 15 of 42 places for the next, 12 of 49 for the key."""
    generator = LevelGenerator(7, 2, 2, 1, False)
    barred = (~generator._box_apart & generator._starts).sum(1).max()
    assert 2 * int(barred) < int(generator._starts.sum())
    assert 3 * int((~generator._key_apart).sum(1).max()) < 49
