"""Batched environments, heuristics, and PettingZoo and Gymnasium views.

Importing this package registers the environments with both libraries, since neither
discovers plug-ins. Gymnasium imports it for an id with the prefix ``marl_pool.envs:``,
such as ``"marl_pool.envs:marl_pool/simple_centroid-v0"``. The environments themselves
are imported when they are made.
"""

from typing import TYPE_CHECKING, Any

import gymnasium
import pettingzoo

from marl_pool.options.construction import build
from marl_pool.options.names import resolve, unknown
from marl_pool.options.plugins import Registry
from marl_pool.options.signatures import ANY_OTHER, options_of
from marl_pool.utils.errors import InputError
from marl_pool.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from marl_pool.envs.base import Advance as Advance
    from marl_pool.envs.base import AgentGroup as AgentGroup
    from marl_pool.envs.base import BatchedEnv as BatchedEnv
    from marl_pool.envs.base import EnvOptions as EnvOptions
    from marl_pool.envs.base import Step as Step
    from marl_pool.envs.drawing.canvas import Disc as Disc
    from marl_pool.envs.drawing.canvas import Frame as Frame
    from marl_pool.envs.drawing.canvas import Projection as Projection
    from marl_pool.envs.particles.physics import Entities as Entities
    from marl_pool.envs.particles.physics import ParticleEnv as ParticleEnv
    from marl_pool.envs.tokenizers.base import Observer as Observer
    from marl_pool.envs.tokenizers.base import SlotTokenizer as SlotTokenizer
    from marl_pool.envs.tokenizers.base import Tokenizer as Tokenizer
    from marl_pool.envs.views import ParallelView
    from marl_pool.policies.action_spaces import Selection as Selection
    from marl_pool.policies.base import Policy

ENVS = Registry(
    "env",
    {
        "ant": "marl_pool.envs.ant.mujoco:Ant",
        "ant_bullet": "marl_pool.envs.ant.bullet:AntBullet",
        "boxworld": "marl_pool.envs.boxworld.env:BoxWorld",
        "car_racing": "marl_pool.envs.car_racing.env:CarRacing",
        "cartpole": "marl_pool.envs.cartpole.env:CartPole",
        "lbforaging": "marl_pool.envs.foraging.env:LevelBasedForaging",
        "mpev2_adversary": "marl_pool.envs.particles.mpev2_tasks:Adversary",
        "mpev2_guard": "marl_pool.envs.particles.mpev2_tasks:Guard",
        "mpev2_hunt": "marl_pool.envs.particles.mpev2_tasks:Hunt",
        "mpev2_repel": "marl_pool.envs.particles.mpev2_tasks:Repel",
        "mpev2_spread": "marl_pool.envs.particles.mpev2_tasks:Spread",
        "mpev2_tag": "marl_pool.envs.particles.mpev2_tasks:Tag",
        "pettingzoo": "marl_pool.envs.pettingzoo.env:PettingZooEnv",
        "pong": "marl_pool.envs.pong.env:Pong",
        "simple_adversary": "marl_pool.envs.particles.simple_adversary:SimpleAdversary",
        "simple_centroid": "marl_pool.envs.particles.simple_centroid:SimpleCentroid",
        "simple_push": "marl_pool.envs.particles.simple_push:SimplePush",
        "simple_reference": "marl_pool.envs.particles.simple_reference:SimpleReference",
        "simple_speaker_listener": (
            "marl_pool.envs.particles.simple_speaker_listener:SimpleSpeakerListener"
        ),
        "simple_spread": "marl_pool.envs.particles.simple_spread:SimpleSpread",
        "simple_tag": "marl_pool.envs.particles.simple_tag:SimpleTag",
        "simple_world_comm": (
            "marl_pool.envs.particles.simple_world_comm:SimpleWorldComm"
        ),
        "xor": "marl_pool.envs.xor.env:XOR",
    },
)

VERSIONS = {name: 0 for name in ENVS.built_in if name != "pettingzoo"}
"""`BatchedEnv.version` of each environment with an id, known without importing it."""

_MPEV2 = "marl_pool.envs.particles.mpev2_heuristics"
_SPEAKING = "marl_pool.envs.particles.speaking_heuristics"
_WORLD_COMM = "marl_pool.envs.particles.world_comm_heuristics"

