"""What the student's hidden layer says of what the teacher knows."""

import torch
from torch import Tensor, nn

from marl_pool.networks import seeded


class HintReader(nn.Module):
    """A linear function of the student's hidden layer, that is to give the hints.

    To learn it the student has to work out what the teacher's answers depend on, which
    the answers alone say little of. When the student plays it is not there.

    Source: auxiliary targets that are known in training only, as in Lample and
    Chaplot, Playing FPS games with deep reinforcement learning (2017), section 3.2.

    Args:
        width: H, of the hidden layer.
        count: K, of hints.
        seed: of the initial weights.
    """

    def __init__(self, width: int, count: int, seed: int | None = None) -> None:
        super().__init__()
        with seeded(seed, "hints"):
            self.linear = nn.Linear(width, count)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hints ``(B, T, K)`` from hidden layers ``(B, T, H)``."""
        # In full precision: half of it would move a place by a pixel.
        hints: Tensor = self.linear(hidden.to(self.linear.weight.dtype))
        return hints


def hint_errors(read: Tensor, hints: Tensor, valid: Tensor) -> Tensor:
    """Squared errors ``(B, T)``, the mean over the hints.

    Args:
        read: ``(B, T, K)`` of the reader.
        hints: ``(B, T, K)`` of the teacher; NaN is not known, and counts nothing.
        valid: ``(B, T)`` bool, False where a step counts nothing.
    """
    unknown = hints.isnan()
    # Not masked afterwards: the gradient of a square of NaN is NaN.
    error = torch.where(unknown, 0.0, read - hints.nan_to_num())
    return error.square().mean(-1).masked_fill(~valid, 0.0)
