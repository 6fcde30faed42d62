"""Set networks by the compiled kernel: which qualify, and their calls."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from marl_pool.encoders.transformer import TransformerEncoder, TransformerLayer
from marl_pool.kernels.attention import MultiHeadAttention
from marl_pool.kernels.cuda import call as cuda
from marl_pool.kernels.native import call as kernel
from marl_pool.kernels.native.call import (
    ACTIVATIONS,
    NetworkInputs,
    NetworkSizes,
    parameter_shapes,
)
from marl_pool.kernels.native.plan import NativePlan, are_precise, compute, may_run
from marl_pool.networks.embedding import TokenEmbedding, clear_padding
from marl_pool.pooling.ada import AdaPooling
from marl_pool.pooling.attention import ClsPooling
from marl_pool.pooling.base import Pooling
from marl_pool.pooling.basic import AvgPooling, MaxPooling, SumPooling
from marl_pool.tokens import Tokens

WIDEST = 64
"""Wider networks are left to torch."""

MOST_TOKENS = 256
"""Larger sets are left to torch if heads are wider than one number."""

_POOLINGS: dict[type[nn.Module], str] = {
    AdaPooling: "ada",
    AvgPooling: "avg",
    ClsPooling: "first",
    MaxPooling: "max",
    SumPooling: "sum",
}
_OPTIONS: dict[type[nn.Module], tuple[str, ...]] = {
    AdaPooling: ("query", "residual"),
    MultiHeadAttention: ("num_heads", "scale", "dropout"),
    TokenEmbedding: ("adds", "num_features"),
    nn.GELU: ("approximate",),
    nn.LayerNorm: ("eps",),
}
"""Attributes on which a module's result depends, besides parameters and modules."""

_SHAPE = operator.attrgetter("shape")


