"""RLlib's env runner around `Rollout`, which steps a batch of environments."""

import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.core.columns import Columns
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
    WEIGHTS_SEQ_NO,
)
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.timeout import REMOTE_LIMIT, limit_calls
from marl_pool.perturbations import make_perturbation
from marl_pool.rollout import Rollout
from marl_pool.training.fixed_policies import Fixed, build_fixed
from marl_pool.training.ppo.batch import Rows, concatenate_rows
from marl_pool.training.ppo.faults import Failure
from marl_pool.training.ppo.learner import BatchedPPOLearner
from marl_pool.training.ppo.trajectories import (
    estimate_advantages,
    own_turns,
    share_rewards,
    to_episodes,
    to_teams,
    trajectory_rows,
    with_action_mask,
)
from marl_pool.training.settings import TrainConfig
from marl_pool.trajectory import Trajectory
from marl_pool.utils.devices import torch_threads, without_denormals
from marl_pool.utils.randomness import process_seed, seed_process, seed_torch
from marl_pool.utils.text import print_line

RUNNER = "runner"
"""Key of ``config.env_config``: the `RunnerSettings`."""
ROLLOUT = "rollout"
"""Component of a checkpoint: environments, recurrent states and random streams."""
ROLLOUT_SETTINGS = "rollout_settings"
"""Component of a checkpoint: by key, the settings on which the rollout depends."""

RESTARTS = "restarts"
"""Key of a runner's state: number of runners that died before this one started."""
EPISODES_PER_RESTART = 1 << 32
"""Episode numbers skipped after each restart, more than a runner can have used."""

EPISODE_RETURNS = "episode_returns"
"""Metrics: by group, the return of each finished episode, summed over its agents."""
SAMPLE_SECONDS = "sample_seconds"
"""Metric: sampling time of the slowest runner; RLlib smooths its own timers."""


Converted = TypeVar("Converted")


@dataclass(frozen=True)
class RunnerSettings:
    """Settings of a `BatchedEnvRunner`, the same for all runners of a run."""

    config: TrainConfig
    """Configuration of the run. A local runner uses its device; a remote one uses the
    runner's GPU, if there is one."""
    modules: Mapping[str, str]
    """Group that learns → name of its module."""
    fixed: Fixed
    """Policies of the groups that do not learn."""


