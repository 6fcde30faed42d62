"""AttentionAgent: where the few most attended patches are is all that it acts on."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from marl_pool.kernels.batched import tanh
from marl_pool.networks import seeded
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent
from marl_pool.policies.base import State
from marl_pool.policies.feed_forward import make_layers
from marl_pool.policies.sensory import make_sensor
from marl_pool.pooling.memory import Memory
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.types import NonNegativeFloat, PositiveFloat, PositiveInt


class AttentionAgent(Agent):
    r"""Hard attention: choose k vectors, forget what they hold, act on their places.

    A vector's importance is what all of them together attend to it,

    .. math::
        S = \mathrm{softmax}\left((X W_q + b_q)(X W_k + b_k)^\top / \sqrt{d}\right),
        \qquad \text{importance}_j = \sum_i S_{ij}

    The places of the ``top_k`` most important ones, row and column of each, the most
    important one first, are what an LSTM reads; its output makes the action. No
    gradient passes the choice: this agent is evolved.

    Alone, the vectors are the tokens, and a token's place is that in the order of the
    tokens, taken as rows of a square grid, from the upper left. So it depends on the
    order, and a shuffle must break it. With ``pooling`` they are the M codes of a
    sensory layer, the places are those in a square grid of codes, and the order does
    not matter.

    ``mixing`` holds the codes fast as a gate says. What is attended to is

    .. math::
        y_t = (1 - \alpha_t)\, m_t + \alpha_t\, y_{t-1}, \qquad
        \alpha_t = \mathrm{sigmoid}(g(h_{t-1}, a_{t-1})), \quad \alpha_0 = 0

    with the codes m, the LSTM's output h, the action a before, and g of one tanh layer
    as wide as the LSTM.

    Source: Tang, Nguyen and Ha (2020), Neuroevolution of self-interpretable agents; as
    a baseline and behind a sensory layer in Tang and Ha (2021), section 4.4, and its
    published code. The paper does not name the gate. There, alone, patches of 7 pixels
    every 4 of 96 have the place of their central pixel, ``first_place=0.03125,
    place_step=0.0416667``; behind the sensory layer the scores are not scaled.

    Where we differ: importance is rounded to 14 bits, and of equals the first is
    chosen. Vectors that are alike are common (grass; and where nothing moves, as at an
    episode's start, all codes of a sensory layer are), and otherwise rounding errors
    would decide, which are others in another order or a larger batch.

    Args:
        spec: of the tokens.
        action_space: Discrete, or a bounded Box of one dimension.
        pooling: ``{"name": …, **options}`` of a sensory layer, a head with a memory
            that makes ``num_codes`` codes; None for none.
        message_dim: d, the width of queries and keys.
        scale: divide the scores by √d.
        top_k: how many are chosen.
        units: of the LSTM.
        first_place: the row of the grid's upper row and the column of its left one.
        place_step: from one row or column to the next; None for 1 over their number.
        mixing: whether the codes are held fast, which takes ``pooling``.
        seed: of the initial weights.

    Raises:
        InputError: an unknown name or option, a head without codes or without a memory,
            fewer vectors than ``top_k``, ``mixing`` without ``pooling``, or an action
            space of another kind.
    """

    remembers = True

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        pooling: Mapping[str, Any] | None = None,
        message_dim: PositiveInt = 4,
        scale: bool = True,
        top_k: PositiveInt = 10,
        units: PositiveInt = 16,
        first_place: NonNegativeFloat = 0.0,
        place_step: PositiveFloat | None = None,
        mixing: bool = False,
        seed: int | None = None,
    ) -> None:
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
        self.sensor = None
        count, width = spec.num_tokens, spec.num_features
        if pooling is not None:
            self.sensor = make_sensor(pooling, spec, self.actions, seed)
            count = getattr(self.sensor, "num_codes", 0)
            if not count:
                raise InputError(
                    "policy.pooling: expected a head that makes codes, as "
                    f"attention_neuron, got {pooling['name']!r}"
                )
            width = self.sensor.dim_out // count
        _check(top_k, count, mixing, pooling)
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
            self.gate: nn.Sequential | None = None
            if mixing:
                self.gate = make_layers(units + self.actions.dim, [units], 1)

    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """The LSTM's; the sensory layer's; the codes, and whether there are any yet."""
        zeros = self.output.weight.new_zeros(batch, self.units)
        memory: dict[str, Memory] = {"hidden": zeros, "cell": zeros, "sensor": ()}
        if self.sensor is not None:
            memory["sensor"] = self.sensor.initial_memory(batch, num_tokens)
        if self.gate is not None:
            codes = zeros.new_zeros(batch, self.num_vectors, self.query.in_features)
            memory |= {"codes": codes, "begun": zeros.new_zeros(batch, 1)}
        return memory

    def unroll(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """Answer sequences; see `Agent.unroll`."""
        outputs = []
        for t in range(features.shape[1]):
            now = None if padding is None else padding[:, t : t + 1]
            looked = self._look(
                features[:, t : t + 1], now, prev_action[:, t : t + 1], memory
            )
            hidden, cell = self._remember(self._places(looked), memory)
            memory = {**looked.memory, "hidden": hidden, "cell": cell}
            answer = self.output(hidden)
            outputs.append(answer if self.actions.discrete else tanh(answer))
        return torch.stack(outputs, 1), memory

    def latent(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """The sensory layer's codes, ``(*B, M·D)``; see `Policy.latent`."""
        if self.sensor is None:
            return None
        features, padding, prev_action, memory = self.arguments(tokens, state)
        x = self.readings(features, padding)
        codes, _ = self.sensor.unroll(x, padding, prev_action, memory["sensor"])
        return codes[:, 0].unflatten(0, tokens.batch_shape)

    def weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """The shares of the patches that were chosen, ``(*B, 1, N)``.

        They are as important as they are large, and sum to one. Behind a sensory layer
        codes are chosen, and a patch has its share in those, as the layer sees it now.
        """
        arguments = self.arguments(tokens, state)
        looked = self._look(*arguments)
        chosen = looked.importance.gather(-1, looked.chosen)
        least = torch.finfo(chosen.dtype).tiny
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=least)
        if self.sensor is None:
            shares = torch.zeros_like(looked.importance)
            shares = shares.scatter(-1, looked.chosen, chosen)[:, None]
            shares = shares[..., : tokens.num_tokens]
        else:
            features, padding, prev_action, memory = arguments
            x = self.readings(features, padding)
            codes = self.sensor.attention_weights(
                x, padding, prev_action, memory["sensor"]
            )
            index = looked.chosen[..., None].expand(-1, -1, codes.shape[-1])
            shares = chosen[:, None] @ codes.gather(1, index)
        return shares.unflatten(0, tokens.batch_shape)

    def _look(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> "Looked":
        """See one set a row and choose; the arguments have T = 1."""
        x, hidden = self.readings(features, padding), None
        if self.sensor is None:
            x, hidden = self._fill(x[:, 0], padding)
        else:
            codes, sensed = self.sensor.unroll(
                x, padding, prev_action, memory["sensor"]
            )
            x = codes[:, 0].unflatten(-1, (-1, self.query.in_features))
            memory = {**memory, "sensor": sensed}
        if self.gate is not None:
            x, memory = self._hold(x, prev_action[:, 0], memory)
        importance = self._importance(x, hidden)
        ranked = importance
        if hidden is not None:
            ranked = ranked.masked_fill(hidden, -1.0)
        # Equal ones are common, and only a stable sort keeps their order.
        ranked = _rounded(ranked)
        order = torch.sort(ranked, stable=True, dim=-1, descending=True).indices
        chosen = order[..., : self.top_k]
        missing = None if hidden is None else hidden.gather(-1, chosen)
        return Looked(importance, chosen, missing, memory)

    def _fill(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens in all places of the grid that there were in training, and padding."""
        missing = self.spec.num_tokens - x.shape[1]
        hidden = None if padding is None else padding[:, 0]
        if missing < 0:
            raise UnfitTokensError(
                f"AttentionAgent: expected at most {self.spec.num_tokens} tokens, "
                f"got {x.shape[1]}"
            )
        if missing:
            if hidden is None:
                hidden = torch.zeros_like(x[..., 0], dtype=torch.bool)
            x, hidden = (
                pad(x, (0, 0, 0, missing)),
                pad(hidden, (0, missing), value=True),
            )
        return x, hidden

    def _hold(
        self, x: Tensor, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Mix the codes ``(B, M, D)`` with those of the step before."""
        assert self.gate is not None
        told = torch.cat([memory["hidden"], prev_action.to(x.dtype)], dim=-1)
        share = memory["begun"] * self.gate(told).sigmoid()
        x = torch.lerp(x, memory["codes"], share[..., None])
        return x, {**memory, "codes": x, "begun": torch.ones_like(memory["begun"])}

    def _importance(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """``(B, V)`` of V vectors; 0 under padding."""
        scores = (self.query(x) * self.scale_factor) @ self.key(x).mT
        if hidden is not None:
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(hidden[:, None], lowest)
        shares = scores.softmax(-1)
        if hidden is not None:
            gone = hidden[:, None] | hidden[..., None]
            shares = shares.masked_fill(gone, 0.0)
        return shares.sum(-2)

    def _places(self, looked: "Looked") -> Tensor:
        """Rows and columns in turn, ``(B, 2k)``; 0 where nothing was left to choose."""
        chosen = looked.chosen
        rows = torch.stack([chosen // self.side, chosen % self.side], dim=-1)
        places = self.first_place + self.place_step * rows.to(looked.importance.dtype)
        if looked.missing is not None:
            places = places.masked_fill(looked.missing[..., None], 0.0)
        return places.flatten(-2)

    def _remember(self, places: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """The LSTM's next output and state; torch's own cell cannot be vectorised."""
        cell = self.cell
        opened = linear(places, cell.weight_ih, cell.bias_ih)
        opened = opened + linear(memory["hidden"], cell.weight_hh, cell.bias_hh)
        let_in, forget, update, let_out = opened.chunk(4, dim=-1)
        state = forget.sigmoid() * memory["cell"] + let_in.sigmoid() * tanh(update)
        return let_out.sigmoid() * tanh(state), state


class Looked(NamedTuple):
    """What one look at V vectors a row chose."""

    importance: Tensor
    """``(B, V)``, 0 under padding."""
    chosen: Tensor
    """``(B, k)`` int64, the most important first."""
    missing: Tensor | None
    """``(B, k)`` bool: padding, since there were fewer than k; None for none."""
    memory: Memory
    """With what the sensory layer and the gate keep."""


def _rounded(x: Tensor, bits: int = 14) -> Tensor:
    """The numbers with so many significant bits."""
    # Source: Dekker (1971), A floating-point technique for extending precision.
    dropped = -round(math.log2(torch.finfo(x.dtype).eps)) + 1 - bits
    larger = x * (2.0**dropped + 1)
    return larger - (larger - x)


def _check(
    top_k: int, count: int, mixing: bool, pooling: Mapping[str, Any] | None
) -> None:
    if not 1 <= top_k <= count:
        raise InputError(f"policy.top_k: expected 1 to {count}, got {top_k}")
    if mixing and pooling is None:
        raise InputError(
            "policy.mixing: expected false where there is no pooling, got true"
        )
