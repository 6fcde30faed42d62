"""SetNetwork: tokens → embedding → encoder → pooling → one vector."""

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
"""A ``name`` and the keyword options of what it names."""


@contextmanager
def seeded(seed: int | None, part: str) -> Iterator[None]:
    """Draw initial weights from a generator that (seed, part) alone decides.

    So a network's parts don't shift each other's numbers: at one seed the base is the
    same for every pooling head, as the AdaPool paper requires (section 4.3).
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        # torch's CPU generator heeds the low 32 bits of its seed only: hash into those.
        torch.manual_seed(zlib.crc32(f"{part} {seed}".encode()))
        yield


def init_weights(module: nn.Module, std: float) -> None:
    """Set weight matrices, embeddings and extra tokens to N(0, std), biases to 0.

    Source: the AdaPool paper, C.2 (std 0.02); its published centroid and tag
    configurations use 0.2. LayerNorms keep 1 and 0. Heads and encoders that say
    ``keeps_initial_weights`` are passed over.
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
"""Width of a type's learned vector beside the features, 0 for none, or ``"add"``."""


class TokenEmbedding(nn.Module):
    """Join a learned embedding of its type to each token's features.

    It is concatenated to them and both are projected, or added to the features,
    which are projected only where their width is another than ``dim``.

    Source: the AdaPool paper; concatenated in section 4.3 (four features and a
    four-dimensional embedding of the type, one projection for all tokens), added in
    section 4.2.

    Args:
        spec: of the tokens.
        dim: D, the width to project to; None for no projection.
        type_embedding: width of the type embedding, 0 for none; ``"add"``.
        activation: applied to what was projected, before a type is added; None for
            none. Without a projection there is none either.

    Attributes:
        dim_out: width of the vectors.

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
        beside = (dim or width) if type_embedding == "add" else type_embedding
        self.types = nn.Embedding(spec.num_types, beside) if beside else None
        if not self.adds:
            width += beside
        is_wide_enough = dim is None or (self.adds and dim == width)
        self.project = None if is_wide_enough else nn.Linear(width, dim or width)
        self.activate: nn.Module = nn.Identity()
        if activation is not None:
            self.activate = make_activation(activation, "input_activation")
        self.dim_out = width if dim is None else dim
        # It knows the network's dtype also where nothing is learned here.
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
            features = features.div_(255)  # a copy already
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
        # Projecting K types instead of B·N copies of them is the same sum, sooner.
        on_features, on_types = self.project.weight.split(
            [self.num_features, self.types.embedding_dim], dim=1
        )
        table = self.types.weight @ on_types.T + self.project.bias
        on_each = nn.functional.embedding(tokens.types, table)
        return self.activate(features @ on_features.T + on_each)


MakeEmbedding = Callable[
    [TokenSpec, int | None, TypeEmbedding, Activation | None], TokenEmbedding
]


class SetNetwork(nn.Module):
    """From a set of tokens to one vector, for policies and supervised tasks.

    Args:
        spec: of the tokens.
        encoder: ``{"name": …, **options}``.
        pooling: ``{"name": …, **options}``.
        type_embedding: width of the learned type embedding, 0 for none; ``"add"``:
            it is added to the features in place of standing beside them.
        input_activation: applied to the projected tokens, before the encoder; None
            for none. The AdaPool paper's RL code has GELU there, its supervised
            code (KNN-centroid, images) nothing.
        dropout: probability in the encoder, in [0, 1).
        attention_dropout: probability in the attention of encoder and head, where
            they name it; see `MultiHeadAttention`.
        init_std: standard deviation of the initial weights; see `init_weights`.
        action_dim: A, the width of the previous action, for heads that take it.
        embedding: what makes the embedding of tokens, a `TokenEmbedding` or one that
            derives from it, out of the spec, the encoder's width,
            ``type_embedding`` and ``input_activation``.
        seed: of the initial weights; None draws from torch's global generator.

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
                    "width of its vectors or None for that of the tokens, got none"
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
        """Summarise tokens of batch ``(B,)`` as ``(B, dim_out)``."""
        return self.pooling(*self.encode(tokens))

    def encode(self, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return what the pooling head takes: vectors, padding and types."""
        features, types, padding = tokens
        masked: Tensor | None = padding
        if not is_transformed() and not padding.any():
            masked = None  # attention without a mask is faster
        if masked is not None:
            features = features.masked_fill(padding[..., None], 0)
            types = types.masked_fill(padding, 0)
        x = self.embedding(Tokens(features, types, padding))
        x, masked, types = self.pooling.prepend(x, masked, types)
        return self.encoder(x, masked), masked, types

    def weights(self, tokens: Tokens) -> Tensor | None:
        """Return the head's weights on the tokens, ``(B, heads, N)``, or None."""
        weights = self.pooling.weights(*self.encode(tokens))
        if weights is None:
            return None
        return weights[..., self.pooling.extra_tokens :]

    @property
    def memory_head(self) -> MemoryPooling | None:
        """The pooling head, if it takes the previous action and may remember."""
        return self.pooling if isinstance(self.pooling, MemoryPooling) else None

    def unroll(
        self, tokens: Tokens, actions: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Summarise T sets of each row one after the other, with a `memory_head`.

        Args:
            tokens: of batch ``(B, T)``.
            actions: ``(B, T, A)``, the actions before each set.
            memory: of the head.

        Returns:
            ``(B, T, dim_out)`` and the memory after the last set.
        """
        x, padding = self._sequences(tokens)
        return self._head.unroll(x, padding, actions, memory)

    def attention_weights(
        self, tokens: Tokens, actions: Tensor, memory: Memory
    ) -> Tensor:
        """What share each token of the last set has; arguments as of `unroll`."""
        x, padding = self._sequences(tokens)
        return self._head.attention_weights(x, padding, actions, memory)

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
    """Construct what a ``{"name": …, **options}`` names; see `build`.

    Raises:
        InputError: no name is in it, an unknown name, or a wrong option.
    """
    if part is None:
        raise InputError(f"{kind}: expected one, got none")
    options = dict(part)
    if "name" not in options:
        raise InputError(f"{kind}: expected a mapping with a name, got {dict(part)}")
    return build(options.pop("name"), registry, kind, base, options, context)
