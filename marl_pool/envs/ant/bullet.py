"""PyBullet's Ant with sensor channels as unordered tokens."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Unpack

import gymnasium
import numpy as np
from typing_extensions import override

from marl_pool.envs.ant.base import JOINTS, AntEnv, AntOptions
from marl_pool.envs.simulation import Simulator, SimulatorStep
from marl_pool.options.types import Episodes
from marl_pool.utils.silence import silenced

CHANNELS = (
    "height",
    "sin_target",
    "cos_target",
    *(f"velocity_{axis}" for axis in "xyz"),
    "roll",
    "pitch",
    *(f"{joint}_{quantity}" for joint in JOINTS for quantity in ("angle", "velocity")),
    *(f"foot_{leg}_contact" for leg in (1, 2, 3, 4)),
)
"""Channels of the sensors, in the order of the tokens."""
PARTS = [0, 2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19]
"""Links of the four legs, from the torso outwards; the other links have no extent."""


class AntBullet(AntEnv):
    r"""Run along x on four legs in PyBullet, observing unlabeled sensor channels.

    The action is eight torques in [-1, 1], on hip and ankle of legs 1 to 4. The reward
    of a step is

    .. math:: v + b - 2 P - 0.1\, \overline{a^2} - 0.1\, n

    with the speed v towards a distant target in m/s, the alive bonus b of 1, the mean
    power P, the mean squared torque and the number n of joints at their limits. The
    episode ends (terminated), with b = -1, when the torso is below 0.26 m, and is
    truncated after ``max_steps`` steps of 0.0165 s.

    Each of the 28 channels is a token: height above the start, direction of the
    target, velocity, roll and pitch, angle and velocity of each joint, contact of each
    foot, all clipped to [-5, 5]. All tokens have the same type, none represents the
    agent, and none contains an index. A permutation-invariant policy without a memory
    therefore cannot tell the channels apart; ``channel_ids`` is the control that lets
    it. The environment keeps the order: ``perturbation=shuffle`` permutes it.

    The published agents were evolved without the alive bonus and with each step's
    reward clipped at 0 from below (``alive_bonus=false``), and are tested on the full
    reward. ``experiment=ant_attention_neuron`` does the same: it sets ``fitness_env``,
    which leaves validation and evaluation unchanged. For cloning
    (``experiment=ant_clone``) the previous action is the executed one; in the published
    data it was always zero.

    Simulators step one after another, at a millisecond each. They cannot save their
    state; see `SimulatedEnv`.

    Source: ``AntBulletEnv-v0`` of `PyBullet <https://pybullet.org>`_ (Coumans and Bai,
    2016), as in section 4.2 of `Tang and Ha, 2021
    <https://arxiv.org/abs/2109.02869>`_. Starts are sampled from a different generator
    than with ``gym``, so episodes of the same seed differ from the source.

    Args:
        alive_bonus: include the bonus; without it, negative rewards become 0.

    Raises:
        ModuleNotFoundError: pybullet, of the extra ``bullet``, is not installed.
    """

    def __init__(
        self,
        num_envs: Episodes,
        *,
        alive_bonus: bool = True,
        **common: Unpack[AntOptions],
    ) -> None:
        # Fail here; the import waits until the first reset.
        if find_spec("pybullet") is None:
            raise ModuleNotFoundError("No module named 'pybullet'", name="pybullet")

        build = partial(AntBulletSimulator, alive_bonus=alive_bonus)
        super().__init__(num_envs, build=build, channels=CHANNELS, **common)


class AntBulletSimulator(Simulator[SimulatorStep]):
    """AntBulletEnv-v0; an observation is its channels, then its parts' positions."""

    def __init__(self, *, alive_bonus: bool) -> None:
        self._alive_bonus = alive_bonus
        with gym_shim(), silenced():
            from pybullet_envs.gym_locomotion_envs import AntBulletEnv
        with silenced():
            self._env = AntBulletEnv()
            # The first episode after construction differs in the last digits from later
            # episodes of the same seed, so discard it.
            self.reset(0)

    @override
    def reset(self, seed: int) -> SimulatorStep:
        self._env.seed(seed)
        return SimulatorStep(self._with_parts(self._env.reset()))

    @override
    def step(self, action: np.ndarray) -> SimulatorStep:
        channels, reward, terminated, _ = self._env.step(action)
        if not self._alive_bonus:
            reward = max(0.0, sum(self._env.rewards[1:]))
        readings = self._with_parts(channels)
        return SimulatorStep(readings, float(reward), bool(terminated))

    def _with_parts(self, channels: np.ndarray) -> np.ndarray:
        client, body = self._env._p, self._env.robot.objects[0]
        torso, _ = client.getBasePositionAndOrientation(body)
        # The first entry of a link's state is its center of mass.
        links = [state[0] for state in client.getLinkStates(body, PARTS)]
        return np.concatenate([channels, np.ravel([torso, *links])])


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
        "pkg_resources": _module(
            "pkg_resources",
            parse_version=lambda text: [int(part) for part in text.split(".")],
        ),
    }
    replaced = {name: sys.modules[name] for name in modules if name in sys.modules}
    path = list(sys.path)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(replaced)
        sys.path[:] = path


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(names)
    return module
