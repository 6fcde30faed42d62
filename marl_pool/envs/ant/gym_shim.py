"""A substitute for the parts of the package ``gym`` that pybullet_envs imports."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium


class _FullRegistry:
    """A registry that contains every id, so that pybullet_envs registers none."""

    def __contains__(self, _: object) -> bool:
        return True


@contextmanager
def gym_shim() -> Iterator[None]:
    """Make ``import pybullet_envs`` work without ``gym`` and ``pkg_resources``.

    The modules of these names exist in this context only, and the folder that
    pybullet_envs adds to ``sys.path`` is removed again.
    """
    registry = SimpleNamespace(env_specs=_FullRegistry())
    gym = {name: getattr(gymnasium, name) for name in ("Env", "spaces", "utils")}
    modules = {
        "gym": _module("gym", **gym, __version__="0.21.0"),
        "gym.envs": _module("gym.envs"),
        "gym.envs.registration": _module(
            "gym.envs.registration", registry=registry, make=None, spec=None
        ),
        "gym.spaces": gymnasium.spaces,
        "gym.utils": gymnasium.utils,
        "gym.utils.seeding": gymnasium.utils.seeding,
        "pkg_resources": _module("pkg_resources", parse_version=_version),
    }
    known = {name: sys.modules[name] for name in modules if name in sys.modules}
    path = list(sys.path)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(known)
        sys.path[:] = path


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(names)
    return module


def _version(text: str) -> list[int]:
    return [int(number) for number in text.split(".")]
