"""No encoder: the pooling head stands on the tokens themselves."""

from torch import Tensor

from marl_pool.encoders.base import Encoder
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveInt


class IdentityEncoder(Encoder):
    """Hand the embedded tokens on, as they are.

    A control without interaction between tokens, and what a sensory layer
    (`marl_pool.pooling.attention_neuron`) wants below it.

    Args:
        dim: D, the width to which tokens are projected; None for no projection: the
            vectors are the tokens' features, images scaled to [0, 1], and the
            type embedding if the policy has one.

    Raises:
        InputError: ``dim`` is below 1.
    """

    def __init__(self, *, dim: PositiveInt | None = None) -> None:
        super().__init__()
        if dim is not None and dim < 1:
            raise InputError(f"encoder.dim: expected at least 1 or null, got {dim}")
        self.dim = dim

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return ``x``."""
        return x
