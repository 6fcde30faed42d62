"""Learned token merging: a transformer block, a policy over pairs, and the merge."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.encoders.pairs import Pairs, choose_pairs, gather_tokens, pair_log_prob
from marl_pool.encoders.transformer import TransformerLayer
from marl_pool.kernels.attention import MultiHeadAttention, validate_heads
from marl_pool.options.types import (
    Probability,
    Repeats,
    Size,
    UnitInterval,
)
from marl_pool.tokens import Mask

MergingPolicy = Literal["learned", "shared_keys", "heuristic", "random"]
ROUNDING = 1e-9
"""Added before rounding down, so that 0.1 · 20 / 2 gives 1."""


def timestep_encoding(depth: int, dim: int) -> Tensor:
    """Return the encoding of a layer's depth, added to each token, ``(dim,)``.

    ``TE(d, 2i) = sin(d / 10000^(2i/dim))``, ``TE(d, 2i+1) = cos(d / 10000^(2i/dim))``.

    Source: Nair and Lieck, *Hierarchical Transformers*, equation 7.
    """
    even = torch.arange(0, dim, 2, dtype=torch.float64)
    angle = depth * torch.exp(-math.log(10000.0) * even / dim)
    interleaved = torch.stack([angle.sin(), angle.cos()], -1).flatten()
    return interleaved[:dim].to(torch.get_default_dtype())


def merging_mlp(dim_in: int, dim_out: int, hidden: int) -> nn.Sequential:
    """Build the network that merges two tokens into one, or splits one into two."""
    first, last = nn.Linear(dim_in, hidden), nn.Linear(hidden, dim_out)
    return nn.Sequential(first, nn.GELU(), last)


class PairScores(nn.Module):
    """Logits of all ordered pairs, ``Q Kᵀ / √d_p``, summed over weighted heads.

    Source: Nair and Lieck, *Hierarchical Transformers*, equation 1 and A.3. Here tokens
    are normalized before the projection.

    Args:
        num_heads: h, the number of heads, a divisor of the width D; ``d_p = D / h``.
        own_keys: project keys here; otherwise they are passed to `forward`.
    """

    def __init__(self, dim: int, num_heads: int, own_keys: bool) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, 1 / math.sqrt(dim // num_heads)
        self.norm = nn.LayerNorm(dim)
        self.to_query = nn.Linear(dim, dim, bias=False)
        self.to_key = nn.Linear(dim, dim, bias=False) if own_keys else None
        self.head_weights: nn.Parameter | None = None
        if num_heads > 1:
            self.head_weights = nn.Parameter(torch.full((num_heads,), 1 / num_heads))

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Score all pairs of ``x (B, T, D)``, by its own keys or by ``keys``."""
        normed = self.norm(x)
        queries = self.to_query(normed)
        if self.to_key is not None:
            keys = self.to_key(normed)
        assert keys is not None
        if self.head_weights is not None:
            # The weighted sum over heads is one product of weighted queries.
            weights = self.head_weights.repeat_interleave(x.shape[-1] // self.num_heads)
            queries = queries * weights
        return queries @ keys.transpose(1, 2) * self.scale


class Refinement(nn.Module):
    """Cross-attention from merged tokens x to the tokens y before the merge.

    ``x + Attention(LN(x), LN(y))``.

    Source: Nair and Lieck, *Hierarchical Transformers*, section 3.1.2, which does not
    say how the result is combined with the tokens; here it is added, pre-norm.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.context_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = MultiHeadAttention(dim, num_heads, scale="head")

    def forward(self, x: Tensor, context: Tensor, padding: Mask = None) -> Tensor:
        """Refine ``x (B, S, D)`` by ``context (B, T, D)`` with padding ``(B, T)``."""
        return x + self.attention(self.norm(x), self.context_norm(context), padding)

    def keys(self, context: Tensor) -> Tensor:
        """Return the keys of ``context``, ``(B, T, D)``."""
        return self.attention.to_key(self.context_norm(context))


class MergingLayer(nn.Module):
    """Modules of one merging layer; the caller chooses the pairs by their logits.

    Source: Nair and Lieck, *Hierarchical Transformers*, section 3.1.2. The hidden width
    of the merging MLP is not published; here it is ``dim_ff``. Arguments are as in
    `LearnedMergingEncoder`, and:

    Args:
        policy: ``learned``; ``shared_keys``, with the refinement's keys, detached
            (A.3); ``heuristic``, the attention weights of the transformer block
            (section 4.3); ``random``, equal logits.
        attention: include a transformer block and a refinement (section 4.4: neither).
        through_tokens: backpropagate the policy's gradient into the tokens. In the
            paper only the policy's own weights receive it.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        policy_heads: int,
        dim_ff: int,
        dropout: float,
        policy: MergingPolicy,
        attention: bool,
        through_tokens: bool,
    ) -> None:
        super().__init__()
        self.kind, self.through_tokens = policy, through_tokens
        self.block: TransformerLayer | None = None
        self.refine: Refinement | None = None
        if attention:
            self.block = TransformerLayer(
                dim, num_heads, dim_ff, dropout, "head", "gelu"
            )
            self.refine = Refinement(dim, num_heads)
        self.policy: PairScores | None = None
        if policy in ("learned", "shared_keys"):
            self.policy = PairScores(dim, policy_heads, policy == "learned")
        self.merge = merging_mlp(2 * dim, dim, dim_ff)

    def transform(self, x: Tensor, padding: Mask = None) -> tuple[Tensor, Tensor]:
        """Return the block's tokens ``(B, T, D)`` and the pairs' logits ``(B, T, T)``.

        The logits are at least in float32.
        """
        entered = x
        if self.block is not None:
            x = self.block(x, padding)
        logits = self._logits(entered, x, padding)
        return x, logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _logits(self, entered: Tensor, x: Tensor, padding: Mask) -> Tensor:
        if self.policy is not None:
            keys = None
            if self.kind == "shared_keys":
                assert self.refine is not None
                keys = self.refine.keys(x).detach()
            return self.policy(x if self.through_tokens else x.detach(), keys)
        if self.kind == "random":
            return x.new_zeros(()).expand(*x.shape[:2], x.shape[1])
        # The heuristic scores a pair by the attention between its tokens.
        assert self.block is not None
        with torch.no_grad():
            normed = self.block.attention_norm(entered)
            weights = self.block.attention.weights(normed, normed, padding).mean(1)
            return weights.clamp(min=torch.finfo(weights.dtype).tiny).log()

    def merged(self, x: Tensor, pairs: Pairs) -> Tensor:
        """Merge each pair into one token, ``(B, R, D)``."""
        parts = [gather_tokens(x, pairs.gone), gather_tokens(x, pairs.kept)]
        return self.merge(torch.cat(parts, -1))


