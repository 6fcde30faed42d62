"""AttentionNeuron on patches of pictures: keys from what moved, values from pixels."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from marl_pool.pooling.attention_neuron import sinusoids
from marl_pool.pooling.memory import Memory, MemoryPooling
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveFloat, PositiveInt

Convolution = tuple[PositiveInt, PositiveInt, PositiveInt]
"""Channels, width of the square kernel, and stride."""
GREY = 0.34
"""Pong's background, in [0, 1]."""


class VisionNeuronPooling(MemoryPooling):
    r"""M codes, each a mean over the patches with weights from what moved in them.

    .. math::
        m = \mathrm{LN}\left(\mathrm{relu}\left(\mathrm{softmax}\left(
            Q W_q\,(K W_k)^\top / \sqrt{d}\right) V W_v\right)\right)

    A patch comes with its F frames, oldest first, one after the other. Its key is the
    differences of consecutive frames (the newer minus the older) and the previous
    action; its value is the frames, each normalized by itself. Q is a table of
    sinusoids that is not learned. The result is the M codes one after the other.

    No patch knows its place, so the order can be any, and change. What all patches
    share cancels in the softmax: the previous action and the keys' bias change nothing
    here, and are there because published weights have them.

    With ``patch_convolutions`` the patches are larger pictures, square ones. A small
    CNN that all of them share reads the frames, as channels, and then a linear layer
    and a ReLU make an embedding of ``patch_dim`` numbers, of which both key and value
    are made. That is ours, not the paper's. Its first weights are four times torch's
    own, with biases by which an even grey of ``GREY`` says nothing: what is seen is a
    small difference from the background.

    A picture holds few patches that differ. `marl_pool.pooling.multiset` finds them;
    with their counts the result is that of all patches, several times as fast.

    Source: Tang and Ha (2021), equation 2, sections 3.2 and 4.3, and the published
    code, which is ``affine`` for Pong and not for CarRacing. The initial weights are
    ours: torch's own, but those from differences of frames ``key_gain`` times and those
    of the queries ``query_gain`` times as large. Differences of frames are mostly
    zero, and without the gains all weights stay the same: a cloned Pong player then
    says what is most frequent, and nothing else. As a sensory layer it stands directly
    on the observation: ``encoder=identity``.

    Args:
        dim: D, the width of the vectors: F frames of D / F pixels.
        num_codes: M, the number of codes.
        value_dim: V, the width of a code.
        message_dim: d, the width of projected queries and keys.
        position_dim: width of the table of sinusoids.
        frames: F, at least 2, a divisor of D.
        scale: divide the scores by √d.
        affine: give both normalizations weights and biases.
        key_gain: of the initial weights from differences of frames to keys.
        query_gain: of the initial weights of the queries.
        patch_convolutions: (channels, kernel, stride) of the CNN on a patch, with ReLU
            after each; none for the published linear layers.
        patch_dim: width of the embedding that it makes.
        action_dim: A, the width of the previous action.

    Raises:
        InputError: frames that do not divide D, or only one; a CNN on patches that are
            not square, or a convolution that is wider than what it reads.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: int,
        *,
        num_codes: PositiveInt = 16,
        value_dim: PositiveInt = 32,
        message_dim: PositiveInt = 32,
        position_dim: PositiveInt = 8,
        frames: PositiveInt = 4,
        scale: bool = True,
        affine: bool = True,
        key_gain: PositiveFloat = 15.0,
        query_gain: PositiveFloat = 5.0,
        patch_convolutions: Sequence[Convolution] = (),
        patch_dim: PositiveInt = 128,
        action_dim: int = 0,
    ) -> None:
        super().__init__(dim, action_dim=action_dim, dim_out=num_codes * value_dim)
        if frames < 2 or dim % frames:
            raise InputError(
                f"pooling.frames: expected a divisor of the width {dim}, at least 2, "
                f"got {frames}"
            )
        self.num_codes, self.value_dim, self.frames = num_codes, value_dim, frames
        self.scale = message_dim**-0.5 if scale else 1.0
        pixels = dim // frames
        seen = (patch_dim, patch_dim) if patch_convolutions else (dim - pixels, dim)
        # In the order of the published weights.
        self.query = nn.Linear(position_dim, message_dim)
        self.key = nn.Linear(seen[0] + action_dim, message_dim)
        self.value = nn.Linear(seen[1], value_dim)
        if not patch_convolutions:
            self.frame_norm = nn.LayerNorm(pixels, elementwise_affine=affine)
        self.code_norm = nn.LayerNorm(value_dim, elementwise_affine=affine)
        self.side, self.embedding = math.isqrt(pixels), None
        if patch_convolutions:
            if self.side**2 != pixels:
                raise InputError(
                    "pooling.patch_convolutions: expected square patches, got "
                    f"{pixels} pixels"
                )
            layers, width = make_convolutions(
                frames, self.side, patch_convolutions, "pooling.patch_convolutions"
            )
            self.embedding = nn.Sequential(
                *layers, nn.Linear(width, patch_dim), nn.ReLU()
            )
        with torch.no_grad():
            self.query.weight.mul_(query_gain)
            self.key.weight[:, : seen[0]].mul_(key_gain)
            if self.embedding is not None:
                first = self.embedding[0]
                assert isinstance(first, nn.Conv2d)
                assert first.bias is not None
                first.weight.mul_(4)
                first.bias.sub_(GREY * first.weight.sum((1, 2, 3)))
        self.table: Tensor
        table = sinusoids(num_codes, position_dim)
        self.register_buffer("table", table, persistent=False)

    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """None: the frames in a patch are all that it knows of the past."""
        return ()

    def unroll(
        self,
        x: Tensor,
        padding: Tensor | None,
        actions: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Read T sets of ``(B, T, N, D)``; see `MemoryPooling.unroll`.

        Args:
            x: patches, bytes divided by 255.
            padding: ``(B, T, N)`` bool, True = ignore; None where nothing is padded.
            actions: ``(B, T, A)``, the actions before each set.
            memory: ().
            counts: ``(B, T, N)``, how many times each patch is there, 0 for a slot
                without one; None for once.

        Returns:
            ``(B, T, M·V)``, and ().
        """
        bias, hidden = _presence(padding, counts, x.dtype)
        moved, shown = self._read(x)
        values = self.value(shown)
        if hidden is not None:  # so that a set without any patch is zero
            values = values.masked_fill(hidden[..., None], 0.0)
        codes = self._attend(moved, actions, bias).transpose(-1, -2) @ values
        return self.code_norm(codes.relu()).flatten(-2), memory

    def attention_weights(
        self,
        x: Tensor,
        padding: Tensor | None,
        actions: Tensor,
        memory: Memory,
    ) -> Tensor:
        """The weights of the last of T sets, ``(B, M, N)``."""
        bias, hidden = _presence(padding, None, x.dtype)
        weights = self._attend(self._read(x)[0], actions, bias)
        if hidden is not None:
            weights = weights.masked_fill(hidden[..., None], 0.0)
        return weights[:, -1].transpose(-1, -2)

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What keys and what values are made of, ``(B, T, N, …)`` each."""
        frames = x.unflatten(-1, (self.frames, -1))
        if self.embedding is None:
            moved = frames[..., 1:, :] - frames[..., :-1, :]
            return moved.flatten(-2), self.frame_norm(frames).flatten(-2)
        pictures = frames.flatten(0, -3).unflatten(-1, (self.side, self.side))
        if not isinstance(self.embedding[0], Tiles):
            # Channels last in memory: the faster layout on a CPU.
            pictures = pictures.contiguous(memory_format=torch.channels_last)
        embedded = self.embedding(pictures).unflatten(0, frames.shape[:-2])
        return embedded, embedded

    def _attend(self, moved: Tensor, actions: Tensor, bias: Tensor | None) -> Tensor:
        """Weights ``(B, T, N, M)`` of what keys are made of, ``(B, T, N, …)``."""
        on_moved, on_action = self.key.weight.split(
            [moved.shape[-1], self.action_dim], dim=1
        )
        shared = linear(actions.to(moved.dtype), on_action, self.key.bias)
        keys = linear(moved, on_moved) + shared[..., None, :]
        queries = self.scale * self.query(self.table)
        rows = keys.flatten(0, -2)
        if bias is None:
            scores = rows @ queries.mT
        else:  # one pass over the scores, which are many
            scores = torch.addmm(bias.flatten()[:, None], rows, queries.mT)
        return scores.unflatten(0, keys.shape[:-1]).softmax(-2)


class Tiles(nn.Conv2d):
    """A convolution whose stride is its kernel, which is a product of matrices.

    With few channels that is twice as fast on a CPU, and the result is the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Conv2d`; channels of the result are last in memory."""
        (size, _), (high, wide) = self.kernel_size, input.shape[-2:]
        rows, columns = high // size, wide // size
        whole = input[..., : rows * size, : columns * size]
        tiles = whole.unflatten(-1, (columns, size)).unflatten(-3, (rows, size))
        tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return linear(tiles, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def make_convolutions(
    channels: int, side: int, convolutions: Sequence[Convolution], option: str
) -> tuple[list[nn.Module], int]:
    """Convolutions of a square picture, a ReLU after each, made flat, and its width.

    Raises:
        InputError: a convolution that is wider than what it reads, or a size below 1.
    """
    layers: list[nn.Module] = []
    for convolution in convolutions:
        width, kernel, stride = convolution
        if min(convolution) < 1 or kernel > side:
            raise InputError(
                f"{option}: expected numbers of at least 1 and a kernel no wider than "
                f"the {side} that it reads, got {list(convolution)}"
            )
        kind = Tiles if kernel == stride else nn.Conv2d
        layers += [kind(channels, width, kernel, stride), nn.ReLU()]
        channels, side = width, (side - kernel) // stride + 1
    return [*layers, nn.Flatten()], channels * side * side


def _presence(
    padding: Tensor | None, counts: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """What is added to each patch's scores, and where there is none."""
    hidden, bias = padding, None
    if counts is not None:
        absent = counts == 0
        hidden = absent if padding is None else absent | padding
        bias = counts.clamp(min=1).to(dtype).log()
    if hidden is None:
        return bias, None
    if bias is None:
        bias = torch.zeros_like(hidden, dtype=dtype)
    # Finite, and with room for a score: a set without any patch has no NaN.
    return bias.masked_fill(hidden, torch.finfo(dtype).min / 2), hidden
