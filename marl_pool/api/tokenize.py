"""Environments whose observations become tokens, for any library."""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper
from typing_extensions import override

from marl_pool.observations.make import make_view
from marl_pool.observations.masks import MASK
from marl_pool.observations.view import SELF_NAME, TokenOptions, TokenView
from marl_pool.options.signatures import options_of, unknown_key
from marl_pool.utils.errors import InputError

Observation = dict[str, np.ndarray]
"""Arrays by the names of `Tokens`."""


def tokenize_env(
    env: Any, **options: Any
) -> "ParallelTokenObservation | TokenObservation":
    """Wrap an env so that its observations are tokens, padded to the same number.

    Any library can use the wrapped env. Its observations have ``features`` ``(N, F)``,
    ``types`` and ``padding`` ``(N,)``, and an ``action_mask`` if there is one.
    `perturb_env` perturbs it. Type 0 is the observer's own token, as in all Dicts of
    tokens.

    Example:
        >>> env = tokenize_env(gymnasium.make("CartPole-v1"), max_tokens=6)
        >>> env.observation_space["features"].shape, env.token_spec.type_names
        ((6, 1), ('self', 'feature_0', 'feature_1', 'feature_2', 'feature_3'))

    Args:
        env: a Gymnasium ``Env`` or a PettingZoo ``ParallelEnv``.
        options: fields of `TokenOptions`, which decide what the space leaves open, such
            as ``presence=0``. Observations are padded to N = ``max_tokens``.

    Raises:
        InputError: another object, an unknown option, a space that cannot become
            tokens, or options that do not fit it. `reset` and `step` raise it for an
            observation outside its space, and for more tokens than ``max_tokens``.
    """
    if isinstance(env, gymnasium.Env):
        return TokenObservation(env, **options)
    if isinstance(env, ParallelEnv):
        return ParallelTokenObservation(env, **options)
    raise unknown_env(env)


def unknown_env(env: object) -> InputError:
    """Build the error for an env of neither library."""
    return InputError(
        "env: expected a PettingZoo ParallelEnv or a Gymnasium Env, got "
        f"{type(env).__name__}"
    )


def read_observation(view: TokenView, observation: Any, where: str) -> Observation:
    """Return the arrays ``(1, …)`` of one observation; errors begin with ``where``.

    Raises:
        InputError: the observation does not fit its space.
    """
    arrays = view.arrays(1)
    try:
        view.write(arrays, 0, observation)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if misfit := view.misfit(arrays, np.ones(1, np.bool_)):
        raise InputError(f"{where}: {misfit.message}")
    return arrays


class TokenObservation(
    gymnasium.ObservationWrapper[Observation, Any, Any],
    gymnasium.utils.RecordConstructorArgs,
):
    """A Gymnasium env whose observations are tokens; see `tokenize_env`.

    ``gymnasium.make(env.spec)`` creates an equal one.

    Attributes:
        token_spec: sizes and type names of the tokens.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], **options: Any) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, **options)
        gymnasium.ObservationWrapper.__init__(self, env)
        self._encoder = ObservationEncoder(env.observation_space, options, "env")
        self.token_spec = self._encoder.spec
        self.observation_space = self._encoder.space

    @override
    def observation(self, observation: Any) -> Observation:
        return self._encoder(observation)


class ParallelTokenObservation(BaseParallelWrapper[Any, Observation, Any]):
    """A PettingZoo env whose observations are tokens; see `tokenize_env`.

    Attributes:
        token_specs: sizes and type names of each agent's tokens.
    """

    def __init__(self, env: ParallelEnv[Any, Any, Any], **options: Any) -> None:
        super().__init__(env)
        self._encoders = {
            agent: ObservationEncoder(
                env.observation_space(agent), options, f"env: agent {agent!r}"
            )
            for agent in env.possible_agents
        }
        self.token_specs = {
            agent: encoder.spec for agent, encoder in self._encoders.items()
        }
        self.observation_spaces = {
            agent: encoder.space for agent, encoder in self._encoders.items()
        }

    @override
    def observation_space(self, agent: Any) -> spaces.Dict:
        return self._encoders[agent].space

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Observation], dict[Any, dict[str, Any]]]:
        """Begin the next episode, or the first one of ``seed``."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._encode(observations), infos

    @override
    def step(self, actions: dict[Any, Any]) -> Any:
        observations, *outcome = self.env.step(actions)
        return self._encode(observations), *outcome

    def _encode(self, observations: dict[Any, Any]) -> dict[Any, Observation]:
        return {
            agent: self._encoders[agent](observation)
            for agent, observation in observations.items()
        }


class ObservationEncoder:
    """Converter of single observations to Dicts of tokens.

    Args:
        space: space of the observations.
        options: fields of `TokenOptions`.
        where: beginning of error messages.

    Attributes:
        spec: sizes and type names of the tokens. Type 0 is the observer's own, of which
            there may be no token.
        space: space of the Dicts of tokens.
    """

    def __init__(
        self, space: spaces.Space[Any], options: dict[str, Any], where: str
    ) -> None:
        fields = options_of(TokenOptions)
        for key in options:
            if key not in fields:
                raise unknown_key(key, fields)
        self.where = where
        self.view = make_view(space, TokenOptions(**options), where=where)
        self.spec = self.view.spec
        # A space cannot name its types: the observer's has to be number 0.
        self._first_type = 0 if self.spec.has_self else 1
        if not self.spec.has_self:
            type_names = (SELF_NAME, *self.spec.type_names)
            self.spec = replace(self.spec, type_names=type_names, has_self=True)
        self.space = self.spec.space()
        mask = self.view.parts.get(MASK)
        if mask is not None:
            self.space[MASK] = spaces.MultiBinary(mask.shape[0])
        self._dtypes = {name: part.dtype for name, part in self.space.items()}

    def __call__(self, observation: Any) -> Observation:
        """Return the tokens of one observation; see `read_observation`."""
        arrays = read_observation(self.view, observation, self.where)
        tokens = self.view.tokens({k: torch.from_numpy(v) for k, v in arrays.items()})
        # Under padding a type may be negative, which the space does not allow.
        types = (tokens.types + self._first_type).clamp(min=0)
        tokens = tokens._replace(types=types)
        return {
            name: part[0].numpy().astype(self._dtypes[name])
            for name, part in tokens.columns.items()
        }
