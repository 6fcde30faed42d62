"""Several pooling heads on the same set."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.options.construction import build
from marl_pool.options.types import Extent, NamedOptions, Probability
from marl_pool.pooling.base import Inputs, MemoryPooling, Pooling, validate_constructed
from marl_pool.tokens import Mask, Types
from marl_pool.utils.errors import InputError


class MultiPooling(Pooling):
    r"""Several heads on the same set, with concatenated results.

    .. math::
        y = [\mathrm{pool}_1(X); \dots; \mathrm{pool}_H(X)]

    The extra tokens of all heads pass through the encoder together; each head then
    reads only its own.

    Shapes: ``(B, N, D)`` to ``(B, P_1 + … + P_H)``.

    Source: combined aggregators, e.g. Corso et al. (2020), *Principal Neighbourhood
    Aggregation*, https://arxiv.org/abs/2004.05718.

    Args:
        heads: registered or custom heads, ``{"name": …, **options}`` each; heads with a
            memory are not supported.
        num_tokens: N, for heads that need it.
        has_self: True if the tokens include the observer's own.
        attention_dropout: probability in the attention of heads that have it.
    """

    def __init__(
        self,
        dim: Extent,
        *,
        heads: Sequence[NamedOptions] = ({"name": "avg"}, {"name": "max"}),
        num_tokens: Extent | None = None,
        has_self: bool = True,
        attention_dropout: Probability = 0.0,
    ) -> None:
        # `build` passes on what the constructor of a head takes of the context.
        context: dict[str, Any] = {
            "dim": dim,
            "has_self": has_self,
            "attention_dropout": attention_dropout,
        }
        if num_tokens is not None:
            context["num_tokens"] = num_tokens
        parts = [self._build(part, context) for part in heads]
        if not parts:
            raise InputError("pooling.heads: expected at least one head, got none")
        super().__init__(dim)
        self.dim_out = sum(part.dim_out for part in parts)
        self.heads = nn.ModuleList(parts)
        self.extra_tokens = sum(part.extra_tokens for part in parts)
        self.permutation_invariant = all(part.permutation_invariant for part in parts)

    @staticmethod
    def _build(part: NamedOptions, context: Mapping[str, Any]) -> Pooling:
        from marl_pool.pooling import POOLING

        options = dict(part)
        if not isinstance(options.get("name"), str):
            raise InputError(
                f"pooling.heads: expected mappings with a name, got {part!r}"
            )
        name = options.pop("name")
        head: Pooling = build(name, POOLING, "pooling", Pooling, options, context)
        validate_constructed(head, f"pooling {name!r}")
        if isinstance(head, MemoryPooling):
            raise InputError(
                "pooling.heads: expected heads without a memory, got "
                f"{name!r}, which takes the previous action"
            )
        return head

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        parts = self._parts(x, padding, types)
        return torch.cat([head(*inputs) for head, _, inputs in parts], -1)

    @override
    def weights(
        self, x: Tensor, padding: Mask = None, types: Types = None
    ) -> Tensor | None:
        """Return all heads' weights, ``(B, heads, N)``; None if a head has none."""
        head_weights = []
        for head, slots, inputs in self._parts(*self.prepare(x, padding, types)):
            weights = head.weights(*inputs)
            if weights is None:
                return None
            # From the head's input to the whole one: other heads' tokens get 0.
            full = weights.new_zeros(*weights.shape[:2], x.shape[1])
            full[..., slots] = weights
            head_weights.append(full)
        return torch.cat(head_weights, 1)

    @override
    def prepend(self, x: Tensor, padding: Mask = None, types: Types = None) -> Inputs:
        for head in reversed(list(self.heads)):
            assert isinstance(head, Pooling)
            x, padding, types = head.prepend(x, padding, types)
        return x, padding, types

    def _parts(
        self, x: Tensor, padding: Mask, types: Types
    ) -> Iterator[tuple[Pooling, list[int] | slice, Any]]:
        """Yield each head, its slots (own extra tokens, then the set) and its input."""
        first = 0
        for head in self.heads:
            assert isinstance(head, Pooling)
            last = first + head.extra_tokens
            slots: list[int] | slice = slice(None)
            if head.extra_tokens < self.extra_tokens:
                slots = [*range(first, last), *range(self.extra_tokens, x.shape[1])]
            first, whole = last, (x, padding, types)
            yield head, slots, [None if p is None else p[:, slots] for p in whole]
