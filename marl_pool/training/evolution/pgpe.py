"""Parameter-exploring policy gradients."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from marl_pool.training.evolution.strategy import State, Strategy
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
)

BETA, EPSILON = 0.999, 1e-8
"""Decay of Adam's running mean of squares."""
TENSORS = ("mean", "std", "slope", "squares")
"""Its state, besides the number of its steps."""
LARGEST_CHANGE = 0.2
"""Largest change of a standard deviation in one generation, as a share of it."""


class PGPE(Strategy):
    r"""Follow the gradient of the expected fitness of a normal distribution.

    .. math::
        \nabla_\mu = \frac{1}{P} \sum_i (u_i^+ - u_i^-) \frac{\epsilon_i}{\sigma}

    over mirrored pairs :math:`\mu \pm \sigma \epsilon_i`. The mean moves by Adam.

    Source: Sehnke et al., Parameter-exploring policy gradients (2010), symmetric
    sampling (section 3.2). Where we differ: :math:`u` is the fitness's rank, centred
    and in [-1/2, 1/2] (Salimans et al., 2017), the mean moves by Adam, and a standard
    deviation changes by a fifth in a generation, at most.

    Args:
        start: ``(n,)``, the first mean.
        population: P, vectors of a generation, an even number.
        lr: step of Adam, in units of the parameters.
        lr_decay: the k-th generation's step is ``lr / (1 + lr_decay · k)``, k from 0.
        momentum: Adam's first decay rate.
        std: the first standard deviation, of every parameter.
        std_lr: how fast each parameter's standard deviation follows its own gradient;
            0 leaves it alone.
        std_decay: standard deviations shrink as the step does by ``lr_decay``.
        std_floor: the smallest standard deviation.
        mean_decay: share of the mean that is lost in each generation: weight decay.
        seed: of the run.

    Raises:
        InputError: an odd population.
    """

    def __init__(
        self,
        start: Tensor,
        *,
        population: PositiveInt = 256,
        lr: PositiveFloat = 0.05,
        lr_decay: NonNegativeFloat = 0.0,
        momentum: Probability = 0.9,
        std: PositiveFloat = 0.1,
        std_lr: NonNegativeFloat = 0.0,
        std_decay: NonNegativeFloat = 0.0,
        std_floor: NonNegativeFloat = 0.0,
        mean_decay: Probability = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(start, population=population, seed=seed)
        if population % 2:
            raise InputError(
                "evolution.population: expected an even number, since vectors come in "
                f"mirrored pairs, got {population}"
            )
        self.lr, self.lr_decay, self.momentum = lr, lr_decay, momentum
        self.std_lr, self.std_decay, self.std_floor = std_lr, std_decay, std_floor
        self.mean_decay = mean_decay
        self.mean = start.detach().double().clone()
        self.std = torch.full_like(self.mean, std)
        self.slope = torch.zeros_like(self.mean)
        self.squares = torch.zeros_like(self.mean)
        self.count = 0

    def ask(self, generation: int) -> Tensor:
        """Draw mirrored pairs; see `Strategy.ask`."""
        steps = self.gaussian(generation, self.population // 2) * self.std
        return torch.cat((self.mean + steps, self.mean - steps))

    def tell(self, vectors: Tensor, fitness: Tensor) -> None:
        """Move mean and standard deviations; see `Strategy.tell`."""
        pairs = self.population // 2
        steps = (vectors[:pairs] - vectors[pairs:]) / (2 * self.std)
        plus, minus = centred_ranks(fitness).chunk(2)
        self._move((plus - minus) / 2 @ steps / pairs / self.std)
        spread = (plus + minus) / 2 @ (steps.square() - 1) / pairs
        change = (self.std_lr * spread).clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
        k = self.count
        shrunk = (1 + self.std_decay * (k - 1)) / (1 + self.std_decay * k)
        self.std = (self.std * (1 + change) * shrunk).clamp(min=self.std_floor)

    @property
    def favourite(self) -> Tensor:
        """The mean."""
        return self.mean

    @property
    def step_size(self) -> float:
        """Mean standard deviation of the parameters."""
        return float(self.std.mean())

    def state_dict(self) -> State:
        """Mean, standard deviations and Adam's memory."""
        state = {name: getattr(self, name).numpy().copy() for name in TENSORS}
        return {**state, "count": np.array(self.count)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue where ``state`` was taken."""
        for name in TENSORS:
            setattr(self, name, torch.from_numpy(np.array(state[name])))
        self.count = int(state["count"])

    def _move(self, gradient: Tensor) -> None:
        """One step of Adam uphill."""
        lr = self.lr / (1 + self.lr_decay * self.count)
        self.count += 1
        self.slope = self.slope.lerp(gradient, 1 - self.momentum)
        self.squares = self.squares.lerp(gradient.square(), 1 - BETA)
        slope = self.slope / (1 - self.momentum**self.count)
        size = (self.squares / (1 - BETA**self.count)).sqrt() + EPSILON
        self.mean = (self.mean + lr * slope / size) * (1 - self.mean_decay)


def centred_ranks(fitness: Tensor) -> Tensor:
    """Ranks from -1/2 (worst) to 1/2 (best); equals share the mean of theirs."""
    below = (fitness[:, None] > fitness).sum(1)
    equal = (fitness[:, None] == fitness).sum(1)
    ranks = below + (equal - 1) / 2
    return ranks.double() / (len(fitness) - 1) - 0.5
