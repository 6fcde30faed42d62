"""CMA-ES, on top of the package `cma`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from marl_pool.options.types import PositiveFloat
from marl_pool.training.evolution.strategy import PopulationSize, State, Strategy
from marl_pool.utils.errors import InputError

FULL_UP_TO = 3000
"""Largest number of parameters for which ``diagonal="auto"`` learns a full covariance.
A generation takes a second with 2500; time and memory grow at least quadratically."""
PARTS = ("sm", "sigma_vec", "adapt_sigma")
"""Stateful attributes of cma's strategy: covariance, scaling, step-size adaptation."""
OWN_STATE = (
    "sigma",
    "mean",
    "mean_after_tell",
    "mean_old",
    "pc",
    "pc2",
    "pc_neg",
    "countiter",
    "countevals",
    "_isotropic_mean_shift",
    "_isotropic_mean_shift_iteration",
)
"""Attributes of the strategy itself that determine the next generation."""
CACHE_KEYS = ("_lam", "_mueff")
"""Attributes that identify the population for which a sampler has cached constants."""
INJECTED = "pop_injection_directions"
"""Attribute: directions to sample next, for two-point step-size adaptation."""
MIRRORS = "_indices_of_selective_mirrors"
"""Attribute: in tiny populations, indices of mirrored vectors, not mirrored again."""


class CMAES(Strategy):
    r"""Covariance matrix adaptation evolution strategy (CMA-ES).

    A generation is sampled from :math:`\mathcal{N}(m, \sigma^2 C)`. The mean moves to a
    weighted average of the fittest vectors; the step size :math:`\sigma` and the
    covariance :math:`C` adapt to the steps that succeeded.

    Source: Hansen, The CMA evolution strategy: a tutorial (2016),
    https://arxiv.org/abs/1604.00772, as implemented by the package ``cma`` with its
    defaults. Unlike in ``cma``, random numbers depend only on the seed and the
    generation.

    Args:
        start: ``(n,)``, the initial mean.
        population: P, the number of vectors in a generation, at least 2.
        sigma0: initial step size, a standard deviation.
        diagonal: learn only the diagonal of the covariance; auto: for more than 3000
            parameters.
        mean_lr: learning rate of the mean (``CMA_cmean``), in (0, 1]; below 1 for a
            noisy fitness.
        seed: random seed of the run.

    Raises:
        InputError: a population too small for so many parameters.
    """

    def __init__(
        self,
        start: Tensor,
        *,
        population: PopulationSize = 256,
        sigma0: PositiveFloat = 0.1,
        diagonal: Literal["auto"] | bool = "auto",
        mean_lr: Annotated[float, Field(gt=0, le=1)] = 1.0,
        seed: int = 0,
    ) -> None:
        import cma
        from cma.sigma_adaptation import CMAAdaptSigmaTPA

        super().__init__(start, population=population, seed=seed)
        self.diagonal = self.size > FULL_UP_TO if diagonal == "auto" else diagonal
        self._generation = self._sampled = 0
        options = {
            "popsize": population,
            "CMA_diagonal": self.diagonal,
            "CMA_cmean": mean_lr,
            # NaN leaves the global seed and generator of numpy alone.
            "seed": float("nan"),
            "randn": self._randn,
            "verbose": -9,
            "verb_log": 0,
        }
        # The library computes in double precision.
        first = start.detach().double().numpy()
        self.search: Any = cma.CMAEvolutionStrategy(first, sigma0, options)
        if self.search.mean_shift_samples and population < 3:
            raise InputError(
                "evolution.population: expected at least 3 to learn the diagonal of so "
                f"many parameters, got {population}"
            )
        if isinstance(self.search.adapt_sigma, CMAAdaptSigmaTPA):
            # Otherwise the first `tell` would do this, and overwrite a loaded state.
            self.search.adapt_sigma.initialize(self.size, self.search.opts)

    @override
    def ask(self, generation: int) -> Tensor:
        self._generation, self._sampled = generation, 0
        return torch.from_numpy(np.array(self.search.ask()))

    @override
    def tell(self, vectors: Tensor, fitness: Tensor) -> None:
        # The package minimizes.
        self.search.tell(list(vectors.numpy()), (-fitness).tolist())

    @property
    @override
    def center(self) -> Tensor:
        return torch.from_numpy(np.array(self.search.mean))

    @property
    @override
    def step_size(self) -> float:
        return float(self.search.sigma)  # without the scale of the covariance

    @override
    def state_dict(self) -> State:
        # Take all numbers and arrays that determine the next generation.
        state = {
            f"{part}.{name}": np.array(value)
            for part, holder in self._holders().items()
            for name, value in vars(holder).items()
            if isinstance(value, (bool, int, float, np.number, np.ndarray))
            and (name not in CACHE_KEYS if part else name in OWN_STATE)
        }
        for i, direction in enumerate(getattr(self.search, INJECTED)):
            state[f"{INJECTED}.{i}"] = np.array(direction)
        mirrors = getattr(self.search, MIRRORS, ())  # set by the first `tell`
        return {**state, MIRRORS: np.array(mirrors, np.int64)}

    @override
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        from cma.utilities.utils import ElapsedWCTime

        # Restore each attribute of the search and of its parts.
        holders, injected = self._holders(), []
        for key, value in state.items():
            part, _, name = key.rpartition(".")
            if part == INJECTED:
                injected.append(np.array(value))
            elif key == MIRRORS:
                setattr(self.search, MIRRORS, value.tolist())
            else:
                holder = holders[part]
                current = getattr(holder, name, None)
                array = value.ndim or isinstance(current, np.ndarray)
                setattr(holder, name, np.array(value) if array else value.item())
        setattr(self.search, INJECTED, injected)
        # Only the first `ask` of a search creates the timer.
        self.search.timer = ElapsedWCTime()

    def _holders(self) -> dict[str, Any]:
        parts = {part: getattr(self.search, part) for part in PARTS}
        return {"": self.search, **parts}

    def _randn(self, rows: int, size: int) -> np.ndarray:
        """Sample the next normal numbers of this generation, ``(rows, size)``."""
        numbers = self.gaussian(self._generation, rows, self._sampled).numpy()
        self._sampled += rows
        return numbers[:, :size]
