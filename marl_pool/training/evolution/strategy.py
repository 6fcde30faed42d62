"""Base of the evolution strategies, with the ask-and-tell interface."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from marl_pool.options.types import AtMost
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

PopulationSize = Annotated[int, Field(ge=2), AtMost(1 << 20)]
State = dict[str, np.ndarray]
"""State of a strategy as arrays by name; a number is a 0-dimensional array."""


class Strategy(ABC):
    """Search for the vector of parameters with the highest fitness.

    Random numbers depend only on the seed and the generation.

    Args:
        start: ``(n,)``, the start of the search.
        population: P, the number of vectors in a generation, at least 2.
        seed: random seed of the run.
    """

    def __init__(self, start: Tensor, *, population: int, seed: int) -> None:
        self.size, self.population, self.seed = len(start), population, seed

    @abstractmethod
    def ask(self, generation: int) -> Tensor:
        """Sample the vectors of a generation.

        Args:
            generation: number of the generation, from 1.

        Returns:
            ``(P, n)`` float64.
        """

    @abstractmethod
    def tell(self, vectors: Tensor, fitness: Tensor) -> None:
        """Adapt the search distribution to the fitness of a generation.

        Args:
            vectors: ``(P, n)``, as returned by `ask`.
            fitness: ``(P,)`` float64; higher is better.
        """

    @property
    @abstractmethod
    def center(self) -> Tensor:
        """Center of the search distribution, its mean, ``(n,)`` float64."""

    @property
    @abstractmethod
    def step_size(self) -> float:
        """Standard deviation of the next generation, the mean over parameters.

        CMA-ES returns its step size σ, without the scale of its covariance.
        """

    @abstractmethod
    def state_dict(self) -> State:
        """Return the state between two generations, for an exact resume."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the state of a strategy with the same arguments."""

    def gaussian(self, generation: int, rows: int, first: int = 0) -> Tensor:
        """Sample ``(rows, n)`` standard normal numbers in float64.

        Args:
            generation: number of the generation, the key of the random stream.
            rows: number of vectors.
            first: number of the first row in the generation.
        """
        numbers = torch.arange(first, first + rows)
        generations = torch.full_like(numbers, generation)
        keys = stream_keys(self.seed, numbers, generations, Purpose.SEARCH)
        return torch.special.ndtri(uniform(keys, self.size))
