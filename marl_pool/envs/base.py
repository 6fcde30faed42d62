"""Worlds: multi-agent environments written once, for a batch, in torch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypedDict

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.drawing.patches import PatchGrid
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.randomness import Purpose, Stream, stream_keys, uniform
from marl_pool.utils.types import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class AgentGroup:
    """Agents that share their spaces and hence may share a policy.

    Attributes:
        num_agents: A, how many of them live in one world.
        tokens: what each of them observes.
        action_space: of one agent.
    """

    num_agents: int
    tokens: TokenSpec
    action_space: spaces.Box | spaces.Discrete


class Step(NamedTuple):
    """What a step of all worlds returns."""

    rewards: dict[str, Tensor]
    """For each group, ``(num_envs, agents)`` float."""
    terminated: Tensor
    """``(num_envs,)`` bool: the task ended; nothing comes after."""
    truncated: Tensor
    """``(num_envs,)`` bool: the time was up; the task would go on."""


INTEGERS = (torch.int64, torch.int32)
"""What may be a discrete action: torch reads others, as an index, otherwise."""


class EnvOptions(TypedDict, total=False):
    """The options of `BatchedEnv` that all worlds share and pass on to it."""

    seed: NonNegativeInt
    first_env: NonNegativeInt
    first_episode: NonNegativeInt
    device: str | torch.device
    dtype: torch.dtype


class BatchedEnv(ABC):
    """A batch of independent worlds that step together.

    `step` never resets; the caller decides what an ended world means. A world's
    random numbers depend on (seed, world number, episode number, purpose) alone.

    Args:
        num_envs: how many worlds, at least 1.
        max_steps: steps after which an episode is truncated, at least 1.
        seed: of the run, not negative.
        first_env: number of the first world; the others count on from there.
        first_episode: episode number of the first reset.
        device: where the tensors live.
        dtype: of positions, rewards and features.
        dynamics_size: random numbers that `step` takes for each world.

    Raises:
        InputError: a number out of range, or a device that is not here.
    """

    version: ClassVar[int] = 0
    """Raised when the dynamics change; part of the registered id."""

    steps_past_end: ClassVar[bool] = False
    """Whether a world may be stepped beyond its end, at no cost worth saving."""

    simulated: ClassVar[bool] = False
    """Whether each world is a simulator of its own, of which few fit a machine."""

    patch_grid: PatchGrid | None = None
    """Where on its `frame` the tokens are, if they are the patches of a picture."""

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        max_steps: PositiveInt,
        seed: NonNegativeInt = 0,
        first_env: NonNegativeInt = 0,
        first_episode: NonNegativeInt = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        dynamics_size: int = 0,
    ) -> None:
        self.num_envs, self.max_steps, self.seed = num_envs, max_steps, seed
        self.device, self.dtype = torch.device(device), dtype
        if self.device.type == "cuda":
            there = torch.cuda.device_count()
            if (self.device.index or 0) >= there:
                raise InputError(f"device: {device} is not here: {there} CUDA devices")
        self.env_ids = torch.arange(num_envs, device=self.device) + first_env
        self.episodes = torch.full_like(self.env_ids, first_episode - 1)
        self.steps = torch.zeros_like(self.env_ids)
        self.dynamics = Stream(
            seed, self.env_ids, Purpose.DYNAMICS, dynamics_size, dtype=dtype
        )

    @property
    @abstractmethod
    def groups(self) -> dict[str, AgentGroup]:
        """The groups of agents, by name."""

    @property
    def active(self) -> dict[str, Tensor]:
        """For each group, ``(num_envs, agents)`` bool: who lives; all by default."""
        return {
            name: torch.ones(
                self.num_envs, group.num_agents, dtype=torch.bool, device=self.device
            )
            for name, group in self.groups.items()
        }

    def signal(self) -> dict[str, Tensor]:
        """Which tokens matter for the task now, as their types say.

        For analyses only: no policy and no perturbation may see it.

        Returns:
            For each group ``(num_envs, agents, N)`` bool, True for unpadded tokens that
            are signal; the observer's own counts as signal.

        Raises:
            UnfitTokensError: the world does not know.
        """
        masks = {}
        for name, tokens in self.observe().items():
            spec = self.groups[name].tokens
            if not spec.signal_types:
                raise UnfitTokensError(
                    f"{type(self).__name__} does not say which tokens of {name!r} are "
                    "signal"
                )
            numbers = [spec.type_names.index(kind) for kind in spec.signal_types]
            kinds = torch.tensor(numbers, device=self.device)
            masks[name] = torch.isin(tokens.types, kinds) & ~tokens.padding
        return masks

    def reset(self, where: Tensor | None = None) -> None:
        """Begin a new episode in the worlds of the bool mask ``where``, or in all."""
        if where is None:
            rows = torch.arange(self.num_envs, device=self.device)
            self.episodes = self.episodes + 1
        else:
            rows = where.nonzero()[:, 0]
            self.episodes = self.episodes + where
        self.steps[rows] = 0
        self.dynamics.restart(self.episodes, where)
        self._place(rows, self._reset_keys(rows))

    def renumber(self, worlds: Tensor, episode: int) -> None:
        """Give the worlds other numbers; the next `reset` of all begins ``episode``.

        Worlds of one number play the same episode, whoever acts in them.

        Args:
            worlds: ``(num_envs,)`` int64 world numbers, which may repeat.
            episode: number of the episode.
        """
        self.env_ids = worlds.to(self.device)
        self.episodes = torch.full_like(self.env_ids, episode - 1)
        self.dynamics = Stream(
            self.seed,
            self.env_ids,
            Purpose.DYNAMICS,
            self.dynamics.size,
            dtype=self.dtype,
        )

    def step(self, actions: Mapping[str, Tensor]) -> Step:
        """Advance every world by one step.

        Args:
            actions: for each group ``(num_envs, agents, A)`` float in the units of
                the action space (clipped to it), or ``(num_envs, agents)`` int64.

        Raises:
            InputError: other groups, shapes or dtypes.
        """
        self._check(actions)
        rewards, terminated = self._advance(actions)
        self.steps += 1
        return Step(rewards, terminated, self.steps >= self.max_steps)

    def _check(self, actions: Mapping[str, Tensor]) -> None:
        groups = self.groups
        if actions.keys() != groups.keys():
            raise InputError(
                f"actions: expected the groups {', '.join(groups)}, "
                f"got {', '.join(actions) or 'none'}"
            )
        for name, group in groups.items():
            action, space = actions[name], group.action_space
            shape = (self.num_envs, group.num_agents, *(space.shape or ()))
            if action.shape != shape:
                raise InputError(
                    f"actions of {name!r}: expected the shape {shape}, "
                    f"got {tuple(action.shape)}"
                )
            if isinstance(space, spaces.Discrete) and action.dtype not in INTEGERS:
                raise InputError(
                    f"actions of {name!r}: expected int64, got {action.dtype}"
                )

    @abstractmethod
    def observe(self) -> dict[str, Tokens]:
        """For each group, tokens with batch dimensions ``(num_envs, agents)``."""

    @abstractmethod
    def _place(self, rows: Tensor, keys: Tensor) -> None:
        """Place the worlds ``rows`` at a start drawn from the streams ``keys``."""

    @abstractmethod
    def _advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Move every world; return the groups' rewards and ``terminated``."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """The tensors, batch dimension first, that hold the worlds' own state."""

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def _reset_keys(self, rows: Tensor) -> Tensor:
        """The keys of the reset streams of the worlds ``rows``, in this episode."""
        worlds, episodes = self.env_ids[rows], self.episodes[rows]
        return stream_keys(self.seed, worlds, episodes, Purpose.RESET)

    def sample_uniform(self, keys: Tensor, count: int, start: int = 0) -> Tensor:
        """``(len(keys), count)`` uniform numbers of the reset streams ``keys``."""
        return uniform(keys, count, start).to(self.dtype)

    def select(self, indices: Tensor) -> Self:
        """Return a world of the rows ``indices``, where they stand now."""
        taken = object.__new__(type(self))
        taken.__dict__.update(self.__dict__)
        taken.num_envs = len(indices)
        for name in ("env_ids", "episodes", "steps"):
            setattr(taken, name, getattr(self, name)[indices])
        taken.dynamics = self.dynamics.select(indices)
        taken._set_tensors({k: v[indices] for k, v in self._tensors().items()})
        return taken

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue exactly."""
        own = {name: tensor.clone() for name, tensor in self._tensors().items()}
        return {
            "episodes": self.episodes.clone(),
            "steps": self.steps.clone(),
            "dynamics": self.dynamics.state_dict(),
            "tensors": own,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken from a world of the same options."""
        # Copies, since a step writes into these tensors and the state may be reused.
        self.episodes = state["episodes"].clone().to(self.device)
        self.steps = state["steps"].clone().to(self.device)
        self.dynamics.load_state_dict(state["dynamics"])
        own = state["tensors"]
        self._set_tensors({k: v.clone().to(self.device) for k, v in own.items()})

    def frame(
        self,
        index: int = 0,
        *,
        attention: Tensor | None = None,
        group: str | None = None,
        agent: int = 0,
        size: int = 512,
    ) -> np.ndarray:
        """Draw world ``index``.

        Args:
            index: which world.
            attention: ``(N,)`` weights in [0, 1] of the tokens of one agent, drawn
                as lines from it to what each token shows.
            group: the group of that agent; None for the first.
            agent: its number in the group.
            size: height and width in pixels.

        Returns:
            ``(size, size, 3)`` uint8 RGB.
        """
        raise InputError(f"{type(self).__name__} cannot be drawn")
