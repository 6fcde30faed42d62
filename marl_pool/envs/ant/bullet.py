"""PyBullet's Ant: sensor channels as tokens that do not say which is which."""

from importlib.util import find_spec
from typing import Unpack

from marl_pool.envs.ant.base import JOINTS, AntEnv
from marl_pool.envs.base import EnvOptions
from marl_pool.envs.simulation.process import SimulatorProcess
from marl_pool.utils.types import PositiveInt

SIMULATOR = "marl_pool.envs.ant.bullet_simulator:AntBulletSimulator"
CHANNELS = (
    "height",
    "sin_target",
    "cos_target",
    *(f"velocity_{axis}" for axis in "xyz"),
    "roll",
    "pitch",
    *(f"{joint}_{what}" for joint in JOINTS for what in ("angle", "velocity")),
    *(f"foot_{leg}_contact" for leg in (1, 2, 3, 4)),
)
"""What the sensor measures, in the order of the tokens."""


class AntBullet(AntEnv):
    """Run along x on four legs in PyBullet, sensing channels without names.

    The action is eight torques in [-1, 1], of hip and ankle of legs 1 to 4. The reward
    is the speed towards a far target in m/s plus 1 for being alive, less 2 times the
    mean power, 0.1 times the mean squared torque and 0.1 for each joint at its limit.
    An episode ends (terminated), with -1 for the 1, when the torso is lower than
    0.26 m, and is truncated after ``max_steps`` steps of 0.0165 s.

    Each of the 28 channels is a token of its own: height above the start, direction of
    the target, velocity, roll and pitch, angle and velocity of each joint, contact of
    each foot, all clipped to [-5, 5]. All tokens are of one type, none is the agent
    itself, and none carries an index. So a policy that does not care for the order of
    its tokens and has no memory cannot tell the channels apart; ``channel_ids`` is the
    control that tells. The order never changes here: a shuffle is a perturbation.

    The published agents were evolved without the bonus for being alive and with each
    step's reward at least 0 (``alive_bonus=false``), and are tested on the full reward.
    ``experiment=ant_attention_neuron`` does so too: it sets ``fitness_env``, which
    leaves validation and evaluation as they are. For cloning (``experiment=ant_clone``)
    the previous action is the true one; in the published data it was always zero.

    The simulators of a world run in one process of their own, since pybullet_envs needs
    a stand-in for the old ``gym``. See `SimulatedEnv` for what a saved state costs.

    Source: ``AntBulletEnv-v0`` of PyBullet (Coumans and Bai, 2016), as in Tang and Ha,
    The sensory neuron as a transformer (2021), section 4.2. Starts are drawn by another
    generator than under the old ``gym``, so episodes of one seed differ from there.

    Args:
        num_envs: ants in the batch, each in a world of its own.
        alive_bonus: False takes the bonus off the reward, and what is then below 0.
        num_frames: readings of its channel that a token carries as features, the
            newest last, at least 1; the first reading stands for those before it.
        channel_ids: each channel is a type of its own.
        max_steps: steps until truncation.

    Raises:
        InputError: a number out of range.
        ModuleNotFoundError: pybullet, of the extra ``bullet``, is not installed.
        StoppedError: in a step or reset, the process of the simulators has ended.
    """

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        alive_bonus: bool = True,
        num_frames: PositiveInt = 1,
        channel_ids: bool = False,
        max_steps: PositiveInt = 1000,
        **common: Unpack[EnvOptions],
    ) -> None:
        # Missed now, not when the process starts; importing it here would disturb.
        if find_spec("pybullet") is None:
            raise ModuleNotFoundError("No module named 'pybullet'", name="pybullet")
        super().__init__(
            num_envs,
            simulators=SimulatorProcess(SIMULATOR, {"alive_bonus": alive_bonus}),
            channels=CHANNELS,
            num_frames=num_frames,
            channel_ids=channel_ids,
            max_steps=max_steps,
            **common,
        )
