"""Metadata of environments, for callers that do not step them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marl_pool.envs import ENVS, make_batched_env
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.contract import checked_state_specs
from marl_pool.envs.patches import PatchGrid
from marl_pool.options.names import allowed, is_restricted, resolve
from marl_pool.options.types import Options
from marl_pool.tokens import TokenSpec
from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class EnvDescription:
    """Properties of a `BatchedEnv` that its options determine."""

    groups: Mapping[str, AgentGroup]
    max_steps: int
    simulated: bool
    patch_grid: PatchGrid | None
    turn_based: bool = False


_descriptions: dict[object, EnvDescription] = {}


def describe_env(env_config: Mapping[str, Any]) -> EnvDescription:
    """Describe the environment that the options define.

    One environment is built for each distinct set of options and discarded.

    Args:
        env_config: ``{"name": …, **options}``, as for `make_batched_env`.

    Raises:
        InputError: an unknown name, a wrong option or a number out of range.
        UntrustedError: a class or module that the current `trust` does not allow.
    """
    # Import rules apply to cached descriptions too: the class is resolved again, and
    # the allowed modules, which its options may name, are part of the key.
    cls = resolve(Options(env_config).name, ENVS, "env", BatchedEnv)
    trusted = allowed() if is_restricted() else None
    try:
        key: object = cls, trusted, json.dumps(env_config, sort_keys=True)
    except TypeError:  # an option without a JSON form, such as a torch.dtype
        key = None
    if key is None or key not in _descriptions:
        env = make_batched_env(**env_config, num_envs=1)
        _descriptions[key] = EnvDescription(
            env.groups,
            env.max_steps,
            env.simulated,
            env.patch_grid,
            env.turn_based,
        )
    return _descriptions[key]


def describe_states(env_config: Mapping[str, Any]) -> Mapping[str, TokenSpec]:
    """Return `BatchedEnv.state_specs` of the environment that the options define."""
    return checked_state_specs(make_batched_env(**env_config, num_envs=1))


def validate_env_change(
    env_config: Mapping[str, Any], change: Mapping[str, Any], where: str
) -> None:
    """Reject changed options that are wrong, or that change tokens or actions.

    Args:
        env_config: ``{"name": …, **options}``.
        change: options that differ for one purpose.
        where: configuration key of the change, for messages.
    """
    try:
        changed = describe_env({**env_config, **change}).groups
        if changed != describe_env(env_config).groups:
            raise InputError("expected options that change neither tokens nor actions")
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
