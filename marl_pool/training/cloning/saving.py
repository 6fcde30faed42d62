"""What a checkpoint holds of a learner: weights, and what Adam remembers of each."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from marl_pool.training.cloning.learner import Learner

FILE = "learner.safetensors"
STUDENT, ADAM = "student", "adam"


def save_learner(learner: Learner, folder: Path) -> None:
    """Write a learner."""
    state = {
        f"{STUDENT}/{name}": part for name, part in learner.student.state_dict().items()
    }
    for number, own in learner.optimizer.state_dict()["state"].items():
        state |= {f"{ADAM}/{number}/{name}": part for name, part in own.items()}
    tensors = {name: part.detach().cpu().contiguous() for name, part in state.items()}
    # Written by Python, a full disk is an OSError like any other.
    (folder / FILE).write_bytes(save(tensors))


def load_learner(learner: Learner, folder: Path) -> None:
    """Continue where a learner was saved that was built alike."""
    state = load_file(folder / FILE)
    learner.student.load_state_dict(_under(STUDENT, state))
    moments: dict[int, dict[str, Tensor]] = {}
    for key, part in _under(ADAM, state).items():
        number, _, name = key.partition("/")
        moments.setdefault(int(number), {})[name] = part
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {
        key.removeprefix(start): part
        for key, part in state.items()
        if key.startswith(start)
    }
