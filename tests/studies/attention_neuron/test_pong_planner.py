"""Pong's value-table teacher: console against environment, controller, labels."""

from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from marl_pool.envs.pong.emulator import NOOP
from marl_pool.envs.pong.env import Pong
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool_studies.attention_neuron.console import (
    FIRST_REST,
    PADDLE_COLUMN,
    PUSH,
    Console,
    GameState,
    approaches,
    crossing,
)
from marl_pool_studies.attention_neuron.value_table import (
    DIRECTIONS,
    SPARE,
    ValueController,
    ValueTableTeacher,
)

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
BALL, PADDLE = 236, 147
"""Grey levels."""
RESTS = (14.0, 204.0)
"""Bounds of the paddle's resting place; beyond 38 and 203 the paddle does not move."""


def started(num_envs: int = 1, **options: Any) -> Pong:
    """Make environments whose games have begun."""
    env = Pong(num_envs, **{"threads": 1, **options})
    env.reset()
    return env


def noisy(labels: Tensor, time: int, choices: int = 3) -> Tensor:
    """Replace the labels by other actions in one of four steps, in alternating envs."""
    row = torch.arange(len(labels))[:, None]
    alternatives = (labels + 1 + (time // 8 + row) % (choices - 1)) % choices
    return torch.where((time // 2 + row) % 4 == 0, alternatives, labels)


def controller(noops: int = 5, frame_skip: int = 4) -> ValueController:
    player = ValueController(frame_skip)
    player.begin((noops, 1))
    return player


class Label(NamedTuple):
    """The tensors of a `TeacherLabel`."""

    action: Tensor
    logits: Any
    targets: Any


def label_of(teacher: ValueTableTeacher, env: Pong) -> Label:
    """Label without tokens, which the teacher does not read."""
    no_tokens = Tokens(*torch.empty(3, 0))
    label = teacher.label(env, no_tokens, (), None)
    return Label(label.action, label.logits, label.privileged_targets)


def env_and_teacher(steps: int, **options: Any) -> tuple[Pong, ValueTableTeacher]:
    """Two envs, of which one was reset halfway, and a teacher that labelled them."""
    env = started(2, actions="moves", **options)
    teacher = ValueTableTeacher()
    for time in range(steps):
        if time == steps // 2:
            env.reset(torch.tensor([False, True]))
        env.step({"agent": noisy(label_of(teacher, env).action, time)})
    return env, teacher


def assert_same(
    teacher: ValueTableTeacher, reference: ValueTableTeacher, env: Pong
) -> None:
    """Assert that two teachers give the same answer."""
    actual, expected = list(label_of(teacher, env)), list(label_of(reference, env))
    torch.testing.assert_close(actual, expected, **EXACT)


# The console's memory


def test_memory_and_pixels_agree() -> None:
    console = Console(frame_skip=1)
    console.begin(noops=3)
    balls: list[int] = []
    paddles: list[int] = []
    for frame in range(900):
        state = console.read()
        screen = console.emulator.getScreenGrayscale()
        rows, columns = (screen[34:194, 24:136] == BALL).nonzero()
        if 60 < state.ball_y < 190 and 80 < state.ball_x < 180:
            balls.append(rows.min() + 34 - (state.ball_y - 14))
            assert columns.min() + 24 == state.ball_x - 49
        paddle = (screen[34:194, 140:144] == PADDLE).all(1).nonzero()[0]
        if len(paddle) == 16:
            paddles.append(paddle[0] + 34 - (state.paddle_y - 13))
        console.step(2 if frame // 60 % 2 else 3)
    assert len(balls) > 300
    assert len(paddles) > 300
    assert set(balls) | set(paddles) <= {-1, 0}  # it is drawn while it moves
    assert np.mean(balls) > -0.05


def test_the_balls_velocity_predicts_its_next_position() -> None:
    console = Console(frame_skip=1)
    console.begin(noops=0)
    before, hits = console.read(), []
    for _ in range(900):
        console.step(NOOP)
        state = console.read()
        if before.ball_y and 70 < before.ball_x < 180:
            moved = (state.ball_x - before.ball_x, state.ball_y - before.ball_y)
            hits.append(moved == (before.velocity_x, before.velocity_y))
        before = state
    assert len(hits) > 300
    assert np.mean(hits) > 0.97  # all but those at the walls


@pytest.mark.parametrize(
    ("ball", "row"),
    [
        ((PADDLE_COLUMN - 60, 100, 1, 0), 100),
        ((PADDLE_COLUMN - 60, 100, 2, 1), 130),
        ((PADDLE_COLUMN - 60, 100, 1, -2), 45 + 65),
        ((PADDLE_COLUMN - 60, 180, 1, 1), 206.5 - 33.5),
    ],
)
def test_the_crossing_is_reflected(ball: tuple[int, ...], row: float) -> None:
    state = GameState(*ball, paddle_y=100, rest=100.0)
    assert approaches(state)
    assert crossing(state) == pytest.approx(row)


def test_only_a_ball_in_play_that_moves_to_the_right_approaches() -> None:
    coming = GameState(PADDLE_COLUMN, 100, 1, 2, 118, 118.0)
    assert approaches(coming)
    beyond = {"ball_x": PADDLE_COLUMN + 1}
    for change in ({"ball_y": 0}, {"velocity_x": -1}, {"velocity_x": 0}, beyond):
        assert not approaches(coming._replace(**change))


def test_crossings_are_those_of_the_game() -> None:
    player = controller()
    foreseen: list[float] = []
    errors: list[float] = []
    for _ in range(600):
        state = player.console.read()
        if not approaches(state):
            foreseen = []
        else:
            foreseen.append(crossing(state))
            if state.ball_x > PADDLE_COLUMN - 4:
                errors.append(max(foreseen) - min(foreseen))
        player.step(player.action)
    assert len(errors) > 5
    assert max(errors) < 8  # half a paddle, from the far side of the field on


@pytest.mark.parametrize("frame_skip", [4, 1])
def test_the_paddle_comes_to_rest_where_it_was_predicted(frame_skip: int) -> None:
    console = Console(frame_skip)
    console.begin(noops=5)
    assert console.read().rest == FIRST_REST == console.read().paddle_y
    rng = np.random.default_rng(1)
    places = []
    for action in rng.integers(6, size=60):
        for _ in range(rng.integers(12 // frame_skip)):
            console.step(int(action))
        predicted, state = console.read().rest, console.emulator.cloneState()
        for _ in range(24):
            console.step(NOOP)
        places.append(console.read().paddle_y)
        console.emulator.restoreState(state)
        # Only these places can be seen.
        assert abs(np.clip(predicted, 38, 203) - places[-1]) < 3
    assert min(places) == 38
    assert max(places) == 203


@pytest.mark.parametrize("frame_skip", [4, 1])
def test_presses_move_the_resting_place_between_its_bounds(frame_skip: int) -> None:
    console = Console(frame_skip)
    console.begin(noops=5)
    rng, rests = np.random.default_rng(2), set()
    for action in np.repeat(rng.integers(6, size=30), 12 // frame_skip):
        expected = console.read().rest + PUSH * frame_skip * DIRECTIONS[action]
        console.step(int(action))
        place = console.read().rest
        assert place == pytest.approx(np.clip(expected, *RESTS), abs=0.1)
        rests.add(round(place))
    assert {min(rests), max(rests)} == {14, 204}


def test_directions_are_those_of_the_actions() -> None:
    console = Console(4)
    for action, direction in enumerate(DIRECTIONS):
        console.begin(0)
        for _ in range(3):
            console.step(action)
        assert np.sign(console.read().paddle_y - FIRST_REST) == direction


# Mirroring


def resized_screen(frames: list[np.ndarray]) -> np.ndarray:
    """The environment's frame of an action's emulated frames."""
    screen = np.maximum(*frames[-2:])
    return cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)


@pytest.mark.parametrize(
    ("frame_skip", "sticky", "steps"), [(3, 0.0, 60), (4, 0.25, 100)]
)
def test_consoles_mirror_the_environment(frame_skip, sticky, steps) -> None:
    env = started(2, zero_rows=0, frame_skip=frame_skip, sticky_actions=sticky, seed=3)
    teacher, slow = ValueTableTeacher(), [Console(1, sticky) for _ in range(2)]
    moves = torch.Generator().manual_seed(1)
    fresh, starts = torch.tensor([True, True]), set()
    for time in range(steps):
        if time in (steps // 3, steps // 2):
            fresh = torch.tensor([time == steps // 2, True])
            env.reset(fresh)
        for i in fresh.nonzero()[:, 0].tolist():
            start = int(env.noops[i]), int(env.game_seeds[i])
            slow[i].begin(*start)
            starts.add(start)
        fresh = torch.tensor([False, False])
        label_of(teacher, env)
        action = torch.randint(0, 6, (2, 1), generator=moves)
        env.step({"agent": action})
        for i, console in enumerate(slow):
            frames = []
            for _ in range(frame_skip):
                console.step(int(action[i]))
                frames.append(console.emulator.getScreenGrayscale())
            assert np.array_equal(resized_screen(frames), env.screens[i, -1].numpy())
    label_of(teacher, env)
    for i, console in enumerate(slow):
        ram = teacher._controllers[i].console.emulator.getRAM()
        assert np.array_equal(console.emulator.getRAM(), ram)
    assert len(starts) > 2


def test_no_ops_are_counted() -> None:
    env = started(4, zero_rows=0, num_frames=1, noop_max=30)
    console = Console(frame_skip=1)
    for i, noops in enumerate(env.noops.tolist()):
        console.begin(noops)
        frame = resized_screen([console.emulator.getScreenGrayscale()] * 2)
        assert np.array_equal(frame, env.screens[i, -1].numpy())
    assert len(set(env.noops.tolist())) > 1
    assert started(noop_max=0).noops.tolist() == [0]
    saved = Pong(4, threads=1, zero_rows=0, num_frames=1)
    saved.load_state_dict(env.state_dict())
    assert torch.equal(saved.noops, env.noops)
    numbers = torch.tensor([3, 1])
    assert torch.equal(env.select(numbers).noops, env.noops[numbers])


# Labels


def test_labels_depend_on_the_actions_and_not_on_when_they_are_asked() -> None:
    env, teacher = env_and_teacher(100, seed=4, sticky_actions=0.25)
    late = ValueTableTeacher()
    for time in range(20):
        assert_same(teacher, late, env)
        env.step({"agent": noisy(label_of(teacher, env).action, time)})
    restored = Pong(2, threads=1, actions="moves", seed=4, sticky_actions=0.25)
    restored.load_state_dict(env.state_dict())
    assert_same(teacher, ValueTableTeacher(), restored)


def test_labels_are_in_the_environments_actions() -> None:
    six, three = started(seed=6), started(seed=6, actions="moves")
    of_six, of_three = ValueTableTeacher(), ValueTableTeacher()
    seen_actions = set()
    for _ in range(120):
        native, move = label_of(of_six, six), label_of(of_three, three)
        assert native.action.dtype == move.action.dtype == torch.int64
        assert native.logits.shape == (1, 1, 6)
        for places in ([0, 2, 3], [1, 4, 5]):
            assert torch.equal(native.logits[..., places], move.logits)
        action = int(move.action)
        assert [(0, 2, 3)[action]] == native.action[0].tolist()
        six.step({"agent": native.action})
        three.step({"agent": move.action})
        seen_actions.add(action)
    assert seen_actions == {0, 1, 2}


def test_taken_envs_are_followed_from_where_they_were() -> None:
    env, teacher = env_and_teacher(60)
    expected = label_of(ValueTableTeacher(), env)
    label_of(teacher, env)
    controller = teacher._controllers[1]
    answer = label_of(teacher, env.select(torch.tensor([1])))
    second = [part[1:] for part in expected]
    torch.testing.assert_close(list(answer), second, **EXACT)
    assert teacher._controllers[1] is controller
    assert len(controller.played) == 30
    # Other actions than those it followed: it begins again.
    pair = env.select(torch.tensor([1, 1]))
    for time in range(6):
        pair.step({"agent": torch.tensor([[1], [2 * (time // 3)]])})
    singles = [pair.select(torch.tensor([i])) for i in range(2)]
    answers = [label_of(ValueTableTeacher(), single) for single in singles]
    references = [torch.cat(parts) for parts in zip(*answers, strict=True)]
    torch.testing.assert_close(list(label_of(teacher, pair)), references, **EXACT)


def test_two_environments_in_turn_are_followed(monkeypatch) -> None:
    envs = [started(2, first_env=first) for first in (0, 7)]
    teacher, begins = ValueTableTeacher(), []
    begin = ValueController.begin

    def record(controller: ValueController, start: tuple[int, int]) -> None:
        begins.append(start)
        begin(controller, start)

    monkeypatch.setattr(ValueController, "begin", record)
    for _ in range(5):
        for env in envs:
            env.step({"agent": label_of(teacher, env).action})
    noops = [*envs[0].noops.tolist(), *envs[1].noops.tolist()]
    assert [count for count, _ in begins] == noops


def test_controllers_of_other_envs_are_kept_up_to_a_limit() -> None:
    env, teacher = env_and_teacher(2)
    spare = ValueController(4)
    teacher._controllers |= {100 + i: spare for i in range(SPARE + 3)}
    label_of(teacher, env)
    expected = [*range(103, 100 + SPARE + 3), 0, 1]
    assert list(teacher._controllers) == expected


def test_environments_with_other_options_are_followed_from_their_start() -> None:
    teacher = env_and_teacher(20)[1]
    sticky_env = started(2, actions="moves", sticky_actions=0.25)
    sticky_env.step({"agent": torch.zeros(2, 1, dtype=torch.int64)})
    assert_same(teacher, ValueTableTeacher(), sticky_env)
    assert teacher._controllers[0].console.sticky == 0.25


# Games


def test_the_teacher_idles_after_the_end_until_the_next_game() -> None:
    env, teacher = started(2, seed=3, actions="moves"), ValueTableTeacher()
    idle = torch.zeros(2, 1, dtype=torch.int64)
    while not env.over.all():
        env.step({"agent": idle})
    env.step({"agent": idle + 1})
    answer = label_of(teacher, env)
    assert not answer.action.any()
    assert not answer.logits.any()
    env.reset(torch.tensor([True, False]))
    for _ in range(40):
        env.step({"agent": label_of(teacher, env).action})
    fresh = ValueTableTeacher()
    assert_same(teacher, fresh, env)
    memory, fresh_memory = (
        t._controllers[0].console.emulator.getRAM() for t in (teacher, fresh)
    )
    assert np.array_equal(memory, fresh_memory)
    assert not teacher._controllers[0].console.over


def test_sticky_games_are_won() -> None:
    env = started(2, seed=3, actions="moves", sticky_actions=0.25)
    teacher, won, lost = ValueTableTeacher(), 0, 0
    for _ in range(400):
        rewards = env.step({"agent": label_of(teacher, env).action}).rewards["agent"]
        won += int((rewards > 0).sum())
        lost += int((rewards < 0).sum())
    assert won >= 1
    assert not lost


# Bad input


def test_an_environment_that_was_never_reset_is_rejected() -> None:
    with pytest.raises(InputError, match="pong: expected games that have begun, got"):
        label_of(ValueTableTeacher(), Pong(1))
