"""TokenPolicy: a SetNetwork with an action head and a value head."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from marl_pool.kernels.activations import Activation, make_activation
from marl_pool.networks import Part, SetNetwork, init_weights, seeded
from marl_pool.policies.actions import ActionSpec, log_prob, mode, sample
from marl_pool.policies.base import Decision, SpecifiedPolicy, State
from marl_pool.pooling.memory import Memory
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream
from marl_pool.utils.types import NonNegativeInt, PositiveFloat, PositiveInt


def mlp(
    dim_in: int, hidden: Sequence[int], dim_out: int, activation: Activation
) -> nn.Sequential:
    """Linear layers with an activation function between them."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Linear(dim_in, width))
        layers.append(make_activation(activation, "policy.activation"))
        dim_in = width
    return nn.Sequential(*layers, nn.Linear(dim_in, dim_out))


class TokenPolicy(SpecifiedPolicy):
    """A policy on a set of tokens.

    Source: the AdaPool paper, section 4.3 and Tables 10, 12 and 14: two heads of
    three linear layers on one pooled vector. The paper names no activation function
    for them; its code has GELU between the layers of both heads and after the
    projection of the tokens, as here. A continuous action is a diagonal Gaussian whose
    log-std depends on the state and is clamped to [-1, 1], as in that code. Its unit
    interval [-1, 1] is scaled to the bounds of the action space, where the world clips.

    With a pooling head that remembers (`marl_pool.pooling.memory`) the state holds the
    head's memory and the previous action: clipped to [-1, 1], or one-hot, and zeros
    at an episode's start. Any other policy is memoryless.

    Args:
        spec: of the tokens.
        action_space: Discrete, or a bounded Box of one dimension.
        encoder: ``{"name": …, **options}``.
        pooling: ``{"name": …, **options}``.
        type_embedding: width of the learned type embedding; 0 for none.
        head_hidden: widths of the hidden layers of both heads.
        activation: between the layers of both heads, gelu or relu.
        input_activation: applied to the projected tokens, before the encoder; None
            for none.
        trunk: one network for both heads ("shared") or one for each ("separate").
        init_std: standard deviation of the initial weights.
        log_std_range: bounds of the Gaussian's log-std.
        dropout: probability in the encoder while training, in [0, 1).
        seed: of the initial weights; at one seed all parts but the pooling head are
            the same for every pooling head.

    Raises:
        InputError: an unknown name, a wrong option, an action space of another kind.
    """

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        encoder: Part,
        pooling: Part,
        type_embedding: NonNegativeInt = 4,
        head_hidden: Sequence[PositiveInt] = (32, 32),
        activation: Activation = "gelu",
        input_activation: Activation | None = "gelu",
        trunk: Literal["shared", "separate"] = "shared",
        init_std: PositiveFloat = 0.2,
        log_std_range: tuple[float, float] = (-1.0, 1.0),
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> None:
        network: dict[str, Any] = {
            "encoder": dict(encoder),
            "pooling": dict(pooling),
            "type_embedding": type_embedding,
            "input_activation": input_activation,
            "init_std": init_std,
        }
        super().__init__(
            spec,
            action_space,
            **network,
            head_hidden=list(head_hidden),
            activation=activation,
            trunk=trunk,
            log_std_range=list(log_std_range),
        )
        if trunk not in ("shared", "separate"):
            raise InputError(f"policy.trunk: expected shared or separate, got {trunk}")
        if len(log_std_range) != 2 or not log_std_range[0] < log_std_range[1]:
            raise InputError(
                "policy.log_std_range: expected two increasing numbers, "
                f"got {log_std_range}"
            )
        if any(width < 1 for width in head_hidden):
            raise InputError(
                "policy.head_hidden: expected widths of at least 1, "
                f"got {list(head_hidden)}"
            )
        make_activation(activation, "policy.activation")  # also without hidden layers
        self.noise_size = self.actions.noise_size
        self.log_std_range = tuple(log_std_range)
        dim_action = self.actions.dim
        self.network = SetNetwork(
            spec, **network, action_dim=dim_action, dropout=dropout, seed=seed
        )
        self.value_network: SetNetwork | None = None
        if trunk == "separate":
            with seeded(seed, "value trunk"):
                self.value_network = SetNetwork(
                    spec, **network, action_dim=dim_action, dropout=dropout
                )
        dim = self.network.dim_out
        with seeded(seed, "action"):
            self.action_head = mlp(
                dim, head_hidden, self.actions.num_logits, activation
            )
            init_weights(self.action_head, init_std)
        with seeded(seed, "value"):
            self.value_head = mlp(dim, head_hidden, 1, activation)
            init_weights(self.value_head, init_std)

    @property
    def remembers(self) -> bool:
        """Whether its decisions depend on the state."""
        return self.network.memory_head is not None

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """``{"action", "memories"}`` of zeros, or () if it does not remember."""
        if not self.remembers:
            return ()
        batch = num_envs * num_agents
        memories = tuple(
            head.initial_memory(batch, num_tokens)
            for network in self._networks
            if (head := network.memory_head) is not None
        )
        memories = tree_map(
            lambda part: part.unflatten(0, (num_envs, num_agents)), memories
        )
        action = self.low.new_zeros(num_envs, num_agents, self.actions.dim)
        return {"action": action, "memories": memories}

    def forward(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Logits ``(*B, L)`` and values ``(*B,)`` of tokens that are seen first."""
        pooled, below_value, _ = self._look(tokens, ())
        logits, values = self.logits(pooled), self.values(below_value)
        return logits.unflatten(0, tokens.batch_shape), values.view(tokens.batch_shape)

    def pool(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The vectors ``(B, D)`` below the action head and below the value head."""
        pooled = self.network(tokens)
        if self.value_network is None:
            return pooled, pooled
        return pooled, self.value_network(tokens)

    def unroll(
        self, tokens: Tokens, prev_action: Tensor, memories: tuple[Memory, ...]
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        """Pool sequences, if it remembers.

        Args:
            tokens: of batch ``(B, T)``.
            prev_action: ``(B, T, A)``, the action before each set, as in the state.
            memories: before the first of them, ``(B, …)``, as in the state.

        Returns:
            What `pool` returns, ``(B, T, D)``, and the memories after the last one.
        """
        unrolled = [
            network.unroll(tokens, prev_action, memory)
            for network, memory in zip(self._networks, memories, strict=True)
        ]
        return unrolled[0][0], unrolled[-1][0], tuple(end for _, end in unrolled)

    @property
    def _networks(self) -> list[SetNetwork]:
        both = [self.network, self.value_network]
        return [network for network in both if network is not None]

    def values(self, pooled: Tensor) -> Tensor:
        """Values ``(B,)`` of what is below the value head."""
        return self.value_head(pooled)[..., 0]

    def logits(self, pooled: Tensor) -> Tensor:
        """Parameters of the action distribution, log-std clamped."""
        logits = self.action_head(pooled)
        if self.actions.discrete:
            return logits
        mean, log_std = logits.chunk(2, dim=-1)
        return torch.cat([mean, log_std.clamp(*self.log_std_range)], dim=-1)

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Decide for every row; see `Policy.act`."""
        pooled, below_value, memories = self._look(tokens, state)
        logits = self.logits(pooled).unflatten(0, tokens.batch_shape)
        values = self.values(below_value).view(tokens.batch_shape)
        if explore:
            action = sample(self.actions, logits, self.noise(tokens, generator))
        else:
            action = mode(self.actions, logits)
        if self.remembers:
            vectors = self.actions.to_vectors(action).to(logits.dtype)
            state = {"action": vectors, "memories": memories}
        return Decision(
            action, log_prob(self.actions, logits, action), values, logits, state
        )

    def value(self, tokens: Tokens, state: State = ()) -> Tensor:
        """Values ``(*B,)`` of what is seen; see `Policy.value`."""
        _, below_value, _ = self._look(tokens, state)
        return self.values(below_value).view(tokens.batch_shape)

    def _look(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        """What `pool` returns for all rows of the batch, and the new memories."""
        flat, shape = tokens.flatten_batch(), tokens.batch_shape
        if not self.remembers:
            return *self.pool(flat), ()
        sequences = flat.map(lambda part: part[:, None])
        prev_action, memories = self._flat_state(state, tokens)
        pooled, below_value, memories = self.unroll(sequences, prev_action, memories)
        memories = tree_map(lambda part: part.unflatten(0, shape), memories)
        return pooled[:, 0], below_value[:, 0], memories

    def _flat_state(
        self, state: State, tokens: Tokens
    ) -> tuple[Tensor, tuple[Memory, ...]]:
        """The state as arguments of `unroll` for one step."""
        shape = tokens.batch_shape
        if not state:
            state = self.initial_state(1, shape.numel(), tokens.num_tokens)
            shape = torch.Size([1, shape.numel()])
        flat = tree_map(lambda part: part.flatten(0, len(shape) - 1), state)
        return flat["action"][:, None], flat["memories"]

    def latent(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """What a head that remembers makes of what is seen, ``(*B, C)``, or None."""
        if not self.remembers:
            return None
        pooled, _, _ = self._look(tokens, state)
        return pooled.unflatten(0, tokens.batch_shape)

    def weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """The pooling head's weights, ``(*B, heads, N)``, or None if it has none."""
        flat, weights = tokens.flatten_batch(), None
        if self.remembers:
            sequences = flat.map(lambda part: part[:, None])
            prev_action, memories = self._flat_state(state, tokens)
            weights = self.network.attention_weights(
                sequences, prev_action, memories[0]
            )
        else:
            weights = self.network.weights(flat)
        return None if weights is None else weights.unflatten(0, tokens.batch_shape)
