"""Training runs that start with the weights of saved policies."""

from collections.abc import Mapping

from ray.rllib.core.rl_module import RLModuleSpec
from torch import Tensor

from marl_pool.training.fixed_policies import load_saved
from marl_pool.training.ppo.algorithm import BatchedPPO, send_weights
from marl_pool.training.ppo.module import build_policy
from marl_pool.training.same_policy import validate_same
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.errors import InputError

Weights = dict[str, Tensor]
"""Parameters of a policy by name."""


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
            validate_same(saved, policy, config.init)
        except InputError as error:
            raise InputError(f"init: {group}: {error}") from error
        policy.load_state_dict(saved.state_dict())
        weights[module] = policy.state_dict()
    return weights


def set_weights(algo: BatchedPPO, weights: Mapping[str, Weights]) -> None:
    """Set the policies' weights in learners and runners; a `Critic` keeps its own."""
    modules = algo.learner_group.get_weights()
    for name, policy in weights.items():
        modules[name] |= {f"policy.{key}": tensor for key, tensor in policy.items()}
    algo.learner_group.set_weights(modules)
    send_weights(algo)
