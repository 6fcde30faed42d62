"""Rollouts without synchronization, as on a GPU: no reads, the same trajectories."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from helpers.samples import ENCODER_VARIANTS
from helpers.synchronization import count_syncs
from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations import make_perturbation, perturbation_names
from marl_pool.policies import make_agent, make_policy
from marl_pool.policies.agent import Population, to_vector
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.pooling import pooling_names
from marl_pool.rollout import Rollout
from marl_pool.utils.devices import without_reads
from marl_pool.utils.errors import UnfitTokensError

NUM_ENVS = 5
ENVS: dict[str, dict[str, Any]] = {
    "centroid": {"name": "simple_centroid", "counts": "1-2-3"},
    "centroid, three agents": {
        "name": "simple_centroid",
        "counts": "3-2-3",
        "continuous_actions": False,
    },
    "tag": {"name": "simple_tag", "counts": "2-1-2", "obstacles_collide": True},
    "tag, prey that flee": {"name": "simple_tag", "counts": "1-2-3", "prey": "flee"},
    "tag, prey that learn": {
        "name": "simple_tag",
        "counts": "2-2-1",
        "prey": "learned",
    },
    "boxworld": {"name": "boxworld", "random_distractors": True},
    "boxworld, pixels": {"name": "boxworld", "observation": "pixels"},
    "cartpole": {"name": "cartpole"},
    "cartpole, noise and frames": {
        "name": "cartpole",
        "noise_channels": 2,
        "num_frames": 2,
        "channel_ids": True,
    },
}
PERTURBATIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in perturbation_names()},
    "confuse": {"every": 2},
    "delay": {"severity": [0.0, 1.0]},
    "freeze": {"every": 3},
    "inject": {"count": 2, "token_type": 0, "position_features": [0]},
    "jitter": {"features": [0]},
    "occlude": {"every": 2, "ramp": 3, "severity": [0.0, 1.0]},
    "rewire": {"every": 2},
    "shuffle": {"every": 2},
}
AGENTS = ("feed_forward", "sensory")
HEADS = pooling_names()
KINDS = [None, *PERTURBATIONS]
FIXED_SIZE = ("attention_neuron", "cnn", "flatten", "learned_aggregation")
"""Heads for a fixed number of tokens, which two perturbations change."""


def combine(head: int, env: int, kind: int) -> tuple[str, str, str | None]:
    """Return names by index; indices wrap around at the end of each list."""
    label, perturbation = list(ENVS)[env % len(ENVS)], KINDS[kind % len(KINDS)]
    sized = HEADS[head] in FIXED_SIZE and perturbation in ("duplicate", "inject")
    untyped = label == "cartpole" and perturbation == "confuse"
    return label, HEADS[head], None if sized or untyped else perturbation


EACH = [combine(i, i, i) for i in range(len(HEADS))]
"""Every head, environment and perturbation at least once."""
PAIRS = [combine(i, j, i + j) for i in range(len(HEADS)) for j in range(len(ENVS))]
"""Every environment with every head and with every perturbation."""
SYNCHRONIZING = {"lstm"}
"""Encoders that need lengths on the host: cuDNN's packed sequences."""

Build = Callable[[BatchedEnv], dict[str, Policy]]


def build_env(label: str, **options: Any) -> BatchedEnv:
    options = {"max_steps": 4, "seed": 3, **ENVS[label], **options}
    return make_batched_env(options.pop("name"), NUM_ENVS, **options)


def random_policies(env: BatchedEnv) -> dict[str, Policy]:
    return {name: RandomPolicy(g.action_space) for name, g in env.groups.items()}


def token_policies(env: BatchedEnv, **options: Any) -> dict[str, Policy]:
    options = {"encoder": {"name": "transformer", "num_layers": 1}, **options}
    return {
        name: make_policy(group.tokens, group.action_space, seed=0, **options)
        for name, group in env.groups.items()
    }


def perturb(env: BatchedEnv, name: str | None) -> Any:
    if name is None:
        return None
    specs = {name: group.tokens for name, group in env.groups.items()}
    try:
        return make_perturbation(name, specs=specs, **PERTURBATIONS[name])
    except UnfitTokensError as error:
        pytest.skip(str(error))


