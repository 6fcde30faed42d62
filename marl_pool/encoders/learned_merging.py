"""Learned token merging as an encoder: pairs become one, and share their vector."""

import torch
from torch import Tensor

from marl_pool.encoders.base import Encoder
from marl_pool.encoders.merging import MergingLayer, timestep_encoding
from marl_pool.encoders.pairs import Pairs, choose_pairs, pair_log_prob
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveInt, Probability, UnitInterval

ROUNDING = 1e-9
"""Added before rounding down, so that 0.1 · 20 / 2 is 1."""


class LearnedMergingEncoder(Encoder):
    """Merge ``⌊p T / 2⌋`` pairs of the T tokens left, layer by layer.

    Which pairs: the best by one softmax over all ordered pairs, greedily, each token
    once. What they become: ``(x_i + x_j) / 2 + P(i, j) · MLP([x_i; x_j])``, where P is
    the pair's probability among those left when it was chosen; so the policy learns by
    plain gradients. Then cross-attention to the tokens before. All layers share their
    weights and are told their depth. At the end each place holds the vector of the
    token that it became part of: a merge that includes self stands in self's place too.

    Source: Nair and Lieck, *Hierarchical Transformers*, section 3.1.2; scaling by the
    probability is A.4's. Where we differ: nothing is sampled, in training neither, so
    that PPO's sampler and learner agree; the mean is added (A.4 reports that scaling
    alone fails, since one of T (T - 1) probabilities is small); the set keeps its size.
    Exact copies of a token tie, and their order decides which of them merges: copies
    may change results with each other, which no head that ignores order notices.

    Args:
        dim: D, the width of the vectors in and out.
        num_layers: how often the layer is applied.
        proportion: p, the share of the tokens left that merge in each layer; 1 halves
            them.
        num_heads: heads of attention, a divisor of ``dim``.
        policy_heads: heads of the merging policy, a divisor of ``dim``.
        dim_ff: hidden width of the feed-forward part and of the merging MLP.
        dropout: probability in the feed-forward part, in [0, 1).
        attention: have a transformer block and the cross-attention.
        residual: add the pair's mean, as above.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt = 8,
        num_layers: PositiveInt = 2,
        proportion: UnitInterval = 0.5,
        num_heads: PositiveInt = 1,
        policy_heads: PositiveInt = 1,
        dim_ff: PositiveInt = 32,
        dropout: Probability = 0.0,
        attention: bool = True,
        residual: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "num_layers": num_layers, "dim_ff": dim_ff}
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"encoder.{name}: expected at least 1, got {size}")
        if not 0 <= proportion <= 1:
            raise InputError(
                f"encoder.proportion: expected a share in [0, 1], got {proportion}"
            )
        if policy_heads < 1 or dim % policy_heads:
            raise InputError(
                f"encoder.policy_heads: expected a divisor of dim = {dim}, "
                f"got {policy_heads}"
            )
        self.dim, self.num_layers = dim, num_layers
        self.proportion, self.residual = proportion, residual
        self.layer = MergingLayer(
            dim,
            num_heads=num_heads,
            policy_heads=policy_heads,
            dim_ff=dim_ff,
            dropout=dropout,
            policy="learned",
            attention=attention,
            through_tokens=True,
        )
        self.timesteps: Tensor
        encodings = [timestep_encoding(depth + 1, dim) for depth in range(num_layers)]
        self.register_buffer("timesteps", torch.stack(encodings), persistent=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Encode ``(B, N, D)`` to ``(B, N, D)``; see `Encoder.forward`."""
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        became = places
        gone = (
            torch.zeros_like(places, dtype=torch.bool) if padding is None else padding
        )
        for timestep in self.timesteps:
            x, pairs = self._merge(x + timestep, gone)
            shift = torch.where(pairs.valid, pairs.kept - pairs.gone, 0)
            into = places.scatter_add(1, pairs.gone, shift)
            became = into.gather(1, became)
            gone = gone | (into != places)
        return x.gather(1, became[..., None].expand_as(x))

    def _merge(self, x: Tensor, gone: Tensor) -> tuple[Tensor, Pairs]:
        """Apply the layer to the tokens that are not gone, in their places."""
        x, logits = self.layer.transform(x, gone)
        counts = pair_counts(self.proportion, (~gone).sum(1))
        most = int(self.proportion * x.shape[1] / 2 + ROUNDING)
        pairs = choose_pairs(logits, most, counts, gone)
        share = pair_log_prob(logits, pairs, gone).exp()[..., None].to(x.dtype)
        vectors = share * self.layer.merged(x, pairs)
        kept = pairs.kept[..., None].expand_as(vectors)
        if self.residual:
            lost = pairs.gone[..., None].expand_as(vectors)
            vectors = vectors + (x.gather(1, lost) + x.gather(1, kept)) / 2
        change = (vectors - x.gather(1, kept)) * pairs.valid[..., None]
        new = x.scatter_add(1, kept, change)
        if self.layer.refine is not None:
            new = self.layer.refine(new, x, gone)
        return new, pairs


def pair_counts(proportion: float, tokens: Tensor) -> Tensor:
    """``⌊p T / 2⌋`` for int64 numbers of tokens T, without errors of rounding."""
    return (proportion * tokens.double() / 2 + ROUNDING).floor().long()
