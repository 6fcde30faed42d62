"""Transformers without positions: pre-norm, and the Set Transformer."""

from functools import partial
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.kernels.attention import (
    AttentionScale,
    MultiHeadAttention,
    validate_heads,
)
from marl_pool.kernels.functional import ACTIVATIONS, Activation
from marl_pool.options.types import (
    Probability,
    Repeats,
    Size,
    SizeOrZero,
)
from marl_pool.tokens import Mask


class TransformerLayer(nn.Module):
    """``x = x + attention(norm(x))``, then ``x = x + feedforward(norm(x))``.

    The arguments are as in `TransformerEncoder`.
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
            ACTIVATIONS[activation](),
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

    in each layer. Without positional encoding, it is permutation equivariant.

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
        dim: Size = 8,
        num_layers: Repeats = 3,
        num_heads: Repeats = 8,
        dim_ff: Size = 32,
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


class AttentionBlock(nn.Module):
    r"""Multi-head attention block (MAB).

    .. math::
        \mathrm{MAB}(X, Y) = \mathrm{LN}(H + \mathrm{rFF}(H)), \qquad
        H = \mathrm{LN}(X + \mathrm{Attention}(X, Y, Y))

    Source: Lee et al. (2019), *Set Transformer*, https://arxiv.org/abs/1810.00825,
    equations 6 and 7; rFF is one linear layer with ReLU, as in the authors' code, or
    several of them. That code takes the residual from the projected queries, and has
    biases and no output projection. The arguments are as in `SetTransformerEncoder`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        layer_norm: bool,
        scale: AttentionScale,
        feedforward_layers: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, num_heads, scale=scale, bias=bias)
        self.feedforward = nn.Sequential()
        for _ in range(feedforward_layers):
            self.feedforward.extend([nn.Linear(dim, dim), nn.ReLU()])
        norms = [nn.LayerNorm(dim) if layer_norm else nn.Identity() for _ in range(2)]
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor, y: Tensor, padding: Mask = None) -> Tensor:
        """Attend from ``x (B, M, D)`` to ``y (B, N, D)`` with padding ``(B, N)``."""
        hidden = self.norms[0](x + self.attention(x, y, padding))
        return self.norms[1](hidden + self.feedforward(hidden))

    def initialize_as_swarm(self) -> None:
        """Initialize as SWARM's code does: Xavier, Kaiming before ReLU, zero biases."""
        xavier, kaiming = nn.init.xavier_normal_, nn.init.kaiming_normal_
        for whole, sample in ((self.attention, xavier), (self.feedforward, kaiming)):
            for part in whole.modules():
                if isinstance(part, nn.Linear):
                    sample(part.weight)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)


class SetTransformerEncoder(Encoder):
    r"""Set attention blocks: SAB, or ISAB through a few inducing points.

    .. math::
        \mathrm{SAB}(X) = \mathrm{MAB}(X, X), \qquad
        \mathrm{ISAB}(X) = \mathrm{MAB}(X, \mathrm{MAB}(I, X))

    with `AttentionBlock` as MAB. A SAB costs O(N²); an ISAB with m learned vectors I
    costs O(N m).

    Source: Lee et al. (2019), *Set Transformer*, https://arxiv.org/abs/1810.00825,
    equations 8 to 10. The authors' code has no LayerNorm by default, and differs in
    `AttentionBlock`. SWARM (Vollgraf,
    2019, https://arxiv.org/abs/1906.09400) compares itself with ``encoder=paper_isab``.

    Args:
        dim: D, the width of the vectors in and out.
        num_layers: number of blocks.
        num_heads: number of attention heads, a divisor of D.
        num_inducing: m, the number of inducing points of each block; 0 for SAB.
        layer_norm: normalize as above.
        attention_scale: divide scores by the square root of the model width, as
            published, or of the head width.
        feedforward_layers: number of layers of the rFF, each with ReLU.
        bias: give the projections of the attention a bias.
        initial: initialize like the rest of the network, "network", or like SWARM's
            code, "swarm": Xavier in the attention, Kaiming in the rFF, N(0, 1) for the
            inducing points, zero biases.
    """

    def __init__(
        self,
        *,
        dim: Size = 8,
        num_layers: Repeats = 2,
        num_heads: Repeats = 1,
        num_inducing: SizeOrZero = 0,
        layer_norm: bool = True,
        attention_scale: AttentionScale = "model",
        feedforward_layers: Repeats = 1,
        bias: bool = False,
        initial: Literal["network", "swarm"] = "network",
    ) -> None:
        super().__init__()
        validate_heads("encoder.num_heads", num_heads, dim)
        self.dim = dim
        options = (layer_norm, attention_scale, feedforward_layers, bias)
        block = partial(AttentionBlock, dim, num_heads, *options)
        # Each layer attends among the tokens.
        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.gathering = nn.ModuleList()
        self.inducing: nn.Embedding | None = None
        # With inducing points, a first block gathers the tokens into them.
        if num_inducing:
            self.gathering = nn.ModuleList(block() for _ in range(num_layers))
            # An embedding, so that a policy initializes the points like its weights.
            self.inducing = nn.Embedding(num_layers * num_inducing, dim)
        # The swarm initialization replaces the network's.
        if initial == "swarm":
            self.keeps_initial_weights = True
            for part in self.modules():
                if isinstance(part, AttentionBlock):
                    part.initialize_as_swarm()

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        if self.inducing is None:
            for layer in self.layers:
                x = layer(x, x, padding)
            return x
        # The inducing points attend to the set, then the set to them.
        points = self.inducing.weight.chunk(len(self.layers))
        for layer, gather, inducing in zip(
            self.layers, self.gathering, points, strict=True
        ):
            x = layer(x, gather(inducing.expand(x.shape[0], -1, -1), x, padding))
        return x