class BatchedEnvRunner(EnvRunner, Checkpointable):
    """Sample from a batch of environments, for one module or several.

    It uses neither gymnasium environments nor RLlib's connectors: `Rollout` steps all
    environments of the runner together, and its ``(T, num_envs, agents, …)`` tensors go
    to a local learner unchanged, or to remote ones as episode chunks. Values,
    advantages and value targets are computed here, with the weights that sampled. For
    groups that do not learn, only the returns are reported.

    An exception, such as for a non-finite number, is stored as `failure`, and nothing
    is returned. RLlib would silently restart a remote runner that raised; instead the
    driver reads `failure` and stops the run.
    """

    failure: Failure | None = None

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.settings: RunnerSettings = self.config.env_config[RUNNER]
        self.run_config = self.settings.config
        seed_process(process_seed(self.run_config.seed, self.worker_index or 0))
        self.device: str = self.run_config.device
        # A remote runner has one core, and a GPU only if one was assigned.
        if self.worker_index:
            torch.set_num_threads(1)
            gpus = self.config.num_gpus_per_env_runner
            self.device = "cuda" if gpus > 0 else "cpu"
        self.num_updates = self._restarts = 0
        # Tensors of each module here, and of its copy in this process's learner.
        self._weights: list[tuple[list[Tensor], list[Tensor]]] = []
        # The first `sample` resets the environments.
        self.rollout: Rollout | None = None
        self.env = self._build_env(first_episode=0)
        # Modules are in evaluation mode: usually there is no dropout while sampling.
        spec = self.config.get_multi_rl_module_spec(spaces=self.get_spaces())
        self.module = spec.build()
        for _, module in self.module.items():
            module.to(self.device).eval()
            for part in module.modules():
                if isinstance(part, nn.Dropout):
                    part.train(self.run_config.ppo.dropout_in_sampler)
        # The modules hold the policies that learn; fixed ones are built here.
        self.policies = {
            name: self.module[module].policy
            for name, module in self.settings.modules.items()
        }
        env = self.run_config.env.name
        for name, policy in self.settings.fixed.items():
            fixed_policy = build_fixed(policy, env, name, self.env.groups[name])
            self.policies[name] = fixed_policy.to(self.device)

    @override
    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        groups = self.env.groups
        spaces = {
            module: (groups[name].observation_space(), groups[name].action_space)
            for name, module in self.settings.modules.items()
        }
        first = next(iter(spaces.values()))
        return {INPUT_ENV_SPACES: first, INPUT_ENV_SINGLE_SPACES: first, **spaces}

    @without_denormals()  # a remote runner has another process
    def sample(self, *, num_timesteps: int | None = None) -> list[SingleAgentEpisode]:
        """Sample one fragment for learners in other processes.

        Args:
            num_timesteps: smallest number of steps, summed over the environments; None
                uses the fragment length of the configuration.

        Returns:
            A chunk for each part of an episode in which an agent acted without a
            break; none after an exception.
        """
        # The fragment length counts steps of one environment, RLlib's argument of all.
        steps = self.config.get_rollout_fragment_length(self.worker_index)
        if num_timesteps is not None:
            steps = math.ceil(num_timesteps / self.env.num_envs)
        # Episodes continue across fragments: note the step of each environment, and
        # make the chunks' ids unique over runners and fragments.
        first_steps = np.zeros(self.env.num_envs, np.int64)
        if self.rollout is not None and not self.env.turn_based:
            first_steps = self.rollout.env.steps.cpu().numpy().copy()
        prefix = f"{self.worker_index}-{self.num_env_steps_sampled_lifetime}"

        def cut(name: str, *fragment: Any) -> list[SingleAgentEpisode]:
            return to_episodes(
                *fragment,
                group=name,
                module_id=self.settings.modules[name],
                prefix=prefix,
                first_steps=first_steps,
            )

        # Cut at episode ends and deaths into the chunks that RLlib expects.
        return [chunk for _, chunks in self._sample(steps, cut) for chunk in chunks]

    def sample_batch(self) -> MultiAgentBatch | None:
        """Sample one fragment for the learner in this process, as tensors.

        Returns:
            The rows of each module that acted, in the order of `sample`; None after an
            exception and where none acted.
        """
        steps = self.config.get_rollout_fragment_length(self.worker_index)
        parts: dict[str, list[Rows]] = defaultdict(list)
        for name, rows in self._sample(steps, lambda _, *args: trajectory_rows(*args)):
            if len(rows[Columns.ACTIONS]):
                parts[self.settings.modules[name]].append(rows)
        if not parts:
            return None
        batches = {
            module: SampleBatch(concatenate_rows(rows))
            for module, rows in parts.items()
        }
        return MultiAgentBatch(batches, env_steps=steps * self.env.num_envs)

    def _sample(
        self, steps: int, convert: Callable[..., Converted]
    ) -> list[tuple[str, Converted]]:
        """Return each learning group's fragment, converted; none after an exception.

        Args:
            steps: steps of each environment.
            convert: called with the group's name, trajectory, advantages and targets.
        """
        began = time.perf_counter()
        # The loop limits the calls of a local runner.
        limit = self.run_config.env_timeout or REMOTE_LIMIT
        try:
            with limit_calls(limit if self.worker_index else None):
                if self.rollout is None:
                    self.rollout = self._new_rollout()
                # A step of a few dozen environments is many small operations. More
                # threads make it slightly faster on an idle machine, and many times
                # slower when another process uses a core, because they synchronize at
                # every operation.
                with torch_threads(1):
                    fragments = self._fragment(self.rollout, steps)
                    converted = [
                        (name, convert(name, *fragment))
                        for name, fragment in fragments.items()
                    ]
        except Exception as error:
            self.failure = Failure.of(error, type(self.env).__name__)
            # Report the steps as taken, or RLlib would sample again to complete them.
            num_steps = steps * self.env.num_envs
            self.metrics.log_value(NUM_ENV_STEPS_SAMPLED, num_steps, reduce="sum")
            return []
        # Log the number of the weights that sampled, and the duration.
        self.metrics.log_value(WEIGHTS_SEQ_NO, self.num_updates, window=1)
        seconds = time.perf_counter() - began
        self.metrics.log_value(SAMPLE_SECONDS, seconds, reduce="max")
        return converted

    def _fragment(
        self, rollout: Rollout, steps: int
    ) -> dict[str, tuple[Trajectory, Tensor, Tensor]]:
        # Seed dropout by the number of the update, so that a resumed run repeats it.
        if self.run_config.ppo.dropout_in_sampler:
            key = f"{self.run_config.seed} {self.worker_index} {self.num_updates}"
            seed_torch(zlib.crc32(key.encode()), torch.device(self.device).type)
        # Step all environments together; tensors are (T, num_envs, agents, …).
        trajectories = rollout.steps(steps)
        # Estimate advantages from the values recorded while sampling. Learners then
        # need neither whole episodes nor a second pass of the value head.
        modules = self.settings.modules
        masked = {
            module
            for name, module in modules.items()
            if trajectories[name].tokens.action_mask is not None
        }
        fragments = {}
        for name, module in modules.items():
            trajectory = trajectories[name]
            # Groups that share a module have the same columns.
            if module in masked:
                trajectory = with_action_mask(trajectory, self.env.groups[name].actions)
            fragments[name] = self._estimated(name, trajectory)
        # Count steps and episodes; log the returns of groups that do not learn, too.
        log, num_steps = self.metrics.log_value, steps * self.env.num_envs
        self.num_env_steps_sampled_lifetime += num_steps
        log(NUM_ENV_STEPS_SAMPLED, num_steps, reduce="sum")
        log(NUM_ENV_STEPS_SAMPLED_LIFETIME, num_steps, reduce="lifetime_sum")
        finished = rollout.pop_finished()
        episodes = sum(len(part.lengths) for part in finished)
        log(NUM_EPISODES_LIFETIME, episodes, reduce="lifetime_sum")
        for name in rollout.policies if finished else ():
            # One read for all, since each would wait for a GPU.
            returns = torch.cat([part.returns[name].sum(1) for part in finished])
            for value in returns.tolist():
                log((EPISODE_RETURNS, name), value, reduce="item_series")
        return fragments

    def _estimated(
        self, name: str, trajectory: Trajectory
    ) -> tuple[Trajectory, Tensor, Tensor]:
        """Return a group's fragment with advantages and value targets."""
        if self.run_config.ppo.share_reward:
            trajectory = share_rewards(trajectory)
        module = self.module[self.settings.modules[name]]
        if (norm := module.value_norm) is not None:
            trajectory = trajectory._replace(
                values=norm.denormalize(trajectory.values),
                next_values=norm.denormalize(trajectory.next_values),
            )
        trajectory = own_turns(trajectory)
        gamma, gae_lambda = self.config.gamma, self.config.lambda_
        estimates = estimate_advantages(trajectory, gamma, gae_lambda)
        if module.critic is not None and module.critic.reads == "team":
            modules = self.settings.modules
            size = max(
                group.num_agents
                for other, group in self.env.groups.items()
                if modules.get(other) == modules[name]
            )
            return to_teams(trajectory, *estimates, size)
        return trajectory, *estimates

    def copy_weights(self, learner: BatchedPPOLearner) -> None:
        """Copy the weights of this process's learner, which is always the same one."""
        # Collect the tensors only once, which takes longer than copying them.
        if not self._weights:
            self._weights = [
                (_tensors(module), _tensors(learner.module[module_id]))
                for module_id, module in self.module.items()
            ]
        with torch.no_grad():
            for sampling, learning in self._weights:
                torch._foreach_copy_(sampling, learning)
        self.num_updates = learner.num_updates

    @override
    def get_metrics(self) -> Any:
        return self.metrics.reduce()

    @override
    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        state: dict[str, Any] = {
            NUM_ENV_STEPS_SAMPLED_LIFETIME: self.num_env_steps_sampled_lifetime
        }
        if self._check_component(COMPONENT_RL_MODULE, components, not_components):
            state[COMPONENT_RL_MODULE] = self.module.get_state(
                components=self._get_subcomponents(COMPONENT_RL_MODULE, components),
                not_components=self._get_subcomponents(
                    COMPONENT_RL_MODULE, not_components
                ),
                **kwargs,
            )
            state[WEIGHTS_SEQ_NO] = self.num_updates
        # Weight syncs request other components, so they do not copy environments.
        has_rollout = self._check_component(ROLLOUT, components, not_components)
        if has_rollout and self.rollout is not None:
            state[ROLLOUT] = self.rollout.state_dict()
            state[ROLLOUT_SETTINGS] = self._rollout_settings()
        return state

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        if COMPONENT_RL_MODULE in state:
            # Keep the current weights if they are newer.
            number = state.get(WEIGHTS_SEQ_NO, 0)
            if number == 0 or self.num_updates < number:
                weights = state[COMPONENT_RL_MODULE]
                if isinstance(weights, ray.ObjectRef):
                    weights = ray.get(weights)
                self.module.set_state(weights)
            if number > 0:
                self.num_updates = number
        if NUM_ENV_STEPS_SAMPLED_LIFETIME in state:
            self.num_env_steps_sampled_lifetime = state[NUM_ENV_STEPS_SAMPLED_LIFETIME]
        self._restarts = state.get(RESTARTS, self._restarts)
        # Only a single local runner can continue its environments: the state of one of
        # several runners would make all of them repeat the same episodes.
        if ROLLOUT in state and not self.config.num_env_runners:
            settings = self._rollout_settings()
            saved = state.get(ROLLOUT_SETTINGS, settings)
            changed = [key for key in settings if settings[key] != saved.get(key)]
            if changed:
                print_line(f"{', '.join(changed)} changed: all episodes start anew")
                return
            self.rollout = self._new_rollout()
            self.rollout.load_state_dict(state[ROLLOUT])

    @override
    def assert_healthy(self) -> None:
        assert self.module is not None

    @override
    def stop(self) -> None:
        self.rollout = None

    @override
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (), {
            "config": self.config,
            "worker_index": self.worker_index,
            "num_workers": self.num_workers,
        }

    def _build_env(self, first_episode: int) -> BatchedEnv:
        num_envs = self.config.num_envs_per_env_runner
        index = max(self.worker_index or 0, 1) - 1
        return make_batched_env(
            **self.run_config.env,
            num_envs=num_envs,
            seed=self.run_config.seed,
            first_env=index * num_envs,
            first_episode=first_episode,
            device=self.device,
        )

    def _rollout_settings(self) -> dict[str, Any]:
        plain = self.run_config.plain
        # The number of processes that step the environments changes no state.
        env = {key: value for key, value in plain["env"].items() if key != "workers"}
        return {
            "env": env,
            "ppo.num_envs": plain["ppo"]["num_envs"],
            "perturbation": plain["perturbation"],
            "fixed": plain["fixed"],
        }

    def _new_rollout(self) -> Rollout:
        # Start the episode numbers at the steps so far, which no episode count exceeds.
        # The last episodes of a dead runner were never counted, so its successor skips
        # far ahead, and no episode is sampled twice.
        steps = self.num_env_steps_sampled_lifetime
        self.env = self._build_env(steps + self._restarts * EPISODES_PER_RESTART)
        # A runner that starts in mid-training knows only the steps of all runners, so
        # count the earlier episodes of each environment as of full length.
        environments = max(self.config.num_env_runners, 1) * self.env.num_envs
        played = steps // environments // self.env.max_steps
        perturbation = None
        if options := self.run_config.perturbation.or_none:
            specs = {name: group.tokens for name, group in self.env.groups.items()}
            perturbation = make_perturbation(specs=specs, **options)
        return Rollout(
            self.env,
            self.policies,
            perturbation=perturbation,
            explore=self.config.explore,
            played=played,
            critics={
                name: critic
                for name, module in self.settings.modules.items()
                if (critic := self.module[module].critic) is not None
            },
        )


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
