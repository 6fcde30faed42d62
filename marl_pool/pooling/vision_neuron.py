"""AttentionNeuron on image patches: keys from frame differences, values from pixels."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from typing_extensions import override

from marl_pool.options.types import Extent, PositiveFloat, Repeats, Size, TableSize
from marl_pool.pooling.attention_neuron import sinusoids
from marl_pool.pooling.base import Memory, MemoryPooling
from marl_pool.tokens import Mask
from marl_pool.utils.errors import InputError

Convolution = tuple[Size, Size, Size]
"""Channels, width of the square kernel, stride."""
GRAY = 0.34
"""Gray level of Pong's background, in [0, 1]."""
WORD = 8
"""Bytes in an int64."""
GOLDEN = -7046029254386353131
"""2⁶⁴ over the golden ratio: an odd factor that spreads bits over a word."""


class VisionNeuronPooling(MemoryPooling):
    r"""M codes, each a mean over image patches, weighted by frame differences.

    .. math::
        m = \mathrm{LN}\left(\mathrm{relu}\left(\mathrm{softmax}\left(
            \frac{Q W_q\,(K W_k)^\top}{\sqrt{d}}\right) V W_v\right)\right)

    A patch holds F frames of the same place, oldest first. Its key is the differences
    of consecutive frames and the previous action; its value is the frames, each
    normalized. Q is a fixed table of sinusoids, one row for each code. The result does
    not depend on the order of the patches, which may even change within an episode.
    Whatever is added equally to all keys cancels in the softmax: the previous action
    and the keys' bias have no effect, and exist only for the published weights.

    With ``patch_convolutions`` the patches are larger, square images. A small CNN,
    shared by all patches, reads the frames as channels; a linear layer with ReLU on its
    output gives an embedding of width ``patch_dim``, which is both key and value.

    An image has few distinct patches. `unique_patches` finds and counts them; with
    these counts the result is the same, several times as fast.

    Shapes: ``(B, T, N, D)`` to ``(B, T, M V)`` by `unroll`; when called, ``(B, N, D)``
    to ``(B, M V)``.

    Source: Tang and Ha (2021), *The Sensory Neuron as a Transformer*,
    https://arxiv.org/abs/2109.02869, equation 2, sections 3.2 and 4.3, and the
    published code, which has ``affine`` for Pong and not for CarRacing. Added here: the
    gains of torch's initial weights, since frame differences are mostly zero and
    without gains all attention weights stay equal; and the CNN on a patch, whose first
    weights are four times torch's, with biases by which a uniform ``GRAY`` gives zero,
    so that small differences from the background are visible.

    Args:
        dim: D, the width of the vectors: F frames of D / F pixels.
        num_codes: M, the number of codes.
        value_dim: V, the width of a code.
        message_dim: d, the width of projected queries and keys.
        position_dim: width of the table of sinusoids.
        frames: F, the number of frames, at least 2, a divisor of D.
        scale: divide the scores by √d.
        affine: give both normalizations weights and biases.
        key_gain: gain of the initial weights from frame differences to keys.
        query_gain: gain of the initial weights of the queries.
        patch_convolutions: (channels, kernel, stride) of each layer of the CNN on a
            patch; empty for the published linear layers.
        patch_dim: width of the CNN's embedding.
        action_dim: A, the width of the previous action.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: Extent,
        *,
        num_codes: TableSize = 16,
        value_dim: Size = 32,
        message_dim: Size = 32,
        position_dim: TableSize = 8,
        frames: Repeats = 4,
        scale: bool = True,
        affine: bool = True,
        key_gain: PositiveFloat = 15.0,
        query_gain: PositiveFloat = 5.0,
        patch_convolutions: Sequence[Convolution] = (),
        patch_dim: Size = 128,
        action_dim: Extent = 0,
    ) -> None:
        super().__init__(dim, action_dim)
        self.dim_out = num_codes * value_dim
        if frames < 2 or dim % frames:
            raise InputError(
                f"pooling.frames: expected a divisor of the width {dim}, at least 2, "
                f"got {frames}"
            )
        self.num_codes, self.value_dim, self.frames = num_codes, value_dim, frames
        self.scale = message_dim**-0.5 if scale else 1.0
        # Keys read the differences of frames, values all frames.
        pixels = dim // frames
        key_dim, source_dim = dim - pixels, dim
        if patch_convolutions:
            key_dim = source_dim = patch_dim
        # In the order of the published weights.
        self.query = nn.Linear(position_dim, message_dim)
        self.key = nn.Linear(key_dim + action_dim, message_dim)
        self.value = nn.Linear(source_dim, value_dim)
        if not patch_convolutions:
            self.frame_norm = nn.LayerNorm(pixels, elementwise_affine=affine)
        self.code_norm = nn.LayerNorm(value_dim, elementwise_affine=affine)
        self.side, self.embedding = math.isqrt(pixels), None
        if patch_convolutions:
            self.embedding = _make_patch_cnn(
                frames, pixels, patch_convolutions, patch_dim
            )
        # Larger weights sharpen the attention at the start of training.
        with torch.no_grad():
            self.query.weight.mul_(query_gain)
            self.key.weight[:, :key_dim].mul_(key_gain)
        # Fixed encodings of the codes' indices.
        self.table: Tensor
        table = sinusoids(num_codes, position_dim)
        self.register_buffer("table", table, persistent=False)

    @override
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        return ()  # the past is in the frames of a patch

    @override
    def unroll(
        self,
        x: Tensor,
        padding: Mask,
        prev_actions: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Pool T sets of patches, pixels in [0, 1]; see `MemoryPooling.unroll`.

        ``counts``, ``(B, T, N)``, is the multiplicity of each patch, 0 for an empty
        slot; None if each occurs once.
        """
        # The multiplicity of a patch is a bias of its scores.
        bias, ignore = _score_bias(padding, counts, x.dtype)
        key_inputs, value_inputs = self._split_frames(x)
        values = self.value(value_inputs)
        if ignore is not None:  # an empty set gives zero
            values = values.masked_fill(ignore[..., None], 0.0)
        weights = self._attend(key_inputs, prev_actions, bias)
        codes = weights.transpose(-1, -2) @ values
        return self.code_norm(codes.relu()).flatten(-2), memory

    @override
    def attention_weights(
        self, x: Tensor, padding: Mask, prev_actions: Tensor, memory: Memory
    ) -> Tensor:
        bias, ignore = _score_bias(padding, None, x.dtype)
        weights = self._attend(self._split_frames(x)[0], prev_actions, bias)
        if ignore is not None:
            weights = weights.masked_fill(ignore[..., None], 0.0)
        return weights[:, -1].transpose(-1, -2)

    def _split_frames(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of keys and of values, ``(B, T, N, …)`` each."""
        frames = x.unflatten(-1, (self.frames, -1))
        if self.embedding is None:
            return frames.diff(dim=-2).flatten(-2), self.frame_norm(frames).flatten(-2)
        images = frames.flatten(0, -3).unflatten(-1, (self.side, self.side))
        if not isinstance(self.embedding[0], TileConv2d):
            # The faster memory layout on a CPU.
            images = images.contiguous(memory_format=torch.channels_last)
        embedded = self.embedding(images).unflatten(0, frames.shape[:-2])
        return embedded, embedded

    def _attend(
        self, key_inputs: Tensor, prev_actions: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the attention weights ``(B, T, N, M)``."""
        # Project the previous action once, not once for each patch.
        from_input, from_action = self.key.weight.split(
            [key_inputs.shape[-1], self.action_dim], dim=1
        )
        shared = linear(prev_actions.to(key_inputs.dtype), from_action, self.key.bias)
        keys = linear(key_inputs, from_input) + shared[..., None, :]
        queries = self.scale * self.query(self.table)
        rows = keys.flatten(0, -2)
        if bias is None:
            scores = rows @ queries.mT
        else:  # in one pass over the scores
            scores = torch.addmm(bias.flatten()[:, None], rows, queries.mT)
        return scores.unflatten(0, keys.shape[:-1]).softmax(-2)


class TileConv2d(nn.Conv2d):
    """Convolution whose stride equals its kernel, computed as one matrix product.

    With few channels this is twice as fast as `nn.Conv2d` on a CPU. The result is the
    same, in channels-last memory format.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        (size, _), (high, wide) = self.kernel_size, input.shape[-2:]
        rows, columns = high // size, wide // size
        # Cut the image into tiles of the kernel's size.
        whole = input[..., : rows * size, : columns * size]
        tiles = whole.unflatten(-1, (columns, size)).unflatten(-3, (rows, size))
        tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return linear(tiles, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def _make_patch_cnn(
    frames: int, pixels: int, convolutions: Sequence[Convolution], dim_out: int
) -> nn.Sequential:
    option, side = "pooling.patch_convolutions", math.isqrt(pixels)
    if side**2 != pixels:
        raise InputError(f"{option}: expected square patches, got {pixels} pixels")
    layers, width = make_convolutions(frames, side, convolutions, option)
    first = layers[0]
    assert isinstance(first, nn.Conv2d)
    assert first.bias is not None
    with torch.no_grad():
        first.weight.mul_(4)
        first.bias.sub_(GRAY * first.weight.sum((1, 2, 3)))
    return nn.Sequential(*layers, nn.Linear(width, dim_out), nn.ReLU())


def make_convolutions(
    channels: int, side: int, convolutions: Sequence[Convolution], option: str
) -> tuple[list[nn.Module], int]:
    """Build convolutions of a square image, with a ReLU after each, then flatten.

    Args:
        channels: channels of the image.
        side: width and height of the image.
        convolutions: the layers.
        option: name of the option that lists the layers, for error messages.

    Returns:
        The modules, and the width of the flat result.
    """
    layers: list[nn.Module] = []
    for width, kernel, stride in convolutions:
        if kernel > side:
            raise InputError(
                f"{option}: expected a kernel no wider than its input, {side}, "
                f"got {[width, kernel, stride]}"
            )
        kind = TileConv2d if kernel == stride else nn.Conv2d
        layers += [kind(channels, width, kernel, stride), nn.ReLU()]
        channels, side = width, (side - kernel) // stride + 1
    return [*layers, nn.Flatten()], channels * side * side


def _score_bias(
    padding: Mask, counts: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias of each patch's scores, and the slots without a patch.

    A patch that occurs c times has c times the weight in a softmax: log c is added.
    """
    ignore, bias = padding, None
    if counts is not None:
        ignore = counts == 0 if padding is None else (counts == 0) | padding
        bias = counts.clamp(min=1).to(dtype).log()
    if ignore is None:
        return bias, None
    if bias is None:
        bias = torch.zeros_like(ignore, dtype=dtype)
    # Finite, so that an empty set gives no NaN, with room for the score added to it.
    return bias.masked_fill(ignore, torch.finfo(dtype).min / 2), ignore


def unique_patches(features: Tensor, padding: Mask = None) -> tuple[Tensor, Tensor]:
    """Find and count the distinct patches of each image.

    They are in the order of a hash, whatever the order of the image's patches. A hash
    collision is rare, and may list a patch more than once, with counts that add up.

    Args:
        features: ``(*B, N, F)`` uint8.
        padding: ``(*B, N)`` bool, True = ignore; None where nothing is padded.

    Returns:
        Patches ``(*B, K, F)`` uint8 and their counts ``(*B, K)`` int64, 0 in unused
        slots. K is the largest number of distinct patches in an image, at least 1.

    Raises:
        InputError: no images, no patches or empty ones.
    """
    if not features.numel():
        raise InputError(
            "features: expected one patch or more of each of one or more images, got "
            f"{tuple(features.shape)}"
        )
    *batch, num_tokens, width = features.shape
    words = _to_words(features.reshape(-1, num_tokens, width))
    hidden = None if padding is None else padding.reshape(-1, num_tokens)
    order, groups, size = _group_equal(words, hidden)
    # All patches of a group are equal, so any of them may represent it: scatter keeps
    # the one that it writes last. The extra column at the end collects padding.
    representatives = torch.zeros_like(order[:, :1]).repeat(1, size + 1)
    counts = representatives.scatter_add(1, groups, torch.ones_like(groups))[:, :size]
    representatives = representatives.scatter(1, groups, order)[:, :size]
    patches = _gather_rows(words, representatives).view(torch.uint8)[..., :width]
    return patches.reshape(*batch, size, width), counts.reshape(*batch, size)


def _group_equal(words: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Return indices that sort patches by hash, the groups of sorted patches, and K.

    Groups of equal patches are numbered from 0 to K - 1; padding has the number K.
    """
    # Sort by a hash of the content, so that equal patches are neighbors.
    labels = _hash(words)
    if hidden is not None:  # sort padding to the end
        labels = labels.masked_fill(hidden, torch.iinfo(torch.int64).max)
    order = labels.argsort(-1)
    ordered = _gather_rows(words, order)
    # A group starts where a patch differs from its predecessor.
    starts = torch.ones_like(order, dtype=torch.bool)
    starts[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).any(-1)
    if hidden is not None:
        hidden = hidden.gather(-1, order)
        starts[:, 1:] |= hidden[:, :-1]
        starts &= ~hidden
    # Number the groups from 0 on; padding gets the last number.
    groups = starts.cumsum(-1) - 1
    # A batch of padding alone has no group.
    size = max(int(groups[:, -1].max()) + 1, 1)
    if hidden is not None:
        groups = groups.masked_fill(hidden, size)
    return order, groups, size


def _gather_rows(words: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``(B, N, W)`` at ``index (B, K)``, ``(B, K, W)``."""
    count, num_tokens, _ = words.shape
    first = num_tokens * torch.arange(count, device=words.device)
    flat = words.flatten(0, 1).index_select(0, (index + first[:, None]).flatten())
    return flat.unflatten(0, index.shape)


def _to_words(features: Tensor) -> Tensor:
    """View bytes ``(B, N, F)`` as int64 ``(B, N, W)``, zero-padded."""
    features = pad(features, (0, -features.shape[-1] % WORD)).contiguous()
    # A view as int64 has to start at a multiple of a word.
    if features.storage_offset() % WORD:
        features = features.clone()
    return features.view(torch.int64)


def _hash(words: Tensor) -> Tensor:
    """Hash each patch, ``(B, N)`` int64."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, words.shape[-1:], generator=generator)
    # Products with odd factors are different for different words.
    mixed = words * (2 * factors.to(words.device) + 1)
    # A product's low bits do not depend on the factor's high bits: mix them in.
    mixed ^= mixed >> 32
    return (mixed * GOLDEN).sum(-1)
