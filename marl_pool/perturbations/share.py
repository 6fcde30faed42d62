"""Base class of perturbations of a share of the tokens."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import PerturbationState, ProtectingPerturbation
from marl_pool.perturbations.sampling import uniform_like
from marl_pool.perturbations.selection import lowest
from marl_pool.tokens import SELF_TYPE, Tokens


@dataclass(kw_only=True, eq=False)
class TokenShare(ProtectingPerturbation):
    """A perturbation of ``round(severity * n)`` of the n tokens of each row.

    n counts the tokens present that are not protected; halves round to even. The same
    random numbers serve all severities, so that a higher one selects the same tokens
    and some more.

    Args:
        severity: share of the selected tokens.
    """

    def eligible(self, tokens: Tokens) -> Tensor:
        """Tokens that may be selected, ``(num_envs, agents, N)`` bool."""
        present = ~tokens.padding
        return present & (tokens.types != SELF_TYPE) if self.protects else present

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        return {"scores": uniform_like(keys, turn, tokens.types.shape[1:])}

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        eligible = self.eligible(tokens)
        return {"eligible": eligible, "chosen": self._choose(eligible, state)}

    def chosen(self, tokens: Tokens, state: PerturbationState) -> Tensor:
        """Currently selected tokens, ``(num_envs, agents, N)`` bool.

        The selection of the last resampling; where a token has appeared or vanished
        since, the same random numbers select among the tokens present now.
        """
        eligible = self.eligible(tokens)
        if eligible.equal(state["eligible"]):
            return state["chosen"]
        return self._choose(eligible, state)

    def _choose(self, eligible: Tensor, state: PerturbationState) -> Tensor:
        return lowest(state["scores"], eligible, state["severity"].view(-1, 1, 1))
