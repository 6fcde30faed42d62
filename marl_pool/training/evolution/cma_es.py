"""CMA-ES, by the package `cma`."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

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

FULL_UP_TO = 3000
"""Parameters up to which ``diagonal="auto"`` learns a full covariance: ask and tell
take a second with 2500, and time and memory grow with the square and more."""
PARTS = ("sm", "sigma_vec", "adapt_sigma")
"""Parts of cma's strategy whose numbers are its state: covariance, scaling, step."""
OWN = (
    *("sigma", "mean", "mean_after_tell", "mean_old", "pc", "pc2", "pc_neg"),
    *("countiter", "countevals"),
    *("_isotropic_mean_shift", "_isotropic_mean_shift_iteration"),
)
"""Its own numbers that the next generation depends on."""
MARKS = ("_lam", "_mueff")
"""Numbers that say for which population a sampler has computed its constants."""
INJECTED = "pop_injection_directions"
"""Directions that it will try next, as two-point step-size adaptation does."""
MIRRORS = "_indices_of_selective_mirrors"
"""Which of them are mirrors, as tiny populations have them; they are not mirrored back.
"""


class CMAES(Strategy):
    """Covariance matrix adaptation.

    Source: Hansen, The CMA evolution strategy: a tutorial (2016), as the package
    ``cma`` has it, with its own defaults. Random numbers are ours: they depend on the
    seed and the generation alone.

    Args:
        start: ``(n,)``, the first mean.
        population: P, vectors of a generation, at least 2.
        sigma0: the first step size, a standard deviation.
        sigma_floor: the smallest step size; a search that is let converge on a noisy
            fitness stops too early.
        diagonal: learn only the covariance's diagonal; auto: for many parameters
            (`FULL_UP_TO`).
        mean_lr: learning rate of the mean (``CMA_cmean``), in (0, 1]: below 1 for a
            noisy fitness.
        mean_decay: share of the mean that is lost in each generation: weight decay.
        seed: of the run.

    Raises:
        InputError: a population below 2, or too small for so many parameters, or a
            learning rate above 1.
    """

    def __init__(
        self,
        start: Tensor,
        *,
        population: PositiveInt = 256,
        sigma0: PositiveFloat = 0.1,
        sigma_floor: NonNegativeFloat = 0.0,
        diagonal: Literal["auto"] | bool = "auto",
        mean_lr: PositiveFloat = 1.0,
        mean_decay: Probability = 0.0,
        seed: int = 0,
    ) -> None:
        import cma
        from cma.sigma_adaptation import CMAAdaptSigmaTPA

        super().__init__(start, population=population, seed=seed)
        self.sigma_floor, self.mean_decay = sigma_floor, mean_decay
        self.diagonal = self.size > FULL_UP_TO if diagonal == "auto" else diagonal
        self._generation = self._drawn = 0
        options = {
            "popsize": population,
            "CMA_diagonal": self.diagonal,
            "CMA_cmean": mean_lr,
            # Not a number: neither a seed nor numpy's generator is touched.
            "seed": float("nan"),
            "randn": self._randn,
            "verbose": -9,
            "verb_log": 0,
        }
        first = start.detach().double().numpy()
        if mean_lr > 1:
            raise InputError(
                f"evolution.mean_lr: expected a number in (0, 1], got {mean_lr:g}"
            )
        self.search: Any = cma.CMAEvolutionStrategy(first, sigma0, options)
        if self.search.mean_shift_samples and population < 3:
            raise InputError(
                "evolution.population: expected at least 3, where the diagonal of so "
                f"many parameters is learned, got {population}"
            )
        if isinstance(self.search.adapt_sigma, CMAAdaptSigmaTPA):
            # Otherwise done by the first `tell`, which would undo what is loaded.
            self.search.adapt_sigma.initialize(self.size, self.search.opts)

    def ask(self, generation: int) -> Tensor:
        """Draw a generation; see `Strategy.ask`."""
        self._generation, self._drawn = generation, 0
        return torch.from_numpy(np.array(self.search.ask()))

    def tell(self, vectors: Tensor, fitness: Tensor) -> None:
        """Adapt mean, step size and covariance; see `Strategy.tell`."""
        # It minimises.
        self.search.tell(list(vectors.numpy()), (-fitness).tolist())
        self.search.sigma = max(self.search.sigma, self.sigma_floor)
        self.search.mean *= 1 - self.mean_decay

    @property
    def favourite(self) -> Tensor:
        """The mean."""
        return torch.from_numpy(np.array(self.search.mean))

    @property
    def step_size(self) -> float:
        """Sigma; the covariance comes on top of it."""
        return float(self.search.sigma)

    def state_dict(self) -> State:
        """Mean, step size, covariance, paths, and what will be injected."""
        state = {
            f"{part}.{name}": np.array(value)
            for part, holder in self._holders()
            for name, value in vars(holder).items()
            if _is_number(value) and (name not in MARKS if part else name in OWN)
        }
        for i, direction in enumerate(getattr(self.search, INJECTED)):
            state[f"{INJECTED}.{i}"] = np.array(direction)
        mirrors = getattr(self.search, MIRRORS, ())  # made by the first `tell`
        return {**state, MIRRORS: np.array(mirrors, np.int64)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue where ``state`` was taken."""
        from cma.utilities.utils import ElapsedWCTime

        holders, injected = dict(self._holders()), []
        for key, value in state.items():
            part, _, name = key.rpartition(".")
            if part == INJECTED:
                injected.append(np.array(value))
                continue
            if key == MIRRORS:
                setattr(self.search, MIRRORS, value.tolist())
                continue
            holder = holders[part]
            array = value.ndim or isinstance(getattr(holder, name, None), np.ndarray)
            setattr(holder, name, np.array(value) if array else value.item())
        setattr(self.search, INJECTED, injected)
        # Only the very first `ask` makes one.
        self.search.timer = ElapsedWCTime()

    def _holders(self) -> Iterator[tuple[str, Any]]:
        yield "", self.search
        for part in PARTS:
            yield part, getattr(self.search, part)

    def _randn(self, rows: int, size: int) -> np.ndarray:
        """Normal numbers for cma: those of this generation, in turn."""
        drawn = self.gaussian(self._generation, rows, self._drawn).numpy()
        self._drawn += rows
        return drawn[:, :size]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.number, np.ndarray))
