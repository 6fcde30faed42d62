"""Pre-norm transformer."""

from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.kernels.attention import (
    AttentionScale,
    MultiHeadAttention,
    validate_heads,
)
from marl_pool.kernels.functional import Activation, make_activation
from marl_pool.tokens import Mask
from marl_pool.utils.types import PositiveInt, Probability


class TransformerLayer(nn.Module):
    """``x = x + attention(norm(x))``, then ``x = x + feedforward(norm(x))``.

    The arguments are those of `TransformerEncoder`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        dim_ff: int,
        dropout: float,
        attention_scale: AttentionScale,
        activation: Activation,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = MultiHeadAttention(
            dim, num_heads, scale=attention_scale, dropout=attention_dropout
        )
        self.feedforward_norm = nn.LayerNorm(dim)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, dim_ff),
            make_activation(activation, "encoder.activation"),
            nn.Linear(dim_ff, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        """Encode ``(B, N, D)`` to ``(B, N, D)``."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, padding)
        return x + self.feedforward(self.feedforward_norm(x))


class TransformerEncoder(Encoder):
    r"""Pre-norm transformer, by default without a final LayerNorm.

    .. math::
        x \leftarrow x + \mathrm{Attention}(\mathrm{LN}(x)), \qquad
        x \leftarrow x + W_2\, \phi(W_1\, \mathrm{LN}(x) + b_1) + b_2

    in each layer. There is no positional encoding, so it is permutation equivariant.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215), C.2
    and Tables 9, 10, 12 and 14: biases and dropout in the feed-forward parts only. Its
    image studies have a final LayerNorm and dropout in the attention.

    Args:
        dim: D, the width of the vectors in and out.
        num_layers: number of layers.
        num_heads: number of attention heads, a divisor of D.
        dim_ff: width of the feed-forward part.
        dropout: probability after the feed-forward part, in [0, 1).
        attention_scale: divide scores by the square root of the model width, as in the
            paper, or of the head width.
        activation: φ, the activation of the feed-forward part.
        final_norm: apply a LayerNorm after the last layer.
        attention_dropout: probability in the attention, in [0, 1); see
            `MultiHeadAttention`.
    """

    dim: int

    def __init__(
        self,
        *,
        dim: PositiveInt = 8,
        num_layers: PositiveInt = 3,
        num_heads: PositiveInt = 8,
        dim_ff: PositiveInt = 32,
        dropout: Probability = 0.0,
        attention_scale: AttentionScale = "model",
        activation: Activation = "gelu",
        final_norm: bool = False,
        attention_dropout: Probability = 0.0,
    ) -> None:
        super().__init__()
        validate_heads("encoder.num_heads", num_heads, dim)
        self.dim = dim
        scale, sizes = attention_scale, (dim, num_heads, dim_ff)
        self.layers = nn.ModuleList(
            TransformerLayer(*sizes, dropout, scale, activation, attention_dropout)
            for _ in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(dim) if final_norm else None

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, padding)
        return x if self.final_norm is None else self.final_norm(x)
