"""Registration of the environments with PettingZoo and Gymnasium.

Importing `marl_pool.envs` registers the ids, because neither library discovers
plug-ins; Gymnasium imports it for ``"marl_pool.envs:marl_pool/simple_centroid-v0"``.
The environments themselves are imported when they are made.
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
"""``version`` of each environment that has an id; each has one learner by default."""


def registered_id(name: str) -> str:
    """Return the id of an environment: ``"marl_pool/<name>-v<version>"``."""
    return f"{NAMESPACE}/{name}-v{VERSIONS[name]}"


def register_ids() -> None:
    """Register all environments with PettingZoo and Gymnasium."""
    for name in VERSIONS:
        id_, options = registered_id(name), {"name": name}
        if id_ not in pettingzoo.parallel_registry:
            entry = "marl_pool.envs:make_env"
            pettingzoo.register("parallel", id_, entry_point=entry, kwargs=options)
        if id_ not in gymnasium.registry:
            entry = "marl_pool.envs.views.gymnasium:OneAgentView"
            gymnasium.register(id_, entry_point=entry, kwargs=options)
