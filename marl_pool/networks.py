"""SetNetwork, from a set of tokens to one vector: embedding, encoder, pooling."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from marl_pool.encoders import ENCODERS
from marl_pool.encoders.base import Encoder
from marl_pool.kernels.activations import Activation, make_activation
from marl_pool.kernels.transforms import is_transformed
from marl_pool.pooling import POOLING
from marl_pool.pooling.base import Pooling
from marl_pool.pooling.memory import Memory, MemoryPooling
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.construction import build
from marl_pool.utils.errors import InputError

Part = Mapping[str, Any]
"""An encoder or a head: its ``name`` and the keyword options of its constructor."""


@contextmanager
def seeded(seed: int | None, part: str) -> Iterator[None]:
    """Seed torch's generator by (seed, part) within the context; None leaves it.

    Each part of a network has random numbers of its own. So at one seed the weights
    below the head are the same for every pooling head, as the AdaPool paper requires
    (https://arxiv.org/abs/2506.09215, section 4.3).
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        # torch's CPU generator only uses the low 32 bits of its seed: hash into these.
        torch.manual_seed(zlib.crc32(f"{part} {seed}".encode()))
        yield


def init_weights(module: nn.Module, std: float) -> None:
    """Sample weight matrices, embeddings and extra tokens from N(0, std²); zero biases.

    LayerNorms keep 1 and 0. Heads and encoders with ``keeps_initial_weights`` are
    skipped.

    Source: the AdaPool paper (https://arxiv.org/abs/2506.09215), C.2, std 0.02; its
    published configurations for centroid and tag use 0.2.
    """
    kept = {
        part
        for whole in module.modules()
        if isinstance(whole, Encoder | Pooling) and whole.keeps_initial_weights
        for part in whole.modules()
    }
    for part in module.modules():
        if part in kept:
            continue
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        for name in ("tokens", "learned_query"):
            if isinstance(getattr(part, name, None), nn.Parameter):
                nn.init.normal_(getattr(part, name), std=std)


TypeEmbedding = int | Literal["add"]
"""Width of the learned vector joined to the features, 0 for none; or ``"add"``."""


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
        dim_out: D, or without a projection the width of features and type embedding.

    Raises:
        InputError: an unknown activation, or from `forward`, features of another shape.
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
        self.adds = type_embedding == "add"
        type_dim = (dim or width) if type_embedding == "add" else type_embedding
        self.types = nn.Embedding(spec.num_types, type_dim) if type_dim else None
        if not self.adds:
            width += type_dim
        is_wide_enough = dim is None or (self.adds and dim == width)
        self.project = None if is_wide_enough else nn.Linear(width, dim or width)
        self.activate: nn.Module = nn.Identity()
        if activation is not None:
            self.activate = make_activation(activation, "input_activation")
        self.dim_out = width if dim is None else dim
        # Follows the network's dtype, also where there are no parameters here.
        self.one: Tensor
        self.register_buffer("one", torch.ones(()), persistent=False)

    def read(self, tokens: Tokens) -> Tensor:
        """Return the features in the network's dtype, bytes scaled to [0, 1]."""
        shape = tuple(tokens.features.shape)
        if len(shape) != 3 or shape[-1] != self.num_features:
            raise InputError(
                f"tokens: expected features of shape (B, N, {self.num_features}), "
                f"got {shape}"
            )
        features = tokens.features.to(self.one.dtype)
        if tokens.features.dtype == torch.uint8:
            features = features.div_(255)  # in place, since .to() made a copy
        return features

    def forward(self, tokens: Tokens) -> Tensor:
        """Embed tokens of batch ``(B,)`` as ``(B, N, D)``."""
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


MakeEmbedding = Callable[
    [TokenSpec, int | None, TypeEmbedding, Activation | None], TokenEmbedding
]


class SetNetwork(nn.Module):
    """Network from a set of tokens to one vector, for policies and supervised tasks.

    ``pooling(encoder(embedding(tokens)))``, where the embedding maps each token to a
    vector of width D, the encoder lets the vectors interact, and the pooling head
    summarizes them.

    Shapes: `Tokens` of batch ``(B,)`` to ``(B, dim_out)``.

    Example:
        >>> network = SetNetwork(
        ...     TokenSpec(num_tokens=6, num_features=3, type_names=("self", "other")),
        ...     encoder={"name": "transformer", "dim": 8, "num_heads": 2},
        ...     pooling={"name": "ada"},
        ... )
        >>> tokens = Tokens(
        ...     features=torch.randn(4, 6, 3),
        ...     types=torch.tensor([0, 1, 1, 1, 1, 1]).expand(4, 6),
        ...     padding=torch.zeros(4, 6, dtype=torch.bool),
        ... )
        >>> network(tokens).shape
        torch.Size([4, 8])

    Args:
        spec: specification of the tokens.
        encoder: ``{"name": …, **options}``.
        pooling: ``{"name": …, **options}``.
        type_embedding: width of the learned type embedding, concatenated to the
            features, 0 for none; ``"add"`` to add it to them instead.
        input_activation: activation after the projection of the tokens, before the
            encoder; None for none. The AdaPool paper's RL code has GELU there, its
            supervised code (KNN-centroid, images) nothing.
        dropout: probability in the encoder, in [0, 1).
        attention_dropout: probability in the attention of encoder and head, if their
            constructors have this parameter; see `MultiHeadAttention`.
        init_std: standard deviation of the initial weights; see `init_weights`.
        action_dim: A, the width of the previous action, for heads that read it.
        embedding: `TokenEmbedding` or a subclass, called with ``spec``, the encoder's
            width, ``type_embedding`` and ``input_activation``.
        seed: seed of the initial weights; None uses torch's global generator.

    Attributes:
        dim_out: width of the result, that of the pooling head.

    Raises:
        InputError: an unknown name or option, or a head that does not fit the tokens.
    """

    def __init__(
        self,
        spec: TokenSpec,
        *,
        encoder: Part,
        pooling: Part,
        type_embedding: TypeEmbedding = 4,
        input_activation: Activation | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        init_std: float = 0.02,
        action_dim: int = 0,
        embedding: MakeEmbedding = TokenEmbedding,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        with seeded(seed, "encoder"):
            self.encoder = build_part(
                "encoder",
                encoder,
                ENCODERS,
                Encoder,
                {"dropout": dropout, "attention_dropout": attention_dropout},
            )
            if not hasattr(self.encoder, "dim"):
                raise InputError(
                    f"encoder {encoder['name']!r}: expected an attribute dim, the "
                    "width of its vectors or None for the width of the tokens, got none"
                )
            init_weights(self.encoder, init_std)
        with seeded(seed, "embedding"):
            self.embedding = embedding(
                spec, self.encoder.dim, type_embedding, input_activation
            )
            init_weights(self.embedding, init_std)
        with seeded(seed, "pooling"):
            context = {
                "dim": self.embedding.dim_out,
                "num_tokens": spec.num_tokens,
                "has_self": spec.has_self,
                "action_dim": action_dim,
                "attention_dropout": attention_dropout,
            }
            self.pooling = build_part("pooling", pooling, POOLING, Pooling, context)
            init_weights(self.pooling, init_std)
        self.dim_out = self.pooling.dim_out

    def forward(self, tokens: Tokens) -> Tensor:
        """Summarize tokens of batch ``(B,)`` in ``(B, dim_out)``."""
        return self.pooling(*self.encode(tokens))

    def encode(self, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the input of the pooling head: vectors, padding and types."""
        features, types, padding = tokens
        # Without padding drop the mask: attention is faster without one. A function
        # transform does not allow the test.
        mask: Tensor | None = padding
        if not is_transformed() and not padding.any():
            mask = None
        # Padded slots may hold NaN or any type.
        if mask is not None:
            features = features.masked_fill(padding[..., None], 0)
            types = types.masked_fill(padding, 0)
        x = self.embedding(Tokens(features, types, padding))
        # The head's extra tokens pass through the encoder with the set.
        x, mask, types = self.pooling.prepend(x, mask, types)
        return self.encoder(x, mask), mask, types

    def weights(self, tokens: Tokens) -> Tensor | None:
        """Return the head's attention weights, ``(B, heads, N)``, or None."""
        weights = self.pooling.weights(*self.encode(tokens))
        if weights is None:
            return None
        return weights[..., self.pooling.extra_tokens :]

    @property
    def memory_head(self) -> MemoryPooling | None:
        """The pooling head if it is a `MemoryPooling`, else None."""
        return self.pooling if isinstance(self.pooling, MemoryPooling) else None

    def unroll(
        self, tokens: Tokens, prev_actions: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Summarize T sets of each row one after the other, with a `memory_head`.

        Args:
            tokens: tokens of batch ``(B, T)``.
            prev_actions: ``(B, T, A)``, the action taken before each set.
            memory: the head's memory before the first set.

        Returns:
            ``(B, T, dim_out)``, and the memory after the last set.
        """
        x, padding = self._sequences(tokens)
        return self._head.unroll(x, padding, prev_actions, memory)

    def attention_weights(
        self, tokens: Tokens, prev_actions: Tensor, memory: Memory
    ) -> Tensor:
        """Return the weights of the last of T sets, ``(B, heads, N)``; see `unroll`."""
        x, padding = self._sequences(tokens)
        return self._head.attention_weights(x, padding, prev_actions, memory)

    @property
    def _head(self) -> MemoryPooling:
        assert isinstance(self.pooling, MemoryPooling)
        return self.pooling

    def _sequences(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        x, padding, types = self.encode(tokens.flatten_batch())
        x, padding, _ = self.pooling.prepare(x, padding, types)
        shape = tokens.batch_shape
        if padding is not None:
            padding = padding.unflatten(0, shape)
        return x.unflatten(0, shape), padding


def build_part(
    kind: str,
    part: Part,
    registry: Mapping[str, str],
    base: type,
    context: Mapping[str, Any],
) -> Any:
    """Build an encoder or a head from ``{"name": …, **options}``; see `build`.

    Raises:
        InputError: no name, an unknown name, or a wrong option.
    """
    if part is None:
        raise InputError(f"{kind}: expected one, got none")
    options = dict(part)
    if "name" not in options:
        raise InputError(f"{kind}: expected a mapping with a name, got {dict(part)}")
    return build(options.pop("name"), registry, kind, base, options, context)
