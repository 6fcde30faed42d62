"""The learner connector and the minibatch iterator."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from marl_pool.training.ppo.episodes import STATE

Rows = dict[str, Any]
"""A module's batch: columns of tensors; the observations are a dict of tensors. A row
is a step, or a sequence of steps for a policy that remembers."""


VALUE_SCALE = "value_scale"
"""Column: factor of the values and value targets in the loss."""


class TrainBatch(ConnectorV2):
    """Concatenate episode chunks by module, standardise advantages, move to device.

    It takes the place of RLlib's whole default pipeline, which loops over single
    steps, adds a phantom step to each chunk and runs the value function again.

    A recurrent policy is trained on sequences: its rows are ``(B, T)`` steps, with the
    state before the first of them and a mask of the steps that exist. Every step of an
    episode chunk carries its state, because RLlib may cut a chunk anywhere to share it
    among learners.

    Args:
        normalize_value_loss: scale values and targets in the loss, so that it starts
            at 1 at most and comes to the share of the variance left unexplained.
        max_seq_len: T, at most, for a policy with more memory than its last action.
    """

    def __init__(
        self, *, normalize_value_loss: bool = False, max_seq_len: int = 1
    ) -> None:
        super().__init__()
        self.normalize_value_loss = normalize_value_loss
        self.max_seq_len = max_seq_len

    def __call__(
        self, *, rl_module: Any, episodes: list[SingleAgentEpisode], **kwargs: Any
    ) -> dict[str, Rows]:
        """Return for each module its rows, on the module's device."""
        by_module: dict[str, list[SingleAgentEpisode]] = {}
        for episode in episodes:
            by_module.setdefault(episode.module_id, []).append(episode)
        batch = {}
        # In one order on every learner: they wait for each other, module by module.
        for module_id, chunks in sorted(by_module.items()):
            device = next(rl_module[module_id].parameters()).device
            move = functools.partial(torch.as_tensor, device=device)
            rows = map_rows(move, _concatenate(chunks))
            advantages = rows[Postprocessing.ADVANTAGES]
            spread = advantages.std(correction=0).clamp(min=1e-4)
            rows[Postprocessing.ADVANTAGES] = (advantages - advantages.mean()) / spread
            if self.normalize_value_loss:
                _normalize_values(rows)
            remembered = sum(key.startswith(STATE) for key in rows)
            if remembered:
                lengths = [len(chunk) for chunk in chunks]
                # The previous action alone is known for each step, without the others.
                limit = self.max_seq_len if remembered > 1 else 1
                rows = to_sequences(rows, lengths, limit)
            batch[module_id] = rows
        return batch


