"""RandomPolicy: uniformly random actions, the baseline of comparisons."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.policies.actions import ActionSpec, mask_logits, sample_choices
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Stream

_FLOAT32: Any = {"dtype": torch.float32, "device": "cpu"}


class RandomPolicy(Policy):
    """Sample uniformly from the action space, regardless of ``explore``.

    Its actions are in the units of the action space.

    Args:
        action_space: a space that `ActionSpec.of` accepts.
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
        # All actions have the same log-probability, unless some are masked.
        self.log_volume = (self.high - self.low).double().log().sum().item()
        options = torch.tensor(self.actions.sizes, **_FLOAT32).double()
        self.log_prob = -options.log().sum().item() - self.log_volume

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        spec, mask = self.actions, self.actions.mask_of(tokens)
        noise = self.noise(tokens, generator)
        logits = noise.new_zeros(*tokens.batch_shape, spec.num_logits)
        low, high = self.low.to(noise), self.high.to(noise)
        count = len(spec.sizes)
        numbers = low + noise[..., count:] * (high - low)
        log_probs = noise.new_full(tokens.batch_shape, self.log_prob)
        if mask is not None:
            logits = mask_logits(logits, mask)
            action = sample_choices(spec, logits, numbers, noise, mask)
            allowed = spec.table(mask, False).sum(-1).clamp(min=1)
            log_probs = -allowed.to(noise).log().sum(-1) - self.log_volume
        elif spec.discrete:
            action = (noise[..., 0] * spec.n).long()
        elif count:
            action = sample_choices(spec, logits, numbers, noise)
        else:
            action = numbers
        return Decision(action, log_probs, torch.zeros_like(log_probs), logits, state)

    @override
    def value(self, tokens: Tokens, state: State = ()) -> Tensor:
        # Without `act`, which would advance the random stream.
        return torch.zeros(tokens.batch_shape, device=tokens.types.device)
