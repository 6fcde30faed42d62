"""Batches of trajectories for a gradient step, and their augmentation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.occlude import Occlude
from marl_pool.perturbations.shuffle import Shuffle
from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.cloning.recorder import NO_ACTION
from marl_pool.training.cloning.trajectories import Trajectories
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

ORDER, PREV_ACTION, SEVERITY, PERTURB, VALIDATE, PLAY = range(6)
"""Keys of the random streams of learning."""
SEVERITIES = 8
"""Maximum number of severities sampled for one batch, each for an equal part of it."""


class SequenceBatch(NamedTuple):
    """B sequences of at most T steps; T = 1 for an agent without memory."""

    features: Tensor
    """``(B, T, N, F)``."""
    padding: Tensor | None
    """``(B, T, N)`` bool; None where nothing is padded."""
    prev_action: Tensor
    """``(B, T, A)``, previous actions as vectors of `ActionSpec.to_vectors`."""
    label: Tensor
    """The teacher's actions: ``(B, T)`` int64 choices, or ``(B, T, A)``."""
    logits: Tensor | None
    """``(B, T, n)``, the teacher's logits; None without any."""
    valid: Tensor
    """``(B, T)`` bool, False beyond a sequence's end and in its burn-in."""
    privileged_targets: Tensor | None = None
    """``(B, T, K)``, the teacher's privileged targets, NaN where unknown."""

    def to(self, device: str) -> "SequenceBatch":
        """Move all tensors to a device."""
        return SequenceBatch._make(
            part if part is None else part.to(device) for part in self
        )

    def windows(self, length: int | None) -> Iterator["SequenceBatch"]:
        """Cut along time into windows of ``length`` steps; None: only one."""
        total = self.valid.shape[1]
        for start in range(0, total, length or total):
            end = min(start + (length or total), total)
            yield SequenceBatch._make(
                part if part is None else part[:, start:end] for part in self
            )


@dataclass(frozen=True)
class Augmentation:
    """Random perturbation of training samples, resampled each time they are used.

    All numbers depend on the seed and on ``turn``, the count of batches so far, so
    that a resumed run repeats them.

    Attributes:
        spec: specification of the tokens.
        perturbation: ``{"name": …, **options}``; None: tokens stay as they are.
        severities: bounds between which the severity is sampled; None: it is fixed.
        prev_action_noise: noise on the previous action, see `CloneSettings`.
        prev_action_dropout: probability that a previous action is zeroed, in [0, 1].
        seed: seed of the run.
    """

    spec: TokenSpec
    perturbation: Mapping[str, Any] | None = None
    severities: tuple[float, float] | None = None
    prev_action_noise: float = 0.0
    prev_action_dropout: float = 0.0
    seed: int = 0

    def at(self, turn: int, part: int = PERTURB) -> Perturbation | None:
        """Build the perturbation with the severity sampled for ``turn``."""
        if self.perturbation is None:
            return None
        options = dict(self.perturbation)
        if self.severities is not None:
            low, high = self.severities
            key = self.keys(1, turn, SEVERITY + (part << 4))
            options["severity"] = low + (high - low) * float(uniform(key, 1))
        return make_perturbation(specs=[self.spec], **options)

    def keys(self, rows: int, turn: int, part: int) -> Tensor:
        """Return the keys of the random streams of a batch's rows."""
        numbers = torch.arange(rows)
        turns = torch.full_like(numbers, turn)
        return stream_keys(self.seed, numbers, turns, Purpose.LEARNING, part)

    def perturb(self, tokens: Tokens, turn: int, part: int = PERTURB) -> Tokens:
        """Perturb sequences ``(B, T, N, …)``, each with a random stream of its own."""
        if self.perturbation is None:
            return tokens
        keys = self.keys(len(tokens.types), turn, part)
        count = 1 if self.severities is None else min(SEVERITIES, len(keys))
        rows = torch.arange(len(keys)).chunk(count)
        perturbed = [
            _perturb(self.at(turn * SEVERITIES + i, part), tokens.at(own), keys[own])
            for i, own in enumerate(rows)
        ]
        return Tokens(*(torch.cat(each) for each in zip(*perturbed, strict=True)))

    def perturb_prev_actions(
        self, actions: ActionSpec, prev_action: Tensor, turn: int
    ) -> Tensor:
        """Add noise to previous actions ``(B, T, A)``, and zero some of them."""
        if not (self.prev_action_noise or self.prev_action_dropout):
            return prev_action
        batch, steps, width = prev_action.shape
        keys = self.keys(batch, turn, PREV_ACTION)
        numbers = uniform(keys, steps * (width + 2)).view(batch, steps, -1)
        present = prev_action.abs().sum(-1, keepdim=True) > 0
        if actions.discrete:
            other = (numbers[..., 0] * actions.n).long()
            random = one_hot(other, actions.n).to(prev_action)
            chosen = (numbers[..., 1:2] < self.prev_action_noise) & present
            prev_action = torch.where(chosen, random, prev_action)
        else:
            gauss = torch.special.ndtri(numbers[..., :width]).to(prev_action)
            prev_action = prev_action + self.prev_action_noise * gauss
        dropped = numbers[..., -1:] < self.prev_action_dropout
        return prev_action.masked_fill(dropped, 0.0)


def _perturb(perturbation: Perturbation | None, tokens: Tokens, keys: Tensor) -> Tokens:
    """Perturb sequences step by step, as in a rollout."""
    assert perturbation is not None
    steps = [tokens.at((slice(None), slice(t, t + 1))) for t in range(_length(tokens))]
    state = perturbation.start(steps[0], keys)
    results = []
    for step in steps:
        perturbed, state = perturbation(step, state)
        results.append(perturbed)
    return Tokens(*(torch.cat(parts, 1) for parts in zip(*results, strict=True)))


