"""From perturbed tokens back to observations: which slot can hold which token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from marl_pool.tokens import Tokens, take_features
from marl_pool.utils.errors import UnfitTokensError


@dataclass(frozen=True)
class Slots:
    """The slots of an observation, and the tokens that each can hold.

    A slot holds tokens of its kind: a row of a matrix any token of this matrix, a
    number of a vector only the token of this number.
    """

    slot_kinds: tuple[int, ...]
    """Kind of each slot."""
    type_kinds: tuple[int, ...]
    """Kind of each token type."""
    optional: tuple[bool, ...]
    """By slot: True if the observation can say that it holds no token."""
    type_names: tuple[str, ...]

    @property
    def have_order(self) -> bool:
        """True if some tokens can change places."""
        return len(set(self.slot_kinds)) < len(self.slot_kinds)

    def fill(self, tokens: Tokens) -> Tokens:
        """Move tokens ``(B, M, …)`` into the slots, ``(B, N, …)``.

        A token stays in its slot if that is of its kind; the others fill free slots of
        their kind, in order. Slots that remain free are padding, with features of 0.

        Raises:
            UnfitTokensError: more tokens of a kind than slots, or too few where the
                observation cannot say so. A set without any token is exempt, since
                absent agents observe such sets.
        """
        device = tokens.types.device
        slot_kinds = torch.tensor(self.slot_kinds, device=device)
        type_kinds = torch.tensor(self.type_kinds, device=device)
        kinds = type_kinds[tokens.types.clamp(0, len(type_kinds) - 1)]
        origin = self._origin(~tokens.padding, kinds, slot_kinds)
        free = origin < 0
        optional = torch.tensor(self.optional, device=device)
        if (missing := free & ~optional & ~tokens.padding.all(1, True)).any():
            slot = int(missing.nonzero()[0, 1])
            raise UnfitTokensError(
                f"the observation space cannot say that {self._name(slot)} is absent"
            )
        source = origin.clamp(min=0)
        features = take_features(tokens.features, source)
        return Tokens(
            features.masked_fill(free[..., None], 0),
            tokens.types.gather(1, source),
            free,
        )

    def _origin(self, present: Tensor, kinds: Tensor, slot_kinds: Tensor) -> Tensor:
        """Return the index of the token in each slot, ``(B, N)``, -1 for none."""
        batch, count = len(present), len(slot_kinds)
        shared = min(count, present.shape[1])
        stays = present[:, :shared] & (kinds[:, :shared] == slot_kinds[:shared])
        origin = kinds.new_full((batch, count), -1)
        places = torch.arange(shared, device=kinds.device)
        origin[:, :shared] = torch.where(stays, places, -1)
        # Tokens of another kind than their slot, or beyond the last slot.
        moving = present.clone()
        moving[:, :shared] &= ~stays
        for kind in kinds[moving].unique().tolist():
            movers = moving & (kinds == kind)
            free = (origin < 0) & (slot_kinds == kind)
            surplus = movers.sum(1) - free.sum(1)
            if (surplus > 0).any():
                raise UnfitTokensError(self._surplus(kind, int(surplus.max())))
            # The i-th of them moves to the i-th free slot.
            rows, columns = movers.nonzero(as_tuple=True)
            ranks = movers.long().cumsum(1)[movers] - 1
            slots = (~free).int().argsort(dim=1, stable=True)
            origin[rows, slots[rows, ranks]] = columns
        return origin

    def _surplus(self, kind: int, count: int) -> str:
        names = dict.fromkeys(
            name
            for name, type_kind in zip(self.type_names, self.type_kinds, strict=True)
            if type_kind == kind
        )
        capacity = self.slot_kinds.count(kind)
        return (
            f"the observation space holds {capacity} of {', '.join(names)}, got "
            f"{capacity + count}"
        )

    def _name(self, slot: int) -> str:
        return self.type_names[self.type_kinds.index(self.slot_kinds[slot])]
