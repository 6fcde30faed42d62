"""Scripted agents of the particle environments with goals and messages."""

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import one_hot
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.heuristics import ForceHeuristic, observer_features
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

    @override
    def force(self, tokens: Tokens) -> Tensor:
        is_landmark = (tokens.types == self.types["landmark"]) & ~tokens.padding
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
        message = observer_features(tokens)[..., MOTION:]
        return (message if self.continuous else message.argmax(-1)), message


class ListenerHeuristic(ForceHeuristic):
    """Steer to the landmark that the last message names; before it, to their mean."""

    acceleration = 5.0
    speaker = "speaker"
    """Type of the token that has the message."""

    def __init__(self, group: AgentGroup) -> None:
        super().__init__(group)
        self.identity_width = group.tokens.num_features - MOTION - self.num_words(group)
        """Width of a landmark's identity, a one-hot code; a message follows it."""

    def num_words(self, group: AgentGroup) -> int:
        """Return the width of a message: the speaker has a word for each landmark."""
        return (group.tokens.num_features - MOTION) // 2

    @override
    def force(self, tokens: Tokens) -> Tensor:
        is_landmark = (tokens.types == self.types["landmark"]) & ~tokens.padding
        weights = torch.where(is_landmark, self._matches(tokens), 0.0)
        return steer(tokens, weights)

    def _matches(self, tokens: Tokens) -> Tensor:
        """Return 1 for tokens with the identity that the message names, 0 for others.

        Words beyond the landmarks match none. Before the first message all match.
        """
        identities, messages = self._split(tokens.features[..., MOTION:])
        is_speaker = (tokens.types == self.types[self.speaker]) & ~tokens.padding
        message = torch.where(is_speaker[..., None], messages, 0.0).sum(-2)
        num_choices = max(message.shape[-1], self.identity_width)
        word = one_hot(message.argmax(-1), num_choices).to(message.dtype)
        matches = (identities * word[..., None, : self.identity_width]).sum(-1)
        is_silent = ~(message > 0).any(-1, keepdim=True)
        return torch.where(is_silent, 1.0, matches)

    def _split(self, marks: Tensor) -> tuple[Tensor, Tensor]:
        """Split marks ``(…, M)`` into an identity and a message."""
        return marks[..., : self.identity_width], marks[..., self.identity_width :]


class ReferenceHeuristic(ListenerHeuristic):
    """Say the number of the other's goal, and steer to the landmark that it names.

    With fewer words than landmarks, a discrete agent says the last word for all the
    others, and a continuous one nothing.
    """

    speaker = "agent"

    @override
    def num_words(self, group: AgentGroup) -> int:
        space = group.action_space
        if isinstance(space, spaces.Box):
            return space.shape[0] - len(DIRECTIONS)
        assert isinstance(space, spaces.Discrete)
        return int(space.n) // len(DIRECTIONS)

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        force = self.force(tokens)
        move = self.steering.toward(force)
        goal, silence = self._split(observer_features(tokens)[..., MOTION:])
        if not self.steering.continuous:
            word = goal.argmax(-1).clamp(max=silence.shape[-1] - 1)
            return move + len(DIRECTIONS) * word, force
        message = torch.zeros_like(silence)
        width = min(goal.shape[-1], message.shape[-1])
        message[..., :width] = goal[..., :width]
        return torch.cat((move, message), -1), force


def steer(tokens: Tokens, weights: Tensor) -> Tensor:
    """Compute the dead-beat force ``(*B, 2)`` to the weighted mean of tokens.

    Args:
        tokens: tokens of batch ``(*B,)``.
        weights: ``(*B, N)``, each 0 or at least 1; where all are 0, the force is 0.
    """
    total = weights.sum(-1, keepdim=True).clamp(min=1)
    motion = torch.where(weights[..., None] > 0, tokens.features[..., :MOTION], 0.0)
    mean = (motion * weights[..., None]).sum(-2) / total
    return dead_beat(mean)
