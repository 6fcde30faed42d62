"""Embedding of image patches, with the norms and dropout of a vision transformer."""

import torch
from torch import Tensor, nn

from marl_pool.kernels.functional import Activation
from marl_pool.networks import TokenEmbedding, TypeEmbedding
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.supervised.images.images import Normalization


class PatchEmbedding(TokenEmbedding):
    r"""Project patches and add the embedding of their positions.

    .. math:: h = \mathrm{dropout}(\mathrm{LN}(W\, \mathrm{LN}((x - \mu) / \sigma)) + e)

    with pixels x in [0, 1], the data set's :math:`\mu` and :math:`\sigma`, and the
    learned embedding e of the patch's position. Normalisation, both layer norms and
    dropout are optional.

    Source: the published code of the AdaPool paper's image studies,
    https://arxiv.org/abs/2506.09215.

    The types of the tokens are their positions. The channels of ``normalization`` vary
    fastest within a patch. See `TokenEmbedding` for the other arguments.
    """

    def __init__(
        self,
        spec: TokenSpec,
        dim: int | None,
        type_embedding: TypeEmbedding = "add",
        activation: Activation | None = None,
        *,
        normalization: Normalization | None = None,
        norms: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(spec, dim, type_embedding, activation)
        # Repeat the constants of the channels over the pixels of a patch.
        self.mean: Tensor | None
        self.std: Tensor | None
        for name in ("mean", "std"):
            values = None
            if normalization is not None:
                channels = torch.tensor(getattr(normalization, name))
                values = channels.repeat(spec.num_features // len(channels))
            self.register_buffer(name, values, persistent=False)
        # Normalize before and after the projection, as the vision transformer does.
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) if norms else nn.Identity()
            for width in (spec.num_features, self.dim_out)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tokens) -> Tensor:
        """Embed patches of batch ``(B,)`` as ``(B, N, D)``."""
        x = self.read(tokens)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        x = self.norms[0](x)
        if self.project is not None:
            x = self.activate(self.project(x))
        assert self.types is not None
        embedded: Tensor = self.dropout(self.norms[1](x) + self.types(tokens.types))
        return embedded
