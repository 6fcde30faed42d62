"""Third-party PettingZoo environments: imported, built, stepped and replayed."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pettingzoo
from pettingzoo import ParallelEnv
from pettingzoo.env_registry.exceptions import PettingZooRegistryError

from marl_pool.envs.simulation.simulator import ActionLog
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import require_trusted

Factory = Callable[..., Any]


def find_factory(module: str) -> Factory:
    """Return the callable that builds the environments of ``module``.

    Raises:
        InputError: the module cannot be imported, has no such callable, or is named in
            a file and not allowed by the user; see `marl_pool.utils.names.trust`.
    """
    require_trusted(module, "env.module")
    if "/" in module:
        return lambda **options: pettingzoo.make("parallel", module, **options)
    path, _, attribute = module.partition(":")
    attribute = attribute or "parallel_env"
    try:
        found = importlib.import_module(path)
    except Exception as error:  # third-party code may raise any exception
        missing = isinstance(error, ModuleNotFoundError) and error.name == "mpe2"
        hint = '; pip install "marl-pool[mpe]"' if missing else ""
        raise InputError(
            f"env.module: {path!r} cannot be imported: {reason(error)}{hint}"
        ) from error
    factory: Factory | None = getattr(found, attribute, None)
    if not callable(factory):
        raise InputError(
            f"env.module: expected a module with parallel_env, or "
            f"package.module:callable; {path!r} has no {attribute!r}"
        )
    return factory


def build_env(module: str, options: Mapping[str, Any]) -> ParallelEnv[Any, Any, Any]:
    """Build one environment.

    Raises:
        InputError: no such environment, rejected options, or not a parallel env.
    """
    factory = find_factory(module)
    try:
        env = factory(**options)
    except InputError:
        raise
    except PettingZooRegistryError as error:
        raise InputError(f"env.module: {reason(error)}") from error
    except Exception as error:  # third-party code may raise any exception
        raise InputError(
            f"env.options: {module} rejects {dict(options)}: {reason(error)}"
        ) from error
    if not isinstance(env, ParallelEnv):
        raise InputError(
            f"env.module: expected {module} to return a PettingZoo ParallelEnv, "
            f"got {type(env).__name__}"
        )
    return env


def reason(error: BaseException) -> str:
    """Summarise an exception in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class ParallelStep(NamedTuple):
    """Results of ``ParallelEnv.step`` or ``reset``, by agent."""

    observations: Mapping[Any, Any]
    rewards: Mapping[Any, float] = {}
    terminations: Mapping[Any, bool] = {}
    truncations: Mapping[Any, bool] = {}
    acted: tuple[Any, ...] = ()
    """Agents that acted in this step."""
    agents: tuple[Any, ...] = ()
    """Agents that act in the next step."""


@dataclass(eq=False)
class EnvCopy:
    """One environment in the state at the end of its log."""

    env: ParallelEnv[Any, Any, Any]
    decode: Callable[[np.ndarray], dict[Any, Any]]
    """Converts a flat array to the action of each agent."""
    log: ActionLog | None = None

    def replay(self, log: ActionLog) -> ParallelStep:
        """Reset, and repeat the actions of ``log``; later steps are added to it."""
        observations, _ = self.env.reset(seed=log.seed)
        self.log = log
        step = ParallelStep(observations, agents=tuple(self.env.agents))
        for actions in log.actions:
            step = self._step(actions)
        return step

    def step(self, actions: np.ndarray) -> ParallelStep:
        """Step by a flat array of actions, and log it."""
        assert self.log is not None
        step = self._step(actions)
        self.log.actions.append(actions)
        return step

    def _step(self, actions: np.ndarray) -> ParallelStep:
        acted = tuple(self.env.agents)
        if not acted:  # the episode is over
            return ParallelStep({})
        by_agent = self.decode(actions)
        step = self.env.step({agent: by_agent[agent] for agent in acted})
        return ParallelStep(*step[:4], acted, tuple(self.env.agents))
