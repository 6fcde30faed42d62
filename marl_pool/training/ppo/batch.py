"""Training batches: rows of steps or sequences, their preparation and minibatches."""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from marl_pool.training.ppo.value_norm import ValueNorm
from marl_pool.training.settings import PPOSettings

Rows = dict[str, Any]
"""Batch of a module: tensors by column; the observations are a dict of tensors. A row
is a step or, for a recurrent policy, a sequence of steps."""

STATE = "state"
"""Prefix of the columns with the leaves of a recurrent state."""
BEGINS = "begins"
"""Column: True at the first step of a chunk of an episode."""
CRITIC_OBS = "critic_obs"
"""Column: what the critic reads, as a dict of tensors, if not the observation."""
VALUE_SCALE = "value_scale"
"""Column: factor of the values and value targets in the loss."""


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of groups that share a module."""
    if len(parts) == 1:
        return parts[0]
    joined: Rows = tree_map(lambda *columns: torch.cat(columns), *parts)
    return joined


def episode_rows(episodes: Sequence[SingleAgentEpisode]) -> dict[str, Rows]:
    """Return the steps of episode chunks, by module."""
    return {
        module: map_rows(torch.as_tensor, _concatenate(chunks))
        for module, chunks in _by_module(episodes).items()
    }


def _by_module(
    episodes: Sequence[SingleAgentEpisode],
) -> dict[str, list[SingleAgentEpisode]]:
    by_module = defaultdict(list)
    for episode in episodes:
        by_module[episode.module_id].append(episode)
    return by_module


class ModuleShards(TrainingData):
    """Episodes that are divided module by module, so that each learner has all modules.

    Learners synchronize at each module. RLlib divides episodes by their lengths alone;
    a learner whose part lacked a module would make the others wait forever.
    """

    @override
    def shard(
        self, num_shards: int, len_lookback_buffer: int | None = None, **options: Any
    ) -> list[tuple[TrainingData, dict[str, Any]]]:
        parts: list[list[SingleAgentEpisode]] = [[] for _ in range(num_shards)]
        for module, chunks in _by_module(self.episodes).items():
            # All learners skip a module with fewer steps than learners.
            if sum(map(len, chunks)) < num_shards:
                continue
            shards = ShardEpisodesIterator(chunks, num_shards, len_lookback_buffer=0)
            for part, shard in zip(parts, shards, strict=True):
                for chunk in shard:
                    chunk.module_id = module  # a piece of a chunk has none
                part += shard
        return [(TrainingData(episodes=part), {}) for part in parts]


def prepare_rows(
    rows: Rows, settings: PPOSettings, value_norm: ValueNorm | None = None
) -> Rows:
    """Standardize advantages and values, and cut recurrent policies' sequences.

    This replaces RLlib's default learner connectors, which loop over single steps,
    append an extra step to each chunk and run the value function again.

    A recurrent policy is trained on sequences: its rows are ``(B, T)`` steps, with the
    state before the first step and a mask of the steps that exist.

    Args:
        rows: all steps of one module on this learner.
        settings: ``normalize_value_loss`` and ``max_seq_len`` are used. A normalized
            loss is at most 1 before the first step, and tends to the fraction of
            unexplained variance. Policies whose only memory is the previous action
            have sequences of one step.
        value_norm: normalization of the module's values, updated here; None for values
            in the units of the rewards.
    """
    rows = dict(rows)
    begins = rows.pop(BEGINS)
    # Rows of teams also hold absent agents, which no mean includes.
    present = rows.get(Columns.LOSS_MASK)

    def select(column: Tensor) -> Tensor:
        return column if present is None else column[present]

    # Standardize the advantages over the rows of this module and learner.
    all_advantages = rows[Postprocessing.ADVANTAGES]
    advantages = select(all_advantages)
    spread = advantages.std(correction=0).clamp(min=1e-4)
    rows[Postprocessing.ADVANTAGES] = (all_advantages - advantages.mean()) / spread
    # Scale values and targets, so that the loss does not depend on their units.
    targets = rows[Postprocessing.VALUE_TARGETS]
    if value_norm is not None:
        value_norm.update(select(targets))
        rows[Postprocessing.VALUE_TARGETS] = value_norm.normalize(targets)
    elif settings.normalize_value_loss:
        errors = select(targets - rows[Columns.VF_PREDS])
        variance = select(targets).var(correction=0) + errors.square().mean()
        scale = (variance + 1e-8).rsqrt()
        rows[Postprocessing.VALUE_TARGETS] = targets * scale
        rows[VALUE_SCALE] = scale.expand_as(targets)
    # Cut the steps of a recurrent policy into sequences.
    state_leaves = sum(key.startswith(STATE) for key in rows)
    if state_leaves:
        # A state with only the previous action needs no earlier steps.
        limit = settings.max_seq_len if state_leaves > 1 else 1
        rows = to_sequences(rows, begins, limit)
    return rows


def minibatches(
    modules: Mapping[str, Rows],
    *,
    num_epochs: int,
    num_minibatches: int,
    generator: torch.Generator | None,
    in_step: bool = False,
) -> Iterator[dict[str, Rows]]:
    """Yield minibatches; every module passes over its own rows ``num_epochs`` times.

    RLlib's iterator continues until the largest module has finished its epochs, so a
    module with fewer rows is trained for more epochs than configured. Here every
    module splits its rows evenly into the same number of minibatches.

    Args:
        modules: rows of each module.
        num_epochs: passes over the rows.
        num_minibatches: minibatches in one epoch.
        generator: generator that shuffles the rows; None keeps their order.
        in_step: yield exactly ``num_minibatches`` per epoch, each with rows of every
            module, because several learners synchronize at every minibatch. A module
            with fewer rows than minibatches then repeats some of them.
    """
    counts = {name: len(rows[Columns.ACTIONS]) for name, rows in modules.items()}
    number = num_minibatches
    if not in_step:
        number = min(number, max(counts.values()))

    def shuffle(rows: Rows) -> Rows:
        count = len(rows[Columns.ACTIONS])
        is_random = generator is not None and number > 1
        is_short = in_step and count < number
        if not is_random and not is_short:
            return rows
        # Sample on the CPU, so that a seed gives the same order on all machines.
        if is_random:
            order = torch.randperm(count, generator=generator, device="cpu")
        else:
            order = torch.arange(count, device="cpu")
        # Repeat rows until there is one for each minibatch.
        if is_short:
            order = order.repeat(-(-number // count))[:number]
        order = order.to(rows[Columns.ACTIONS].device)
        return map_rows(operator.methodcaller("index_select", 0, order), rows)

    for _ in range(num_epochs):
        # Shuffle the rows of each module once, which is faster than minibatch by
        # minibatch, and split them evenly.
        shuffled = {name: shuffle(rows) for name, rows in modules.items()}
        parts = {name: _split(rows, number) for name, rows in shuffled.items()}
        for i in range(number):
            yield {
                name: part[i]
                for name, part in parts.items()
                if part[i][Columns.ACTIONS].shape[0]
            }


def _split(rows: Rows, number: int) -> list[Rows]:
    """Split rows into parts whose sizes differ by at most one."""
    split = map_rows(operator.methodcaller("tensor_split", number), rows)
    return [map_rows(operator.itemgetter(i), split) for i in range(number)]


def map_rows(function: Callable[[Any], Any], rows: Mapping[str, Any]) -> Rows:
    """Apply ``function`` to every column of a module's batch."""
    return {
        key: (
            {name: function(tensor) for name, tensor in column.items()}
            if isinstance(column, dict)
            else function(column)
        )
        for key, column in rows.items()
    }


