"""RLlib's env runner around `Rollout`, which steps a batch of environments."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import ray
import torch
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    EPISODE_LEN_MEAN,
    EPISODE_RETURN_MEAN,
    NUM_AGENT_STEPS_SAMPLED,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
    NUM_MODULE_STEPS_SAMPLED,
    NUM_MODULE_STEPS_SAMPLED_LIFETIME,
    WEIGHTS_SEQ_NO,
)

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Episodes, Rollout, Trajectory
from marl_pool.training.fixed_policies import Fixed, build_fixed
from marl_pool.training.ppo.advantages import estimate_advantages
from marl_pool.training.ppo.episodes import to_episodes
from marl_pool.training.ppo.faults import (
    NON_FINITE,
    NON_FINITE_PLACE,
    Failure,
    non_finite,
)

RUNNER = "runner"
"""Key of ``config.env_config``: the `RunnerSettings`."""
ROLLOUT = "rollout"
"""Component of a checkpoint: environments, recurrent states and random streams."""

RESTARTS = "restarts"
"""Key of a runner's state: number of runners that died before this one started."""
EPISODES_PER_RESTART = 1 << 32
"""Episode numbers skipped after each restart, more than a runner can have used."""

EPISODE_RETURNS = "episode_returns"
"""Metrics: by group, the return of each finished episode, summed over its agents."""
SAMPLE_SECONDS = "sample_seconds"
"""Metric: sampling time of the slowest runner; RLlib smooths its own timers."""


@dataclass(frozen=True)
class RunnerSettings:
    """Settings of a `BatchedEnvRunner`, the same for all runners of a run.

    Attributes:
        env: ``{"name": …, **options}`` of the environment.
        modules: group that learns → name of its module.
        fixed: policies of the groups that do not learn.
        perturbation: ``{"name": …, **options}``; None leaves observations as they are.
        seed: random seed of the run.
        device: device of a local runner; a remote one uses its GPU, if it has one.
        threads: CPU threads of torch in a remote runner.
    """

    env: Mapping[str, Any]
    modules: Mapping[str, str]
    fixed: Fixed
    perturbation: Mapping[str, Any] | None
    seed: int
    device: str
    threads: int = 1


