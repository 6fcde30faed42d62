"""Training runs that start with the weights of saved policies."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ray.rllib.core.rl_module import RLModuleSpec
from torch import Tensor

from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.fixed_policies import load_saved, validate_same_parameters
from marl_pool.training.ppo.algorithm import BatchedPPO
from marl_pool.training.ppo.module import build_policy
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.errors import InputError

Weights = dict[str, Tensor]
"""Parameters of a policy by name."""
SPACES = ("spec", "action_space")
"""Options that specify the tokens and actions of a policy."""
TRIAL_SETS = 16
"""Sets of tokens on which a saved policy and the run's are compared."""


def load_initial_weights(
    config: TrainConfig,
    modules: Mapping[str, str],
    specs: Mapping[str, RLModuleSpec],
) -> dict[str, Weights]:
    """Read the initial weights of each module, by its name.

    A module that several groups share starts with the policy of its first group. Empty
    if ``config.init`` is None.

    Args:
        config: configuration of the run.
        modules: group that learns → module.
        specs: specification of each module.

    Raises:
        InputError: no such policy, or one that does not fit the run's.
    """
    weights: dict[str, Weights] = {}
    if config.init is None:
        return weights
    plugins = (config.encoder.name, config.pooling.name, *config.plugins)
    for group, module in modules.items():
        if module in weights:
            continue
        policy = build_policy(specs[module].model_config).eval()
        try:
            saved = load_saved(config.init, group, plugins).eval()
            _copy_weights(saved, policy, config.init)
        except InputError as error:
            raise InputError(f"init: {group}: {error}") from error
        weights[module] = policy.state_dict()
    return weights


def set_weights(algo: BatchedPPO, weights: Mapping[str, Weights]) -> None:
    """Set the policies' weights in learners and runners; a `Critic` keeps its own."""
    modules = algo.learner_group.get_weights()
    for name, policy in weights.items():
        modules[name] |= {f"policy.{key}": tensor for key, tensor in policy.items()}
    algo.learner_group.set_weights(modules)
    algo.env_runner_group.sync_weights(
        from_worker_or_learner_group=algo.learner_group, inference_only=True
    )


def _copy_weights(saved: SpecifiedPolicy, policy: TokenPolicy, source: str) -> None:
    """Copy all weights.

    Raises:
        InputError: a policy of another class or with other options, for other tokens
            or actions, or with other parameters.
    """
    if differences := "; ".join(_differences(policy.config, saved.config)):
        raise InputError(f"{source} has other options: expected {differences}")
    validate_same_parameters(saved, policy, source)
    policy.load_state_dict(saved.state_dict())
    # Options that only one of the two names may still differ.
    tokens = _trial_tokens(policy.spec)
    with torch.no_grad():
        outputs = zip(saved(tokens), policy(tokens), strict=True)
    is_same = (torch.allclose(*pair, 1e-3, 1e-6, equal_nan=True) for pair in outputs)
    if not all(is_same):
        raise InputError(f"{source} computes other outputs with the same weights")


def _differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], path: str = ""
) -> Iterator[str]:
    """Yield the options with different values in two policies, by key."""
    for key, value in expected.items():
        if key not in actual or key in SPACES:
            continue
        if isinstance(value, Mapping) and isinstance(actual[key], Mapping):
            yield from _differences(value, actual[key], f"{key}.")
        elif actual[key] != value:
            yield f"{path or 'policy.'}{key} = {value}, got {actual[key]}"


def _trial_tokens(spec: TokenSpec) -> Tokens:
    """Return random tokens ``(TRIAL_SETS, N)``, with a self token if specified."""
    generator = torch.Generator().manual_seed(0)
    shape = (TRIAL_SETS, spec.num_tokens)
    features = torch.rand(*shape, spec.num_features, generator=generator)
    if spec.dtype == "uint8":
        features = (255 * features).to(torch.uint8)
    types = torch.randint(spec.num_types, shape, generator=generator)
    if spec.has_self:
        types = types.clamp(min=min(1, spec.num_types - 1))
        types[:, 0] = 0
    return Tokens(features, types, torch.zeros(shape, dtype=torch.bool))
