"""The identity: no interaction between tokens before pooling."""

from torch import Tensor
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.tokens import Mask
from marl_pool.utils.types import PositiveInt


class IdentityEncoder(Encoder):
    """Return the embedded tokens unchanged.

    A control without interaction between tokens, and the encoder below a sensory layer
    such as `AttentionNeuronPooling`.

    Args:
        dim: D, the width that tokens are projected to; None for no projection: the
            vectors are the tokens' features, images scaled to [0, 1], and the type
            embedding if the policy has one.
    """

    def __init__(self, *, dim: PositiveInt | None = None) -> None:
        super().__init__()
        self.dim = dim

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        return x
