"""MuJoCo's Ant: sensor channels as tokens that do not say which is which."""

from typing import Unpack

from marl_pool.envs.ant.base import JOINTS, AntEnv
from marl_pool.envs.base import EnvOptions
from marl_pool.envs.simulation.simulator import Simulators, extra
from marl_pool.utils.types import PositiveInt

AXES = "xyz"
CHANNELS = (
    "height",
    *(f"orientation_{part}" for part in "wxyz"),
    *(f"{joint}_angle" for joint in JOINTS),
    *(f"velocity_{axis}" for axis in AXES),
    *(f"angular_velocity_{axis}" for axis in AXES),
    *(f"{joint}_velocity" for joint in JOINTS),
)
"""What the sensor measures, in the order of the tokens."""
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
"""The channels of contact forces, which follow."""


class Ant(AntEnv):
    """Run along x on four legs, sensing channels without names.

    The action is eight torques in [-1, 1], in MuJoCo's order: hip and ankle of leg 4,
    then of legs 1, 2 and 3. The reward is the speed along x plus 1 for being healthy,
    less 0.5 times the squared torques and 0.0005 times the squared contact forces. An
    episode ends (terminated) when the torso is not between 0.2 and 1 m high, and is
    truncated after ``max_steps`` steps of 0.05 s.

    Each of the 27 channels is a token of its own: height, orientation, joint angles
    and velocities. With ``contact_forces`` 78 follow, clipped to [-1, 1]. All tokens
    are of one type, none is the agent itself, and none carries an index. So a policy
    that does not care for the order of its tokens and has no memory cannot tell the
    channels apart; ``channel_ids`` is the control that tells. The order never changes
    here: a shuffle is a perturbation.

    This is today's alternative to ``ant_bullet``, on which the published agents run:
    theirs senses 28 other channels. A simulator steps in half a millisecond, one after
    the other; see `SimulatedEnv` for what a saved state costs.

    Source: Gymnasium's Ant-v5 on MuJoCo (Todorov et al., 2012), rewards and starts as
    there.

    Args:
        num_envs: ants in the batch, each in a world of its own.
        contact_forces: the 78 channels of the forces on each body are there too, as
            in Gymnasium by default.
        alive_bonus: False takes the 1 off the reward, and what is then below 0, as
            the published search on ``ant_bullet`` does for its fitness.
        num_frames: readings of its channel that a token carries as features, the
            newest last, at least 1; the first reading stands for those before it.
        channel_ids: each channel is a type of its own.
        max_steps: steps until truncation.

    Raises:
        InputError: a number out of range.
        ModuleNotFoundError: mujoco or imageio, of the extra ``mujoco``, is missing.
    """

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        contact_forces: bool = False,
        alive_bonus: bool = True,
        num_frames: PositiveInt = 1,
        channel_ids: bool = False,
        max_steps: PositiveInt = 1000,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(
            num_envs,
            simulators=_simulators(contact_forces, alive_bonus),
            channels=CHANNELS + CONTACTS * contact_forces,
            num_frames=num_frames,
            channel_ids=channel_ids,
            max_steps=max_steps,
            **common,
        )


def _simulators(contact_forces: bool, alive_bonus: bool) -> Simulators:
    with extra("mujoco"):
        import imageio  # noqa: F401  Gymnasium would not say which one is missing
        import mujoco  # noqa: F401

        from marl_pool.envs.ant.mujoco_simulator import AntSimulator
    options = {"contact_forces": contact_forces, "alive_bonus": alive_bonus}
    return Simulators(lambda: AntSimulator(**options))
