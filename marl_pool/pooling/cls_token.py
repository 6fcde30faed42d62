"""The class token: a learned vector that rides through the encoder."""

from torch import Tensor

from marl_pool.pooling.base import Pooling


class ClsPooling(Pooling):
    """The encoder's output at a learned extra token.

    Source: Devlin et al. (2019); the AdaPool paper, section 3.6. The token is
    prepended by `Pooling.prepend` before the encoder and read here after it. Without
    an encoder the result would not depend on the set. In a policy the token begins as
    N(0, init_std), as the paper's text says; its published code draws from U(0, 1).
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, extra_tokens=1)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Return the first of ``(B, 1 + N, D)``; see `Pooling.forward`."""
        return x[:, 0]
