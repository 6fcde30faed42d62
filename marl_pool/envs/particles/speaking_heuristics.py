"""Scripted agents of the particle environments with goals and messages."""

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import one_hot
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.heuristics import ForceHeuristic
from marl_pool.envs.particles.physics import DIRECTIONS, dead_beat
from marl_pool.envs.particles.speaking import MOTION
from marl_pool.envs.scripted import Heuristic
from marl_pool.tokens import Tokens


class GoalHeuristic(ForceHeuristic):
    """Steer to the landmark that is marked as the goal, or to the mean of all of them.

    The force is the dead-beat one of `ChaseHeuristic`. An adversary, which sees no
    marks, goes to the mean: the place with the least expected squared distance.
    """

    acceleration = 5.0

    def __init__(self, group: AgentGroup) -> None:
        super().__init__(group)
        self.landmark = group.tokens.type_names.index("landmark")

    @override
    def force(self, tokens: Tokens) -> Tensor:
        is_landmark = (tokens.types == self.landmark) & ~tokens.padding
        weights = is_landmark.to(tokens.features.dtype)
        if tokens.features.shape[-1] > MOTION:
            weights = weights * (tokens.features[..., MOTION] > 0)
        return steer(tokens, weights)


class SpeakerHeuristic(Heuristic):
    """Say the number of the goal."""

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()
        self.continuous = isinstance(group.action_space, spaces.Box)

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        message = tokens.features[..., 0, MOTION:]
        return (message if self.continuous else message.argmax(-1)), message


class ListenerHeuristic(ForceHeuristic):
    """Steer to the landmark that the last message names; before it, to their mean."""

    acceleration = 5.0

    def __init__(self, group: AgentGroup) -> None:
        super().__init__(group)
        names = group.tokens.type_names
        self.landmark = names.index("landmark")
        # The type whose token has the message.
        self.speaker = names.index("speaker" if "speaker" in names else "agent")

    def count(self, tokens: Tokens) -> int:
        """Return the width of a landmark's identity, which the message follows.

        It is the number of landmarks with one; those that arrive have none.
        """
        has_marks = (tokens.features[..., MOTION:] != 0).any(-1)
        return int(((tokens.types == self.landmark) & has_marks).sum(-1).max())

    @override
    def force(self, tokens: Tokens) -> Tensor:
        is_landmark = (tokens.types == self.landmark) & ~tokens.padding
        is_speaker = (tokens.types == self.speaker) & ~tokens.padding
        marks = tokens.features[..., MOTION:]
        count = self.count(tokens)
        heard = torch.where(is_speaker[..., None], marks[..., count:], 0.0).sum(-2)
        size = max(heard.shape[-1], count)
        word = one_hot(heard.argmax(-1), size).to(marks.dtype)[..., :count]
        silent = ~(heard > 0).any(-1, keepdim=True)
        match = (marks[..., :count] * word[..., None, :]).sum(-1)
        weights = torch.where(silent, 1.0, match)
        return steer(tokens, torch.where(is_landmark, weights, 0.0))


class ReferenceHeuristic(ListenerHeuristic):
    """Say the number of the other's goal, and steer to the landmark that it names."""

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        force = self.force(tokens)
        move, count = self.steering.toward(force), self.count(tokens)
        marks = tokens.features[..., 0, MOTION:]
        goal = marks[..., :count]
        if self.steering.continuous:
            message = torch.zeros_like(marks[..., count:])
            size = min(count, message.shape[-1])
            message[..., :size] = goal[..., :size]
            return torch.cat((move, message), -1), force
        # With fewer words than landmarks the last word stands for all the others.
        word = goal.argmax(-1).clamp(max=marks.shape[-1] - count - 1)
        return move + len(DIRECTIONS) * word, force


def steer(tokens: Tokens, weights: Tensor) -> Tensor:
    """Compute the dead-beat force ``(*B, 2)`` to the weighted mean of tokens.

    Args:
        tokens: tokens of batch ``(*B,)``.
        weights: ``(*B, N)`` >= 0; where all are 0, the force is 0.
    """
    total = weights.sum(-1, keepdim=True).clamp(min=1)
    motion = torch.where(weights[..., None] > 0, tokens.features[..., :MOTION], 0.0)
    mean = (motion * weights[..., None]).sum(-2) / total
    return dead_beat(mean)
