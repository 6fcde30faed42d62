"""Translation of a run's configuration to an RLlib algorithm."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module import MultiRLModuleSpec, RLModuleSpec, validate_module_id

from marl_pool.critics import CRITICS
from marl_pool.critics.base import Critic
from marl_pool.envs.base import AgentGroup
from marl_pool.envs.description import EnvDescription, describe_env, describe_states
from marl_pool.options.names import resolve, unknown
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.turns import validate_fits
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.fixed_policies import frozen_module, load_fixed
from marl_pool.training.ppo.algorithm import BatchedPPO
from marl_pool.training.ppo.learner import (
    LOCAL_DEVICE,
    NUM_MINIBATCHES,
    SEED,
    SETTINGS,
    BatchedPPOLearner,
)
from marl_pool.training.ppo.module import (
    CONTEXT,
    CRITIC,
    POLICY,
    VALUE_NORM,
    TokenRLModule,
    build_critic,
    build_policy,
)
from marl_pool.training.ppo.runner import RUNNER, BatchedEnvRunner, RunnerSettings
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.errors import InputError, UnfitTokensError, one_line
from marl_pool.utils.randomness import process_seed

MAX_RESTARTS = 3
"""Restarts of a failed runner by RLlib before the run ends."""


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
            module name that RLlib rejects or that is reserved for a frozen policy, or
            groups with different spaces in one module.
    """
    # A fixed group must exist, and has no module.
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
    owners: dict[str, str] = {}
    # RLlib names files after modules.
    for name, module in modules.items():
        try:
            validate_module_id(module, error=True)
        except ValueError as error:
            raise InputError(
                f"modules.{name}: expected a valid file name, got {module!r}"
            ) from error
        # Saved folders name the policies of fixed groups by `frozen_module`.
        if module in map(frozen_module, fixed):
            raise InputError(
                f"modules: the name {module!r} is reserved for the policy of a fixed "
                "group"
            )
        owner = owners.setdefault(module, name)
        group, first = groups[name], groups[owner]
        if group.tokens != first.tokens or group.action_space != first.action_space:
            raise InputError(
                f"modules: groups {owner!r} and {name!r} have different spaces, so "
                f"they cannot share the module {module!r}"
            )
    return dict(modules)


