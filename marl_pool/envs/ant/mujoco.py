"""MuJoCo's Ant with sensor channels as unordered tokens."""

from functools import partial
from typing import Unpack
from warnings import catch_warnings

import numpy as np
from typing_extensions import override

from marl_pool.envs.ant.base import JOINTS, AntEnv, AntOptions
from marl_pool.envs.simulation import Simulator, SimulatorStep
from marl_pool.options.types import Episodes

AXES = "xyz"
CHANNELS = (
    "height",
    *(f"orientation_{part}" for part in "wxyz"),
    *(f"{joint}_angle" for joint in JOINTS),
    *(f"velocity_{axis}" for axis in AXES),
    *(f"angular_velocity_{axis}" for axis in AXES),
    *(f"{joint}_velocity" for joint in JOINTS),
)
"""Channels of the sensors, in the order of the tokens."""
BODIES = (
    "torso",
    *(f"{part}_{leg}" for leg in (1, 2, 3, 4) for part in ("aux", "leg", "foot")),
)
CONTACTS = tuple(
    f"{body}_{kind}_{axis}"
    for body in BODIES
    for kind in ("torque", "force")
    for axis in AXES
)
"""Channels of the contact forces, which follow `CHANNELS`."""


class Ant(AntEnv):
    r"""Run along x on four legs in MuJoCo, observing unlabeled sensor channels.

    The action is eight torques in [-1, 1], in MuJoCo's order: hip and ankle of leg 4,
    then of legs 1, 2 and 3. The reward of a step is

    .. math:: v + 1 - 0.5\, \|a\|^2 - 0.0005\, \|f\|^2

    with the speed v along x in m/s, the alive bonus of 1, the torques a and the contact
    forces f, clipped to [-1, 1]. The episode ends (terminated) when the torso is not
    between 0.2 and 1 m high, and is truncated after ``max_steps`` steps of 0.05 s.

    Each of the 27 channels is a token: height, orientation, joint angles and
    velocities. With ``contact_forces`` 78 more follow. All tokens have the same type,
    none represents the agent, and none contains an index. A permutation-invariant
    policy without a memory therefore cannot tell the channels apart; ``channel_ids`` is
    the control that lets it. The environment keeps the order: ``perturbation=shuffle``
    permutes it.

    This is the maintained alternative to ``ant_bullet``, which the published agents
    play with 28 other channels. Simulators step one after another, at half a
    millisecond each. They cannot save their state; see `SimulatedEnv`.

    Source: Gymnasium's Ant-v5 on MuJoCo (Todorov et al., 2012,
    https://doi.org/10.1109/IROS.2012.6386109), with its rewards and starts.

    Args:
        contact_forces: include the 78 channels of the forces on each body, as Gymnasium
            does by default.
        alive_bonus: include the bonus; without it, negative rewards become 0, as in the
            fitness of the published search on ``ant_bullet``.

    Raises:
        ModuleNotFoundError: mujoco or imageio, of the extra ``mujoco``, is missing.
    """

    def __init__(
        self,
        num_envs: Episodes,
        *,
        contact_forces: bool = False,
        alive_bonus: bool = True,
        **common: Unpack[AntOptions],
    ) -> None:
        with catch_warnings(action="ignore"):
            import imageio  # noqa: F401  Gymnasium would not name the missing one
            import mujoco  # noqa: F401
            from gymnasium.envs.mujoco import ant_v5  # noqa: F401
        super().__init__(
            num_envs,
            build=partial(
                AntSimulator, contact_forces=contact_forces, alive_bonus=alive_bonus
            ),
            channels=CHANNELS + CONTACTS if contact_forces else CHANNELS,
            **common,
        )


class AntSimulator(Simulator[SimulatorStep]):
    """Gymnasium's Ant-v5; an observation is its channels, then its parts' positions."""

    def __init__(self, *, contact_forces: bool, alive_bonus: bool) -> None:
        from gymnasium.envs.mujoco import ant_v5

        self._env = ant_v5.AntEnv(include_cfrc_ext_in_observation=contact_forces)
        self._alive_bonus = alive_bonus

    @override
    def reset(self, seed: int) -> SimulatorStep:
        return SimulatorStep(self._with_parts(self._env.reset(seed=seed)[0]))

    @override
    def step(self, action: np.ndarray) -> SimulatorStep:
        channels, reward, terminated, _, info = self._env.step(action)
        if not self._alive_bonus:
            reward = max(0.0, reward - info["reward_survive"])
        readings = self._with_parts(channels)
        return SimulatorStep(readings, float(reward), bool(terminated))

    def _with_parts(self, channels: np.ndarray) -> np.ndarray:
        # Geom 0 is the floor, then come the torso and the three parts of each leg.
        parts: np.ndarray = self._env.data.geom_xpos[1:]
        return np.concatenate([channels, parts.ravel()])
