"""Several heads on the same set."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.pooling.base import Pooling
from marl_pool.pooling.memory import MemoryPooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.construction import build
from marl_pool.utils.errors import InputError

Part = Mapping[str, Any]


class MultiPooling(Pooling):
    r"""Several heads on the same set, their results concatenated.

    .. math::
        y = [\mathrm{pool}_1(X); \dots; \mathrm{pool}_H(X)]

    If heads have extra tokens, all of these pass through the encoder together; each
    head then reads its own and not the others'.

    Shapes: ``(B, N, D)`` to ``(B, P_1 + … + P_H)``.

    Source: combined aggregators, e.g. Corso et al. (2020), *Principal Neighbourhood
    Aggregation*, https://arxiv.org/abs/2004.05718.

    Args:
        heads: ``{"name": …, **options}`` each, of registered heads or of your own;
            heads with a memory are not supported.
        num_tokens: N, for heads that need it.
        has_self: True if the tokens include the observer's own.

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
        parts = [self._build(part, dim, num_tokens, has_self) for part in heads]
        if not parts:
            raise InputError("pooling.heads: expected at least one head, got none")
        super().__init__(dim)
        self.dim_out = sum(part.dim_out for part in parts)
        self.heads = nn.ModuleList(parts)
        self.extra_tokens = sum(part.extra_tokens for part in parts)
        self.permutation_invariant = all(part.permutation_invariant for part in parts)

    @staticmethod
    def _build(part: Part, dim: int, num_tokens: int | None, has_self: bool) -> Pooling:
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

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        pooled = [head(*self._input(i, x, padding, types)) for i, head in self._all()]
        return torch.cat(pooled, -1)

    @override
    def weights(
        self, x: Tensor, padding: Mask = None, types: Types = None
    ) -> Tensor | None:
        """Return all heads' weights, ``(B, heads, N)``; None if a head has none."""
        x, padding, types = self.prepare(x, padding, types)
        found = []
        for i, head in self._all():
            weights = head.weights(*self._input(i, x, padding, types))
            if weights is None:
                return None
            # From the head's own input to the whole one: other heads' tokens have 0.
            first, count = self._offset(i), head.extra_tokens
            full = weights.new_zeros(*weights.shape[:2], x.shape[1])
            full[..., first : first + count] = weights[..., :count]
            full[..., self.extra_tokens :] = weights[..., head.extra_tokens :]
            found.append(full)
        return torch.cat(found, 1)

    @override
    def prepend(
        self, x: Tensor, padding: Mask = None, types: Types = None
    ) -> tuple[Tensor, Mask, Types]:
        for head in reversed(list(self.heads)):
            assert isinstance(head, Pooling)
            x, padding, types = head.prepend(x, padding, types)
        return x, padding, types

    def _all(self) -> list[tuple[int, Pooling]]:
        return [(i, head) for i, head in enumerate(self.heads)]  # type: ignore[misc]

    def _offset(self, number: int) -> int:
        """Return the index of a head's first extra token."""
        return sum(head.extra_tokens for _, head in self._all()[:number])

    def _input(
        self, number: int, x: Tensor, padding: Mask, types: Types
    ) -> tuple[Tensor, Mask, Types]:
        """Select one head's input: its own extra tokens, and the set."""
        head, first = self._all()[number][1], self._offset(number)
        if head.extra_tokens == self.extra_tokens:
            return x, padding, types
        own = slice(first, first + head.extra_tokens)
        rest = slice(self.extra_tokens, None)

        def cut(tensor: Tensor) -> Tensor:
            return torch.cat([tensor[:, own], tensor[:, rest]], 1)

        return (
            cut(x),
            None if padding is None else cut(padding),
            None if types is None else cut(types),
        )