def algorithm_config(config: TrainConfig, saved: Path | None = None) -> PPOConfig:
    """Translate a run's configuration to RLlib's.

    Args:
        config: checked configuration of the run.
        saved: policy folder of the checkpoint to resume from; None for a new run.

    Raises:
        InputError: parts that do not fit each other; raised before a process starts.
    """
    settings, resources = config.ppo, config.resources
    processes = config.env.get("workers", 1) if config.env.name == "pettingzoo" else 1
    if processes > settings.num_envs:
        raise InputError(
            f"env.workers: expected at most ppo.num_envs = {settings.num_envs}, got "
            f"{processes}"
        )
    # Divide the agents into learning modules and fixed policies.
    env = describe_env(config.env)
    groups = env.groups
    modules = assign_modules(groups, config.modules, config.fixed or ())
    states = _read_states(config, env)
    fixed = load_fixed(
        config.fixed,
        groups,
        env=config.env.name,
        plugins=(config.encoder.name, config.pooling.name, *config.plugins),
        saved=saved,
    )
    if perturbation := config.perturbation.or_none:
        # Build it once, to reject unfit options here rather than in a runner.
        specs = {name: group.tokens for name, group in groups.items()}
        env_perturbation = make_perturbation(specs=specs, **perturbation)
        validate_fits(env_perturbation, env)
    # One iteration: every environment takes `fragment` steps.
    fragment = _fragment(config, env)
    steps = fragment * settings.num_envs * max(1, resources.num_env_runners)
    rows = steps * _rows_per_step(env, modules)
    device = _local_device(config)
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
    result.learners(
        num_learners=resources.num_learners,
        num_gpus_per_learner=0 if device else resources.num_gpus_per_learner,
        learner_class=BatchedPPOLearner,
        add_default_connectors_to_learner_pipeline=False,
        learner_config_dict={
            LOCAL_DEVICE: device,
            SETTINGS: settings,
            SEED: process_seed(config.seed),
            # Count minibatches for the module with the most rows.
            NUM_MINIBATCHES: -(-rows // (settings.minibatch_size or rows)),
        },
    )
    # An agent's id is the name of its group, an underscore and a number.
    result.multi_agent(
        policies=sorted(set(modules.values())),
        policy_mapping_fn=lambda agent, *args, **kwargs: modules[
            agent.rpartition("_")[0]
        ],
    )
    result.rl_module(rl_module_spec=_module_spec(config, env, states, modules))
    _set_ppo(result, config, batch=steps // max(1, resources.num_learners))
    # RLlib gets no seed: to set it, it would import modules for 1.5 s.
    result.debugging(log_level="ERROR")
    return result


def _fragment(config: TrainConfig, env: EnvDescription) -> int:
    """Return the steps that each environment takes in an iteration.

    Raises:
        InputError: a batch size that the environments and agents do not divide.
    """
    size, unit = config.ppo.batch_size, config.batch_unit(env)
    fragment, remainder = divmod(size, unit)
    if remainder:
        raise InputError(
            f"ppo.batch_size: expected a multiple of {unit} (ppo.num_envs × runners × "
            f"agents that learn), such as {(fragment + 1) * unit}, got {size}"
        )
    return fragment


def _rows_per_step(env: EnvDescription, modules: Mapping[str, str]) -> int:
    """Return the rows of the module with the most, in a step of one environment."""
    # In a turn-based environment one agent acts in each step.
    if env.turn_based:
        return 1
    agents: Counter[str] = Counter()
    for name, module in modules.items():
        agents[module] += env.groups[name].num_agents
    return max(agents.values())


def _local_device(config: TrainConfig) -> str | None:
    """Return the device of a learner in this process, or None without one.

    It is the environments' device or the GPU that the learner requests.
    """
    if config.resources.num_learners:
        return None
    requests_gpu = bool(config.resources.num_gpus_per_learner)
    return "cuda" if config.device == "cpu" and requests_gpu else config.device


def _set_ppo(result: PPOConfig, config: TrainConfig, batch: int) -> None:
    settings = config.ppo
    is_constant = settings.lr_schedule == "constant"
    line = [[0, settings.lr], [config.total_steps, 0.0]]  # [env steps, rate]
    result.training(
        lr=settings.lr if is_constant else line,
        gamma=settings.gamma,
        lambda_=settings.gae_lambda,
        train_batch_size_per_learner=batch,
        minibatch_size=batch,  # unused: see `NUM_MINIBATCHES`
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


def _module_spec(
    config: TrainConfig,
    env: EnvDescription,
    states: Mapping[str, TokenSpec],
    modules: Mapping[str, str],
) -> MultiRLModuleSpec:
    specs, groups = {}, env.groups
    for name, module in modules.items():
        group = groups[name]
        # Describe the policy in plain values, from which any process builds a copy.
        options = {
            **config.policy.arguments,
            "spec": group.tokens.to_json(),
            "action_space": group.actions.to_json(),
            "encoder": dict(config.encoder),
            "pooling": dict(config.pooling),
            "dropout": config.ppo.dropout,
            "token_dropout": config.ppo.token_dropout,
            "seed": config.seed,
        }
        # Reject parts that fail on the group's tokens before a process starts.
        policy, tokens = build_policy({POLICY: options}), group.tokens.zeros(2)
        if policy.recurrent and config.critic.name != "own":
            raise InputError(
                f"critic={config.critic.name}: expected a policy without memory, got "
                f"pooling={config.pooling.name}; choose critic=own"
            )
        with _trial("pooling or encoder", tokens, "; a head returns (B, dim_out)"):
            policy(tokens)
        model_config = {
            POLICY: options,
            VALUE_NORM: config.ppo.value_norm,
            **_critic_config(config, env, states, modules, module),
        }
        _validate_critic(model_config, policy, group)
        specs[module] = RLModuleSpec(
            module_class=TokenRLModule,
            observation_space=group.observation_space(),
            action_space=group.action_space,
            model_config=model_config,
        )
    return MultiRLModuleSpec(rl_module_specs=specs)


def _critic_config(
    config: TrainConfig,
    env: EnvDescription,
    state_specs: Mapping[str, TokenSpec],
    modules: Mapping[str, str],
    module: str,
) -> dict[str, Any]:
    """Describe the critic of a module in plain values.

    Raises:
        InputError: the states of the module's groups differ in form.
    """
    members = [name for name, policy in modules.items() if policy == module]
    states = [state_specs.get(name) for name in members]
    if states.count(states[0]) < len(states):
        raise InputError(
            f"critic: expected states of one form for the groups {sorted(members)} of "
            f"the module {module!r}, got different ones"
        )
    context = {
        "num_agents": max(env.groups[name].num_agents for name in members),
        "state_spec": states[0] and states[0].to_json(),
        "seed": config.seed,
    }
    return {CRITIC: dict(config.critic), CONTEXT: context}


def _validate_critic(
    model_config: Mapping[str, Any], policy: TokenPolicy, group: AgentGroup
) -> None:
    """Reject a critic that cannot be built, or fails on zeros."""
    try:
        critic = build_critic(model_config, policy)
    except InputError as error:
        raise InputError(f"critic: {error}") from error
    if critic is None:
        return
    context = model_config[CONTEXT]
    is_state = critic.reads == "state"
    spec = TokenSpec(**context["state_spec"]) if is_state else group.tokens
    agents = context["num_agents"]
    tokens = spec.zeros(2 * agents).map(lambda t: t.unflatten(0, (2, agents)))
    with _trial("critic", tokens):
        critic(tokens, torch.ones(2, agents, dtype=torch.bool))


@contextmanager
def _trial(part: str, tokens: Tokens, hint: str = "") -> Iterator[None]:
    """Run a forward pass without gradients; errors name the part of the run."""
    try:
        with torch.no_grad():
            yield
    except InputError as error:
        raise InputError(f"{part}: {error}") from error
    except Exception as error:  # a plug-in may raise anything
        raise InputError(
            f"{part}: {type(error).__name__} on tokens of shape "
            f"{tuple(tokens.features.shape)}: {one_line(error)}{hint}"
        ) from error


def _read_states(config: TrainConfig, env: EnvDescription) -> Mapping[str, TokenSpec]:
    """Return the specification of each group's state, if the critic reads states.

    Raises:
        InputError: a critic that the environment does not support.
    """
    name = config.critic.name
    critic_class: type[Critic] = resolve(name, CRITICS, "critic", Critic)
    reads = critic_class.reads
    if reads == "state":
        alternatives = "choose critic=own" + (" or critic=set" * (not env.turn_based))
        try:
            states = describe_states(config.env)
        except UnfitTokensError as error:
            raise InputError(f"critic={name}: {error}; {alternatives}") from error
        learning = [group for group in env.groups if group not in (config.fixed or ())]
        missing = [group for group in learning if group not in states]
        if missing:
            raise InputError(
                f"critic={name}: expected an environment with observe_state and "
                f"state_specs of {', '.join(missing)}, got env={config.env.name}, "
                f"which has none; {alternatives}"
            )
        return states
    if reads == "team" and env.turn_based:
        raise InputError(
            f"critic={name}: expected an environment in which all agents act together, "
            f"got env={config.env.name}, which is played in turns; choose critic=own"
        )
    return {}
