"""The ids of the worlds with PettingZoo and Gymnasium.

Neither looks for plug-ins by itself, so importing `marl_pool.envs` registers them;
``"marl_pool.envs:marl_pool/simple_centroid-v0"`` makes Gymnasium do that import.
No world is imported here.
"""

import gymnasium
import pettingzoo

NAMESPACE = "marl_pool"

VERSIONS: dict[str, int] = {
    "ant": 0,
    "ant_bullet": 0,
    "boxworld": 0,
    "car_racing": 0,
    "cartpole": 0,
    "pong": 0,
    "simple_centroid": 0,
    "simple_tag": 0,
}
"""The ``version`` of each world that has an id."""

ONE_LEARNER = (
    "ant",
    "ant_bullet",
    "boxworld",
    "car_racing",
    "cartpole",
    "pong",
    "simple_centroid",
    "simple_tag",
)
"""The worlds that have one learning agent by default."""


def registered_id(name: str) -> str:
    """The id of the world ``name``."""
    return f"{NAMESPACE}/{name}-v{VERSIONS[name]}"


def register_ids() -> None:
    """Register every world with PettingZoo, and one-learner worlds with Gymnasium."""
    for name in VERSIONS:
        id_, options = registered_id(name), {"name": name}
        if id_ not in pettingzoo.parallel_registry:
            entry = "marl_pool.envs:make_env"
            pettingzoo.register("parallel", id_, entry_point=entry, kwargs=options)
        if name in ONE_LEARNER and id_ not in gymnasium.registry:
            entry = "marl_pool.envs.views.gymnasium:OneAgentView"
            gymnasium.register(id_, entry_point=entry, kwargs=options)
