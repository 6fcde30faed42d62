"""In turn-based environments a perturbation's memory covers an agent's own turns."""

import math
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.api.perturb import perturb_env
from marl_pool.envs import make_env
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.evaluation.cases import play as play_episodes
from marl_pool.evaluation.measure import measure
from marl_pool.evaluation.settings import PerturbationLevels
from marl_pool.perturbations import make_perturbation, perturbation_names
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Decision, Policy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

NUM_ENVS, TURNS, AGENTS = 3, 6, 2
SPEC = TokenSpec(5, 4, ("self", "friend", "stone"), num_frames=2)


class Together(BatchedEnv):
    """Agents that all observe and act in every step."""

    state_names = ()
    stride = 1
    """Steps from one turn of an agent to its next."""

    pair: ClassVar[str] = "pair"

    def __init__(self, num_envs: int, **common: Any) -> None:
        super().__init__(num_envs, max_steps=TURNS * self.stride, **common)
        self.groups = {self.pair: AgentGroup(AGENTS, SPEC, spaces.Discrete(7))}

    def observe(self) -> dict[str, Tokens]:
        """Show numbers of the environment, episode, agent, turn, slot and feature."""
        turn = (self.steps // self.stride)[:, None, None]
        agent, slot = torch.arange(AGENTS)[:, None], torch.arange(5)
        place = 5 * (7 * self.env_ids + self.episodes)[:, None, None] + slot
        numbers = 3.7 * place + 1.9 * agent + 0.83 * turn
        features = torch.stack([(numbers * k).sin() for k in (1, 2, 3, 4)], -1)
        types = torch.tensor([0, 1, 1, 2, 2]).expand(self.num_envs, AGENTS, 5)
        # A token comes and goes.
        padding = (slot == 3) & ((turn + agent) % 3 == 1)
        return {self.pair: Tokens(features, types, padding)}

    def place(self, rows: Tensor, keys: Tensor) -> None:
        self.placed = rows

    def advance(self, actions: Any) -> Any:
        rewards = torch.zeros(self.num_envs, AGENTS)
        return {self.pair: rewards}, torch.zeros(self.num_envs, dtype=torch.bool)


class InTurn(Together):
    """The same agents, one of which acts in each step; the other sees padding."""

    stride = AGENTS
    turn_based = True

    @property
    def active(self) -> dict[str, Tensor]:
        in_turn = (self.steps % AGENTS)[:, None] == torch.arange(AGENTS)
        return {self.pair: in_turn}

    @property
    def alive(self) -> dict[str, Tensor]:
        return {self.pair: torch.ones(self.num_envs, AGENTS, dtype=torch.bool)}

    def observe(self) -> dict[str, Tokens]:
        tokens, active = super().observe()[self.pair], self.active[self.pair]
        features = tokens.features.masked_fill(~active[..., None, None], 99.0)
        padding = tokens.padding | ~active[..., None]
        return {self.pair: tokens._replace(features=features, padding=padding)}


class Echo(Policy):
    """A policy whose actions depend on the perceived tokens."""

    noise_size: ClassVar[int] = 0

    def act(
        self, tokens: Tokens, state: Any = (), generator: Any = None, explore=False
    ) -> Decision:
        total = tokens.features.masked_fill(tokens.padding[..., None], 0).sum((-1, -2))
        action, zeros = (total * 100).abs().long() % 7, torch.zeros_like(total)
        return Decision(action, zeros, zeros, zeros[..., None], ())

    def value(self, tokens: Tokens, state: Any = ()) -> Tensor:
        return torch.zeros(tokens.batch_shape)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"severity": 0.6}) for name in perturbation_names()),
    ("delay", {"severity": 1.0, "steps": 2}),
    ("delay", {"severity": [0.0, 1.0], "steps": 3, "onset": 1, "end": 4}),
    ("freeze", {"every": 2}),
    ("freeze", {"onset": 2, "agents": [1]}),
    ("jitter", {"every": 2}),
    ("occlude", {"severity": [0.2, 0.9], "ramp": 2}),
    ("shuffle", {"scope": "frame", "every": 2}),
    ("rewire", {"every": 1}),
    ("drop_actions", {"severity": 0.7, "every": 2}),
]


def build(name: str, options: dict[str, Any]) -> Perturbation:
    if name == "inject":
        options = {"count": 3, "token_type": 2, "position_features": [0, 1], **options}
    return make_perturbation(name, specs={"pair": SPEC}, **options)


def play(
    env: BatchedEnv, perturbation: Perturbation, sync_free: bool
) -> tuple[Tokens, Tensor, Tensor]:
    """Return tokens and actions of three episodes by step, and those executed."""
    rollout = Rollout(
        env, {"pair": Echo()}, perturbation=perturbation, sync_free=sync_free
    )
    executed, step = [], env.step
    env.step = lambda actions: (executed.append(actions["pair"]), step(actions))[1]  # type: ignore[method-assign]
    trajectory = rollout.steps(3 * env.max_steps)["pair"]
    return trajectory.tokens, trajectory.actions, torch.stack(executed)


