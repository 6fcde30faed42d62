"""Noise: features are measured with an error."""

import torch
from torch import Tensor

from marl_pool.errors import InputError
from marl_pool.perturbations.base import (
    DrawnPerturbation,
    PerturbationState,
    uniform_like,
)
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.types import NonNegativeFloat, UnitInterval


class Noise(DrawnPerturbation):
    """Add Gaussian noise to every feature, fresh at each step.

    Images (uint8) count from 0 to 1 here, as they do for a policy's embedding: the
    noise is 255 times as large, and what comes out is rounded and kept in [0, 255].

    Args:
        severity: standard deviation in units of ``scale``.
        scale: the standard deviation at severity 1, in the features' own units. In
            simple-centroid they are the world's lengths divided by 5.
        protect_self: leave the observer's own token alone. Its relative features are
            0 in any state, so noise there would not be an error of measurement.
        has_self: whether tokens of type 0 are the observer's own.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        severity: UnitInterval = 0.1,
        scale: NonNegativeFloat = 1.0,
        protect_self: bool = True,
        has_self: bool = True,
    ) -> None:
        super().__init__(severity=severity, every=1)
        if not scale >= 0:
            raise InputError(
                f"perturbation.scale: expected a number of at least 0, got {scale}"
            )
        self.std, self.protects = severity * scale, protect_self and has_self

    def draw(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Draw one step's noise; see `DrawnPerturbation.draw`."""
        uniform = uniform_like(keys, turn, tokens.features.shape[1:])
        return {"noise": (torch.special.ndtri(uniform) * self.std).float()}

    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Add the noise; see `DrawnPerturbation.apply`."""
        features, types, padding = tokens
        if features.dtype.is_floating_point:
            noisy = features + state["noise"]
        else:
            noisy = torch.add(features, state["noise"], alpha=255)
            noisy = noisy.round_().clamp_(0, 255)
        noisy = noisy.to(features.dtype)
        if self.protects:
            noisy = torch.where((types == SELF_TYPE)[..., None], features, noisy)
        return Tokens(noisy, types, padding)
