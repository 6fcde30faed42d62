"""Base class of encoders, which map a set of vectors to a set, and the identity."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from marl_pool.options.construction import check_constructor
from marl_pool.options.types import Size
from marl_pool.tokens import Mask


class Encoder(nn.Module, ABC):
    """Base class: map N vectors to N vectors, equivariant to permutations by default.

    A subclass sets ``self.dim`` and implements `forward`. Its keyword arguments are the
    options ``encoder.KEY``; it also receives ``dropout`` and ``attention_dropout`` if
    its constructor has these parameters.

    Attributes:
        dim: D, the width of the vectors in and out; None for the width of the tokens.
        permutation_equivariant: True if permuted vectors give the same results in the
            permuted order. Options may decide it, so ask the instance, not the class.
        keeps_initial_weights: True if a policy must not re-initialize the weights from
            N(0, init_std²). Several layers without a residual connection need it: a
            small standard deviation would make all vectors nearly equal.
        mixes_first: True if the first vector's result depends on the others. A class
            token, which stands first, learns nothing of them otherwise.
    """

    dim: int | None
    permutation_equivariant: bool = True
    keeps_initial_weights: bool = False
    mixes_first: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls, "encoder")
        # Another forward pass may mix, whatever the inherited one does.
        if "forward" in vars(cls) and "mixes_first" not in vars(cls):
            cls.mixes_first = True

    @abstractmethod
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        """Encode ``(B, N, D)`` to ``(B, N, D)``.

        Args:
            x: the vectors, finite even under padding.
            padding: ``(B, N)`` bool, True = ignore; None where nothing is padded.
        """


class IdentityEncoder(Encoder):
    """Return the embedded tokens unchanged.

    A control without interaction between tokens, and the encoder below a sensory layer
    such as `AttentionNeuronPooling`.

    Args:
        dim: D, the width that tokens are projected to; None for no projection: the
            vectors are the tokens' features, bytes scaled to [0, 1], and the type
            embedding if the policy has one.
    """

    mixes_first = False

    def __init__(self, *, dim: Size | None = None) -> None:
        super().__init__()
        self.dim = dim

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        return x
