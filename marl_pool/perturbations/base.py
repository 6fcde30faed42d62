"""Base classes of perturbations: tokens in, tokens out, with a state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.options.types import Episodes, NonNegativeInt, PositiveInt, Severity
from marl_pool.perturbations.perception import Perception
from marl_pool.perturbations.sampling import uniform_like
from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import (
    SELF_TYPE,
    Tokens,
    append,
    dtype_name,
    form_of,
    identity_origin,
    like,
)
from marl_pool.utils.devices import constant, may_read
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.randomness import uniform

ActionSpace = spaces.Space[Any] | ActionSpec
SEVERITY_POSITION = -1
"""Position of the severity in a perturbation's stream; other numbers begin at 0."""
PerturbationState = dict[str, Tensor]
"""Tensors ``(num_envs, …)``. If tokens move or are added, ``origin (num_envs, agents,
N)`` is the index of the environment's token behind each one seen, -1 for none."""


@dataclass(kw_only=True, eq=False)
class Perturbation(ABC):
    """Change what agents observe or do, never the environment itself.

    At severity 0 it is the identity, bit for bit. It sees only tokens, may change N and
    may have a memory. One that moves or adds tokens says where they come from, in the
    ``origin`` of its state, so that renderers draw attention on the right entities. A
    constructor parameter named in `CONTEXT` receives that attribute of the token spec.
    The options of a subclass that is a dataclass are its fields.

    Args:
        severity: strength in [0, 1]; or a pair ``[low, high]``, between which a
            severity is sampled uniformly for each episode of each environment.
        ramp: number of episodes of an environment over which its severity grows
            linearly from 0, a curriculum for training, or None for full severity from
            the start.
    """

    severity: Severity = 1.0
    ramp: PositiveInt | None = None
    by_group: dict[str, "Perturbation"] = field(
        init=False, repr=False, default_factory=dict
    )
    """Perturbations of groups whose tokens this one does not fit."""
    made_for: frozenset[str] = field(init=False, repr=False, default=frozenset())
    """Groups whose tokens are known; empty: any. A copy with `replace` is for any."""

    label: ClassVar[str] = "perturbed"
    """Label of a perturbed token in legends."""
    reorders = False
    """True if tokens only change places, which an invariant policy cannot notice."""

    def __post_init__(self) -> None:
        pair = self.severity
        self.low, self.high = pair if isinstance(pair, Sequence) else (pair, pair)
        if self.low > self.high:
            raise InputError(
                "perturbation.severity: expected [low, high] with low <= high, "
                f"got {[self.low, self.high]}"
            )

    @property
    def varies(self) -> bool:
        """True if the severity differs between environments or episodes."""
        return self.low < self.high or self.ramp is not None

    @abstractmethod
    def start(
        self,
        tokens: Tokens,
        keys: Tensor,
        state: PerturbationState | None = None,
        where: Tensor | None = None,
        episodes: Tensor | None = None,
    ) -> PerturbationState:
        """Return the state at the start of an episode.

        Args:
            tokens: the first observation, batch dimensions ``(num_envs, agents)``.
            keys: ``(num_envs,)`` keys of the environments' random streams.
            state: of the environments that are not reset; None at the first start.
            where: ``(num_envs,)`` bool, the environments that are reset; None for all.
            episodes: ``(num_envs,)`` int64, episodes that each environment has played,
                which a ramp follows, or None after the ramp.
        """

    @abstractmethod
    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        """Perturb the tokens of one step; return them and the next state."""

    def act(
        self, actions: Tensor, state: PerturbationState, space: ActionSpace
    ) -> tuple[Tensor, PerturbationState]:
        """Perturb the actions of one step; return them and the next state.

        Called after `__call__` for the same step. By default actions are unchanged.

        Args:
            actions: in units of the space, ``(num_envs, agents, …)``; see
                `ActionSpec`.
            state: the state that `__call__` returned.
            space: action space of one agent.
        """
        return actions, state

    def covers(self, group: str) -> bool:
        """Return True if a group of agents is perturbed.

        By default all are, or those for which the perturbation was built.
        """
        return not self.made_for or group in self.made_for

    def for_group(self, group: str) -> "Perturbation":
        """Return the perturbation that fits the tokens of a group of agents."""
        return self.by_group.get(group, self)

    def validate_env(  # noqa: B027, since most have nothing to reject
        self, groups: Mapping[str, int], max_steps: int | None
    ) -> None:
        """Reject an environment that the options do not fit.

        Args:
            groups: number of agents of each group.
            max_steps: steps of an episode, or None if it is not known.

        Raises:
            UnfitTokensError: an option that does not fit.
        """

    def origin(
        self, perturbed: Tokens, state: PerturbationState, num_tokens: int
    ) -> Tensor:
        """Return the index of the true token behind each perturbed one, -1 for none.

        Args:
            perturbed: the perturbed tokens of a step.
            state: the state that the step returned.
            num_tokens: number of true tokens.

        Returns:
            ``(num_envs, agents, N)`` int64.
        """
        origin = state.get("origin")
        if origin is None or origin.shape != perturbed.types.shape:
            return _unmoved(perturbed, num_tokens)
        return origin

    def perceive(
        self, true: Tokens, perturbed: Tokens, state: PerturbationState
    ) -> Perception:
        """Relate the perturbed tokens of a step to the unperturbed ones.

        Args:
            true: the unperturbed tokens.
            perturbed: the perturbed ones.
            state: the state that the step returned.
        """
        origin = self.origin(perturbed, state, true.num_tokens)
        return Perception.compare(true, perturbed, origin, self.label)


