"""The two scopes of a shuffle: whole stacks of frames, or each frame by itself."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.evaluated import levels
from helpers.perturbed import keys, seeds
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.cases import cases_of, label, play
from marl_pool.evaluation.measure import measure
from marl_pool.evaluation.target import to_float64
from marl_pool.options.types import Options
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.order import Shuffle
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.sensory import FeedForward
from marl_pool.pooling import make_pooling
from marl_pool.pooling.base import Pooling
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.cloning.sampler import Augmentation, Sampler
from marl_pool.training.cloning.settings import CloneSettings
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool_studies.attention_neuron import published

ENVS, AGENTS, PLACES, FRAMES, WIDTH = 3, 2, 7, 4, 5
SPEC = TokenSpec(PLACES, FRAMES * WIDTH, ("patch",), has_self=False, num_frames=FRAMES)


def random_frames(seed: int, steps: int) -> Tensor:
    """Random frames ``(steps, envs, agents, places, width)``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, ENVS, AGENTS, PLACES, WIDTH)
    return torch.randn(shape, generator=generator)


def stacked(frames: Tensor, time: int) -> Tokens:
    """Stack frames, the newest one last, with repetitions of the first frame."""
    recent = [frames[max(time - age, 0)] for age in reversed(range(FRAMES))]
    features = torch.cat(recent, -1)
    types = torch.zeros(features.shape[:-1], dtype=torch.int64)
    return Tokens(features, types, types.bool())


def perturb_frames(
    perturbation: Perturbation, frames: Tensor, seed: int = 0
) -> list[tuple[Tokens, Tensor]]:
    """Return the perturbed tokens and the order of the newest frame for each step."""
    state = perturbation.start(stacked(frames, 0), keys(ENVS, seed=seed))
    outputs = []
    for time in range(len(frames)):
        tokens, state = perturbation(stacked(frames, time), state)
        outputs.append((tokens, state["origin"]))
    return outputs


def shuffle_pair(every: int | None, **options: Any) -> tuple[Shuffle, Shuffle]:
    return tuple(  # type: ignore[return-value]
        make_perturbation(
            "shuffle", specs={"agent": SPEC}, every=every, scope=scope, **options
        )
        for scope in ("token", "frame")
    )


def invariant_head() -> Pooling:
    """A memoryless head that is invariant to the order of its tokens."""
    torch.manual_seed(0)
    return make_pooling("pma", dim=SPEC.num_features, num_heads=2).double()


@given(seed=seeds, every=st.sampled_from([None, 1, 2, 3, 9]))
def test_frames_are_permuted_by_the_order_of_their_own_time(seed, every):
    frames = random_frames(seed, 14)
    _, by_frame = shuffle_pair(every)
    outputs = perturb_frames(by_frame, frames, seed)
    orders = [order for _, order in outputs]
    # The published way, written down: permute each frame as it comes, then stack.
    permuted = torch.stack(
        [
            frame.gather(-2, order[..., None].expand_as(frame))
            for frame, order in zip(frames, orders, strict=True)
        ]
    )
    for time, (tokens, _) in enumerate(outputs):
        assert torch.equal(tokens.features, stacked(permuted, time).features)


@pytest.mark.parametrize("every", [5, 8])
def test_both_scopes_agree_once_the_stack_holds_one_order(every):
    frames = random_frames(1, 20)
    by_token, by_frame = (
        perturb_frames(shuffle, frames) for shuffle in shuffle_pair(every)
    )
    for time, (whole, parts) in enumerate(zip(by_token, by_frame, strict=True)):
        assert torch.equal(whole[1], parts[1])  # the same numbers make the same orders
        mixed = time >= every and time % every < FRAMES - 1
        assert torch.equal(whole[0].features, parts[0].features) is not mixed


@pytest.mark.parametrize("options", [{}, {"held": 3}, {"severity": 0.5}])
def test_an_order_of_the_whole_episode_is_the_same_in_both(options):
    frames = random_frames(2, 8)
    by_token, by_frame = (
        perturb_frames(shuffle, frames) for shuffle in shuffle_pair(None, **options)
    )
    for (whole, _), (parts, _) in zip(by_token, by_frame, strict=True):
        assert torch.equal(whole.features, parts.features)


def test_a_memoryless_invariant_head_notices_frames_and_never_whole_tokens():
    every, frames, head = 6, random_frames(3, 16), invariant_head()

    def head_outputs(tokens: Tokens) -> Tensor:
        flat = tokens.flatten_batch()
        with torch.no_grad():
            return head(flat.features.double(), flat.padding).float()

    clean = [head_outputs(stacked(frames, time)) for time in range(len(frames))]
    by_token, by_frame = (
        perturb_frames(shuffle, frames) for shuffle in shuffle_pair(every)
    )
    for time, answer in enumerate(clean):
        # In float64 sums differ in their last bits alone, which float32 forgets.
        torch.testing.assert_close(
            head_outputs(by_token[time][0]), answer, rtol=0, atol=0
        )
        noticed = not torch.equal(head_outputs(by_frame[time][0]), answer)
        assert noticed is (time >= every and time % every < FRAMES - 1)


# Environments


def balanced_cartpole(count: int = 4) -> BatchedEnv:
    """CartPole whose tokens stack three readings, in episodes that last."""
    return make_batched_env(
        "cartpole", num_envs=count, num_frames=3, start_speed=0.5, max_steps=12
    )


def frame_by_frame(env: BatchedEnv, **options: Any) -> Perturbation:
    spec = env.groups["agent"].tokens
    return make_perturbation("shuffle", specs={"agent": spec}, scope="frame", **options)


