"""Learner connector and minibatch iterator."""

import functools
import operator
from collections import defaultdict
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
"""Batch of a module: tensors by column; the observations are a dict of tensors. A row
is a step or, for a recurrent policy, a sequence of steps."""

VALUE_SCALE = "value_scale"
"""Column: factor of the values and value targets in the loss."""


class TrainBatch(ConnectorV2):
    """Concatenate episode chunks by module and standardize their advantages.

    It replaces RLlib's default pipeline, which loops over single steps, appends an
    extra step to each chunk and runs the value function again.

    A recurrent policy is trained on sequences: its rows are ``(B, T)`` steps, with the
    state before the first step and a mask of the steps that exist. Every step of a
    chunk has its state, because RLlib may cut a chunk anywhere to distribute it over
    learners.

    Args:
        normalize_value_loss: divide the value loss by the variance of the targets plus
            the mean squared error of the recorded values. It is then at most 1 before
            the first step, and tends to the fraction of unexplained variance.
        max_seq_len: upper limit of T, in steps. Policies whose only memory is the
            previous action always have T = 1.
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
        """Return the rows of each module, on the module's device."""
        # Sort the chunks by the module that acted.
        by_module = defaultdict(list)
        for episode in episodes:
            by_module[episode.module_id].append(episode)
        batch = {}
        # Use one order of modules on all learners: they synchronize at each module.
        for module_id, chunks in sorted(by_module.items()):
            device = next(rl_module[module_id].parameters()).device
            move = functools.partial(torch.as_tensor, device=device)
            rows = map_rows(move, _concatenate(chunks))
            # Standardize the advantages over the rows of this module and learner.
            advantages = rows[Postprocessing.ADVANTAGES]
            spread = advantages.std(correction=0).clamp(min=1e-4)
            rows[Postprocessing.ADVANTAGES] = (advantages - advantages.mean()) / spread
            # Scale values and targets, so that the loss does not depend on units.
            if self.normalize_value_loss:
                targets = rows[Postprocessing.VALUE_TARGETS]
                errors = targets - rows[Columns.VF_PREDS]
                variance = targets.var(correction=0) + errors.square().mean()
                scale = (variance + 1e-8).rsqrt()
                rows[Postprocessing.VALUE_TARGETS] = targets * scale
                rows[VALUE_SCALE] = scale.expand_as(targets)
            # Cut the steps of a recurrent policy into sequences.
            state_leaves = sum(key.startswith(STATE) for key in rows)
            if state_leaves:
                lengths = [len(chunk) for chunk in chunks]
                # A state that is only the previous action needs no earlier steps.
                limit = self.max_seq_len if state_leaves > 1 else 1
                rows = to_sequences(rows, lengths, limit)
            batch[module_id] = rows
        return batch


def minibatches(
    batch: MultiAgentBatch,
    *,
    num_epochs: int,
    num_minibatches: int,
    generator: torch.Generator | None,
    in_step: bool = False,
) -> Iterator[MultiAgentBatch]:
    """Yield minibatches; every module passes over its own rows ``num_epochs`` times.

    RLlib's iterator continues until the largest module has finished its epochs, so a
    module with fewer rows is trained for more epochs than configured. Here every
    module splits its rows evenly into the same number of minibatches.

    Args:
        batch: rows of each module.
        num_epochs: passes over the rows.
        num_minibatches: minibatches in one epoch.
        generator: source of the rows' random order; None keeps their order.
        in_step: yield exactly ``num_minibatches`` an epoch, each with rows of every
            module, because several learners synchronize at every minibatch. A module
            with fewer rows than minibatches then repeats some of them.
    """
    modules = {name: dict(rows) for name, rows in batch.policy_batches.items()}
    counts = {name: len(rows[Columns.ACTIONS]) for name, rows in modules.items()}
    # Learners in step take the same number of minibatches, even of few rows.
    number = num_minibatches
    if not in_step:
        number = min(number, max(counts.values()))

    def split(count: int) -> Sequence[torch.Tensor]:
        # Sample on the CPU on all machines, so that a seed always gives one order.
        if generator is None or number == 1:
            order = torch.arange(count, device="cpu")
        else:
            order = torch.randperm(count, generator=generator, device="cpu")
        # Repeat rows until there is one for each minibatch.
        if in_step and count < number:
            order = order.repeat(-(-number // count))[:number]
        return order.tensor_split(number)

    for _ in range(num_epochs):
        # Shuffle the rows of each module, and split them evenly.
        parts = {name: split(count) for name, count in counts.items()}
        for i in range(number):
            chosen = {name: part[i] for name, part in parts.items() if len(part[i])}
            minibatch = {}
            for name, index in chosen.items():
                rows = modules[name]
                if number > 1:
                    index = index.to(rows[Columns.ACTIONS].device)
                    rows = map_rows(operator.itemgetter(index), rows)
                minibatch[name] = SampleBatch(rows)
            steps = max(map(len, chosen.values()))
            yield MultiAgentBatch(minibatch, env_steps=steps)


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
        lengths: steps of each chunk.
        limit: largest length of a sequence, in steps.

    Returns:
        Columns of ``(B, T, …)``, the states before the first steps, ``(B, …)``, and
        under ``Columns.LOSS_MASK`` the mask of the existing steps, ``(B, T)``.
    """
    device = rows[Columns.ACTIONS].device
    # Find the start of each sequence, and the end of its chunk.
    ends = np.cumsum(lengths)
    cuts = [
        np.arange(end - length, end, limit)
        for end, length in zip(ends, lengths, strict=True)
    ]
    counts = [len(cut) for cut in cuts]
    starts = torch.as_tensor(np.concatenate(cuts), device=device)
    stops = torch.as_tensor(np.repeat(ends, counts), device=device)
    # Index the steps of each sequence.
    longest = min(limit, max(lengths))
    index = starts[:, None] + torch.arange(longest, device=device)
    exists = index < stops[:, None]
    # Pad short sequences with their first step; the mask excludes it from the loss.
    index = torch.where(exists, index, starts[:, None])
    states = {key: column for key, column in rows.items() if key.startswith(STATE)}
    steps = {key: column for key, column in rows.items() if key not in states}
    return {
        **map_rows(operator.itemgetter(index), steps),
        **map_rows(operator.itemgetter(starts), states),
        Columns.LOSS_MASK: exists,
    }


def num_steps(rows: Mapping[str, Any]) -> int:
    """Count the steps in rows, without padding."""
    if Columns.LOSS_MASK in rows:
        return int(rows[Columns.LOSS_MASK].sum())
    return len(rows[Columns.ACTIONS])


def _concatenate(chunks: list[SingleAgentEpisode]) -> Rows:
    first = chunks[0]
    return {
        Columns.OBS: {
            name: np.concatenate([c.observations.data[name][: len(c)] for c in chunks])
            for name in first.observations.data
        },
        Columns.ACTIONS: np.concatenate([c.actions.data for c in chunks]),
        **{
            key: np.concatenate([c.extra_model_outputs[key].data for c in chunks])
            for key in first.extra_model_outputs
        },
    }
