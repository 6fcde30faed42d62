"""Pooling heads for transformers on sets, policies built on them, and their evaluation.

The names below are the public API. Each is imported when it is first used, so that
importing the package is cheap.
"""

from typing import TYPE_CHECKING

from marl_pool.utils.errors import InputError as InputError
from marl_pool.utils.lazy import lazy_exports, reexports
from marl_pool.version import __version__ as __version__

if TYPE_CHECKING:
    from marl_pool.api.evaluate import evaluate as evaluate
    from marl_pool.api.perturb import perturb_env as perturb_env
    from marl_pool.api.tokenize import (
        ParallelTokenObservation as ParallelTokenObservation,
    )
    from marl_pool.api.tokenize import TokenObservation as TokenObservation
    from marl_pool.api.tokenize import tokenize_env as tokenize_env
    from marl_pool.api.train import train as train
    from marl_pool.compiled import compile as compile
    from marl_pool.encoders import encoder_names as encoder_names
    from marl_pool.encoders import make_encoder as make_encoder
    from marl_pool.encoders.base import Encoder as Encoder
    from marl_pool.envs import env_names as env_names
    from marl_pool.envs import make_batched_env as make_batched_env
    from marl_pool.envs import make_env as make_env
    from marl_pool.envs import make_heuristic as make_heuristic
    from marl_pool.envs.base import AgentGroup as AgentGroup
    from marl_pool.envs.base import BatchedEnv as BatchedEnv
    from marl_pool.envs.drawing.attention import draw_attention as draw_attention
    from marl_pool.mask_check import assert_mask as assert_mask
    from marl_pool.mask_check import check_mask as check_mask
    from marl_pool.networks.set_network import SetNetwork as SetNetwork
    from marl_pool.observations.make import make_view as make_view
    from marl_pool.observations.view import TokenOptions as TokenOptions
    from marl_pool.observations.view import TokenView as TokenView
    from marl_pool.perturbations import make_perturbation as make_perturbation
    from marl_pool.perturbations import perturbation_names as perturbation_names
    from marl_pool.perturbations.base import Perturbation as Perturbation
    from marl_pool.policies import make_policy as make_policy
    from marl_pool.policies.base import Policy as Policy
    from marl_pool.policies.storage import load_policies as load_policies
    from marl_pool.policies.storage import load_policy as load_policy
    from marl_pool.policies.storage import save_policies as save_policies
    from marl_pool.policies.storage import save_policy as save_policy
    from marl_pool.policies.token_policy import TokenPolicy as TokenPolicy
    from marl_pool.pooling import make_pooling as make_pooling
    from marl_pool.pooling import pooling_names as pooling_names
    from marl_pool.pooling.base import Pooling as Pooling
    from marl_pool.rollout import Rollout as Rollout
    from marl_pool.rollout import collect as collect
    from marl_pool.tokens import Tokens as Tokens
    from marl_pool.tokens import TokenSpec as TokenSpec

__all__ = sorted(reexports(__name__))
__getattr__, __dir__ = lazy_exports(__name__)