def returns(env: BatchedEnv, **options: Any) -> Tensor:
    """Play a feed-forward policy, which needs its channels in order."""
    group = env.groups["agent"]
    policy = FeedForward(group.tokens, group.action_space, hidden=(4,), seed=1)
    change = frame_by_frame(env, **options) if options else None
    rollout = Rollout(env, {"agent": policy}, perturbation=change)
    return rollout.episodes().returns["agent"]


def test_frame_shuffle_changes_returns_except_at_severity_0():
    clean = returns(balanced_cartpole())
    assert torch.equal(returns(balanced_cartpole(), every=2, severity=0.0), clean)
    assert not torch.equal(returns(balanced_cartpole(), every=2), clean)


@pytest.mark.parametrize(
    ("name", "options", "frames"),
    [
        ("cartpole", {"num_frames": 3}, 3),
        ("cartpole", {}, 1),
        ("pong", {}, 4),
        ("car_racing", {}, 4),
        ("ant_bullet", {"num_frames": 2}, 2),
        ("simple_centroid", {}, 1),
    ],
)
def test_envs_say_how_many_frames_a_token_stacks(name, options, frames):
    needs = {"pong": "ale_py", "car_racing": "Box2D", "ant_bullet": "pybullet"}
    if name in needs:
        pytest.importorskip(needs[name])
    env = make_batched_env(name, num_envs=1, **options)
    (group,) = env.groups.values()
    assert group.tokens.num_frames == frames


def test_an_env_that_stacks_its_frames_is_seen_in_mixed_orders():
    """CartPole's frames, permuted as they come, without any of our stacks of orders."""

    env = balanced_cartpole()
    rollout = Rollout(
        env,
        {"agent": RandomPolicy(env.groups["agent"].action_space)},
        perturbation=frame_by_frame(env, every=5),
    )
    transitions: list[Tensor] = []
    orders: list[Tensor] = []

    def hook(transition: Any) -> None:
        transitions.append(transition.tokens["agent"].features[:, 0])
        orders.append(rollout.perturbation_states["agent"]["origin"][:, 0])

    rollout.episodes(hook)
    assert len(transitions) == 12
    for time in range(1, 12):
        older, newer = transitions[time - 1], transitions[time]
        # The frame that was newest a step ago is now the one before, as it was seen.
        assert torch.equal(newer[..., 1], older[..., 2])
        assert torch.equal(newer[..., 0], older[..., 1])
    assert not torch.equal(orders[4], orders[5])


@pytest.mark.parametrize(
    ("options", "expected", "actual"),
    [
        ({"scope": "frame"}, "expected token", "got frame"),
        ({"scope": "patch"}, "expected token or frame", "got 'patch'"),
    ],
)
def test_invalid_scopes_are_refused(options, expected, actual):
    spec = TokenSpec(5, 1, ("channel",), has_self=False)
    with pytest.raises(InputError) as caught:
        make_perturbation("shuffle", specs={"agent": spec}, **options)
    message = str(caught.value)
    assert message.startswith("perturbation.scope: ")
    assert expected in message
    assert actual in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("scope", "every", "reorders"),
    [
        ("token", None, True),
        ("token", 2, True),
        ("frame", None, True),
        ("frame", 2, False),
    ],
)
def test_only_what_an_invariant_policy_must_not_notice_is_measured_exactly(
    monkeypatch, scope, every, reorders
):
    dtypes: list[torch.dtype] = []

    def note(policies: Any, env: BatchedEnv, change: Any = None, **options: Any) -> Any:
        if change is not None:
            dtypes.append(next(policies["agent"].parameters()).dtype)
        return play(policies, env, change, **options)

    monkeypatch.setattr("marl_pool.evaluation.measure.play", note)
    group = balanced_cartpole().groups["agent"]
    policy = FeedForward(group.tokens, group.action_space, hidden=(4,), seed=1)
    entry = {"name": "shuffle", "scope": scope, "every": every, "severities": [1.0]}
    measure(to_float64({"agent": policy}), balanced_cartpole, levels(entry))
    assert dtypes == [torch.float64 if reorders else torch.float32]


def test_where_there_are_no_stacks_an_evaluation_has_a_gap():
    env = make_batched_env("cartpole", num_envs=1)
    entry = {"name": "shuffle", "every": 25, "scope": "frame", "severities": [1.0]}
    case = cases_of({}, levels(entry), [], env)[1]
    assert "perturbation.scope: expected token" in case.missing
    with pytest.raises(UnfitTokensError):
        make_perturbation(
            "shuffle", specs={"agent": env.groups["agent"].tokens}, scope="frame"
        )


def test_cloning_reads_pixels_where_frames_are_permuted():
    """Numbers that stand for whole tokens cannot be taken apart into frames."""

    def moves_only(**options: Any) -> bool:
        sampler = object.__new__(Sampler)
        sampler.augmentation = Augmentation(
            SPEC, Options(name="shuffle", **options), CloneSettings()
        )
        return sampler._moves_only()

    assert moves_only()
    assert not moves_only(scope="frame", every=2)


# The paper's numbers


def test_table_6_is_set_beside_frames_in_the_envs_that_stack_them():
    suite = compose("evaluate", ["suite=attention_neuron"])["perturbations"]
    rows = {
        label(
            entry["name"],
            {k: v for k, v in entry.items() if k not in ("name", "severities")},
        )
        for entry in suite
    }
    for table in published.TABLES:
        reshuffled = {name for name in table.rows if "every=" in name}
        assert reshuffled <= rows
        by_frame = {name for name in reshuffled if name.endswith("scope=frame")}
        stacks = table.env["name"] in ("pong", "car_racing")
        assert by_frame == (reshuffled if stacks else set())
