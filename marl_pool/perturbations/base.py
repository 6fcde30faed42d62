"""The contract of a perturbation: tokens in, tokens out, with a memory of its own."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from marl_pool.errors import InputError
from marl_pool.perturbations.severity import check_severity, draw_severities
from marl_pool.tokens import Tokens
from marl_pool.types import PositiveInt, Severity

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
        severity: how strong it is, in [0, 1]; or two such numbers, between which each
            world's episode draws its own, uniformly.
        ramp: episodes of a world in which its severity grows linearly from 0, a
            curriculum for training; None: it is there from the first one on.

    Raises:
        InputError: a number out of range.
    """

    reorders: bool = False
    """Whether tokens only change places, which some policies must not notice."""

    ramp: int | None = None
    """`start` is told the numbers of episodes only where this is given."""

    def __init__(
        self, *, severity: Severity = 1.0, ramp: PositiveInt | None = None
    ) -> None:
        self.low, self.high = check_severity(severity)
        if ramp is not None and ramp < 1:
            raise InputError(
                f"perturbation.ramp: expected null or at least 1, got {ramp}"
            )
        self.severity, self.ramp = severity, ramp

    @property
    def varies(self) -> bool:
        """Whether worlds differ in severity."""
        return self.low < self.high or self.ramp is not None

    @abstractmethod
    def start(
        self,
        tokens: Tokens,
        keys: Tensor,
        state: PerturbationState | None = None,
        where: Tensor | None = None,
    ) -> PerturbationState:
        """Return the memory at an episode's start.

        With a `ramp` it is also given ``episodes``, ``(num_envs,)`` int64: how many
        each world has played before.

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


class DrawnPerturbation(Perturbation):
    """A perturbation that is drawn at reset, and perhaps every few steps anew.

    A family writes `draw`, random numbers that hold until the next draw; `settle`,
    what follows from them and the severity; and `apply`.

    Args:
        severity: how strong it is; see `Perturbation`.
        every: steps from one draw to the next; None draws at reset only.
        ramp: episodes in which the severity grows; see `Perturbation`.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        severity: Severity = 1.0,
        every: PositiveInt | None = None,
        ramp: PositiveInt | None = None,
    ) -> None:
        super().__init__(severity=severity, ramp=ramp)
        if every is not None and every < 1:
            raise InputError(
                f"perturbation.every: expected null or at least 1, got {every}"
            )
        self.every = every

    @abstractmethod
    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw what holds until the next draw, whatever the severity.

        Args:
            tokens: of batch ``(num_envs, agents)``.
            keys: ``(num_envs,)`` of the random streams.
            turn: ``(num_envs,)`` int64, how many draws came before in the episode.
        """

    def settle(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """What follows from a draw and ``state["severity"]``; by default nothing.

        Args:
            tokens: those at the draw.
            state: the draw, with ``severity`` ``(num_envs,)`` float64.
        """
        return {}

    def follow(self, state: PerturbationState) -> PerturbationState:
        """Update the memory at every step, after a draw if one is due; by default not.

        For what depends on the draws of several steps.
        """
        return state

    @abstractmethod
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Perturb ``tokens`` as ``state``, the last draw, says."""

    def start(
        self,
        tokens: Tokens,
        keys: Tensor,
        state: PerturbationState | None = None,
        where: Tensor | None = None,
        episodes: Tensor | None = None,
    ) -> PerturbationState:
        """Draw for the episodes that begin; see `Perturbation.start`."""
        severity = draw_severities((self.low, self.high), keys, self.ramp, episodes)
        first = {"keys": keys, "steps": torch.zeros_like(keys), "severity": severity}
        if where is None or state is None:
            return self._renew(tokens, first)
        return self._renew_rows(where, tokens, {**state, **choose(where, first, state)})

    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        """Perturb one step's tokens; see `Perturbation.__call__`."""
        if self.high == 0:
            return tokens, state
        steps = state["steps"]
        if self.every is not None:
            due = (steps > 0) & (steps % self.every == 0)
            state = self._renew_rows(due, tokens, state)
        state = self.follow(state)
        seen = self.apply(tokens, state)
        if self.varies and seen.num_tokens == tokens.num_tokens:
            # What adds 0 changes the sign of -0; who drew 0 is to see no change.
            spared = state["severity"] == 0
            seen = Tokens(**choose(spared, tokens._asdict(), seen._asdict()))
        return seen, {**state, "steps": steps + 1}

    def _renew(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Draw anew for all worlds of ``state``."""
        keys, turn = state["keys"], state["steps"] // (self.every or 1)
        drawn = {**state, **self.draw(tokens, keys, turn)}
        return {**drawn, **self.settle(tokens, drawn)}

    def _renew_rows(
        self, where: Tensor, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        """Draw anew for the worlds ``where``, and for them alone: a draw is dear."""
        rows = where.nonzero()[:, 0]
        if len(rows) in (0, len(where)):
            return self._renew(tokens, state) if len(rows) else state
        own = {name: tensor[rows] for name, tensor in state.items()}
        fresh = self._renew(tokens.at(rows), own)
        # What is not drawn stays the same tensor.
        return {
            name: tensor
            if fresh[name] is own[name]
            else tensor.index_copy(0, rows, fresh[name])
            for name, tensor in state.items()
        }


def choose(
    where: Tensor, fresh: PerturbationState, old: PerturbationState
) -> PerturbationState:
    """Take the rows ``where`` of ``fresh`` and the others of ``old``."""
    return {
        name: torch.where(where.view(-1, *[1] * (new.dim() - 1)), new, old[name])
        for name, new in fresh.items()
    }
