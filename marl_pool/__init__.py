"""Pooling heads for transformers on sets, policies built on them, and their evaluation.

The names below are the public API. Each is imported when it is first used, so that
importing the package is cheap.
"""

from typing import TYPE_CHECKING

from marl_pool.utils.errors import InputError
from marl_pool.utils.lazy import lazy_exports
from marl_pool.version import __version__

if TYPE_CHECKING:
    from marl_pool.api.evaluate import evaluate
    from marl_pool.api.perturb import perturb_env
    from marl_pool.api.train import train
    from marl_pool.encoders import encoder_names, make_encoder
    from marl_pool.encoders.base import Encoder
    from marl_pool.envs import env_names, make_batched_env, make_env, make_heuristic
    from marl_pool.envs.base import AgentGroup, BatchedEnv
    from marl_pool.networks import SetNetwork
    from marl_pool.perturbations import make_perturbation, perturbation_names
    from marl_pool.perturbations.base import Perturbation
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
    "AgentGroup",
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
    "BatchedEnv",
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
    "train",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    (
        "marl_pool.encoders.base:Encoder",
        "marl_pool.perturbations.base:Perturbation",
        "marl_pool.policies.base:Policy",
        "marl_pool.pooling.base:Pooling",
        "marl_pool.rollout:Rollout",
        "marl_pool.networks:SetNetwork",
        "marl_pool.policies.token_policy:TokenPolicy",
        "marl_pool.tokens:TokenSpec",
        "marl_pool.tokens:Tokens",
        "marl_pool.envs.base:AgentGroup",
        "marl_pool.envs.base:BatchedEnv",
        "marl_pool.rollout:collect",
        "marl_pool.encoders:encoder_names",
        "marl_pool.envs:env_names",
        "marl_pool.api.evaluate:evaluate",
        "marl_pool.policies.storage:load_policies",
        "marl_pool.policies.storage:load_policy",
        "marl_pool.envs:make_batched_env",
        "marl_pool.encoders:make_encoder",
        "marl_pool.envs:make_env",
        "marl_pool.envs:make_heuristic",
        "marl_pool.perturbations:make_perturbation",
        "marl_pool.policies:make_policy",
        "marl_pool.pooling:make_pooling",
        "marl_pool.api.perturb:perturb_env",
        "marl_pool.perturbations:perturbation_names",
        "marl_pool.pooling:pooling_names",
        "marl_pool.policies.storage:save_policies",
        "marl_pool.policies.storage:save_policy",
        "marl_pool.api.train:train",
    ),
)
