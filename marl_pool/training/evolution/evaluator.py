"""Returns of the members of a population, in this process or in Ray actors."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.timeout import REMOTE_LIMIT, limit_calls
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation, validate_no_ramp
from marl_pool.policies import make_agent
from marl_pool.policies.agent import Agent, Population, load_vector
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.training.loop import never
from marl_pool.training.settings import EvolveConfig
from marl_pool.training.signals import patience
from marl_pool.trajectory import Transition
from marl_pool.utils.devices import without_denormals
from marl_pool.utils.errors import InputError, StoppedError, described

MAX_ENVS = 8192
"""Default limit on the number of environments that are stepped together."""
IDLE = 0.25
"""Largest fraction of finished environments that are stepped with the others."""


class PopulationTask(NamedTuple):
    """Episodes on which every member is evaluated."""

    env_ids: Tensor
    """Numbers of the environments, ``(R,)`` int64."""
    episode: int
    """Episode number in each of these environments."""
    env_config: dict[str, Any]
    """``{"name": …, **options}`` of the environments."""


class PopulationReturns(NamedTuple):
    """Results of the episodes, ``(members, R)``."""

    returns: Tensor
    """Returns averaged over an environment's agents, float64."""
    lengths: Tensor
    """Lengths in steps, int64."""


class Chunk(NamedTuple):
    """Members and episodes that are evaluated in one batch."""

    members: slice
    episodes: slice


class OutOfTimeError(Exception):
    """Episodes were abandoned because the time limit is over."""


