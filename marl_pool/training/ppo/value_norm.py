"""Running normalization of value targets."""

import torch
from torch import Tensor, distributed, nn

DECAY = 0.99999
"""Weight of the past in the running means, as published."""
LEAST_VARIANCE = 1e-2
"""Lower limit of the variance, as published."""


class ValueNorm(nn.Module):
    r"""Running mean and standard deviation of value targets, to normalize values.

    .. math::
        \mu \leftarrow \beta \mu + (1 - \beta) \overline{R}, \quad
        m \leftarrow \beta m + (1 - \beta) \overline{R^2}, \quad
        d \leftarrow \beta d + (1 - \beta)

    The mean is :math:`\mu / d` and the variance :math:`\max(m / d - (\mu / d)^2,
    0.01)`. With :math:`\beta = 0.99999` they are close to the statistics of all batches
    so far. Until the first update values are unchanged.

    Source: ``ValueNorm`` of https://github.com/marlbenchmark/on-policy (Yu et al.,
    2022, https://arxiv.org/abs/2103.01955). Differences: it is updated once per batch,
    not in each minibatch of each epoch; and the value loss is as in RLlib's PPO, not a
    Huber loss clipped around the values recorded while sampling.
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
        """Add a batch of targets, of any shape, over all learners."""
        numbers = targets.double()
        # All in one tensor, so that learners exchange a single message.
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
            # The buffers are float32, as in RLlib's checkpoints.
            buffer.copy_(DECAY * buffer.double() + (1 - DECAY) * value)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation; 0 and 1 before the first update."""
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
