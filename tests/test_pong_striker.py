"""Pong's striker: its tables against games, and its worth as a teacher."""

import numpy as np
import pytest
import torch

from marl_pool.envs.pong import Pong
from marl_pool.envs.pong_console import Console, Field
from marl_pool.envs.pong_hints import HINTS, hints
from marl_pool.envs.pong_planner import PongPlanner
from marl_pool.envs.pong_player import DOWN, HIT, PUSH, UP, WALLS, Moment, Start
from marl_pool.envs.pong_simulator import NOOP
from marl_pool.envs.pong_striker import (
    CELL,
    HITS,
    KEPT,
    LAG,
    MISSED,
    PLACES,
    SIDE,
    Striker,
    _end,
    solve,
    values,
    wins,
)
from marl_pool.training.cloning.teacher import PlannerTeacher

STAY, LOWER, HIGHER = range(3)
SIGNS = (0, 1, -1)


def test_what_ends_are_worth() -> None:
    ends = {wins(row): _end(*wins(row)) for row in (60, 100, 140, 190)}
    assert list(ends) == [(True, True), (True, False), (False, True), (False, False)]
    middle, high, low = (SIDE + round(place / CELL) for place in (-7, -16, 1))
    for (down, up), worth in ends.items():
        assert worth[middle] == pytest.approx(KEPT, abs=0.02)
        assert (worth[high] > KEPT) == down
        assert (worth[low] > 0.5) == up
        assert worth[0] == worth[-1] == pytest.approx(MISSED)
    assert PLACES[0] < HITS[0] < HITS[1] < PLACES[-1]


@pytest.mark.parametrize("left", [3, 9])
def test_tables_are_what_play_leads_to(left: int) -> None:
    tables = solve(4, 0.25)
    kind, last, generator = 1, LOWER, np.random.default_rng(0)
    end = _end(*tables.kinds[kind])
    for now in range(3):
        rest, paddle = -4, 5  # places beside the middle
        worths = []
        for _ in range(4000):
            pressed, action, frames = last, now, left
            at, y = rest, paddle * CELL
            while frames:
                for _ in range(min(frames, 4)):
                    if generator.random() >= 0.25:
                        pressed = action
                    y += LAG * (at * CELL - y)
                    at += 3 * SIGNS[pressed]
                frames -= min(frames, 4)
                if not frames:
                    break
                place = np.clip(y / CELL + SIDE, 0, 2 * SIDE - 0.001)
                i = round(float(place))
                table = tables.worth[frames, kind, pressed]
                action = int(table[:, np.clip(at + SIDE, 0, 2 * SIDE), i].argmax())
            worths.append(np.interp(y, PLACES, end))
        cost = 0.01  # of presses, and of places between two of the table
        expected = tables.worth[left, kind, last, now, SIDE + rest, SIDE + paddle]
        error = 4 * np.std(worths) / len(worths) ** 0.5 + cost
        assert abs(np.mean(worths) - expected) < error


def test_it_presses_towards_the_ball() -> None:
    field = Field(ball_x=170, ball_y=100, across=1, along=0, paddle_y=100)
    for rest, best in ((60.0, LOWER), (160.0, HIGHER), (-10.0, LOWER)):
        moment = Moment(field._replace(paddle_y=round(rest)), rest)
        assert values(moment, NOOP, 4, 0.25).argmax() == best
    for ball_x in range(100, 189):  # near enough: it lets the ball come
        near = Moment(field._replace(ball_x=ball_x, paddle_y=93), 93.0)
        assert values(near, NOOP, 4, 0.0)[STAY] > 0.4


def test_a_press_that_may_stick_is_foreseen() -> None:
    field = Field(ball_x=184, ball_y=190, across=1, along=0, paddle_y=184)
    still = values(Moment(field, 184.0), NOOP, 4, 0.25)[STAY]
    moving = values(Moment(field, 184.0), DOWN, 4, 0.25)[STAY]
    assert moving != still
    assert values(Moment(field, 184.0), DOWN, 4, 0.0)[STAY] == pytest.approx(
        values(Moment(field, 184.0), NOOP, 4, 0.0)[STAY]
    )