HEURISTICS: dict[str, str | dict[str, str]] = {
    "boxworld": "marl_pool.envs.boxworld.solver:BoxWorldHeuristic",
    "cartpole": "marl_pool.envs.cartpole.heuristic:CartPoleHeuristic",
    "lbforaging": "marl_pool.envs.foraging.heuristic:ForagingHeuristic",
    "mpev2_adversary": f"{_MPEV2}:MPEv2AdversaryHeuristic",
    "mpev2_guard": f"{_MPEV2}:MPEv2GuardHeuristic",
    "mpev2_hunt": f"{_MPEV2}:MPEv2HuntHeuristic",
    "mpev2_repel": f"{_MPEV2}:MPEv2RepelHeuristic",
    "mpev2_spread": f"{_MPEV2}:MPEv2SpreadHeuristic",
    "mpev2_tag": f"{_MPEV2}:MPEv2TagHeuristic",
    "pong": "marl_pool.envs.pong.heuristic:PongHeuristic",
    "simple_adversary": dict.fromkeys(
        ("adversary", "agent"), f"{_SPEAKING}:GoalHeuristic"
    ),
    "simple_centroid": "marl_pool.envs.particles.heuristics:CentroidHeuristic",
    "simple_push": dict.fromkeys(("adversary", "agent"), f"{_SPEAKING}:GoalHeuristic"),
    "simple_reference": f"{_SPEAKING}:ReferenceHeuristic",
    "simple_speaker_listener": {
        "speaker": f"{_SPEAKING}:SpeakerHeuristic",
        "listener": f"{_SPEAKING}:ListenerHeuristic",
    },
    "simple_spread": "marl_pool.envs.particles.heuristics:SpreadHeuristic",
    "simple_tag": {
        "predator": "marl_pool.envs.particles.heuristics:ChaseHeuristic",
        "prey": "marl_pool.envs.particles.heuristics:FleeHeuristic",
    },
    "simple_world_comm": {
        "leadadversary": f"{_WORLD_COMM}:LeaderHeuristic",
        "adversary": f"{_WORLD_COMM}:HunterHeuristic",
        "agent": f"{_WORLD_COMM}:ForagerHeuristic",
    },
    "xor": "marl_pool.envs.xor.heuristic:XORHeuristic",
}
"""Heuristic of each environment: a class, or one for each group of agents."""


def registered_id(name: str) -> str:
    """Return the id of an environment: ``"marl_pool/<name>-v<version>"``."""
    return f"marl_pool/{name}-v{VERSIONS[name]}"


def _register_ids() -> None:
    for name in VERSIONS:
        id_, options = registered_id(name), {"name": name}
        if id_ not in pettingzoo.parallel_registry:
            entry = "marl_pool.envs:make_env"
            pettingzoo.register("parallel", id_, entry_point=entry, kwargs=options)
        if id_ not in gymnasium.registry:
            gymnasium.register(
                id_,
                entry_point="marl_pool.envs.views:OneAgentView",
                vector_entry_point="marl_pool.envs.vector_view:OneAgentVectorView",
                kwargs=options,
            )


_register_ids()


def env_names() -> list[str]:
    """Return the names of the registered environments."""
    return sorted(ENVS)


def make_batched_env(name: str, num_envs: int, **options: Any) -> "BatchedEnv":
    """Build a batch of environments.

    Args:
        name: one of `env_names`, or the ``package.module:Class`` of a `BatchedEnv`.
        num_envs: number of environments, at least 1.
        **options: options of the environment's constructor.

    Raises:
        InputError: an unknown name, a wrong option or a number out of range, or an
            environment that declares no groups of agents, or one without agents.
    """
    from marl_pool.envs.base import AgentGroup, BatchedEnv, EnvOptions
    from marl_pool.envs.contract import validate_groups

    # The program sets these options, so a user would not know them from a message.
    accepted = options_of(resolve(name, ENVS, "env", BatchedEnv)).keys()
    common = [key for key in EnvOptions.__annotations__ if key in options]
    missing = [key for key in common if accepted.isdisjoint((key, ANY_OTHER))]
    if missing:
        raise InputError(
            f"env {name!r}: expected a constructor that accepts {', '.join(missing)}, "
            f"as by **common passed on to BatchedEnv; got {', '.join(accepted)}"
        )
    sizes = {"num_envs": num_envs}
    env: BatchedEnv = build(name, ENVS, "env", BatchedEnv, sizes | options, sizes)
    validate_groups(env, AgentGroup)
    return env


def make_env(
    name: str, *, render_mode: str | None = None, **options: Any
) -> "ParallelView":
    """Build one environment as a PettingZoo ``ParallelEnv``; see `ParallelView`."""
    from marl_pool.envs.views import ParallelView

    return ParallelView(name, render_mode=render_mode, **options)


def heuristic_names() -> list[str]:
    """Return the names of the environments that have a heuristic policy."""
    return sorted(HEURISTICS)


def make_heuristic(
    name: str, group: "AgentGroup", *, role: str | None = None, **options: Any
) -> "Policy":
    """Build the scripted policy that serves as an environment's reference.

    Args:
        name: an environment of `heuristic_names`, or the ``package.module:Class`` of
            a policy.
        group: the agents that it controls, from ``env.groups``.
        role: name of the group, where each group has its own heuristic.
        **options: options of the heuristic's constructor.

    Raises:
        InputError: an unknown name, or a role without a heuristic.
    """
    from marl_pool.policies.base import Policy

    roles = HEURISTICS.get(name)
    if isinstance(roles, dict) and role not in roles:
        raise unknown(f"role of heuristic {name!r}:", role, roles)
    targets = {
        env: entry if isinstance(entry, str) else entry.get(str(role), "")
        for env, entry in HEURISTICS.items()
    }
    return build(name, targets, "heuristic", Policy, options, {"group": group})


__getattr__, __dir__ = lazy_exports(__name__)
