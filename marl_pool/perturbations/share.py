"""What befalls a share of the tokens, the observer's own spared or not."""

from typing import TypedDict

from torch import Tensor

from marl_pool.perturbations.base import DrawnPerturbation, PerturbationState
from marl_pool.perturbations.draws import uniform_like
from marl_pool.perturbations.selection import lowest
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import PositiveInt, Severity


class RampOptions(TypedDict, total=False):
    """The options of `TokenShare` that a subclass with ``every`` passes on to it."""

    ramp: PositiveInt | None
    has_self: bool


class ShareOptions(TypedDict, total=False):
    """The options of `TokenShare` that other subclasses pass on to it."""

    every: PositiveInt | None
    ramp: PositiveInt | None
    has_self: bool


class TokenShare(DrawnPerturbation):
    """A perturbation of ``round(severity * n)`` of the n tokens of each row.

    n counts the tokens present that are not protected. Halves round to even. The
    tokens are drawn once for all severities, so that a higher one takes the same
    tokens and some more.

    Args:
        severity: the share.
        protect_self: leave the observer's own token alone.
        every: steps from one draw to the next; None draws at reset only.
        ramp: episodes in which the severity grows.
        has_self: whether tokens of type 0 are the observer's own.
    """

    def __init__(
        self,
        *,
        severity: Severity,
        protect_self: bool,
        every: PositiveInt | None = None,
        ramp: PositiveInt | None = None,
        has_self: bool = True,
    ) -> None:
        super().__init__(severity=severity, every=every, ramp=ramp)
        self.has_self, self.protects = has_self, protect_self and has_self

    def eligible(self, tokens: Tokens) -> Tensor:
        """The tokens that may be taken, ``(num_envs, agents, N)`` bool."""
        present = ~tokens.padding
        return present & (tokens.types != SELF_TYPE) if self.protects else present

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw each slot's place in the queue; see `DrawnPerturbation.draw`."""
        return {"scores": uniform_like(keys, turn, tokens.types.shape[1:])}

    def settle(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Choose the tokens; see `DrawnPerturbation.settle`."""
        eligible = self.eligible(tokens)
        return {"eligible": eligible, "chosen": self._choose(eligible, state)}

    def chosen(self, tokens: Tokens, state: PerturbationState) -> Tensor:
        """The tokens taken now, ``(num_envs, agents, N)`` bool.

        They are those of the last draw; where a token came or went since, the count is
        taken anew.
        """
        eligible = self.eligible(tokens)
        if eligible.equal(state["eligible"]):
            return state["chosen"]
        return self._choose(eligible, state)

    def _choose(self, eligible: Tensor, state: PerturbationState) -> Tensor:
        return lowest(state["scores"], eligible, state["severity"].view(-1, 1, 1))
