"""The contract of an encoder: a set of vectors in, a set of vectors out."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Encoder(nn.Module, ABC):
    """Map N vectors to N vectors, equivariant under permutation unless it says not.

    One of your own calls ``super().__init__()``, sets ``self.dim`` and writes
    `forward`; its keyword arguments are the options ``encoder.KEY``, and ``dropout`` is
    handed to it if it names that.

    Attributes:
        dim: D, the width of the vectors in and out; None: that of the tokens.
        permutation_equivariant: whether another order of the vectors gives the same
            results in that order. It belongs to the instance: options may decide it.
        keeps_initial_weights: whether a policy leaves them as the encoder drew them,
            in place of N(0, init_std). Layers that add nothing to their input need it:
            where the standard deviation is small, 0.02 say, several in a row would
            make of all vectors nearly the same.
    """

    dim: int | None
    permutation_equivariant: bool = True
    keeps_initial_weights: bool = False

    @abstractmethod
    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Encode ``(B, N, D)`` to ``(B, N, D)``.

        Args:
            x: the vectors; finite also under padding.
            padding: ``(B, N)`` bool, True = ignore; None where nothing is padded.
        """
