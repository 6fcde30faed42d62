"""Particles with goals and messages, which tokens carry besides the motion."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import one_hot
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.physics import (
    DIRECTIONS,
    POSITION,
    Entities,
    ParticleEnv,
    ParticleOptions,
    distances,
)
from marl_pool.envs.particles.population import NEVER, between
from marl_pool.options.types import Episodes
from marl_pool.tokens import Tokens, TokenSpec

MOTION = 4
"""Features of a token that hold position and velocity."""
VELOCITY = (2, 3)
EVERYTHING = (0, 1, 2, 3)
MOVES = len(DIRECTIONS)
"""Choices of movement, no-op included."""


class SpeakingOptions(ParticleOptions, total=False):
    """Options that the tasks pass on to `SpeakingEnv`."""

    continuous_actions: bool
    max_steps: Episodes


class SpeakingEnv(ParticleEnv):
    """Base of the tasks of MPE in which landmarks are goals, or agents speak.

    Each token has its position and velocity, relative to the observer, and ``marks``
    more features, which `mark` fills in: the identity of a landmark, whether it is a
    goal, and, at the token of the agent that speaks, the message of the last step.
    What mpe2 does not show is zero.

    An agent that moves and speaks chooses one of 5 C numbers, move + 5 word, as in
    mpe2, or sets 5 + C numbers in [0, 1], movement first. A discrete message is
    one-hot. All messages are zero at the start of an episode.

    Agents start at rest, uniformly in [-1, 1] along each axis; so do the landmarks. A
    landmark that arrives is not a goal and has no identity, and a goal does not leave,
    whatever ``env.departures`` says.

    Args:
        marks: number of further features of a token, by group.
        hidden: by group and type, indices of the motion's features that are zero.
        speaker: the kind that speaks; None for no messages.
        num_words: C, the size of a message.
        num_goals: goals of an episode, each of them an equally probable landmark.
        half_side: half side of the square in which immovable entities start.
        options: other arguments of `ParticleEnv`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("state", "goal", "words")

    goal: Tensor
    """``(num_envs, num_goals)`` int64: number of the landmark."""
    words: Tensor
    """``(num_envs, speakers, num_words)``: messages of the last step."""

    def __init__(
        self,
        num_envs: int,
        entities: Sequence[Entities],
        *,
        learners: Sequence[str],
        continuous_actions: bool = False,
        max_steps: Episodes = 25,
        marks: Mapping[str, int],
        hidden: Mapping[str, Mapping[str, Sequence[int]]],
        speaker: str | None = None,
        num_words: int = 0,
        num_goals: int = 0,
        half_side: float = 1.0,
        **options: Any,
    ) -> None:
        moving = {kind.kind for kind in entities if kind.movable}
        super().__init__(
            num_envs,
            entities,
            learners=[name for name in learners if name in moving],
            continuous_actions=continuous_actions,
            extent=1.5,
            max_steps=max_steps,
            **options,
        )
        self.speaker, self.num_words, self.num_goals = speaker, num_words, num_goals
        self._continuous = continuous_actions
        # Choices of movement of an agent that speaks.
        self._num_moves = MOVES if speaker in moving else 0
        speakers = self._slices[speaker] if speaker else slice(0, 0)
        count = speakers.stop - speakers.start
        self.goal = torch.zeros(
            num_envs, num_goals, dtype=torch.int64, device=self.device
        )
        place: Any = {"dtype": self.dtype, "device": self.device}
        self.words = torch.zeros(num_envs, count, num_words, **place)
        self._half_side = half_side
        self.num_landmarks = sum(k.count for k in entities if k.kind == "landmark")
        self._identities = torch.eye(self.num_landmarks, **place)
        self._shown = {}
        if speaker and speaker not in moving:
            self._add_speaker(speaker, speakers)
        for name in learners:
            group = self.groups.pop(name)
            kinds = self._types[name].tolist()
            visible = torch.ones(len(kinds), MOTION, **place)
            for kind, features in hidden.get(name, {}).items():
                index = self.type_names.index(kind)
                for row, number in enumerate(kinds):
                    if number == index:
                        visible[row, list(features)] = 0
            self._shown[name] = visible
            width = MOTION + marks[name]
            tokens = replace(group.tokens, num_features=width)
            space = self._space() if speaker == name else group.action_space
            self.groups[name] = replace(group, tokens=tokens, action_space=space)
        self._bind(self.state)

    def _add_speaker(self, name: str, places: slice) -> None:
        """Add the group of speakers that cannot move, which see only themselves."""
        order = torch.arange(places.start, places.stop, device=self.device)
        self._order[name] = order[:, None]
        self._types[name] = torch.zeros(1, dtype=torch.int64, device=self.device)
        spec = TokenSpec(
            1,
            MOTION,
            self.type_names,
            signal_types=self.type_names[:1],
            positions=POSITION,
        )
        self.groups[name] = AgentGroup(len(order), spec, self._space())

    def mark(self, group: str, features: Tensor) -> None:
        """Fill in the marks of the features ``(num_envs, agents, N, 4 + marks)``.

        By default there is one, 1 for the landmark that is the goal. Landmarks follow
        self.
        """
        landmarks = slice(1, 1 + self.num_landmarks)
        features[:, :, landmarks, MOTION:] = self._identities[self.goal][..., None]

    def goal_distances(self, kind: str) -> Tensor:
        """Return the distances ``(num_envs, n)`` of a kind to the one goal."""
        return distances(self._positions[kind], self.goal_places())[..., 0]

    def goal_places(self) -> Tensor:
        """Return the positions of the goals, ``(num_envs, num_goals, 2)``."""
        index = self.goal[..., None].expand(*self.goal.shape, 2)
        return self._positions["landmark"].gather(1, index)

    @override
    def goals(self) -> Tensor:
        return self.goal_places() if self.num_goals else super().goals()

    @override
    def observe(self) -> dict[str, Tokens]:
        observations = super().observe()
        for name, tokens in observations.items():
            spec = self.groups[name].tokens
            shape = *tokens.types.shape, spec.num_features - MOTION
            motion = tokens.features.mul_(self._shown[name])
            features = torch.cat((motion, motion.new_zeros(shape)), -1)
            self.mark(name, features)
            observations[name] = tokens._replace(features=features)
        return observations

    @override
    def state_features(self) -> Tensor:
        """Add the goals and messages, which each agent sees only in part.

        After position and velocity come the marks of the goals, and the message of the
        last step at the token of its speaker.
        """
        words = self.state.new_zeros(*self.state.shape[:2], self.num_words)
        if self.speaker:
            words[:, self._slices[self.speaker]] = self.words
        return torch.cat((super().state_features(), self.goal_marks(), words), -1)

    def goal_marks(self) -> Tensor:
        """Return marks ``(num_envs, entities, F)``, by default 1 at the goal if any.

        Exchanging agents must leave the marks unchanged, or exchange them as well.
        """
        marks = self.state.new_zeros(*self.state.shape[:2], min(self.num_goals, 1))
        if self.num_goals:
            first = self._slices["landmark"].start
            marks.scatter_(1, first + self.goal[..., None], 1)
        return marks

    @override
    def _place_rows(self, rows: Tensor) -> None:
        super()._place_rows(rows)
        if self.lives is not None and self.num_goals:
            ends = self.lives[rows, self._slices["landmark"], 1]
            # The landmark that is the goal stays, whichever the rules would remove.
            ends = ends.scatter(1, self.goal[rows], NEVER)
            self.lives[rows, self._slices["landmark"], 1] = ends

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        count = len(self.entities)
        uniform = self.sample_uniform(keys, 2 * count + self.num_goals)
        square, choice = uniform.split((2 * count, self.num_goals), 1)
        sides = [1.0 if k.acceleration else self._half_side for k in self.entities]
        self.state[rows, :, :2] = self._constant(sides)[:, None] * (
            2 * square.view(len(rows), count, 2) - 1
        )
        self.state[rows, :, 2:] = 0
        if self.num_goals:
            self.goal[rows] = between(choice, 0, self.num_landmarks - 1)
        self.words[rows] = 0

    def hear(self, actions: Tensor) -> Tensor:
        """Store the messages in the speakers' actions, and return the movements."""
        moves = self._num_moves
        if self._continuous:
            self.words = actions[..., moves:].detach().to(self.dtype).clamp(0, 1)
            return actions[..., :moves]
        # A choice is move + MOVES * word.
        words = actions // MOVES if moves else actions
        self.words = one_hot(words.long(), self.num_words).to(self.dtype)
        return actions % MOVES

    def _space(self) -> spaces.Space[Any]:
        """Return the action space of an agent that speaks."""
        if self._continuous:
            return spaces.Box(0, 1, (self._num_moves + self.num_words,))
        return spaces.Discrete(max(self._num_moves, 1) * self.num_words)

    @override
    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super()._set_tensors(tensors)
        self.goal, self.words = tensors["goal"], tensors["words"]
