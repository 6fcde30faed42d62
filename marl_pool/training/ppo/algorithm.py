"""Translation of a run's configuration into an RLlib algorithm."""

import functools
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core.rl_module import MultiRLModuleSpec, RLModuleSpec, validate_module_id
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)
from ray.tune.trainable import Trainable
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.description import describe_env
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.actions import ActionSpec
from marl_pool.training.errors import one_line
from marl_pool.training.fixed_policies import frozen_module, load_fixed, zero_tokens
from marl_pool.training.ppo.batch import BatchSettings, ModuleShards
from marl_pool.training.ppo.faults import wait_for_runner
from marl_pool.training.ppo.learner import BATCH, LOCAL_DEVICE, BatchedPPOLearner
from marl_pool.training.ppo.local_group import setup_locally
from marl_pool.training.ppo.module import POLICY, TokenRLModule, build_policy
from marl_pool.training.ppo.runner import (
    RESTARTS,
    RUNNER,
    BatchedEnvRunner,
    RunnerSettings,
)
from marl_pool.training.settings import PPOSettings, TrainConfig
from marl_pool.training.signals import patience
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import unknown

MAX_RESTARTS = 3
"""Restarts of a failed runner by RLlib before the run ends."""
UPDATE_SECONDS = 1800.0
"""Limit on one update by remote learners, in seconds."""
RESTART_SECONDS = 120.0
"""Longest wait for a restarted runner when all runners have died, in seconds."""


class BatchedPPO(PPO):
    """RLlib's PPO, with tensors between local processes and restarted remote runners.

    Where one process samples and learns, a batch goes from the runner to the learner as
    tensors on their device. Remote runners return episodes, as in RLlib. Both ways give
    the same update, to the bit on one thread.

    Restarted runners continue with new episodes.

    Attributes:
        restarts: number of restarted runners in this session.
    """

    restarts = 0

    @property
    def losses(self) -> int:
        """Number of runners that died in this session."""
        runners = self.env_runner_group
        missing = runners.num_remote_env_runners()
        return self.restarts + missing - runners.num_healthy_remote_env_runners()

    @override
    def setup(self, config: PPOConfig) -> None:
        if not has_processes(self.config):
            setup_locally(self, config)
            return
        super().setup(config)
        if self.config.num_learners:
            # RLlib has no hook for the division of a batch, and no limit on an update.
            update = self.learner_group.update
            self.learner_group.update = functools.partial(_update_in_time, update)

    @override
    def training_step(self) -> None:
        if has_processes(self.config):
            super().training_step()
            return
        runner, learner = self.env_runner, self.learner_group._learner
        # Sample; there is no batch if the runner failed or no learning agent lived.
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
        # Copy the new weights to the runner.
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            runner.copy_weights(learner)

    @override
    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # RLlib would copy its whole configuration into the result of each iteration.
        return {
            **Trainable.get_auto_filled_metrics(self, *args, **kwargs),
            "config": {},
        }

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
        # RLlib would make a folder in ~/ray_results; runs write their own logs.
        self._logdir = tempfile.gettempdir()


def has_processes(config: PPOConfig) -> bool:
    """Return True for remote runners or learners, which need Ray."""
    return config.num_env_runners + config.num_learners > 0


def _update_in_time(
    update: Callable[..., Any], *, episodes: Any, **options: Any
) -> Any:
    """Update remote learners by all modules; end an update in which they are stuck.

    Raises:
        TimeoutError: the learners took longer than `UPDATE_SECONDS`.
    """
    with patience("updating the learners", UPDATE_SECONDS, interval=UPDATE_SECONDS / 3):
        return update(training_data=ModuleShards(episodes=episodes), **options)


