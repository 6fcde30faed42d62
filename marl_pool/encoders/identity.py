"""The identity: no interaction between tokens before pooling."""

from torch import Tensor
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveInt


class IdentityEncoder(Encoder):
    """Return the embedded tokens unchanged.

    A control without interaction between tokens, and the encoder below a sensory layer
    such as `AttentionNeuronPooling`.

    Args:
        dim: D, the width that tokens are projected to; None for no projection: the
            vectors are the tokens' features, images scaled to [0, 1], and the type
            embedding if the policy has one.

    Raises:
        InputError: ``dim`` is below 1.
    """

    def __init__(self, *, dim: PositiveInt | None = None) -> None:
        super().__init__()
        if dim is not None and dim < 1:
            raise InputError(f"encoder.dim: expected at least 1 or null, got {dim}")
        self.dim = dim

    @override
    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return x
