"""Import of AttentionNeuron's published weights.

The ``.npz`` files of the folder AttentionNeuron in
https://github.com/google/brain-tokyo-workshop hold one array ``params``: all tensors of
a model one after the other. `PUBLISHED` lists the layers that hold them here.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from marl_pool.cli.common import print_paths
from marl_pool.files.atomic import new_folder
from marl_pool.files.reading import read_npz
from marl_pool.options.construction import build
from marl_pool.options.names import unknown
from marl_pool.policies import POLICIES
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.storage import save_policies
from marl_pool.tokens import TokenSpec
from marl_pool.utils.errors import InputError, explain_os_errors
from marl_pool.utils.paths import user_path
from marl_pool_studies.attention_neuron.published import DATA
from marl_pool_studies.plugin import WEIGHTS

ARRAY = "params"
"""Only key of a file."""


class PublishedModel(NamedTuple):
    """A published model."""

    env: Mapping[str, Any]
    """Environment that it acts in: name, and options that are not defaults."""
    spec: Mapping[str, Any]
    """Arguments of that environment's `TokenSpec`."""
    num_actions: int
    """Size of an action, whose numbers are in [-1, 1]."""
    policy: Mapping[str, Any]
    """Equivalent policy of this package: name and options."""
    layers: Sequence[str]
    """Layers of that policy, in the order of the file."""
    by_pixel: Mapping[str, Sequence[int]] = {}
    """Pixels and frames by the name of a weight whose first columns are ordered pixel
    by pixel in the file, with all frames of a pixel side by side; this package orders
    them frame by frame."""

    @property
    def size(self) -> int:
        """Numbers in the file."""
        return sum(parameter.numel() for parameter in self.build().parameters())

    def build(self) -> SpecifiedPolicy:
        """Return the policy with random weights."""
        bound = (1.0,) * self.num_actions
        actions = ActionSpec(low=tuple(-limit for limit in bound), high=bound)
        spec = TokenSpec(**self.spec)
        context = {"spec": spec, "action_space": actions, "seed": 0}
        options = dict(self.policy)
        policy: SpecifiedPolicy = build(
            options.pop("name"), POLICIES, "policy", SpecifiedPolicy, options, context
        )
        return policy


PUBLISHED = {name: PublishedModel(**model) for name, model in DATA["models"].items()}
"""Published models by the name of their folder, from ``published.yaml``."""


def import_command(arguments: Namespace, overrides: list[str]) -> int:
    """Run the verb ``import-weights``."""
    if arguments.source not in WEIGHTS:
        raise unknown("source", arguments.source, WEIGHTS)
    print_paths([import_weights(arguments.file, arguments.agent, arguments.out)])
    return 0


def import_weights(file: str | Path, agent: str, out: str | Path) -> Path:
    """Convert a published file to the new folder of a policy, for `load_policy`.

    ``config.json`` holds the policy's environment under ``env``.

    Raises:
        InputError: a folder that exists or cannot be written; see `load_published`.
    """
    folder = user_path(out)
    policy = load_published(file, agent)
    with explain_os_errors(f"{folder} cannot be written"):
        if folder.exists() or folder.is_symlink():
            raise InputError(f"{folder} exists; choose another --out")
        with new_folder(folder) as new:
            env = PUBLISHED[agent].env
            save_policies({"policy": policy}, {"agent": "policy"}, new, env=env)
    return folder


def load_published(file: str | Path, agent: str) -> SpecifiedPolicy:
    """Build the policy of a published ``.npz`` file, without unpickling anything.

    Raises:
        InputError: an unknown agent; a file that is missing, damaged or of another
            kind, or whose array has another name, another length or numbers that are
            not finite.
    """
    if agent not in PUBLISHED:
        raise unknown("agent", agent, PUBLISHED)
    published = PUBLISHED[agent]
    policy = published.build()
    array, size = _read(user_path(file)), published.size
    if array.ndim != 1 or array.dtype.kind != "f" or len(array) != size:
        fits = [name for name, model in PUBLISHED.items() if model.size == array.size]
        hint = f"; that is the size of {fits[0]}" if fits else ""
        raise InputError(
            f"{file}: expected {size} numbers for {agent}, got an array of shape "
            f"{array.shape} and type {array.dtype}{hint}"
        )
    with np.errstate(over="ignore"):
        # Published arrays may have another precision.
        numbers = torch.from_numpy(array.astype(np.float32))
    if num_invalid := int((~numbers.isfinite()).sum()):
        raise InputError(f"{file}: expected finite numbers, but {num_invalid} are not")
    # The file holds one tensor after the other, each row by row.
    for layer in published.layers:
        for name, parameter in policy.get_submodule(layer).named_parameters(layer):
            chunk, numbers = numbers.tensor_split([parameter.numel()])
            weights = chunk.view_as(parameter)
            # Order the first columns frame by frame.
            if name in published.by_pixel:
                pixels, frames = published.by_pixel[name]
                moved, remainder = weights.tensor_split([pixels * frames], dim=1)
                moved = moved.unflatten(1, (pixels, frames)).transpose(1, 2).flatten(1)
                weights = torch.cat([moved, remainder], dim=1)
            with torch.no_grad():
                parameter.copy_(weights)
    return policy.eval()


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
        names = ", ".join(map(repr, [*arrays][:3])) or "none"
        suffix = ", …" if len(arrays) > 3 else ""
        raise InputError(f"{file}: expected one array {ARRAY!r}, got {names}{suffix}")
    return arrays[ARRAY]
