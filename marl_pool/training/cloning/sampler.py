"""From trajectories to what one gradient step learns from."""

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

ORDER, BEFORE, SEVERITY, PERTURB, VALIDATE, PLAY = range(6)
"""Parts of the random streams of learning."""
SEVERITIES = 8
"""Severities that are drawn for one batch, each for its share of it."""


class Batch(NamedTuple):
    """B sequences of at most T steps; of an agent without memory T = 1."""

    features: Tensor
    """``(B, T, N, F)``."""
    padding: Tensor | None
    """``(B, T, N)`` bool; None where nothing is padded."""
    prev_action: Tensor
    """``(B, T, A)``, the previous actions, as `ActionSpec.to_vectors` gives them."""
    label: Tensor
    """``(B, T)`` int64 choices, or ``(B, T, A)``."""
    logits: Tensor | None
    """``(B, T, n)`` of the teacher's choices."""
    valid: Tensor
    """``(B, T)`` bool, False beyond a sequence's end."""
    privileged_targets: Tensor | None = None
    """``(B, T, K)`` of the teacher, NaN where unknown."""

    def to(self, device: str) -> "Batch":
        """The same on a device."""
        return Batch._make(part if part is None else part.to(device) for part in self)

    def windows(self, length: int | None) -> Iterator["Batch"]:
        """Cut it along time into chunks of ``length`` steps; None: only one."""
        total = self.valid.shape[1]
        for start in range(0, total, length or total):
            end = min(start + (length or total), total)
            yield Batch._make(
                part if part is None else part[:, start:end] for part in self
            )


@dataclass(frozen=True)
class Disturbance:
    """What is done to samples while they are learned from, anew for each.

    Attributes:
        spec: of the tokens.
        perturbation: ``{"name": …, **options}``; None: nothing is perturbed.
        severities: bounds between which its severity is drawn; None: it is fixed.
        before_noise: of the previous action, see `CloneSettings`.
        before_dropout: share of previous actions that are none.
        seed: of the run.
    """

    spec: TokenSpec
    perturbation: Mapping[str, Any] | None = None
    severities: tuple[float, float] | None = None
    before_noise: float = 0.0
    before_dropout: float = 0.0
    seed: int = 0

    def at(self, turn: int, part: int = PERTURB) -> Perturbation | None:
        """The perturbation, with the severity that is drawn for ``turn``."""
        if self.perturbation is None:
            return None
        options = dict(self.perturbation)
        if self.severities is not None:
            low, high = self.severities
            key = self.keys(1, turn, SEVERITY + (part << 4))
            options["severity"] = low + (high - low) * float(uniform(key, 1))
        return make_perturbation(specs=[self.spec], **options)

    def keys(self, rows: int, turn: int, part: int) -> Tensor:
        """Keys of streams for each row of a batch."""
        numbers = torch.arange(rows)
        turns = torch.full_like(numbers, turn)
        return stream_keys(self.seed, numbers, turns, Purpose.LEARNING, part)

    def see(self, tokens: Tokens, turn: int, part: int = PERTURB) -> Tokens:
        """Perturb sequences ``(B, T, N, …)``, each with numbers of its own."""
        if self.perturbation is None:
            return tokens
        keys = self.keys(len(tokens.types), turn, part)
        count = 1 if self.severities is None else min(SEVERITIES, len(keys))
        rows = torch.arange(len(keys)).chunk(count)
        seen = [
            _perturb(self.at(turn * SEVERITIES + i, part), tokens.at(own), keys[own])
            for i, own in enumerate(rows)
        ]
        return Tokens(*(torch.cat(each) for each in zip(*seen, strict=True)))

    def blur(self, actions: ActionSpec, prev_action: Tensor, turn: int) -> Tensor:
        """Change previous actions ``(B, T, A)``."""
        if not (self.before_noise or self.before_dropout):
            return prev_action
        batch, steps, width = prev_action.shape
        keys = self.keys(batch, turn, BEFORE)
        numbers = uniform(keys, steps * (width + 2)).view(batch, steps, -1)
        present = prev_action.abs().sum(-1, keepdim=True) > 0
        if actions.discrete:
            other = (numbers[..., 0] * actions.n).long()
            random = one_hot(other, actions.n).to(prev_action)
            chosen = (numbers[..., 1:2] < self.before_noise) & present
            prev_action = torch.where(chosen, random, prev_action)
        else:
            gauss = torch.special.ndtri(numbers[..., :width]).to(prev_action)
            prev_action = prev_action + self.before_noise * gauss
        dropped = numbers[..., -1:] < self.before_dropout
        return prev_action.masked_fill(dropped, 0.0)


def _perturb(perturbation: Perturbation | None, tokens: Tokens, keys: Tensor) -> Tokens:
    """Let a perturbation see sequences step by step, as in a rollout."""
    assert perturbation is not None
    steps = [tokens.at((slice(None), slice(t, t + 1))) for t in range(_length(tokens))]
    state = perturbation.start(steps[0], keys)
    seen = []
    for step in steps:
        perturbed, state = perturbation(step, state)
        seen.append(perturbed)
    return Tokens(*(torch.cat(parts, 1) for parts in zip(*seen, strict=True)))


def _length(tokens: Tokens) -> int:
    return tokens.types.shape[1]


