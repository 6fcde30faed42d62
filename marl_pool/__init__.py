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
    from marl_pool.encoders.base import Encoder
    from marl_pool.envs import env_names, make_batched_env, make_env, make_heuristic
    from marl_pool.envs.base import World
    from marl_pool.library import evaluate
    from marl_pool.networks import SetNetwork
    from marl_pool.perturbations import make_perturbation, perturbation_names
    from marl_pool.perturbations.base import Perturbation
    from marl_pool.perturbed_env import perturb_env
    from marl_pool.policies import make_policy
    from marl_pool.policies.base import Policy
    from marl_pool.policies.storage import (
        load_policies,
        load_policy,
        save_policies,
        save_policy,
    )
    from marl_pool.policies.token_policy import TokenPolicy
    from marl_pool.pooling import make_pooling, pooling_names
    from marl_pool.pooling.base import Pooling
    from marl_pool.rollout import Rollout, collect
    from marl_pool.tokens import Tokens, TokenSpec

__all__ = [
    "Encoder",
    "InputError",
    "Perturbation",
    "Policy",
    "Pooling",
    "Rollout",
    "SetNetwork",
    "TokenPolicy",
    "TokenSpec",
    "Tokens",
    "World",
    "__version__",
    "collect",
    "encoder_names",
    "env_names",
    "evaluate",
    "load_policies",
    "load_policy",
    "make_batched_env",
    "make_encoder",
    "make_env",
    "make_heuristic",
    "make_perturbation",
    "make_policy",
    "make_pooling",
    "perturb_env",
    "perturbation_names",
    "pooling_names",
    "save_policies",
    "save_policy",
]

_HOMES = {
    "Encoder": "encoders.base",
    "Perturbation": "perturbations.base",
    "Policy": "policies.base",
    "Pooling": "pooling.base",
    "Rollout": "rollout",
    "SetNetwork": "networks",
    "TokenPolicy": "policies.token_policy",
    "TokenSpec": "tokens",
    "Tokens": "tokens",
    "World": "envs.base",
    "collect": "rollout",
    "encoder_names": "encoders",
    "env_names": "envs",
    "evaluate": "library",
    "load_policies": "policies.storage",
    "load_policy": "policies.storage",
    "make_batched_env": "envs",
    "make_encoder": "encoders",
    "make_env": "envs",
    "make_heuristic": "envs",
    "make_perturbation": "perturbations",
    "make_policy": "policies",
    "make_pooling": "pooling",
    "perturb_env": "perturbed_env",
    "perturbation_names": "perturbations",
    "pooling_names": "pooling",
    "save_policies": "policies.storage",
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
