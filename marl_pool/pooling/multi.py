"""Several heads side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from marl_pool.pooling.base import Pooling
from marl_pool.pooling.memory import MemoryPooling
from marl_pool.utils.construction import build
from marl_pool.utils.errors import InputError

Part = Mapping[str, Any]


class MultiPooling(Pooling):
    """The results of several heads, concatenated.

    Source: combined aggregators, e.g. Corso et al. (2020), *Principal Neighbourhood
    Aggregation*. Extra tokens that heads want all go through the encoder together; each
    head gets its own and not the others'.

    Args:
        dim: D, the width of the vectors.
        heads: ``{"name": …, **options}`` each, of registered heads or of your own; none
            that takes the previous action, for there is nowhere to keep its memory.
        num_tokens: N, for heads that need it.
        has_self: whether the tokens include the observer's own.

    Raises:
        InputError: no heads, an unknown name, a wrong option, or a head with a memory.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: Sequence[Part] = ({"name": "avg"}, {"name": "max"}),
        num_tokens: int | None = None,
        has_self: bool = True,
    ) -> None:
        parts = [self._part(part, dim, num_tokens, has_self) for part in heads]
        if not parts:
            raise InputError("pooling.heads: expected at least one head, got none")
        super().__init__(dim, dim_out=sum(part.dim_out for part in parts))
        self.heads = nn.ModuleList(parts)
        self.extra_tokens = sum(part.extra_tokens for part in parts)
        self.permutation_invariant = all(part.permutation_invariant for part in parts)

    @staticmethod
    def _part(part: Part, dim: int, num_tokens: int | None, has_self: bool) -> Pooling:
        from marl_pool.pooling import POOLING

        options = dict(part) if isinstance(part, Mapping) else {}
        if not isinstance(options.get("name"), str):
            raise InputError(
                f"pooling.heads: expected mappings with a name, got {part!r}"
            )
        context: dict[str, Any] = {"dim": dim, "has_self": has_self}
        if num_tokens is not None:
            context["num_tokens"] = num_tokens
        head = build(options.pop("name"), POOLING, "pooling", Pooling, options, context)
        assert isinstance(head, Pooling)
        if isinstance(head, MemoryPooling):
            raise InputError(
                "pooling.heads: expected heads without a memory, got "
                f"{part['name']!r}, which takes the previous action"
            )
        return head

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, dim_out)``; see `Pooling.forward`."""
        pooled = [head(*self._share(i, x, padding, types)) for i, head in self._all()]
        return torch.cat(pooled, -1)

    def weights(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor | None:
        """Return all heads' weights, ``(B, heads, N)``; None if one has none."""
        x, padding, types = self.prepare(x, padding, types)
        found = []
        for i, head in self._all():
            weights = head.weights(*self._share(i, x, padding, types))
            if weights is None:
                return None
            own = weights[..., : head.extra_tokens]
            full = weights.new_zeros(*weights.shape[:2], x.shape[1])
            first = self._first(i)
            full[..., first : first + head.extra_tokens] = own
            full[..., self.extra_tokens :] = weights[..., head.extra_tokens :]
            found.append(full)
        return torch.cat(found, 1)

    def prepend(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Put the extra tokens of all heads before ``x``; see `Pooling.prepend`."""
        for head in reversed(list(self.heads)):
            assert isinstance(head, Pooling)
            x, padding, types = head.prepend(x, padding, types)
        return x, padding, types

    def _all(self) -> list[tuple[int, Pooling]]:
        return [(i, head) for i, head in enumerate(self.heads)]  # type: ignore[misc]

    def _first(self, number: int) -> int:
        """Where the extra tokens of a head begin."""
        return sum(head.extra_tokens for _, head in self._all()[:number])

    def _share(
        self, number: int, x: Tensor, padding: Tensor | None, types: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What one head sees: its own extra tokens, and the set."""
        head, first = self._all()[number][1], self._first(number)
        own = slice(first, first + head.extra_tokens)
        rest = slice(self.extra_tokens, None)

        def cut(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or head.extra_tokens == self.extra_tokens:
                return tensor
            return torch.cat([tensor[:, own], tensor[:, rest]], 1)

        part = cut(x)
        assert part is not None
        return part, cut(padding), cut(types)