class BatchedEnvRunner(EnvRunner, Checkpointable):
    """Sample from a batch of environments, for one module or several.

    It uses neither gymnasium environments nor RLlib's connectors: `Rollout` steps all
    ``E`` environments of the runner together, and its ``(T, E, agents, …)`` arrays are
    cut into episode chunks. Values, advantages and value targets are computed here,
    with the weights that sampled. Of groups that do not learn only the returns are
    reported.

    An exception is stored as `failure`, and `sample` returns no episodes. RLlib would
    silently restart a remote runner that raised; instead the driver reads `failure`
    and stops the run.

    ``config.env_config`` holds the `RunnerSettings` under the key `RUNNER`.
    """

    failure: Failure | None = None

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.settings: RunnerSettings = self.config.env_config[RUNNER]
        self.device = self.settings.device
        if self.worker_index:
            torch.set_num_threads(self.settings.threads)
            gpus = self.config.num_gpus_per_env_runner
            self.device = "cuda" if gpus > 0 else "cpu"
        self.rollout: Rollout | None = None
        self._weights_seq_no = self._restarts = 0
        self.make_env()
        self.make_module()

    def make_env(self) -> None:
        """Build the environments; the first `sample` resets them."""
        self.rollout = None
        self.env = self._build_env(first_episode=0)

    def make_module(self) -> None:
        """Build the modules, in evaluation mode: no dropout while sampling."""
        spec = self.config.get_multi_rl_module_spec(spaces=self.get_spaces())
        self.module = spec.build()
        for _, module in self.module.items():
            module.to(self.device).eval()
        env = self.settings.env["name"]
        self.fixed = {
            name: build_fixed(policy, env, name, self.env.groups[name]).to(self.device)
            for name, policy in self.settings.fixed.items()
        }

    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        """Return the observation and action space of each module, as RLlib asks."""
        groups = self.env.groups
        spaces = {
            module: (groups[name].tokens.space(), groups[name].action_space)
            for name, module in self.settings.modules.items()
        }
        first = next(iter(spaces.values()))
        return {INPUT_ENV_SPACES: first, INPUT_ENV_SINGLE_SPACES: first, **spaces}

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[SingleAgentEpisode]:
        """Sample a fragment, or more until the episodes asked for have finished.

        Args:
            num_timesteps: smallest number of steps, summed over the environments; None
                uses the fragment length of the configuration.
            num_episodes: smallest number of finished episodes; None for no minimum.
            explore: sample actions; None uses the configuration's ``explore``.
            random_actions: act uniformly at random instead of with the modules.
            force_reset: restart all environments first.

        Returns:
            One chunk for each part of an episode that an agent lived through.
        """
        began = time.perf_counter()
        steps = self.config.get_rollout_fragment_length(self.worker_index)
        if num_timesteps is not None:
            steps = math.ceil(num_timesteps / self.env.num_envs)
        try:
            rollout = self._prepare(explore, random_actions, force_reset)
            with _one_thread():
                chunks, finished = self._fragment(rollout, steps)
                while num_episodes is not None and finished < num_episodes:
                    more, count = self._fragment(rollout, steps)
                    chunks, finished = chunks + more, finished + count
        except Exception as error:
            return self._fail(error, steps)
        self.metrics.log_value(WEIGHTS_SEQ_NO, self._weights_seq_no, window=1)
        seconds = time.perf_counter() - began
        self.metrics.log_value(SAMPLE_SECONDS, seconds, reduce="max")
        return chunks

    def get_metrics(self) -> Any:
        """Return the metrics of steps and finished episodes since the last call."""
        return self.metrics.reduce()

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the state for a checkpoint or another runner.

        The environments are a component of their own, so that weight syncs, which name
        their components, do not copy them.
        """
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
            state[WEIGHTS_SEQ_NO] = self._weights_seq_no
        wanted = self._check_component(ROLLOUT, components, not_components)
        if wanted and self.rollout is not None:
            state[ROLLOUT] = self.rollout.state_dict()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state, except for weights older than the present ones."""
        if COMPONENT_RL_MODULE in state:
            number = state.get(WEIGHTS_SEQ_NO, 0)
            if number == 0 or self._weights_seq_no < number:
                weights = state[COMPONENT_RL_MODULE]
                if isinstance(weights, ray.ObjectRef):
                    weights = ray.get(weights)
                self.module.set_state(weights)
            if number > 0:
                self._weights_seq_no = number
        if NUM_ENV_STEPS_SAMPLED_LIFETIME in state:
            self.num_env_steps_sampled_lifetime = state[NUM_ENV_STEPS_SAMPLED_LIFETIME]
        self._restarts = state.get(RESTARTS, self._restarts)
        # Only a single local runner can continue its environments; the state of one of
        # several runners would make all of them repeat the same episodes.
        if ROLLOUT in state and not self.config.num_env_runners:
            self.rollout = self._new_rollout()
            self.rollout.load_state_dict(state[ROLLOUT])

    def assert_healthy(self) -> None:
        """Raise if the constructor did not finish."""
        assert self.module is not None

    def stop(self) -> None:
        """Release the environments."""
        self.rollout = None

    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments that rebuild this runner from a checkpoint."""
        return (), {
            "config": self.config,
            "worker_index": self.worker_index,
            "num_workers": self.num_workers,
        }

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """Return the components with checkpoints of their own."""
        return [(COMPONENT_RL_MODULE, self.module)]

    def _build_env(self, first_episode: int) -> BatchedEnv:
        num_envs = self.config.num_envs_per_env_runner
        index = max(self.worker_index or 0, 1) - 1
        return make_batched_env(
            **self.settings.env,
            num_envs=num_envs,
            seed=self.settings.seed,
            first_env=index * num_envs,
            first_episode=first_episode,
            device=self.device,
        )

    def _new_rollout(self) -> Rollout:
        # Start the episode numbers at the steps so far, which no episode count exceeds.
        # The last episodes of a dead runner were never counted, so its successor skips
        # far ahead: no episode is sampled twice.
        skipped = self._restarts * EPISODES_PER_RESTART
        self.env = self._build_env(self.num_env_steps_sampled_lifetime + skipped)
        return Rollout(
            self.env,
            self._policies(),
            perturbation=self._perturbation(),
            played=self._episodes_so_far(),
        )

    def _episodes_so_far(self) -> int:
        """Estimate the earlier episodes of each environment, all of full length.

        A runner that starts in mid-training knows only the steps of all runners.
        """
        runners = max(self.config.num_env_runners, 1)
        steps = self.num_env_steps_sampled_lifetime // (runners * self.env.num_envs)
        return steps // self.env.max_steps

    def _perturbation(self) -> Perturbation | None:
        options = self.settings.perturbation
        if not options:
            return None
        specs = [group.tokens for group in self.env.groups.values()]
        return make_perturbation(specs=specs, **options)

    def _policies(self) -> dict[str, Policy]:
        modules = self.settings.modules
        learning = {name: self.module[modules[name]].policy for name in modules}
        return {**learning, **self.fixed}

    def _prepare(
        self, explore: bool | None, random_actions: bool, force_reset: bool
    ) -> Rollout:
        if self.rollout is None or force_reset:
            self.rollout = self._new_rollout()
        rollout = self.rollout
        rollout.explore = self.config.explore if explore is None else explore
        rollout.policies = self._policies()
        if random_actions:
            rollout.policies |= {
                name: RandomPolicy(self.env.groups[name].action_space)
                for name in self.settings.modules
            }
        return rollout

    def _fail(self, error: Exception, steps: int) -> list[SingleAgentEpisode]:
        self.failure = Failure.of(error, type(self.env).__name__)
        # Report the steps as taken: RLlib samples again until it has that many.
        taken = steps * self.env.num_envs
        self.metrics.log_value(NUM_ENV_STEPS_SAMPLED, taken, reduce="sum")
        return []

    def _fragment(
        self, rollout: Rollout, steps: int
    ) -> tuple[list[SingleAgentEpisode], int]:
        """Sample a fragment; return its chunks and the count of finished episodes."""
        # Episodes continue across fragments: note how far each environment has come,
        # and make the chunks' ids unique over runners and fragments.
        first_steps = rollout.env.steps.cpu().numpy().copy()
        prefix = f"{self.worker_index}-{self.num_env_steps_sampled_lifetime}"
        # Step all environments together; tensors are (T, num_envs, agents, …).
        trajectories = rollout.steps(steps)
        chunks: list[SingleAgentEpisode] = []
        for name, module_id in self.settings.modules.items():
            # Estimate advantages from the values recorded while sampling. Learners
            # then need neither whole episodes nor a second pass of the value head.
            trajectory = trajectories[name]
            advantages, targets = estimate_advantages(
                trajectory, self.config.gamma, self.config.lambda_
            )
            # Cut at episode ends and deaths into the chunks that RLlib expects.
            chunks += to_episodes(
                trajectory,
                advantages,
                targets,
                group=name,
                module_id=module_id,
                prefix=prefix,
                first_steps=first_steps,
            )
        # Log the returns of all groups, also of those that do not learn.
        finished = rollout.pop_finished()
        self._log(trajectories, finished, chunks, steps)
        return chunks, sum(len(part.lengths) for part in finished)

    def _log(
        self,
        trajectories: dict[str, Trajectory],
        finished: list[Episodes],
        chunks: list[SingleAgentEpisode],
        steps: int,
    ) -> None:
        taken = steps * self.env.num_envs
        self.num_env_steps_sampled_lifetime += taken
        by_agent: dict[Any, int] = defaultdict(int)
        by_module: dict[Any, int] = defaultdict(int)
        for chunk in chunks:
            by_agent[chunk.agent_id] += len(chunk)
            by_module[chunk.module_id] += len(chunk)
        episodes = sum(len(part.lengths) for part in finished)
        log = self.metrics.log_value
        log(NUM_ENV_STEPS_SAMPLED, taken, reduce="sum")
        log(NUM_ENV_STEPS_SAMPLED_LIFETIME, taken, reduce="lifetime_sum")
        log(NUM_EPISODES, episodes, reduce="sum")
        log(NUM_EPISODES_LIFETIME, episodes, reduce="lifetime_sum")
        for agent, count in by_agent.items():
            log((NUM_AGENT_STEPS_SAMPLED, agent), count, reduce="sum")
            log((NUM_AGENT_STEPS_SAMPLED_LIFETIME, agent), count, reduce="lifetime_sum")
        for module, count in by_module.items():
            log((NUM_MODULE_STEPS_SAMPLED, module), count, reduce="sum")
            log(
                (NUM_MODULE_STEPS_SAMPLED_LIFETIME, module),
                count,
                reduce="lifetime_sum",
            )
        self._log_non_finite(trajectories)
        for part in finished:
            self._log_episodes(part)

    def _log_non_finite(self, trajectories: dict[str, Trajectory]) -> None:
        for trajectory in trajectories.values():
            for kind, bad in non_finite(trajectory).items():
                if not bad.any():
                    continue
                step, index = bad.nonzero()[0, :2].tolist()
                env_id = int(self.env.env_ids[index])
                log = self.metrics.log_value
                log((NON_FINITE, kind), int(bad.sum()), reduce="sum")
                log(NON_FINITE_PLACE, (env_id << 20) + step, reduce="max")

    def _log_episodes(self, finished: Episodes) -> None:
        smoothing = self.config.metrics_num_episodes_for_smoothing
        window = max(1, math.ceil(smoothing / (self.config.num_env_runners or 1)))
        for length in finished.lengths.tolist():
            self.metrics.log_value(EPISODE_LEN_MEAN, length, window=window)
        by_module: dict[str, Any] = defaultdict(list)
        for name, module in self.settings.modules.items():
            by_module[module].append(finished.returns[name].mean(1))
        for module, parts in by_module.items():
            for value in torch.stack(parts).mean(0).tolist():
                key = ("module_episode_return_mean", module)
                self.metrics.log_value(key, value, window=window)
        totals = {name: part.sum(1) for name, part in finished.returns.items()}
        learned = torch.stack([totals[name] for name in self.settings.modules])
        for value in learned.sum(0).tolist():
            self.metrics.log_value(EPISODE_RETURN_MEAN, value, window=window)
        for name, total in totals.items():
            for value in total.tolist():
                key = (EPISODE_RETURNS, name)
                self.metrics.log_value(key, value, reduce="item_series")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread.

    A step of a few dozen environments is many small operations. More threads make it
    slightly faster on an idle machine, and many times slower when another process uses
    a core, because they synchronize at every operation.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
