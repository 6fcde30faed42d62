"""Bias: sensors read too much or too little, by a constant."""

from typing import Unpack

from torch import Tensor

from marl_pool.perturbations.readings import (
    DisturbedReadings,
    ReadingOptions,
    check_size,
)
from marl_pool.types import NonNegativeFloat, Severity


class Bias(DisturbedReadings):
    """Add a constant offset, Gaussian, of its own to each token and feature.

    It holds for the episode: a badly calibrated sensor. Images (uint8) count from 0 to
    1 here; what comes out is rounded and kept in [0, 255].

    Args:
        severity: standard deviation of the offsets in units of ``scale``.
        scale: the standard deviation at severity 1, in the features' own units.
        features: numbers of the features that are disturbed, from 0; None: all.
        protect_self: leave the observer's own token alone.
        every: steps after which offsets are drawn anew; None draws at reset only.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        num_features: of a token; None: not known before there are tokens.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        severity: Severity = 0.1,
        scale: NonNegativeFloat = 1.0,
        **common: Unpack[ReadingOptions],
    ) -> None:
        super().__init__(
            severity=severity,
            size=check_size("scale", scale),
            **common,
        )

    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        """Add the offsets; see `DisturbedReadings.disturb`."""
        return readings + errors