@pytest.mark.parametrize("sync_free", [False, True])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_other_agents_turns_do_not_affect_the_perturbation(name, options, sync_free):
    perturbation = build(name, options)
    expected = play(Together(NUM_ENVS, seed=5), perturbation, False)
    results = play(InTurn(NUM_ENVS, seed=5), perturbation, sync_free)
    for agent in range(AGENTS):
        for whole, by_turns in zip(expected, results, strict=True):
            parts = whole.parts if isinstance(whole, Tokens) else (whole,)
            turns = by_turns.parts if isinstance(by_turns, Tokens) else (by_turns,)
            for part, turn in zip(parts, turns, strict=True):
                assert part[:, :, agent].equal(turn[agent::AGENTS, :, agent])


@pytest.mark.parametrize("name", ["delay", "freeze", "shuffle", "drop_actions"])
def test_perturbations_do_change_the_rollout(name):
    """Otherwise the tests above would hold trivially."""
    perturbation = build(name, {"severity": 0.6})
    plain = play(Together(NUM_ENVS, seed=5), build("jitter", {"severity": 0.0}), False)
    changed = play(Together(NUM_ENVS, seed=5), perturbation, False)
    features = zip(plain[0].parts, changed[0].parts, strict=True)
    assert not all(a.equal(b) for a, b in features) or not plain[2].equal(changed[2])


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_rollout_goes_on_from_its_state(name, options):
    perturbation = build(name, options)
    original, resumed = (
        Rollout(InTurn(2, seed=5), {"pair": Echo()}, perturbation=perturbation)
        for _ in range(2)
    )
    original.steps(2 * TURNS + 3)
    resumed.load_state_dict(original.state_dict())
    expected, actual = (run.steps(9)["pair"].tokens for run in (original, resumed))
    assert all(map(torch.equal, expected.parts, actual.parts))


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_view_shows_what_a_rollout_shows(name, options):
    if "ramp" in options:
        options = {**options, "ramp": None}
    env = InTurn(1, seed=5)
    rollout = Rollout(env, {"pair": Echo()}, perturbation=build(name, options))
    view = perturb_env(make_env(f"{__name__}:InTurn"), build(name, options), seed=5)
    observations, _ = view.reset(seed=5)
    for _ in range(env.max_steps - 1):
        tokens = rollout.tokens["pair"]
        for agent in range(AGENTS):
            if env.active["pair"][0, agent]:
                for part, tensor in tokens.at((0, agent)).columns.items():
                    shown = torch.as_tensor(observations[f"pair_{agent}"][part])
                    assert tensor.equal(shown.to(tensor.dtype))
        rollout.steps(1)
        observations, *_ = view.step(dict.fromkeys(view.agents, 0))


class Named(InTurn):
    """A group whose name differs from what its agents' names share as a file name."""

    pair = "the pair"


def test_a_group_may_have_any_name():
    view = perturb_env(make_env(f"{__name__}:Named"), "occlude", seed=5)
    view.reset(seed=5)
    observations, *_ = view.step(dict.fromkeys(view.agents, 0))
    assert observations.keys() == {"the pair_0", "the pair_1"}


@pytest.mark.parametrize(("end", "expected"), [(1, 10), (4, 4), (TURNS, 0)])
def test_rewards_after_the_end_are_of_own_turns(end, expected):
    """Each step pays 1 to the agent in turn and to none else."""

    class Paid(InTurn):
        def advance(self, actions: Any) -> Any:
            rewards, over = super().advance(actions)
            return {"pair": rewards["pair"] + self.active["pair"].float()}, over

    played = play_episodes({"pair": Echo()}, Paid(NUM_ENVS, seed=5), after=[end])
    assert played.after[end]["pair"].tolist() == [expected / AGENTS] * NUM_ENVS


def test_an_onset_after_an_agents_last_turn_is_refused():
    env, policies = InTurn(NUM_ENVS, seed=5), {"pair": Echo()}
    Rollout(env, policies, perturbation=build("bias", {"onset": TURNS - 1}))
    with pytest.raises(InputError, match="onset: expected a step below"):
        Rollout(env, policies, perturbation=build("bias", {"onset": TURNS}))


@pytest.mark.parametrize("base", [Together, InTurn])
def test_no_drop_is_measured_after_an_end_that_no_agent_reaches(base):
    levels = [
        PerturbationLevels("jitter", [0.6], {"end": end}) for end in (TURNS, TURNS - 1)
    ]
    make = partial(base, NUM_ENVS, seed=5)
    _, never, reached = measure({"pair": Echo()}, make, levels).results
    assert math.isnan(never.drop_after)
    assert not math.isnan(reached.drop_after)
