"""The contract of an environment: a batch of episodes that advance together."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypedDict

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.contract import validate_results
from marl_pool.envs.drawing.frames import fit_square, to_rgb
from marl_pool.envs.drawing.marks import Glyphs, draw_perceived, draw_perceived_patches
from marl_pool.envs.patches import PatchGrid
from marl_pool.observations.masks import MASK
from marl_pool.observations.view import TokenView
from marl_pool.options.names import unknown
from marl_pool.options.signatures import check_argument
from marl_pool.options.types import Episodes, NonNegativeInt, Size
from marl_pool.perturbations.perception import Mark, Perception
from marl_pool.policies.action_spaces import Selection
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.selection import SelectedTokens
from marl_pool.tokens import Tokens, TokenSpec, identity_origin
from marl_pool.utils.devices import checked_device, may_read
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.randomness import (
    Purpose,
    Stream,
    below_one,
    stream_keys,
    uniform,
)

LARGEST_OBSERVATION = 1 << 28
"""Most numbers that the agents of a group may observe at once: 1 GiB of float32."""


@dataclass(frozen=True)
class AgentGroup:
    """Agents with equal observation and action spaces, which may share a policy."""

    num_agents: int
    """Number of these agents in one environment."""
    tokens: TokenSpec
    """Shape and type names of one agent's observation."""
    action_space: spaces.Space[Any]
    """Actions of one agent, a space that `ActionSpec.of` accepts."""
    has_action_masks: bool = field(default=False, kw_only=True)
    """True if every observation has a `Tokens.action_mask` of the allowed options."""
    view: TokenView | None = field(
        default=None, kw_only=True, compare=False, repr=False
    )
    """Conversion of a third-party environment's observations to tokens and back; None
    where they are tokens already."""

    def __post_init__(self) -> None:
        for name, kind, expected in (
            ("num_agents", int | np.integer, "an integer"),
            ("tokens", TokenSpec, "a TokenSpec"),
            ("action_space", spaces.Space | ActionSpec, "a space of Gymnasium"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                actual = type(value).__name__
                raise InputError(
                    f"AgentGroup.{name}: expected {expected}, got {actual}"
                )
        shape = self.num_agents, self.tokens.num_tokens, self.tokens.num_features
        if math.prod(shape) > LARGEST_OBSERVATION:
            agents, tokens, features = (f"{size:,}" for size in shape)
            raise InputError(
                f"env: expected observations of at most {LARGEST_OBSERVATION:,} "
                f"numbers in one environment, got {agents} agents x {tokens} tokens x "
                f"{features} features"
            )
        if isinstance(self.action_space, Selection):
            SelectedTokens(self.tokens, self.actions)  # raises an InputError

    @cached_property
    def actions(self) -> ActionSpec:
        """The layout of an action as numbers."""
        return ActionSpec.of(self.action_space)

    def observation_space(self) -> spaces.Dict:
        """Return the space of one agent's observations."""
        space = self.tokens.space()
        if self.has_action_masks:
            space[MASK] = spaces.MultiBinary(self.actions.num_options)
        return space


class Step(NamedTuple):
    """Result of one step of all environments."""

    rewards: dict[str, Tensor]
    """For each group, ``(num_envs, agents)`` float."""
    terminated: Tensor
    """``(num_envs,)`` bool: the episode reached a final state; its value is 0."""
    truncated: Tensor
    """``(num_envs,)`` bool: the time limit cut the episode; bootstrap its value."""


Advance = tuple[dict[str, Tensor], Tensor]
"""Rewards of each group ``(num_envs, agents)``; ``terminated`` ``(num_envs,)`` bool."""

DISCRETE_DTYPES = (torch.int64, torch.int32)
"""Valid dtypes of discrete actions; torch would index by a bool or uint8 as a mask."""


class EnvOptions(TypedDict, total=False):
    """Options of `BatchedEnv` that every environment passes on to it."""

    seed: NonNegativeInt
    first_env: NonNegativeInt
    first_episode: NonNegativeInt
    device: str | torch.device
    dtype: torch.dtype


class BatchedEnv(ABC):
    """A batch of independent multi-agent environments that advance together.

    The state is held in tensors whose first dimension is the environment. A subclass
    sets ``groups``, lists its state in ``state_names``, on which `select`, `state_dict`
    and `load_state_dict` rely, and implements `observe` and two hooks: ``place`` starts
    episodes, and ``advance`` moves every environment by one step. For example, an agent
    on a line that has to reach the origin::

        class Line(BatchedEnv):
            state_names = ("x",)

            def __init__(self, num_envs, *, max_steps=20, **common):
                super().__init__(num_envs, max_steps=max_steps, **common)
                spec, space = TokenSpec(1, 1, ("self",)), spaces.Box(-1, 1, (1,))
                self.groups = {"agent": AgentGroup(1, spec, space)}
                self.x = torch.zeros(num_envs, 1)

            def observe(self):
                types = torch.zeros(self.num_envs, 1, 1, dtype=torch.int64)
                return {"agent": Tokens(self.x[..., None, None], types, types.bool())}

            def place(self, rows, keys):
                start = 2 * self.sample_uniform(keys, 1) - 1
                self.x = self.x.index_copy(0, rows, start)

            def advance(self, actions):
                self.x = self.x + 0.1 * actions["agent"][..., 0].clamp(-1, 1)
                return {"agent": -self.x.abs()}, self.x[:, 0].abs() < 0.05

    ``env=my_module:Line`` trains on it. Its options are keyword arguments of
    the constructor with an annotation and a line under ``Args``.

    Two rules keep experiments comparable. First, `step` never resets: the caller
    decides when the next episode of an environment begins. Training resets it after its
    final observation; evaluation plays one episode in each environment and drops it.
    Second, all random numbers come from streams that are keyed by (seed, environment
    number, episode number, purpose), so an environment plays the same episode alone and
    among thousands: `sample_uniform` in ``place``, ``self.dynamics.next()`` in
    ``advance``.

    Args:
        num_envs: number of environments.
        max_steps: steps after which an episode is truncated.
        seed: seed of all random streams.
        first_env: number of the first environment; the others follow it.
        first_episode: number of the episode that the first reset begins.
        device: device of all tensors.
        dtype: dtype of positions, rewards and features.
        dynamics_size: random numbers that one step of one environment uses.

    Attributes:
        env_ids: ``(num_envs,)`` int64 environment numbers.
        episodes: ``(num_envs,)`` int64 numbers of the current episodes.
        steps: ``(num_envs,)`` int64 steps taken in them.

    Raises:
        InputError: a CUDA device that this machine lacks.
    """

    state_names: ClassVar[tuple[str, ...]]
    """Attributes that hold the state, tensors with the batch dimension first."""
    version: ClassVar[int] = 0
    """Part of the registered id; raised when the dynamics change."""
    steps_past_end: ClassVar[bool] = False
    """True if finished environments may keep being stepped; set it where a step is too
    cheap to skip."""
    simulated: ClassVar[bool] = False
    """True if each environment is a separate simulator; few of them fit a machine."""
    turn_based: bool = False
    """True if not every living agent acts in every step; see `alive`."""
    shows_state: ClassVar[bool] = False
    """True if `observe` shows each agent the whole state, so that `observe_state` is
    `observe`."""
    has_token_order: ClassVar[bool] = False
    """True if the index of a token identifies it, such as a sensor or a patch, and its
    type does not; `observe_state` then gives each index a separate type."""
    patch_grid: PatchGrid | None = None
    """Position of the tokens in a `frame`, if they are patches of an image."""
    groups: dict[str, AgentGroup]
    """The groups of agents by name, set by the constructor."""

    @property
    def state_specs(self) -> dict[str, TokenSpec]:
        """For each group, the specification of `observe_state`; by default none."""
        if not self.shows_state:
            return {}
        specs = {name: group.tokens for name, group in self.groups.items()}
        if self.has_token_order:
            return {name: spec.numbered() for name, spec in specs.items()}
        return specs

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes,
        seed: NonNegativeInt = 0,
        first_env: NonNegativeInt = 0,
        first_episode: NonNegativeInt = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        dynamics_size: int = 0,
    ) -> None:
        self.num_envs, self.max_steps, self.seed = num_envs, max_steps, seed
        self.device, self.dtype = checked_device(device), dtype
        # Half precision counts to 2048 only, and its uniform numbers repeat.
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype: expected float32 or float64, got {dtype}")
        self.env_ids = torch.arange(num_envs, device=self.device) + first_env
        # The first reset adds 1.
        self.episodes = torch.full_like(self.env_ids, first_episode - 1)
        self.steps = torch.zeros_like(self.env_ids)
        self.dynamics = self._dynamics_stream(dynamics_size)

    @property
    def active(self) -> dict[str, Tensor]:
        """For each group, ``(num_envs, agents)`` bool: agents that act next (all)."""
        return {
            name: torch.ones(
                self.num_envs, group.num_agents, dtype=torch.bool, device=self.device
            )
            for name, group in self.groups.items()
        }

    @property
    def alive(self) -> dict[str, Tensor]:
        """For each group, ``(num_envs, agents)`` bool: agents of the running episode.

        These are the `active` agents and, in a `turn_based` environment, those that
        wait for a later step. While the episode runs, at least one agent is alive; an
        agent that is not alive earns 0.
        """
        return self.active

    @property
    def may_be_absent(self) -> bool:
        """False if all agents act in every step, which is the default."""
        return self.overrides("active") or self.overrides("alive")

    @classmethod
    def overrides(cls, name: str) -> bool:
        """Return True if the class overrides an attribute of `BatchedEnv`."""
        return getattr(cls, name) is not getattr(BatchedEnv, name)

    @property
    def has_action_masks(self) -> bool:
        """True if the observations of any group have action masks."""
        return any(group.has_action_masks for group in self.groups.values())

    def signal(self) -> dict[str, Tensor]:
        """Return masks of the tokens that matter for the task, self included.

        By default these are the types in `TokenSpec.signal_types`. The masks are
        ground truth for analyses; policies and perturbations must not use them.

        Returns:
            For each group ``(num_envs, agents, N)`` bool, False for padding.

        Raises:
            UnfitTokensError: the environment defines no signal.
        """
        masks = {}
        for name, tokens in self.observe().items():
            spec = self.groups[name].tokens
            if not spec.signal_types:
                raise UnfitTokensError(
                    f"{type(self).__name__} does not define the signal tokens of "
                    f"{name!r}: it has no signal_types"
                )
            numbers = [spec.type_names.index(kind) for kind in spec.signal_types]
            kinds = torch.tensor(numbers, device=self.device)
            masks[name] = torch.isin(tokens.types, kinds) & ~tokens.padding
        return masks

    def reset(self, where: Tensor | None = None) -> None:
        """Begin the next episode, in all environments or in those of a mask.

        Args:
            where: ``(num_envs,)`` bool, True where an episode begins; None for all.

        Raises:
            InputError: ``where`` has another shape or dtype.
        """
        if where is not None:
            self._validate_mask(where)
        # The number of an episode counts the resets of its environment, and keys the
        # random streams of the episode's start and of its steps.
        self.episodes = self.episodes + (1 if where is None else where)
        self.dynamics.restart(self.episodes, where)
        if where is None:
            self.steps.zero_()
            self._place_rows(torch.arange(self.num_envs, device=self.device))
            return
        self.steps.masked_fill_(where, 0)
        if self.simulated or may_read(where):
            self._place_rows(where.nonzero()[:, 0])
            return
        # Indices on the host would stall a GPU, so place all and restore the others.
        running = {name: part.clone() for name, part in self._tensors().items()}
        self._place_rows(torch.arange(self.num_envs, device=self.device))
        for name, placed in self._tensors().items():
            mask = where.view(-1, *[1] * (placed.dim() - 1))
            placed.copy_(torch.where(mask, placed, running[name]))

    def _validate_mask(self, where: object) -> None:
        shape = self.steps.shape
        if not isinstance(where, Tensor):
            actual = type(where).__name__
        elif where.dtype != torch.bool or where.shape != shape:
            actual = f"{where.dtype} of the shape {tuple(where.shape)}"
        else:
            return
        raise InputError(
            f"reset: expected a tensor of bool of the shape {tuple(shape)}, "
            f"got {actual}"
        )

    def _place_rows(self, rows: Tensor) -> None:
        self.place(rows, self._reset_keys(rows))

    def renumber(self, env_ids: Tensor, episode: int) -> None:
        """Replace the environment numbers; the next full `reset` begins ``episode``.

        Environments of equal number draw the same random numbers, whatever policy acts,
        so the members of a population can be compared on equal episodes.

        Args:
            env_ids: ``(num_envs,)`` int64 numbers; they may repeat.
            episode: number of the episode.
        """
        self.env_ids = env_ids.to(self.device)
        self.episodes = torch.full_like(self.env_ids, episode - 1)
        self.dynamics = self._dynamics_stream(self.dynamics.size)

    def _dynamics_stream(self, size: int) -> Stream:
        return Stream(self.seed, self.env_ids, Purpose.DYNAMICS, size, dtype=self.dtype)

    def step(self, actions: Mapping[str, Tensor]) -> Step:
        """Advance every environment by one step, including those that have ended.

        Args:
            actions: for each group ``(num_envs, agents, …)``, laid out as in its
                `ActionSpec`, in the units of the action space and clipped to it.

        Raises:
            InputError: wrong groups, shapes or dtypes of the actions or of the results
                of `advance`; on a CPU, choices out of range or between two integers.
        """
        self._validate_actions(actions)
        rewards, terminated = validate_results(self, self.advance(actions))
        self.steps += 1
        # A copy, since many environments return a constant of theirs.
        return Step(rewards, terminated.clone(), self.at_limit())

    def at_limit(self) -> Tensor:
        """Return ``(num_envs,)`` bool: the episode has reached its time limit."""
        return self.steps >= self.max_steps

    def _validate_actions(self, actions: Mapping[str, Tensor]) -> None:
        groups = self.groups
        if not isinstance(actions, Mapping):
            raise InputError(
                f"actions: expected a mapping from {', '.join(groups)} to tensors, got "
                f"{type(actions).__name__}"
            )
        if actions.keys() != groups.keys():
            raise InputError(
                f"actions: expected the groups {', '.join(groups)}, "
                f"got {', '.join(actions) or 'none'}"
            )
        for name, group in groups.items():
            action, spec = actions[name], group.actions
            shape = (self.num_envs, group.num_agents, *spec.shape)
            if not isinstance(action, Tensor):
                raise InputError(
                    f"actions of {name!r}: expected a tensor, got "
                    f"{type(action).__name__}"
                )
            if action.shape != shape:
                raise InputError(
                    f"actions of {name!r}: expected the shape {shape}, "
                    f"got {tuple(action.shape)}"
                )
            if spec.integral and action.dtype not in DISCRETE_DTYPES:
                raise InputError(
                    f"actions of {name!r}: expected int64, got {action.dtype}"
                )
            if action.dtype == torch.bool or action.is_complex():
                raise InputError(
                    f"actions of {name!r}: expected real numbers, got {action.dtype}"
                )
            if spec.sizes and action.numel() and may_read(action):
                choices = action if spec.integral else action[..., : len(spec.sizes)]
                _validate_choices(name, choices, spec.sizes)

    @abstractmethod
    def observe(self) -> dict[str, Tokens]:
        """Return, for each group, tokens with batch dimensions ``(num_envs, agents)``.

        A caller may keep the features, so a later step must not write into them.
        """

    def observe_state(self) -> dict[str, Tokens]:
        """Return the state as tokens, for centralized critics in training.

        For each group in `state_specs`, tokens with batch dimensions ``(num_envs,
        agents)``: all entities in one frame of reference, the agent itself with the
        type self. As in `observe`, a later step must not write into the features.

        Raises:
            UnfitTokensError: the environment offers no state.
        """
        if not self.shows_state:
            name = type(self).__name__
            raise UnfitTokensError(f"{name} does not define observe_state")
        states = self.observe()
        if not self.has_token_order:
            return states
        return {
            name: tokens._replace(types=identity_origin(tokens), action_mask=None)
            for name, tokens in states.items()
        }

    @abstractmethod
    def place(self, rows: Tensor, keys: Tensor) -> None:
        """Begin an episode in the environments ``rows`` ``(k,)`` int64.

        ``keys`` ``(k,)`` identify their reset streams, for `sample_uniform`. On a
        GPU the rows are all environments, unless they are `simulated`, and `reset`
        restores the state of those whose episode continues.
        """

    @abstractmethod
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        """Move every environment by one step; `step` checks actions and truncates."""

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.state_names}

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def _constant(self, values: object, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(values, dtype=dtype or self.dtype, device=self.device)

    def _reset_keys(self, rows: Tensor) -> Tensor:
        env_ids, episodes = self.env_ids[rows], self.episodes[rows]
        return stream_keys(self.seed, env_ids, episodes, Purpose.RESET)

    def sample_uniform(self, keys: Tensor, count: int, start: int = 0) -> Tensor:
        """Sample numbers ``(k, count)`` in (0, 1), each row from the stream of its key.

        Args:
            keys: ``(k,)`` keys that ``place`` receives.
            count: numbers of each stream.
            start: position of the first number in the stream.
        """
        return below_one(uniform(keys, count, start), self.dtype)

    def select(self, indices: Tensor) -> Self:
        """Copy the environments at ``indices``, in their current state.

        Args:
            indices: ``(k,)`` int64 or int32 indices in the batch; they may repeat.

        Raises:
            InputError: ``indices`` of another dtype, such as a mask.
        """
        indices = torch.as_tensor(indices, device=self.device)
        if indices.dtype not in DISCRETE_DTYPES:
            raise InputError(
                f"select: expected indices of dtype int64 or int32, got {indices.dtype}"
            )
        # A shallow copy shares options and constants; only the state is indexed.
        selected = object.__new__(type(self))
        selected.__dict__.update(self.__dict__)
        selected.num_envs = len(indices)
        for name in ("env_ids", "episodes", "steps"):
            setattr(selected, name, getattr(self, name)[indices])
        selected.dynamics = self.dynamics.select(indices)
        selected._set_tensors({k: v[indices] for k, v in self._tensors().items()})
        return selected

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which an equal environment continues exactly."""
        return {
            "episodes": self.episodes.clone(),
            "steps": self.steps.clone(),
            "dynamics": self.dynamics.state_dict(),
            "tensors": {name: part.clone() for name, part in self._tensors().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` of an environment with the same options."""
        # Copy, since a step writes into these tensors and the state may be reused.
        self.episodes = state["episodes"].clone().to(self.device)
        self.steps = state["steps"].clone().to(self.device)
        self.dynamics.load_state_dict(state["dynamics"])
        tensors = state["tensors"]
        self._set_tensors({k: v.clone().to(self.device) for k, v in tensors.items()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue from a deep copy or a pickle, exactly; a copy shares the state."""
        self.__dict__.update(state)
        # A pickle holds the state and the views of it as separate tensors.
        if self.overrides("_set_tensors"):
            self._set_tensors(self._tensors())

    def frame(
        self,
        index: int = 0,
        *,
        attention: Tensor | None = None,
        group: str | None = None,
        agent: int = 0,
        size: int = 512,
        perception: Perception | None = None,
    ) -> np.ndarray:
        """Render one environment as an image.

        Args:
            index: index of the environment in the batch.
            attention: ``(N,)`` attention weights in [0, 1] of one agent, shown at the
                entities of its tokens; None for no attention.
            group: group of that agent; None for the first group.
            agent: index of that agent in its group.
            size: height and width in pixels.
            perception: tokens that the agent perceives, without batch dimensions; their
                differences from the true ones are marked, and ``attention`` then has a
                weight for each of its ``M`` tokens.

        Returns:
            ``(size, size, 3)`` uint8 RGB.

        Raises:
            InputError: an index, group, agent or size that does not exist, a wrong
                number of weights, or an environment without pictures.
        """
        group = group or next(iter(self.groups))
        if group not in self.groups:
            raise unknown("group", group, self.groups)
        for name, value, count in (
            ("index", index, self.num_envs),
            ("agent", agent, self.groups[group].num_agents),
        ):
            if not 0 <= value < count:
                raise InputError(
                    f"frame: {name}: expected 0 to {count - 1}, got {value}"
                )
        check_argument("frame: size", size, Size)
        spec = self.groups[group].tokens
        count = perception.seen.num_tokens if perception else spec.num_tokens
        if attention is not None and attention.shape != (count,):
            raise InputError(
                f"attention: expected one weight for each of {count} tokens, "
                f"got the shape {tuple(attention.shape)}"
            )
        perceived = perception and perception.cpu()
        weights = by_origin = None
        if attention is not None:
            numbers = attention.double().cpu()
            # Weights of perceived tokens become weights of the true tokens behind them.
            true_numbers = perceived.by_origin(numbers) if perceived else numbers
            weights, by_origin = numbers.numpy(), true_numbers.numpy()
        if perceived is None or perceived.marks().keys() <= {Mark.REORDERED}:
            return self._picture(index, size, by_origin, group, agent)
        if self.patch_grid is not None:
            image = self._picture(index, size, by_origin, group, agent)
            draw_perceived_patches(image, perceived, self.patch_grid, spec.num_frames)
            return image
        true_glyphs, perceived_glyphs = (
            self.glyphs(tokens, index, group=group, agent=agent, size=size)
            for tokens in (perceived.true, perceived.seen)
        )
        # Lines to where tokens are perceived replace those to the true places.
        lines = perceived_glyphs is not None and perceived_glyphs.observer is not None
        image = self._picture(index, size, None if lines else by_origin, group, agent)
        if true_glyphs is not None and perceived_glyphs is not None:
            draw_perceived(image, perceived, true_glyphs, perceived_glyphs, weights)
        return image

    def _picture(self, index: int, size: int, *details: Any) -> np.ndarray:
        """Return the picture of `draw`, as ``(size, size, 3)`` uint8."""
        image = self.draw(index, size, *details)
        try:
            return fit_square(to_rgb(image), size)
        except InputError as error:
            raise InputError(
                f"{type(self).__name__} cannot be drawn: {error}"
            ) from error

    def glyphs(
        self, tokens: Tokens, index: int, *, group: str, agent: int, size: int
    ) -> Glyphs | None:
        """Return how tokens look in a `frame`, from their features and types alone.

        Args:
            tokens: tokens of one agent, perturbed or not, without batch dimensions.
            index: index of the environment.
            group: group of the agent.
            agent: index of the agent in its group.
            size: height and width of the frame in pixels.

        Returns:
            None if the frames do not show tokens as entities.
        """
        return None

    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        """Render one environment, given the checked arguments of `frame`.

        The picture may have any size and any dtype that `to_rgb` converts.
        """
        raise InputError(
            f"{type(self).__name__} cannot be rendered: it does not define draw"
        )


def _validate_choices(name: str, actions: Tensor, sizes: tuple[int, ...]) -> None:
    """Raise InputError for a choice out of range; reads values."""
    # Beside the numbers of a Box, choices are numbers too.
    if actions.is_floating_point() and (broken := actions[actions.frac() != 0]).numel():
        raise InputError(
            f"actions of {name!r}: expected choices that are integers, "
            f"got {broken[0].item():g}"
        )
    lowest, highest = actions.reshape(-1, len(sizes)).aminmax(dim=0)
    for size, *ends in zip(sizes, lowest.tolist(), highest.tolist(), strict=True):
        for number in ends:
            if not 0 <= number < size:
                raise InputError(
                    f"actions of {name!r}: expected choices from 0 to {size - 1}, "
                    f"got {number}"
                )
