"""A substitute for the parts of the package ``gym`` that pybullet_envs imports.

It adds modules named ``gym`` to ``sys.modules``, and pybullet_envs adds its own folder
to ``sys.path``: import both in the simulators' process only.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium


class _FullRegistry:
    """A registry that contains every id, so that pybullet_envs registers none."""

    def __contains__(self, _: object) -> bool:
        return True


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module


def install() -> None:
    """Make ``import pybullet_envs`` work without ``gym`` and ``pkg_resources``."""
    registry = SimpleNamespace(env_specs=_FullRegistry())
    gym = {name: getattr(gymnasium, name) for name in ("Env", "spaces", "utils")}
    _module("gym", **gym, __version__="0.21.0")
    _module("gym.envs")
    _module("gym.envs.registration", registry=registry, make=None, spec=None)
    for name in ("spaces", "utils", "utils.seeding"):
        sys.modules[f"gym.{name}"] = sys.modules[f"gymnasium.{name}"]
    _module(
        "pkg_resources", parse_version=lambda text: [int(n) for n in text.split(".")]
    )
