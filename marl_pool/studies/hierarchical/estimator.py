"""The two-term estimator of a loss's gradient through sampled choices."""

from typing import Literal

from torch import Tensor

from marl_pool.utils.errors import InputError
from marl_pool.utils.names import unknown

Credit = Literal["own", "batch"]
CREDITS = ("own", "batch")


def check_credit(credit: Credit, baseline: bool) -> None:
    """Refuse an unknown credit, or a baseline where all samples get the same.

    Raises:
        InputError: so it is.
    """
    if credit not in CREDITS:
        raise unknown("task.credit", credit, CREDITS)
    if baseline and credit == "batch":
        raise InputError(
            "task.baseline: expected false with task.credit=batch, where every sample "
            "has the same loss, got true"
        )


def surrogate(
    losses: Tensor, log_prob: Tensor, *, credit: Credit = "own", baseline: bool = False
) -> Tensor:
    """A scalar whose gradient estimates that of the expected loss.

    ``mean_b [ sg(g_b) log p(Y_b) + g_b ]``: REINFORCE for the choices Y and the plain
    gradient for the rest. Its value, which is logged, is the mean loss: log p is
    counted less itself without a gradient.

    Source: Nair and Lieck, equations 3 and 4. Their implementation accumulates the
    gradients of log-probabilities over a batch and scales the sum by the loss
    afterwards (section 3.1.5), so every sample is credited with the batch's: that is
    ``credit="batch"``, and no estimate of the gradient.

    Args:
        losses: g, ``(B,)``.
        log_prob: ``(B,)``.
        credit: weigh a sample's log-probability by its own loss or by the mean.
        baseline: subtract the mean loss of the others from a sample's own. Where rows
            are independent it changes no expectation. The paper has none.
    """
    weight = losses.detach()
    if credit == "batch":
        weight = weight.mean().expand_as(weight)
    elif baseline and len(losses) > 1:
        # g_b - mean of the others = (g_b - mean) B / (B - 1).
        weight = (weight - weight.mean()) * (len(losses) / (len(losses) - 1))
    return (weight * (log_prob - log_prob.detach()) + losses).mean()
