"""Rollout against a plain loop: one environment, one step at a time."""

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import marl_pool
from marl_pool.compiled.choice import use_kernels
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation, choose
from marl_pool.policies import make_policy
from marl_pool.policies.base import Decision, Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout, collect
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.trajectory import Trajectory, Transition, concatenate_rows
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, Stream, stream_keys

SPEC = TokenSpec(3, 2, ("self", "heron", "frog"))
NUM_ENVS, SEED, STEPS = 6, 7, 16


class Pond(BatchedEnv):
    """A heron and two frogs on a line.

    An episode terminates after 2 to 8 steps and is truncated after 5. The second frog
    dies after 1 to 6 steps; dead frogs are padding.
    """

    def __init__(self, num_envs: int, **options: Any) -> None:
        options = {"max_steps": 5, "seed": SEED, **options}
        super().__init__(num_envs, dynamics_size=3, **options)
        self.places = torch.zeros(num_envs, 3)
        self.life = torch.zeros(num_envs, dtype=torch.int64)
        self.death = torch.zeros(num_envs, dtype=torch.int64)

    @property
    def groups(self) -> dict[str, AgentGroup]:
        return {
            "heron": AgentGroup(1, SPEC, spaces.Box(-1, 3, (1,))),
            "frog": AgentGroup(2, SPEC, spaces.Discrete(3)),
        }

    @property
    def active(self) -> dict[str, Tensor]:
        heron = torch.ones(self.num_envs, 1, dtype=torch.bool)
        frogs = torch.stack([heron[:, 0], self.steps < self.death], dim=1)
        return {"heron": heron, "frog": frogs}

    def observe(self) -> dict[str, Tokens]:
        relative = self.places[:, None] - self.places[:, :, None]
        features = torch.stack([relative, self.places[:, None].expand(-1, 3, -1)], -1)
        types = torch.tensor([1, 2, 2]).repeat(3, 1).fill_diagonal_(0)
        living = torch.cat([self.active["heron"][:, :1], self.active["frog"]], dim=1)
        tokens = Tokens(
            features,
            types.expand(self.num_envs, 3, 3),
            ~living[:, None].expand(-1, 3, -1),
        )
        return {
            "heron": tokens.map(lambda part: part[:, :1]),
            "frog": tokens.map(lambda part: part[:, 1:]),
        }

    def place(self, rows: Tensor, keys: Tensor) -> None:
        drawn = self.sample_uniform(keys, 5)
        self.places = self.places.index_put((rows,), drawn[:, :3])
        self.life = self.life.index_put((rows,), (2 + 7 * drawn[:, 3]).long())
        self.death = self.death.index_put((rows,), (1 + 6 * drawn[:, 4]).long())

    def advance(self, actions: Any) -> tuple[dict[str, Tensor], Tensor]:
        moves = [actions["heron"][..., 0].clamp(-1, 3), actions["frog"] - 1.0]
        self.places = self.places + 0.1 * torch.cat(moves, 1) + self.dynamics.next()
        earned = -self.places[:, 1:] * self.active["frog"]
        rewards = {"heron": self.places[:, :1] - 1, "frog": earned}
        return rewards, self.steps + 1 >= self.life

    def _tensors(self) -> dict[str, Tensor]:
        return {"places": self.places, "life": self.life, "death": self.death}


