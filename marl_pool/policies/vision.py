"""AttentionNeuron and a CNN: pictures that come as loose patches."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from marl_pool.kernels.batched import tanh
from marl_pool.networks import seeded
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent, Unroll
from marl_pool.policies.base import State
from marl_pool.policies.feed_forward import check_hidden
from marl_pool.policies.sensory import make_sensor
from marl_pool.pooling.memory import Memory
from marl_pool.pooling.multiset import unique_patches
from marl_pool.pooling.vision_neuron import (
    Convolution,
    VisionNeuronPooling,
    make_convolutions,
)
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import NonNegativeInt, PositiveInt

NEURONS: Mapping[str, Any] = {"name": "vision_neuron", "num_codes": 400}
"""The sensory layer of the published Pong player."""


class Vision(Agent):
    """Sensory neurons on patches, their codes a picture that a CNN reads.

    The codes are laid out in rows on a square; then come a ReLU, convolutions without
    a margin, and linear layers, with ReLU between them.

    A patch does not say where it is. With ``memory`` the answer is not made of what is
    seen now alone: the last hidden layer and the previous action go to a GRU, and that
    hidden layer and the GRU's state through the layers of ``readout`` to the answer.
    What has gone before then tells patches that look alike from each other. That is
    ours.

    Source: Tang and Ha (2021), section 4.3, and the published code: with 400 codes the
    defaults are its Pong player, 1 687 726 parameters with six actions. Where we
    differ: the initial weights (`VisionNeuronPooling`), and the action before an
    episode's first, which is none; the published player moves there. It cancels, as
    every previous action does (`VisionNeuronPooling`).

    Args:
        spec: of the tokens, patches of several frames.
        action_space: Discrete, or a bounded Box of one dimension; then there is a
            tanh on the outputs.
        pooling: ``{"name": "vision_neuron", **options}``, a square number of codes.
        convolutions: (channels, kernel, stride) of each.
        hidden: widths of the linear layers after them.
        memory: units of the GRU; 0 for none, and then nothing is remembered.
        readout: widths of linear layers with ReLU between the GRU and the answer; none
            for an answer that is linear in its state and the hidden layer under it.
        seed: of the initial weights.

    Raises:
        InputError: another layer, an unknown option, codes that make no square, a
            convolution that is wider than what it reads, a size below 1, a memory
            without a hidden layer, a readout without a memory, or an action space of
            another kind.
    """

    remembers = True

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        pooling: Mapping[str, Any] = NEURONS,
        convolutions: Sequence[Convolution] = ((64, 4, 2), (64, 3, 1)),
        hidden: Sequence[PositiveInt] = (512,),
        memory: NonNegativeInt = 0,
        readout: Sequence[PositiveInt] = (),
        seed: int | None = None,
    ) -> None:
        options: dict[str, Any] = {"memory": memory} if memory else {}
        if readout:
            options["readout"] = check_hidden(readout, "readout")
        super().__init__(
            spec,
            action_space,
            pooling=dict(pooling),
            convolutions=[list(convolution) for convolution in convolutions],
            hidden=check_hidden(hidden),
            **options,
        )
        if memory < 0 or (memory and not hidden):
            raise InputError(
                "policy.memory: expected 0, or above 0 with a hidden layer, "
                f"got {memory} with hidden {list(hidden)}"
            )
        if readout and not memory:
            raise InputError(
                f"policy.readout: expected [] without a memory, got {list(readout)}"
            )
        self.units = memory
        self.sensor = make_vision(pooling, spec, self.actions, seed)
        self.side = math.isqrt(self.sensor.num_codes)
        if self.side**2 != self.sensor.num_codes:
            raise InputError(
                "policy.pooling.num_codes: expected a square number, "
                f"got {self.sensor.num_codes}"
            )
        picture = (self.sensor.value_dim, self.side)
        with seeded(seed, "agent"):
            self.body = make_cnn(*picture, convolutions, hidden, self.actions.dim)
            self.hidden_dim = self.body[-1].in_features  # type: ignore[assignment]
            if memory:
                width, self.body = hidden[-1], nn.Sequential(*list(self.body)[:-1])
                self.on_input = nn.Linear(width + self.actions.dim, 3 * memory)
                self.on_state = nn.Linear(memory, 3 * memory)
                widths = [width + memory, *readout]
                self.readout = nn.Sequential(*relu_layers(widths))
                self.output = nn.Linear(widths[-1], self.actions.dim)
                self.hidden_dim = widths[-1]

    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """The GRU's state, ``(batch, memory)``; () if there is none."""
        return self.on_state.weight.new_zeros(batch, self.units) if self.units else ()

    def unroll(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Answer sequences; see `Agent.unroll`.

        Of bytes it takes the distinct patches, unless they are given: that is exact,
        and several times as fast. Who sees the same pictures often finds them once,
        with `marl_pool.pooling.multiset`.

        Args:
            features: ``(B, T, N, F)``.
            padding: ``(B, T, N)`` bool, True = ignore; None where nothing is padded.
            prev_action: ``(B, T, A)``, the action before each set.
            memory: of the GRU, from `initial_memory` or an earlier call; ().
            counts: ``(B, T, N)``, how many times each patch is there, 0 for a slot
                without one; None for once.

        Returns:
            ``(B, T, L)``, see `Agent.unroll`, and the memory.
        """
        outputs, _, memory = self.unroll_hidden(
            features, padding, prev_action, memory, counts
        )
        return outputs, memory

    def unroll_hidden(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Memory]:
        """Answer and show the last hidden layer; see `unroll` and `Agent`."""
        codes, _ = self.codes(features, padding, prev_action, (), counts)
        grid = codes.relu().view(-1, self.side, self.side, self.sensor.value_dim)
        # Channels are last in memory, and stay so: the faster layout on a CPU.
        picture = grid.permute(0, 3, 1, 2)
        if not self.units:
            hidden = self.body[:-1](picture).unflatten(0, codes.shape[:-1])
            outputs = self.body[-1](hidden)
        else:
            hidden = self.body(picture).unflatten(0, codes.shape[:-1])
            states = self._remember(hidden, prev_action, memory)
            memory = states[:, -1]
            hidden = self.readout(torch.cat([hidden, states.to(hidden.dtype)], -1))
            outputs = self.output(hidden)
        return outputs if self.actions.discrete else tanh(outputs), hidden, memory

    def _remember(self, seen: Tensor, prev_action: Tensor, state: Tensor) -> Tensor:
        """The GRU's states ``(B, T, units)``; torch's own cannot be vectorised."""
        entering = self.on_input(torch.cat([seen, prev_action.to(seen.dtype)], -1))
        states = []
        for entered in entering.unbind(1):
            kept = self.on_state(state.to(entered.dtype))
            update, reset, new = entered.chunk(3, -1)
            by_update, by_reset, by_new = kept.chunk(3, -1)
            candidate = tanh(new + (reset + by_reset).sigmoid() * by_new)
            share = (update + by_update).sigmoid()
            state = torch.lerp(candidate.to(state.dtype), state, share.to(state.dtype))
            states.append(state)
        return torch.stack(states, 1)

    def codes(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """What the sensory layer makes of sequences, ``(B, T, M·V)``; see `unroll`."""
        if counts is None and features.dtype == torch.uint8:
            features, counts = unique_patches(features, padding)
            padding = None
        x = self.readings(features, padding, self._precision(features))
        return self.sensor.unroll(x, padding, prev_action, memory, counts)

    def _precision(self, features: Tensor) -> torch.dtype | None:
        """What a CNN on patches would be given: to cast them twice takes long."""
        device = features.device.type
        if self.sensor.embedding is None or not torch.is_autocast_enabled(device):
            return None
        return torch.get_autocast_dtype(device)

    def forward(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Call `unroll`."""
        return self.unroll(features, padding, prev_action, memory, counts)

    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        """`unroll` for P members; see `Agent.members`."""
        each: Callable[..., tuple[Tensor, Memory]] = super().members(parameters)

        def unroll(
            features: Tensor,
            padding: Tensor | None,
            prev_action: Tensor,
            memory: Memory,
        ) -> tuple[Tensor, Memory]:
            if features.dtype != torch.uint8:
                return each(features, padding, prev_action, memory)
            # How many patches differ decides a shape, so it is found before `vmap`.
            patches, counts = unique_patches(features, padding)
            return each(patches, None, prev_action, memory, counts)

        return unroll

    def latent(self, tokens: Tokens, state: State = ()) -> Tensor:
        """The codes, ``(*B, M·V)``; see `Policy.latent`."""
        features, padding, prev_action, _ = self.arguments(tokens, state)
        codes, _ = self.codes(features, padding, prev_action, ())
        return codes[:, 0].unflatten(0, tokens.batch_shape)

    def weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """Each patch's share in the mean of the codes, ``(*B, 1, N)``."""
        features, padding, prev_action, _ = self.arguments(tokens, state)
        x = self.readings(features, padding)
        shares = self.sensor.attention_weights(x, padding, prev_action, ())
        return shares.mean(1, keepdim=True).unflatten(0, tokens.batch_shape)


def make_vision(
    pooling: Mapping[str, Any], spec: TokenSpec, actions: ActionSpec, seed: int | None
) -> VisionNeuronPooling:
    """Build a sensory layer on patches; see `make_sensor`.

    Raises:
        InputError: an unknown name or option, or another layer.
    """
    sensor = make_sensor(pooling, spec, actions, seed)
    if not isinstance(sensor, VisionNeuronPooling):
        raise InputError(
            "policy.pooling: expected vision_neuron or a class derived from it, "
            f"got {pooling['name']}"
        )
    return sensor


def make_cnn(
    channels: int,
    side: int,
    convolutions: Sequence[Convolution],
    hidden: Sequence[int],
    dim_out: int,
) -> nn.Sequential:
    """Convolutions of a square picture and linear layers, with ReLU between them.

    Raises:
        InputError: a convolution that is wider than what it reads, or a size below 1.
    """
    layers, width = make_convolutions(
        channels, side, convolutions, "policy.convolutions"
    )
    widths = [width, *hidden]
    return nn.Sequential(*layers, *relu_layers(widths), nn.Linear(widths[-1], dim_out))


def relu_layers(widths: Sequence[int]) -> list[nn.Module]:
    """Linear layers from each width to the next, a ReLU after each."""
    layers: list[nn.Module] = []
    for dim_from, dim_to in pairwise(widths):
        layers += [nn.Linear(dim_from, dim_to), nn.ReLU()]
    return layers
