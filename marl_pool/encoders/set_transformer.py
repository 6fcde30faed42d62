"""The Set Transformer's blocks: attention between all, or through inducing points."""

from typing import Literal

from torch import Tensor, nn

from marl_pool.encoders.base import Encoder
from marl_pool.kernels.attention import AttentionScale, MultiHeadAttention
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import unknown
from marl_pool.utils.types import NonNegativeInt, PositiveInt

Initial = Literal["network", "swarm"]
INITIAL = ("network", "swarm")


class AttentionBlock(nn.Module):
    """``MAB(X, Y) = LN(H + rFF(H))`` with ``H = LN(X + Attention(X, Y, Y))``.

    Source: Lee et al. (2019), *Set Transformer*, equations 6 and 7; rFF is one linear
    layer with ReLU, as in the authors' code, or several of them.

    Args: see `SetTransformerEncoder`.
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

    def forward(self, x: Tensor, y: Tensor, padding: Tensor | None = None) -> Tensor:
        """Let ``x (B, M, D)`` attend to ``y (B, N, D)``, padded by ``(B, N)``."""
        hidden = self.norms[0](x + self.attention(x, y, padding))
        return self.norms[1](hidden + self.feedforward(hidden))

    def initialize_as_swarm(self) -> None:
        """Draw weights as SWARM's code does: Xavier, before a ReLU Kaiming, no bias."""
        for part in self.attention.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_normal_(part.weight)
        for part in self.feedforward:
            if isinstance(part, nn.Linear):
                nn.init.kaiming_normal_(part.weight)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)


class SetTransformerEncoder(Encoder):
    """Set attention blocks: SAB, or ISAB through a few inducing points.

    ``SAB(X) = MAB(X, X)`` costs O(N²); ``ISAB(X) = MAB(X, MAB(I, X))`` with m learned
    vectors I costs O(N m).

    Source: Lee et al. (2019), equations 8 to 10. The Set Transformer that SWARM
    (Vollgraf, 2019) compares with has four linear layers in its rFF, biases in the
    attention, the head width's scale and initial weights of its own
    (``encoder=paper_isab``).

    Args:
        dim: D, the width.
        num_layers: blocks.
        num_heads: H, the attention heads, a divisor of ``dim``.
        num_inducing: m, inducing points of each block; 0 for SAB.
        layer_norm: normalise as above; the authors' code leaves it away by default.
        attention_scale: divide scores by the square root of the model width, as
            published, or of the head width.
        feedforward_layers: of the rFF, each with ReLU.
        bias: of the attention's projections.
        initial: "network", as the rest of the network (N(0, init_std) in a policy), or
            "swarm", as in SWARM's published code: Xavier in the attention, Kaiming in
            the rFF, N(0, 1) for the inducing points and biases of zero.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt = 8,
        num_layers: PositiveInt = 2,
        num_heads: PositiveInt = 1,
        num_inducing: NonNegativeInt = 0,
        layer_norm: bool = True,
        attention_scale: AttentionScale = "model",
        feedforward_layers: PositiveInt = 1,
        bias: bool = False,
        initial: Initial = "network",
    ) -> None:
        super().__init__()
        if initial not in INITIAL:
            raise unknown("encoder.initial", initial, INITIAL)
        for name, size, least in (
            ("dim", dim, 1),
            ("num_layers", num_layers, 1),
            ("num_inducing", num_inducing, 0),
            ("feedforward_layers", feedforward_layers, 1),
        ):
            if size < least:
                raise InputError(
                    f"encoder.{name}: expected at least {least}, got {size}"
                )
        self.dim = dim

        def block() -> AttentionBlock:
            return AttentionBlock(
                dim, num_heads, layer_norm, attention_scale, feedforward_layers, bias
            )

        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.gathering = nn.ModuleList()
        self.inducing: nn.Embedding | None = None
        if num_inducing:
            self.gathering = nn.ModuleList(block() for _ in range(num_layers))
            # Weights of an embedding begin as all others do.
            self.inducing = nn.Embedding(num_layers * num_inducing, dim)
        if initial == "swarm":
            self.keeps_initial_weights = True
            for part in self.modules():
                if isinstance(part, AttentionBlock):
                    part.initialize_as_swarm()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Encode ``(B, N, D)``; see `Encoder.forward`."""
        if self.inducing is None:
            for layer in self.layers:
                x = layer(x, x, padding)
            return x
        points = self.inducing.weight.chunk(len(self.layers))
        for layer, gather, own in zip(self.layers, self.gathering, points, strict=True):
            induced = gather(own.expand(x.shape[0], -1, -1), x, padding)
            x = layer(x, induced)
        return x
