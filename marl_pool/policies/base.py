"""Base classes of policies: one contract, recurrent or not."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.randomness import Stream

State = Any
"""State of a policy: a pytree of tensors ``(num_envs, agents, …)``, or () for none."""


class Decision(NamedTuple):
    """Result of a policy; ``B`` are the tokens' batch dimensions."""

    action: Tensor
    """``(*B, A)`` float, before `Policy.scale`, or ``(*B,)`` int64."""
    log_prob: Tensor
    """``(*B,)`` log-probability of ``action``."""
    value: Tensor
    """``(*B,)`` estimated return; 0 for a policy without a value head."""
    logits: Tensor
    """``(*B, L)`` parameters of the action distribution."""
    state: State
    """State for the next call."""


class Policy(nn.Module, ABC):
    """A map from tokens to actions.

    A policy has no hidden state: what it carries from step to step is returned in
    `Decision.state` and passed to the next call, so that one policy can act in any
    number of environments, and a learner can replay any step. Implement `act`, and
    `initial_state` for a policy with a state.

    Attributes:
        noise_size: uniform random numbers per decision that exploration consumes.
    """

    noise_size: int = 0

    @abstractmethod
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Choose an action for every agent of the batch.

        Args:
            tokens: observations, batch dimensions ``B = (num_envs, agents)``.
            state: from `initial_state` or the last `Decision`.
            generator: random stream of ``agents * noise_size`` numbers per environment;
                None: torch's global generator.
            explore: sample from the action distribution; otherwise take its mode.
        """

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """Return the state at an episode's start; () for a policy without one."""
        return ()

    def value(self, tokens: Tokens, state: State = ()) -> Tensor:
        """Estimate the returns ``(*B,)`` of observations without choosing an action."""
        return self.act(tokens, state).value

    def scale(self, action: Tensor) -> Tensor:
        """Map actions from the policy's units to those of the action space."""
        return action

    def attention_weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """Return the weights of the tokens, ``(*B, heads, N)``; None without any."""
        return None

    def latent(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """Return the output of a sensory layer, ``(*B, C)``; None without one."""
        return None

    def noise(self, tokens: Tokens, generator: Stream | None) -> Tensor:
        """Sample ``(*B, noise_size)`` uniform numbers in (0, 1)."""
        shape = (*tokens.batch_shape, self.noise_size)
        if generator is not None:
            return generator.next().view(shape)
        eps = torch.finfo(torch.float32).eps
        return torch.rand(shape, device=tokens.types.device).clamp(eps, 1 - eps)


class SpecifiedPolicy(Policy):
    """A policy for the tokens and actions of one group of agents.

    It can be saved, see `marl_pool.policies.storage`: `config` and the parameters
    determine it completely.

    Args:
        spec: sizes and types of the tokens.
        action_space: Discrete, or a bounded Box of one dimension.
        **options: other keyword arguments of the subclass's constructor, JSON-ready.

    Attributes:
        spec: sizes and types of the tokens.
        actions: the action space.
        config: keyword arguments of the constructor, JSON-ready.
        low: lower bounds of the Box, ``(A,)``; empty for Discrete.
        high: upper bounds.

    Raises:
        InputError: an action space of another kind.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, spec: TokenSpec, action_space: spaces.Space | ActionSpec, **options: Any
    ) -> None:
        super().__init__()
        self.spec = spec
        if isinstance(action_space, ActionSpec):
            self.actions = action_space
        else:
            self.actions = ActionSpec.of(action_space)
        self.config: dict[str, Any] = {
            "spec": spec.to_json(),
            "action_space": self.actions.to_json(),
            **options,
        }
        for name in ("low", "high"):
            bounds = torch.tensor(getattr(self.actions, name), dtype=torch.float32)
            self.register_buffer(name, bounds, persistent=False)

    def mismatch(self, spec: TokenSpec, action_space: spaces.Space) -> str:
        """Return the reason why the policy does not fit these spaces; empty if it does.

        The number of tokens may differ, if the pooling head supports it. Signal types,
        positions and stacked frames describe the tokens, and no policy depends on them.
        """
        free = ("num_tokens", "signal_types", "positions", "num_frames")
        expected = {**vars(spec), "actions": ActionSpec.of(action_space)}
        found = {**vars(self.spec), "actions": self.actions}
        for key, value in expected.items():
            if key not in free and found[key] != value:
                return f"expected {key} = {value}, got {found[key]}"
        return ""

    def scale(self, action: Tensor) -> Tensor:
        """Map [-1, 1] to the bounds of a Box; discrete actions are returned as is."""
        if self.actions.discrete:
            return action
        return self.low + (action + 1) * ((self.high - self.low) / 2)