class NativeNetwork(NativePlan):
    """Embedding, transformer and pooling head, as far as they qualify, in one call.

    Made by `plan`. Modules qualify by their exact classes, since a subclass may compute
    something else.
    """

    def __init__(
        self,
        embedding: TokenEmbedding,
        encoder: TransformerEncoder,
        pooling: Pooling | None,
    ) -> None:
        self.embedding, self.encoder, self.pooling = embedding, encoder, pooling
        self.embeds = _is_projection(embedding)
        embedded = embedding if self.embeds else None
        parts = [part for part in (embedded, encoder, pooling) if part is not None]
        modules = [module for part in parts for module in part.modules()]
        weights = list(_weights(embedded, encoder, pooling))
        super().__init__(modules, _OPTIONS, weights)
        self.dropouts = [
            cast(nn.Dropout, layer.feedforward[3]) for layer in _layers(encoder)
        ]
        self.sizes = _sizes(embedded, encoder, pooling)
        self.shapes = parameter_shapes(self.sizes)

    @classmethod
    def plan(
        cls,
        embedding: TokenEmbedding,
        encoder: nn.Module,
        pooling: Pooling,
        *,
        pooled: bool,
    ) -> "NativeNetwork | None":
        """Plan the call for the parts of a `SetNetwork`, up to the encoder's vectors.

        With ``pooled``, the call computes the head's result, too. If the embedding does
        not qualify, torch computes it.

        Returns:
            None if the encoder, or with ``pooled`` the head, does not qualify.
        """
        if not _is_known_encoder(encoder):
            return None
        if not pooled:
            return None if pooling.extra_tokens else cls(embedding, encoder, None)
        return cls(embedding, encoder, pooling) if _is_known_pooling(pooling) else None

    def fits(self, parts: tuple[nn.Module, ...], tokens: Tokens) -> bool:
        """Return True if the kernel computes tokens of batch ``(B,)`` as torch would.

        ``parts`` are embedding, encoder and pooling head as they are now.
        """
        features, types, padding = tokens[:3]
        # A compiler must not meet the rest.
        if not may_run(features.device.type):
            return False
        planned = (self.embedding, self.encoder, self.pooling or parts[2])
        narrow = self.sizes.heads == self.sizes.dim
        return (
            all(map(operator.is_, parts, planned))
            and type(features) is Tensor
            and features.dim() == 3
            and features.shape[:2] == types.shape == padding.shape
            and types.dtype in (torch.int64, torch.int32)
            and padding.dtype is torch.bool
            and features.shape[1] > 0
            and (narrow or features.shape[1] <= MOST_TOKENS)
            and types.device == padding.device == features.device
            and self.is_unchanged()
            and are_precise(parameters := self.parameters(), features.device)
            and list(map(_SHAPE, parameters)) == self.shapes
            and len(self._dropouts()) == 1
            and (features.is_cpu or self._fits_gpu(features))
        )

    def _fits_gpu(self, features: Tensor) -> bool:
        """Return True if there is a GPU's kernel for features of batch ``(B, N)``."""
        if not features.is_cuda or self._dropouts() != {0.0}:
            return False
        dtype = cast(Tensor, self.parameters()[0]).dtype
        index = features.device.index
        return cuda.can_run(self.sizes, features.shape[1], dtype, index)

    def __call__(self, tokens: Tokens) -> Tensor:
        """Return the pooled vectors ``(B, D)`` of tokens that `fits` accepts.

        Without the pooling head these are the encoder's, ``(B, N, D)``.
        """
        inputs = self.inputs(tokens)
        call = _NetworkCall(self, inputs.dropout, inputs.seed)
        tensors = (inputs.values, tokens.types, tokens.padding)
        return compute(call, *tensors, *inputs.parameters)

    def inputs(self, tokens: Tokens) -> NetworkInputs:
        """Return the arguments of the kernel for tokens that `fits` accepts."""
        if self.embeds:
            values = self.embedding.read(tokens)
        else:
            values = self.embedding(clear_padding(tokens))
        (dropout,) = self._dropouts()
        # Sampled from torch's generator, so that a seeded run can be repeated.
        seed = int(torch.empty((), dtype=torch.int64).random_()) if dropout else 0
        parameters = cast(list[Tensor], self.parameters())
        tensors = (values, tokens.types, tokens.padding, parameters)
        return NetworkInputs(self.sizes, *tensors, dropout, seed)

    def in_torch(
        self, values: Tensor, types: Tensor, padding: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Compute the same by torch, from features or the embedding's vectors."""
        with self.with_parameters(parameters):
            x = values
            if self.embeds:
                cleared = clear_padding(Tokens(values, types, padding))
                x, types = self.embedding(cleared), cleared.types
            if self.pooling is None:
                return self.encoder(x, padding)
            x, mask, marks = self.pooling.prepend(x, padding, types)
            return self.pooling(self.encoder(x, mask), mask, marks)

    def _dropouts(self) -> set[float]:
        return {layer.p if layer.training else 0.0 for layer in self.dropouts}


@dataclass(frozen=True)
class _NetworkCall:
    """One call: all that the gradient needs besides the saved tensors."""

    network: NativeNetwork
    dropout: float
    seed: int

    def run(self, *inputs: Tensor) -> Tensor:
        network_inputs = self._given(inputs)
        return (
            kernel.run(network_inputs)
            if network_inputs.values.is_cpu
            else cuda.run(network_inputs)
        )

    def gradients(
        self, inputs: Sequence[Tensor], gradient: Tensor, for_first: bool
    ) -> list[Tensor | None]:
        network_inputs = self._given(inputs)
        differentiate = (
            kernel.gradients if network_inputs.values.is_cpu else cuda.gradients
        )
        value_gradient, parameter_gradients = differentiate(
            network_inputs, gradient, for_values=for_first
        )
        return [value_gradient, None, None, *parameter_gradients]

    def _given(self, inputs: Sequence[Tensor]) -> NetworkInputs:
        values, types, padding, *parameters = inputs
        tensors = (values, types, padding, parameters)
        return NetworkInputs(self.network.sizes, *tensors, self.dropout, self.seed)

    def in_torch(self, *inputs: Tensor) -> Tensor:
        if self.dropout:
            raise RuntimeError(
                "a gradient of the gradient with dropout needs kernels=torch"
            )
        return self.network.in_torch(*inputs)


def _layers(encoder: TransformerEncoder) -> list[TransformerLayer]:
    return cast(list[TransformerLayer], list(encoder.layers))


def _is_known_encoder(encoder: nn.Module) -> TypeGuard[TransformerEncoder]:
    return (
        type(encoder) is TransformerEncoder
        and encoder.dim <= WIDEST
        and encoder.final_norm is None
        and all(type(layer) is TransformerLayer for layer in encoder.layers)
        and all(_is_plain(layer.attention) for layer in _layers(encoder))
    )


def _is_plain(attention: nn.Module) -> bool:
    return (
        type(attention) is MultiHeadAttention
        and not attention.dropout
        and attention.to_query.bias is None
    )


def _is_known_pooling(pooling: Pooling) -> bool:
    if type(pooling) is AdaPooling:
        return isinstance(pooling.query, str) and _is_plain(pooling.attention)
    return type(pooling) in _POOLINGS


def _is_projection(embedding: nn.Module) -> bool:
    return (
        type(embedding) is TokenEmbedding
        and not embedding.adds
        and embedding.project is not None
        and type(embedding.activate) in ACTIVATIONS
    )


def _weights(
    embedding: TokenEmbedding | None,
    encoder: TransformerEncoder,
    pooling: Pooling | None,
) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters in the order of ``Parameters`` in network.hpp."""
    if embedding is not None:
        assert embedding.project is not None
        yield from _affine(embedding.project)
        if embedding.types is not None:
            yield embedding.types, "weight"
    if pooling is not None and pooling.extra_tokens:
        yield pooling, "tokens"
    for layer in _layers(encoder):
        yield from _affine(layer.attention_norm)
        yield from _projections(layer.attention)
        yield from _affine(layer.feedforward_norm)
        yield from _affine(layer.feedforward[0])
        yield from _affine(layer.feedforward[2])
    if isinstance(pooling, AdaPooling):
        yield from _projections(pooling.attention)
        if pooling.query == "learned":
            yield pooling, "learned_query"


def _affine(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(module, "weight"), (module, "bias")]


def _projections(attention: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name in ("to_query", "to_key", "to_value", "to_out"):
        yield getattr(attention, name), "weight"


def _sizes(
    embedding: TokenEmbedding | None,
    encoder: TransformerEncoder,
    pooling: Pooling | None,
) -> NetworkSizes:
    layer = _layers(encoder)[0]
    types = None if embedding is None else embedding.types
    activate = nn.Identity() if embedding is None else embedding.activate
    ada = pooling if isinstance(pooling, AdaPooling) else None
    head = None if pooling is None else _POOLINGS[type(pooling)]
    return NetworkSizes(
        features=0 if embedding is None else embedding.num_features,
        types=0 if types is None else types.num_embeddings,
        type_width=0 if types is None else types.embedding_dim,
        input_activation=ACTIVATIONS[type(activate)],
        extra=0 if pooling is None else pooling.extra_tokens,
        dim=encoder.dim,
        layers=len(encoder.layers),
        heads=layer.attention.num_heads,
        dim_ff=cast(nn.Linear, layer.feedforward[0]).out_features,
        activation=ACTIVATIONS[type(layer.feedforward[1])],
        scale=layer.attention.scale,
        pooling=kernel.POOLINGS[head],
        pooling_heads=1 if ada is None else ada.attention.num_heads,
        query=0 if ada is None else kernel.QUERIES[str(ada.query)],
        residual=False if ada is None else ada.residual,
        pooling_scale=1.0 if ada is None else ada.attention.scale,
    )