def validate_constructed(perturbation: Perturbation) -> None:
    """Raise InputError if a subclass replaced the constructor and left out `super`."""
    if not hasattr(perturbation, "low"):
        where = type(perturbation).__name__
        raise InputError(
            f"perturbation {where!r}: expected a constructor that calls "
            "super().__post_init__() or super().__init__(), got one that does not"
        )


def validate_perturbed(
    perturbation: Perturbation, tokens: Tokens, perturbed: object
) -> None:
    """Raise InputError unless the results for ``tokens`` are tokens of their dtypes.

    Reads no values.
    """
    where = type(perturbation).__name__
    if not isinstance(perturbed, Tokens):
        raise InputError(
            f"perturbation {where!r}: expected Tokens, got {form_of(perturbed)}"
        )
    parts = ("features", "types", "padding")
    for part, true, result in zip(parts, tokens[:3], perturbed[:3], strict=True):
        if not isinstance(result, Tensor) or result.dtype is not true.dtype:
            raise InputError(
                f"perturbation {where!r}: expected {part} of "
                f"{dtype_name(true.dtype)}, got {form_of(result)}"
            )


def validate_no_ramp(options: Mapping[str, Any], reason: str) -> None:
    """Raise InputError, with the reason, if a perturbation's options have a ramp.

    A ramp needs environments that play one episode after another.
    """
    if options.get("ramp") is not None:
        raise InputError(
            f"perturbation.ramp: expected null, since {reason}, got {options['ramp']}"
        )


