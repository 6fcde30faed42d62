"""Two-term estimator of a loss's gradient through sampled choices."""

from typing import Literal

from torch import Tensor

Credit = Literal["own", "batch"]


def surrogate(
    losses: Tensor, log_prob: Tensor, *, credit: Credit = "own", baseline: bool = False
) -> Tensor:
    r"""Compute a scalar whose gradient estimates that of the expected loss.

    .. math:: \frac{1}{B} \sum_b \mathrm{sg}(g_b) \log p(Y_b) + g_b

    with the losses g, the choices Y and the stop-gradient operator sg: REINFORCE
    (Williams, 1992) for the choices and the plain gradient for the rest. The value of
    the result is the mean loss, because sg(log p) is subtracted from log p.

    Source: Nair and Lieck, equations 3 and 4. Their implementation accumulates the
    gradients of log-probabilities over a batch and then scales the sum by the mean loss
    (section 3.1.5), so every sample is credited with the batch's loss. That is
    ``credit="batch"``, which is not an unbiased estimate of the gradient.

    Args:
        losses: ``(B,)``, loss g of each sample.
        log_prob: ``(B,)``, log-probability of each sample's choices.
        credit: weight of a sample's log-probability: its own loss or the batch's mean.
        baseline: subtract the mean loss of the other samples from a sample's own; the
            expectation stays the same for independent samples. The paper has none.
    """
    weight = losses.detach()
    if credit == "batch":
        weight = weight.mean().expand_as(weight)
    elif baseline and len(losses) > 1:
        # g_b - mean of the others = (g_b - mean) B / (B - 1).
        weight = (weight - weight.mean()) * (len(losses) / (len(losses) - 1))
    return (weight * (log_prob - log_prob.detach()) + losses).mean()
