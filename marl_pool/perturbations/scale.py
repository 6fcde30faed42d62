"""Scale: sensors read too much or too little, by a constant factor."""

from typing import Unpack

from torch import Tensor

from marl_pool.perturbations.readings import (
    DisturbedReadings,
    ReadingOptions,
    check_size,
)
from marl_pool.types import NonNegativeFloat, Severity


class Scale(DisturbedReadings):
    """Multiply each token's features by factors of their own, log-normal around 1.

    A factor is exp(severity * spread * N(0, 1)) and holds for the episode: a badly
    calibrated sensor. What reads 0 is not disturbed. Images (uint8) are rounded and
    kept in [0, 255].

    Args:
        severity: standard deviation of the factors' logarithm in units of ``spread``.
        spread: the standard deviation at severity 1.
        features: numbers of the features that are disturbed, from 0; None: all.
        protect_self: leave the observer's own token alone.
        every: steps after which factors are drawn anew; None draws at reset only.
        ramp: episodes of a world in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        num_features: of a token; None: not known before there are tokens.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        severity: Severity = 0.5,
        spread: NonNegativeFloat = 1.0,
        **common: Unpack[ReadingOptions],
    ) -> None:
        super().__init__(
            severity=severity,
            size=check_size("spread", spread),
            **common,
        )

    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        """Multiply by the factors; see `DisturbedReadings.disturb`."""
        return readings * errors.exp()