def reads_in_steps(rollout: Rollout, count: int = 6) -> list[str]:
    """Return the reads of ``count`` steps, after two that may copy constants."""
    with torch.no_grad(), without_reads():
        rollout._play(2)
        with count_syncs() as reads:
            rollout._play(count)
    return reads


# The counter


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: int(x[0]),
        lambda x: (x > 0).nonzero(),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), x.new_zeros(())),
        lambda x: x.masked_select(x > 0),
        lambda x: x.equal(x),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(torch.ones_like(x).long()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: x.new_tensor([1.0]),
        lambda x: x[[0, 2]],
    ],
)
def test_the_counter_sees_reads(operation: Callable[[Tensor], Any]) -> None:
    with count_syncs() as reads:
        operation(torch.ones(3))
    assert len(reads) >= 1, reads


def test_the_counter_ignores_what_stays_on_the_device() -> None:
    x, rows = torch.ones(3, 2), torch.tensor([0, 2])
    with count_syncs() as reads:
        torch.where(x > 0, x, -x).to(torch.float64)
        x[1:] = 3.0
        x.masked_fill_(x > 0, 1.0)
        x[rows] = x[rows, :1].repeat_interleave(2, 1)
    assert reads == []


def test_a_rollout_that_reads_is_counted() -> None:
    env = build_env("boxworld")
    rollout = Rollout(env, random_policies(env))
    with torch.no_grad(), count_syncs() as reads:
        rollout._play(6)
    assert {"_local_scalar_dense", "nonzero"} <= set(reads)


# No reads


def assert_no_reads(label: str, head: str, kind: str | None) -> None:
    env = build_env(label)
    perturbation = perturb(env, kind)
    policies = token_policies(env, pooling={"name": head})
    rollout = Rollout(
        env, policies, perturbation=perturbation, explore=True, sync_free=True
    )
    assert reads_in_steps(rollout) == []


@pytest.mark.parametrize(("label", "head", "kind"), EACH)
def test_no_env_no_head_and_no_perturbation_reads(
    label: str, head: str, kind: str | None
) -> None:
    assert_no_reads(label, head, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("label", "head", "kind"), PAIRS)
def test_no_combination_of_them_reads(label: str, head: str, kind: str | None) -> None:
    try:
        assert_no_reads(label, head, kind)
    except UnfitTokensError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("name", "options"),
    [case for case in ENCODER_VARIANTS if case[0] not in SYNCHRONIZING],
)
def test_no_encoder_reads(name: str, options: Any) -> None:
    env = build_env("centroid")
    policies = token_policies(env, encoder={"name": name, **options})
    rollout = Rollout(env, policies, explore=True, sync_free=True)
    assert reads_in_steps(rollout, 2) == []


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("label", ["centroid, three agents", "cartpole"])
def test_no_agent_reads(label: str, name: str) -> None:
    env = build_env(label)
    policies = {
        group: make_agent(spec.tokens, spec.action_space, name)
        for group, spec in env.groups.items()
    }
    rollout = Rollout(env, policies, explore=True, sync_free=True)
    assert reads_in_steps(rollout) == []


@pytest.mark.parametrize(
    "label", ["centroid", "tag, prey that learn", "cartpole, noise and frames"]
)
def test_no_heuristic_reads(label: str) -> None:
    env = build_env(label)
    name = ENVS[label]["name"]
    policies = {
        role: make_heuristic(name, group, role=role)
        for role, group in env.groups.items()
    }
    assert reads_in_steps(Rollout(env, policies, sync_free=True)) == []


# The same without a CPU


@pytest.mark.parametrize(("label", "head", "kind"), EACH)
def test_steps_need_no_values(label: str, head: str, kind: str | None) -> None:
    """The meta device has no values, and CPU kernels are not chosen there."""
    env = build_env(label, device="meta", max_steps=2)
    policies = {
        name: policy.to("meta")
        for name, policy in token_policies(env, pooling={"name": head}).items()
    }
    rollout = Rollout(env, policies, perturbation=perturb(env, kind), explore=True)
    assert rollout.sync_free
    with torch.no_grad():
        fragment, endings = rollout._play(2)
    assert len(fragment) == len(endings) == 2


# The same trajectories


