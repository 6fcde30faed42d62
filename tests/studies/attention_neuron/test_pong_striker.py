"""Pong's value tables against games, and the teacher's logits and targets."""

import numpy as np
import pytest
import torch

from marl_pool.envs.pong.emulator import NOOP
from marl_pool.envs.pong.env import Pong
from marl_pool_studies.attention_neuron.console import (
    PADDLE_COLUMN,
    TARGET_NAMES,
    WALLS,
    Console,
    GameState,
    privileged_targets,
)
from marl_pool_studies.attention_neuron.value_table import (
    CELL,
    DOWN,
    HALF_WIDTH,
    HIT_RANGE,
    LAG,
    MISS_VALUE,
    OFFSETS,
    RETURN_VALUE,
    SHOTS,
    SIGNS,
    ValueTableTeacher,
    _arrival_values,
    action_values,
    solve,
    winning_shots,
)

STAY, LOWER, HIGHER = range(3)


def approaching(**changes: float) -> GameState:
    state = GameState(170, 100, velocity_x=1, velocity_y=0, paddle_y=100, rest=100.0)
    return state._replace(**changes)


def test_values_at_arrival() -> None:
    kinds = [winning_shots(row) for row in (60, 100, 140, 190)]
    ends = {kind: _arrival_values(*kind) for kind in kinds}
    assert list(ends) == [(True, True), (True, False), (False, True), (False, False)]
    middle, high, low = (HALF_WIDTH + round(place / CELL) for place in (-7, -16, 1))
    for (down, up), worth in ends.items():
        assert worth[middle] == pytest.approx(RETURN_VALUE, abs=0.02)
        assert (worth[high] > RETURN_VALUE) == down
        assert (worth[low] > 0.5) == up
        assert worth[0] == worth[-1] == pytest.approx(MISS_VALUE)
    assert OFFSETS[0] < HIT_RANGE[0] < HIT_RANGE[1] < OFFSETS[-1]


@pytest.mark.parametrize("num_frames", [3, 9])
def test_tables_agree_with_simulated_play(num_frames: int) -> None:
    tables = solve(4, 0.25)
    kind, last, generator = 1, LOWER, np.random.default_rng(0)
    end = _arrival_values(*SHOTS[kind])
    for current in range(3):
        resting_place, paddle = -4, 5  # places beside the middle
        values = []
        for _ in range(4000):
            pressed, action, frames = last, current, num_frames
            at, y = resting_place, paddle * CELL
            while frames:
                for _ in range(min(frames, 4)):
                    if generator.random() >= 0.25:
                        pressed = action
                    y += LAG * (at * CELL - y)
                    at += 3 * SIGNS[pressed]
                frames -= min(frames, 4)
                if not frames:
                    break
                place = np.clip(y / CELL + HALF_WIDTH, 0, 2 * HALF_WIDTH - 0.001)
                i = round(float(place))
                table = tables[frames, kind, pressed]
                row = np.clip(at + HALF_WIDTH, 0, 2 * HALF_WIDTH)
                action = int(table[:, row, i].argmax())
            values.append(np.interp(y, OFFSETS, end))
        cost = 0.01  # of presses, and of places between two of the table
        start = HALF_WIDTH + resting_place, HALF_WIDTH + paddle
        expected = tables[num_frames, kind, last, current, *start]
        error = 4 * np.std(values) / len(values) ** 0.5 + cost
        assert abs(np.mean(values) - expected) < error


def test_the_best_action_moves_the_paddle_to_the_ball() -> None:
    for resting_place, best in ((60.0, LOWER), (160.0, HIGHER), (-10.0, LOWER)):
        state = approaching(paddle_y=round(resting_place), rest=resting_place)
        assert action_values(state, NOOP, 4, 0.25).argmax() == best
    for ball_x in range(100, 189):  # close enough to stay
        near = approaching(ball_x=ball_x, paddle_y=93, rest=93.0)
        assert action_values(near, NOOP, 4, 0.0)[STAY] > 0.4


def test_sticky_presses_are_part_of_the_values() -> None:
    state = approaching(ball_x=184, ball_y=190, paddle_y=184, rest=184.0)
    still = action_values(state, NOOP, 4, 0.25)[STAY]
    moving = action_values(state, DOWN, 4, 0.25)[STAY]
    assert moving != still
    still = action_values(state, NOOP, 4, 0.0)[STAY]
    assert action_values(state, DOWN, 4, 0.0)[STAY] == pytest.approx(still)


def test_logits_say_how_much_depends_on_the_action() -> None:
    env = Pong(3, sticky_actions=0.25, actions="moves", threads=1)
    env.reset()
    teacher = ValueTableTeacher()
    assert teacher.has_logits
    ranges = []
    for _ in range(90):
        answer = teacher.label(env, env.observe()["agent"], (), None)
        assert answer.logits is not None
        assert answer.logits.shape == (3, 1, 3)
        torch.testing.assert_close(answer.logits.argmax(-1), answer.action)
        ranges.append(answer.logits.amax(-1) - answer.logits.amin(-1))
        env.step({"agent": answer.action})
    spread = torch.stack(ranges)
    assert spread.max() > 5 * spread.median()


def test_privileged_targets_are_scaled_and_nan_where_unknown() -> None:
    low, high = WALLS
    state = GameState(PADDLE_COLUMN, 206, 2, -4, paddle_y=45, rest=125.75)
    targets = dict(zip(TARGET_NAMES, privileged_targets(state), strict=True))
    expected = {"crossing": 1.0, "rest": 0.0, "paddle": -1.0, "ball_x": 1.0}
    expected |= {"ball_y": 1.0, "velocity_x": 0.5, "velocity_y": -1.0}
    assert targets == pytest.approx(expected, abs=0.01)
    away = privileged_targets(state._replace(velocity_x=-2, rest=(low + high) / 2))
    assert np.isnan(away).tolist() == [True] + 6 * [False]
    absent = privileged_targets(state._replace(ball_y=0, rest=high))
    assert np.isnan(absent).tolist() == [True, False, False] + 4 * [True]
    assert absent[1] == pytest.approx(1.0)


def test_the_teachers_targets_are_those_of_the_games() -> None:
    env = Pong(2, actions="moves", threads=1)
    env.reset()
    teacher = ValueTableTeacher()
    assert teacher.target_names == TARGET_NAMES
    for _ in range(40):
        answer = teacher.label(env, env.observe()["agent"], (), None)
        played = env.action_log[:, : int(env.steps[0])].tolist()
        env.step({"agent": answer.action})
    targets = answer.privileged_targets
    assert targets is not None
    assert targets.shape == (2, 1, len(TARGET_NAMES))
    for row, actions in enumerate(played):
        console = Console(env.frame_skip)
        console.begin(int(env.noops[row]))
        for action in actions:
            console.step(action)
        state = console.read()
        assert state.ball_y > 0
        expected = torch.from_numpy(privileged_targets(state))
        torch.testing.assert_close(targets[row, 0], expected, equal_nan=True)
