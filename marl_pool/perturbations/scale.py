"""Scale: constant sensor gains."""

from typing import Unpack

from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.readings import (
    DisturbedReadings,
    ReadingOptions,
    check_size,
)
from marl_pool.utils.types import NonNegativeFloat, Severity


class Scale(DisturbedReadings):
    """Multiply each feature of each token by a log-normal factor around 1.

    ``x exp(severity * spread * ε)`` with ``ε ~ N(0, 1)``, independent for each token
    and feature and constant until it is resampled: a miscalibrated sensor. A feature
    of 0 stays 0. Images (uint8) are rounded and clipped to [0, 255].

    Args:
        severity: standard deviation of log factors in units of ``spread``.
        spread: the standard deviation at severity 1.
        features: indices of the disturbed features, from 0; None: all.
        protect_self: leave the observer's own token unchanged.
        every: steps between resamplings of the factors; None: at reset only.
        ramp: episodes of an environment in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        num_features: of a token; None: not known before the first tokens.

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

    @override
    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        return readings * errors.exp()