class Evaluator:
    """Evaluate the members of a population, as many at a time as fit one batch.

    The split into batches does not change the episodes, and changes returns only by
    rounding.

    Attributes:
        is_late: called after each step; True raises `OutOfTimeError`.

    Raises:
        InputError: parts of the configuration that do not fit each other.
    """

    def __init__(self, config: EvolveConfig) -> None:
        self.seed, self.device = config.seed, config.device
        self.perturbation = config.perturbation.or_none
        # Build one environment to read its group and to build the agent.
        env = self._build_env(1, config.env)
        if len(env.groups) != 1:
            raise InputError(
                f"env: expected one group of agents for evolution, got "
                f"{', '.join(env.groups)}"
            )
        ((self.group, group),) = env.groups.items()
        self.agent: Agent = make_agent(
            group.tokens, group.action_space, **config.policy, seed=self.seed
        )
        self.agent.to(self.device).eval()
        # Build the perturbation once, to reject options that do not fit.
        reason = "every generation begins with new environments"
        validate_no_ramp(config.perturbation, reason)
        self._make_perturbation()
        # A simulator for each member and repetition would mean thousands of processes.
        default = config.repetitions if env.simulated else MAX_ENVS
        self.max_envs: int = config.max_envs or default
        self._cached: tuple[Any, BatchedEnv] | None = None
        self.is_late: Callable[[], bool] = never

    def chunks(
        self, members: int, episodes: int, processes: int = 1
    ) -> Iterator[Chunk]:
        """Split the evaluation of a population into batches.

        Args:
            members: number of members.
            episodes: R, episodes of each member.
            processes: number of processes, each of which should get a batch.
        """
        # Fill a batch with episodes first, then with members.
        columns = min(episodes, self.max_envs)
        largest = max(1, self.max_envs // columns)
        count = max(min(processes, members), -(-members // largest))
        # Equal parts, since the last one is waited for; the larger ones first, since
        # environments are reused by parts of equal size.
        size, num_larger = divmod(members, count)
        for number in range(count):
            row = number * size + min(number, num_larger)
            rows = slice(row, row + size + (number < num_larger))
            for column in range(0, episodes, columns):
                yield Chunk(rows, slice(column, column + columns))

    def play(self, vectors: Tensor, task: PopulationTask) -> PopulationReturns:
        """Run the episodes of a task for every member.

        Args:
            vectors: ``(members, n)`` parameters in the order of `to_vector`.
            task: episodes, the same for all members.
        """
        shape = (len(vectors), len(task.env_ids))
        returns = torch.zeros(shape, dtype=torch.float64)
        lengths = torch.zeros(shape, dtype=torch.int64)
        for chunk in self.chunks(*shape):
            chunk_task = task._replace(env_ids=task.env_ids[chunk.episodes])
            returns[chunk], lengths[chunk] = self._play(
                vectors[chunk.members], chunk_task
            )
        return PopulationReturns(returns, lengths)

    def _play(self, vectors: Tensor, task: PopulationTask) -> PopulationReturns:
        shape = (len(vectors), len(task.env_ids))
        # Give each member separate copies of the same environments.
        env = self._get_env(len(vectors) * len(task.env_ids), task.env_config)
        env.renumber(task.env_ids.repeat(len(vectors)), task.episode)
        policy: Policy = self.agent
        # Several members act as one batched policy, a single member as the agent.
        if len(vectors) > 1:
            policy = Population(self.agent, vectors.to(self.agent.low))
        else:
            load_vector(self.agent, vectors[0].to(self.agent.low))
        perturbation = self._make_perturbation()
        rollout = Rollout(env, {self.group: policy}, perturbation=perturbation)
        # Play one episode in each, and average the returns over the agents.
        idle = IDLE if env.steps_past_end else 0.0
        episodes = rollout.episodes(self._give_up_late, idle=idle)
        returns = episodes.means()[self.group].cpu().view(shape)
        return PopulationReturns(returns, episodes.lengths.cpu().view(shape))

    def _give_up_late(self, _: Transition) -> None:
        if self.is_late():
            raise OutOfTimeError

    def _make_perturbation(self) -> Perturbation | None:
        if self.perturbation is None:
            return None
        return make_perturbation(
            specs={self.group: self.agent.spec}, **self.perturbation
        )

    def _get_env(self, num_envs: int, env_config: dict[str, Any]) -> BatchedEnv:
        """Build environments, or reuse the last call's if they are the same."""
        key = (num_envs, env_config)
        if self._cached is None or self._cached[0] != key:
            # Release the old environments first, and the processes that they may have.
            self._cached = None
            self._cached = (key, self._build_env(num_envs, env_config))
        return self._cached[1]

    def _build_env(self, num_envs: int, env_config: Mapping[str, Any]) -> BatchedEnv:
        return make_batched_env(
            num_envs=num_envs, seed=self.seed, device=self.device, **env_config
        )


class Workers:
    """Evaluators in Ray actors, each of which takes the next chunk when idle.

    Args:
        evaluator: evaluator of this process, which determines the chunks.
        config: configuration of the run.
        run: run that receives tracebacks.

    Raises:
        InputError: ray has fewer CPUs or GPUs than configured.
        StoppedError: no worker started in time.
    """

    def __init__(self, evaluator: Evaluator, config: EvolveConfig, run: Run) -> None:
        import ray

        from marl_pool.training.cluster import validate_cluster

        self.evaluator, self.run = evaluator, run
        self.is_late: Callable[[], bool] = never
        count, gpus = config.resources.num_workers, config.resources.num_gpus_per_worker
        limit = validate_cluster({"CPU": count, "GPU": count * gpus})
        # A dead actor is restarted once, and repeats its chunk.
        actor = ray.remote(
            num_cpus=1, num_gpus=gpus, max_restarts=1, max_task_retries=1
        )(Worker)
        self.actors = [actor.remote(config) for _ in range(count)]
        # Wait for the first worker; the others may follow later.
        try:
            with patience("starting workers", min(limit, config.time_limit or limit)):
                ray.wait([actor.__ray_ready__.remote() for actor in self.actors])
        except TimeoutError as error:
            raise StoppedError(str(error)) from error

    def play(self, vectors: Tensor, task: PopulationTask) -> PopulationReturns:
        """Run the episodes of a task for every member; see `Evaluator.play`.

        Raises:
            OutOfTimeError: `is_late` returned True; the actors still play.
            StoppedError: an environment raised, or an actor died again.
        """
        import ray

        shape = (len(vectors), len(task.env_ids))
        returns = torch.zeros(shape, dtype=torch.float64)
        lengths = torch.zeros(shape, dtype=torch.int64)
        todo = self.evaluator.chunks(*shape, processes=len(self.actors))
        # Give each idle actor the next chunk, and collect results as they arrive.
        idle, running = list(self.actors), dict[Any, tuple[Any, Chunk]]()
        while True:
            for actor, chunk in zip(list(idle), todo, strict=False):
                idle.remove(actor)
                chunk_task = task._replace(env_ids=task.env_ids[chunk.episodes])
                future = actor.play.remote(vectors[chunk.members].numpy(), chunk_task)
                running[future] = (actor, chunk)
            if not running:
                return PopulationReturns(returns, lengths)
            # Store each result in its rows and columns of the population.
            if self.is_late():
                raise OutOfTimeError
            for future in ray.wait(list(running), timeout=1.0)[0]:
                actor, chunk = running.pop(future)
                returns[chunk], lengths[chunk] = self._get(future)
                idle.append(actor)

    def _get(self, future: Any) -> PopulationReturns:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            returns: PopulationReturns = ray.get(future)
        except RayTaskError as error:
            file, cause = self.run.write_error(str(error)), error.cause
            raise StoppedError(
                f"a worker failed: {described(cause)}; traceback in {file}"
            ) from error
        except RayActorError as error:
            file = self.run.write_error(str(error))
            raise StoppedError(
                f"a worker died, was restarted and died again; see {file}"
            ) from error
        return returns


class Worker(Evaluator):
    """Evaluator in the process of a Ray actor, on one core."""

    def __init__(self, config: EvolveConfig) -> None:
        torch.set_num_threads(1)
        super().__init__(config)
        self.env_timeout = config.env_timeout or REMOTE_LIMIT

    @override
    def play(self, vectors: Any, task: PopulationTask) -> PopulationReturns:
        with without_denormals(), limit_calls(self.env_timeout):
            return super().play(torch.from_numpy(vectors), task)
