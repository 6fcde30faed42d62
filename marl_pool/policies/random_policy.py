"""RandomPolicy: uniformly random actions, the lower reference of comparisons."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.policies.actions import ActionSpec, log_prob, mask_logits, sample
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Stream

_FLOAT32: Any = {"dtype": torch.float32, "device": "cpu"}


class RandomPolicy(Policy):
    """Sample uniformly from the action space, regardless of ``explore``.

    Its actions are in the units of the action space.

    Args:
        action_space: Discrete, or a bounded Box of one dimension.
    """

    low: Tensor
    high: Tensor

    def __init__(self, action_space: spaces.Space | ActionSpec) -> None:
        super().__init__()
        self.actions = ActionSpec.of(action_space)
        self.noise_size = self.actions.noise_size
        for name in ("low", "high"):
            bounds = torch.tensor(getattr(self.actions, name), **_FLOAT32)
            self.register_buffer(name, bounds, persistent=False)
        # Every action has the same log-probability.
        volume = (self.high - self.low).prod()
        if self.actions.discrete:
            volume = torch.tensor(float(self.actions.n), **_FLOAT32)
        self.log_prob = -volume.log().item()

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        noise = self.noise(tokens, generator)
        logits = noise.new_zeros(*tokens.batch_shape, self.actions.num_logits)
        if self.actions.discrete:
            action = (noise[..., 0] * self.actions.n).long()
            if tokens.action_mask is not None:
                logits = mask_logits(logits, tokens.action_mask)
                action = sample(self.actions, logits, noise, tokens.action_mask)
                log_probs = log_prob(self.actions, logits, action)
                zeros = torch.zeros_like(log_probs)
                return Decision(action, log_probs, zeros, logits, state)
        else:
            low, high = self.low.to(noise), self.high.to(noise)
            action = low + noise * (high - low)
        log_probs = noise.new_full(tokens.batch_shape, self.log_prob)
        return Decision(action, log_probs, torch.zeros_like(log_probs), logits, state)

    @override
    def value(self, tokens: Tokens, state: State = ()) -> Tensor:
        # Without `act`, which would advance the random stream.
        return torch.zeros(tokens.batch_shape, device=tokens.types.device)
