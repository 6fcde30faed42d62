"""The contract of a perturbation: tokens in, tokens out, with a memory of its own."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from marl_pool.errors import InputError
from marl_pool.randomness import uniform
from marl_pool.tokens import Tokens
from marl_pool.types import PositiveInt, UnitInterval

PerturbationState = dict[str, Tensor]
"""Tensors with the leading dimension ``num_envs``.

A perturbation that moves or adds tokens keeps ``origin`` among them, int64 of
``(num_envs, agents, N)``: for each token that the policy sees, the place in the
world's observation that its features come from, -1 for none.
"""


class Perturbation(ABC):
    """Change what agents observe, never the world.

    At severity 0 it is the identity, bit for bit.

    Args:
        severity: how strong it is, in [0, 1].

    Raises:
        InputError: a severity out of range.
    """

    def __init__(self, *, severity: UnitInterval = 1.0) -> None:
        if not 0 <= severity <= 1:
            raise InputError(
                f"perturbation.severity: expected a number in [0, 1], got {severity}"
            )
        self.severity = severity

    @abstractmethod
    def start(
        self,
        tokens: Tokens,
        keys: Tensor,
        state: PerturbationState | None = None,
        where: Tensor | None = None,
    ) -> PerturbationState:
        """Return the memory at an episode's start.

        Args:
            tokens: the first observation, batch dimensions ``(num_envs, agents)``.
            keys: ``(num_envs,)`` keys of the worlds' own random streams.
            state: the memory of the worlds that go on; None at the first start.
            where: ``(num_envs,)`` bool, the worlds that begin anew; None for all.
        """

    @abstractmethod
    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        """Perturb one step's tokens; return them and the memory for the next."""

    def moved(
        self, before: PerturbationState, after: PerturbationState
    ) -> Tensor | None:
        """Say where a policy's memories of single tokens have to go.

        Args:
            before: the memory before a call.
            after: the memory that it returned.

        Returns:
            ``(num_envs, agents, N)`` int64: for each token that the policy sees, the
            place at which it saw the same one a step ago; None to leave memories
            where they are.
        """
        return None


class DrawnPerturbation(Perturbation):
    """A perturbation that is drawn at reset, and perhaps every few steps anew.

    A family writes `draw`, which says what holds until the next draw, and `apply`.

    Args:
        severity: how strong it is, in [0, 1].
        every: steps from one draw to the next; None draws at reset only.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self, *, severity: UnitInterval = 1.0, every: PositiveInt | None = None
    ) -> None:
        super().__init__(severity=severity)
        if every is not None and every < 1:
            raise InputError(
                f"perturbation.every: expected null or at least 1, got {every}"
            )
        self.every = every

    @abstractmethod
    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw what holds until the next draw.

        Args:
            tokens: of batch ``(num_envs, agents)``.
            keys: ``(num_envs,)`` of the random streams.
            turn: ``(num_envs,)`` int64, how many draws came before in the episode.
        """

    @abstractmethod
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Perturb ``tokens`` as ``state``, the last draw, says."""

    def start(
        self,
        tokens: Tokens,
        keys: Tensor,
        state: PerturbationState | None = None,
        where: Tensor | None = None,
    ) -> PerturbationState:
        """Draw for the episodes that begin; see `Perturbation.start`."""
        steps = torch.zeros_like(keys)
        fresh = {"keys": keys, "steps": steps, **self.draw(tokens, keys, steps)}
        if where is None or state is None:
            return fresh
        return choose(where, fresh, state)

    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        """Perturb one step's tokens; see `Perturbation.__call__`."""
        if self.severity == 0:
            return tokens, state
        keys, steps = state["keys"], state["steps"]
        if self.every is not None:
            due = (steps > 0) & (steps % self.every == 0)
            if due.any():
                fresh = self.draw(tokens, keys, steps // self.every)
                state = {**state, **choose(due, fresh, state)}
        return self.apply(tokens, state), {**state, "steps": steps + 1}


def choose(
    where: Tensor, fresh: PerturbationState, old: PerturbationState
) -> PerturbationState:
    """Take the rows ``where`` of ``fresh`` and the others of ``old``."""
    return {
        name: torch.where(where.view(-1, *[1] * (new.dim() - 1)), new, old[name])
        for name, new in fresh.items()
    }


def uniform_like(keys: Tensor, turn: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw ``(num_envs, *shape)`` float64 numbers in (0, 1) for one turn.

    Args:
        keys: ``(num_envs,)`` of the random streams.
        turn: ``(num_envs,)`` int64; each turn has numbers of its own.
        shape: of one world's numbers.
    """
    size = torch.Size(shape).numel()
    return uniform(keys, size, turn[:, None] * size).view(len(keys), *shape)
