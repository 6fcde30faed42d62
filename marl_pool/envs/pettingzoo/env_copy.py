"""Other people's envs: found, built, stepped and replayed."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pettingzoo
from pettingzoo import ParallelEnv
from pettingzoo.env_registry.exceptions import PettingZooRegistryError

from marl_pool.envs.simulation.replay import History
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import require_trusted

Factory = Callable[..., Any]


def find_factory(module: str) -> Factory:
    """Find what builds the env that ``module`` names; see `PettingZooEnv`.

    Raises:
        InputError: it cannot be imported, there is no such callable in it, or a file
            names it and the user has not allowed it; see `marl_pool.utils.names.trust`.
    """
    require_trusted(module, "env.module")
    if "/" in module:
        return lambda **options: pettingzoo.make("parallel", module, **options)
    path, _, attribute = module.partition(":")
    attribute = attribute or "parallel_env"
    try:
        found = importlib.import_module(path)
    except Exception as error:  # importing foreign code may raise anything
        missing = isinstance(error, ModuleNotFoundError) and error.name == "mpe2"
        hint = '; pip install "marl-pool[mpe]"' if missing else ""
        raise InputError(
            f"env.module: {path!r} cannot be imported: {reason(error)}{hint}"
        ) from error
    factory = getattr(found, attribute, None)
    if not callable(factory):
        raise InputError(
            f"env.module: expected a module with parallel_env, or "
            f"package.module:callable; {path!r} has no {attribute!r}"
        )
    made: Factory = factory
    return made


def build_env(module: str, options: Mapping[str, Any]) -> ParallelEnv[Any, Any, Any]:
    """Build one copy.

    Raises:
        InputError: there is no such env, the options are refused, or what comes is no
            parallel env.
    """
    factory = find_factory(module)
    try:
        env = factory(**options)
    except InputError:
        raise
    except PettingZooRegistryError as error:
        raise InputError(f"env.module: {reason(error)}") from error
    except Exception as error:  # foreign code may refuse its options in any way
        raise InputError(
            f"env.options: {module} refuses {dict(options)}: {reason(error)}"
        ) from error
    if not isinstance(env, ParallelEnv):
        raise InputError(
            f"env.module: expected {module} to give a PettingZoo ParallelEnv, "
            f"got {type(env).__name__}"
        )
    return env


def reason(error: BaseException) -> str:
    """What a foreign exception says, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Outcome(NamedTuple):
    """What an env returned last, by agent."""

    observations: Mapping[Any, Any]
    rewards: Mapping[Any, float]
    terminations: Mapping[Any, bool]
    truncations: Mapping[Any, bool]
    acted: tuple[Any, ...]
    """Those who acted."""
    agents: tuple[Any, ...]
    """Those who act next."""


class Copy:
    """One copy of an env, always at the end of its ``history``.

    Args:
        env: reset here by `begin`.
        decode: from a flat array to each agent's action.
    """

    def __init__(
        self,
        env: ParallelEnv[Any, Any, Any],
        decode: Callable[[np.ndarray], dict[Any, Any]],
    ) -> None:
        self.env, self.decode = env, decode
        self.history: History | None = None

    def begin(self, history: History) -> Outcome:
        """Reset, and repeat the actions of ``history``."""
        observations, _ = self.env.reset(seed=history.seed)
        self.history = history
        outcome = Outcome(observations, {}, {}, {}, (), tuple(self.env.agents))
        for actions in history.actions:
            outcome = self._step(actions)
        return outcome

    def step(self, actions: np.ndarray) -> Outcome:
        """Act, and remember it."""
        assert self.history is not None
        outcome = self._step(actions)
        self.history.actions.append(actions)
        return outcome

    def _step(self, actions: np.ndarray) -> Outcome:
        acting = tuple(self.env.agents)
        if not acting:  # the episode is over
            return Outcome({}, {}, {}, {}, (), ())
        chosen = self.decode(actions)
        step = self.env.step({agent: chosen[agent] for agent in acting})
        observations, rewards, terminations, truncations, _ = step
        return Outcome(
            observations,
            rewards,
            terminations,
            truncations,
            acting,
            tuple(self.env.agents),
        )