def assign_modules(
    groups: Mapping[str, AgentGroup],
    modules: Mapping[str, str] | None,
    fixed: Collection[str] = (),
) -> dict[str, str]:
    """Assign a module to each group that learns; by default one for each.

    Args:
        groups: groups of the environment, by name.
        modules: group → module name; None for the default.
        fixed: names of the groups that do not learn.

    Returns:
        Group that learns → module name.

    Raises:
        InputError: no such group, no group that learns, a group without a module, a
            module without agents, a module name that RLlib does not take or that is
            reserved for a frozen policy, or groups of different spaces in one module.
    """
    # A fixed group must exist, and has no module.
    for name in fixed:
        if name not in groups:
            raise InputError(f"fixed: {unknown('group', name, groups)}")
        if name in (modules or {}):
            raise InputError(f"modules: the group {name!r} is fixed, so it has none")
    # At least one group has to learn.
    learning = [name for name in groups if name not in fixed]
    if not learning:
        raise InputError(
            f"fixed: expected a group that learns, got all of {sorted(groups)}"
        )
    modules = {name: name for name in learning} if modules is None else modules
    # The mapping names each learning group, and no other.
    if set(modules) != set(learning):
        raise InputError(
            f"modules: expected an entry for each group that learns, "
            f"{sorted(learning)}, got {sorted(modules)}"
        )
    owners: dict[str, str] = {}
    # RLlib names files after modules.
    for name, module in modules.items():
        try:
            validate_module_id(module, error=True)
        except ValueError as error:
            raise InputError(
                f"modules.{name}: expected what can name a file, got {module!r}"
            ) from error
        # `frozen_module` names the policies of fixed groups in saved folders.
        if module in map(frozen_module, fixed):
            raise InputError(
                f"modules: the name {module!r} is reserved for the policy of a fixed "
                "group"
            )
        if not groups[name].num_agents:
            raise InputError(
                f"modules: the group {name!r} has no agents, so the module {module!r} "
                "would have nothing to learn from"
            )
        # Groups share a module only if their tokens and actions have the same spaces.
        owner = owners.setdefault(module, name)
        mine, theirs = groups[name], groups[owner]
        if mine.tokens != theirs.tokens or mine.action_space != theirs.action_space:
            raise InputError(
                f"modules: groups {owner!r} and {name!r} have different spaces, so "
                f"they cannot share the module {module!r}"
            )
    return dict(modules)


