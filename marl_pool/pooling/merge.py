"""Token merging: the two most alike become one, until one is left."""

import torch
from torch import Tensor

from marl_pool.kernels.transforms import is_transformed
from marl_pool.pooling.base import Pooling


class MergePooling(Pooling):
    """Merge the two vectors of largest cosine similarity into their mean, N - 1 times.

    A merged vector counts as one, whatever it was made of: many distractors that look
    alike soon weigh no more than a single vector that is like no other. (With means
    weighted by size the last vector would be the plain average.)

    Source: the merging of Bolya et al. (2023), *Token Merging*, down to one vector.
    Where we differ: theirs matches two halves of the sequence, which depends on the
    order, and weighs by size; here any two may merge, one pair at a time. Which two
    they are has no gradient. Cost: N - 1 rounds of O(N²) similarities. For an empty
    set the result is zero. Of pairs that are exactly as much alike, as among vectors
    at right angles, the content decides: first the set is sorted by its first feature,
    ties by the second, and so on. Copies of a vector merge into themselves and do no
    harm; its multiples are as much like it as copies are.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        order = lexicographic_order(x)
        x = x.gather(1, order[..., None].expand_as(x))
        alive = torch.ones_like(x[..., 0], dtype=torch.bool)
        if padding is not None:
            alive = ~padding.gather(1, order)
        count, places = x.shape[1], torch.arange(x.shape[1], device=x.device)
        apart = ~torch.eye(count, dtype=torch.bool, device=x.device)
        for _ in range(count - 1):
            pairs = alive[:, :, None] & alive[:, None, :] & apart
            likeness = _cosine(x.detach()).masked_fill(~pairs, -torch.inf)
            best = likeness.flatten(1).argmax(1, keepdim=True)
            first, second = best // count, best % count
            going = alive.sum(1, keepdim=True) > 1
            kept = (places == first) & going
            lost = (places == second) & going
            pair = (kept | lost).to(x.dtype)
            mean = (pair[:, None] @ x) / 2
            x = torch.where(kept[..., None], mean, x)
            alive = alive & ~lost
        return (alive.to(x.dtype)[:, None] @ x)[:, 0]


def lexicographic_order(x: Tensor) -> Tensor:
    """Return places ``(B, N)`` that sort ``(B, N, D)`` by feature 0, then 1, ….

    Whatever is computed from vectors in this order is permutation invariant, to the
    bit: vectors that still tie are equal.
    """
    x = x.detach()
    order = x[..., 0].argsort(dim=1)
    if not is_transformed():
        # Mostly one feature is enough, which a transform may not ask.
        first = x[..., 0].gather(1, order)
        if not (first[:, 1:] == first[:, :-1]).any():
            return order
    # Stable sorts by the least important feature first.
    for feature in reversed(x.unbind(-1)):
        order = order.gather(1, feature.gather(1, order).argsort(dim=1, stable=True))
    return order


def _cosine(x: Tensor) -> Tensor:
    """Similarities ``(B, N, N)``; a zero vector is like no other."""
    unit = torch.nn.functional.normalize(x, dim=-1)
    return unit @ unit.transpose(1, 2)
