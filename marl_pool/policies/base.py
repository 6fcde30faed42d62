"""What every policy is: one call, for every caller, recurrent or not."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.randomness import Stream

State = Any
"""A policy's memory: a pytree of tensors, ``(num_envs, agents, …)``, or ()."""


class Decision(NamedTuple):
    """What a policy returns; ``B`` are the tokens' batch dimensions."""

    action: Tensor
    """``(*B, A)`` float before scaling to the action space, or ``(*B,)`` int64."""
    log_prob: Tensor
    """``(*B,)`` log-probability of ``action``."""
    value: Tensor
    """``(*B,)`` estimated return; 0 where the policy has no value head."""
    logits: Tensor
    """``(*B, L)`` parameters of the action distribution."""
    state: State
    """The memory for the next call."""


class Policy(nn.Module, ABC):
    """From tokens to actions.

    Attributes:
        noise_size: uniform numbers that one decision takes when it explores.
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
        """Decide for every row of the batch.

        Args:
            tokens: what the agents observe, batch dimensions ``(num_envs, agents)``.
            state: the memory, from `initial_state` or the last `Decision`.
            generator: the policy's random stream of ``agents * noise_size`` numbers;
                None takes torch's global generator.
            explore: sample from the distribution; otherwise take its mode.
        """

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """The memory at an episode's start; () for a policy without memory."""
        return ()

    def value(self, tokens: Tokens, state: State = ()) -> Tensor:
        """Estimated returns ``(*B,)`` of what is seen, without a decision."""
        return self.act(tokens, state).value

    def scale(self, action: Tensor) -> Tensor:
        """From the policy's own units to those of the env's action space."""
        return action

    def weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """What share each token has in the decision, ``(*B, heads, N)``, or None."""
        return None

    def latent(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """What a sensory layer makes of what is seen, ``(*B, C)``, or None."""
        return None

    def noise(self, tokens: Tokens, generator: Stream | None) -> Tensor:
        """Draw ``(*B, noise_size)`` uniform numbers in (0, 1)."""
        shape = (*tokens.batch_shape, self.noise_size)
        if generator is not None:
            return generator.next().view(shape)
        eps = torch.finfo(torch.float32).eps
        return torch.rand(shape, device=tokens.types.device).clamp(eps, 1 - eps)


class SpecifiedPolicy(Policy):
    """A policy made for the tokens and actions of one group of agents.

    It can be saved: `config` and the weights are all that it is made of.

    Args:
        spec: of the tokens.
        action_space: Discrete, or a bounded Box of one dimension.
        **options: the constructor's other keyword arguments, JSON-ready.

    Attributes:
        spec: of the tokens.
        actions: of the action space.
        config: the constructor's keyword arguments, JSON-ready.

    Raises:
        InputError: an action space of another kind.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        **options: Any,
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

    def misfit(self, spec: TokenSpec, action_space: spaces.Space) -> str:
        """Why it cannot read such tokens or act so; empty if it can.

        The number of tokens may differ from what it was made for, if its head allows.
        Which types are signal, which features a position, and how many frames they
        stack, is no matter of the policy's.
        """
        free = ("num_tokens", "signal_types", "positions", "num_frames")
        expected = {**vars(spec), "actions": ActionSpec.of(action_space)}
        found = {**vars(self.spec), "actions": self.actions}
        for key, value in expected.items():
            if key not in free and found[key] != value:
                return f"expected {key} = {value}, got {found[key]}"
        return ""

    def scale(self, action: Tensor) -> Tensor:
        """From [-1, 1] to the bounds of the box; a choice stays as it is."""
        if self.actions.discrete:
            return action
        return self.low + (action + 1) * ((self.high - self.low) / 2)
