"""A network on sets of points: for each of them, or for all of them together."""

from torch import Tensor, nn

from marl_pool.encoders import ENCODERS
from marl_pool.encoders.base import Encoder
from marl_pool.networks import build_part, seeded
from marl_pool.pooling import POOLING
from marl_pool.pooling.base import Pooling
from marl_pool.training.supervised.task import Part
from marl_pool.utils.errors import InputError


class PointNetwork(nn.Module):
    """Points → linear → encoder → (pooling →) linear.

    Without pooling the results are one for each point, with it one for each set.
    Initial weights are those of the layers themselves, as in SWARM's published code
    (which begins with biases of zero where it learns mixtures; ours does not).

    Where we differ from the SWARM paper: its first and last layers map points and
    results themselves. Here linear layers stand before and after, since encoders have
    one width; with ``dim`` as small as the results are, a SWARM layer of any number of
    units computes the same functions. In between two of its layers can be narrower
    than theirs. A sorted LSTM sorts embedded points, hence in the plane by a direction
    that it learns, where the paper takes the first coordinate; the mixtures look the
    same from every direction.

    Args:
        num_features: F of a point.
        num_outputs: K, width of the results.
        num_points: the largest N, for heads that want to know it.
        encoder: ``{"name": …, **options}``.
        pooling: ``{"name": …, **options}``; None: a result for each point.
        dropout: of the encoder.
        seed: of the initial weights.

    Raises:
        InputError: an unknown name or option, or a head that does not fit.
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
        width = self.encoder.dim
        if width is None:
            raise InputError("encoder.dim: expected a width for points, got null")
        with seeded(seed, "embedding"):
            self.embedding = nn.Linear(num_features, width)
        self.pooling: Pooling | None = None
        if pooling is not None:
            context = {
                "dim": width,
                "num_tokens": num_points,
                "has_self": False,
                "action_dim": 0,
            }
            with seeded(seed, "pooling"):
                self.pooling = build_part("pooling", pooling, POOLING, Pooling, context)
            width = self.pooling.dim_out
        with seeded(seed, "head"):
            self.head = nn.Linear(width, num_outputs)

    def forward(self, points: Tensor, padding: Tensor | None = None) -> Tensor:
        """Map points ``(B, N, F)`` to ``(B, N, K)``, or pooled to ``(B, K)``.

        Args:
            points: finite, also under padding.
            padding: ``(B, N)`` bool, True = ignore; None where nothing is padded.
        """
        x = self.embedding(points)
        if self.pooling is None:
            return self.head(self.encoder(x, padding))
        x, padding, types = self.pooling.prepend(x, padding)
        return self.head(self.pooling(self.encoder(x, padding), padding, types))


def is_equivariant(network: nn.Module) -> bool:
    """Return whether the network is invariant to the order of the points."""
    parts = network.modules()
    return all(p.permutation_equivariant for p in parts if isinstance(p, Encoder))
