"""Pong: frames against Gymnasium's, patches, starts, exact replays, the heuristic.

``python tests/envs/pong/test_pong.py`` rewrites the golden file; a change in it is a
change of the dynamics, which requires a higher ``Pong.version``.
"""

import json
import zlib
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing
from torch import Tensor

from helpers.paths import GOLDEN_FILES
from marl_pool.envs import make_heuristic
from marl_pool.envs.pong.env import EPISODES_PER_SEED, Pong
from marl_pool.envs.pong.heuristic import PongHeuristic, _reflect
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout, collect
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

GOLDEN = GOLDEN_FILES / "pong.json"
STICKY = pytest.mark.parametrize("sticky", [0.0, 0.25])


def make(num_envs: int = 1, **options: Any) -> Pong:
    return Pong(num_envs, **{"threads": 1, **options})


def make_started_env(num_envs: int = 1, **options: Any) -> Pong:
    env = make(num_envs, **options)
    env.reset()
    return env


def actions_for(env: Pong) -> dict[str, Tensor]:
    """Actions that depend on env, episode and step only, up to 8 equal in a row."""
    turn = env.steps // (1 + env.env_ids % 8)
    mixed = (env.env_ids * 7 + env.episodes * 5 + turn * turn * 3) % 6
    return {"agent": mixed[:, None]}


def run(env: Pong, steps: int) -> Tensor:
    """Play; return the newest frames ``(steps, num_envs, 84, 84)``."""
    frames = []
    for _ in range(steps):
        env.step(actions_for(env))
        frames.append(env.screens[:, -1].clone())
    return torch.stack(frames)


def idle(env: Pong) -> dict[str, Tensor]:
    return {"agent": torch.zeros(env.num_envs, 1, dtype=torch.int64)}


def oracle(frame_skip: int = 4) -> AtariPreprocessing:
    """Gymnasium's own preprocessing of the same game, without no-ops."""
    gymnasium.register_envs(ale_py)
    game = gymnasium.make("PongNoFrameskip-v4").unwrapped
    return AtariPreprocessing(game, noop_max=0, frame_skip=frame_skip)


@pytest.fixture(scope="module")
def finished() -> Pong:
    """Env 0 lost a whole game 300 steps ago; env 1 is at its start."""
    env = make_started_env(2)
    for _ in range(1100):
        env.step(idle(env))
    env.reset(torch.tensor([False, True]))
    run(env, 3)
    return env


# Observations


@pytest.mark.parametrize("frame_skip", [4, 3])
def test_frames_and_rewards_match_gymnasium(frame_skip):
    env = make_started_env(noop_max=0, zero_rows=0, frame_skip=frame_skip)
    original = oracle(frame_skip)
    frame, _ = original.reset(seed=0)
    rng = np.random.default_rng(1)
    total = 0.0
    for _ in range(150):
        assert np.array_equal(frame, env.screens[0, -1].numpy())
        action = int(rng.integers(6))
        frame, reward, terminated, _, _ = original.step(action)
        step = env.step({"agent": torch.tensor([[action]])})
        assert step.rewards["agent"].item() == reward
        assert step.terminated.item() == terminated
        total += float(reward)
    assert total < 0


def test_moves_are_three_of_the_minimal_actions():
    six, three = make_started_env(), make_started_env(actions="moves")
    assert three.groups["agent"].action_space == spaces.Discrete(3)
    for action in (0, 1, 1, 2, 2, 2, 0, 1):
        six.step({"agent": torch.tensor([[(0, 2, 3)[action]]])})
        three.step({"agent": torch.tensor([[action]])})
        assert torch.equal(six.screens, three.screens)


