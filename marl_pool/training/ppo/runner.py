"""BatchedEnvRunner: RLlib's interface around the one rollout loop."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator
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
from marl_pool.training.fixed_policies import build_fixed
from marl_pool.training.ppo.advantages import estimate_advantages
from marl_pool.training.ppo.episodes import to_episodes
from marl_pool.training.ppo.faults import (
    NON_FINITE,
    NON_FINITE_PLACE,
    Failure,
    non_finite,
)

ROLLOUT = "rollout"
"""Component of a checkpoint: worlds, memories and random streams."""

RESTARTS = "restarts"
"""Part of a state: how many runners have died before this one was started."""
EPISODES_OF_A_RESTART = 1 << 32
"""Episode numbers that a restarted runner skips, more than any could have played."""

EPISODE_RETURNS = "episode_returns"
"""Metrics: by group, the return of each episode that ended, summed over its agents."""
SAMPLE_SECONDS = "sample_seconds"
"""Metric: of the slowest runner; RLlib's own timers are smoothed."""


class BatchedEnvRunner(EnvRunner, Checkpointable):
    """Sample from many worlds at once, for one module or several.

    No gym env, no connectors: `Rollout` steps all worlds of this runner together and
    whole arrays become episode chunks. Values, advantages and value targets are
    computed here, with the weights that sampled. Groups that do not learn act too, but
    nothing of them leaves the runner except their returns.

    An exception is kept as `failure`, and `sample` returns nothing: RLlib would restart
    a remote runner that raised, without a word, so the driver asks and stops the run.

    ``config.env_config`` holds ``world`` (arguments of `make_batched_env`),
    ``modules`` (group → module id), ``fixed`` (`Fixed`), ``perturbation`` (None, or
    arguments of `make_perturbation`), ``seed``, ``device`` (of a local runner; a remote
    one takes its GPU, if it has one) and ``threads`` (of a remote runner).
    """

    failure: Failure | None = None

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.options = self.config.env_config
        self.device = self.options["device"]
        if self.worker_index:
            torch.set_num_threads(self.options["threads"])
            gpus = self.config.num_gpus_per_env_runner
            self.device = "cuda" if gpus > 0 else "cpu"
        self.rollout: Rollout | None = None
        self._weights_seq_no = self._restarts = 0
        self.make_env()
        self.make_module()

    def make_env(self) -> None:
        """Build this runner's worlds; they begin at the first `sample`."""
        self.rollout = None
        self.env = self._world(first_episode=0)

    def make_module(self) -> None:
        """Build the modules, in evaluation mode: no dropout while sampling."""
        spec = self.config.get_multi_rl_module_spec(spaces=self.get_spaces())
        self.module = spec.build()
        for _, module in self.module.items():
            module.to(self.device).eval()
        env = self.options["world"]["name"]
        self.fixed = {
            name: build_fixed(what, env, name, self.env.groups[name]).to(self.device)
            for name, what in self.options["fixed"].items()
        }

    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        """Observation and action space of each module, and of the env for RLlib."""
        groups = self.env.groups
        spaces = {
            module: (groups[name].tokens.space(), groups[name].action_space)
            for name, module in self.options["modules"].items()
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
        """Sample a fragment, or until enough steps or episodes are there.

        Args:
            num_timesteps: at least this many steps, summed over the worlds.
            num_episodes: at least this many finished episodes.
            explore: sample actions; None takes the config's word.
            random_actions: act uniformly at random instead.
            force_reset: begin all worlds anew.
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
        """Metrics of the episodes finished and the steps taken since the last call."""
        return self.metrics.reduce()

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """What a checkpoint or another runner needs.

        The worlds are a component of their own, so that weight syncs, which name
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
        """Take over a state; older weights than the present ones are ignored."""
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
        # Several runners cannot all go on where one of them stood.
        if ROLLOUT in state and not self.config.num_env_runners:
            self.rollout = self._begin()
            self.rollout.load_state_dict(state[ROLLOUT])

    def assert_healthy(self) -> None:
        """Raise if the constructor did not finish."""
        assert self.module is not None

    def stop(self) -> None:
        """Let go of the worlds."""
        self.rollout = None

    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Arguments that rebuild this runner from a checkpoint."""
        return (), {
            "config": self.config,
            "worker_index": self.worker_index,
            "num_workers": self.num_workers,
        }

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """The parts that save themselves."""
        return [(COMPONENT_RL_MODULE, self.module)]

    def _world(self, first_episode: int) -> Any:
        num_envs = self.config.num_envs_per_env_runner
        index = max(self.worker_index or 0, 1) - 1
        return make_batched_env(
            **self.options["world"],
            num_envs=num_envs,
            seed=self.options["seed"],
            first_env=index * num_envs,
            first_episode=first_episode,
            device=self.device,
        )

    def _begin(self) -> Rollout:
        # Episodes are numbered from the steps taken so far, which are at least as many.
        # What a runner that died had played last was never counted, so the one that
        # takes its place begins far beyond: it meets episodes that nobody has played.
        skipped = self._restarts * EPISODES_OF_A_RESTART
        world = self._world(self.num_env_steps_sampled_lifetime + skipped)
        self.env = world
        return Rollout(
            world,
            self._policies(),
            perturbation=self._perturbation(),
            played=self._played(world),
        )

    def _played(self, world: BatchedEnv) -> int:
        """Episodes that each world has behind it, if all of them had full length.

        A runner that starts in mid-training has only the steps of all runners together
        to go by.
        """
        runners = max(self.config.num_env_runners, 1)
        steps = self.num_env_steps_sampled_lifetime // (runners * world.num_envs)
        return steps // world.max_steps

    def _perturbation(self) -> Perturbation | None:
        options = self.options["perturbation"]
        if not options:
            return None
        specs = [group.tokens for group in self.env.groups.values()]
        return make_perturbation(specs=specs, **options)

    def _policies(self) -> dict[str, Policy]:
        modules = self.options["modules"]
        learning = {name: self.module[modules[name]].policy for name in modules}
        return {**learning, **self.fixed}

    def _prepare(
        self, explore: bool | None, random_actions: bool, force_reset: bool
    ) -> Rollout:
        if self.rollout is None or force_reset:
            self.rollout = self._begin()
        rollout = self.rollout
        rollout.explore = self.config.explore if explore is None else explore
        rollout.policies = self._policies()
        if random_actions:
            rollout.policies |= {
                name: RandomPolicy(self.env.groups[name].action_space)
                for name in self.options["modules"]
            }
        return rollout

    def _fail(self, error: Exception, steps: int) -> list[SingleAgentEpisode]:
        self.failure = Failure.of(error, type(self.env).__name__)
        # RLlib would ask again and again until it has so many steps.
        taken = steps * self.env.num_envs
        self.metrics.log_value(NUM_ENV_STEPS_SAMPLED, taken, reduce="sum")
        return []

    def _fragment(
        self, rollout: Rollout, steps: int
    ) -> tuple[list[SingleAgentEpisode], int]:
        before = rollout.env.steps.cpu().numpy().copy()
        prefix = f"{self.worker_index}-{self.num_env_steps_sampled_lifetime}"
        trajectories = rollout.steps(steps)
        chunks: list[SingleAgentEpisode] = []
        for name, module_id in self.options["modules"].items():
            trajectory = trajectories[name]
            advantages, targets = estimate_advantages(
                trajectory, self.config.gamma, self.config.lambda_
            )
            chunks += to_episodes(
                trajectory,
                advantages,
                targets,
                group=name,
                module_id=module_id,
                prefix=prefix,
                first_steps=before,
            )
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
                step, env = bad.nonzero()[0, :2].tolist()
                world = int(self.env.env_ids[env])
                log = self.metrics.log_value
                log((NON_FINITE, kind), int(bad.sum()), reduce="sum")
                log(NON_FINITE_PLACE, (world << 20) + step, reduce="max")

    def _log_episodes(self, finished: Episodes) -> None:
        smoothing = self.config.metrics_num_episodes_for_smoothing
        window = max(1, math.ceil(smoothing / (self.config.num_env_runners or 1)))
        for length in finished.lengths.tolist():
            self.metrics.log_value(EPISODE_LEN_MEAN, length, window=window)
        by_module: dict[str, Any] = defaultdict(list)
        for name, module in self.options["modules"].items():
            by_module[module].append(finished.returns[name].mean(1))
        for module, parts in by_module.items():
            for value in torch.stack(parts).mean(0).tolist():
                key = ("module_episode_return_mean", module)
                self.metrics.log_value(key, value, window=window)
        totals = {name: part.sum(1) for name, part in finished.returns.items()}
        learned = torch.stack([totals[name] for name in self.options["modules"]])
        for value in learned.sum(0).tolist():
            self.metrics.log_value(EPISODE_RETURN_MEAN, value, window=window)
        for name, total in totals.items():
            for value in total.tolist():
                key = (EPISODE_RETURNS, name)
                self.metrics.log_value(key, value, reduce="item_series")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread.

    A step of some dozen worlds is many small operations. More threads make it a little
    faster on an idle machine, and many times slower where another process holds a
    core, since they wait for each other at every operation.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
