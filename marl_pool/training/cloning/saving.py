"""What a checkpoint holds of a learner: weights, and what Adam remembers of each."""

from pathlib import Path

from safetensors.torch import load_file

from marl_pool.training.cloning.learner import Learner
from marl_pool.training.state import (
    moments,
    prefixed,
    under,
    with_moments,
    write_tensors,
)

FILE = "learner.safetensors"
STUDENT, ADAM = "student", "adam"


def save_learner(learner: Learner, folder: Path) -> None:
    """Write a learner."""
    tensors = {
        **prefixed(STUDENT, learner.student.state_dict()),
        **prefixed(ADAM, moments(learner.optimizer.state_dict())),
    }
    write_tensors(tensors, folder / FILE)


def load_learner(learner: Learner, folder: Path) -> None:
    """Continue where a learner was saved that was built alike."""
    tensors = load_file(folder / FILE)
    learner.student.load_state_dict(under(STUDENT, tensors))
    if own := with_moments(learner.optimizer, under(ADAM, tensors)):
        learner.optimizer.load_state_dict(own)
