"""RLlib's group of runners where there is only a local one: it starts no Ray."""

from types import FunctionType
from typing import Any

from ray.rllib.algorithms import algorithm
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from typing_extensions import override


class LocalRunnerGroup(EnvRunnerGroup):
    """One runner, in this process.

    RLlib's group puts its configuration and each sync's weights into Ray's object
    store even if it has no remote runner, and so starts Ray.

    Args:
        config: configuration of the algorithm.
        **options: arguments for remote runners.
    """

    def __init__(self, *, config: Any, **options: Any) -> None:
        self._remote_config = config
        self._worker_manager = FaultTolerantActorManager(init_id=1)
        self._ignore_ray_errors_on_env_runners = False
        self._num_env_runners_dropped_lifetime = 0
        self._local_env_runner = config.env_runner_cls(
            config=config.copy(copy_frozen=False), worker_index=0, num_workers=0
        )

    @override
    def sync_weights(
        self, *, from_worker_or_learner_group: LearnerGroup, **options: Any
    ) -> None:
        part = f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}"
        state = from_worker_or_learner_group.get_state(
            components=part, inference_only=True
        )[COMPONENT_LEARNER]
        self._local_env_runner.set_state(
            {key: state[key] for key in (COMPONENT_RL_MODULE, WEIGHTS_SEQ_NO)}
        )


setup_locally = FunctionType(
    algorithm.Algorithm.setup.__code__,
    {**vars(algorithm), "EnvRunnerGroup": LocalRunnerGroup},
)
"""`Algorithm.setup` with a `LocalRunnerGroup`; it has no hook for another group."""
