"""RLlib's PPO with local tensors and restarts, and its checkpoints."""

import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from ray.rllib import core
from ray.rllib.algorithms import algorithm
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
    WEIGHTS_SEQ_NO,
)
from ray.tune.trainable import Trainable
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from typing_extensions import override

from marl_pool.files.atomic import new_binary_file
from marl_pool.kernels.functional import strip_prefix
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.storage import save_policies
from marl_pool.tokens import Tokens
from marl_pool.training.fixed_policies import Fixed, frozen_module
from marl_pool.training.ppo.batch import ModuleShards
from marl_pool.training.ppo.faults import all_learners_live, wait_for_runner
from marl_pool.training.ppo.module import build_policy
from marl_pool.training.ppo.runner import RESTARTS
from marl_pool.training.signals import patience
from marl_pool.utils.errors import InputError

UPDATE_SECONDS = 1800.0
"""Limit on one update by remote learners, in seconds."""
RESTART_SECONDS = 120.0
"""Longest wait for a restarted runner when all runners have died, in seconds."""
ALGORITHM_STATE, RUNNER_STATE = "algorithm_state.pt", "env_runner/state.pt"
LEARNER_STATE = "learner_group/learner/state.pt"
MODULE_STATE = "learner_group/learner/rl_module/{}/module_state.pt"
"""Paths in a checkpoint, as RLlib names them but for the suffix."""
PLAIN_GLOBALS: list[Any] = [
    Tokens,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"},
    # The functions that rebuild arrays and scalars.
    np.zeros(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
]
"""What a state may name besides torch's and Python's plain types."""


class BatchedPPO(PPO):
    """RLlib's PPO, with tensors between local processes and restarted remote runners.

    If one process samples and learns, a batch goes from the runner to the learner as
    tensors on their device. Remote runners return episodes, as in RLlib. Both ways give
    the same update, bit for bit on one thread.

    Restarted runners continue with new episodes.

    Attributes:
        restarts: number of restarted runners in this session.
    """

    restarts = 0

    @property
    def deaths(self) -> int:
        """Number of runners that died in this session."""
        runners = self.env_runner_group
        num_runners = runners.num_remote_env_runners()
        return self.restarts + num_runners - runners.num_healthy_remote_env_runners()

    @override
    def setup(self, config: PPOConfig) -> None:
        if not has_processes(self.config):
            setup_locally(self, config)
            return
        super().setup(config)
        if self.config.num_learners:
            # RLlib has no hook for the division of a batch, and no time limit on an
            # update in which learners hang: raise TimeoutError after `UPDATE_SECONDS`.
            update, limit = self.learner_group.update, UPDATE_SECONDS

            def update_in_time(*, episodes: Any, **options: Any) -> Any:
                with patience("updating the learners", limit, interval=limit / 3):
                    data = ModuleShards(episodes=episodes)
                    return update(training_data=data, **options)

            self.learner_group.update = update_in_time

    @override
    def training_step(self) -> None:
        if has_processes(self.config):
            super().training_step()
            return
        runner = self.env_runner
        # Sample; there is no batch if the runner failed or no learning agent acted.
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            batch = runner.sample_batch()
        self.metrics.aggregate([runner.get_metrics()], key=ENV_RUNNER_RESULTS)
        if batch is None:
            return
        # Learn.
        steps = (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            results = self.learner_group.update(
                batch=batch,
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self.metrics.peek(steps)},
                num_epochs=self.config.num_epochs,
                shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
            )
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.learner_group.foreach_learner(runner.copy_weights)

    @override
    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # RLlib would copy its whole configuration into the result of each iteration.
        return Trainable.get_auto_filled_metrics(self, *args, **kwargs) | {"config": {}}

    @override
    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        wait_for_runner(env_runner_group, RESTART_SECONDS)
        restored: list[int] = super().restore_env_runners(env_runner_group)
        if restored:
            self.restarts += len(restored)
            env_runner_group.foreach_env_runner(
                "set_state",
                kwargs={"state": {RESTARTS: self.restarts}},
                local_env_runner=False,
                remote_worker_ids=restored,
            )
        return restored

    def _setup_logdir(self) -> None:
        # RLlib would make a folder in ~/ray_results, which runs do not use.
        self._logdir = tempfile.gettempdir()


def has_processes(config: PPOConfig) -> bool:
    """Return True for remote runners or learners, which need Ray."""
    return config.num_env_runners + config.num_learners > 0


class LocalRunnerGroup(EnvRunnerGroup):
    """One runner, in this process.

    RLlib's group puts its configuration and each sync's weights into Ray's object
    store even if it has no remote runner, and so starts Ray.
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
        part = f"{core.COMPONENT_LEARNER}/{core.COMPONENT_RL_MODULE}"
        state = from_worker_or_learner_group.get_state(
            components=part, inference_only=True
        )[core.COMPONENT_LEARNER]
        self._local_env_runner.set_state(
            {key: state[key] for key in (core.COMPONENT_RL_MODULE, WEIGHTS_SEQ_NO)}
        )


setup_locally = FunctionType(
    algorithm.Algorithm.setup.__code__,
    {**vars(algorithm), "EnvRunnerGroup": LocalRunnerGroup},
)
"""`Algorithm.setup` with a `LocalRunnerGroup`; it has no hook for another group."""


def save_algorithm(algo: BatchedPPO, folder: Path) -> None:
    """Write the complete state of an algorithm, for an exact resume.

    RLlib lets a remote learner write its part of the state to its machine's disk. Here
    the driver collects and writes all parts, under RLlib's names, in a form that is
    read without running code: tensors, `Tokens`, numpy arrays and Python's plain types.

    Raises:
        OSError: a learner died, or the files cannot be written.
        InputError: a part of the state, such as a plug-in's, has another type.
    """
    # RLlib would silently leave out the state of a dead learner.
    if not all_learners_live(algo):
        raise OSError("a learner died")
    # Collect the state, and split it into RLlib's files.
    state = dict(algo.get_state())
    learner = dict(state.pop(core.COMPONENT_LEARNER_GROUP)[core.COMPONENT_LEARNER])
    modules = learner.pop(core.COMPONENT_RL_MODULE)
    parts = {
        **{MODULE_STATE.format(name): part for name, part in modules.items()},
        LEARNER_STATE: learner,
        RUNNER_STATE: state.pop(core.COMPONENT_ENV_RUNNER),
        ALGORITHM_STATE: state,
    }
    for path, part in parts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        # torch hides the reason of a failure to write, such as a full disk.
        content = io.BytesIO()
        torch.save(part, content)
        content.seek(0)
        _validate_plain(path, content)
        with new_binary_file(folder / path) as out:
            out.write(content.getbuffer())


def load_algorithm(algo: BatchedPPO, folder: Path) -> None:
    """Restore the state that `save_algorithm` wrote.

    Nothing in the files is imported or called, except the constructors of tensors,
    `Tokens` and numpy arrays.

    Raises:
        OSError, KeyError: a part is missing, which RLlib would silently reinitialize.
        InputError: a part has other types.
    """

    def load(path: str) -> Any:
        _validate_plain(path, folder / path)
        with safe_globals(PLAIN_GLOBALS):
            return torch.load(folder / path, map_location="cpu", weights_only=True)

    # Read the parts back into the structure that `get_state` returns.
    specs = algo.config.rl_module_spec.rl_module_specs
    modules = {name: load(MODULE_STATE.format(name)) for name in specs}
    learner = {**load(LEARNER_STATE), core.COMPONENT_RL_MODULE: modules}
    if core.COMPONENT_OPTIMIZER not in learner:
        raise KeyError(f"{LEARNER_STATE} has no {core.COMPONENT_OPTIMIZER}")
    algo.set_state(
        {
            **load(ALGORITHM_STATE),
            core.COMPONENT_LEARNER_GROUP: {core.COMPONENT_LEARNER: learner},
            core.COMPONENT_ENV_RUNNER: load(RUNNER_STATE),
        }
    )
    if has_processes(algo.config):
        send_weights(algo)


def send_weights(algo: BatchedPPO) -> None:
    """Send the learners' weights to the runners, and not only to those that are idle.

    RLlib drops weights that it sends to a runner which is still busy with earlier ones.
    """
    group = algo.env_runner_group
    if has_processes(algo.config):
        with patience("sending weights to the runners", UPDATE_SECONDS):
            group.fetch_ready_async_reqs(timeout_seconds=None)
    group.sync_weights(
        from_worker_or_learner_group=algo.learner_group, inference_only=True
    )


def _validate_plain(path: str, content: Path | io.BytesIO) -> None:
    """Raise InputError if a part of a checkpoint names types that are not plain."""
    with safe_globals(PLAIN_GLOBALS):
        types = get_unsafe_globals_in_checkpoint(content)
    if types:
        raise InputError(
            f"{path}: expected tensors, numpy arrays and plain data, "
            f"got {', '.join(sorted(types))}"
        )


def save_modules(
    algo: BatchedPPO, modules: Mapping[str, str], fixed: Fixed, folder: Path
) -> None:
    """Write the policies of all groups except scripted ones; see `save_policies`.

    ``modules`` maps each group that learns to its module; ``fixed`` has the other
    groups' policies.
    """
    policies: dict[str, SpecifiedPolicy] = {}
    for name, weights in algo.learner_group.get_weights().items():
        spec = algo.config.rl_module_spec.rl_module_specs[name]
        policies[name] = build_policy(spec.model_config)
        tensors = {key: torch.as_tensor(value) for key, value in weights.items()}
        policies[name].load_state_dict(strip_prefix("policy", tensors))
    # Save frozen policies too, because their source may move or change.
    groups = dict(modules)
    for group, policy in fixed.items():
        if isinstance(policy, SpecifiedPolicy):
            groups[group] = frozen_module(group)
            policies[groups[group]] = policy
    save_policies(policies, groups, folder)
