"""Networks on sets of points, with an output for each point or for the set."""

from torch import Tensor, nn

from marl_pool.encoders import ENCODERS
from marl_pool.encoders.base import Encoder
from marl_pool.networks import build_part, seeded
from marl_pool.pooling import POOLING
from marl_pool.pooling.base import Pooling
from marl_pool.training.supervised.task import Part
from marl_pool.utils.errors import InputError


class PointNetwork(nn.Module):
    """Linear layer, encoder, optional pooling head, linear layer.

    With a pooling head there is one output for each set, otherwise for each point.
    Initial weights are those of the layers themselves, as in SWARM's published code
    (except its zero biases for mixtures).

    Differences from the SWARM paper (https://arxiv.org/abs/1906.09400): its first and
    last SWARM layers map points and outputs themselves. Here linear layers do, because
    encoders have one width; with ``dim`` as small as the outputs a SWARM layer of any
    number of units computes the same functions. A sorted LSTM sorts embedded points,
    i.e. by a learned direction in the plane, where the paper sorts by the first
    coordinate; the distribution of mixtures is isotropic.

    Args:
        num_features: F, features of a point.
        num_outputs: K, width of the output.
        num_points: largest N, for heads that depend on it.
        encoder: ``{"name": …, **options}``.
        pooling: ``{"name": …, **options}``; None: an output for each point.
        dropout: dropout probability of the encoder.
        seed: seed of the initial weights.
    """

    def __init__(
        self,
        num_features: int,
        num_outputs: int,
        num_points: int,
        *,
        encoder: Part,
        pooling: Part | None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with seeded(seed, "encoder"):
            self.encoder: Encoder = build_part(
                "encoder", encoder, ENCODERS, Encoder, {"dropout": dropout}
            )
        # The encoder determines the width of the embedding.
        width = self.encoder.dim
        if width is None:
            raise InputError("encoder.dim: expected a width for points, got null")
        with seeded(seed, "embedding"):
            self.embedding = nn.Linear(num_features, width)
        # Without pooling, each point has an output of its own.
        self.pooling: Pooling | None = None
        if pooling is not None:
            context = {"dim": width, "num_tokens": num_points, "has_self": False}
            context["action_dim"] = 0
            with seeded(seed, "pooling"):
                self.pooling = build_part("pooling", pooling, POOLING, Pooling, context)
            width = self.pooling.dim_out
        with seeded(seed, "head"):
            self.head = nn.Linear(width, num_outputs)

    def forward(self, points: Tensor, padding: Tensor | None = None) -> Tensor:
        """Map points ``(B, N, F)`` to ``(B, N, K)``, or pooled to ``(B, K)``.

        Points are finite also under padding ``(B, N)``, where True = ignore.
        """
        x = self.embedding(points)
        if self.pooling is None:
            return self.head(self.encoder(x, padding))
        # A head may have learned tokens, which pass through the encoder.
        x, padding, types = self.pooling.prepend(x, padding)
        return self.head(self.pooling(self.encoder(x, padding), padding, types))


def is_equivariant(network: nn.Module) -> bool:
    """Return True if no encoder of the network depends on the order of the points."""
    parts = network.modules()
    return all(p.permutation_equivariant for p in parts if isinstance(p, Encoder))
