"""What a run saves of an algorithm: its whole state, and its policies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.storage import save_policies
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.training.fixed import Fixed, frozen_module
from marl_pool.training.ppo.algorithm import BatchedPPO
from marl_pool.training.ppo.faults import all_learners_live
from marl_pool.training.ppo.module import build_policy


def save_algorithm(algo: BatchedPPO, folder: Path) -> None:
    """Write all that is needed to go on.

    Raises:
        OSError: it cannot be written, by this process or by a learner.
    """
    algo.save_to_path(str(folder.absolute()))
    # A remote learner that cannot write dies, and RLlib does not look.
    if not all_learners_live(algo):
        raise OSError("a learner died while it wrote")


def save_modules(
    algo: BatchedPPO, modules: Mapping[str, str], fixed: Fixed, folder: Path
) -> None:
    """Write the policies of all groups but those that are scripted.

    Args:
        algo: has the weights.
        modules: the module of each group that learns.
        fixed: what plays the other groups.
        folder: see `save_policies`.
    """
    weights = algo.learner_group.get_weights()
    policies: dict[str, SpecifiedPolicy] = {
        name: _policy(algo, name, weights[name]) for name in weights
    }
    groups = dict(modules)
    for group, policy in fixed.items():
        if isinstance(policy, SpecifiedPolicy):
            groups[group] = frozen_module(group)
            policies[groups[group]] = policy
    save_policies(policies, groups, folder)


def _policy(algo: BatchedPPO, module: str, weights: Mapping[str, Any]) -> TokenPolicy:
    spec = algo.config.rl_module_spec.rl_module_specs[module]
    policy = build_policy(spec.model_config)
    policy.load_state_dict(
        {
            name.removeprefix("policy."): torch.as_tensor(value)
            for name, value in weights.items()
        }
    )
    return policy
