"""Checkpoints of an algorithm: its complete state, and its policies."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_OPTIMIZER,
    COMPONENT_RL_MODULE,
)

from marl_pool.kernels.functional import strip_prefix
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.storage import save_policies
from marl_pool.training.fixed_policies import Fixed, frozen_module
from marl_pool.training.ppo.algorithm import BatchedPPO
from marl_pool.training.ppo.faults import all_learners_live
from marl_pool.training.ppo.module import build_policy
from marl_pool.utils.atomic import new_binary_file

ALGORITHM_STATE, RUNNER_STATE = "algorithm_state.pkl", "env_runner/state.pkl"
LEARNER_STATE = "learner_group/learner/state.pkl"
MODULE_STATE = "learner_group/learner/rl_module/{}/module_state.pkl"
"""Paths in a checkpoint, as RLlib names them."""


def save_algorithm(algo: BatchedPPO, folder: Path) -> None:
    """Write the complete state of an algorithm, for an exact resume.

    RLlib lets a remote learner write its own part to the disk of its own machine. Here
    the driver collects and writes everything, under RLlib's names.

    Raises:
        OSError: a learner died, or the files cannot be written.
    """
    # RLlib would silently leave out the state of a dead learner.
    if not all_learners_live(algo):
        raise OSError("a learner died")
    # Collect the state, and split it into RLlib's files.
    state = dict(algo.get_state())
    learner = dict(state.pop(COMPONENT_LEARNER_GROUP)[COMPONENT_LEARNER])
    modules = learner.pop(COMPONENT_RL_MODULE)
    parts = {
        **{MODULE_STATE.format(name): part for name, part in modules.items()},
        LEARNER_STATE: learner,
        RUNNER_STATE: state.pop(COMPONENT_ENV_RUNNER),
        ALGORITHM_STATE: state,
    }
    # Write one file for each module and each other part.
    for path, part in parts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with new_binary_file(folder / path) as out:
            pickle.dump(part, out)


def load_algorithm(algo: BatchedPPO, folder: Path) -> None:
    """Restore the state that `save_algorithm` wrote.

    The files are unpickled, so they must come from a trusted source.

    Raises:
        OSError, KeyError: a part is missing, which RLlib would silently reinitialize.
    """

    def load(path: str) -> Any:
        with (folder / path).open("rb") as content:
            return pickle.load(content)

    # Read the parts back into the structure that `get_state` returns.
    specs = algo.config.rl_module_spec.rl_module_specs
    modules = {name: load(MODULE_STATE.format(name)) for name in specs}
    learner = {**load(LEARNER_STATE), COMPONENT_RL_MODULE: modules}
    if COMPONENT_OPTIMIZER not in learner:
        raise KeyError(f"{LEARNER_STATE} has no {COMPONENT_OPTIMIZER}")
    algo.set_state(
        {
            **load(ALGORITHM_STATE),
            COMPONENT_LEARNER_GROUP: {COMPONENT_LEARNER: learner},
            COMPONENT_ENV_RUNNER: load(RUNNER_STATE),
        }
    )


def save_modules(
    algo: BatchedPPO, modules: Mapping[str, str], fixed: Fixed, folder: Path
) -> None:
    """Write the policies of all groups except scripted ones; see `save_policies`.

    Args:
        algo: algorithm with the weights.
        modules: group that learns → name of its module.
        fixed: policies of the other groups.
        folder: folder of the policies.
    """
    policies: dict[str, SpecifiedPolicy] = {}
    for name, weights in algo.learner_group.get_weights().items():
        spec = algo.config.rl_module_spec.rl_module_specs[name]
        policies[name] = build_policy(spec.model_config)
        tensors = {key: torch.as_tensor(value) for key, value in weights.items()}
        policies[name].load_state_dict(strip_prefix("policy", tensors))
    # Frozen policies are saved too: their source may move or change.
    groups = dict(modules)
    for group, policy in fixed.items():
        if isinstance(policy, SpecifiedPolicy):
            groups[group] = frozen_module(group)
            policies[groups[group]] = policy
    save_policies(policies, groups, folder)
