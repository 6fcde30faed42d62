"""Pong's planner: its consoles against the world's screens, its plans, its games."""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from marl_pool.envs.pong import Pong
from marl_pool.envs.pong_console import Console, Field
from marl_pool.envs.pong_planner import SPARE, PongPlanner
from marl_pool.envs.pong_player import (
    AIMS,
    CENTRED,
    DOWN,
    FIRST_REST,
    HIT,
    PUSHES,
    UP,
    Aim,
    Moment,
    Outcome,
    Plan,
    Player,
    Start,
    approaches,
    crossing,
)
from marl_pool.envs.pong_simulator import NOOP
from marl_pool.errors import InputError

BALL, PADDLE = 236, 147
"""Grey levels."""


def begun(num_envs: int = 1, **options: Any) -> Pong:
    world = Pong(num_envs, **{"threads": 1, **options})
    world.reset()
    return world


def noisy(labels: Tensor, time: int, choices: int = 3) -> Tensor:
    """Other actions than the labels in one of four steps, in the worlds by turns."""
    row = torch.arange(len(labels))[:, None]
    other = (labels + 1 + (time // 8 + row) % (choices - 1)) % choices
    return torch.where((time // 2 + row) % 4 == 0, other, labels)


def follower(noops: int = 5, frame_skip: int = 4, sticky: float = 0.0) -> Player:
    player = Player(frame_skip, sticky)
    player.begin(Start(0, 0, 0, noops, game_seed=1))
    return player


def led(steps: int, **options: Any) -> tuple[Pong, PongPlanner]:
    """Two worlds of which one was reset halfway, and a planner that watched."""
    world = begun(2, actions="moves", **options)
    planner = PongPlanner(world)
    for time in range(steps):
        if time == steps // 2:
            world.reset(torch.tensor([False, True]))
        world.step({"agent": noisy(planner.actions(), time)})
    return world, planner


# What it reads


def test_memory_and_pixels_agree() -> None:
    console = Console(frame_skip=1)
    console.begin(noops=3)
    balls: list[int] = []
    paddles: list[int] = []
    for frame in range(900):
        seen = console.read()
        screen = console.emulator.getScreenGrayscale()
        rows, columns = (screen[34:194, 24:136] == BALL).nonzero()
        if 60 < seen.ball_y < 190 and 80 < seen.ball_x < 180:
            balls.append(rows.min() + 34 - (seen.ball_y - 14))
            assert columns.min() + 24 == seen.ball_x - 49
        ours = (screen[34:194, 140:144] == PADDLE).all(1).nonzero()[0]
        if len(ours) == 16:
            paddles.append(ours[0] + 34 - (seen.paddle_y - 13))
        console.step(2 if frame // 60 % 2 else 3)
    assert len(balls) > 300
    assert len(paddles) > 300
    assert set(balls) | set(paddles) <= {-1, 0}  # it is drawn while it moves
    assert np.mean(balls) > -0.05


def test_the_balls_velocity_is_where_it_is_next() -> None:
    console = Console(frame_skip=1)
    console.begin(noops=0)
    before, right = console.read(), []
    for _ in range(900):
        console.step(NOOP)
        now = console.read()
        if before.ball_y and 70 < before.ball_x < 180:
            moved = (now.ball_x - before.ball_x, now.ball_y - before.ball_y)
            right.append(moved == (before.across, before.along))
        before = now
    assert len(right) > 300
    assert np.mean(right) > 0.97  # all but those at the walls


def test_a_saved_console_goes_on_alike() -> None:
    console, other = Console(4), Console(4)
    console.begin(7)
    for action in (3, 3, 2) * 30:
        console.step(action)
    state = console.save()

    def memory(player: Console) -> list[bytes]:
        player.load(state)
        return [
            (player.step(action), player.emulator.getRAM().tobytes())[1]
            for action in (2, 5, 0, 3) * 20
        ]

    assert memory(console) == memory(console) == memory(other)


@pytest.mark.parametrize(
    ("field", "row"),
    [
        (Field(HIT - 60, 100, 1, 0, 0), 100),
        (Field(HIT - 60, 100, 2, 1, 0), 130),
        (Field(HIT - 60, 100, 1, -2, 0), 45 + 65),
        (Field(HIT - 60, 180, 1, 1, 0), 206.5 - 33.5),
    ],
)
def test_the_crossing_is_reflected(field: Field, row: float) -> None:
    assert approaches(field)
    assert crossing(field) == pytest.approx(row)


def test_only_a_ball_that_comes_approaches() -> None:
    coming = Field(HIT, 100, 1, 2, 118)
    assert approaches(coming)
    for change in ({"ball_y": 0}, {"across": -1}, {"across": 0}, {"ball_x": HIT + 1}):
        assert not approaches(coming._replace(**change))


def test_crossings_are_those_of_the_game() -> None:
    player = follower()
    foreseen: list[float] = []
    errors: list[float] = []
    for _ in range(600):
        field = player.console.read()
        if not approaches(field):
            foreseen = []
        else:
            foreseen.append(crossing(field))
            if field.ball_x > HIT - 4:
                errors.append(max(foreseen) - min(foreseen))
        player.step(player.action)
    assert len(errors) > 5
    assert max(errors) < 8  # half a paddle, from the far side of the field on


@pytest.mark.parametrize("frame_skip", [4, 1])
def test_the_paddle_comes_to_rest_where_it_was_foreseen(frame_skip: int) -> None:
    player = follower(frame_skip=frame_skip)
    assert player._now.rest == FIRST_REST == player._now.field.paddle_y
    rng = np.random.default_rng(1)
    seen = []
    for action in rng.integers(6, size=60):
        for _ in range(rng.integers(12 // frame_skip)):
            player.step(int(action))
        state = player.console.save()
        for _ in range(24):
            player.console.step(NOOP)
        seen.append(player.console.read().paddle_y)
        player.console.load(state)
        # Only these places can be seen.
        assert abs(np.clip(player._now.rest, 38, 203) - seen[-1]) < 3
    assert min(seen) == 38
    assert max(seen) == 203


@pytest.mark.parametrize("frame_skip", [4, 1])
def test_the_knob_is_where_pushes_and_stops_bring_it(frame_skip: int) -> None:
    player = follower(frame_skip=frame_skip)
    rng, rests = np.random.default_rng(2), set()
    for action in np.repeat(rng.integers(6, size=30), 12 // frame_skip):
        foreseen = player._rest_after(player._now, int(action))
        player.step(int(action))
        assert player._now.rest == pytest.approx(foreseen, abs=0.1)
        rests.add(round(foreseen))
    assert {min(rests), max(rests)} == {14, 204}


def test_pushes_are_what_the_actions_do() -> None:
    console = Console(4)
    for action, push in enumerate(PUSHES):
        console.begin(0)
        for _ in range(3):
            console.step(action)
        assert np.sign(console.read().paddle_y - FIRST_REST) == push


# Mirroring


def shown(frames: list[np.ndarray]) -> np.ndarray:
    """The world's frame of an action's emulated frames."""
    screen = np.maximum(*frames[-2:])
    return cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)


@pytest.mark.parametrize("frame_skip", [4, 3])
def test_consoles_show_what_the_worlds_do(frame_skip: int) -> None:
    world = begun(2, zero_rows=0, frame_skip=frame_skip, seed=2)
    planner, slow = PongPlanner(world), Console(frame_skip=1)
    moves = torch.Generator().manual_seed(0)
    starts = set()
    for time in range(160):
        if time in (40, 90):
            world.reset(torch.tensor([time == 90, True]))
        planner.actions()
        starts |= set(world.noops.tolist())
        states = [planner._players[i].console.save() for i in range(2)]
        action = torch.randint(0, 6, (2, 1), generator=moves)
        world.step({"agent": action})
        planner.actions()
        for i in range(2):
            slow.load(states[i])
            frames = []
            for _ in range(frame_skip):
                slow.step(int(action[i]))
                frames.append(slow.emulator.getScreenGrayscale())
            assert np.array_equal(shown(frames), world.screens[i, -1].numpy())
            ram = planner._players[i].console.emulator.getRAM()
            assert np.array_equal(slow.emulator.getRAM(), ram)
    assert len(starts) > 2


def test_consoles_show_what_sticky_worlds_do() -> None:
    world = begun(2, zero_rows=0, sticky_actions=0.25, seed=3)
    planner, slow = PongPlanner(world), [Console(1, 0.25) for _ in range(2)]
    moves = torch.Generator().manual_seed(1)
    fresh, starts = torch.tensor([True, True]), set()
    for time in range(300):
        if time in (90, 200):
            fresh = torch.tensor([time == 200, True])
            world.reset(fresh)
        for i in fresh.nonzero()[:, 0].tolist():
            start = int(world.noops[i]), int(world.game_seeds[i])
            slow[i].begin(*start)
            starts.add(start)
        fresh = torch.tensor([False, False])
        planner.actions()
        action = torch.randint(0, 6, (2, 1), generator=moves)
        world.step({"agent": action})
        for i, console in enumerate(slow):
            frames = []
            for _ in range(world.frame_skip):
                console.step(int(action[i]))
                frames.append(console.emulator.getScreenGrayscale())
            assert np.array_equal(shown(frames), world.screens[i, -1].numpy())
    planner.actions()
    for i, console in enumerate(slow):  # whatever was played ahead
        ram = planner._players[i].console.emulator.getRAM()
        assert np.array_equal(console.emulator.getRAM(), ram)
    assert len(starts) == 5


def test_no_ops_are_counted() -> None:
    world = begun(4, zero_rows=0, num_frames=1, noop_max=30)
    console = Console(frame_skip=1)
    for i, noops in enumerate(world.noops.tolist()):
        console.begin(noops)
        frame = shown([console.emulator.getScreenGrayscale()] * 2)
        assert np.array_equal(frame, world.screens[i, -1].numpy())
    assert len(set(world.noops.tolist())) > 1
    assert begun(noop_max=0).noops.tolist() == [0]
    saved = Pong(4, threads=1, zero_rows=0, num_frames=1)
    saved.load_state_dict(world.state_dict())
    assert torch.equal(saved.noops, world.noops)
    some = torch.tensor([3, 1])
    assert torch.equal(world.take(some).noops, world.noops[some])


# Labels


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_labels_follow_from_the_actions_not_from_when_they_were_asked(
    sticky: float,
) -> None:
    world, planner = led(160, seed=4, sticky_actions=sticky)
    late = PongPlanner(world)
    for time in range(30):
        labels = planner.actions()
        assert torch.equal(labels, late.actions())
        world.step({"agent": noisy(labels, time)})
    restored = Pong(2, threads=1, actions="moves", seed=4, sticky_actions=sticky)
    restored.load_state_dict(world.state_dict())
    assert torch.equal(PongPlanner(restored).actions(), planner.actions())


def test_labels_are_the_same_in_other_words() -> None:
    six, three = begun(seed=6), begun(seed=6, actions="moves")
    of_six, of_three = PongPlanner(six), PongPlanner(three)
    met = set()
    for _ in range(120):
        native, move = of_six.actions(), of_three.actions()
        assert native.dtype == move.dtype == torch.int64
        assert [(0, 2, 3)[int(move)]] == native[0].tolist()
        six.step({"agent": native})
        three.step({"agent": move})
        met.add(int(move))
    assert met == {0, 1, 2}


def test_worlds_that_were_taken_are_followed_from_where_they_were() -> None:
    world, planner = led(60)
    expected = PongPlanner(world).actions()
    player = planner._players[1]
    planner.actions()
    planner.world = world.take(torch.tensor([1]))
    assert torch.equal(planner.actions(), expected[1:])
    assert planner._players[1] is player
    assert len(player.played) == 30
    # Other actions than those it was led through: it begins again.
    both = world.take(torch.tensor([1, 1]))
    for time in range(6):
        both.step({"agent": torch.tensor([[1], [2 * (time // 3)]])})
    planner.world = both
    expected = torch.cat(
        [PongPlanner(both.take(torch.tensor([i]))).actions() for i in range(2)]
    )
    assert torch.equal(planner.actions(), expected)


def test_two_worlds_in_turn_are_followed_from_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worlds = [begun(2, first_world=first) for first in (0, 7)]
    planner, starts = PongPlanner(worlds[0]), []
    begin = Player.begin
    monkeypatch.setattr(
        Player, "begin", lambda *args: (starts.append(args[1]), begin(*args))[1]
    )
    for _ in range(5):
        for world in worlds:
            planner.world = world
            world.step({"agent": planner.actions()})
    assert [start.world for start in starts] == [0, 1, 7, 8]


def test_no_more_than_some_games_are_kept() -> None:
    planner, other = led(2)[1], Player(4)
    planner._players |= {100 + i: other for i in range(SPARE + 3)}
    planner.actions()
    kept = [*range(103, 100 + SPARE + 3), 0, 1]
    assert list(planner._players) == kept


def test_worlds_with_other_options_are_followed_from_their_start() -> None:
    planner = led(20)[1]
    other = begun(2, actions="moves", sticky_actions=0.25)
    other.step({"agent": torch.zeros(2, 1, dtype=torch.int64)})
    planner.world = other
    assert torch.equal(planner.actions(), PongPlanner(other).actions())
    assert planner._players[0].console.sticky == 0.25


# Plans


def brute_force(player: Player, aim: Aim) -> Outcome:
    """What an aim leads to, played ahead alone."""
    console, moment, left = player._ahead, player._now, False
    console.load(player.console.save())
    outcome = Outcome.SAFE
    for _ in range(90):
        coming = approaches(moment.field)
        if coming and left:
            break
        left = left or not coming
        action = player._press(moment, aim if coming else None)
        if points := console.step(action):
            outcome = Outcome(points)
            break
        moment = Moment(console.read(), player._rest_after(moment, action))
    return outcome


def test_plans_are_those_of_aims_tried_one_by_one() -> None:
    player, met = follower(noops=11), []
    for time in range(420):
        if time % 14 == 0 and approaches(player._now.field):
            found = [{aim: brute_force(player, aim) for aim in aims} for aims in AIMS]
            before = player.console.emulator.getRAM()
            plan = player._try(AIMS)
            assert np.array_equal(player.console.emulator.getRAM(), before)
            every = found[0] | found[1]
            winning = [aim for aim in every if every[aim] is Outcome.WON]
            assert plan.outcome == max(every.values())
            if plan.outcome is Outcome.LOST:
                assert plan.aim == CENTRED
            else:
                assert every[plan.aim] == plan.outcome
                assert winning[:1] == [plan.aim] * bool(winning)
            met.append((plan.outcome, plan.aim in found[0]))
        # Stubborn for a while, so that balls are lost too.
        player.step(2 if time % 140 > 90 else player.action)
    won = Outcome.WON
    assert {outcome for outcome, _ in met} == set(Outcome)
    assert (won, False) in met  # by an aim that is tried only if the others fail


def test_a_safe_aim_is_drawn_anew_each_time() -> None:
    player = follower()
    while player._plan is None:
        player.step(player.action)
    drawn = set()
    for _ in range(20):
        player.played.append(NOOP)
        plan = player._try(AIMS[:1])
        assert plan.outcome is Outcome.SAFE  # the first ball from this start
        drawn.add(plan.aim)
    assert len(drawn) > 2


def test_a_plan_is_kept_until_it_is_left_and_no_longer_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    player = follower()
    while player._plan is None:
        player.step(player.action)
    aim, tried, holds = player._plan.aim, [], Outcome.WON

    def look(choices: Sequence[Sequence[Aim]]) -> Plan:
        tried.append(choices)
        return Plan(CENTRED, Outcome.WON) if choices is AIMS else Plan(aim, holds)

    monkeypatch.setattr(player, "_try", look)
    player.step(player.action)
    assert tried == []
    player.step((player.action or 2) ^ 1)
    assert tried == [[[aim]]]
    assert player._plan == (aim, Outcome.WON)
    holds = Outcome.LOST
    player.step((player.action or 2) ^ 1)
    assert tried == [[[aim]], [[aim]], AIMS]
    assert player._plan == (CENTRED, Outcome.WON)


def test_an_action_that_stuck_is_planned_for_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    player, noticed, stuck = follower(sticky=0.25), [], []
    monkeypatch.setattr(player, "_meet", lambda departed: noticed.append(departed))
    while len(noticed) < 40:
        before, count = player.console.turned(), len(noticed)
        # What is chosen is always its own, here alternately a push and none.
        player.action = (UP, NOOP, DOWN, NOOP)[len(player.played) % 4]
        chosen = player.action
        player.step(chosen)
        turned = player.console.turned() - before
        if len(noticed) > count:
            stuck.append(bool(turned != 4 * PUSHES[chosen]))
    assert noticed == stuck
    assert 10 < sum(stuck) < 40


# Games


@pytest.mark.slow
def test_clean_games_are_won() -> None:
    world = begun(2, seed=3, actions="moves")
    assert len(set(world.noops.tolist())) == 2
    planner, total = PongPlanner(world), torch.zeros(2, 1)
    while not world.over.all():
        labels = planner.actions()
        assert not labels[world.over].any()
        total += world.step({"agent": labels}).rewards["agent"]
    assert (total >= 20).all()
    # Past the end it rests, and goes on with the next game.
    world.step({"agent": torch.ones(2, 1, dtype=torch.int64)})
    assert planner.actions().tolist() == [[0], [0]]
    world.reset(torch.tensor([True, False]))
    for _ in range(40):
        world.step({"agent": planner.actions()})
    fresh = PongPlanner(world)
    assert torch.equal(planner.actions(), fresh.actions())
    known, anew = (p._players[0].console.emulator.getRAM() for p in (planner, fresh))
    assert np.array_equal(known, anew)
    assert not planner._players[0].console.over


@pytest.mark.slow
def test_sticky_games_are_won() -> None:
    world = begun(2, seed=3, actions="moves", sticky_actions=0.25)
    planner, won, lost = PongPlanner(world), 0, 0
    for _ in range(1500):
        rewards = world.step({"agent": planner.actions()}).rewards["agent"]
        won += int((rewards > 0).sum())
        lost += int((rewards < 0).sum())
    assert won >= 6
    assert lost <= 2


# Bad input


def test_a_world_that_was_never_reset_is_refused() -> None:
    with pytest.raises(InputError, match="expected a world whose games have begun"):
        PongPlanner(Pong(1)).actions()