class Counting(Policy):
    """A policy whose memory, the number of calls, determines its decisions."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.discrete = isinstance(space, spaces.Discrete)
        self.rows: list[int] = []

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> Any:
        calls = torch.zeros(num_envs, num_agents, 1)
        return {"calls": calls, "more": (calls + num_tokens,)}

    def act(
        self,
        tokens: Tokens,
        state: Any = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        calls = state["calls"]
        self.rows.append(len(calls))
        total = tokens.features.masked_fill(tokens.padding[..., None], 0).sum((-1, -2))
        value = 100 * calls[..., 0] + total
        action = calls / 10
        if self.discrete:
            action = (calls[..., 0] % 3).long()
        new = {"calls": calls + 1, "more": (state["more"][0] + 1,)}
        return Decision(action, -value, value, state["more"][0], new)


class Aging(Perturbation):
    """Add the number of earlier observations in the episode to all features."""

    def start(self, tokens, keys, state=None, where=None, episodes=None):
        fresh = {"age": torch.zeros(len(keys))}
        return fresh if where is None or state is None else choose(where, fresh, state)

    def __call__(self, tokens: Tokens, state: Any) -> tuple[Tokens, Any]:
        age = state["age"]
        features = tokens.features + age[:, None, None, None]
        return tokens._replace(features=features), {"age": age + 1}


def token_policies(env: BatchedEnv) -> dict[str, Policy]:
    encoder = {"name": "transformer", "num_layers": 1}
    return {
        name: make_policy(group.tokens, group.action_space, encoder=encoder, seed=part)
        for part, (name, group) in enumerate(env.groups.items())
    }


def counting_policies(env: BatchedEnv) -> dict[str, Policy]:
    return {name: Counting(group.action_space) for name, group in env.groups.items()}


def random_policies(env: BatchedEnv) -> dict[str, Policy]:
    groups = env.groups.items()
    return {name: RandomPolicy(group.action_space) for name, group in groups}


PERTURBATIONS: dict[str, Any] = {
    "none": lambda: None,
    "aging": Aging,
    **{
        name: partial(make_perturbation, name, **options)
        for name, options in {
            "jitter": {"severity": 0.5},
            "occlude": {"severity": 0.5, "every": 2},
            "shuffle": {"every": 3},
            "inject": {"token_type": 2, "count": 2, "position_features": [0, 1]},
            "delay": {"severity": [0.0, 1.0]},
        }.items()
    },
}


def play_alone(
    number: int,
    policies: dict[str, Policy],
    *,
    steps: int = STEPS,
    perturbation: Perturbation | None = None,
    explore: bool = False,
) -> tuple[dict[str, Trajectory], list[Any], BatchedEnv]:
    """Play environment ``number`` alone; return its steps by group, episodes and env.

    An episode is its returns by group and its length.
    """
    env = Pond(1, first_env=number)
    names = list(env.groups)
    rows: dict[str, list[Any]] = {name: [] for name in names}
    episodes: list[Any] = []
    states: dict[str, Any] = {}
    noise: dict[str, Stream] = {}
    memories: dict[str, Any] = {}
    total: dict[str, Tensor] = {}

    def look() -> dict[str, Tokens]:
        tokens = env.observe()
        for name in names:
            if perturbation is not None:
                tokens[name], memories[name] = perturbation(
                    tokens[name], memories[name]
                )
        return tokens

    def begin() -> dict[str, Tokens]:
        env.reset()
        clean = env.observe()
        where = (env.seed, env.env_ids)
        for part, name in enumerate(names):
            group, policy = env.groups[name], policies[name]
            size = group.num_agents * policy.noise_size
            noise[name] = Stream(*where, Purpose.POLICY, size, part=part)
            noise[name].restart(env.episodes)
            total[name] = torch.zeros(group.num_agents, dtype=torch.float64)
            if perturbation is not None:
                keys = stream_keys(*where, env.episodes, Purpose.PERTURBATION, part)
                memories[name] = perturbation.start(clean[name], keys)
        observations = look()
        for name, policy in policies.items():
            states[name] = policy.initial_state(
                1, env.groups[name].num_agents, observations[name].num_tokens
            )
        return observations

    tokens = begin()
    for _ in range(steps):
        active = env.active
        decisions = {
            name: policy.act(tokens[name], states[name], noise[name], explore)
            for name, policy in policies.items()
        }
        step = env.step({n: policies[n].scale(d.action) for n, d in decisions.items()})
        after = look()
        for name, decision in decisions.items():
            remembered, states[name] = states[name], decision.state
            next_value = policies[name].act(after[name], decision.state).value
            total[name] = total[name] + step.rewards[name][0]
            rows[name].append(
                (
                    tokens[name],
                    *decision[:2],
                    decision.logits,
                    decision.value,
                    next_value,
                    step.rewards[name],
                    step.terminated,
                    step.truncated,
                    active[name],
                    env.active[name],
                    remembered,
                )
            )
            for agent in (env.active[name] & ~active[name])[0].nonzero()[:, 0]:
                start = policies[name].initial_state(1, 1, SPEC.num_tokens)
                for leaf, first in zip(
                    tree_leaves(states[name]), tree_leaves(start), strict=True
                ):
                    leaf[:, agent] = first[:, 0]
        tokens = after
        if step.terminated or step.truncated:
            episodes.append((dict(total), int(env.steps)))
            tokens = begin()
    return {name: stack(rows[name]) for name in names}, episodes, env


def stack(rows: list[Any]) -> Trajectory:
    """Stack steps, each a tuple in the order of Trajectory's fields."""

    def stacked(*parts: Any) -> Any:
        return None if parts[0] is None else torch.stack(parts)

    return Trajectory(
        *(tree_map(stacked, *column) for column in zip(*rows, strict=True))
    )


