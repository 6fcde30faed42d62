"""Jitter: readings are imprecise."""

from torch import Tensor

from marl_pool.perturbations.readings import DisturbedReadings, check_size
from marl_pool.types import NonNegativeFloat, NonNegativeInt, PositiveInt, Severity


class Jitter(DisturbedReadings):
    """Add Gaussian noise to features, fresh at each step.

    Images (uint8) count from 0 to 1 here, as they do for a policy's embedding: the
    noise is 255 times as large, and what comes out is rounded and kept in [0, 255].

    Args:
        severity: standard deviation in units of ``scale``.
        scale: the standard deviation at severity 1, in the features' own units. In
            simple-centroid they are the world's lengths divided by 5.
        features: numbers of the features that are disturbed, from 0; None: all.
        protect_self: leave the observer's own token alone. Its relative features are
            0 in any state, so noise there would not be an error of measurement.
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
        features: list[NonNegativeInt] | None = None,
        protect_self: bool = True,
        ramp: PositiveInt | None = None,
        has_self: bool = True,
        num_features: PositiveInt | None = None,
    ) -> None:
        super().__init__(
            severity=severity,
            size=check_size("scale", scale),
            features=features,
            protect_self=protect_self,
            every=1,
            ramp=ramp,
            has_self=has_self,
            num_features=num_features,
        )

    def disturb(self, readings: Tensor, errors: Tensor) -> Tensor:
        """Add the errors; see `DisturbedReadings.disturb`."""
        return readings + errors