class LearnedMergingEncoder(Encoder):
    r"""Repeated merging of pairs of tokens, chosen by a learned policy.

    Each layer merges ⌊p T / 2⌋ pairs of the T remaining tokens, each pair into

    .. math::
        \frac{x_i + x_j}{2} + P(i, j) \cdot \mathrm{MLP}([x_i; x_j])

    The pairs are chosen greedily by a softmax over all ordered pairs, each token at
    most once. P is the pair's probability among those remaining when it was chosen,
    so the policy learns by plain gradients. Cross-attention to the tokens before the
    merge follows. All layers share their weights; an encoding of the depth is added.
    At the end each slot holds the vector of the token that it was merged into.

    Source: Nair and Lieck, *Hierarchical Transformers*, section 3.1.2, and A.4 for the
    scaling by the probability. Differences from the source: nothing is sampled, not
    even in training, so that PPO's runner and learner agree; the mean is added, since
    one of T (T - 1) probabilities is small; the set keeps its size. Exact copies of a
    token may exchange their results, which does not affect an invariant head.

    Args:
        dim: D, the width of the vectors in and out.
        num_layers: number of applications of the layer.
        proportion: p, the fraction of the remaining tokens that merge in each layer; 1
            halves their number.
        num_heads: number of attention heads, a divisor of D.
        policy_heads: number of heads of the merging policy, a divisor of D.
        dim_ff: hidden width of the feed-forward part and of the merging MLP.
        dropout: probability in the feed-forward part, in [0, 1).
        attention: include a transformer block and the cross-attention.
        residual: add the pair's mean, as above.
    """

    def __init__(
        self,
        *,
        dim: Size = 8,
        num_layers: Repeats = 2,
        proportion: UnitInterval = 0.5,
        num_heads: Repeats = 1,
        policy_heads: Repeats = 1,
        dim_ff: Size = 32,
        dropout: Probability = 0.0,
        attention: bool = True,
        residual: bool = True,
    ) -> None:
        super().__init__()
        validate_heads("encoder.num_heads", num_heads, dim)
        validate_heads("encoder.policy_heads", policy_heads, dim)
        self.dim, self.num_layers = dim, num_layers
        self.proportion, self.residual = proportion, residual
        self.mixes_first = attention or proportion > 0
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
        # Encodings of the depth tell the shared layer where it is.
        self.timesteps: Tensor
        encodings = [timestep_encoding(depth + 1, dim) for depth in range(num_layers)]
        self.register_buffer("timesteps", torch.stack(encodings), persistent=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        slots = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        owner = slots  # the slot of the token that each token has been merged into
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
        """Apply the layer to the remaining tokens, in their slots."""
        x, logits = self.layer.transform(x, gone)
        counts = pair_counts(self.proportion, (~gone).sum(1))
        most = int(self.proportion * x.shape[1] / 2 + ROUNDING)
        pairs = choose_pairs(logits, most, counts, gone)
        # Scaling the results by the pairs' probability trains the policy.
        probability = pair_log_prob(logits, pairs, gone).exp()[..., None].to(x.dtype)
        vectors = probability * self.layer.merged(x, pairs)
        kept = gather_tokens(x, pairs.kept)
        if self.residual:
            vectors = vectors + (gather_tokens(x, pairs.gone) + kept) / 2
        # Put the results into the kept tokens' slots.
        change = (vectors - kept) * pairs.valid[..., None]
        new = x.scatter_add(1, pairs.kept[..., None].expand_as(change), change)
        if self.layer.refine is not None:
            new = self.layer.refine(new, x, gone)
        return new, pairs


def pair_counts(proportion: float, tokens: Tensor) -> Tensor:
    """Return ⌊p T / 2⌋ for int64 numbers of tokens T, without rounding errors."""
    return (proportion * tokens.double() / 2 + ROUNDING).floor().long()
