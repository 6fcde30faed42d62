"""Selecting a perturbed token selects the entity that the agent perceives there."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from marl_pool import Rollout, make_batched_env, make_env, make_heuristic, make_policy
from marl_pool.api.perturb import perturb_env
from marl_pool.envs.foraging.env import LevelBasedForaging
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.turns import OwnTurns
from marl_pool.policies.base import Decision, Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.tokens import Tokens, take_features
from marl_pool.trajectory import Transition

FOOD = {"choices": "food", "num_agents": 3, "num_food": 3, "max_steps": 12}


def make_forest(num_envs: int = 16) -> LevelBasedForaging:
    env = make_batched_env("lbforaging", num_envs, dtype=torch.float64, **FOOD)
    assert isinstance(env, LevelBasedForaging)
    return env


def selecting(env: LevelBasedForaging) -> Policy:
    group = env.groups["agent"]
    encoder = {"name": "transformer", "num_layers": 1}
    options = {"encoder": encoder, "action": "select", "init_std": 0.5, "seed": 1}
    return make_policy(group.tokens, group.action_space, **options).double()


POLICIES = {
    "heuristic": lambda env: make_heuristic("lbforaging", env.groups["agent"]),
    "random": lambda env: RandomPolicy(env.groups["agent"].action_space),
    "select": selecting,
}
policies = pytest.mark.parametrize("name", POLICIES)


def transitions(
    policy_name: str, /, *, explore: bool = True, **config: Any
) -> Iterator[Transition]:
    env = make_forest()
    perturbation = None
    if config:
        perturbation = make_perturbation(
            specs={"agent": env.groups["agent"].tokens}, **config
        )
    played = {"agent": POLICIES[policy_name](env)}
    yield from Rollout(
        env, played, perturbation=perturbation, explore=explore
    ).transitions()


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("name", ["heuristic", "select"])
def test_a_shuffle_changes_no_selection(name: str, every: int | None) -> None:
    plain = transitions(name, explore=False)
    shuffled = transitions(name, explore=False, name="shuffle", every=every)
    chose_otherwise = False
    for before, after in zip(plain, shuffled, strict=True):
        assert torch.equal(before.executed["agent"], after.executed["agent"])
        assert torch.equal(after.actions["agent"], after.executed["agent"])
        actions = [step.decisions["agent"].action for step in (before, after)]
        chose_otherwise |= not torch.equal(*actions)
    # The slots are others, the entities are not.
    assert chose_otherwise


@policies
@pytest.mark.parametrize(
    "config",
    [
        {"name": "shuffle", "every": 1, "agents": [0, 2], "onset": 2},
        {"name": "duplicate", "severity": [0.2, 1.0]},
        {"name": "inject", "count": 4, "token_type": "food"},
        {"name": "occlude", "severity": 0.6},
        {"name": "rewire"},
        {"name": "confuse"},
        {"name": "delay"},
        {"name": "action_noise", "severity": 0.5},
    ],
    ids=lambda config: config["name"],
)
def test_only_food_that_is_perceived_and_there_is_executed(
    name: str, config: dict[str, Any]
) -> None:
    selected = 0
    for step in transitions(name, **config):
        tokens, action = step.tokens["agent"], step.decisions["agent"].action
        slot = (action - 1).clamp(min=0)
        padded = tokens.padding.gather(-1, slot[..., None])[..., 0]
        assert not (padded & (action > 0)).any()
        # The environment's own slots of food are the last three.
        executed = step.executed["agent"]
        assert ((executed == 0) | (executed > 3)).all()
        selected += int((executed > 0).sum())
    # All food needs the whole team in sight of this heuristic.
    assert selected or (name, config["name"]) == ("heuristic", "occlude")


@policies
def test_food_that_is_occluded_is_never_selected(name: str) -> None:
    occluded = {"name": "occlude", "among": ["food"], "severity": 1.0}
    for step in transitions(name, **occluded):
        assert (step.executed["agent"] == 0).all()


class Last(Policy):
    """Select the last token that the mask allows."""

    def act(self, tokens: Tokens, *arguments: Any, **options: Any) -> Decision:
        assert tokens.action_mask is not None
        order = torch.arange(tokens.action_mask.shape[-1])
        action = (order * tokens.action_mask).argmax(-1)
        zeros = torch.zeros(action.shape)
        return Decision(action, zeros, zeros, zeros[..., None], ())


def test_a_distractor_that_is_selected_is_the_fixed_option() -> None:
    env = make_forest()
    spec = env.groups["agent"].tokens
    config = {"name": "inject", "count": 5, "token_type": "food"}
    perturbation = make_perturbation(specs={"agent": spec}, **config)
    rollout = Rollout(env, {"agent": Last()}, perturbation=perturbation)
    for step in rollout.transitions():
        assert (step.decisions["agent"].action == 11).all()
        assert (step.actions["agent"] == 0).all()
        assert (step.executed["agent"] == 0).all()


@pytest.mark.parametrize("name", ["shuffle", "duplicate", "occlude"])
def test_a_wrapped_view_executes_what_a_rollout_does(name: str) -> None:
    config = {"name": name, "severity": 0.7, "every": 1}
    options = {**FOOD, "seed": 7}
    view = perturb_env(make_env("lbforaging", **options), config, seed=7)
    env = make_batched_env("lbforaging", 1, **options)
    heuristic = make_heuristic("lbforaging", env.groups["agent"])
    perturbation = make_perturbation(
        specs={"agent": env.groups["agent"].tokens}, **config
    )
    rollout = Rollout(env, {"agent": heuristic}, perturbation=perturbation)
    observations, _ = view.reset()
    for step in rollout.transitions():
        expected = step.tokens["agent"].at(0)
        parts = {
            part: np.stack([tokens[part] for tokens in observations.values()])
            for part in ("features", "types", "padding", "action_mask")
        }
        stacked = {k: torch.from_numpy(np.array(v)) for k, v in parts.items()}
        assert torch.equal(stacked["features"], expected.features)
        assert expected.action_mask is not None
        width = stacked["action_mask"].shape[-1]
        mask = expected.action_mask[..., :width]
        assert torch.equal(stacked["action_mask"].bool(), mask)
        choices = step.decisions["agent"].action[0]
        actions = dict(zip(observations, choices.tolist(), strict=True))
        observations, rewards, *_ = view.step(actions)
        assert list(rewards.values()) == step.step.rewards["agent"][0].tolist()
        assert torch.equal(view.unwrapped.env.places, step.env.places)


def test_own_turns_pass_on_token_origins() -> None:
    env = make_forest(4)
    env.reset()
    tokens = env.observe()["agent"]
    perturbation = make_perturbation(
        "shuffle", specs={"agent": env.groups["agent"].tokens}
    )
    acting, streams = torch.ones(4, 3).bool(), (torch.arange(4), torch.zeros(4).long())
    turns = OwnTurns(perturbation, lambda: acting, lambda: streams)
    perceived, state = turns.perceive(tokens, turns.start(tokens))
    origin = turns.origin(perceived, state, tokens.num_tokens)
    assert origin.shape == perceived.types.shape
    assert torch.equal(take_features(tokens.features, origin), perceived.features)
