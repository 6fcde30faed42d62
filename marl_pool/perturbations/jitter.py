"""Jitter: sensor noise."""

from marl_pool.perturbations.bias import Bias
from marl_pool.utils.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Severity,
)


class Jitter(Bias):
    """Add Gaussian noise to features: a `Bias` that is resampled at every step.

    Args:
        severity: standard deviation in units of ``scale``.
        scale: standard deviation at severity 1, in the units of the features.
        features: indices of the disturbed features, from 0; None: all.
        protect_self: leave the observer's own token unchanged.
        every: steps between resamplings of the noise; None: at reset only.
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
        features: list[NonNegativeInt] | None = None,
        protect_self: bool = True,
        every: PositiveInt | None = 1,
        ramp: PositiveInt | None = None,
        has_self: bool = True,
        num_features: PositiveInt | None = None,
    ) -> None:
        super().__init__(
            severity=severity,
            scale=scale,
            features=features,
            protect_self=protect_self,
            every=every,
            ramp=ramp,
            has_self=has_self,
            num_features=num_features,
        )
