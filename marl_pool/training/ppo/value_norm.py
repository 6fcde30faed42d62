"""Running normalization of value targets."""

import torch
from torch import Tensor, distributed, nn

DECAY = 0.99999
"""Weight of the past in a running mean, as published."""
LEAST_VARIANCE = 1e-2
"""Lower limit of the variance, as published."""


class ValueNorm(nn.Module):
    r"""Running mean and deviation of value targets, in whose units a critic predicts.

    .. math::
        \mu \leftarrow \beta \mu + (1 - \beta) \overline{R}, \quad
        m \leftarrow \beta m + (1 - \beta) \overline{R^2}, \quad
        d \leftarrow \beta d + (1 - \beta)

    The mean is :math:`\mu / d` and the variance :math:`\max(m / d - (\mu / d)^2,
    0.01)`. With :math:`\beta = 0.99999` it is close to the mean over all batches so
    far. Until the first update it is the identity.

    Source: ``ValueNorm`` of https://github.com/marlbenchmark/on-policy (Yu et al.,
    2022, https://arxiv.org/abs/2103.01955). Differences: it is updated once a batch,
    not in each minibatch of each epoch; and the loss of the values is PPO's of RLlib,
    where theirs is a Huber loss that is clipped around the values of the sampler.
    """

    mean_sum: Tensor
    square_sum: Tensor
    debias: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean_sum", "square_sum", "debias"):
            self.register_buffer(name, torch.zeros(()))

    @torch.no_grad()
    def update(self, targets: Tensor) -> None:
        """Add a batch of targets, of any shape; learners in step add up theirs."""
        numbers = targets.double()
        sums = torch.stack(
            [numbers.sum(), numbers.square().sum(), numbers.new_tensor(numbers.numel())]
        )
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(sums)
        total, squares, count = sums
        for buffer, value in (
            (self.mean_sum, total / count),
            (self.square_sum, squares / count),
            (self.debias, torch.ones_like(count)),
        ):
            # RLlib's checkpoints have float32, so the buffers have no more digits.
            buffer.copy_(DECAY * buffer.double() + (1 - DECAY) * value)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and deviation, scalars; 0 and 1 before the first update."""
        is_new = self.debias == 0
        debias = torch.where(is_new, 1.0, self.debias.double())
        mean = self.mean_sum / debias
        variance = self.square_sum / debias - mean.square()
        deviation = variance.clamp(min=LEAST_VARIANCE).sqrt()
        return mean, torch.where(is_new, 1.0, deviation)

    def normalize(self, values: Tensor) -> Tensor:
        """Convert values from the units of the rewards."""
        mean, deviation = self.statistics()
        return ((values - mean) / deviation).to(values.dtype)

    def denormalize(self, values: Tensor) -> Tensor:
        """Convert values to the units of the rewards."""
        mean, deviation = self.statistics()
        return (values * deviation + mean).to(values.dtype)
