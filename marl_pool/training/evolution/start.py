"""Start of a search: the agent's own weights, zeros, or a saved policy."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from marl_pool.policies.agent import Agent, to_vector
from marl_pool.policies.storage import load_policy
from marl_pool.runs import Run
from marl_pool.utils.errors import InputError

OWN, ZEROS = "policy", "zeros"
"""Values of ``init`` other than a folder."""


def start_vector(init: str, agent: Agent, plugins: Collection[str]) -> Tensor:
    """Return the initial mean of the search, ``(n,)``.

    Args:
        init: `OWN`, `ZEROS`, or the folder of a policy or run.
        agent: agent with its own initial weights.
        plugins: ``package.module:Class`` names that the folder may use.

    Raises:
        InputError: no policy in the folder, or one unlike the agent.
    """
    own = to_vector(agent)
    if init == OWN:
        return own
    if init == ZEROS:
        return torch.zeros_like(own)
    # Read the policy of a folder; of a run, its best one.
    folder = Path(init)
    if not folder.is_dir():
        raise InputError(
            f"init: expected {OWN}, {ZEROS} or the folder of a policy or run, "
            f"got {init!r}"
        )
    if not (folder / "config.json").is_file():
        folder = Run.open(folder).policy_path()
    found = load_policy(folder, plugins=plugins)
    # The policy must be of the run's own class.
    if not isinstance(found, Agent) or type(found) is not type(agent):
        raise InputError(
            f"init: expected a {type(agent).__name__}, {init} is a "
            f"{type(found).__name__}"
        )
    # The parameters must have the same names and shapes.
    shapes = {name: tuple(part.shape) for name, part in agent.named_parameters()}
    for name, part in found.named_parameters():
        if shapes.pop(name, None) != tuple(part.shape):
            raise InputError(f"init: {init} has another {name} than the run's policy")
    if shapes:
        raise InputError(f"init: {init} has no {', '.join(shapes)}")
    return to_vector(found)
