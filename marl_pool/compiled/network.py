"""Set networks computed by the compiled kernel: which qualify, and their calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.compiled.cuda import call as cuda
from marl_pool.compiled.module import (
    PRECISE,
    SharedModule,
    Weight,
    compute,
    have_shapes,
    is_plain,
    may_run,
    tensors_of,
    with_parameters,
)
from marl_pool.compiled.native import call as kernel
from marl_pool.compiled.native.call import (
    ACTIVATIONS,
    NetworkInputs,
    NetworkSizes,
    Weights,
    parameter_shapes,
)
from marl_pool.encoders.transformer import TransformerEncoder, TransformerLayer
from marl_pool.kernels.attention import MultiHeadAttention
from marl_pool.networks.embedding import TokenEmbedding, clear_padding
from marl_pool.networks.set_network import SetNetwork, present_padding
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


class CompiledSetNetwork(SharedModule, SetNetwork):
    """A set network of which the kernel computes all, or all but the pooling head.

    Made by `compile_network`; if the kernel does not compute a call, torch does.
    """

    def __init__(
        self,
        original: SetNetwork,
        whole: "NetworkPlan | None",
        encoding: "NetworkPlan | None",
    ) -> None:
        super().__init__(original)
        self.whole, self.encoding = whole, encoding

    @override
    def forward(self, tokens: Tokens) -> Tensor:
        tokens = self.drop(tokens)
        if self.whole is not None and self.whole.fits(tokens):
            return self.whole(tokens)
        return self.pooling(*self.encode(tokens))

    @override
    def encode(self, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor]:
        if self.encoding is None or not self.encoding.fits(tokens):
            return super().encode(tokens)
        # As in torch, the head sees type 0 under padding, where any number may stand.
        types = tokens.types.masked_fill(tokens.padding, 0)
        return self.encoding(tokens), present_padding(tokens), types

    def computes(self, tokens: Tokens, *, encoder: bool = False) -> bool:
        """Return True if the kernel computes the network for tokens of batch ``(B,)``.

        With ``encoder``, it may leave the pooling head to torch.
        """
        plans = [self.whole, *([self.encoding] if encoder else [])]
        return any(plan is not None and plan.fits(tokens) for plan in plans)

    def inputs(
        self, tokens: Tokens, weights: Weights | None = None
    ) -> NetworkInputs | None:
        """Return the kernel's arguments for `forward`, as a part of a larger call.

        None if the kernel does not compute the embedding too, or on a GPU. ``weights``
        were gathered earlier; None for the current ones.
        """
        plan = self.whole
        if plan is None or not plan.embeds or not tokens.features.is_cpu:
            return None
        return plan.inputs(self.drop(tokens), weights) if plan.fits(tokens) else None


def compile_network(network: SetNetwork) -> SetNetwork:
    """Return the compiled counterpart, or the network if torch computes it all."""
    if type(network) is not SetNetwork or not is_plain(network):
        return network
    parts = network.embedding, network.encoder, network.pooling
    whole, encoding = (
        NetworkPlan.of(*parts, pooled=pooled) for pooled in (True, False)
    )
    if whole is None and encoding is None:
        return network
    return CompiledSetNetwork(network, whole, encoding)


class NetworkPlan:
    """Embedding, transformer and pooling head, as far as they qualify, in one call.

    Made by `of`. Modules qualify by their exact classes, since a subclass may compute
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
        self.weights = list(_weights(embedded, encoder, pooling))
        self.dropouts = [
            cast(nn.Dropout, layer.feedforward[3]) for layer in _layers(encoder)
        ]
        self.sizes = _sizes(embedded, encoder, pooling)

    @classmethod
    def of(
        cls,
        embedding: TokenEmbedding,
        encoder: nn.Module,
        pooling: Pooling,
        *,
        pooled: bool,
    ) -> "NetworkPlan | None":
        """Plan the call for the parts of a `SetNetwork`, up to the encoder's vectors.

        With ``pooled``, the call computes the head's result too. If the embedding does
        not qualify, torch computes it.

        Returns:
            None if the encoder, or with ``pooled`` the head, does not qualify.
        """
        if not _is_known_encoder(encoder):
            return None
        if not (_is_known_pooling(pooling) if pooled else not pooling.extra_tokens):
            return None
        transformer = cast(TransformerEncoder, encoder)
        plan = cls(embedding, transformer, pooling if pooled else None)
        has_shapes = have_shapes(plan.weights, parameter_shapes(plan.sizes))
        return plan if has_shapes else None

    def fits(self, tokens: Tokens) -> bool:
        """Return True if the kernel computes what torch would for batch ``(B,)``."""
        features, types, padding = tokens[:3]
        # Compilers must not trace the rest.
        if not may_run(features.device.type):
            return False
        # A library may replace all parameters by plain tensors.
        module, name = self.weights[0]
        if (weight := module._parameters.get(name)) is None:
            return False
        narrow = self.sizes.heads == self.sizes.dim
        # A subclass of Tensor may have no memory that the kernel could read, and the
        # kernel takes one probability of dropout for all layers.
        return (
            type(features) is Tensor
            and features.dim() == 3
            and features.shape[:2] == types.shape == padding.shape
            and types.dtype in (torch.int64, torch.int32)
            and padding.dtype is torch.bool
            and features.shape[1] > 0
            and (narrow or features.shape[1] <= MOST_TOKENS)
            and types.device == padding.device == weight.device == features.device
            and weight.dtype in PRECISE
            and len(self._dropouts()) == 1
            and (features.is_cpu or self._fits_gpu(features, weight.dtype))
        )

    def _fits_gpu(self, features: Tensor, dtype: torch.dtype) -> bool:
        """Return True if there is a GPU's kernel for features of batch ``(B, N)``."""
        # The GPU's kernel has no dropout.
        if self._dropouts() != {0.0}:
            return False
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

    def inputs(self, tokens: Tokens, weights: Weights | None = None) -> NetworkInputs:
        """Return the arguments of the kernel for tokens that `fits` accepts."""
        if self.embeds:
            values = self.embedding.read(tokens)
        else:
            values = self.embedding(clear_padding(tokens))
        (dropout,) = self._dropouts()
        # Sampled from torch's generator, so that a seeded run can be repeated.
        seed = int(torch.empty((), dtype=torch.int64).random_()) if dropout else 0
        parameters = weights or tensors_of(self.weights)
        tensors = (values, tokens.types, tokens.padding, parameters)
        return NetworkInputs(self.sizes, *tensors, dropout, seed)

    def in_torch(
        self, values: Tensor, types: Tensor, padding: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Compute the same by torch, from features or the embedding's vectors."""
        with with_parameters(self.weights, parameters):
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

    plan: NetworkPlan
    dropout: float
    seed: int

    def run(self, *inputs: Tensor) -> Tensor:
        run = kernel.run if inputs[0].is_cpu else cuda.run
        return run(self._inputs(inputs))

    def gradients(
        self, inputs: Sequence[Tensor], gradient: Tensor, for_first: bool
    ) -> list[Tensor | None]:
        differentiate = kernel.gradients if inputs[0].is_cpu else cuda.gradients
        value_gradient, parameter_gradients = differentiate(
            self._inputs(inputs), gradient, for_values=for_first
        )
        return [value_gradient, None, None, *parameter_gradients]

    def _inputs(self, inputs: Sequence[Tensor]) -> NetworkInputs:
        values, types, padding, *parameters = inputs
        tensors = (values, types, padding, parameters)
        return NetworkInputs(self.plan.sizes, *tensors, self.dropout, self.seed)

    def in_torch(self, *inputs: Tensor) -> Tensor:
        if self.dropout:
            raise RuntimeError(
                "a gradient of the gradient with dropout needs kernels=torch"
            )
        return self.plan.in_torch(*inputs)


def _layers(encoder: TransformerEncoder) -> list[TransformerLayer]:
    return cast(list[TransformerLayer], list(encoder.layers))


def _is_known_encoder(encoder: nn.Module) -> bool:
    if (
        type(encoder) is not TransformerEncoder
        or encoder.dim > WIDEST
        or encoder.final_norm is not None
        or not all(map(is_plain, encoder.modules()))
        or not all(map(_is_known_layer, encoder.layers))
    ):
        return False
    # All layers have the same options.
    options = {
        (x.attention.num_heads, x.attention.scale, type(x.feedforward[1]))
        for x in _layers(encoder)
    }
    return len(options) == 1


def _is_known_layer(layer: nn.Module) -> bool:
    return (
        type(layer) is TransformerLayer
        and type(layer.attention_norm) is type(layer.feedforward_norm) is nn.LayerNorm
        and _is_known_attention(layer.attention)
        and type(layer.feedforward) is nn.Sequential
        and len(layer.feedforward) == 4
        and type(layer.feedforward[0]) is type(layer.feedforward[2]) is nn.Linear
        and type(layer.feedforward[1]) in (nn.GELU, nn.ReLU)
        and type(layer.feedforward[3]) is nn.Dropout
    )


def _is_known_attention(attention: nn.Module) -> bool:
    return (
        type(attention) is MultiHeadAttention
        and all(map(is_plain, attention.modules()))
        and not attention.dropout
        and all(
            type(part) is nn.Linear and part.bias is None
            for part in attention.children()
        )
    )


def _is_known_pooling(pooling: Pooling) -> bool:
    if not is_plain(pooling):
        return False
    if type(pooling) is AdaPooling:
        return isinstance(pooling.query, str) and _is_known_attention(pooling.attention)
    return type(pooling) in _POOLINGS


def _is_projection(embedding: nn.Module) -> bool:
    return (
        type(embedding) is TokenEmbedding
        and all(map(is_plain, embedding.modules()))
        and not embedding.adds
        and type(embedding.project) is nn.Linear
        and type(embedding.types) in (nn.Embedding, type(None))
        and type(embedding.activate) in ACTIVATIONS
    )


def _weights(
    embedding: TokenEmbedding | None,
    encoder: TransformerEncoder,
    pooling: Pooling | None,
) -> Iterator[Weight]:
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


def _affine(module: nn.Module) -> list[Weight]:
    return [(module, "weight"), (module, "bias")]


def _projections(attention: nn.Module) -> Iterator[Weight]:
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
