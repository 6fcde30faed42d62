"""Parameter-exploring policy gradients."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.options.types import NonNegativeFloat, PositiveFloat, Probability
from marl_pool.training.evolution.strategy import PopulationSize, State, Strategy
from marl_pool.utils.errors import InputError

BETA, EPSILON = 0.999, 1e-8
"""Adam's second decay rate, and the constant added to its denominator."""
TENSORS = ("mean", "std", "slope", "squares")
"""Attributes of the state, besides the number of steps."""
LARGEST_CHANGE = 0.2
"""Largest relative change of a standard deviation in one generation."""


class PGPE(Strategy):
    r"""Follow the gradient of the expected fitness of a normal distribution.

    .. math::
        \nabla_\mu = \frac{1}{2 P} \sum_i (u_i^+ - u_i^-) \frac{\epsilon_i}{\sigma}

    over P mirrored pairs :math:`\mu \pm \sigma \epsilon_i` with utilities :math:`u`.

    Source: Sehnke et al., Parameter-exploring policy gradients, Neural Networks 23
    (2010), symmetric sampling (section 3.2). Differences: :math:`u` is the centered
    rank of the fitness, in [-1/2, 1/2], as in Salimans et al. (2017),
    https://arxiv.org/abs/1703.03864; the mean moves by Adam; and a standard deviation
    changes by at most a fifth in a generation.

    Args:
        start: ``(n,)``, the initial mean.
        population: number of vectors in a generation, even.
        lr: learning rate of Adam, in units of the parameters.
        lr_decay: decay of the learning rate, ``lr / (1 + lr_decay · k)`` in the k-th
            generation, k from 0.
        momentum: Adam's first decay rate.
        std: initial standard deviation of every parameter.
        std_lr: learning rate of the parameters' standard deviations; 0 keeps them.
        std_decay: decay of the standard deviations, by the formula of ``lr_decay``.
        std_floor: smallest standard deviation.
        seed: random seed of the run.

    Raises:
        InputError: an odd population, or a ``std`` below ``std_floor``.
    """

    def __init__(
        self,
        start: Tensor,
        *,
        population: PopulationSize = 256,
        lr: PositiveFloat = 0.05,
        lr_decay: NonNegativeFloat = 0.0,
        momentum: Probability = 0.9,
        std: PositiveFloat = 0.1,
        std_lr: NonNegativeFloat = 0.0,
        std_decay: NonNegativeFloat = 0.0,
        std_floor: NonNegativeFloat = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(start, population=population, seed=seed)
        if population % 2:
            raise InputError(
                "evolution.population: expected an even number, since vectors come in "
                f"mirrored pairs, got {population}"
            )
        if std < std_floor:
            raise InputError(
                f"evolution.std: expected at least evolution.std_floor, {std_floor:g}, "
                f"got {std:g}"
            )
        self.lr, self.lr_decay, self.momentum = lr, lr_decay, momentum
        self.std_lr, self.std_decay, self.std_floor = std_lr, std_decay, std_floor
        self.mean = start.detach().double().clone()
        self.std = torch.full_like(self.mean, std)
        # Moments of Adam.
        self.slope = torch.zeros_like(self.mean)
        self.squares = torch.zeros_like(self.mean)
        self.count = 0

    @override
    def ask(self, generation: int) -> Tensor:
        steps = self.gaussian(generation, self.population // 2) * self.std
        return torch.cat((self.mean + steps, self.mean - steps))

    @override
    def tell(self, vectors: Tensor, fitness: Tensor) -> None:
        # Recover the steps of the mirrored pairs, in standard deviations.
        pairs = self.population // 2
        steps = (vectors[:pairs] - vectors[pairs:]) / (2 * self.std)
        # Move the mean by Adam along the difference of the two utilities of a pair.
        plus, minus = centered_ranks(fitness).chunk(2)
        gradient = (plus - minus) / 2 @ steps / pairs / self.std
        lr = self.lr / (1 + self.lr_decay * self.count)
        self.count += 1
        self.slope = self.slope.lerp(gradient, 1 - self.momentum)
        self.squares = self.squares.lerp(gradient.square(), 1 - BETA)
        # Correct the moments for their start at 0.
        slope = self.slope / (1 - self.momentum**self.count)
        size = (self.squares / (1 - BETA**self.count)).sqrt() + EPSILON
        self.mean = self.mean + lr * slope / size
        # Widen the parameters whose large steps were good, and narrow the others.
        # The log-density's derivative by the log of the deviation is ε² - 1.
        spread = (plus + minus) / 2 @ (steps.square() - 1) / pairs
        change = (self.std_lr * spread).clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
        k = self.count
        # The ratio of two successive values of 1 / (1 + decay k).
        shrunk = (1 + self.std_decay * (k - 1)) / (1 + self.std_decay * k)
        self.std = (self.std * (1 + change) * shrunk).clamp(min=self.std_floor)

    @property
    @override
    def center(self) -> Tensor:
        return self.mean

    @property
    @override
    def step_size(self) -> float:
        return float(self.std.mean())

    @override
    def state_dict(self) -> State:
        state = {name: getattr(self, name).numpy().copy() for name in TENSORS}
        return {**state, "count": np.array(self.count)}

    @override
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        for name in TENSORS:
            setattr(self, name, torch.from_numpy(np.array(state[name])))
        self.count = int(state["count"])


def centered_ranks(fitness: Tensor) -> Tensor:
    """Rank fitnesses ``(n,)`` from -1/2, worst, to 1/2; equal ones share the mean."""
    ordered = fitness.sort().values
    below = torch.searchsorted(ordered, fitness)
    not_above = torch.searchsorted(ordered, fitness, right=True)
    ranks = (below + not_above - 1) / 2
    return ranks.double() / (len(fitness) - 1) - 0.5