def assert_equal(actual: Any, expected: Any) -> None:
    pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
    for a, b in pairs:
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def state_of(rollout: Rollout) -> Any:
    """Return a rollout's whole state, and the next numbers of its random streams."""
    numbers = [stream.next() for stream in rollout.noise.values() if stream.size]
    if rollout.env.dynamics.size:
        numbers.append(rollout.env.dynamics.next())
    return numbers, rollout.state_dict()


def fields(trajectories: dict[str, Any]) -> list[Any]:
    return [list(part) for part in trajectories.values()]


# The quick tests cover every environment and every perturbation.
@pytest.mark.parametrize(
    ("label", "kind"),
    [
        pytest.param(label, kind, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, label in enumerate(ENVS)
        for j, kind in enumerate([None, *PERTURBATIONS])
    ],
)
def test_the_trajectories_are_the_same(label: str, kind: str | None) -> None:
    rollouts = []
    for sync_free in (False, True):
        env = build_env(label)
        options = {"perturbation": perturb(env, kind), "sync_free": sync_free}
        rollouts.append(Rollout(env, random_policies(env), **options))
    for count in (5, 1, 7):
        first, second = (fields(rollout.steps(count)) for rollout in rollouts)
        assert_equal(first, second)
    assert_equal(*map(state_of, rollouts))
    assert_equal(*(rollout.pop_finished() for rollout in rollouts))


@pytest.mark.parametrize("label", ["boxworld", "tag, prey that learn"])
@pytest.mark.parametrize("head", ["ada", "max", "attention_neuron"])
def test_policies_act_alike(label: str, head: str) -> None:
    rollouts = []
    for sync_free in (False, True):
        env = build_env(label)
        encoder = {"name": "identity", "dim": 4}
        policies = token_policies(env, encoder=encoder, pooling={"name": head})
        rollouts.append(Rollout(env, policies, explore=True, sync_free=sync_free))
    assert_equal(*(fields(rollout.steps(9)) for rollout in rollouts))
    assert_equal(*(rollout.advance(6) for rollout in rollouts))
    assert_equal(*map(state_of, rollouts))


def test_a_populations_episodes_end_one_by_one_as_on_a_gpu() -> None:
    """Members keep their environments when other members' have ended."""
    envs = [make_batched_env("cartpole", 6, seed=3, max_steps=40) for _ in range(2)]
    group = envs[0].groups["agent"]
    agent = make_agent(
        group.tokens, group.action_space, "feed_forward", seed=0, hidden=[3]
    )
    vectors = torch.randn(3, len(to_vector(agent)), generator=torch.manual_seed(0))
    population = Population(agent, vectors)
    expected = Rollout(envs[0], {"agent": population}).episodes()
    assert len(expected.lengths.unique()) > 1
    with without_reads():
        episodes = Rollout(envs[1], {"agent": population}).episodes()
    assert_equal(episodes.lengths, expected.lengths)
    assert_equal(episodes.returns, expected.returns)


@pytest.mark.parametrize("label", ENVS)
def test_a_state_is_loaded_with_or_without_sync_free(label: str) -> None:
    env = build_env(label)
    first = Rollout(env, random_policies(env), sync_free=True)
    first.steps(6)
    state = first.state_dict()
    expected = fields(first.steps(9))
    again = build_env(label)
    second = Rollout(again, random_policies(again), sync_free=False)
    second.load_state_dict(state)
    assert_equal(fields(second.steps(9)), expected)
    # The same environments, whose levels and numbers were sampled ahead.
    first.sync_free, second.sync_free = False, True
    assert_equal(fields(first.steps(9)), fields(second.steps(9)))


def test_packed_rooms_are_the_same() -> None:
    options = {"n": 5, "goal_length": 2, "num_distractors": 2}
    rollouts = []
    for sync_free in (False, True):
        env = make_batched_env("boxworld", 40, max_steps=2, **options)
        assert not env.generator.has_room
        rollouts.append(Rollout(env, random_policies(env), sync_free=sync_free))
    assert_equal(*(fields(rollout.steps(20)) for rollout in rollouts))


def test_sync_free_defaults_to_the_device() -> None:
    env = build_env("centroid")
    assert not Rollout(env, random_policies(env)).sync_free
    pong = pytest.importorskip("ale_py") and make_batched_env("pong", 1)
    assert not Rollout(pong, random_policies(pong), sync_free=True).sync_free
