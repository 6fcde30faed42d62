"""Policies that are shipped with the package, each with the world it acts in.

Each is a folder ``NAME/`` that `marl_pool.policies.storage.save_policies` wrote, with
``env``: ``config.json``, ``model.safetensors`` and their ``manifest.json``.
"""

import json
from pathlib import Path

from marl_pool.utils import names

FOLDER = Path(__file__).parent
CONFIG = "config.json"


def pretrained_names() -> list[str]:
    """The policies that there are."""
    return sorted(file.parent.name for file in FOLDER.glob(f"*/{CONFIG}"))


def pretrained_path(name: str) -> Path:
    """The folder of a policy, for `marl_pool.load_policy`.

    Raises:
        InputError: no such policy.
    """
    known = pretrained_names()
    if name not in known:
        raise names.unknown("pretrained policy", name, known)
    return FOLDER / name


def pretrained_summary(name: str) -> str:
    """A word on a policy: what acts in which world."""
    config = json.loads((pretrained_path(name) / CONFIG).read_text(encoding="utf-8"))
    kinds = dict.fromkeys(module["class"] for module in config["modules"].values())
    env = dict(config["env"])
    world = " ".join([env.pop("name"), *(f"{key}={env[key]}" for key in env)])
    return f"{', '.join(kinds)} in {world}"