def to_sequences(rows: Rows, begins: Tensor, limit: int) -> Rows:
    """Cut rows of steps into rows of sequences.

    Args:
        rows: columns of ``(steps, …)``, chunk after chunk.
        begins: ``(steps,)`` bool, True at the first step of each chunk.
        limit: largest length of a sequence, in steps.

    Returns:
        Columns of ``(B, T, …)``, the states before the first steps, ``(B, …)``, and
        under ``Columns.LOSS_MASK`` the mask of the existing steps, ``(B, T)``.
    """
    # Count the steps since each chunk began, and start a sequence every `limit`.
    number = torch.arange(len(begins), device=begins.device)
    since = number - torch.where(begins, number, 0).cummax(0).values
    starts = (since % limit == 0).nonzero()[:, 0]
    # Index the steps of each sequence, which ends where the next one starts.
    stops = torch.cat([starts[1:], starts.new_tensor([len(begins)])])
    longest = int((stops - starts).max())
    index = starts[:, None] + torch.arange(longest, device=begins.device)
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


def existing_steps(rows: Mapping[str, Any], columns: Mapping[str, Any]) -> Rows:
    """Return columns ``(steps, …)`` without the padding of sequences and of teams.

    Args:
        rows: a batch, perhaps with ``Columns.LOSS_MASK``, ``(B, T)``.
        columns: ``(B, T, …)``, or ``(steps, …)`` if there is no mask.
    """
    mask = rows.get(Columns.LOSS_MASK)
    if mask is None:
        return dict(columns)
    flat = map_rows(operator.methodcaller("flatten", 0, 1), columns)
    # On a GPU this test would be a second wait.
    if mask.is_cpu and mask.all():
        return flat
    index = mask.flatten().nonzero()[:, 0]
    return map_rows(operator.methodcaller("index_select", 0, index), flat)


def num_steps(rows: Mapping[str, Any]) -> int:
    """Count the steps in rows, without padding."""
    if Columns.LOSS_MASK in rows:
        return int(rows[Columns.LOSS_MASK].sum())
    return len(rows[Columns.ACTIONS])


def _concatenate(chunks: list[SingleAgentEpisode]) -> Rows:
    first = chunks[0]
    observed = {
        name: np.concatenate([c.observations.data[name][: len(c)] for c in chunks])
        for name in first.observations.data
    }
    # An episode has one dictionary for the inputs of policy and critic.
    prefix = f"{CRITIC_OBS}/"
    read = {k.removeprefix(prefix): observed.pop(k) for k in [*observed] if prefix in k}
    return {
        Columns.OBS: observed,
        **({CRITIC_OBS: read} if read else {}),
        Columns.ACTIONS: np.concatenate([c.actions.data for c in chunks]),
        **{
            key: np.concatenate([c.extra_model_outputs[key].data for c in chunks])
            for key in first.extra_model_outputs
        },
        BEGINS: np.concatenate([np.arange(len(c)) == 0 for c in chunks]),
    }
