"""TokenPolicy: a set network with an action head and a value head."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.kernels.functional import ACTIVATIONS, Activation, mlp
from marl_pool.networks.set_network import SetNetwork, init_weights, seeded
from marl_pool.options.types import (
    NamedOptions,
    PositiveFloat,
    Probability,
    Size,
    SizeOrZero,
)
from marl_pool.policies.actions import (
    ActionSpec,
    log_prob,
    mask_logits,
    mode,
    sample,
)
from marl_pool.policies.base import Decision, SpecifiedPolicy, State
from marl_pool.pooling.base import Memory
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream


class TokenPolicy(SpecifiedPolicy):
    """An actor-critic on a set of tokens, trained by PPO.

    Tokens are embedded, encoded and pooled to one vector (`SetNetwork`), which two
    small networks read: the *action head*, logits of a categorical distribution for
    each choice, and for a Box mean and log-std of a diagonal Gaussian, where [-1, 1] is
    scaled to the bounds of the action space; the *value head*, the estimated return.
    Several choices and a Box are independent, given the observation.

    With a recurrent pooling head (`MemoryPooling`) the policy has its memory; otherwise
    it is memoryless.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215),
    section 4.3 and Tables 10, 12 and 14: two heads of three linear layers on one pooled
    vector. GELU in the heads and after the projection of the tokens, and a log-std that
    depends on the observation, clamped to [-1, 1], are from the published code. With
    equal weights a test holds logits and values to the published ones within 1e-12.

    Example:
        >>> policy = make_policy(spec, action_space, pooling="ada")
        >>> decision = policy.act(tokens, explore=True)
        >>> policy.scale(decision.action)

    Args:
        encoder: ``{"name": …, **options}``.
        pooling: ``{"name": …, **options}``.
        type_embedding: width of the learned type embedding; 0 for none.
        head_hidden: widths of the hidden layers of both heads.
        activation: between the layers of both heads, gelu or relu.
        input_activation: applied to the projected tokens; None for none.
        trunk: one set network for both heads, "shared", or one for each, "separate".
        init_std: standard deviation of the initial weights.
        log_std_range: bounds of the Gaussian's log-std.
        dropout: probability in the encoder while training, in [0, 1).
        token_dropout: probability, while training, that a token is hidden, in [0, 1);
            never the agent's own. Neither probability is saved with the policy.
        seed: of the initial weights; policies with the same seed and different pooling
            heads have the same weights in all other parts.
    """

    lowest_logits: Tensor
    """Lower limits of the logits, ``(L,)``; ``highest_logits``: the upper. Both are
    empty without a Box."""
    highest_logits: Tensor

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        encoder: NamedOptions,
        pooling: NamedOptions,
        type_embedding: SizeOrZero = 4,
        head_hidden: Sequence[Size] = (32, 32),
        activation: Activation = "gelu",
        input_activation: Activation | None = "gelu",
        trunk: Literal["shared", "separate"] = "shared",
        init_std: PositiveFloat = 0.2,
        log_std_range: tuple[float, float] = (-1.0, 1.0),
        dropout: Probability = 0.0,
        token_dropout: Probability = 0.0,
        seed: int | None = None,
    ) -> None:
        # Options of the set network, which a saved policy records.
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
        if not log_std_range[0] < log_std_range[1]:
            raise InputError(
                "policy.log_std_range: expected two increasing numbers, "
                f"got {log_std_range}"
            )
        self.noise_size = self.actions.noise_size
        self.activation = activation
        # Choices and means have no limits.
        count = 0 if self.actions.integral else self.actions.num_options
        bounds = zip((-torch.inf, torch.inf), log_std_range, strict=True)
        names = ("lowest_logits", "highest_logits")
        for name, (mean, log_std) in zip(names, bounds, strict=True):
            parts = [torch.full_like(self.low, limit) for limit in (mean, log_std)]
            limits = torch.cat([self.low.new_full((count,), mean), *parts])
            self.register_buffer(name, limits, persistent=False)
        # One set network, or one for each head.
        network |= {
            "action_dim": self.actions.dim,
            "dropout": dropout,
            "token_dropout": token_dropout,
        }
        self.network = SetNetwork(spec, **network, seed=seed)
        self.value_network: SetNetwork | None = None
        if trunk == "separate":
            with seeded(seed, "value trunk"):
                self.value_network = SetNetwork(spec, **network)
        # The heads, with separate random numbers.
        dim = self.network.dim_out
        with seeded(seed, "action"):
            widths = [dim, *head_hidden, self.actions.num_logits]
            self.action_head = mlp(widths, ACTIVATIONS[activation])
            init_weights(self.action_head, init_std)
        with seeded(seed, "value"):
            self.value_head = mlp([dim, *head_hidden, 1], ACTIVATIONS[activation])
            init_weights(self.value_head, init_std)

    @property
    @override
    def recurrent(self) -> bool:
        return self.network.memory_head is not None

    @override
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        return tuple(
            head.initial_memory(batch, num_tokens)
            for network in self.networks
            if (head := network.memory_head) is not None
        )

    def forward(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return logits ``(*B, L)`` and values ``(*B,)`` at an episode's start."""
        return self._outputs(tokens, ())[:2]

    def pool(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the inputs ``(B, D)`` of both heads for tokens of batch ``(B,)``."""
        pooled = self.network(tokens)
        if self.value_network is None:
            return pooled, pooled
        return pooled, self.value_network(tokens)

    def unroll(
        self, tokens: Tokens, prev_action: Tensor, memory: tuple[Memory, ...]
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        """Return the inputs ``(B, T, D)`` of both heads, and the memory at the end.

        Args:
            tokens: of batch ``(B, T)``.
            prev_action: ``(B, T, A)``, the action before each set, as in the state.
            memory: ``(B, …)`` before the first set, as in the state.
        """
        unrolled = [
            network.unroll(tokens, prev_action, network_memory)
            for network, network_memory in zip(self.networks, memory, strict=True)
        ]
        return unrolled[0][0], unrolled[-1][0], tuple(end for _, end in unrolled)

    @property
    def networks(self) -> list[SetNetwork]:
        """The network, and that of the value head if it has a separate one."""
        networks = [self.network, self.value_network]
        return [network for network in networks if network is not None]

    def values(self, pooled: Tensor) -> Tensor:
        """Return values ``(*B,)`` from the inputs ``(*B, D)`` of the value head."""
        return self.value_head(pooled)[..., 0]

    def logits(self, pooled: Tensor) -> Tensor:
        """Return logits ``(*B, L)`` from the inputs ``(*B, D)`` of the action head."""
        logits = self.action_head(pooled)
        if self.actions.integral:
            return logits
        # One operation, several times as fast as to clamp the log-stds apart.
        return logits.clamp(self.lowest_logits, self.highest_logits)

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        logits, values, memory = self._outputs(tokens, state)
        if explore:
            noise = self.noise(tokens, generator)
            action = sample(self.actions, logits, noise, tokens.action_mask)
        else:
            action = mode(self.actions, logits)
        next_state = self.next_state(action, memory, logits.dtype)
        return Decision(
            action, log_prob(self.actions, logits, action), values, logits, next_state
        )

    @override
    def value(self, tokens: Tokens, state: State = ()) -> Tensor:
        _, for_value, _ = self._pool_step(tokens, state)
        return self.values(for_value).view(tokens.batch_shape)

    @override
    def latent(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        if not self.recurrent:
            return None
        pooled, _, _ = self._pool_step(tokens, state)
        return pooled.unflatten(0, tokens.batch_shape)

    @override
    def attention_weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        if not self.recurrent:
            weights = self.network.weights(tokens.flatten_batch())
        else:
            sequences, prev_action, memory = self.single_step(tokens, state)
            weights = self.network.attention_weights(sequences, prev_action, memory[0])
        return None if weights is None else weights.unflatten(0, tokens.batch_shape)

    def _outputs(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        """Return logits ``(*B, L)``, masked, values ``(*B,)``, and the new memory."""
        logits, values, memory = self.outputs(tokens, state)
        batch = tokens.batch_shape
        logits = mask_logits(logits.unflatten(0, batch), tokens.action_mask)
        return logits, values.view(batch), memory

    def outputs(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        """Return logits ``(rows, L)``, values ``(rows,)``, and the new memory."""
        for_action, for_value, memory = self._pool_step(tokens, state)
        return self.logits(for_action), self.values(for_value), memory

    def _pool_step(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        """Return the inputs of both heads, ``(rows, D)``, and the new memory."""
        if not self.recurrent:
            return *self.pool(tokens.flatten_batch()), ()
        for_action, for_value, memory = self.unroll(*self.single_step(tokens, state))
        return for_action[:, 0], for_value[:, 0], memory
