"""Token merging: the two most similar vectors become one, until one remains."""

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.kernels.functional import is_transformed
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.devices import may_read


class MergePooling(Pooling):
    r"""Repeated merging of the two vectors of largest cosine similarity.

    .. math::
        (i, j) = \arg\max_{i \ne j} \frac{x_i \cdot x_j}{|x_i|\,|x_j|}, \qquad
        x_i \leftarrow \frac{x_i + x_j}{2}, \quad \text{drop } x_j

    N - 1 times. A merged vector counts as one, however many it contains: many similar
    distractors soon weigh no more than a single unusual vector. The choice of the pair
    has no gradient. Ties in similarity are broken by content: the set is sorted first,
    so that the result is permutation invariant. Cost: N - 1 rounds of O(N²)
    similarities.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: the merging of Bolya et al. (2023), *Token Merging*,
    https://arxiv.org/abs/2210.09461, down to one vector. Differences from the source:
    it matches two halves of the sequence, which depends on the order, and weighs by
    size; here any two vectors may merge, one pair at a time.
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        # Break ties by content, not by position.
        order = lexicographic_order(x)
        x = x.gather(1, order[..., None].expand_as(x))
        alive = torch.ones_like(x[..., 0], dtype=torch.bool)
        if padding is not None:
            alive = ~padding.gather(1, order)
        count, slots = x.shape[1], torch.arange(x.shape[1], device=x.device)
        off_diagonal = ~torch.eye(count, dtype=torch.bool, device=x.device)
        for _ in range(count - 1):
            # Find the most similar pair among the remaining vectors.
            allowed = alive[:, :, None] & alive[:, None, :] & off_diagonal
            # `normalize` gives a zero vector a similarity of 0.
            unit = torch.nn.functional.normalize(x.detach(), dim=-1)
            similarity = (unit @ unit.mT).masked_fill(~allowed, -torch.inf)
            best = similarity.flatten(1).argmax(1, keepdim=True)
            first, second = best // count, best % count
            # In sets of more than one vector, put the mean into the first one's slot
            # and drop the second.
            unfinished = alive.sum(1, keepdim=True) > 1
            kept = (slots == first) & unfinished
            dropped = (slots == second) & unfinished
            pair = (kept | dropped).to(x.dtype)
            mean = (pair[:, None] @ x) / 2
            x = torch.where(kept[..., None], mean, x)
            alive = alive & ~dropped
        # A single vector remains, in any slot; an empty set gives zeros.
        return (alive.to(x.dtype)[:, None] @ x)[:, 0]


def lexicographic_order(x: Tensor) -> Tensor:
    """Return indices ``(B, N)`` that sort ``(B, N, D)`` by feature 0, then 1, ….

    A function of vectors in this order is permutation invariant to the bit: vectors
    that still tie are equal.
    """
    x = x.detach()
    order = x[..., 0].argsort(dim=1)
    if not is_transformed() and may_read(x):
        # One feature usually suffices. Function transforms do not allow this test, and
        # on a GPU it costs more than the sorts.
        first = x[..., 0].gather(1, order)
        if not (first[:, 1:] == first[:, :-1]).any():
            return order
    # Stable sorts, from the least to the most significant feature.
    for feature in reversed(x.unbind(-1)):
        order = order.gather(1, feature.gather(1, order).argsort(dim=1, stable=True))
    return order