@pytest.mark.parametrize(("patch", "num_frames"), [(6, 4), (12, 1)])
def test_tokens_stack_a_patch_of_each_frame_oldest_first(patch, num_frames):
    env = make_started_env(2, patch=patch, num_frames=num_frames)
    run(env, 5)
    features = env.observe()["agent"].features[1, 0].numpy()
    side = 84 // patch
    for token in (0, 3, side, side * side - 2):
        y, x = patch * (token // side), patch * (token % side)
        pixels = env.screens[1, :, y : y + patch, x : x + patch].numpy()
        assert np.array_equal(features[token], pixels.reshape(-1))


def test_frame_stack_shifts_and_starts_with_copies():
    env = make_started_env(2)
    for _ in range(2):
        assert env.screens[:, 3].flatten(1).any(-1).all()
        assert torch.equal(env.screens, env.screens[:, 3:].expand(-1, 4, -1, -1))
        for _ in range(5):
            before = env.screens
            env.step(actions_for(env))
            assert torch.equal(env.screens[:, :3], before[:, 1:])
        env.reset()


def test_score_is_black_by_default():
    plain, with_score = make_started_env(), make_started_env(zero_rows=0)
    assert not plain.screens[:, :, :10].any()
    assert with_score.screens[:, -1, :10].any()
    assert torch.equal(plain.screens[:, :, 10:], with_score.screens[:, :, 10:])


# Episodes


def test_starts_are_those_after_up_to_noop_max_no_ops():
    original = oracle()
    original.reset(seed=0)
    starts = []
    for _ in range(4):
        original.ale.getScreenGrayscale(original.obs_buffer[0])
        original.obs_buffer[1].fill(0)
        starts.append(original._get_obs().tobytes())
        original.unwrapped.step(0)
    env = make(noop_max=3, zero_rows=0)
    met = set()
    for _ in range(40):
        env.reset()
        met.add(env.screens[0, -1].numpy().tobytes())
    # There is no ball yet, so a few of them may be equal.
    assert met == set(starts)


def test_starts_differ_between_seeds_envs_and_episodes():
    def frames(env: Pong) -> list[bytes]:
        screens = []
        for _ in range(6):
            env.reset()
            for _ in range(20):
                env.step(idle(env))
            screens.append(env.screens.numpy().tobytes())
        return screens

    base = frames(make(seed=1))
    assert frames(make(seed=1)) == base
    assert len(set(base)) > 1
    assert frames(make(seed=2)) != base
    assert frames(make(seed=1, first_env=1)) != base
    assert len(set(frames(make(seed=1, noop_max=0)))) == 1


@STICKY
def test_next_seed_follows_the_last_episode_of_a_seed(sticky):
    last = EPISODES_PER_SEED - 1
    options: dict[str, Any] = {"seed": 4, "sticky_actions": sticky}
    env = make_started_env(first_episode=last, **options)
    run(env, 2)
    env.reset()
    expected = make_started_env(first_episode=last + 1, **options)
    assert torch.equal(run(env, 30), run(expected, 30))


def test_sticky_actions_make_episodes_differ():
    plain, sticky = (
        make_started_env(noop_max=0),
        make_started_env(noop_max=0, sticky_actions=0.25),
    )
    first = run(sticky, 60)
    assert not torch.equal(run(plain, 60), first)
    sticky.reset()
    assert not torch.equal(run(sticky, 60), first)


def test_a_game_ends_at_21_and_then_stands_still(finished):
    assert finished.over.tolist() == [True, False]
    assert finished.steps.tolist() == [1103, 3]
    before = finished.screens
    step = finished.step(idle(finished))
    assert step.terminated.tolist() == [True, False]
    assert step.rewards["agent"][0].item() == 0
    assert torch.equal(finished.screens[0], before[0])
    assert not torch.equal(finished.screens[1], before[1])


@pytest.mark.slow
def test_a_lost_game_costs_21_points_and_the_next_one_is_another():
    env = make_started_env(2, seed=7)
    total = torch.zeros(2, 1)
    while not env.over.all():
        total += env.step(idle(env)).rewards["agent"]
    assert total.flatten().tolist() == [-21, -21]
    assert (env.steps < 1000).all()
    # One was stepped after its end, which must not change the next game.
    env.step(idle(env))
    env.reset()
    assert not env.over.any()
    assert torch.equal(
        run(env, 20), run(make_started_env(2, seed=7, first_episode=1), 20)
    )


# Copies and saved states


def test_an_ended_env_is_reset_without_the_others(finished):
    env = finished.select(torch.tensor([0]))
    env.reset()
    assert torch.equal(run(env, 5), run(make_started_env(first_episode=1), 5))


@pytest.mark.slow
def test_a_saved_state_is_continued_exactly_past_an_end(finished):
    state = finished.state_dict()
    restored = make(2)
    restored.load_state_dict(state)
    assert restored.over.tolist() == [True, False]
    assert torch.equal(run(restored, 5), run(finished, 5))


# Bytes


def test_bytes_stay_bytes_up_to_the_learner():
    from marl_pool.training.ppo.trajectories import estimate_advantages, trajectory_rows

    env = make(2, max_steps=3)
    policies = {"agent": RandomPolicy(env.groups["agent"].action_space)}
    trajectory = collect(env, policies, steps=5, explore=True)["agent"]
    assert trajectory.tokens.features.dtype == torch.uint8
    estimates = estimate_advantages(trajectory, 0.99, 0.95)
    features = trajectory_rows(trajectory, *estimates)["obs"]["features"]
    assert features.dtype == torch.uint8
    assert features.shape == (10, 196, 144)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shuffle", {"held": 3}),
        ("shuffle", {"every": 2}),
        ("rewire", {}),
        ("occlude", {}),
        ("occlude", {"mode": "zero"}),
        ("jitter", {"severity": 0.1}),
    ],
)
def test_perturbed_patches_are_bytes(name, options):
    env = make()
    policies = {"agent": RandomPolicy(env.groups["agent"].action_space)}
    specs = {"agent": env.groups["agent"].tokens}
    perturbation = make_perturbation(name, specs=specs, **options)
    rollout = Rollout(env, policies, perturbation=perturbation)
    rollout.steps(3)
    perturbed, original = rollout.tokens["agent"], rollout.env.observe()["agent"]
    assert perturbed.features.dtype == torch.uint8
    changed = (perturbed.features != original.features).any(-1) | perturbed.padding
    assert (changed.sum(-1) > 30).all()
    if name == "occlude":
        assert not perturbed.features[changed & ~perturbed.padding].any()


