"""Translation of a run's configuration into an RLlib algorithm."""

import tempfile
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core.rl_module import (
    MultiRLModuleSpec,
    RLModuleSpec,
    validate_module_id,
)
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.description import describe_env
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens
from marl_pool.training.fixed_policies import frozen_module, load_fixed
from marl_pool.training.ppo.batch import TrainBatch
from marl_pool.training.ppo.faults import wait_for_runner
from marl_pool.training.ppo.learner import NUM_MINIBATCHES, BatchedPPOLearner
from marl_pool.training.ppo.module import POLICY, TokenRLModule, build_policy
from marl_pool.training.ppo.runner import (
    RESTARTS,
    RUNNER,
    BatchedEnvRunner,
    RunnerSettings,
)
from marl_pool.training.settings import Options, PPOSettings, TrainConfig
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import unknown

MAX_RESTARTS = 3
"""Restarts of a failed runner by RLlib before the run ends."""
RESTART_SECONDS = 120.0
"""Longest wait for a restarted runner when all runners have died, in seconds."""
RETURN_WINDOW = 128
"""Number of episodes averaged in the logged mean return."""


class BatchedPPO(PPO):
    """RLlib's PPO, with restarted runners that continue with new episodes.

    In contrast to RLlib, it makes no folder in ``~/ray_results``.

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

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Restart dead runners; each continues with episodes of its own."""
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
            module without agents or with a name that RLlib does not take, or groups of
            different spaces that share a module.
    """
    for name in fixed:
        if name not in groups:
            raise InputError(f"fixed: {unknown('group', name, groups)}")
        if name in (modules or {}):
            raise InputError(f"modules: the group {name!r} is fixed, so it has none")
    learning = [name for name in groups if name not in fixed]
    if not learning:
        raise InputError(
            f"fixed: expected a group that learns, got all of {sorted(groups)}"
        )
    modules = {name: name for name in learning} if modules is None else modules
    if set(modules) != set(learning):
        raise InputError(
            f"modules: expected an entry for each group that learns, "
            f"{sorted(learning)}, got {sorted(modules)}"
        )
    for name, module in modules.items():
        try:
            validate_module_id(module, error=True)
        except ValueError as error:
            raise InputError(
                f"modules.{name}: expected what can name a file, got {module!r}"
            ) from error
        if not groups[name].num_agents:
            raise InputError(
                f"modules: the group {name!r} has no agents, so the module {module!r} "
                "would have nothing to learn from"
            )
        for other, its in modules.items():
            mine, theirs = groups[name], groups[other]
            same = (mine.tokens, mine.action_space) == (
                theirs.tokens,
                theirs.action_space,
            )
            if module == its and not same:
                raise InputError(
                    f"modules: groups {name!r} and {other!r} have different spaces, "
                    f"so they cannot share the module {module!r}"
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
    groups = describe_env(config.env).groups
    modules = assign_modules(groups, config.modules, config.fixed or ())
    own = (config.encoder["name"], config.pooling["name"])
    fixed = load_fixed(
        config.fixed,
        groups,
        env=config.env["name"],
        plugins=(*own, *config.plugins),
        saved=saved,
    )
    _reject_frozen_names(modules, fixed)
    # One iteration: every environment takes `fragment` steps.
    agents = sum(groups[name].num_agents for name in modules)
    fragment = fragment_length(settings, resources.num_env_runners, agents)
    steps = fragment * settings.num_envs * max(1, resources.num_env_runners)
    learners = max(1, resources.num_learners)
    result = PPOConfig(algo_class=BatchedPPO)
    result.api_stack(
        enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True
    )
    result.environment(
        env_config={
            RUNNER: RunnerSettings(
                env=config.env,
                modules=modules,
                fixed=fixed,
                perturbation=_perturbation(config, groups),
                seed=config.seed,
                device=config.device,
            )
        }
    )
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
    result.learners(
        num_learners=resources.num_learners,
        num_gpus_per_learner=resources.num_gpus_per_learner,
        learner_class=BatchedPPOLearner,
        learner_connector=lambda observation_space, action_space: TrainBatch(
            normalize_value_loss=settings.normalize_value_loss,
            max_seq_len=settings.max_seq_len,
        ),
        add_default_connectors_to_learner_pipeline=False,
    )
    result.multi_agent(
        policies=set(modules.values()),
        policy_mapping_fn=lambda agent, *args, **kwargs: modules[
            agent.rpartition("_")[0]
        ],
    )
    result.rl_module(rl_module_spec=_module_spec(config, groups, modules))
    _set_ppo(result, settings, batch=steps // learners)
    # Count minibatches for the module with the most rows; see `EpochIterator`.
    sharing: dict[str, int] = defaultdict(int)
    for name, module in modules.items():
        sharing[module] += groups[name].num_agents
    rows = steps * max(sharing.values())
    size = settings.minibatch_size or rows
    result.learners(learner_config_dict={NUM_MINIBATCHES: -(-rows // size)})
    result.reporting(
        metrics_num_episodes_for_smoothing=RETURN_WINDOW,
        min_time_s_per_iteration=0,
        min_sample_timesteps_per_iteration=0,
    )
    # RLlib adds to its seed and passes it to numpy, which takes 32 bits.
    seed = zlib.crc32(str(config.seed).encode()) % (1 << 31)
    result.debugging(seed=seed, log_level="ERROR")
    return result


def _reject_frozen_names(modules: Mapping[str, str], fixed: Collection[str]) -> None:
    """Reject module names reserved for the frozen policies that a run saves."""
    for group in fixed:
        if frozen_module(group) in modules.values():
            raise InputError(
                f"modules: the name {frozen_module(group)!r} is reserved for the "
                f"frozen policy of the group {group!r}"
            )


def fragment_length(settings: PPOSettings, num_env_runners: int, agents: int) -> int:
    """Compute the steps of every environment in one iteration.

    Args:
        settings: batch size and environments of a runner.
        num_env_runners: number of remote runners; 0 for a local one.
        agents: number of agents that learn, in one environment.

    Raises:
        InputError: the batch size is no multiple of the agent steps of one step of all
            environments.
    """
    each = settings.num_envs * max(1, num_env_runners) * agents
    if settings.batch_size % each:
        raise InputError(
            f"ppo.batch_size: expected a multiple of {each} (ppo.num_envs × runners × "
            f"agents that learn), got {settings.batch_size}"
        )
    return settings.batch_size // each


def _set_ppo(result: PPOConfig, settings: PPOSettings, batch: int) -> None:
    result.training(
        lr=settings.lr,
        gamma=settings.gamma,
        lambda_=settings.gae_lambda,
        use_gae=True,
        train_batch_size_per_learner=batch,
        minibatch_size=batch,  # unused: see NUM_MINIBATCHES
        num_epochs=settings.num_epochs,
        shuffle_batch_per_epoch=True,
        clip_param=settings.clip,
        vf_loss_coeff=settings.value_coeff,
        vf_clip_param=float("inf")
        if settings.value_clip is None
        else settings.value_clip,
        entropy_coeff=settings.entropy_coeff,
        use_kl_loss=settings.kl_coeff > 0,
        kl_coeff=settings.kl_coeff,
        kl_target=settings.kl_target,
        grad_clip=settings.grad_clip,
        grad_clip_by="global_norm",
    )
    # The learner skips a non-finite step before RLlib would check for one.
    result.torch_skip_nan_gradients = True


def _module_spec(
    config: TrainConfig, groups: Mapping[str, AgentGroup], modules: Mapping[str, str]
) -> MultiRLModuleSpec:
    specs = {}
    for name, module in modules.items():
        group = groups[name]
        policy = {
            **{key: option for key, option in config.policy.items() if key != "name"},
            "spec": group.tokens.to_json(),
            "action_space": ActionSpec.of(group.action_space).to_json(),
            "encoder": dict(config.encoder),
            "pooling": dict(config.pooling),
            "dropout": config.ppo.dropout,
            "seed": config.seed,
        }
        _check_forward(build_policy({POLICY: policy}), group)
        specs[module] = RLModuleSpec(
            module_class=TokenRLModule,
            observation_space=group.tokens.space(),
            action_space=group.action_space,
            model_config={POLICY: policy},
        )
    return MultiRLModuleSpec(rl_module_specs=specs)


def _check_forward(policy: TokenPolicy, group: AgentGroup) -> None:
    """Reject parts that fail on the group's tokens, before a process starts."""
    spec = group.tokens
    shape = (2, spec.num_tokens)
    tokens = Tokens(
        torch.zeros(*shape, spec.num_features, dtype=getattr(torch, spec.dtype)),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
    )
    try:
        with torch.no_grad():
            policy(tokens)
    except InputError as error:
        raise InputError(f"pooling or encoder: {error}") from error
    except Exception as error:  # a plug-in may raise anything
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"pooling or encoder: {type(error).__name__} on tokens of shape "
            f"{(*shape, spec.num_features)}: {reason}; a head returns (B, dim_out)"
        ) from error


def _perturbation(
    config: TrainConfig, groups: Mapping[str, AgentGroup]
) -> Options | None:
    options = config.perturbation
    if options["name"] == "none":
        return None
    # Build it once to reject options that do not fit here, not in a runner.
    specs = [group.tokens for group in groups.values()]
    make_perturbation(specs=specs, **options)
    return options