def tensors(part: Trajectory) -> dict[str, Tensor]:
    """All tensors of a trajectory by name."""
    fields = {name: p for name, p in part._asdict().items() if p is not None}
    states = {f"state {i}": t for i, t in enumerate(tree_leaves(fields.pop("states")))}
    return {**fields.pop("tokens").columns, **fields, **states}


def assert_same(part: Trajectory, twin: Trajectory, *, exactly: bool = False) -> None:
    reference = tensors(twin)
    for name, tensor in tensors(part).items():
        expected = reference[name]
        assert tensor.dtype == expected.dtype, name
        if exactly or not tensor.is_floating_point():
            assert torch.equal(tensor, expected), name
        else:
            assert torch.allclose(tensor, expected, rtol=1e-5, atol=1e-5), name


def steps_of(part: Trajectory, number: int) -> Trajectory:
    """Select the steps of one environment, as a batch of one."""
    index = slice(number, number + 1)
    tokens = part.tokens.at((slice(None), index))
    absent = {name for name, column in part._asdict().items() if column is None}
    excluded = {"tokens", "states"} | absent
    columns = {k: v[:, index] for k, v in part._asdict().items() if k not in excluded}
    states = tree_map(lambda leaf: leaf[:, index], part.states)
    return Trajectory(tokens=tokens, states=states, **columns)


def join(parts: list[dict[str, Trajectory]], name: str) -> Trajectory:
    """Concatenate a group's fragments."""
    fields = [part[name]._asdict() for part in parts]
    columns = {key: [field[key] for field in fields] for key in fields[0]}
    return Trajectory(**{k: concatenate_rows(column) for k, column in columns.items()})


def rollout(
    policies: Any = token_policies, num_envs: int = NUM_ENVS, **options: Any
) -> Rollout:
    env = Pond(num_envs)
    return Rollout(env, policies(env), **options)


# Against the plain loop


# Perturbations and policies meet in one line of code: each is tried with one other.
@pytest.mark.parametrize(
    ("policies", "explore", "kind"),
    [
        *((token_policies, True, kind) for kind in PERTURBATIONS),
        (token_policies, False, "none"),
        (counting_policies, False, "none"),
        (counting_policies, False, "aging"),
        (random_policies, False, "none"),
    ],
)
def test_a_batch_is_its_envs_one_by_one(
    policies: Any, explore: bool, kind: str
) -> None:
    options = {"perturbation": PERTURBATIONS[kind](), "explore": explore}
    together = rollout(policies, **options)
    parts = together.steps(STEPS)
    state = together.env.state_dict()
    for number in (0, 2, NUM_ENVS - 1):
        expected, _, env = play_alone(number, together.policies, **options)
        for name, part in parts.items():
            assert_same(steps_of(part, number), expected[name])
        assert torch.equal(state["episodes"][number : number + 1], env.episodes)
        assert torch.equal(state["steps"][number : number + 1], env.steps)
        for name, tensor in env.state_dict()["tensors"].items():
            torch.testing.assert_close(state["tensors"][name][number], tensor[0])


