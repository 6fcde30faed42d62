"""Vision: a permutation-invariant sensory layer on image patches, and a CNN."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.functional import linear_layers, mlp, tanh
from marl_pool.networks.set_network import seeded
from marl_pool.options.types import Size, SizeOrZero
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Unroll
from marl_pool.policies.base import State
from marl_pool.policies.sensory import SensorAgent, make_sensor
from marl_pool.pooling.base import Memory
from marl_pool.pooling.vision_neuron import (
    Convolution,
    VisionNeuronPooling,
    make_convolutions,
    unique_patches,
)
from marl_pool.tokens import Mask, Tokens, TokenSpec
from marl_pool.utils.errors import InputError

NEURONS: Mapping[str, Any] = {"name": "vision_neuron", "num_codes": 400}
"""Default sensory layer, as in the published Pong agent."""


class Vision(SensorAgent):
    """A sensory layer on image patches, whose codes form an image for a CNN.

    The sensory layer turns the patches, in any order, into M codes of fixed order
    (`VisionNeuronPooling`). They are arranged in rows on a √M × √M grid; then follow a
    ReLU, convolutions without padding, and linear layers, with ReLU between them. With
    ``memory`` (not in the paper) the last hidden layer h and the previous action a are
    the input of a GRU, ``s_t = GRU([h_t, a_{t-1}], s_{t-1})``, and the output is
    ``readout([h_t, s_t])``, so that earlier observations can distinguish patches that
    look alike.

    Source: "The Sensory Neuron as a Transformer" (Tang and Ha, 2021,
    https://arxiv.org/abs/2109.02869), section 4.3, and the published code: the defaults
    are its Pong agent, 1 687 726 parameters with six actions. Differences: the initial
    weights; and the previous action at an episode's start is zero, which cancels in the
    codes, as every previous action does (`VisionNeuronPooling`).

    Args:
        pooling: ``{"name": "vision_neuron", **options}``, with M a square number.
        convolutions: (channels, kernel, stride) of each.
        hidden: widths of the linear layers after the convolutions.
        memory: units of the GRU; 0 for an agent without memory.
        readout: widths of hidden layers with ReLU between the GRU and the output.
        seed: of the initial weights.
    """

    sensor: VisionNeuronPooling

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        pooling: Mapping[str, Any] = NEURONS,
        convolutions: Sequence[Convolution] = ((64, 4, 2), (64, 3, 1)),
        hidden: Sequence[Size] = (512,),
        memory: SizeOrZero = 0,
        readout: Sequence[Size] = (),
        seed: int | None = None,
    ) -> None:
        # Record the options; those at their defaults are left out.
        optional = {"memory": memory, "readout": list(readout)}
        super().__init__(
            spec,
            action_space,
            pooling=dict(pooling),
            convolutions=[list(convolution) for convolution in convolutions],
            hidden=list(hidden),
            **{name: value for name, value in optional.items() if value},
        )
        # Memory and readout follow the hidden layer.
        if memory and not hidden:
            raise InputError(
                f"policy.memory: expected 0 without a hidden layer, got {memory}"
            )
        if readout and not memory:
            raise InputError(
                f"policy.readout: expected [] without a memory, got {list(readout)}"
            )
        self.units = memory
        # The sensory layer turns patches into codes, which form a square picture.
        sensor = make_sensor(pooling, spec, self.actions, seed)
        if not isinstance(sensor, VisionNeuronPooling):
            raise InputError(
                "policy.pooling: expected vision_neuron or a class derived from it, "
                f"got {pooling['name']}"
            )
        self.sensor, self.side = sensor, math.isqrt(sensor.num_codes)
        if self.side**2 != sensor.num_codes:
            raise InputError(
                "policy.pooling.num_codes: expected a square number, "
                f"got {sensor.num_codes}"
            )
        with seeded(seed, "agent"):
            layers, width = make_convolutions(
                sensor.value_dim, self.side, convolutions, "policy.convolutions"
            )
            widths = [width, *hidden, self.actions.dim]
            self.body = nn.Sequential(*layers, *mlp(widths, nn.ReLU))
            self.hidden_dim = widths[-2]
            if memory:
                # A recurrent policy replaces the last layer by a GRU and its readout.
                width, self.body = hidden[-1], nn.Sequential(*list(self.body)[:-1])
                self.on_input = nn.Linear(width + self.actions.dim, 3 * memory)
                self.on_state = nn.Linear(memory, 3 * memory)
                widths = [width + memory, *readout]
                self.readout = nn.Sequential(*linear_layers(widths, nn.ReLU))
                self.output = nn.Linear(widths[-1], self.actions.dim)
                self.hidden_dim = widths[-1]

    @override
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        # The state of the GRU, if there is one.
        return self.on_state.weight.new_zeros(batch, self.units) if self.units else ()

    @override
    def unroll(
        self,
        features: Tensor,
        padding: Mask,
        prev_action: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Compute the outputs of sequences; see `Agent.unroll`.

        Features in bytes are reduced to distinct patches with their counts, which is
        exact and several times as fast. A caller that passes the same images often can
        do that once, and pass ``counts``, ``(B, T, N)``: the multiplicity of each
        patch, 0 for an empty slot, or None for 1 each (bytes are counted here).
        """
        outputs, _, memory = self.unroll_hidden(
            features, padding, prev_action, memory, counts
        )
        return outputs, memory

    @override
    def unroll_hidden(
        self,
        features: Tensor,
        padding: Mask,
        prev_action: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Memory]:
        # Sense: codes (B, T, M·V) of the patches, whatever their order.
        codes, _ = self.codes(features, padding, prev_action, (), counts)
        grid = codes.relu().view(-1, self.side, self.side, self.sensor.value_dim)
        # A view with the channels last in memory, the faster layout on a CPU.
        picture = grid.permute(0, 3, 1, 2)
        # Act: CNN and linear layers, with the GRU before the last ones.
        if not self.units:
            hidden = self.body[:-1](picture).unflatten(0, codes.shape[:-1])
            outputs = self.body[-1](hidden)
        else:
            hidden = self.body(picture).unflatten(0, codes.shape[:-1])
            states = self._gru_states(hidden, prev_action, memory)
            memory = states[:, -1]
            hidden = self.readout(torch.cat([hidden, states.to(hidden.dtype)], -1))
            outputs = self.output(hidden)
        return self.bound(outputs), hidden, memory

    def _gru_states(self, hidden: Tensor, prev_action: Tensor, state: Tensor) -> Tensor:
        """Return the GRU's states ``(B, T, units)``; `vmap` rejects torch's own GRU."""
        inputs = self.on_input(torch.cat([hidden, prev_action.to(hidden.dtype)], -1))
        states = []
        for from_input in inputs.unbind(1):
            from_state = self.on_state(state.to(from_input.dtype))
            update, reset, new = from_input.chunk(3, -1)
            by_update, by_reset, by_new = from_state.chunk(3, -1)
            candidate = tanh(new + (reset + by_reset).sigmoid() * by_new)
            kept = (update + by_update).sigmoid()
            state = torch.lerp(candidate.to(state.dtype), state, kept.to(state.dtype))
            states.append(state)
        return torch.stack(states, 1)

    @override
    def codes(
        self,
        features: Tensor,
        padding: Mask,
        prev_action: Tensor,
        memory: Memory,
        counts: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        if counts is None and features.dtype == torch.uint8:
            features, counts = unique_patches(features, padding)
            padding = None
        # If a CNN embeds the patches, cast to autocast's dtype once, not twice.
        device, dtype = features.device.type, None
        if self.sensor.embedding is not None and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        x = self.scale_features(features, padding, dtype)
        return self.sensor.unroll(x, padding, prev_action, memory, counts)

    @override
    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        base_unroll: Callable[..., tuple[Tensor, Memory]] = super().members(parameters)

        def unroll(
            features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
        ) -> tuple[Tensor, Memory]:
            if features.dtype != torch.uint8:
                return base_unroll(features, padding, prev_action, memory)
            # The number of distinct patches is a shape, which `vmap` must not compute.
            patches, counts = unique_patches(features, padding)
            return base_unroll(patches, None, prev_action, memory, counts)

        return unroll

    @override
    def attention_weights(self, tokens: Tokens, state: State = ()) -> Tensor:
        """Return the weights of the patches, ``(*B, 1, N)``, averaged over codes."""
        return super().attention_weights(tokens, state).mean(-2, keepdim=True)
