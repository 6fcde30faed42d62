"""PyBullet's Ant with sensor channels as unordered tokens."""

from importlib.util import find_spec
from typing import Unpack

from marl_pool.envs.ant.base import JOINTS, AntEnv, AntOptions
from marl_pool.envs.simulation.env import SimulatorStep
from marl_pool.envs.simulation.simulator import Simulator
from marl_pool.utils.types import PositiveInt

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


class AntBullet(AntEnv):
    r"""Run along x on four legs in PyBullet, observing unlabelled sensor channels.

    The action is eight torques in [-1, 1], of hip and ankle of legs 1 to 4. The reward
    of a step is

    .. math:: v + b - 2 P - 0.1\, \overline{a^2} - 0.1\, n

    with the speed v towards a distant target in m/s, the alive bonus b of 1, the mean
    power P, the mean squared torque and the number n of joints at their limits. The
    episode ends (terminated), with b = -1, when the torso is lower than 0.26 m, and is
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

    Simulators step one after the other, at a millisecond each. They cannot save their
    state; see `SimulatedEnv`.

    Source: ``AntBulletEnv-v0`` of `PyBullet <https://pybullet.org>`_ (Coumans and Bai,
    2016), as in section 4.2 of `Tang and Ha, 2021
    <https://arxiv.org/abs/2109.02869>`_. Starts are sampled from another generator than
    with ``gym``, so episodes of one seed differ from the source.

    Args:
        alive_bonus: include the bonus; without it, negative rewards become 0.

    Raises:
        ModuleNotFoundError: pybullet, of the extra ``bullet``, is not installed.
    """

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        alive_bonus: bool = True,
        **common: Unpack[AntOptions],
    ) -> None:
        # Fail here, and import it at the first reset.
        if find_spec("pybullet") is None:
            raise ModuleNotFoundError("No module named 'pybullet'", name="pybullet")

        def build() -> Simulator[SimulatorStep]:
            from marl_pool.envs.ant.bullet_simulator import AntBulletSimulator

            return AntBulletSimulator(alive_bonus=alive_bonus)

        super().__init__(num_envs, build=build, channels=CHANNELS, **common)