def test_it_is_ahead_in_a_sticky_game() -> None:
    player, points = Striker(4, 0.25), 0
    player.begin(Start(0, 0, 0, 7, game_seed=3))
    for _ in range(1500):
        before = player.console
        action = player.action
        player.played.append(action)
        points += before.step(action)
        player._now = player._see()
        player._decide(departed=False)
    assert points >= 1


def test_the_teacher_says_how_much_depends_on_it() -> None:
    world = Pong(3, sticky_actions=0.25, actions="moves", threads=1)
    world.reset()
    planner = PongPlanner(world, striker=True)
    teacher = PlannerTeacher(planner, "striker")
    assert teacher.has_logits
    ranges = []
    for _ in range(90):
        answer = teacher.answer(world, world.observe()["agent"], (), None)
        assert answer.logits is not None
        assert answer.logits.shape == (3, 1, 3)
        torch.testing.assert_close(answer.logits.argmax(-1), answer.action)
        ranges.append(answer.logits.amax(-1) - answer.logits.amin(-1))
        world.step({"agent": answer.action})
    spread = torch.stack(ranges)
    assert spread.max() > 5 * spread.median()
    assert not PlannerTeacher(PongPlanner(world), "planner").has_logits


def test_hints_are_what_is_known() -> None:
    low, high = WALLS
    field = Field(ball_x=HIT, ball_y=206, across=2, along=-4, paddle_y=45)
    known = dict(zip(HINTS, hints(Moment(field, 125.75)), strict=True))
    expected = {"crossing": 1.0, "rest": 0.0, "paddle": -1.0, "ball_x": 1.0}
    expected |= {"ball_y": 1.0, "across": 0.5, "along": -1.0}
    assert known == pytest.approx(expected, abs=0.01)
    away = hints(Moment(field._replace(across=-2), (low + high) / 2))
    assert np.isnan(away).tolist() == [True] + 6 * [False]
    nothing = hints(Moment(field._replace(ball_y=0), high))
    assert np.isnan(nothing).tolist() == [True, False, False] + 4 * [True]
    assert nothing[1] == pytest.approx(1.0)


@pytest.mark.parametrize("striker", [True, False])
def test_the_teachers_hints_are_of_the_games(striker: bool) -> None:
    world = Pong(2, actions="moves", threads=1)
    world.reset()
    teacher = PlannerTeacher(PongPlanner(world, striker=striker), "teacher")
    assert teacher.hint_names == HINTS
    for _ in range(40):
        answer = teacher.answer(world, world.observe()["agent"], (), None)
        played = world.history[:, : int(world.steps[0])].tolist()
        world.step({"agent": answer.action})
    assert answer.hints is not None
    assert answer.hints.shape == (2, 1, len(HINTS))
    for row, actions in enumerate(played):
        console = Console(world.frame_skip)
        console.begin(int(world.noops[row]))
        for action in actions:
            console.step(action)
        field = console.read()
        assert field.ball_y > 0
        told = dict(zip(HINTS, answer.hints[row, 0].tolist(), strict=True))
        assert told["paddle"] == pytest.approx(_share(field.paddle_y), abs=1e-6)
        assert told["ball_y"] == pytest.approx(_share(field.ball_y), abs=1e-6)
        motion = [told["across"], told["along"]]
        assert motion == [field.across / 4, field.along / 4]


def _share(row: int) -> float:
    """A row between the walls as a number in [-1, 1]."""
    low, high = WALLS
    return 2 * (row - low) / (high - low) - 1


def test_the_order_of_actions_is_the_worlds() -> None:
    world = Pong(1, threads=1)
    world.reset()
    planner = PongPlanner(world, striker=True)
    planner.actions()
    worth = planner.worth()[0, 0]
    assert worth[NOOP] == worth[1]
    assert worth[UP] == worth[4]
    assert worth[DOWN] == worth[5]
    assert PUSH > CELL
