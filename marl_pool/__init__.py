"""Pooling heads for transformers on sets, policies built on them, and their tests.

The names below are the public API. They load when first used, so that importing the
package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from marl_pool.errors import InputError
from marl_pool.version import __version__

if TYPE_CHECKING:
    from marl_pool.encoders import encoder_names, make_encoder
    from marl_pool.envs import env_names, make_batched_env, make_env
    from marl_pool.networks import SetNetwork
    from marl_pool.perturbations import make_perturbation, perturbation_names
    from marl_pool.policies import make_policy
    from marl_pool.policies.base import Policy
    from marl_pool.policies.storage import load_policy, save_policy
    from marl_pool.policies.token_policy import TokenPolicy
    from marl_pool.pooling import make_pooling, pooling_names
    from marl_pool.pooling.base import Pooling
    from marl_pool.rollout import collect
    from marl_pool.tokens import Tokens, TokenSpec

__all__ = [
    "InputError",
    "Policy",
    "Pooling",
    "SetNetwork",
    "TokenPolicy",
    "TokenSpec",
    "Tokens",
    "__version__",
    "collect",
    "encoder_names",
    "env_names",
    "load_policy",
    "make_batched_env",
    "make_encoder",
    "make_env",
    "make_perturbation",
    "make_policy",
    "make_pooling",
    "perturbation_names",
    "pooling_names",
    "save_policy",
]

_HOMES = {
    "Policy": "policies.base",
    "Pooling": "pooling.base",
    "SetNetwork": "networks",
    "TokenPolicy": "policies.token_policy",
    "TokenSpec": "tokens",
    "Tokens": "tokens",
    "collect": "rollout",
    "encoder_names": "encoders",
    "env_names": "envs",
    "load_policy": "policies.storage",
    "make_batched_env": "envs",
    "make_encoder": "encoders",
    "make_env": "envs",
    "make_perturbation": "perturbations",
    "make_policy": "policies",
    "make_pooling": "pooling",
    "perturbation_names": "perturbations",
    "pooling_names": "pooling",
    "save_policy": "policies.storage",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
