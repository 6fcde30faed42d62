"""Embedding of tokens: from features and types to vectors."""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from marl_pool.kernels.functional import ACTIVATIONS, Activation
from marl_pool.options.names import unknown
from marl_pool.options.types import SizeOrZero
from marl_pool.tokens import Tokens, TokenSpec, unknown_type
from marl_pool.utils.errors import InputError

TypeEmbedding = SizeOrZero | Literal["add"]
"""Width of the vector concatenated to the features, 0 for none; or ``"add"``."""


class TokenEmbedding(nn.Module):
    r"""Embedding of tokens from their features and their types.

    .. math::
        x_i = \phi(W [o_i; e_{k_i}] + b) \qquad\text{or}\qquad
        x_i = \phi(W o_i + b) + e_{k_i}

    :math:`e_k` is a learned vector for each type. It is concatenated to the features
    and both are projected; or, with ``type_embedding="add"``, it is added to the
    features, which are projected only if their width is not D already.

    Shapes: `Tokens` of batch ``(B,)`` to ``(B, N, D)``.

    Source: the AdaPool paper (https://arxiv.org/abs/2506.09215), concatenated in
    section 4.3 (four features, a type embedding of width four and one projection for
    all tokens), added in section 4.2.

    Args:
        spec: specification of the tokens.
        dim: D, the width to project to; None for no projection.
        type_embedding: width of the type embedding, 0 for none; or ``"add"``.
        activation: φ, applied to projected tokens; None for none. Without a projection
            there is no activation.

    Attributes:
        dim_out: D, or the width of features and type embedding without a projection.

    Raises:
        InputError: an unknown activation; from `forward`, features of another shape,
            or on a CPU a type that the spec lacks.
    """

    def __init__(
        self,
        spec: TokenSpec,
        dim: int | None,
        type_embedding: TypeEmbedding,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.num_features = width = spec.num_features
        self.scales = spec.dtype == "uint8"
        self.adds = type_embedding == "add"
        type_dim = (dim or width) if type_embedding == "add" else type_embedding
        self.types = nn.Embedding(spec.num_types, type_dim) if type_dim else None
        if not self.adds:
            width += type_dim
        is_wide_enough = dim is None or (self.adds and dim == width)
        self.project = None if is_wide_enough else nn.Linear(width, dim or width)
        self.activate: nn.Module = nn.Identity()
        if activation is not None:
            if activation not in ACTIVATIONS:
                raise unknown("input_activation", activation, ACTIVATIONS)
            self.activate = ACTIVATIONS[activation]()
        self.dim_out = width if dim is None else dim
        # Follows the network's dtype, even where the embedding has no parameters.
        self.one: Tensor
        self.register_buffer("one", torch.ones(()), persistent=False)

    def read(self, tokens: Tokens) -> Tensor:
        """Return the features in the network's dtype, bytes scaled to [0, 1].

        Bytes are scaled if they are the spec's dtype; otherwise they are numbers.
        """
        shape = tuple(tokens.features.shape)
        if len(shape) != 3 or shape[-1] != self.num_features:
            raise InputError(
                f"tokens: expected features of shape (B, N, {self.num_features}), "
                f"got {shape}"
            )
        features = tokens.features.to(self.one.dtype)
        if self.scales and tokens.features.dtype == torch.uint8:
            features = features.div_(255)  # in place, since .to() made a copy
        return features

    def forward(self, tokens: Tokens) -> Tensor:
        """Embed tokens of batch ``(B,)`` as ``(B, N, D)``."""
        try:
            return self._embed(tokens)
        except IndexError as error:
            table = cast(nn.Embedding, self.types).weight
            raise unknown_type(tokens.types, tokens.padding, len(table)) from error

    def _embed(self, tokens: Tokens) -> Tensor:
        features = self.read(tokens)
        if self.adds:
            assert self.types is not None
            if self.project is not None:
                features = self.activate(self.project(features))
            return features + self.types(tokens.types)
        if self.project is None:
            if self.types is None:
                return features
            return torch.cat([features, self.types(tokens.types)], dim=-1)
        if self.types is None:
            return self.activate(self.project(features))
        # Project the K types once instead of their B N copies: the same sum, faster.
        feature_weight, type_weight = self.project.weight.split(
            [self.num_features, self.types.embedding_dim], dim=1
        )
        table = self.types.weight @ type_weight.T + self.project.bias
        projected_types = nn.functional.embedding(tokens.types, table)
        return self.activate(features @ feature_weight.T + projected_types)


def clear_padding(tokens: Tokens) -> Tokens:
    """Set features and types to zero under padding, where they may hold anything."""
    padding = tokens.padding
    return tokens._replace(
        features=tokens.features.masked_fill(padding[..., None], 0),
        types=tokens.types.masked_fill(padding, 0),
    )
