"""Import of AttentionNeuron's published weights.

The ``.npz`` files of the folder AttentionNeuron in
https://github.com/google/brain-tokyo-workshop hold one array ``params``: all tensors of
a model one after the other, each row by row. `PUBLISHED` lists the tensors of each
model with their parameter names in this package.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.policies import POLICIES
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.storage import save_policies
from marl_pool.studies.attention_neuron.published import CAR_RACING
from marl_pool.tokens import TokenSpec
from marl_pool.utils.atomic import new_folder
from marl_pool.utils.construction import build
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import unknown
from marl_pool.utils.reading import read_npz

ARRAY = "params"
"""Only key of a file."""
GROUP = "agent"
"""Group of agents that each policy controls."""


class Part(NamedTuple):
    """A tensor in a file."""

    name: str
    """Name of the parameter in this package."""
    shape: tuple[int, ...]
    """Published shape, outputs first, as in torch."""
    by_pixel: tuple[int, int] | None = None
    """Pixels and frames, if the first columns are ordered pixel by pixel, with all
    frames of a pixel side by side; this package orders them frame by frame. None if the
    order is the same."""


class PublishedModel(NamedTuple):
    """A published model.

    Attributes:
        env: environment that it acts in: name, and options that are not defaults.
        spec: spec of that environment's tokens.
        num_actions: size of an action, whose numbers are in [-1, 1].
        policy: equivalent policy of this package: name and options.
        parts: tensors in the order of the file.
    """

    env: Mapping[str, Any]
    spec: TokenSpec
    num_actions: int
    policy: Mapping[str, Any]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Numbers in the file."""
        return sum(math.prod(part.shape) for part in self.parts)

    def build(self) -> SpecifiedPolicy:
        """Return the policy with random weights."""
        bound = (1.0,) * self.num_actions
        actions = ActionSpec(low=tuple(-one for one in bound), high=bound)
        context = {"spec": self.spec, "action_space": actions, "seed": 0}
        options = dict(self.policy)
        policy: SpecifiedPolicy = build(
            options.pop("name"), POLICIES, "policy", SpecifiedPolicy, options, context
        )
        return policy


def _linear(
    name: str, outputs: int, inputs: int, by_pixel: tuple[int, int] | None = None
) -> tuple[Part, ...]:
    weight = Part(f"{name}.weight", (outputs, inputs), by_pixel)
    return weight, Part(f"{name}.bias", (outputs,))


def _lstm(name: str, units: int, inputs: int) -> tuple[Part, ...]:
    gates = 4 * units
    return (
        Part(f"{name}.weight_ih", (gates, inputs)),
        Part(f"{name}.weight_hh", (gates, units)),
        Part(f"{name}.bias_ih", (gates,)),
        Part(f"{name}.bias_hh", (gates,)),
    )


_CARTPOLE = TokenSpec(5, 1, ("channel",), has_self=False)
_ANT = TokenSpec(28, 1, ("channel",), has_self=False)
_PATCHES = TokenSpec(256, 144, ("patch",), has_self=False, dtype="uint8", num_frames=4)
_OVERLAPPING = TokenSpec(529, 147, ("patch",), has_self=False, dtype="uint8")

PUBLISHED: dict[str, PublishedModel] = {
    "cartpole_pi": PublishedModel(
        env={"name": "cartpole"},
        spec=_CARTPOLE,
        num_actions=1,
        policy={
            "name": "sensory",
            "pooling": {
                "name": "attention_neuron",
                "num_codes": 16,
                "message_dim": 32,
                "scale": False,
                "bias": False,
            },
            "hidden": [],
        },
        parts=(
            *_lstm("sensor.cell", units=8, inputs=2),
            Part("sensor.query.weight", (32, 8)),
            Part("sensor.key.weight", (32, 8)),
            *_linear("body.0", 1, 16),
        ),
    ),
    "ant_pi": PublishedModel(
        env={"name": "ant_bullet"},
        spec=_ANT,
        num_actions=8,
        policy={
            "name": "sensory",
            "pooling": {"name": "attention_neuron", "num_codes": 32, "message_dim": 32},
            "hidden": [32],
        },
        parts=(
            *_lstm("sensor.cell", units=8, inputs=9),
            *_linear("sensor.query", 32, 8),
            *_linear("sensor.key", 32, 8),
            *_linear("body.0", 32, 32),
            *_linear("body.2", 8, 32),
        ),
    ),
    "ant_mlp": PublishedModel(
        env={"name": "ant_bullet"},
        spec=_ANT,
        num_actions=8,
        policy={"name": "feed_forward", "hidden": [32, 32]},
        parts=(
            *_linear("body.0", 32, 28),
            *_linear("body.2", 32, 32),
            *_linear("body.4", 8, 32),
        ),
    ),
    "carracing": PublishedModel(
        env={"name": "car_racing", **CAR_RACING},
        spec=_OVERLAPPING,
        num_actions=3,
        policy={
            "name": "attention_agent",
            "message_dim": 4,
            # The pixel in the middle of a patch, on a screen of 96.
            "first_place": 3 / 96,
            "place_step": 4 / 96,
        },
        parts=(
            *_linear("query", 4, 147),
            *_linear("key", 4, 147),
            *_lstm("cell", units=16, inputs=20),
            *_linear("output", 3, 16),
        ),
    ),
    "carracing_pi": PublishedModel(
        env={"name": "car_racing"},
        spec=_PATCHES,
        num_actions=3,
        policy={
            "name": "attention_agent",
            "pooling": {
                "name": "vision_neuron",
                "num_codes": 1024,
                "value_dim": 16,
                "message_dim": 16,
                "affine": False,
            },
            "message_dim": 4,
            "scale": False,
            "mixing": True,
        },
        parts=(
            *_linear("sensor.query", 16, 8),
            # This layer has two orders of pixels: the values' columns are frame by
            # frame, as here. The keys' last three are of the previous action.
            *_linear("sensor.key", 16, 3 * 36 + 3, by_pixel=(36, 3)),
            *_linear("sensor.value", 16, 4 * 36),
            *_linear("query", 4, 16),
            *_linear("key", 4, 16),
            *_lstm("cell", units=16, inputs=20),
            *_linear("output", 3, 16),
            *_linear("gate.0", 16, 16 + 3),
            *_linear("gate.2", 1, 16),
        ),
    ),
}
"""Published models by the name of their folder."""


