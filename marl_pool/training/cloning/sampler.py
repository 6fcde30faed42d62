"""Batches of trajectories for a gradient step, and their augmentation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils._pytree import tree_map_only

from marl_pool.options.types import Options
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.membership import Occlude
from marl_pool.perturbations.order import Shuffle
from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.cloning.settings import CloneSettings
from marl_pool.training.cloning.trajectories import RowTable, Trajectories
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

ORDER, PREV_ACTION, PERTURB, VALIDATE = 0, 1, 3, 4
"""Keys of the random streams of learning."""


class SequenceBatch(NamedTuple):
    """B sequences of at most T steps; T = 1 for an agent without memory."""

    tokens: Tokens
    """Batch ``(B, T)``, with the action masks."""
    prev_action: Tensor
    """``(B, T, A)``, previous actions as vectors; see `ActionSpec.to_vectors`."""
    label: Tensor
    """The teacher's actions ``(B, T, …)``; see `ActionSpec`."""
    logits: Tensor | None
    """``(B, T, n)``, the teacher's logits, if any."""
    valid: Tensor
    """``(B, T)`` bool, False beyond a sequence's end and in its burn-in."""
    privileged_targets: Tensor | None = None
    """``(B, T, K)``, the teacher's privileged targets, NaN where unknown."""

    def to(self, device: str) -> "SequenceBatch":
        """Move all tensors to a device."""
        return tree_map_only(Tensor, lambda part: part.to(device), self)

    def windows(self, length: int | None) -> Iterator["SequenceBatch"]:
        """Cut along time into windows of ``length`` steps; None gives a single one."""
        steps = self.valid.shape[1]
        for start in range(0, steps, length or steps):
            window = slice(None), slice(start, start + (length or steps))
            yield tree_map_only(Tensor, itemgetter(window), self)


@dataclass(frozen=True)
class Augmentation:
    """Random perturbation of training samples, drawn anew each time they are used.

    All random numbers depend on the seed and on ``turn``, the number of batches so far,
    so that a resumed run repeats them.
    """

    spec: TokenSpec
    perturbation: Options
    """``{"name": …, **options}``; ``none`` leaves tokens unchanged."""
    settings: CloneSettings
    """Noise on previous actions, and settings of the `Sampler`."""
    seed: int = 0

    def build(self, group: str = "agent") -> Perturbation | None:
        """Build the perturbation, of a single group of a rollout's agents."""
        if self.perturbation.name == "none":
            return None
        return make_perturbation(specs={group: self.spec}, **self.perturbation)

    def keys(self, rows: int, turn: int, part: int) -> Tensor:
        """Return the keys of the random streams of a batch's rows."""
        numbers = torch.arange(rows)
        turns = torch.full_like(numbers, turn)
        return stream_keys(self.seed, numbers, turns, Purpose.LEARNING, part)

    def perturb(self, tokens: Tokens, turn: int, part: int = PERTURB) -> Tokens:
        """Perturb sequences ``(B, T, N, …)``, each with a separate random stream."""
        perturbation = self.build()
        if perturbation is None:
            return tokens
        # Perturb step by step, as in a rollout.
        length = tokens.types.shape[1]
        steps = [tokens.at((slice(None), slice(t, t + 1))) for t in range(length)]
        state = perturbation.start(steps[0], self.keys(len(tokens.types), turn, part))
        results = []
        for step in steps:
            perturbed, state = perturbation(step, state)
            results.append(perturbed)
        columns = zip(*(tokens.parts for tokens in results), strict=True)
        return Tokens(*(torch.cat(column, 1) for column in columns))

    def perturb_prev_actions(
        self, actions: ActionSpec, prev_action: Tensor, turn: int
    ) -> Tensor:
        """Add noise to previous actions ``(B, T, A)``."""
        noise = self.settings.prev_action_noise
        if not noise:
            return prev_action
        batch, steps, width = prev_action.shape
        # A step draws more numbers than it uses: another count would change the stream.
        keys = self.keys(batch, turn, PREV_ACTION)
        count = width + 2 * max(1, len(actions.choices))
        numbers = uniform(keys, steps * count).view(batch, steps, -1)
        errors = torch.special.ndtri(numbers[..., : len(actions.low)]).to(prev_action)
        if not actions.sizes:
            return prev_action + noise * errors
        # An episode's start, all zeros, is left unchanged.
        present = prev_action.any(-1, keepdim=True)
        choices, box = prev_action.tensor_split([actions.num_options], -1)
        pairs = numbers[..., len(actions.low) :].split(2, -1)
        changed = [box + noise * errors]
        for vectors, pair in zip(
            choices.split(actions.sizes, -1), pairs[: len(actions.sizes)], strict=True
        ):
            size = vectors.shape[-1]
            random = one_hot((pair[..., 0] * size).long(), size).to(vectors)
            is_replaced = (pair[..., 1:] < noise) & present
            changed.append(torch.where(is_replaced, random, vectors))
        return torch.cat([*changed[1:], changed[0]], -1)


