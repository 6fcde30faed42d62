"""Returns of the members of a population, all in the same worlds."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.severity import refuse_ramp
from marl_pool.policies import make_agent
from marl_pool.policies.agent import Agent
from marl_pool.policies.base import Policy
from marl_pool.policies.population import Population, load_vector
from marl_pool.rollout import Rollout
from marl_pool.training.settings import EvolveConfig
from marl_pool.utils.errors import InputError

MAX_WORLDS = 8192
"""Worlds that are stepped together at most, where nothing else is said."""
IDLE = 0.25
"""Share of ended worlds that are still stepped, in worlds that run on."""


class PopulationTask(NamedTuple):
    """Episodes that every member plays."""

    worlds: Tensor
    """``(R,)`` int64 world numbers."""
    episode: int
    """Its number, in each of these worlds."""
    env: dict[str, Any]
    """``{"name": …, **options}``."""


class PopulationReturns(NamedTuple):
    """Finished episodes, ``(members, R)``."""

    returns: Tensor
    """float64, the mean over a world's agents."""
    lengths: Tensor
    """int64, in steps."""


class Chunk(NamedTuple):
    """Members and worlds that are played in one batch."""

    members: slice
    worlds: slice


class Evaluator:
    """Plays members of a population, as many at a time as fit one batch.

    Member by member gives the same episodes, and the same returns up to rounding.

    Args:
        config: of the run.

    Raises:
        InputError: parts of the configuration that don't fit each other.
    """

    def __init__(self, config: EvolveConfig) -> None:
        self.seed, self.device = config.seed, config.device
        self.options = config.perturbation
        world = self._build(1, config.env)
        if len(world.groups) != 1:
            raise InputError(
                f"env: evolution finds one policy, {config.env['name']} has the "
                f"groups {', '.join(world.groups)}"
            )
        ((self.group, group),) = world.groups.items()
        self.agent: Agent = make_agent(
            group.tokens, group.action_space, **config.policy, seed=self.seed
        ).to(self.device)
        self.agent.eval()
        self._perturbation()
        # A simulator for each member and repetition would be thousands of them.
        most = config.repetitions if world.simulated else MAX_WORLDS
        self.max_worlds: int = config.max_worlds or most
        self._kept: tuple[Any, BatchedEnv] | None = None

    def chunks(self, members: int, worlds: int, shares: int = 1) -> Iterator[Chunk]:
        """Cut the episodes into batches.

        Args:
            members: how many.
            worlds: R, that each of them plays.
            shares: number of processes, each of which should get a chunk.
        """
        columns = min(worlds, self.max_worlds)
        rows = max(1, min(self.max_worlds // columns, members // shares))
        for row in range(0, members, rows):
            for column in range(0, worlds, columns):
                yield Chunk(
                    slice(row, min(row + rows, members)),
                    slice(column, min(column + columns, worlds)),
                )

    def check(self, env: Mapping[str, Any], where: str) -> None:
        """Reject options that worlds cannot be made of, or the agent cannot act in.

        Args:
            env: ``{"name": …, **options}``.
            where: the key that changed them, for the message.

        Raises:
            InputError: an unknown option, a number out of range, or other tokens.
        """
        try:
            groups = self._build(1, env).groups
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if list(groups) != [self.group]:
            raise InputError(
                f"{where}: expected the only group {self.group}, got "
                f"{', '.join(groups)}"
            )
        group = groups[self.group]
        misfit = self.agent.mismatch(group.tokens, group.action_space)
        if misfit:
            raise InputError(f"{where}: the policy does not fit its worlds: {misfit}")

    def play(self, vectors: Tensor, task: PopulationTask) -> PopulationReturns:
        """Play one episode for each member and world.

        Args:
            vectors: ``(members, n)`` parameters in the order of `to_vector`.
            task: what is played; the same for all of them.
        """
        shape = (len(vectors), len(task.worlds))
        returns = torch.zeros(shape, dtype=torch.float64)
        lengths = torch.zeros(shape, dtype=torch.int64)
        for chunk in self.chunks(*shape):
            worlds = task.worlds[chunk.worlds]
            part = self._play(vectors[chunk.members], task._replace(worlds=worlds))
            returns[chunk], lengths[chunk] = part
        return PopulationReturns(returns, lengths)

    def _play(self, vectors: Tensor, task: PopulationTask) -> PopulationReturns:
        """Play what fits one batch."""
        shape = (len(vectors), len(task.worlds))
        world = self._world(len(vectors) * len(task.worlds), task.env)
        world.renumber(task.worlds.repeat(len(vectors)), task.episode)
        rollout = Rollout(
            world,
            {self.group: self._policy(vectors)},
            perturbation=self._perturbation(),
        )
        episodes = rollout.episodes(idle=IDLE if world.steps_past_end else 0.0)
        returns = episodes.returns[self.group].mean(1).cpu().view(shape)
        return PopulationReturns(returns, episodes.lengths.cpu().view(shape))

    def _policy(self, vectors: Tensor) -> Policy:
        if len(vectors) > 1:
            return Population(self.agent, vectors.to(self.agent.low))
        load_vector(self.agent, vectors[0].to(self.agent.low))
        return self.agent

    def _perturbation(self) -> Perturbation | None:
        if self.options["name"] == "none":
            return None
        refuse_ramp(self.options, "every generation begins with new worlds")
        return make_perturbation(specs=[self.agent.spec], **self.options)

    def _world(self, num_envs: int, env: dict[str, Any]) -> BatchedEnv:
        """A world of these options: that of the last call, if it was like this."""
        wanted = (num_envs, env)
        if self._kept is None or self._kept[0] != wanted:
            # First let go of the old one, and of the processes that it may have.
            self._kept = None
            self._kept = (wanted, self._build(num_envs, env))
        return self._kept[1]

    def _build(self, num_envs: int, env: Mapping[str, Any]) -> BatchedEnv:
        return make_batched_env(
            num_envs=num_envs, seed=self.seed, device=self.device, **env
        )