def import_weights(file: str | Path, agent: str, out: str | Path) -> Path:
    """Convert a published file to the folder of a policy.

    ``config.json`` holds the environment that it acts in under ``env``.

    Args:
        file: an ``.npz`` with one array.
        agent: a key of `PUBLISHED`.
        out: new folder, read by `marl_pool.policies.storage.load_policy`.

    Returns:
        The folder.

    Raises:
        InputError: an unknown agent, a folder that exists or cannot be written, or a
            file that `load_published` rejects.
    """
    folder = Path(out)
    policy = load_published(file, agent)
    try:
        if folder.exists() or folder.is_symlink():
            raise InputError(f"{folder} exists; choose another --out")
        with new_folder(folder) as new:
            save_policies(
                {"policy": policy}, {GROUP: "policy"}, new, env=PUBLISHED[agent].env
            )
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    return folder


def load_published(file: str | Path, agent: str) -> SpecifiedPolicy:
    """Build the policy of a published file, without unpickling anything.

    Args:
        file: an ``.npz`` with one array.
        agent: a key of `PUBLISHED`.

    Raises:
        InputError: an unknown agent; a file that is missing, damaged or of another
            kind, or whose array has another name, another length or numbers that are
            not finite.
    """
    if agent not in PUBLISHED:
        raise unknown("agent", agent, PUBLISHED)
    published = PUBLISHED[agent]
    array = _read(Path(file))
    if array.ndim != 1 or array.dtype.kind != "f" or len(array) != published.size:
        fits = [name for name, each in PUBLISHED.items() if each.size == array.size]
        hint = f"; that is the size of {fits[0]}" if fits else ""
        raise InputError(
            f"{file}: expected {published.size} numbers for {agent}, got an array of "
            f"shape {array.shape} and type {array.dtype}{hint}"
        )
    with np.errstate(over="ignore"):
        numbers = torch.from_numpy(array.astype(np.float32))
    if bad := int((~numbers.isfinite()).sum()):
        raise InputError(f"{file}: expected finite numbers, but {bad} are not")
    # The file holds one tensor after the other.
    chunks = numbers.split([math.prod(part.shape) for part in published.parts])
    policy = published.build()
    policy.load_state_dict(
        {
            part.name: _arrange(chunk.view(part.shape), part.by_pixel)
            for part, chunk in zip(published.parts, chunks, strict=True)
        }
    )
    return policy.eval()


def _arrange(tensor: Tensor, by_pixel: tuple[int, int] | None) -> Tensor:
    """Order columns frame by frame; see `Part.by_pixel`."""
    if by_pixel is None:
        return tensor
    pixels, frames = by_pixel
    moved, others = tensor.tensor_split([pixels * frames], dim=1)
    by_frame = moved.unflatten(1, (pixels, frames)).transpose(1, 2).flatten(1)
    return torch.cat([by_frame, others], dim=1)


def _read(file: Path) -> np.ndarray:
    try:
        arrays = read_npz(file)
    except InputError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{file} cannot be read: {reason}") from None
    except Exception as error:  # any error of zipfile or numpy on a foreign file
        raise InputError(
            f"{file}: expected an .npz file of numbers; it is damaged or of another "
            f"kind ({type(error).__name__})"
        ) from None
    if [*arrays] != [ARRAY]:
        found = ", ".join(map(repr, [*arrays][:3])) or "none"
        more = ", …" if len(arrays) > 3 else ""
        raise InputError(f"{file}: expected one array {ARRAY!r}, got {found}{more}")
    return arrays[ARRAY]
