"""Learned queries (PMA, Hopfield), gated attention, and the class token."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.transformer import AttentionBlock
from marl_pool.kernels.attention import AttentionScale, validate_heads
from marl_pool.kernels.functional import masked_softmax, split_heads
from marl_pool.options.types import (
    Extent,
    PositiveFloat,
    Repeats,
    RepeatsOrZero,
    Size,
)
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


class PMAPooling(Pooling):
    r"""Attention from k learned seeds to the set, with concatenated results.

    .. math::
        \mathrm{PMA}_k(X) = \mathrm{MAB}(S, \mathrm{rFF}(X)), \qquad
        \mathrm{MAB}(S, Z) = \mathrm{LN}(H + \mathrm{rFF}(H)), \qquad
        H = \mathrm{LN}(S + \mathrm{Attention}(S, Z, Z))

    S holds the seeds, ``(k, D)``; rFF is a linear layer with ReLU on each vector. The
    seeds do not depend on the set, unlike the query of `AdaPooling`.

    Shapes: ``(B, N, D)`` to ``(B, k D)``; zero for an empty set.

    Source: Lee et al. (2019), *Set Transformer*, https://arxiv.org/abs/1810.00825,
    equations 6 and 7 and section 3.2. The published code differs from the text: no rFF
    on the set, the residual from the projected seeds, no output projection, biases, and
    no LayerNorm by default.

    Example:
        >>> pool = PMAPooling(8, num_seeds=2, num_heads=4)
        >>> x = torch.randn(3, 10, 8)
        >>> pool(x).shape
        torch.Size([3, 16])
        >>> pool.weights(x).shape
        torch.Size([3, 4, 10])

    Args:
        num_seeds: k, the number of seeds.
        num_heads: number of heads, a divisor of D.
        layer_norm: normalize as above.
        attention_scale: divide scores by the square root of the model or head width.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: Extent,
        *,
        num_seeds: Size = 1,
        num_heads: Repeats = 1,
        layer_norm: bool = True,
        attention_scale: AttentionScale = "model",
    ) -> None:
        super().__init__(dim)
        validate_heads("pooling.num_heads", num_heads, dim)
        self.dim_out = num_seeds * dim
        # A policy too large for its file is rejected before numbers take memory.
        self.learned_query = nn.Parameter(torch.empty(num_seeds, dim))
        nn.init.normal_(self.learned_query)
        self.feedforward = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())
        self.block = AttentionBlock(dim, num_heads, layer_norm, attention_scale)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        pooled = self.block(self._seeds(x), self.feedforward(x), padding).flatten(1)
        if padding is not None:
            pooled = pooled.masked_fill(padding.all(1, keepdim=True), 0.0)
        return pooled

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        """Return the attention weights, averaged over seeds, ``(B, heads, N)``."""
        x, padding, _ = self.prepare(x, padding, types)
        attention = self.block.attention
        return attention.weights(self._seeds(x), self.feedforward(x), padding).mean(2)

    def _seeds(self, x: Tensor) -> Tensor:
        return self.learned_query.to(x.dtype).expand(x.shape[0], -1, -1)


class GatedAttentionPooling(Pooling):
    r"""Weighted mean, with scores of the vectors from a gated layer.

    .. math::
        y = \sum_i a_i x_i, \qquad
        a = \mathrm{softmax}_i\left(
            w^\top (\tanh(V x_i) \odot \sigma(U x_i))\right)

    There is no query: a vector's score depends on that vector alone, and the others
    only enter through the softmax's denominator.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Ilse, Tomczak and Welling (2018), *Attention-based Deep Multiple Instance
    Learning*, https://arxiv.org/abs/1802.04712, equations 7 and 9. V and U have biases
    here.

    Args:
        hidden: width of the gated layer; None means D.
    """

    def __init__(self, dim: Extent, *, hidden: Size | None = None) -> None:
        super().__init__(dim)
        hidden = hidden or dim
        self.content = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden)
        # A bias would shift all scores alike, and the softmax would cancel it.
        self.score = nn.Linear(hidden, 1, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return (self._weights(x, padding)[:, None] @ x)[:, 0]

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        x, padding, _ = self.prepare(x, padding, types)
        return self._weights(x, padding)[:, None]

    def _weights(self, x: Tensor, padding: Mask) -> Tensor:
        gated = torch.tanh(self.content(x)) * torch.sigmoid(self.gate(x))
        return masked_softmax(self.score(gated)[..., 0], padding)


class HopfieldPooling(Pooling):
    r"""Retrieval from a modern Hopfield network with the vectors as stored patterns.

    For each head, a learned state pattern s is updated and then reads the values:

    .. math::
        \xi \leftarrow \mathrm{softmax}(\beta\, \xi K^\top) K, \qquad
        y = W_O\, \mathrm{softmax}(\beta\, \xi K^\top) V

    with :math:`K = \mathrm{LN}(x) W_K`, :math:`V = K W_V` and initially
    :math:`\xi = \mathrm{LN}(s) W_Q`. Without updates this is attention from a learned
    query.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Ramsauer et al. (2021), *Hopfield Networks is All You Need*,
    https://arxiv.org/abs/2008.02217, equations 3 and 10 and section 3. Differences from
    the published code: a fixed number of updates, one by default, instead of a
    threshold and none, so that a set's result does not depend on the other sets of its
    batch; and values are projected keys, as in the equation, where the code's default
    projects the inputs.

    Args:
        num_heads: number of heads, a divisor of D.
        num_updates: number of updates of the state before it reads the values.
        beta: the inverse temperature; None means 1/√(D / heads). A large one retrieves
            a single vector, a small one the mean of all.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: Extent,
        *,
        num_heads: Repeats = 1,
        num_updates: RepeatsOrZero = 1,
        beta: PositiveFloat | None = None,
    ) -> None:
        super().__init__(dim)
        validate_heads("pooling.num_heads", num_heads, dim)
        self.num_heads, self.num_updates = num_heads, num_updates
        self.beta = (dim // num_heads) ** -0.5 if beta is None else beta
        self.learned_query = nn.Parameter(torch.randn(dim))
        self.norm_state = nn.LayerNorm(dim)
        self.norm_stored = nn.LayerNorm(dim)
        self.to_query = nn.Linear(dim, dim, bias=False)
        self.to_key = nn.Linear(dim, dim, bias=False)
        self.to_value = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        stored = self.to_key(self.norm_stored(x))
        weights = self._retrieve(stored, padding)
        values = split_heads(self.to_value(stored), self.num_heads)
        return self.to_out((weights @ values).flatten(1))

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        """Return the weights of the last retrieval, ``(B, heads, N)``."""
        x, padding, _ = self.prepare(x, padding, types)
        stored = self.to_key(self.norm_stored(x))
        return self._retrieve(stored, padding)[:, :, 0]

    def _retrieve(self, stored: Tensor, padding: Mask) -> Tensor:
        """Return the weights ``(B, heads, 1, N)`` after all updates."""
        keys = split_heads(stored, self.num_heads)
        state = self.to_query(self.norm_state(self.learned_query.to(stored.dtype)))
        state = split_heads(state.expand(stored.shape[0], 1, -1), self.num_heads)
        # Move the state towards the stored patterns, then retrieve.
        for _ in range(self.num_updates):
            state = self._attend(state, keys, padding) @ keys
        return self._attend(state, keys, padding)

    def _attend(self, state: Tensor, keys: Tensor, padding: Mask) -> Tensor:
        ignore = None if padding is None else padding[:, None, None]
        return masked_softmax(state @ keys.mT * self.beta, ignore)
