"""TokenPolicy: a set network with an action head and a value head."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.functional import ACTIVATIONS, Activation, mlp
from marl_pool.networks.set_network import SetNetwork, init_weights, seeded
from marl_pool.options.construction import with_name
from marl_pool.options.types import (
    Part,
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
from marl_pool.policies.base import Decision, SequencePolicy, State
from marl_pool.policies.selection import SelectedTokens
from marl_pool.pooling.base import Memory
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream

ENCODER = {"name": "transformer"}
"""Default encoder."""
HEAD = {"name": "ada"}
"""Default pooling head."""


class PointerInput(NamedTuple):
    """Input of an action head that selects tokens."""

    pooled: Tensor
    """``(*B, D)``."""
    encoded: Tensor
    """``(*B, N, E)``, the encoder's vectors."""


ActionInput = Tensor | PointerInput
"""Input of the action head: the pooled vector, and the tokens if it selects them."""


class TokenPolicy(SequencePolicy):
    r"""An actor-critic on a set of tokens, trained by PPO or cloned.

    Tokens are embedded, encoded and pooled to one vector (`SetNetwork`), which two
    small networks read. The *action head* gives the logits of a categorical
    distribution for each choice, and for a Box the mean and log-std of a diagonal
    Gaussian, where [-1, 1] is scaled to the bounds of the action space. The *value
    head* gives the estimated return. Several choices and a Box are independent, given
    the observation.

    With ``action="select"`` the action head points at tokens. It gives a logit for each
    fixed option of a `Selection`, and a query q; the logit of the token in slot i is

    .. math:: l_i = q \cdot (W x_i + b) / \sqrt{E}

    with the encoder's vector :math:`x_i` of width E. Tokens that are absent or of other
    types, and options that the action mask forbids, have a probability of exactly 0.
    Permuting the tokens permutes the options, and the policy acts on any number of
    them, if the encoder is equivariant and the pooling head invariant. Source: pointer
    networks (Vinyals, Fortunato and Jaitly, 2015, https://arxiv.org/abs/1506.03134,
    section 2.3), whose score is additive, :math:`v \cdot \tanh(W_1 x_i + W_2 q)`; here
    it is a scaled dot product.

    With a recurrent pooling head (`MemoryPooling`) the policy has its memory; otherwise
    it is memoryless.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215),
    section 4.3 and Tables 10, 12 and 14: two heads of three linear layers on one pooled
    vector. GELU in the heads and after the projection of the tokens, and a log-std that
    depends on the observation, clamped to [-1, 1], are from the published code. A test
    checks that with equal weights, logits and values are within 1e-12 of its results.

    Example:
        >>> policy = make_policy(spec, action_space, pooling="ada")
        >>> decision = policy.act(tokens, explore=True)
        >>> policy.scale(decision.action)

    Args:
        encoder: a name, or ``{"name": …, **options}``.
        pooling: a name, or ``{"name": …, **options}``.
        action: what the action head computes: "head", a logit for each option from the
            pooled vector alone; "select", for an environment whose actions are a
            `Selection`, a score of each token that can be selected.
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

    Raises:
        InputError: an unknown name or option; ``action="select"`` where no action
            selects tokens, with a recurrent head, or with hidden tokens.
    """

    lowest_logits: Tensor
    """Lower limits of the logits, ``(L,)``; ``highest_logits``: the upper. Both are
    empty without a Box."""
    highest_logits: Tensor
    network_options: dict[str, Any]
    """Options of the set network, which a saved policy records."""

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        encoder: Part = ENCODER,
        pooling: Part = HEAD,
        action: Literal["head", "select"] = "head",
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
        network_options: dict[str, Any] = {
            "encoder": with_name(encoder),
            "pooling": with_name(pooling),
            "type_embedding": type_embedding,
            "input_activation": input_activation,
            "init_std": init_std,
        }
        super().__init__(
            spec,
            action_space,
            **network_options,
            head_hidden=list(head_hidden),
            activation=activation,
            trunk=trunk,
            log_std_range=list(log_std_range),
            # Omitted from the files of policies that select nothing.
            **({"action": action} if action != "head" else {}),
        )
        if not log_std_range[0] < log_std_range[1]:
            raise InputError(
                "policy.log_std_range: expected two increasing numbers, "
                f"got {log_std_range}"
            )
        self.noise_size = self.actions.noise_size
        self.activation = activation
        self.network_options = network_options
        # One set network, or one for each head.
        network = network_options | {
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
        dim, num_outputs = self.network.dim_out, self.actions.num_logits
        self.key: nn.Linear | None = None
        self.selection: SelectedTokens | None = None
        if action == "select":
            self._validate_selection(token_dropout)
            self.selection = SelectedTokens(spec, self.actions)
            key_dim = self.network.pooling.dim
            num_outputs = self.actions.num_fixed + key_dim
            with seeded(seed, "key"):
                self.key = nn.Linear(key_dim, key_dim)
                init_weights(self.key, init_std)
        with seeded(seed, "action"):
            widths = [dim, *head_hidden, num_outputs]
            self.action_head = mlp(widths, ACTIVATIONS[activation])
            init_weights(self.action_head, init_std)
        with seeded(seed, "value"):
            self.value_head = mlp([dim, *head_hidden, 1], ACTIVATIONS[activation])
            init_weights(self.value_head, init_std)
        # Choices and means have no limits. The weights above bound their number.
        count = 0 if self.actions.integral else self.actions.num_options
        for name, unlimited, log_std_limit in (
            ("lowest_logits", -torch.inf, log_std_range[0]),
            ("highest_logits", torch.inf, log_std_range[1]),
        ):
            limits = [
                self.low.new_full((count,), unlimited),
                torch.full_like(self.low, unlimited),
                torch.full_like(self.low, log_std_limit),
            ]
            self.register_buffer(name, torch.cat(limits), persistent=False)

    def _validate_selection(self, token_dropout: float) -> None:
        """Raise InputError where tokens cannot be selected."""
        reason = ""
        if not self.actions.selects:
            reason = (
                "where the environment's actions are no Selection of tokens, but "
                f"{self.actions}"
            )
        elif self.recurrent:
            head = type(self.network.pooling).__name__
            reason = f"with the recurrent pooling head {head}"
        elif token_dropout:
            reason = f"with ppo.token_dropout={token_dropout}"
        if reason:
            raise InputError(f"policy.action: expected head {reason}, got select")

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
        return self._masked_outputs(tokens, ())[:2]

    def pool(self, tokens: Tokens) -> tuple[ActionInput, Tensor]:
        """Return the inputs of both heads for tokens of batch ``(B,)``.

        The value head's is ``(B, D)``, and so is the action head's, unless it selects
        tokens.
        """
        for_action = self.action_input(tokens)
        if self.value_network is not None:
            return for_action, self.value_network(tokens)
        return for_action, pooled_of(for_action)

    def action_input(self, tokens: Tokens) -> ActionInput:
        """Return the input of the action head for tokens of batch ``(B,)``."""
        if self.key is None:
            return self.network(tokens)
        return PointerInput(*self.network.pool_and_encode(tokens))

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

    @override
    def unroll_logits(
        self, tokens: Tokens, prev_action: Tensor, memory: tuple[Memory, ...]
    ) -> tuple[Tensor, tuple[Memory, ...]]:
        if self.recurrent:
            for_action, _, memory = self.unroll(tokens, prev_action, memory)
            return self.logits(for_action), memory
        logits = self.logits(self.action_input(tokens.flatten_batch()))
        return logits.unflatten(0, tokens.batch_shape), memory

    @property
    def networks(self) -> list[SetNetwork]:
        """The network, and the value head's if it has a separate one."""
        networks = [self.network, self.value_network]
        return [network for network in networks if network is not None]

    def values(self, pooled: Tensor) -> Tensor:
        """Return values ``(*B,)`` from the inputs ``(*B, D)`` of the value head."""
        return self.value_head(pooled)[..., 0]

    def logits(self, for_action: ActionInput) -> Tensor:
        """Return logits ``(*B, L)``, not masked, from the input of the action head."""
        logits = self.action_head(pooled_of(for_action))
        if isinstance(for_action, PointerInput):
            assert self.key is not None
            fixed = self.actions.num_fixed
            query = logits[..., fixed:, None] * self.key.out_features**-0.5
            scores = (self.key(for_action.encoded) @ query)[..., 0]
            return torch.cat([logits[..., :fixed], scores], -1)
        if self.actions.integral:
            return logits
        # One operation, several times as fast as clamping the log-stds alone.
        return logits.clamp(self.lowest_logits, self.highest_logits)

    @override
    def options(self, tokens: Tokens) -> Tensor | None:
        if self.selection is None:
            return super().options(tokens)
        return self.selection.options(tokens)

    @override
    def mismatch(self, spec: TokenSpec, action_space: spaces.Space | ActionSpec) -> str:
        actions = ActionSpec.of(action_space)
        if self.key is not None and actions.selects:
            # It selects among any number of tokens.
            actions = replace(actions, n=actions.num_fixed + self.spec.num_tokens)
        return super().mismatch(spec, actions)

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        logits, values, memory = self._masked_outputs(tokens, state)
        if explore:
            noise = self.noise(tokens, generator)
            action = sample(self.actions, logits, noise, self.options(tokens))
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
        return pooled_of(pooled).unflatten(0, tokens.batch_shape)

    @override
    def attention_weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        if not self.recurrent:
            weights = self.network.weights(tokens.flatten_batch())
        else:
            sequences, prev_action, memory = self.single_step(tokens, state)
            weights = self.network.attention_weights(sequences, prev_action, memory[0])
        return None if weights is None else weights.unflatten(0, tokens.batch_shape)

    def _masked_outputs(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        """Return logits ``(*B, L)``, masked, values ``(*B,)``, and the new memory."""
        logits, values, memory = self.head_outputs(tokens, state)
        batch = tokens.batch_shape
        logits = mask_logits(logits.unflatten(0, batch), self.options(tokens))
        return logits, values.view(batch), memory

    def head_outputs(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        """Return logits ``(rows, L)``, not masked, values ``(rows,)``, and the memory.

        ``rows`` are all entries of the batch ``(*B,)``, in order.
        """
        for_action, for_value, memory = self._pool_step(tokens, state)
        return self.logits(for_action), self.values(for_value), memory

    def _pool_step(
        self, tokens: Tokens, state: State
    ) -> tuple[ActionInput, Tensor, tuple[Memory, ...]]:
        """Return the inputs of both heads, of batch ``(rows,)``, and the new memory."""
        if not self.recurrent:
            return *self.pool(tokens.flatten_batch()), ()
        for_action, for_value, memory = self.unroll(*self.single_step(tokens, state))
        return for_action[:, 0], for_value[:, 0], memory


def pooled_of(for_action: ActionInput) -> Tensor:
    """Return the pooled vector ``(*B, D)`` in the input of an action head."""
    return for_action.pooled if isinstance(for_action, PointerInput) else for_action
