"""Recording observations, actions and labels in little memory."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.tokens import Tokens
from marl_pool.training.cloning.teacher import TeacherLabel

NO_ACTION = -1
"""Previous action at the start of an episode, for discrete actions."""


class RowTable:
    """Deduplicating table of byte rows, numbered in the order of arrival.

    Number 0 is the row of zeros. A frame of Pong has about 16 distinct patches out of
    196, most of them already in the table, so it takes a hundredth of its bytes.

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
        numbers, known = self._numbers, len(self._numbers)
        keys = map(_digest, flat.view(f"V{self.width}")[:, 0].tolist())
        found = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        # Grow to twice the size needed, so that rows are seldom copied.
        if len(numbers) > len(self._table):
            more = np.zeros((2 * len(numbers), self.width), np.uint8)
            more[:known] = self._table[:known]
            self._table = more
        # Copy the new rows; repeated ones are equal.
        new = found >= known
        self._table[found[new]] = flat[new]
        return torch.from_numpy(found.astype(np.int32)).view(rows.shape[:-1])

    def table(self) -> Tensor:
        """Return a view of the rows by number, ``(rows, width)`` uint8."""
        return torch.from_numpy(self._table[: len(self._numbers)])


def _digest(row: bytes) -> bytes:
    """Hash a row to a key of 16 bytes, shorter than most rows."""
    return hashlib.blake2b(row, digest_size=16).digest()


@dataclass
class StepRecorder:
    """Storage of the steps of one group of agents, in batched environments.

    Attributes:
        discrete: True for discrete actions.
        rows: table of distinct features; None unless features are uint8.
        parts: recorded tensors by name, one ``(agents alive, …)`` for each step.
    """

    discrete: bool
    rows: RowTable | None
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(
        self,
        env: BatchedEnv,
        active: Tensor,
        tokens: Tokens,
        prev_action: Tensor,
        begins: Tensor,
        answer: TeacherLabel,
    ) -> None:
        """Record one step of the agents alive, before the environments take it.

        Args:
            env: environments, in the state of the step.
            active: ``(E, A)`` bool, the agents alive.
            tokens: unperturbed observations, batch ``(E, A)``.
            prev_action: ``(E, A, dim)``, the executed action before, as a vector.
            begins: ``(E, A)`` bool, True where there is no action before.
            answer: the teacher's label, its action as in `Trajectories`.
        """
        features, label = tokens.features, answer.action
        # Store numbers in place of byte rows and of one-hot vectors.
        if self.rows is not None:
            features = self.rows.number(features)
        if self.discrete:
            prev_action = prev_action.argmax(-1).masked_fill(begins, NO_ACTION).short()
            label = label.short()
        shape = active.shape
        # Give the numbers of environments and agents the shape of the active mask.
        step = {
            "env": env.env_ids[:, None].expand(shape),
            "episode": env.episodes[:, None].expand(shape),
            "time": env.steps[:, None].expand(shape),
            "agent": torch.arange(shape[1], device=active.device).expand(shape),
            "features": features,
            "types": tokens.types.byte(),
            "padding": tokens.padding,
            "prev_action": prev_action,
            "begins": begins,
            "label": label,
        }
        # Logits and privileged targets depend on the teacher.
        if answer.logits is not None:
            step["logits"] = answer.logits.float()
        if answer.privileged_targets is not None:
            step["privileged_targets"] = answer.privileged_targets.float()
        # Copy to main memory: environments change their tensors in place.
        for name, part in step.items():
            living = part.to("cpu", copy=True)[active.cpu()]
            self.parts.setdefault(name, []).append(living)

    def pop(self) -> dict[str, Tensor]:
        """Return and clear the record, ``(rows, …)``, each agent's life contiguous."""
        # Sort by environment, agent, episode and time; the last key is the first one.
        flat = {name: torch.cat(parts) for name, parts in self.parts.items()}
        self.parts = {}
        order = np.lexsort([flat[name] for name in ("time", "episode", "agent", "env")])
        rows = torch.from_numpy(order)
        return {name: part.index_select(0, rows) for name, part in flat.items()}
