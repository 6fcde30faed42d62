"""Labelled trajectories, and the policy that plays and records them."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Decision, Policy, SpecifiedPolicy, State
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.training.cloning.teacher import Roles, TeacherLabel
from marl_pool.utils.randomness import Stream

STEP_PARTS = (
    "features",
    "types",
    "padding",
    "prev_action",
    "label",
    "logits",
    "privileged_targets",
    "action_mask",
)
PER_TRAJECTORY = ("lengths", "returns", "env_ids", "begins")
NO_ACTION = -1
"""Previous action at the start of an episode, for discrete actions."""


class RowTable:
    """Deduplicating table of byte rows, numbered in order of arrival.

    Number 0 is the row of zeros. A frame of Pong has about 16 distinct patches out of
    196, most of them already in the table, so it takes a hundredth of its size.

    Args:
        width: bytes of a row.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._numbers = {_digest(bytes(width)): 0}
        self._table = np.zeros((1024, width), np.uint8)

    def number(self, rows: Tensor) -> Tensor:
        """Add rows ``(*B, width)`` uint8; return their numbers ``(*B,)`` int32."""
        flat = np.ascontiguousarray(rows.cpu().numpy()).reshape(-1, self.width)
        numbers, old_count = self._numbers, len(self._numbers)
        keys = map(_digest, flat.view(f"V{self.width}")[:, 0].tolist())
        row_numbers = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        # Grow to twice the needed size, so that rows are seldom copied.
        if len(numbers) > len(self._table):
            table = np.zeros((2 * len(numbers), self.width), np.uint8)
            table[:old_count] = self._table[:old_count]
            self._table = table
        # Copy the new rows; repeated ones are equal.
        is_new = row_numbers >= old_count
        self._table[row_numbers[is_new]] = flat[is_new]
        return torch.from_numpy(row_numbers.astype(np.int32)).view(rows.shape[:-1])

    def table(self) -> Tensor:
        """Return a view of the rows by number, ``(rows, width)`` uint8."""
        return torch.from_numpy(self._table[: len(self._numbers)])

    def select(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct rows of ``numbers``, and each number's row, int64."""
        row_numbers, places = np.unique(numbers.numpy(), return_inverse=True)
        rows = self.table()[torch.from_numpy(row_numbers).long()]
        return rows, torch.from_numpy(places).view(numbers.shape)


def _digest(row: bytes) -> bytes:
    """Hash a row to a key of 16 bytes, which is shorter than most rows."""
    return hashlib.blake2b(row, digest_size=16).digest()


@dataclass(frozen=True)
class Trajectories:
    """n concatenated trajectories with S steps in all.

    Attributes:
        steps: tensors ``(S, …)`` by name: ``features`` (``(S, N, F)`` float32, or
            ``(S, N)`` int32 numbers in a `RowTable` for uint8 features), ``types``
            (uint8, or int32 for more than 256), ``padding`` (bool), ``prev_action`` (a
            vector or, for a single choice, its number, -1 at an episode's start),
            ``label`` (the teacher's action, a Box scaled to [-1, 1]) and optionally the
            teacher's ``logits`` and ``privileged_targets`` and the ``action_mask``.
        digests: n digests of observations, masks, previous actions and labels, equal
            for equal trajectories.
        lengths: ``(n,)`` int64, steps of each trajectory.
        returns: ``(n,)`` float64, undiscounted returns of the executed actions.
        env_ids: ``(n,)`` int64, numbers of the environments.
        begins: ``(n,)`` bool, True if the trajectory starts with an agent's first step
            in an episode.
    """

    steps: dict[str, Tensor]
    digests: tuple[str, ...]
    lengths: Tensor
    returns: Tensor
    env_ids: Tensor
    begins: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """Steps of all trajectories, S."""
        return int(self.lengths.sum())

    @property
    def starts(self) -> Tensor:
        """Index of each trajectory's first step, ``(n,)``."""
        return self.lengths.cumsum(0) - self.lengths

    def keep(self, mask: Tensor) -> "Trajectories":
        """Keep the trajectories of a bool mask ``(n,)``."""
        if mask.all():
            return self
        rows = mask.repeat_interleave(self.lengths).nonzero()[:, 0]
        return Trajectories(
            {name: part.index_select(0, rows) for name, part in self.steps.items()},
            tuple(compress(self.digests, mask.tolist())),
            *(getattr(self, name)[mask] for name in PER_TRAJECTORY),
        )

    def without_duplicates(self, exclude: Iterable[str] = ()) -> "Trajectories":
        """Keep the first of equal trajectories, except digests in ``exclude``."""
        earlier_digests = set(exclude)
        mask = torch.zeros(len(self), dtype=torch.bool)
        for row, digest in enumerate(self.digests):
            mask[row] = digest not in earlier_digests
            earlier_digests.add(digest)
        return self.keep(mask)


def join(trajectories: Iterable[Trajectories | None]) -> Trajectories:
    """Concatenate trajectories of one teacher."""
    parts = [part for part in trajectories if part is not None]
    return Trajectories(
        {name: torch.cat([p.steps[name] for p in parts]) for name in parts[0].steps},
        tuple(digest for part in parts for digest in part.digests),
        *(torch.cat([getattr(p, name) for p in parts]) for name in PER_TRAJECTORY),
    )


def cut(
    recorded: dict[str, Tensor], env_ids: Tensor, returns: Tensor, rows: RowTable | None
) -> Trajectories:
    """Cut recorded steps into trajectories, one for each life of an agent.

    Args:
        recorded: the `Trajectories.steps`, and the ``env``, ``agent``, ``episode``,
            ``time`` and ``begins`` of each step, in any order.
        env_ids: ``(E,)``, numbers of the environments, ascending.
        returns: ``(E, A)``, returns of the agents.
        rows: table of distinct features; None unless features are uint8.
    """
    # Sort by environment, agent, episode and time; lexsort's last key is the primary.
    keys = [recorded[name] for name in ("time", "episode", "agent", "env")]
    order = torch.from_numpy(np.lexsort(keys))
    recorded = {name: part.index_select(0, order) for name, part in recorded.items()}
    env, agent = recorded["env"], recorded["agent"]
    # A life goes on between an agent's turns, which need not be consecutive steps.
    starts = recorded["begins"].clone()
    starts[:1] = True
    for name in ("env", "agent", "episode"):
        starts[1:] |= recorded[name].diff() != 0
    first = starts.nonzero()[:, 0]
    lengths = first.diff(append=torch.tensor([len(env)]))
    steps = {name: recorded[name] for name in STEP_PARTS if name in recorded}
    # Returns are stored by environment and agent: find the row of each trajectory.
    places = torch.searchsorted(env_ids.cpu(), env[first])
    return Trajectories(
        steps,
        _digests(steps, lengths, rows),
        lengths,
        returns.cpu().double()[places, agent[first]],
        env[first],
        recorded["begins"][first],
    )


def _digests(
    steps: dict[str, Tensor], lengths: Tensor, rows: RowTable | None
) -> tuple[str, ...]:
    # Hash the rows, whose numbers depend on the order in which they were recorded.
    features = steps["features"]
    if rows is not None:
        table, places = rows.select(features)
        names = (hashlib.blake2b(row, digest_size=8).digest() for row in table.numpy())
        hashes = np.frombuffer(b"".join(names), dtype=np.int64)
        features = torch.from_numpy(hashes[places.numpy()])
    exact = ("types", "padding", "prev_action", "label", "action_mask")
    hashed = (features, *(steps[name] for name in exact if name in steps))
    sizes = lengths.tolist()
    return tuple(
        hashlib.blake2b(
            b"".join(part.numpy().tobytes() for part in parts), digest_size=16
        ).hexdigest()
        for parts in zip(*(part.split(sizes) for part in hashed), strict=True)
    )


class BehaviorPolicy(SpecifiedPolicy):
    """Policy that lets the teacher or a student act, and the teacher label every step.

    The teacher sees the unperturbed observation, the student the perturbed one. A
    recurrent teacher is stepped even when the student acts, and receives the executed
    action.

    Args:
        roles: the cloned group, its teacher, and the policies of the other groups.
        env: environments to play in.
        rows: table of distinct features, extended here; for uint8 features only.
        student: policy that acts, or None for the teacher.
        perturbation: perturbation of the student's observations.
    """

    def __init__(
        self,
        roles: Roles,
        env: BatchedEnv,
        rows: RowTable | None,
        student: Policy | None = None,
        perturbation: Perturbation | None = None,
    ) -> None:
        group = env.groups[roles.group]
        super().__init__(group.tokens, group.action_space)
        self.to(env.device)
        self.teacher, self.student, self.group = roles.teacher, student, roles.group
        self.rows, self.recorded = rows, defaultdict[str, list[Tensor]](list)
        self.noise_size = self.teacher.noise_size
        few_types = len(self.spec.type_names) <= 256
        self._types_dtype = torch.uint8 if few_types else torch.int32
        self.env_ids = env.env_ids
        # This policy acts for the cloned group of a separate rollout.
        policies = {**roles.other_policies, roles.group: self}
        self.rollout = Rollout(env, policies, perturbation=perturbation)

    def episodes(self) -> Trajectories:
        """Play one episode in each environment."""
        return self._pop(self.rollout.episodes().returns[self.group])

    def advance(self, steps: int) -> Trajectories:
        """Take more steps in each environment; returns are over these steps only."""
        return self._pop(self.rollout.advance(steps)[self.group])

    def _pop(self, returns: Tensor) -> Trajectories:
        """Return the recorded trajectories, and clear the record."""
        steps = {name: torch.cat(parts) for name, parts in self.recorded.items()}
        self.recorded.clear()
        return cut(steps, self.env_ids, returns, self.rows)

    @override
    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        size = (num_envs, num_agents)
        student = self.student and self.student.initial_state(*size, num_tokens)
        return {
            "begins": self.low.new_ones(size, dtype=torch.bool),
            "prev_action": self.low.new_zeros(*size, self.actions.dim),
            "teacher": self.teacher.initial_state(*size, self.spec.num_tokens),
            "student": () if student is None else student,
        }

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        env = self.rollout.env
        perturbed = self.rollout.perturbation is not None
        observed = env.observe()[self.group] if perturbed else tokens
        # Label the unperturbed observation.
        answer = self.teacher.label(env, observed, state["teacher"], generator)
        answer = answer._replace(action=self._to_unit(answer.action))
        # The student acts, if there is one.
        action, student = answer.action, ()
        if self.student is not None:
            decision = self.student.act(tokens, state["student"])
            action, student = decision.action, decision.state
        self._record(observed, state, answer)
        # Pass the executed action to both memories.
        prev_action = self.actions.to_vectors(action).float()
        state = {
            "begins": torch.zeros_like(state["begins"]),
            "prev_action": prev_action,
            "teacher": _with_executed(answer.state, prev_action),
            "student": _with_executed(student, prev_action),
        }
        no_action = torch.zeros_like(prev_action[..., 0])
        # Log-probabilities and values are not needed. The labels take the place of
        # logits, so that the rollout rejects non-finite labels of agents that act.
        labels = answer.logits
        if labels is None:
            labels = self.actions.to_vectors(answer.action).float()
        labels = labels.masked_fill(~env.active[self.group][..., None], 0)
        return Decision(action, no_action, no_action, labels, state)

    def _record(self, tokens: Tokens, state: Any, answer: TeacherLabel) -> None:
        """Record a step of the agents that act, before the environments take it."""
        env, active = self.rollout.env, self.rollout.env.active[self.group]
        features, label = tokens.features, answer.action
        prev_action, begins = state["prev_action"], state["begins"]
        # Store numbers in place of byte rows and of one-hot vectors.
        if self.rows is not None:
            features = self.rows.number(features)
        if self.actions.discrete:
            dtype = torch.int16 if self.actions.n <= 1 << 15 else torch.int32
            prev_action = prev_action.argmax(-1).masked_fill(begins, NO_ACTION)
            prev_action, label = prev_action.to(dtype), label.to(dtype)
        shape = active.shape
        step = {
            "env": env.env_ids[:, None].expand(shape),
            "episode": env.episodes[:, None].expand(shape),
            "time": env.steps[:, None].expand(shape),
            "agent": torch.arange(shape[1], device=active.device).expand(shape),
            "features": features,
            "types": tokens.types.to(self._types_dtype),
            "padding": tokens.padding,
            "prev_action": prev_action,
            "begins": begins,
            "label": label,
        }
        if answer.logits is not None:
            step["logits"] = answer.logits.float()
        if answer.privileged_targets is not None:
            step["privileged_targets"] = answer.privileged_targets.float()
        if tokens.action_mask is not None:
            step["action_mask"] = tokens.action_mask
        # Copy to main memory: environments change their tensors in place.
        for name, part in step.items():
            self.recorded[name].append(part.to("cpu", copy=True)[active.cpu()])

    def _to_unit(self, action: Tensor) -> Tensor:
        """Invert `scale`, clipped to [-1, 1]."""
        if self.actions.integral:
            return action
        count = len(self.actions.choices)
        numbers = action[..., count:] - self.low
        unit = (numbers * (2 / (self.high - self.low)) - 1).clamp(-1, 1)
        return torch.cat([action[..., :count], unit], -1) if count else unit


def _with_executed(state: Any, prev_action: Tensor) -> Any:
    """Replace the previous action in a memory by the executed one."""
    if isinstance(state, dict) and "action" in state:
        return {**state, "action": prev_action.to(state["action"])}
    return state