@dataclass(kw_only=True, eq=False)
class SampledPerturbation(Perturbation):
    """A perturbation whose randomness is sampled at reset and held for some steps.

    A subclass implements `sample`, which draws random numbers independent of the
    severity, so that a higher severity perturbs the same tokens and more;
    `apply_severity`, which combines the two, once after each sampling; and `apply`,
    which perturbs one step.

    Steps are counted from 0 in each episode. A perturbation with an onset is sampled at
    that step, with the same random numbers as without an onset: frozen sensors hold the
    readings of that step. Before the onset, from ``end`` on, and for all other agents
    it is the identity. In a turn-based environment the steps of an agent are its turns.

    Args:
        every: steps between resamplings, or None to resample at reset only.
        onset: first perturbed step of an episode.
        end: first unperturbed step after the onset, or None for the rest of the
            episode.
        agents: indices of the perturbed agents in their group, or None for all.
        groups: names of the perturbed groups of agents, or None for all.
    """

    every: Episodes | None = None
    onset: NonNegativeInt = 0
    end: Episodes | None = None
    agents: list[NonNegativeInt] | None = None
    groups: list[str] | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end is not None and self.end <= self.onset:
            raise InputError(
                f"perturbation.end: expected a step after the onset {self.onset}, "
                f"got {self.end}"
            )
        for name in ("agents", "groups"):
            if getattr(self, name) == []:
                raise InputError(
                    f"perturbation.{name}: expected null or at least one, got []"
                )

    @override
    def covers(self, group: str) -> bool:
        return super().covers(group) and (self.groups is None or group in self.groups)

    @override
    def validate_env(self, groups: Mapping[str, int], max_steps: int | None) -> None:
        if max_steps is not None and self.onset >= max_steps:
            raise UnfitTokensError(
                "perturbation.onset: expected a step below the env's max_steps "
                f"{max_steps}, got {self.onset}"
            )
        if unknown := set(self.groups or ()) - set(groups):
            raise UnfitTokensError(
                f"perturbation.groups: expected some of {', '.join(groups)}, "
                f"got {', '.join(sorted(unknown))}"
            )
        counts = [count for name, count in groups.items() if self.covers(name)]
        if not counts:
            names = ", ".join(sorted(self.made_for))
            raise UnfitTokensError(
                f"perturbation.groups: expected some of {names}, got "
                f"{', '.join(self.groups or ())}"
            )
        fewest = min(counts)
        if self.agents is not None and max(self.agents) >= fewest:
            raise UnfitTokensError(
                f"perturbation.agents: expected indices below {fewest}, the number of "
                f"agents, got {self.agents}"
            )

    def affected(self, steps: Tensor, num_agents: int) -> Tensor | None:
        """Return the perturbed agents, ``(num_envs, agents)`` bool; None for all.

        Args:
            steps: ``(num_envs,)`` int64, steps taken in the episodes.
            num_agents: number of agents of the group.
        """
        if not self.onset and self.end is None and self.agents is None:
            return None
        during = steps >= self.onset
        if self.end is not None:
            during &= steps < self.end
        mask = [
            self.agents is None or agent in self.agents for agent in range(num_agents)
        ]
        return during[:, None] & constant(tuple(mask), steps.device, torch.bool)

    def turn(self, steps: Tensor) -> Tensor:
        """Return the number of earlier samplings in the episode, ``(num_envs,)``."""
        if self.every is None:
            return torch.zeros_like(steps)
        return (steps - self.onset).clamp(min=0) // self.every

    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        """Sample what holds until the next resampling, independent of the severity.

        By default nothing is sampled.

        Args:
            tokens: of batch ``(num_envs, agents)``.
            keys: ``(num_envs,)`` of the random streams.
            turn: ``(num_envs,)`` int64, number of earlier samplings in the episode.
        """
        return {}

    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        """Derive new entries of the state; none by default.

        Args:
            tokens: of the step of the sampling.
            state: the sample, with ``severity`` ``(num_envs,)`` float64.
        """
        return {}

    def update(self, state: PerturbationState) -> PerturbationState:
        """Update the state at every step, if observations combine several samples."""
        return state

    @abstractmethod
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        """Perturb ``tokens`` by the latest sample in ``state``."""

    @override
    def start(
        self,
        tokens: Tokens,
        keys: Tensor,
        state: PerturbationState | None = None,
        where: Tensor | None = None,
        episodes: Tensor | None = None,
    ) -> PerturbationState:
        severity = self._sample_severities(keys, episodes)
        first = {"keys": keys, "steps": torch.zeros_like(keys), "severity": severity}
        if where is None or state is None:
            return self._resample(tokens, first)
        # Restart the rows of ``where``; the others keep their state.
        state = {**state, **choose(where, first, state)}
        return self._resample_rows(where, tokens, state)

    @override
    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        if self.high == 0:
            return tokens, state
        steps = state["steps"]
        # Resample where it is due, then perturb by the latest sample.
        if self.every is not None:
            due = (steps > self.onset) & ((steps - self.onset) % self.every == 0)
            state = self._resample_rows(due, tokens, state)
        if self.onset:
            state = self._resample_rows(steps == self.onset, tokens, state)
        state = self.update(state)
        perturbed = self.apply(tokens, state)
        validate_perturbed(self, tokens, perturbed)
        affected = self.affected(steps, tokens.types.shape[1])
        if affected is not None:
            perturbed = _mix(affected, perturbed, tokens)
        # Environments at severity 0 keep their tokens.
        if self.varies and perturbed.num_tokens == tokens.num_tokens:
            # Adding 0 turns -0 into 0; severity 0 must be the identity bit for bit.
            unperturbed = state["severity"] == 0
            perturbed = Tokens(**choose(unperturbed, tokens.columns, perturbed.columns))
        return perturbed, {**state, "steps": steps + 1}

    @override
    def origin(
        self, perturbed: Tokens, state: PerturbationState, num_tokens: int
    ) -> Tensor:
        origin = super().origin(perturbed, state, num_tokens)
        affected = self.affected(state["steps"] - 1, origin.shape[1])
        if affected is None:
            return origin
        # Tokens have moved only where they are perturbed.
        unmoved = _unmoved(perturbed, num_tokens)
        return torch.where(affected[..., None], origin, unmoved)

    def _sample_severities(self, keys: Tensor, episodes: Tensor | None) -> Tensor:
        """Sample severities ``(num_envs,)`` float64; arguments as in `start`.

        An environment has the same severity alone and in a batch, and its other random
        numbers do not depend on the bounds.
        """
        low, high = self.low, self.high
        sampled = torch.full_like(keys, low, dtype=torch.float64)
        if low < high:
            sampled += (high - low) * uniform(keys, 1, SEVERITY_POSITION)[:, 0]
        if self.ramp is None or episodes is None:
            return sampled
        return sampled * (episodes.double() / self.ramp).clamp(max=1)

    def _resample(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Resample all environments of ``state``."""
        # The turn numbers the samplings of an episode; each has separate random
        # numbers.
        keys, turn = state["keys"], self.turn(state["steps"])
        sampled = {**state, **self.sample(tokens, keys, turn)}
        return {**sampled, **self.apply_severity(tokens, sampled)}

    def _resample_rows(
        self, where: Tensor, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        """Resample the environments in ``where``.

        On a CPU only these are sampled, since sampling is expensive.
        """
        if not may_read(where):
            return choose(where, self._resample(tokens, state), state)
        rows = where.nonzero()[:, 0]
        # None or all of the rows need no indexing.
        if len(rows) in (0, len(where)):
            return self._resample(tokens, state) if len(rows) else state
        # Resample these rows as a separate batch, then put them back.
        row_state = {name: tensor[rows] for name, tensor in state.items()}
        fresh = self._resample(tokens.at(rows), row_state)
        # Entries that were not resampled stay the same tensor.
        return {
            name: tensor
            if fresh[name] is row_state[name]
            else tensor.index_copy(0, rows, fresh[name])
            for name, tensor in state.items()
        }


@dataclass(kw_only=True, eq=False)
class ProtectingPerturbation(SampledPerturbation):
    """A sampled perturbation that may leave the observer's own token unchanged.

    Args:
        protect_self: leave the observer's own token unchanged.
        has_self: whether tokens of type 0 are the observer's own.
    """

    protect_self: bool = True
    has_self: bool = True

    @property
    def protects(self) -> bool:
        """True if there are own tokens to leave unchanged."""
        return self.protect_self and self.has_self


@dataclass(kw_only=True, eq=False)
class TokenShare(ProtectingPerturbation):
    """A perturbation of ``round(severity * n)`` of the n tokens of each row.

    n counts the tokens present that are not protected; halves round to even. A higher
    severity selects the same tokens and some more.

    Args:
        severity: share of the selected tokens.
    """

    def eligible(self, tokens: Tokens) -> Tensor:
        """Tokens that may be selected, ``(num_envs, agents, N)`` bool."""
        present = ~tokens.padding
        return present & (tokens.types != SELF_TYPE) if self.protects else present

    @override
    def sample(self, tokens: Tokens, keys: Tensor, turn: Tensor) -> PerturbationState:
        return {"scores": uniform_like(keys, turn, tokens.types.shape[1:])}

    @override
    def apply_severity(
        self, tokens: Tokens, state: PerturbationState
    ) -> PerturbationState:
        eligible = self.eligible(tokens)
        return {"eligible": eligible, "chosen": self._choose(eligible, state)}

    def chosen(self, tokens: Tokens, state: PerturbationState) -> Tensor:
        """Currently selected tokens, ``(num_envs, agents, N)`` bool.

        Where a token has appeared or vanished since the last resampling, the same
        random numbers select among the tokens present now.
        """
        eligible = self.eligible(tokens)
        if may_read(eligible) and eligible.equal(state["eligible"]):
            return state["chosen"]
        return self._choose(eligible, state)

    def num_chosen(self, eligible: Tensor, state: PerturbationState) -> Tensor:
        """Count the eligible tokens to select, ``(num_envs, agents, 1)`` int64."""
        share = state["severity"].view(-1, 1, 1)
        return (eligible.sum(-1, keepdim=True).double() * share).round().long()

    def _choose(self, eligible: Tensor, state: PerturbationState) -> Tensor:
        # Find each row's threshold, the score of the last token to select.
        queue = state["scores"].masked_fill(~eligible, torch.inf)
        count = self.num_chosen(eligible, state)
        # At a count of 0 there is no such token; `count > 0` then excludes all.
        last = queue.sort(-1).values.gather(-1, (count - 1).clamp(min=0))
        return (queue <= last) & (count > 0) & eligible


def choose(
    where: Tensor, fresh: PerturbationState, old: PerturbationState
) -> PerturbationState:
    """Select the rows of ``fresh`` in ``where`` and of ``old`` elsewhere."""
    return {
        name: torch.where(like(where, new), new, old[name])
        for name, new in fresh.items()
    }


def _unmoved(perturbed: Tokens, num_tokens: int) -> Tensor:
    """Return the origin if no token has moved, -1 for added ones."""
    origin = identity_origin(perturbed)
    return origin.masked_fill(origin >= num_tokens, -1)


def _mix(where: Tensor, perturbed: Tokens, tokens: Tokens) -> Tokens:
    """Take ``perturbed`` for agents in ``where`` and padded ``tokens`` for others."""
    if added := perturbed.num_tokens - tokens.num_tokens:
        *batch, _, width = perturbed.features.shape
        types = tokens.types.new_zeros(*batch, added)
        features = tokens.features.new_zeros(*batch, added, width)
        # Type 0 is padding here: all added slots.
        tokens = append(tokens, Tokens(features, types, types == 0))
    where = where[..., None]
    return tokens._replace(
        features=torch.where(where[..., None], perturbed.features, tokens.features),
        types=torch.where(where, perturbed.types, tokens.types),
        padding=torch.where(where, perturbed.padding, tokens.padding),
    )