def test_patches_cannot_be_injected():
    specs = {"agent": make().groups["agent"].tokens}
    with pytest.raises(InputError, match="expected features with positions, got imag"):
        make_perturbation("inject", specs=specs, token_type="patch")


# The heuristic


@pytest.mark.parametrize(("patch", "num_frames"), [(6, 4), (12, 2), (14, 1)])
def test_heuristic_reassembles_frames_from_patches(patch, num_frames):
    env = make_started_env(2, patch=patch, num_frames=num_frames)
    run(env, 5)
    policy = PongHeuristic(env.groups["agent"])
    before, latest = policy.frames(env.observe()["agent"])
    assert torch.equal(latest[:, 0], env.screens[:, -1])
    assert torch.equal(before[:, 0], env.screens[:, max(num_frames - 2, 0)])


def field_tokens(ball: tuple[int, int], before: tuple[int, int], paddle: int) -> Tokens:
    """A field with a paddle and the ball at (row, column), previously elsewhere."""
    screens = torch.full((4, 84, 84), 87, dtype=torch.uint8)
    screens[:, paddle - 3 : paddle + 4, 73:76] = 147
    screens[3][ball] = screens[2][before] = 236
    patches = screens.view(4, 14, 6, 14, 6).permute(1, 3, 0, 2, 4)
    features = patches.reshape(1, 1, 196, 144)
    types = torch.zeros(1, 1, 196, dtype=torch.int64)
    return Tokens(features, types, types.bool())


@pytest.mark.parametrize(
    ("ball", "before", "target"),
    [
        # It approaches straight: 10 steps of 3 columns and half a column are left.
        ((40, 42), (40, 39), 40),
        ((40, 42), (39, 39), 40 + 30.5 / 3),
        # It would cross 61 rows below, so the wall at 75.5 reflects it.
        ((40, 42), (34, 39), 75.5 - (40 + 61 - 75.5)),
        # It moves away, or stands: to the middle.
        ((40, 42), (40, 45), 45),
        ((40, 42), (40, 42), 45),
    ],
)
def test_the_heuristic_goes_where_the_ball_will_cross(ball, before, target):
    policy = PongHeuristic(make().groups["agent"], offset=0.0)
    for paddle, action in ((round(target) - 9, 3), (round(target) + 9, 2)):
        tokens = field_tokens(ball, before, paddle)
        distance = policy.distance(tokens)
        assert distance.item() == pytest.approx(target - paddle, abs=1e-3)
        assert policy.act(tokens).action.tolist() == [[action]]
    near = field_tokens(ball, before, round(target))
    assert policy.act(near).action.tolist() == [[0]]


def test_reflection_stays_between_the_walls():
    rows = torch.tensor([14.5, 75.5, 76.5, 13.5, 75.5 + 61, 14.5 - 61 - 2])
    expected = torch.tensor([14.5, 75.5, 74.5, 15.5, 14.5, 73.5])
    torch.testing.assert_close(_reflect(rows), expected)


def test_the_heuristic_rests_without_a_paddle_and_reads_padding_as_background():
    policy = PongHeuristic(make().groups["agent"])
    tokens = field_tokens((40, 42), (40, 39), 60)
    assert policy.act(tokens).action.item() != 0
    padded = Tokens(tokens.features, tokens.types, torch.ones_like(tokens.padding))
    assert policy.act(padded).action.item() == 0


@pytest.mark.slow
def test_the_heuristic_beats_random_play():
    def points(policy: Policy, explore: bool) -> float:
        env = make(2, seed=1, actions="moves", max_steps=300)
        rollout = Rollout(env, {"agent": policy}, explore=explore)
        return float(rollout.episodes().returns["agent"].mean())

    group = make(actions="moves").groups["agent"]
    assert points(make_heuristic("pong", group), explore=False) >= -1
    assert points(RandomPolicy(group.action_space), explore=True) <= -4


# Pictures and bad input


def test_the_frame_is_the_screen_and_attention_tints_its_patch():
    env = make_started_env(2)
    run(env, 20)
    plain = env.frame(1, size=168)
    assert plain.shape == (168, 168, 3)
    assert plain.dtype == np.uint8
    assert np.array_equal(plain[::2, ::2, 0], env.screens[1, -1].numpy())
    tinted = env.frame(1, attention=torch.eye(196)[14 * 5 + 3], size=168)
    changed = (tinted != plain).any(-1)
    assert changed[60:72, 36:48].all()
    assert changed.sum() == 144


# Golden trajectory


def golden() -> dict[str, Any]:
    """Return checksums of the observations of two environments, and the points."""
    env = make_started_env(2, seed=7)
    sums, points = [], []
    for _ in range(12):
        total = torch.zeros(2, 1)
        for _ in range(10):
            total += env.step(actions_for(env)).rewards["agent"]
        features = env.observe()["agent"].features
        sums.append([zlib.crc32(tokens.numpy().tobytes()) for tokens in features])
        points.append(total.flatten().tolist())
    return {"version": env.version, "checksums": sums, "points": points}


def test_the_golden_trajectory_has_not_changed():
    assert golden() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden()) + "\n")