def chunks(starts: Tensor, lengths: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut trajectories into chunks of a length; each one's last may be shorter.

    Args:
        starts: ``(n,)`` the first step of each trajectory.
        lengths: ``(n,)`` its steps.
        length: of a chunk.

    Returns:
        The same of the chunks.
    """
    counts = -(-lengths // length)
    firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    offsets = length * (torch.arange(int(counts.sum())) - firsts)
    left = lengths.repeat_interleave(counts) - offsets
    return starts.repeat_interleave(counts) + offsets, left.clamp(max=length)


class Sampler:
    """Batches of some trajectories, in an order that depends on the seed alone.

    Args:
        trajectories: to learn from.
        table: the distinct features, where they are bytes.
        actions: of the student.
        disturbance: what is done to samples.
        size: of a batch: steps, or trajectories where whole ones are taken.
        whole: take whole trajectories, or chunks of them.
        chunk_length: steps of a chunk; None: whole ones.
        burn_in: first steps of a chunk that are not valid, unless it begins an episode.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        table: Tensor | None,
        actions: ActionSpec,
        disturbance: Disturbance,
        *,
        size: int,
        whole: bool,
        chunk_length: int | None = None,
        burn_in: int = 0,
    ) -> None:
        self.trajectories, self.table = trajectories, table
        self.actions, self.disturbance, self.whole = actions, disturbance, whole
        self.starts, self.lengths = trajectories.starts, trajectories.lengths
        if chunk_length is not None:
            self.starts, self.lengths = chunks(self.starts, self.lengths, chunk_length)
        self.burn_in = burn_in
        self.count = len(self.starts) if whole else trajectories.num_steps
        self.size = min(size, self.count)
        self.per_epoch = self.count // self.size
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def batch(self, number: int, turn: int) -> Batch:
        """The batch ``number`` of this sampler, the ``turn``-th that is learned."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            key = self.disturbance.keys(1, epoch, ORDER)
            shuffler = torch.Generator().manual_seed(int(key) & ((1 << 63) - 1))
            self._order = torch.randperm(self.count, generator=shuffler)
            self._epoch = epoch
        chosen = self._order[place * self.size : (place + 1) * self.size]
        return self.select(chosen, turn)

    def all(self, limit: int) -> Iterator[Batch]:
        """Everything, or ``limit`` steps evenly spread; the same at each call."""
        items = torch.arange(self.count)
        if not self.whole and limit < self.count:
            items = torch.linspace(0, self.count - 1, limit).long()
        for turn, chosen in enumerate(items.split(self.size)):
            yield self.select(chosen, turn, VALIDATE)

    def select(self, chosen: Tensor, turn: int, part: int = PERTURB) -> Batch:
        """Some steps, or trajectories, by their numbers; perturbed."""
        rows, valid = self._rows(chosen)
        steps = {
            name: each.index_select(0, rows.flatten()).unflatten(0, rows.shape)
            for name, each in self.trajectories.steps.items()
        }
        tokens = self._tokens(steps, turn, part)
        prev_action, label = steps["before"], steps["label"]
        if self.actions.discrete:
            label = label.long()
            # The choice -1, before the first one, is the last column, cut off.
            vectors = one_hot(
                prev_action.long() % (self.actions.n + 1), self.actions.n + 1
            )
            prev_action = vectors[..., : self.actions.n].float()
        if part != VALIDATE:
            prev_action = self.disturbance.blur(self.actions, prev_action, turn)
        padding = tokens.padding if tokens.padding.any() else None
        logits, targets = (steps.get(name) for name in ("logits", "privileged_targets"))
        return Batch(
            tokens.features, padding, prev_action, label, logits, valid, targets
        )

    def _rows(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Steps ``(B, T)``, and which of them are within their trajectory."""
        if not self.whole:
            return chosen[:, None], torch.ones(len(chosen), 1, dtype=torch.bool)
        lengths, starts = self.lengths[chosen][:, None], self.starts[chosen]
        time = torch.arange(int(lengths.max()))
        # Beyond its end a trajectory's last step is repeated, and counts nothing.
        rows = starts[:, None] + torch.minimum(time, lengths - 1)
        late = time >= self.burn_in
        if self.burn_in:
            late = late | self._begins(starts)[:, None]
        return rows, (time < lengths) & late

    def _begins(self, rows: Tensor) -> Tensor:
        """Whether steps ``(B,)`` are the first of an episode."""
        prev_action = self.trajectories.steps["before"][rows]
        none = prev_action == NO_ACTION if self.actions.discrete else prev_action == 0
        return none.flatten(1).all(1) if none.dim() > 1 else none

    def _tokens(self, steps: Mapping[str, Tensor], turn: int, part: int) -> Tokens:
        features = steps["features"]
        if self.table is not None:
            features = features[..., None]
            if not self._moves_only():
                features = self._bytes(features)
        tokens = Tokens(features, steps["types"].long(), steps["padding"])
        tokens = self.disturbance.see(tokens, turn, part)
        if self.table is not None and tokens.features.dtype != torch.uint8:
            return tokens._replace(features=self._bytes(tokens.features))
        return tokens

    def _moves_only(self) -> bool:
        """Whether numbers of rows can be perturbed in place of their bytes."""
        made = self.disturbance.at(0)
        if type(made) is Shuffle:
            return made.scope == "token"
        return made is None or type(made) is Occlude

    def _bytes(self, numbers: Tensor) -> Tensor:
        assert self.table is not None
        flat = self.table.index_select(0, numbers.flatten())
        return flat.view(*numbers.shape[:-1], self.table.shape[1])
