"""Bias: constant sensor offsets."""

from typing import Unpack

from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.readings import (
    DisturbedReadings,
    ReadingOptions,
    check_size,
)
from marl_pool.utils.types import NonNegativeFloat, Severity


class Bias(DisturbedReadings):
    """Add a Gaussian offset to each feature of each token, as a miscalibrated sensor.

    ``x + severity * scale * ε`` with ``ε ~ N(0, 1)``, independent for each token and
    feature and constant until it is resampled.

    Args:
        severity: standard deviation of the offsets in units of ``scale``.
        scale: standard deviation at severity 1, in the units of the features; see
            `DisturbedReadings` for images. In simple-centroid these are the lengths of
            the environment divided by 5.
        features: indices of the disturbed features, from 0; None: all.
        protect_self: leave the observer's own token unchanged. Its relative features
            are 0 in any state, so an offset there would be no measurement error.
        every: steps between resamplings of the offsets; None: at reset only.
        ramp: episodes of an environment in which the severity grows from 0; None: none.
        has_self: whether tokens of type 0 are the observer's own.
        num_features: of a token; None: not known before the first tokens.

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

    @override
    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        return readings + errors
