"""Gated attention: a score for each vector by itself."""

import torch
from torch import Tensor, nn

from marl_pool.pooling.base import Pooling
from marl_pool.utils.types import PositiveInt


class GatedAttentionPooling(Pooling):
    """Weighted mean by scores that a gated layer gives each vector.

    ``y = Σ_i softmax_i(w · (tanh(V x_i) ⊙ σ(U x_i))) x_i``. There is no query: a
    vector's score depends on the others through the softmax only.

    Source: Ilse, Tomczak and Welling (2018), *Attention-based Deep Multiple Instance
    Learning*, equations 7 and 9. For an empty set the result is zero.

    Args:
        dim: D, the width of the vectors.
        hidden: width of the gated layer; None means D.
    """

    def __init__(self, dim: int, *, hidden: PositiveInt | None = None) -> None:
        super().__init__(dim)
        hidden = hidden or dim
        self.content = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden)
        # A bias would shift all scores alike, which a softmax does not feel.
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        return (self._weights(x, padding)[:, None] @ x)[:, 0]

    def weights(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Return the softmax's weights, ``(B, 1, N)``."""
        x, padding, _ = self.prepare(x, padding, types)
        return self._weights(x, padding)[:, None]

    def _weights(self, x: Tensor, padding: Tensor | None) -> Tensor:
        gated = torch.tanh(self.content(x)) * torch.sigmoid(self.gate(x))
        scores = self.score(gated)[..., 0]
        if padding is None:
            return scores.softmax(1)
        lowest = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(padding, lowest).softmax(1)
        return weights.masked_fill(padding, 0.0)
