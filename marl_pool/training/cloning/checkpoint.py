"""Checkpoints of a learner: weights and the state of Adam."""

from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from marl_pool.training.cloning.learner import Learner
from marl_pool.training.tensor_io import (
    adam_moments,
    prefixed,
    under,
    with_moments,
    write_tensors,
)

FILE = "learner.safetensors"
STUDENT, AUXILIARY_HEAD, ADAM = "student", "auxiliary_head", "adam"


def save_learner(learner: Learner, folder: Path) -> None:
    """Write weights and the optimizer's state to a folder."""
    tensors = prefixed(ADAM, adam_moments(learner.optimizer.state_dict()))
    for kind, module in _modules(learner).items():
        tensors |= prefixed(kind, module.state_dict())
    write_tensors(tensors, folder / FILE)


def load_learner(learner: Learner, folder: Path) -> None:
    """Restore a learner that was built with the same options."""
    tensors = load_file(folder / FILE)
    for kind, module in _modules(learner).items():
        module.load_state_dict(under(kind, tensors))
    if own := with_moments(learner.optimizer, under(ADAM, tensors)):
        learner.optimizer.load_state_dict(own)


def _modules(learner: Learner) -> dict[str, nn.Module]:
    """Map prefixes of names in the file to the trained modules."""
    found: dict[str, nn.Module] = {STUDENT: learner.student}
    if learner.auxiliary_head is not None:
        found[AUXILIARY_HEAD] = learner.auxiliary_head
    return found