@pytest.mark.parametrize("kind", ["none", "jitter"])
def test_advance_takes_the_same_steps_without_recording_them(kind: str) -> None:
    first, second = (
        rollout(explore=True, perturbation=PERTURBATIONS[kind]()) for _ in range(2)
    )
    totals, parts = first.advance(STEPS), second.steps(STEPS)
    for name, part in parts.items():
        sums = part.rewards.double().sum(0)
        torch.testing.assert_close(totals[name], sums, rtol=0, atol=1e-6)
    assert not first.pop_finished()
    further = [instance.steps(5) for instance in (first, second)]
    for name, part in further[0].items():
        assert_same(part, further[1][name], exactly=True)


@pytest.mark.parametrize(
    ("policies", "kind"),
    [*((counting_policies, kind) for kind in PERTURBATIONS), (random_policies, "none")],
)
def test_sync_free_rollouts_are_the_same(policies: Any, kind: str) -> None:
    first, second = (
        rollout(policies, perturbation=PERTURBATIONS[kind](), sync_free=sync_free)
        for sync_free in (False, True)
    )
    for count in (STEPS, 3):
        parts = second.steps(count)
        for name, part in first.steps(count).items():
            assert_same(part, parts[name], exactly=True)
    leaves = (tree_leaves(instance.state_dict()) for instance in (first, second))
    for a, b in zip(*leaves, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_the_pond_has_every_kind_of_ending_and_death() -> None:
    parts = rollout().steps(STEPS)
    terminated, truncated = parts["heron"].terminated, parts["heron"].truncated
    ended = terminated | truncated
    assert (terminated & ~truncated).any()
    assert (truncated & ~terminated).any()
    assert (terminated & truncated).any()
    assert len({tuple(column) for column in ended.T.tolist()}) > 3
    assert ended[-1].any()
    assert not ended[-1].all()
    frogs = parts["frog"]
    assert (frogs.active & ~frogs.next_active)[..., 1].any()
    assert (~frogs.active & ~frogs.next_active)[..., 1].any()
    assert frogs.tokens.padding.any()


def test_next_values_are_of_the_next_observation_or_the_final_one() -> None:
    together = rollout()
    for name, part in together.steps(STEPS).items():
        ended = part.terminated | part.truncated
        goes_on = ~ended[:-1]
        assert torch.equal(part.next_values[:-1][goes_on], part.values[1:][goes_on])
        # After an end, the next observation belongs to another episode.
        assert (part.next_values[:-1] != part.values[1:])[ended[:-1]].all()
        last = together.policies[name].act(together.tokens[name]).value
        torch.testing.assert_close(part.next_values[-1][~ended[-1]], last[~ended[-1]])
        assert (part.next_values[-1] != last)[ended[-1]].all()


def test_shapes_and_no_gradient() -> None:
    parts = rollout().steps(7)
    agents = {"heron": 1, "frog": 2}
    assert list(parts) == list(agents)
    for name, part in parts.items():
        batch = (7, NUM_ENVS, agents[name])
        assert part.tokens.batch_shape == batch
        for field in ("log_probs", "values", "next_values", "rewards", "active"):
            assert getattr(part, field).shape == batch
        assert part.next_active.shape == batch
        assert part.terminated.shape == part.truncated.shape == batch[:2]
        assert not any(tensor.requires_grad for tensor in tensors(part).values())
    assert parts["heron"].actions.shape == (7, NUM_ENVS, 1, 1)
    assert parts["frog"].actions.shape == (7, NUM_ENVS, 2)
    assert parts["frog"].logits.shape == (7, NUM_ENVS, 2, 3)


@pytest.mark.parametrize("change", ["in place", "data", "load", "assign"])
def test_each_call_reads_the_present_weights(change: str) -> None:
    sampled, env = rollout(), Pond(NUM_ENVS)
    sampled.steps(3)
    for policy in sampled.policies.values():
        weights = {n: 1.5 * tensor for n, tensor in policy.state_dict().items()}
        if change in ("load", "assign"):
            policy.load_state_dict(weights, assign=change == "assign")
        for name, parameter in policy.named_parameters():
            if change == "in place":
                with torch.no_grad():
                    parameter.copy_(weights[name])
            elif change == "data":
                parameter.data = weights[name]
    fresh = Rollout(env, sampled.policies)
    fresh.load_state_dict(sampled.state_dict())
    with use_kernels("torch"):
        expected = fresh.steps(3)
    for name, part in sampled.steps(3).items():
        torch.testing.assert_close(part.logits, expected[name].logits)


def test_later_steps_do_not_overwrite_returned_trajectories() -> None:
    together = rollout(explore=True, perturbation=Aging())
    parts = together.steps(3)
    before = {
        n: {k: v.clone() for k, v in tensors(p).items()} for n, p in parts.items()
    }
    together.steps(8)
    for name, part in parts.items():
        for key, tensor in tensors(part).items():
            assert torch.equal(tensor, before[name][key]), key


# Fragments


@pytest.mark.parametrize(
    ("policies", "kind"),
    [
        (token_policies, "none"),
        (token_policies, "occlude"),
        (counting_policies, "aging"),
    ],
)
@pytest.mark.parametrize("lengths", [(8, 8), (1, 3, 12), (1,) * 16])
def test_trajectories_do_not_depend_on_the_length_of_fragments(
    policies: Any, kind: str, lengths: tuple[int, ...]
) -> None:
    options = {"perturbation": PERTURBATIONS[kind](), "explore": True}
    whole = rollout(policies, **options).steps(STEPS)
    pieces = rollout(policies, **options)
    parts = [pieces.steps(length) for length in lengths]
    for name, part in whole.items():
        assert_same(join(parts, name), part)


def test_ended_envs_are_refilled_with_the_next_episode() -> None:
    together = rollout()
    ended = torch.zeros(NUM_ENVS, dtype=torch.int64)
    for _ in range(STEPS):
        (part, _) = together.steps(1).values()
        ended += (part.terminated | part.truncated)[0]
        assert torch.equal(together.env.episodes, ended)
        assert (together.env.steps < together.env.max_steps).all()
        assert (together.env.steps < together.env.life).all()


def test_finished_episodes_and_running_returns() -> None:
    together = rollout()
    finished = []
    for length in (1, 6, 2, 7):
        together.steps(length)
        finished += together.pop_finished()
        assert together.pop_finished() == []
    order = torch.cat([part.lengths for part in finished]).tolist()
    alone = [play_alone(n, together.policies)[1] for n in range(NUM_ENVS)]
    expected = [episode for episodes in alone for episode in episodes]
    assert len(order) == len(expected) > NUM_ENVS
    for name in together.policies:
        returns = torch.cat([part.returns[name] for part in finished])
        assert returns.dtype == torch.float64
        actual = sorted(zip(returns.tolist(), order, strict=True))
        pairs = sorted((total[name].tolist(), length) for total, length in expected)
        for (a, length), (b, steps) in zip(actual, pairs, strict=True):
            assert length == steps
            assert a == pytest.approx(b, abs=1e-5)


def test_collect_is_the_first_fragment() -> None:
    options = {"perturbation": Aging(), "explore": True}
    expected = rollout(**options).steps(9)
    env = Pond(NUM_ENVS)
    parts = collect(env, token_policies(env), steps=9, **options)
    for name, part in expected.items():
        assert_same(parts[name], part, exactly=True)
    assert marl_pool.collect is collect


# Whole episodes


@pytest.mark.parametrize("kind", ["none", "aging", "occlude"])
@pytest.mark.parametrize("policies", [token_policies, counting_policies])
def test_episodes_are_one_for_each_env_in_order(policies: Any, kind: str) -> None:
    options = {"perturbation": PERTURBATIONS[kind](), "explore": True}
    together = rollout(policies, **options)
    episodes = together.episodes()
    assert episodes.lengths.shape == (NUM_ENVS,)
    assert len(set(episodes.lengths.tolist())) > 2
    for number in range(NUM_ENVS):
        _, alone, _ = play_alone(number, together.policies, **options)
        expected, length = alone[0]
        assert episodes.lengths[number] == length
        for name, returns in episodes.returns.items():
            torch.testing.assert_close(
                returns[number], expected[name], rtol=1e-5, atol=1e-5
            )
    assert together.env.num_envs == 0


def test_an_env_whose_episode_ended_is_dropped() -> None:
    together = rollout(counting_policies)
    lengths = rollout(counting_policies).episodes().lengths
    steps = itertools.count()

    def check(transition: Transition) -> None:
        step = next(steps)
        running = (lengths > step).nonzero()[:, 0]
        assert torch.equal(transition.env.env_ids, running)
        assert (transition.env.steps == step + 1).all()
        assert transition.tokens["frog"].batch_shape == (len(running), 2)
        assert transition.step.rewards["heron"].shape == (len(running), 1)
        assert (transition.decisions["heron"].state["calls"] == step + 1).all()

    together.episodes(check)
    assert next(steps) == lengths.max()
    counter: Any = together.policies["frog"]
    running = [int((lengths > step).sum()) for step in range(int(lengths.max()))]
    assert counter.rows == running


def test_transitions_hold_what_the_policies_observed() -> None:
    together, same = rollout(perturbation=Aging()), rollout(perturbation=Aging())
    transitions: list[Transition] = []
    together.episodes(transitions.append)
    for name, part in same.steps(2).items():
        for step in range(2):
            seen, expected = transitions[step].tokens[name], part.tokens.at(step)
            assert all(map(torch.equal, seen.parts, expected.parts))


# Agents and episodes that start in mid-rollout


class Absent(Pond):
    """A pond whose second frog is away in the second and third step of an episode."""

    @property
    def active(self) -> dict[str, Tensor]:
        heron = torch.ones(self.num_envs, 1, dtype=torch.bool)
        presence = (self.steps < 1) | (self.steps >= 3)
        return {"heron": heron, "frog": torch.stack([heron[:, 0], presence], dim=1)}


def test_an_agent_that_appears_in_mid_episode_starts_with_a_fresh_memory() -> None:
    env = Absent(NUM_ENVS)
    parts = Rollout(env, counting_policies(env)).steps(STEPS)
    heron, frogs = (parts[name].states["calls"][..., 0] for name in ("heron", "frog"))
    # The memory counts calls: the heron's are the steps of the episode so far.
    time = heron[..., 0]
    assert time.max() >= 4
    assert torch.equal(frogs[..., 0], time)
    assert torch.equal(frogs[..., 1], torch.where(time >= 3, time - 3, time))


class CountingAlone(Counting):
    """A policy whose memory is a tensor, in no other structure."""

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> Any:
        return super().initial_state(num_envs, num_agents, num_tokens)["calls"]

    def act(self, tokens: Tokens, state: Any = (), *args: Any, **options: Any) -> Any:
        states = {"calls": state, "more": (state,)}
        decision = super().act(tokens, states, *args, **options)
        return decision._replace(state=decision.state["calls"])


def test_a_memory_may_be_a_tensor() -> None:
    env, twin = Absent(NUM_ENVS), Absent(NUM_ENVS)
    groups = env.groups.items()
    alone = {name: CountingAlone(group.action_space) for name, group in groups}
    parts = Rollout(env, alone).steps(STEPS)
    expected = Rollout(twin, counting_policies(twin)).steps(STEPS)
    for name, part in parts.items():
        assert torch.equal(part.states, expected[name].states["calls"])


def test_a_ramp_counts_episodes_per_env() -> None:
    ramped = make_perturbation("occlude", severity=1.0, ramp=50)
    together = rollout(perturbation=ramped)
    part = together.steps(STEPS)["heron"]
    episodes = (part.terminated | part.truncated).sum(0)
    assert len(episodes.unique()) > 1
    for state in together.perturbation_states.values():
        torch.testing.assert_close(state["severity"], episodes.double() / 50)


# Randomness


def test_actions_depend_on_the_seed_and_the_env_alone() -> None:
    def actions(**options: Any) -> Tensor:
        env = Pond(3, **options)
        return collect(env, random_policies(env), steps=6)["heron"].actions

    assert torch.equal(actions(), actions())
    assert not torch.equal(actions(), actions(seed=SEED + 1))
    assert not torch.equal(actions(), actions(first_env=3))
    assert torch.equal(actions()[:, 1:], actions(first_env=1)[:, :2])


def test_groups_have_separate_random_streams() -> None:
    class Twins(Pond):
        @property
        def groups(self) -> dict[str, AgentGroup]:
            frogs = super().groups["frog"]
            return {"heron": frogs, "frog": frogs}

        @property
        def active(self) -> dict[str, Tensor]:
            return dict.fromkeys(("heron", "frog"), super().active["frog"])

        def observe(self) -> dict[str, Tokens]:
            return dict.fromkeys(("heron", "frog"), super().observe()["frog"])

        def advance(self, actions: Any) -> tuple[dict[str, Tensor], Tensor]:
            rewards = torch.zeros(self.num_envs, 2)
            return {"heron": rewards, "frog": rewards}, self.steps + 1 >= self.life

    env = Twins(20)
    parts = collect(env, random_policies(env), steps=4)
    assert not torch.equal(parts["heron"].actions, parts["frog"].actions)


@pytest.mark.parametrize("policies", [token_policies, random_policies])
def test_the_order_of_the_policies_does_not_matter(policies: Any) -> None:
    options = {"explore": True, "perturbation": PERTURBATIONS["jitter"]()}
    expected = rollout(policies, **options).steps(STEPS)
    env = Pond(NUM_ENVS)
    backwards = dict(reversed(policies(env).items()))
    for name, part in Rollout(env, backwards, **options).steps(STEPS).items():
        assert_same(part, expected[name], exactly=True)


@pytest.mark.parametrize(
    ("policies", "kind"),
    [*((token_policies, kind) for kind in PERTURBATIONS), (random_policies, "none")],
)
def test_the_global_generator_is_left_alone(policies: Any, kind: str) -> None:
    options = {"explore": True, "perturbation": PERTURBATIONS[kind]()}
    before = torch.get_rng_state()
    rollout(policies, **options).steps(STEPS)
    rollout(policies, **options).episodes()
    assert torch.equal(torch.get_rng_state(), before)


def test_exploring_changes_the_actions() -> None:
    first, again, explored = (
        rollout(explore=explore).steps(6)["heron"].actions
        for explore in (False, False, True)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, explored)


# Observations


def test_recorded_observations_are_those_of_the_policies() -> None:
    clean = rollout(counting_policies).steps(STEPS)
    aged = rollout(counting_policies, perturbation=Aging()).steps(STEPS)
    for name, part in aged.items():
        calls = (part.values // 50 / 2).floor()  # of the policy, in this episode
        ended = part.terminated | part.truncated
        age = torch.zeros(NUM_ENVS)
        for t in range(STEPS):
            added = part.tokens.features[t] - clean[name].tokens.features[t]
            torch.testing.assert_close(
                added, age[:, None, None, None].expand_as(added), rtol=0, atol=1e-5
            )
            age = (age + 1) * ~ended[t]
        assert calls.max() >= 4


# Saving and loading


@pytest.mark.parametrize(
    ("policies", "kind"),
    [
        (token_policies, "none"),
        (token_policies, "inject"),
        (counting_policies, "none"),
        (counting_policies, "aging"),
        (random_policies, "occlude"),
    ],
)
def test_a_loaded_state_continues_exactly(policies: Any, kind: str) -> None:
    options = {"perturbation": PERTURBATIONS[kind](), "explore": True}
    first = rollout(policies, **options)
    first.steps(6)
    first.pop_finished()
    state = first.state_dict()
    expected = first.steps(STEPS)
    finished = first.pop_finished()
    for _ in range(2):  # a state may be used twice
        second = rollout(policies, **options)
        second.load_state_dict(state)
        for name, part in second.steps(STEPS).items():
            assert_same(part, expected[name], exactly=True)
        for actual, reference in zip(second.pop_finished(), finished, strict=True):
            assert torch.equal(actual.lengths, reference.lengths)
            for name, returns in reference.returns.items():
                assert torch.equal(actual.returns[name], returns)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda rollout: pickle.loads(pickle.dumps(rollout))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize("kind", ["none", "inject"])
def test_a_copy_continues_exactly(copied: Callable[[Any], Any], kind: str) -> None:
    original = rollout(perturbation=PERTURBATIONS[kind](), explore=True)
    original.steps(6)
    twin = copied(original)
    expected = original.steps(STEPS)
    for policy in original.policies.values():
        for parameter in policy.parameters():
            parameter.data.zero_()
    for name, part in twin.steps(STEPS).items():
        assert_same(part, expected[name], exactly=True)


def test_a_state_holds_finished_episodes() -> None:
    first, second = rollout(), rollout()
    first.steps(STEPS)
    second.load_state_dict(first.state_dict())
    pairs = zip(second.pop_finished(), first.pop_finished(), strict=True)
    assert all(torch.equal(a.lengths, b.lengths) for a, b in pairs)


# Invalid arguments


def test_policies_must_match_the_groups() -> None:
    env = Pond(1)
    policies = token_policies(env)
    heron = {"heron": policies["heron"]}
    for wrong in (heron, {}, {**policies, "newt": policies["frog"]}):
        with pytest.raises(InputError, match=r"each group \['frog', 'heron'\], got \["):
            Rollout(env, wrong)


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("method", ["steps", "advance"])
def test_fewer_than_one_step_are_refused(method: str, count: int) -> None:
    with pytest.raises(InputError, match=f"steps: expected at least 1, got {count}"):
        getattr(rollout(), method)(count)


@pytest.mark.parametrize(
    "call",
    [
        lambda over: over.steps(1),
        lambda over: over.advance(1),
        lambda over: over.episodes(),
        lambda over: next(over.transitions()),
    ],
)
@pytest.mark.parametrize("sync_free", [False, True])
def test_a_rollout_whose_episodes_are_over_is_refused(
    call: Callable[[Rollout], Any], sync_free: bool
) -> None:
    over = rollout(sync_free=sync_free)
    over.episodes()
    with pytest.raises(InputError, match="rollout: expected environments .* got none"):
        call(over)


class Stuck(Pond):
    """A pond whose first frog may do nothing from the third step of an episode on."""

    def place(self, rows: Tensor, keys: Tensor) -> None:
        super().place(rows, keys)
        self.life = torch.full_like(self.life, 5)

    def observe(self) -> dict[str, Tokens]:
        tokens = super().observe()
        mask = torch.ones(self.num_envs, 2, 3, dtype=torch.bool)
        mask[:, 0] = (self.steps < 2)[:, None]
        return {**tokens, "frog": tokens["frog"]._replace(action_mask=mask)}


@pytest.mark.parametrize("method", ["steps", "advance"])
@pytest.mark.parametrize("sync_free", [False, True])
def test_a_mask_that_allows_nothing_is_reported_with_its_step(
    method: str, sync_free: bool
) -> None:
    env = Stuck(NUM_ENVS)
    stuck = Rollout(env, random_policies(env), sync_free=sync_free)
    stuck.steps(1)
    message = "agent 0 of group 'frog' in environment 0 at step 2: .* got none"
    with pytest.raises(InputError, match=message):
        getattr(stuck, method)(2)


def test_terminations_come_at_many_steps() -> None:
    part = rollout(num_envs=32).steps(40)["heron"]
    ended = part.terminated | part.truncated
    gaps = [
        b - a
        for column in ended.T
        for a, b in itertools.pairwise(column.nonzero()[:, 0].tolist())
    ]
    assert set(gaps) == {2, 3, 4, 5}
