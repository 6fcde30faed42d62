"""Learned token merging as an encoder: tokens of a merged pair share one vector."""

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.encoders.merging import MergingLayer, timestep_encoding
from marl_pool.encoders.pairs import Pairs, choose_pairs, gather_tokens, pair_log_prob
from marl_pool.tokens import Mask
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveInt, Probability, UnitInterval

ROUNDING = 1e-9
"""Added before rounding down, so that 0.1 · 20 / 2 gives 1."""


class LearnedMergingEncoder(Encoder):
    r"""Repeated merging of pairs of tokens, chosen by a learned policy.

    Each layer merges ⌊p T / 2⌋ pairs of the T tokens left, into

    .. math::
        \frac{x_i + x_j}{2} + P(i, j) \cdot \mathrm{MLP}([x_i; x_j])

    The pairs are the best by a softmax over all ordered pairs, chosen greedily, each
    token at most once. P is the pair's probability among those left when it was chosen,
    so the policy learns by plain gradients. Cross-attention to the tokens before the
    merge follows. All layers share their weights; an encoding of the depth is added.
    At the end each slot holds the vector of the token that it was merged into.

    Source: Nair and Lieck, *Hierarchical Transformers*, section 3.1.2, and A.4 for the
    scaling by the probability. Differences from the source: nothing is sampled, not
    even in training, so that PPO's runner and learner agree; the mean is added, since
    one of T (T - 1) probabilities is small; the set keeps its size. Exact copies of a
    token may exchange their results, which does not change an invariant head.

    Args:
        dim: D, the width of the vectors in and out.
        num_layers: number of applications of the layer.
        proportion: p, the fraction of the tokens left that merge in each layer, in
            [0, 1]; 1 halves the number of tokens.
        num_heads: number of attention heads, a divisor of D.
        policy_heads: number of heads of the merging policy, a divisor of D.
        dim_ff: hidden width of the feed-forward part and of the merging MLP.
        dropout: probability in the feed-forward part, in [0, 1).
        attention: have a transformer block and the cross-attention.
        residual: add the pair's mean, as above.
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
        if dim % policy_heads:
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

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        slots = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        owner = slots  # the slot of the token that each one has been merged into
        gone = torch.zeros_like(slots, dtype=torch.bool) if padding is None else padding
        for timestep in self.timesteps:
            x, pairs = self._merge(x + timestep, gone)
            # Map each slot to the slot that it merges into in this layer.
            shift = torch.where(pairs.valid, pairs.kept - pairs.gone, 0)
            target = slots.scatter_add(1, pairs.gone, shift)
            owner = target.gather(1, owner)
            gone = gone | (target != slots)
        return gather_tokens(x, owner)

    def _merge(self, x: Tensor, gone: Tensor) -> tuple[Tensor, Pairs]:
        """Apply the layer to the tokens that are not gone, in their slots."""
        x, logits = self.layer.transform(x, gone)
        counts = pair_counts(self.proportion, (~gone).sum(1))
        most = int(self.proportion * x.shape[1] / 2 + ROUNDING)
        pairs = choose_pairs(logits, most, counts, gone)
        probability = pair_log_prob(logits, pairs, gone).exp()[..., None].to(x.dtype)
        vectors = probability * self.layer.merged(x, pairs)
        kept = gather_tokens(x, pairs.kept)
        if self.residual:
            vectors = vectors + (gather_tokens(x, pairs.gone) + kept) / 2
        change = (vectors - kept) * pairs.valid[..., None]
        new = x.scatter_add(1, pairs.kept[..., None].expand_as(change), change)
        if self.layer.refine is not None:
            new = self.layer.refine(new, x, gone)
        return new, pairs


def pair_counts(proportion: float, tokens: Tensor) -> Tensor:
    """Return ⌊p T / 2⌋ for int64 numbers of tokens T, without rounding errors."""
    return (proportion * tokens.double() / 2 + ROUNDING).floor().long()