class EpochIterator:
    """Minibatches in which every module passes over its own rows ``num_epochs`` times.

    RLlib's own iterator goes on until the largest module has had its epochs, so a
    module with fewer rows is trained more often than asked. Here every module splits
    its rows evenly into the same number of minibatches.

    Args:
        batch: rows of each module.
        num_epochs: passes over the rows.
        num_minibatches: of one epoch.
        generator: draws the order of the rows; None keeps their order.
        in_step: take exactly so many minibatches, with rows of every module in each,
            as several learners must, which wait for each other. A module with fewer
            rows than minibatches then passes over some of them again.
    """

    def __init__(
        self,
        batch: MultiAgentBatch,
        *,
        num_epochs: int,
        num_minibatches: int,
        generator: torch.Generator | None,
        in_step: bool = False,
    ) -> None:
        self.rows: dict[str, Rows] = {
            module_id: dict(rows) for module_id, rows in batch.policy_batches.items()
        }
        self.counts = {
            module_id: len(rows[Columns.ACTIONS])
            for module_id, rows in self.rows.items()
        }
        self.per_epoch = num_minibatches
        if not in_step:
            self.per_epoch = min(num_minibatches, max(self.counts.values()))
        self.num_epochs, self.generator = num_epochs, generator
        self.in_step = in_step

    def __iter__(self) -> Iterator[MultiAgentBatch]:
        for _ in range(self.num_epochs):
            parts = {
                module_id: self._order(count).tensor_split(self.per_epoch)
                for module_id, count in self.counts.items()
            }
            for index in range(self.per_epoch):
                yield self._minibatch({m: part[index] for m, part in parts.items()})

    def _order(self, count: int) -> torch.Tensor:
        # Drawn on the CPU everywhere, so that one seed gives one order.
        if self.generator is None or self.per_epoch == 1:
            order = torch.arange(count, device="cpu")
        else:
            order = torch.randperm(count, generator=self.generator, device="cpu")
        if self.in_step and count < self.per_epoch:
            order = order.repeat(-(-self.per_epoch // count))[: self.per_epoch]
        return order

    def _minibatch(self, chosen: dict[str, torch.Tensor]) -> MultiAgentBatch:
        batches = {}
        for module_id, rows in chosen.items():
            if not len(rows):
                continue
            whole = self.rows[module_id]
            if self.per_epoch > 1:
                index = rows.to(whole[Columns.ACTIONS].device)
                whole = map_rows(operator.itemgetter(index), whole)
            batches[module_id] = SampleBatch(whole)
        steps = max(len(rows) for rows in chosen.values())
        return MultiAgentBatch(batches, env_steps=steps)


def map_rows(function: Callable[[Any], Any], rows: Mapping[str, Any]) -> Rows:
    """Apply ``function`` to every column of a module's batch."""
    return {
        key: (
            {name: function(part) for name, part in column.items()}
            if isinstance(column, dict)
            else function(column)
        )
        for key, column in rows.items()
    }


def to_sequences(rows: Rows, lengths: Sequence[int], limit: int) -> Rows:
    """Cut rows of steps into rows of sequences.

    Args:
        rows: columns of ``(steps, …)``, chunk after chunk.
        lengths: of the chunks.
        limit: T, how long a sequence may be.

    Returns:
        Columns of ``(B, T, …)`` that begin with what the step had, the states of the
        first steps, ``(B, …)``, and a mask of the steps that are there.
    """
    device = rows[Columns.ACTIONS].device
    ends = np.cumsum(lengths)
    cuts = [
        np.arange(end - length, end, limit)
        for end, length in zip(ends, lengths, strict=True)
    ]
    counts = [len(cut) for cut in cuts]
    starts = torch.as_tensor(np.concatenate(cuts), device=device)
    stops = torch.as_tensor(np.repeat(ends, counts), device=device)
    longest = min(limit, max(lengths))
    index = starts[:, None] + torch.arange(longest, device=device)
    exists = index < stops[:, None]
    # What stands in the place of a step that does not exist is masked out later.
    index = torch.where(exists, index, starts[:, None])
    states = {key: column for key, column in rows.items() if key.startswith(STATE)}
    steps = {key: column for key, column in rows.items() if key not in states}
    return {
        **map_rows(operator.itemgetter(index), steps),
        **map_rows(operator.itemgetter(starts), states),
        Columns.LOSS_MASK: exists,
    }


def num_steps(rows: Mapping[str, Any]) -> int:
    """Count the steps of a module's batch, or of a part of it."""
    if Columns.LOSS_MASK in rows:
        return int(rows[Columns.LOSS_MASK].sum())
    return len(rows[Columns.ACTIONS])


def existing(mask: torch.Tensor, rows: Mapping[str, Any]) -> Rows:
    """From ``(B, T, …)`` to the steps that exist, ``(steps, …)``."""
    return map_rows(operator.itemgetter(mask), rows)


def _normalize_values(rows: Rows) -> None:
    targets = rows[Postprocessing.VALUE_TARGETS]
    errors = targets - rows[Columns.VF_PREDS]
    spread = targets.var(correction=0) + errors.square().mean()
    scale = (spread + 1e-8).rsqrt()
    rows[Postprocessing.VALUE_TARGETS] = targets * scale
    rows[VALUE_SCALE] = scale.expand_as(targets)


def _concatenate(chunks: list[SingleAgentEpisode]) -> Rows:
    names = chunks[0].observations.data
    rows: Rows = {
        Columns.OBS: {
            name: np.concatenate([c.observations.data[name][: len(c)] for c in chunks])
            for name in names
        },
        Columns.ACTIONS: np.concatenate([c.actions.data for c in chunks]),
    }
    for key in chunks[0].extra_model_outputs:
        rows[key] = np.concatenate([c.extra_model_outputs[key].data for c in chunks])
    return rows
