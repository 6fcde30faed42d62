"""What policies attend to: entropy of the weights, and the share of each token type."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from marl_pool.evaluation.subject import Subject
from marl_pool.rollout import Rollout, Trajectory
from marl_pool.tokens import Tokens, TokenSpec

WORLDS = 16
STEPS = 64
SIGNAL_OF_ALL = "all signal"
"""Beside the types: all of those that matter for the task, self among them."""


class Looked(NamedTuple):
    """One run's attention, unperturbed, as means over steps, agents and heads.

    Attributes:
        entropy: of the weights over that of equal ones, in [0, 1].
        shares: of the weight, by type of token, and of all signal where it is known.
        present: the share that equal weights would give.
    """

    entropy: float
    shares: dict[str, float]
    present: dict[str, float]


def look(subject: Subject, group: str) -> Looked | None:
    """Play a little, and read what the policy of a group attends to.

    Args:
        subject: the policy and its worlds.
        group: of agents.

    Returns:
        None if its pooling head has no weights. Agents that were dead when they acted
        don't count.
    """
    world = subject.worlds(WORLDS)
    spec = world.groups[group].tokens
    played = Rollout(world, subject.policies).steps(min(STEPS, world.max_steps))[group]
    tokens, states = _observations(played)
    with torch.no_grad():
        weights = subject.policies[group].weights(tokens, states)
    if weights is None:
        return None
    living = played.active.flatten(0, 1)
    return _looked(weights[living], tokens.at(living), spec)


def _observations(played: Trajectory) -> tuple[Tokens, object]:
    """Steps and worlds as one batch dimension before the agents."""
    return (
        played.tokens.map(lambda tensor: tensor.flatten(0, 1)),
        tree_map(lambda tensor: tensor.flatten(0, 1), played.states),
    )


def _looked(weights: Tensor, tokens: Tokens, spec: TokenSpec) -> Looked:
    there = ~tokens.padding
    count = there.sum(-1)
    mean = weights.mean(-2)
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    several = count > 1
    evenness = entropy[several] / count[several].log()
    kinds = {
        name: (tokens.types == place) & there
        for place, name in enumerate(spec.type_names)
    }
    if spec.signal_types:
        among = [kinds[name] for name in spec.signal_types]
        kinds[SIGNAL_OF_ALL] = torch.stack(among).any(0)
    present = there / count.clamp(min=1)[..., None]
    return Looked(
        float(evenness.mean()) if several.any() else float("nan"),
        {name: _share(mean, mask) for name, mask in kinds.items()},
        {name: _share(present, mask) for name, mask in kinds.items()},
    )


def _share(weights: Tensor, mask: Tensor) -> float:
    return float((weights * mask).sum(-1).mean())


def mean_of(looked: Sequence[Looked], kind: str) -> tuple[float, float]:
    """The mean share of a type over runs, and what equal weights would give it."""
    shares = [one.shares.get(kind, 0.0) for one in looked]
    present = [one.present.get(kind, 0.0) for one in looked]
    return float(np.mean(shares)), float(np.mean(present))
