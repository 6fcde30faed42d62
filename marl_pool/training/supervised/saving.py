"""Checkpoints of a fold: weights, optimizer and counts."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from marl_pool.training.supervised.learner import FoldLearner
from marl_pool.training.tensor_io import (
    adam_moments,
    prefixed,
    under,
    with_moments,
    write_tensors,
)
from marl_pool.utils.atomic import new_file
from marl_pool.utils.errors import InputError
from marl_pool.utils.manifest import validate_intact

STATE, COUNTS = "learner.safetensors", "learner.json"
NETWORK, BEST, OPTIMIZER, BEST_OPTIMIZER = "network", "best", "adam", "best_adam"
COUNTED = ("losses", "rate", "seconds", "step")
"""Attributes of a learner that a checkpoint stores in addition to its tensors."""


def save_learner(learner: FoldLearner, folder: Path) -> None:
    """Write weights, optimizer and counts to a folder."""
    tensors = {
        **prefixed(NETWORK, learner.network.state_dict()),
        **prefixed(BEST, learner.best),
        **prefixed(OPTIMIZER, adam_moments(learner.optimizer.state_dict())),
        **prefixed(BEST_OPTIMIZER, adam_moments(learner.best_optimizer)),
    }
    write_tensors(tensors, folder / STATE)
    counts = {name: getattr(learner, name) for name in COUNTED}
    with new_file(folder / COUNTS) as out:
        json.dump(counts, out)


def load_learner(learner: FoldLearner, folder: Path) -> None:
    """Restore a learner that was built with the same options."""
    tensors = load_file(folder / STATE, device=str(learner.device))
    learner.network.load_state_dict(under(NETWORK, tensors))
    learner.best = under(BEST, tensors)
    optimizer = learner.optimizer
    learner.best_optimizer = with_moments(optimizer, under(BEST_OPTIMIZER, tensors))
    if own := with_moments(optimizer, under(OPTIMIZER, tensors)):
        optimizer.load_state_dict(own)
    counts = json.loads((folder / COUNTS).read_text())
    for name in COUNTED:
        setattr(learner, name, counts[name])


def load_network(network: nn.Module, file: Path) -> None:
    """Read a network's weights.

    Raises:
        InputError: a missing or damaged file, or weights of another network.
    """
    validate_intact(file.parent, only=file.name)
    try:
        network.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file} cannot be read: {reason}") from error
