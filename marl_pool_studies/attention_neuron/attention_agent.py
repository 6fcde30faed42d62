"""AttentionAgent: act only on the places of the few most attended tokens."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, pad
from typing_extensions import override

from marl_pool.kernels.functional import masked_softmax, mlp, tanh
from marl_pool.networks.set_network import seeded
from marl_pool.options.types import NonNegativeFloat, PositiveFloat, Size
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent
from marl_pool.policies.base import State
from marl_pool.policies.sensory import make_sensor
from marl_pool.pooling.base import Memory
from marl_pool.tokens import Mask, Tokens, TokenSpec
from marl_pool.utils.errors import InputError


class AttentionAgent(Agent):
    r"""Hard attention: choose k vectors, discard their content, act on their places.

    The importance of a vector is the attention that all vectors pay to it,

    .. math::
        S = \mathrm{softmax}\left((X W_q + b_q)(X W_k + b_k)^\top / \sqrt{d}\right),
        \qquad \text{importance}_j = \sum_i S_{ij}

    The places (row and column) of the ``top_k`` most important vectors, the most
    important one first, are the input of an LSTM; a linear layer on its output computes
    the action. No gradient passes the choice, so this agent is evolved.

    Without ``pooling`` the vectors are the tokens, in their order in rows of a square
    grid, so a shuffle destroys the result. With ``pooling`` they are the M codes of a
    sensory layer, on a square grid of codes, and the order of the tokens does not
    matter. ``mixing`` smooths the codes over time by a learned gate; the vectors are

    .. math::
        y_t = (1 - \alpha_t)\, m_t + \alpha_t\, y_{t-1}, \qquad
        \alpha_t = \mathrm{sigmoid}(g(h_{t-1}, a_{t-1})), \quad \alpha_0 = 0

    with the codes m, the LSTM's output h, the previous action a, and a network g of one
    tanh layer as wide as the LSTM.

    Source: "Neuroevolution of Self-Interpretable Agents" (Tang, Nguyen and Ha, 2020,
    https://arxiv.org/abs/2003.08165); behind a sensory layer in "The Sensory Neuron as
    a Transformer" (Tang and Ha, 2021, https://arxiv.org/abs/2109.02869), section 4.4,
    and its published code, from which the gate is taken. There patches of 7 pixels,
    every 4 of 96, have the place of their central pixel (``first_place=0.03125``,
    ``place_step=0.0416667``), and the scores behind the sensory layer are not scaled.

    Difference: importance is rounded to 14 bits, and the first of equal vectors is
    chosen. Equal vectors are common (grass), and rounding errors, which depend on the
    order of the tokens, would otherwise decide between them.

    Args:
        pooling: ``{"name": …, **options}`` of a sensory layer, a recurrent pooling head
            with codes; None to attend to the tokens.
        message_dim: d, the width of queries and keys.
        scale: divide the scores by √d.
        top_k: number of chosen vectors.
        units: of the LSTM.
        first_place: coordinate of the grid's upper row and of its left column.
        place_step: distance between neighboring rows or columns, or None for 1 over
            their number.
        mixing: whether to smooth the codes over time, which requires ``pooling``.
        seed: of the initial weights.
    """

    recurrent = True

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        pooling: Mapping[str, Any] | None = None,
        message_dim: Size = 4,
        scale: bool = True,
        top_k: Size = 10,
        units: Size = 16,
        first_place: NonNegativeFloat = 0.0,
        place_step: PositiveFloat | None = None,
        mixing: bool = False,
        seed: int | None = None,
    ) -> None:
        # Record the options, from which a saved policy is built.
        options = {} if pooling is None else {"pooling": dict(pooling)}
        super().__init__(
            spec,
            action_space,
            **options,
            message_dim=message_dim,
            scale=scale,
            top_k=top_k,
            units=units,
            first_place=first_place,
            place_step=place_step,
            mixing=mixing,
        )
        # Without a sensory layer the agent attends to the tokens themselves.
        self.sensor = None
        count, width = spec.num_tokens, spec.num_features
        if pooling is not None:
            self.sensor = make_sensor(pooling, spec, self.actions, seed)
            count = getattr(self.sensor, "num_codes", 0)
            if not count:
                raise InputError(
                    "policy.pooling: expected a head with codes, such as "
                    f"attention_neuron, got {pooling['name']!r}"
                )
            width = self.sensor.dim_out // count
        if top_k > count:
            raise InputError(f"policy.top_k: expected 1 to {count}, got {top_k}")
        if mixing and pooling is None:
            raise InputError(
                "policy.mixing: expected false without policy.pooling, got true"
            )
        # Vectors lie on a square grid, which gives each one a place.
        self.num_vectors, self.top_k, self.units = count, top_k, units
        self.scale_factor = message_dim**-0.5 if scale else 1.0
        self.side = math.isqrt(count - 1) + 1
        self.first_place = first_place
        self.place_step = 1 / self.side if place_step is None else place_step
        with seeded(seed, "agent"):
            self.query = nn.Linear(width, message_dim)
            self.key = nn.Linear(width, message_dim)
            self.cell = nn.LSTMCell(2 * top_k, units)
            self.output = nn.Linear(units, self.actions.dim)
            # Mixing carries codes over from the previous step.
            self.gate: nn.Sequential | None = None
            if mixing:
                self.gate = mlp([units + self.actions.dim, units, 1], nn.Tanh)

    @override
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        zeros = self.output.weight.new_zeros(batch, self.units)
        memory: dict[str, Memory] = {"hidden": zeros, "cell": zeros, "sensor": ()}
        if self.sensor is not None:
            memory["sensor"] = self.sensor.initial_memory(batch, num_tokens)
        if self.gate is not None:  # ``begun`` is 0 until there are codes, then 1
            codes = zeros.new_zeros(batch, self.num_vectors, self.query.in_features)
            memory |= {"codes": codes, "begun": zeros.new_zeros(batch, 1)}
        return memory

    @override
    def unroll(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        outputs = []
        for t in range(features.shape[1]):
            step = slice(t, t + 1)
            mask = None if padding is None else padding[:, step]
            choice = self._choose(features[:, step], mask, prev_action[:, step], memory)
            hidden, cell = self._lstm_step(self._places(choice), memory)
            memory = {**choice.memory, "hidden": hidden, "cell": cell}
            outputs.append(self.bound(self.output(hidden)))
        return torch.stack(outputs, 1), memory

    @override
    def latent(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        if self.sensor is None:
            return None
        features, padding, prev_action, memory = self.unroll_arguments(tokens, state)
        x = self.scale_features(features, padding)
        codes, _ = self.sensor.unroll(x, padding, prev_action, memory["sensor"])
        return codes[:, 0].unflatten(0, tokens.batch_shape)

    @override
    def attention_weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """Return the importance of the chosen tokens, summing to 1, ``(*B, 1, N)``.

        Behind a sensory layer codes are chosen, and the sensory layer's weights of the
        tokens are averaged over them.
        """
        arguments = self.unroll_arguments(tokens, state)
        choice = self._choose(*arguments)
        top_importance = choice.importance.gather(-1, choice.indices)
        top_importance = normalize(top_importance, p=1.0, dim=-1)
        if self.sensor is None:
            weights = torch.zeros_like(choice.importance)
            weights = weights.scatter(-1, choice.indices, top_importance)[:, None]
            weights = weights[..., : tokens.num_tokens]
        else:
            features, padding, prev_action, memory = arguments
            x = self.scale_features(features, padding)
            # Average the weights that the chosen codes give the tokens.
            codes = self.sensor.attention_weights(
                x, padding, prev_action, memory["sensor"]
            )
            index = choice.indices[..., None].expand(-1, -1, codes.shape[-1])
            weights = top_importance[:, None] @ codes.gather(1, index)
        return weights.unflatten(0, tokens.batch_shape)

    def _choose(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> "HardAttention":
        """Choose vectors of one set per row; arguments as of `unroll` with T = 1."""
        # Vectors x (B, V, D): the tokens, or the codes of the sensory layer.
        x, hidden = self.scale_features(features, padding), None
        if self.sensor is None:
            x, hidden = self._fill(x[:, 0], padding)
        else:
            codes, state = self.sensor.unroll(x, padding, prev_action, memory["sensor"])
            x = codes[:, 0].unflatten(-1, (-1, self.query.in_features))
            memory = {**memory, "sensor": state}
        if self.gate is not None:
            x, memory = self._mix(x, prev_action[:, 0], memory)
        # The top k; padded vectors come last.
        importance = self._importance(x, hidden)
        ranked = importance if hidden is None else importance.masked_fill(hidden, -1.0)
        # Equal importance is common, and only a stable sort keeps the order.
        order = _rounded(ranked).sort(stable=True, dim=-1, descending=True).indices
        indices = order[..., : self.top_k]
        missing = None if hidden is None else hidden.gather(-1, indices)
        return HardAttention(importance, indices, missing, memory)

    def _fill(self, x: Tensor, padding: Mask) -> tuple[Tensor, Tensor | None]:
        """Pad tokens to the number in training, so that the whole grid exists."""
        missing = self.missing_tokens(x.shape[1])
        hidden = None if padding is None else padding[:, 0]
        if not missing:
            return x, hidden
        if hidden is None:
            hidden = torch.zeros_like(x[..., 0], dtype=torch.bool)
        return pad(x, (0, 0, 0, missing)), pad(hidden, (0, missing), value=True)

    def _mix(
        self, x: Tensor, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Mix the codes ``(B, M, D)`` with the codes of the previous step."""
        assert self.gate is not None
        inputs = torch.cat([memory["hidden"], prev_action.to(x.dtype)], dim=-1)
        alpha = memory["begun"] * self.gate(inputs).sigmoid()
        x = torch.lerp(x, memory["codes"], alpha[..., None])
        return x, {**memory, "codes": x, "begun": torch.ones_like(memory["begun"])}

    def _importance(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """Return the importance ``(B, V)`` of vectors; 0 under padding."""
        scores = (self.query(x) * self.scale_factor) @ self.key(x).mT
        if hidden is None:
            return scores.softmax(-1).sum(-2)
        weights = masked_softmax(scores, hidden[:, None])
        return weights.masked_fill(hidden[..., None], 0.0).sum(-2)

    def _places(self, choice: "HardAttention") -> Tensor:
        """Return rows and columns in turn, ``(B, 2k)``; 0 for missing vectors."""
        indices = choice.indices
        cells = torch.stack([indices // self.side, indices % self.side], dim=-1)
        places = self.first_place + self.place_step * cells.to(choice.importance.dtype)
        if choice.missing is not None:
            places = places.masked_fill(choice.missing[..., None], 0.0)
        return places.flatten(-2)

    def _lstm_step(self, places: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Return the LSTM's output and cell; `vmap` rejects torch's own LSTMCell."""
        cell = self.cell
        gates = linear(places, cell.weight_ih, cell.bias_ih)
        gates = gates + linear(memory["hidden"], cell.weight_hh, cell.bias_hh)
        let_in, forget, update, let_out = gates.chunk(4, dim=-1)
        state = forget.sigmoid() * memory["cell"] + let_in.sigmoid() * tanh(update)
        return let_out.sigmoid() * tanh(state), state


class HardAttention(NamedTuple):
    """Choice of k among V vectors in each row."""

    importance: Tensor
    """``(B, V)``, 0 under padding."""
    indices: Tensor
    """``(B, k)`` int64 indices, the most important first."""
    missing: Tensor | None
    """``(B, k)`` bool, padding chosen where fewer than k vectors exist, or None
    if all exist."""
    memory: Memory
    """Memory of the agent, with sensory layer and gate updated."""


def _rounded(x: Tensor, bits: int = 14) -> Tensor:
    """Round to ``bits`` significant bits."""
    # Source: Dekker (1971), A floating-point technique for extending precision.
    dropped = -round(math.log2(torch.finfo(x.dtype).eps)) + 1 - bits
    larger = x * (2.0**dropped + 1)
    return larger - (larger - x)
