"""Base of the strategies of evolution: ask for a population, tell its fitness."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

State = dict[str, np.ndarray]
"""State of a strategy as arrays; a number is an array of no dimensions."""


class Strategy(ABC):
    """A search for the vector of parameters with the highest fitness.

    Its random numbers depend on the seed and the generation alone.

    Args:
        start: ``(n,)``, where the search begins.
        population: P, vectors of a generation, at least 2.
        seed: of the run.

    Raises:
        InputError: a population below 2.
    """

    def __init__(self, start: Tensor, *, population: int, seed: int) -> None:
        if population < 2:
            raise InputError(
                f"evolution.population: expected at least 2, got {population}"
            )
        self.size, self.population, self.seed = len(start), population, seed

    @abstractmethod
    def ask(self, generation: int) -> Tensor:
        """Draw a generation.

        Args:
            generation: its number, from 1.

        Returns:
            ``(P, n)`` float64.
        """

    @abstractmethod
    def tell(self, vectors: Tensor, fitness: Tensor) -> None:
        """Learn from a generation.

        Args:
            vectors: as `ask` drew them.
            fitness: ``(P,)`` float64 of each, the higher the better.
        """

    @property
    @abstractmethod
    def favourite(self) -> Tensor:
        """The middle of the distribution that is searched, ``(n,)`` float64."""

    @property
    @abstractmethod
    def step_size(self) -> float:
        """Standard deviation of the next generation."""

    @abstractmethod
    def state_dict(self) -> State:
        """All that is needed, between two generations, to continue exactly."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue where ``state`` was taken from a strategy made alike."""

    def gaussian(self, generation: int, rows: int, first: int = 0) -> Tensor:
        """Draw ``(rows, n)`` numbers, normal and independent, in float64.

        Args:
            generation: whose they are.
            rows: how many vectors.
            first: number of the first row among those of the generation.
        """
        numbers = torch.arange(first, first + rows)
        generations = torch.full_like(numbers, generation)
        keys = stream_keys(self.seed, numbers, generations, Purpose.SEARCH)
        return torch.special.ndtri(uniform(keys, self.size))
