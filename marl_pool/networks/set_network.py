"""SetNetwork, from a set of tokens to one vector: embedding, encoder, pooling."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from marl_pool.encoders import ENCODERS
from marl_pool.encoders.base import Encoder
from marl_pool.kernels.functional import Activation, is_transformed
from marl_pool.networks.embedding import TokenEmbedding, TypeEmbedding, clear_padding
from marl_pool.options.construction import build, check_constructor, with_name
from marl_pool.options.names import plug_ins_in
from marl_pool.options.signatures import check_argument
from marl_pool.options.types import (
    NamedOptions,
    Part,
    PositiveFloat,
    PositiveInt,
    Probability,
    SizeOrZero,
)
from marl_pool.pooling import POOLING
from marl_pool.pooling.attention import ClsPooling
from marl_pool.pooling.base import Memory, MemoryPooling, Pooling, validate_constructed
from marl_pool.pooling.multi import MultiPooling
from marl_pool.tokens import Tokens, TokenSpec, drop_tokens, form_of
from marl_pool.utils.devices import may_read
from marl_pool.utils.errors import InputError, described
from marl_pool.utils.randomness import seed_torch


@contextmanager
def seeded(seed: int | None, part: str) -> Iterator[None]:
    """Seed torch's generators by (seed, part) within the context; None leaves them.

    Each part of a network has separate random numbers. So with the same seed, the
    weights below the head are the same for every pooling head, as the AdaPool paper
    requires (https://arxiv.org/abs/2506.09215, section 4.3).
    """
    if seed is None:
        yield
        return
    # Weights are sampled on torch's default device, which may be a GPU in use.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        # torch's CPU generator uses only the low 32 bits of its seed: hash into those.
        number = zlib.crc32(f"{part} {seed}".encode())
        seed_torch(number, "cuda" if devices else "cpu")
        yield


def init_weights(module: nn.Module, std: float) -> None:
    """Sample weights, embeddings and learned tokens from N(0, std²); set biases to 0.

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
        encoder: a name, or ``{"name": …, **options}``.
        pooling: a name, or ``{"name": …, **options}``.
        type_embedding: width of the learned type embedding, which is concatenated to
            the features, 0 for none; ``"add"`` to add it to them instead.
        input_activation: activation after the projection of the tokens, before the
            encoder; None for none. The AdaPool paper's RL code has GELU there, its
            supervised code (KNN-centroid, images) has none.
        dropout: probability in the encoder, in [0, 1).
        attention_dropout: probability in the attention of encoder and head, if their
            constructors have this parameter; see `MultiHeadAttention`.
        token_dropout: probability, while training, that a token is hidden from the
            network, sampled for each set and network; see `drop_tokens`.
        init_std: standard deviation of the initial weights; see `init_weights`.
        action_dim: A, the width of the previous action, for heads that read it.
        embedding: `TokenEmbedding` or a subclass, called with ``spec``, the encoder's
            width, ``type_embedding`` and ``input_activation``.
        seed: seed of the initial weights; None uses torch's global generator.

    Attributes:
        dim_out: width of the result, the pooling head's ``dim_out``.

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
        dropout: Probability = 0.0,
        attention_dropout: Probability = 0.0,
        token_dropout: Probability = 0.0,
        init_std: PositiveFloat = 0.02,
        action_dim: SizeOrZero = 0,
        embedding: MakeEmbedding = TokenEmbedding,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        encoder, pooling = with_name(encoder), with_name(pooling)
        self.spec = spec
        self.token_dropout = token_dropout
        # Each part has its own seed, so that no part affects another's weights.
        with seeded(seed, "encoder"):
            self.encoder = build_part(
                "encoder",
                encoder,
                ENCODERS,
                Encoder,
                {"dropout": dropout, "attention_dropout": attention_dropout},
            )
            # A plug-in may lack the attribute that the embedding needs.
            where = f"encoder {encoder['name']!r}"
            if not hasattr(self.encoder, "dim"):
                raise InputError(
                    f"{where}: expected an attribute dim, the width of its vectors or "
                    "None for the width of the tokens, got none"
                )
            check_argument(f"{where}: dim", self.encoder.dim, PositiveInt | None)
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
        validate_mixing(self.encoder, self.pooling, pooling["name"], encoder["name"])
        self.dim_out = self.pooling.dim_out
        if plug_ins_in([encoder, pooling]):
            self._try(where, f"pooling {pooling['name']!r}")

    def _try(self, encoder: str, pooling: str) -> None:
        """Raise InputError if a part fails on zeros or changes the form of the state.

        Args:
            encoder: name of the encoder, for messages.
            pooling: name of the head.
        """
        before = {name: part.clone() for name, part in self.state_dict().items()}
        # The trial must not advance the random generator.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            where = pooling
            try:
                x, padding, types = self._embed(self.spec.zeros(2))
                where = encoder
                encoded = self.encoder(x, padding)
                if form_of(encoded) != form_of(x):
                    raise InputError(
                        f"{where}: expected a result of {form_of(x)}, got "
                        f"{form_of(encoded)}"
                    )
                where = pooling
                pooled = self.pooling(encoded, padding, types)
                weights = self.pooling.weights(encoded, padding, types)
            except InputError:
                raise
            except Exception as error:  # a plug-in may raise any exception
                raise InputError(
                    f"{where}: expected a result for 2 sets of zeros, got "
                    f"{described(error)}"
                ) from error
            _validate_weights(where, weights, *x.shape[:2])
            if pooled.dtype != torch.get_default_dtype():
                raise InputError(
                    f"{where}: expected a result of {torch.get_default_dtype()}, got "
                    f"{pooled.dtype}"
                )
            after = self.state_dict()
            changed = before.keys() ^ after.keys()
            changed |= {
                name
                for name in before.keys() & after.keys()
                if before[name].shape != after[name].shape
            }
            if changed:
                where = encoder if min(changed).startswith("encoder.") else pooling
                raise InputError(
                    f"{where}: expected a state of the same tensors and shapes before "
                    f"and after a forward pass, got another {min(changed)!r}"
                )
            # A pass may change buffers, such as running means.
            for name, part in before.items():
                after[name].copy_(part)

    def forward(self, tokens: Tokens) -> Tensor:
        """Summarize tokens of batch ``(B,)`` in ``(B, dim_out)``."""
        return self.pooling(*self.encode(self.drop(tokens)))

    def pool_and_encode(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return `forward`'s vectors, and the encoder's ``(B, N, pooling.dim)``.

        The latter are 0 under padding.
        """
        x, padding, types = self.encode(self.drop(tokens))
        pooled, encoded = self.pooling(x, padding, types), x
        if padding is not None:
            encoded = x.masked_fill(padding[..., None], 0.0)
        # The head's extra tokens come first.
        return pooled, encoded[:, self.pooling.extra_tokens :]

    def encode(self, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the input of the pooling head: vectors, padding and types."""
        x, padding, types = self._embed(tokens)
        return self.encoder(x, padding), padding, types

    def _embed(self, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the input of the encoder, and the types."""
        tokens.validate_shapes()
        padding = present_padding(tokens)
        cleared = tokens if padding is None else clear_padding(tokens)
        x = self.embedding(cleared)
        # The head's extra tokens pass through the encoder with the set.
        return self.pooling.prepend(x, padding, cleared.types)

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
        """Summarize the T sets of each row in sequence, with a `memory_head`.

        Args:
            tokens: tokens of batch ``(B, T)``.
            prev_actions: ``(B, T, A)``, the action taken before each set.
            memory: the head's memory before the first set.

        Returns:
            ``(B, T, dim_out)``, and the memory after the last set.
        """
        sequences = self._sequences(self.drop(tokens))
        return self._head.unroll(*sequences, prev_actions, memory)

    def attention_weights(
        self, tokens: Tokens, prev_actions: Tensor, memory: Memory
    ) -> Tensor:
        """Return the weights of the last of T sets, ``(B, heads, N)``; see `unroll`."""
        sequences = self._sequences(tokens)
        return self._head.attention_weights(*sequences, prev_actions, memory)

    def drop(self, tokens: Tokens) -> Tokens:
        """Hide tokens while training, with probability ``token_dropout``."""
        if not (self.training and self.token_dropout):
            return tokens
        return drop_tokens(tokens, self.token_dropout, self.spec.has_self)

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


check_constructor(SetNetwork, "set_network")


def _validate_weights(where: str, weights: object, batch: int, count: int) -> None:
    """Raise InputError unless a head's weights, if any, are ``(B, heads, N)``."""
    if weights is None:
        return
    shape = weights.shape if isinstance(weights, Tensor) else ()
    if len(shape) != 3 or shape[0] != batch or shape[2] != count:
        raise InputError(
            f"{where}: weights: expected (B, heads, N), here ({batch}, heads, "
            f"{count}), got {form_of(weights)}"
        )


def validate_mixing(
    encoder: Encoder, pooling: Pooling, pooling_name: str, encoder_name: str
) -> None:
    """Raise InputError if a class token would not meet the tokens of the set."""
    # A MultiPooling counts by the heads inside it.
    heads = {type(x) for x in pooling.modules() if isinstance(x, Pooling)}
    if heads <= {ClsPooling, MultiPooling} and not encoder.mixes_first:
        raise InputError(
            f"pooling {pooling_name!r}: expected an encoder in which its learned token "
            f"meets the others, got {encoder_name!r} with these options: the result "
            "would not depend on the tokens"
        )


def present_padding(tokens: Tokens) -> Tensor | None:
    """Return the padding ``(B, N)``; None if no token is padded, which is faster.

    Function transforms do not allow this test, and on a GPU it costs more than the
    mask.
    """
    may_test = not is_transformed() and may_read(tokens.padding)
    return None if may_test and not tokens.padding.any() else tokens.padding


def build_part(
    kind: str,
    part: NamedOptions,
    registry: Mapping[str, str],
    base: type,
    context: Mapping[str, Any],
) -> Any:
    """Build an encoder or a head from ``{"name": …, **options}``; see `build`.

    Raises:
        InputError: no name, an unknown name, a wrong option, or a state that no file of
            tensors can hold.
    """
    options = dict(part)
    if "name" not in options:
        raise InputError(f"{kind}: expected a mapping with a name, got {dict(part)}")
    name = options.pop("name")
    module: nn.Module = build(name, registry, kind, base, options, context)
    where = f"{kind} {name!r}"
    if isinstance(module, Pooling):
        validate_constructed(module, where)
    elif "_modules" not in vars(module):
        raise InputError(
            f"{where}: expected a constructor that calls super().__init__(), got one "
            "that does not"
        )
    validate_state(where, module)
    return module


def validate_state(where: str, module: nn.Module) -> None:
    """Raise InputError for a state that no file of tensors can hold.

    So it is found before training, not when the policy is saved. On the meta device,
    where nothing is trained, every state is accepted.
    """
    if torch.get_default_device().type == "meta":
        return
    for key, tensor in module.state_dict().items():
        if problem := _state_problem(key, tensor):
            raise InputError(f"{where}: expected {problem}")


def _state_problem(key: str, tensor: Any) -> str:
    """Return the expectation that a tensor for a file does not meet; empty if none."""
    if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
        return f"parameters that have a shape, got {key!r} of a lazy layer"
    if not isinstance(tensor, Tensor):
        return f"a state of tensors, got {key!r}, {type(tensor).__name__}"
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "meta" if tensor.is_meta else tensor.layout
        return f"dense tensors with numbers, got {key!r}, {kind}"
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes):
        return f"tensors with memory for each number, got {key!r}, an expanded one"
    if "/" in key:
        return f"names of parameters without /, got {key!r}"
    return ""