def chunks(trajectories: Trajectories, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut trajectories into chunks of ``length`` steps; the last may be shorter.

    Returns:
        Starts and lengths of the chunks, and a mask of those that begin an episode.
    """
    lengths = trajectories.lengths
    # Count the chunks of each trajectory, rounding up.
    counts = -(-lengths // length)
    owners = torch.arange(len(lengths)).repeat_interleave(counts)
    firsts = (counts.cumsum(0) - counts)[owners]
    # Number them within their trajectory.
    offsets = length * (torch.arange(len(owners)) - firsts)
    return (
        trajectories.starts[owners] + offsets,
        (lengths[owners] - offsets).clamp(max=length),
        trajectories.begins[owners] & (offsets == 0),
    )


class Sampler:
    """Shuffled batches of trajectories, in an order that depends only on the seed.

    An item is a single step or, with ``whole``, a trajectory or a chunk of one.

    Args:
        trajectories: source of the items.
        rows: table of distinct features; None unless features are uint8.
        actions: specification of the student's actions.
        augmentation: random perturbation of samples; its settings also give the size
            of a batch, the length of chunks and their burn-in.
        whole: take sequences instead of single steps.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        rows: RowTable | None,
        actions: ActionSpec,
        augmentation: Augmentation,
        *,
        whole: bool,
    ) -> None:
        self.trajectories = trajectories
        self.table = None if rows is None else rows.table()
        self.actions, self.augmentation, self.whole = actions, augmentation, whole
        settings = augmentation.settings
        length = settings.chunk_length or int(trajectories.lengths.max())
        starts, lengths, begins = chunks(trajectories, length)
        # A chunk that ends within its burn-in teaches nothing.
        taught = begins | (lengths > settings.burn_in)
        self.starts, self.lengths, self.begins = (
            part[taught] for part in (starts, lengths, begins)
        )
        self.count = len(self.starts) if whole else trajectories.num_steps
        self.size = min(settings.batch_size, self.count)
        self.per_epoch = self.count // self.size
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def batch(self, number: int, turn: int) -> SequenceBatch:
        """Return batch ``number`` of this sampler, augmented for ``turn``."""
        epoch, place = divmod(number, self.per_epoch)
        # Shuffle once an epoch, seeded by the epoch, so that a resumed run repeats it.
        if epoch != self._epoch:
            key = self.augmentation.keys(1, epoch, ORDER)
            shuffler = torch.Generator().manual_seed(int(key) & ((1 << 63) - 1))
            self._order = torch.randperm(self.count, generator=shuffler)
            self._epoch = epoch
        numbers = self._order[place * self.size : (place + 1) * self.size]
        return self.select(numbers, turn)

    def all(self, limit: int) -> Iterator[SequenceBatch]:
        """Yield all items, or ``limit`` steps evenly spread; the same at each call."""
        items = torch.arange(self.count)
        # Whole trajectories are few, so all of them are measured.
        if not self.whole and limit < self.count:
            # In float32 the last could be beyond the end.
            spread = torch.linspace(0, self.count - 1, limit, dtype=torch.float64)
            items = spread.long()
        for turn, numbers in enumerate(items.split(self.size)):
            yield self.select(numbers, turn, VALIDATE)

    def select(self, numbers: Tensor, turn: int, part: int = PERTURB) -> SequenceBatch:
        """Gather and augment items by their numbers."""
        rows, valid = self._rows(numbers)
        steps = {
            name: tensor.index_select(0, rows.flatten()).unflatten(0, rows.shape)
            for name, tensor in self.trajectories.steps.items()
        }
        # Perturb observations and, except for validation, previous actions.
        tokens = self._tokens(steps, turn, part)
        prev_action, label = steps["prev_action"], steps["label"]
        if self.actions.discrete:
            label = label.long()
            # NO_ACTION (-1) becomes the last column, which is cut off.
            size = self.actions.n + 1
            vectors = one_hot(prev_action.long() % size, size)
            prev_action = vectors[..., : self.actions.n].float()
        if part != VALIDATE:
            prev_action = self.augmentation.perturb_prev_actions(
                self.actions, prev_action, turn
            )
        return SequenceBatch(
            tokens._replace(action_mask=steps.get("action_mask")),
            prev_action,
            label,
            steps.get("logits"),
            valid,
            steps.get("privileged_targets"),
        )

    def _rows(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return step indices ``(B, T)`` and a mask of the valid ones."""
        if not self.whole:
            return numbers[:, None], torch.ones(len(numbers), 1, dtype=torch.bool)
        lengths, starts = self.lengths[numbers][:, None], self.starts[numbers][:, None]
        time = torch.arange(int(lengths.max()))
        # Pad a short trajectory with its last step, masked.
        rows = starts + torch.minimum(time, lengths - 1)
        # Exclude the burn-in of a chunk, unless an episode begins with it.
        begins = self.begins[numbers][:, None]
        warm = begins | (time >= self.augmentation.settings.burn_in)
        return rows, (time < lengths) & warm

    def _tokens(self, steps: Mapping[str, Tensor], turn: int, part: int) -> Tokens:
        features, has_table = steps["features"], self.table is not None
        # Perturb the numbers of rows instead of their bytes if that is equivalent.
        by_number = has_table and self._moves_only()
        if has_table:
            features = features[..., None] if by_number else self._bytes(features)
        tokens = Tokens(features, steps["types"].long(), steps["padding"])
        tokens = self.augmentation.perturb(tokens, turn, part)
        if by_number:
            return tokens._replace(features=self._bytes(tokens.features[..., 0]))
        return tokens

    def _moves_only(self) -> bool:
        """True if the perturbation moves or hides tokens, but changes no features."""
        perturbation = self.augmentation.build()
        if type(perturbation) is Shuffle:
            return perturbation.scope == "token"
        return perturbation is None or type(perturbation) is Occlude

    def _bytes(self, numbers: Tensor) -> Tensor:
        assert self.table is not None
        flat = self.table.index_select(0, numbers.flatten())
        return flat.view(*numbers.shape, -1)