def algorithm_config(config: TrainConfig, saved: Path | None = None) -> PPOConfig:
    """Translate a run's configuration for RLlib.

    Args:
        config: checked configuration of the run.
        saved: policy folder of the checkpoint to resume from; None for a new run.

    Raises:
        InputError: parts that do not fit each other; raised before a process starts.
    """
    settings, resources = config.ppo, config.resources
    # Divide the agents into learning modules and fixed policies.
    env = describe_env(config.env)
    groups = env.groups
    modules = assign_modules(groups, config.modules, config.fixed or ())
    fixed = load_fixed(
        config.fixed,
        groups,
        env=config.env.name,
        plugins=(config.encoder.name, config.pooling.name, *config.plugins),
        saved=saved,
    )
    if perturbation := config.perturbation.or_none:
        # Build it once to reject options that do not fit here, not in a runner.
        specs = [group.tokens for group in groups.values()]
        counts = {name: group.num_agents for name, group in groups.items()}
        built = make_perturbation(specs=specs, **perturbation)
        built.validate_env(counts, env.max_steps)
    # One iteration: every environment takes `fragment` steps.
    agents: Counter[str] = Counter()
    for name, module in modules.items():
        agents[module] += groups[name].num_agents
    num_envs = settings.num_envs * max(1, resources.num_env_runners)
    least = num_envs * agents.total()
    fragment, rest = divmod(settings.batch_size, least)
    if rest:
        raise InputError(
            f"ppo.batch_size: expected a multiple of {least} (ppo.num_envs × runners × "
            f"agents that learn), such as {(fragment + 1) * least}, got "
            f"{settings.batch_size}"
        )
    steps = fragment * num_envs
    result = PPOConfig(algo_class=BatchedPPO)
    # Sample: `BatchedEnvRunner` steps all environments of a process together.
    result.environment(env_config={RUNNER: RunnerSettings(config, modules, fixed)})
    result.env_runners(
        env_runner_cls=BatchedEnvRunner,
        num_env_runners=resources.num_env_runners,
        num_envs_per_env_runner=settings.num_envs,
        num_gpus_per_env_runner=resources.num_gpus_per_env_runner,
        rollout_fragment_length=fragment,
        # By default RLlib drops the samples of environments slower than a minute.
        sample_timeout_s=None,
    )
    result.fault_tolerance(
        max_num_env_runner_restarts=MAX_RESTARTS,
        delay_between_env_runner_restarts_s=1.0,
    )
    # Learn: `BatchedPPOLearner` prepares the batch and updates the weights.
    rows = steps * max(agents.values())
    device = local_device(config)
    result.learners(
        num_learners=resources.num_learners,
        num_gpus_per_learner=0 if device else resources.num_gpus_per_learner,
        learner_class=BatchedPPOLearner,
        add_default_connectors_to_learner_pipeline=False,
        learner_config_dict={
            LOCAL_DEVICE: device,
            BATCH: BatchSettings(
                # Count minibatches for the module with the most rows.
                num_minibatches=-(-rows // (settings.minibatch_size or rows)),
                normalize_value_loss=settings.normalize_value_loss,
                max_seq_len=settings.max_seq_len,
            ),
        },
    )
    # An agent's id is that of its group, an underscore and a number.
    result.multi_agent(
        policies=set(modules.values()),
        policy_mapping_fn=lambda agent, *args, **kwargs: modules[
            agent.rpartition("_")[0]
        ],
    )
    result.rl_module(rl_module_spec=_module_spec(config, groups, modules))
    _set_ppo(result, config, batch=steps // max(1, resources.num_learners))
    # RLlib adds to its seed and passes it to numpy, which takes 32 bits.
    seed = zlib.crc32(str(config.seed).encode()) % (1 << 31)
    result.debugging(seed=seed, log_level="ERROR")
    return result


def local_device(config: TrainConfig) -> str | None:
    """Return the device of a learner in this process; None if it has its own process.

    It is that of the environments. If they are on the CPU, the learner may still ask
    for a GPU.
    """
    if config.resources.num_learners:
        return None
    if config.device == "cpu" and config.resources.num_gpus_per_learner:
        return "cuda"
    return config.device


def _set_ppo(result: PPOConfig, config: TrainConfig, batch: int) -> None:
    settings = config.ppo
    result.training(
        lr=_learning_rate(settings, config.total_steps),
        gamma=settings.gamma,
        lambda_=settings.gae_lambda,
        train_batch_size_per_learner=batch,
        minibatch_size=batch,  # unused: see `BatchSettings`
        num_epochs=settings.num_epochs,
        clip_param=settings.clip,
        vf_loss_coeff=settings.value_coeff,
        vf_clip_param=settings.value_clip or float("inf"),
        entropy_coeff=settings.entropy_coeff,
        use_kl_loss=settings.kl_coeff > 0,
        kl_coeff=settings.kl_coeff,
        kl_target=settings.kl_target,
        grad_clip=settings.grad_clip,
    )
    # The learner skips a non-finite step before RLlib would check for one.
    result.torch_skip_nan_gradients = True


def _learning_rate(
    settings: PPOSettings, total_steps: int
) -> float | list[list[float]]:
    """Return a constant, or the points of RLlib's schedule: [env steps, rate]."""
    if settings.lr_schedule == "constant":
        return settings.lr
    return [[0, settings.lr], [total_steps, 0.0]]


def _module_spec(
    config: TrainConfig, groups: Mapping[str, AgentGroup], modules: Mapping[str, str]
) -> MultiRLModuleSpec:
    specs = {}
    for name, module in modules.items():
        group = groups[name]
        # Describe the policy in plain values, from which any process can build it.
        options = {
            **config.policy.arguments,
            "spec": group.tokens.to_json(),
            "action_space": ActionSpec.of(group.action_space).to_json(),
            "encoder": dict(config.encoder),
            "pooling": dict(config.pooling),
            "dropout": config.ppo.dropout,
            "token_dropout": config.ppo.token_dropout,
            "seed": config.seed,
        }
        # Reject parts that fail on the group's tokens before a process starts.
        policy, tokens = build_policy({POLICY: options}), zero_tokens(group.tokens, 2)
        try:
            with torch.no_grad():
                policy(tokens)
        except InputError as error:
            raise InputError(f"pooling or encoder: {error}") from error
        except Exception as error:  # a plug-in may raise anything
            raise InputError(
                f"pooling or encoder: {type(error).__name__} on tokens of shape "
                f"{tuple(tokens.features.shape)}: {one_line(error)}; a head returns "
                "(B, dim_out)"
            ) from error
        # Each process builds its own copy of the module from this description.
        specs[module] = RLModuleSpec(
            module_class=TokenRLModule,
            observation_space=group.tokens.space(),
            action_space=group.action_space,
            model_config={POLICY: options},
        )
    return MultiRLModuleSpec(rl_module_specs=specs)