def _length(tokens: Tokens) -> int:
    return tokens.types.shape[1]


def chunks(starts: Tensor, lengths: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut trajectories into chunks; the last one of a trajectory may be shorter.

    Args:
        starts: ``(n,)``, index of each trajectory's first step.
        lengths: ``(n,)``, steps of each trajectory.
        length: maximum steps of a chunk.

    Returns:
        Starts and lengths of the chunks.
    """
    counts = -(-lengths // length)
    firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    offsets = length * (torch.arange(int(counts.sum())) - firsts)
    left = lengths.repeat_interleave(counts) - offsets
    return starts.repeat_interleave(counts) + offsets, left.clamp(max=length)


class Sampler:
    """Shuffled batches of trajectories, in an order that depends only on the seed.

    An item is a single step or, with ``whole``, a trajectory or a chunk of one.

    Args:
        trajectories: source of the items.
        table: distinct features by number; None unless features are uint8.
        actions: specification of the student's actions.
        augmentation: random perturbation of samples.
        size: items of a batch.
        whole: take sequences instead of single steps.
        chunk_length: steps of a chunk; None: whole trajectories.
        burn_in: first steps of a chunk that are not valid, unless it begins an episode.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        table: Tensor | None,
        actions: ActionSpec,
        augmentation: Augmentation,
        *,
        size: int,
        whole: bool,
        chunk_length: int | None = None,
        burn_in: int = 0,
    ) -> None:
        self.trajectories, self.table = trajectories, table
        self.actions, self.augmentation, self.whole = actions, augmentation, whole
        self.starts, self.lengths = trajectories.starts, trajectories.lengths
        if chunk_length is not None:
            self.starts, self.lengths = chunks(self.starts, self.lengths, chunk_length)
        self.burn_in = burn_in
        self.count = len(self.starts) if whole else trajectories.num_steps
        self.size = min(size, self.count)
        self.per_epoch = self.count // self.size
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def batch(self, number: int, turn: int) -> SequenceBatch:
        """Return batch ``number`` of this sampler, augmented for ``turn``."""
        epoch, place = divmod(number, self.per_epoch)
        # Shuffle once an epoch, with a seed from the epoch: a resume repeats it.
        if epoch != self._epoch:
            key = self.augmentation.keys(1, epoch, ORDER)
            shuffler = torch.Generator().manual_seed(int(key) & ((1 << 63) - 1))
            self._order = torch.randperm(self.count, generator=shuffler)
            self._epoch = epoch
        chosen = self._order[place * self.size : (place + 1) * self.size]
        return self.select(chosen, turn)

    def all(self, limit: int) -> Iterator[SequenceBatch]:
        """Yield all items, or ``limit`` steps evenly spread; the same at each call."""
        items = torch.arange(self.count)
        if not self.whole and limit < self.count:
            items = torch.linspace(0, self.count - 1, limit).long()
        for turn, chosen in enumerate(items.split(self.size)):
            yield self.select(chosen, turn, VALIDATE)

    def select(self, chosen: Tensor, turn: int, part: int = PERTURB) -> SequenceBatch:
        """Gather and augment items by their numbers."""
        rows, valid = self._rows(chosen)
        steps = {
            name: each.index_select(0, rows.flatten()).unflatten(0, rows.shape)
            for name, each in self.trajectories.steps.items()
        }
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
        padding = tokens.padding if tokens.padding.any() else None
        logits, targets = (steps.get(name) for name in ("logits", "privileged_targets"))
        return SequenceBatch(
            tokens.features, padding, prev_action, label, logits, valid, targets
        )

    def _rows(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return step indices ``(B, T)`` and a mask of the valid ones."""
        if not self.whole:
            return chosen[:, None], torch.ones(len(chosen), 1, dtype=torch.bool)
        lengths, starts = self.lengths[chosen][:, None], self.starts[chosen]
        time = torch.arange(int(lengths.max()))
        # Pad a short trajectory by its last step, which is masked there.
        rows = starts[:, None] + torch.minimum(time, lengths - 1)
        late = time >= self.burn_in
        if self.burn_in:
            late = late | self._begins(starts)[:, None]
        return rows, (time < lengths) & late

    def _begins(self, rows: Tensor) -> Tensor:
        """Test steps ``(B,)`` for the start of an episode."""
        prev_action = self.trajectories.steps["prev_action"][rows]
        none = prev_action == NO_ACTION if self.actions.discrete else prev_action == 0
        return none.flatten(1).all(1) if none.dim() > 1 else none

    def _tokens(self, steps: Mapping[str, Tensor], turn: int, part: int) -> Tokens:
        features = steps["features"]
        if self.table is not None:
            # Perturb the numbers of rows instead of their bytes where that is the same.
            features = features[..., None]
            if not self._moves_only():
                features = self._bytes(features)
        tokens = Tokens(features, steps["types"].long(), steps["padding"])
        tokens = self.augmentation.perturb(tokens, turn, part)
        if self.table is not None and tokens.features.dtype != torch.uint8:
            return tokens._replace(features=self._bytes(tokens.features))
        return tokens

    def _moves_only(self) -> bool:
        """True if the perturbation moves or hides tokens, but changes no features."""
        made = self.augmentation.at(0)
        if type(made) is Shuffle:
            return made.scope == "token"
        return made is None or type(made) is Occlude

    def _bytes(self, numbers: Tensor) -> Tensor:
        assert self.table is not None
        flat = self.table.index_select(0, numbers.flatten())
        return flat.view(*numbers.shape[:-1], self.table.shape[1])
