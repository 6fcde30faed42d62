"""The class token: a learned vector that passes through the encoder with the set."""

from torch import Tensor
from typing_extensions import override

from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types


class ClsPooling(Pooling):
    r"""The encoder's output at a learned extra token.

    .. math::
        y = \mathrm{encoder}(t, x_1, \dots, x_N)_0

    `Pooling.prepend` puts the learned token t before the set, the encoder mixes it with
    the others, and this head returns its vector. Without an encoder the result would
    not depend on the set.

    Shapes: ``(B, 1 + N, D)`` to ``(B, D)``.

    Source: Devlin et al. (2019), *BERT*, https://arxiv.org/abs/1810.04805; the AdaPool
    paper (Brothers, 2025, https://arxiv.org/abs/2506.09215), section 3.6. In a policy
    the token is initialized from N(0, init_std), as the AdaPool paper's text says; its
    published code uses U(0, 1).
    """

    extra_tokens = 1

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return x[:, 0]
