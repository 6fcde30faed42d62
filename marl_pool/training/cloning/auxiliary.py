"""The auxiliary head: privileged targets from the student's hidden layer."""

import torch
from torch import Tensor, nn

from marl_pool.networks import seeded


class AuxiliaryHead(nn.Module):
    """Predict the teacher's privileged targets from the student's hidden layer.

    A linear layer, trained along with the student and dropped afterwards. It makes the
    student represent the state that the teacher's actions depend on, which the actions
    alone reveal slowly.

    Source: auxiliary targets known in training only, as in Lample and Chaplot, Playing
    FPS games with deep reinforcement learning (2017), section 3.2,
    https://arxiv.org/abs/1609.05521.

    Args:
        width: H, of the hidden layer.
        count: K, number of targets.
        seed: of the initial weights.
    """

    def __init__(self, width: int, count: int, seed: int | None = None) -> None:
        super().__init__()
        with seeded(seed, "hints"):  # the name of a random stream: another changes it
            self.linear = nn.Linear(width, count)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden layers ``(B, T, H)`` to predictions ``(B, T, K)``."""
        # Full precision: bfloat16 would move a position by a pixel.
        predicted: Tensor = self.linear(hidden.to(self.linear.weight.dtype))
        return predicted


def auxiliary_errors(predicted: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Compute squared errors ``(B, T)``, averaged over the targets.

    Args:
        predicted: ``(B, T, K)``.
        targets: ``(B, T, K)``; NaN is unknown and has no error.
        valid: ``(B, T)`` bool; steps that are not valid have no error.
    """
    unknown = targets.isnan()
    # Replace NaN before the square: masking afterwards leaves a NaN gradient.
    error = torch.where(unknown, 0.0, predicted - targets.nan_to_num())
    return error.square().mean(-1).masked_fill(~valid, 0.0)
