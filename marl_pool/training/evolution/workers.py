"""Evaluation of populations in this process, or in Ray actors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.timeout import REMOTE_LIMIT, limit_calls
from marl_pool.runs import Run
from marl_pool.training.errors import one_line
from marl_pool.training.evolution.evaluator import (
    Chunk,
    Evaluator,
    OutOfTimeError,
    PopulationReturns,
    PopulationTask,
)
from marl_pool.training.loop import never
from marl_pool.training.settings import EvolveConfig
from marl_pool.training.signals import patience
from marl_pool.utils.errors import StoppedError
from marl_pool.utils.text import quoted

RESTARTS = 1
"""Restarts of a dead actor, which repeats its chunk."""
WAIT_SECONDS = 1.0
"""Interval at which the time limit is looked at."""


@contextmanager
def episode_runner(
    evaluator: Evaluator, config: EvolveConfig, run: Run
) -> Iterator["Evaluator | Workers"]:
    """Yield the evaluator of this process or, if workers are configured, Ray actors.

    Raises:
        InputError: ray cannot be started or joined, or lacks CPUs or GPUs.
    """
    resources = config.resources
    if not resources.num_workers:
        yield evaluator
        return
    from marl_pool.training.cluster import ray_session

    with ray_session(
        resources.address,
        num_cpus=resources.num_workers + 1,
        resume=f"resume with: marl-pool resume {quoted(run.path)}",
    ):
        yield Workers(evaluator, config, run)


class Workers:
    """Evaluators in Ray actors, each of which takes the next chunk when it is idle.

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
        actor = ray.remote(
            num_cpus=1, num_gpus=gpus, max_restarts=RESTARTS, max_task_retries=RESTARTS
        )(Worker)
        self.actors = [actor.remote(config) for _ in range(count)]
        # The others may follow later.
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
                part = task._replace(env_ids=task.env_ids[chunk.episodes])
                future = actor.play.remote(vectors[chunk.members].numpy(), part)
                running[future] = (actor, chunk)
            if not running:
                return PopulationReturns(returns, lengths)
            # Store each result in its rows and columns of the population.
            if self.is_late():
                raise OutOfTimeError
            for future in ray.wait(list(running), timeout=WAIT_SECONDS)[0]:
                actor, chunk = running.pop(future)
                returns[chunk], lengths[chunk] = self._get(future)
                idle.append(actor)

    def _get(self, future: Any) -> PopulationReturns:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            played: PopulationReturns = ray.get(future)
        except RayTaskError as error:
            file, cause = self.run.write_error(str(error)), error.cause
            raise StoppedError(
                f"a worker failed: {type(cause).__name__}: {one_line(cause)}; "
                f"traceback in {file}"
            ) from error
        except RayActorError as error:
            file = self.run.write_error(str(error))
            raise StoppedError(
                f"a worker died, was restarted and died again; see {file}"
            ) from error
        return played


class Worker(Evaluator):
    """Evaluator in the process of a Ray actor, on one core."""

    def __init__(self, config: EvolveConfig) -> None:
        torch.set_num_threads(1)
        super().__init__(config)
        self.env_timeout = config.env_timeout or REMOTE_LIMIT

    @override
    def play(self, vectors: Any, task: PopulationTask) -> PopulationReturns:
        with limit_calls(self.env_timeout):
            return super().play(torch.from_numpy(vectors), task)
