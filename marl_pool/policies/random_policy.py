"""RandomPolicy: uniformly random actions, the lower reference of comparisons."""

import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Stream


class RandomPolicy(Policy):
    """Sample uniformly from the action space, regardless of ``explore``.

    Its actions are in the units of the action space.

    Args:
        action_space: Discrete, or a bounded Box of one dimension.
    """

    def __init__(self, action_space: spaces.Space | ActionSpec) -> None:
        super().__init__()
        self.actions = ActionSpec.of(action_space)
        self.noise_size = self.actions.noise_size

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
            volume = torch.tensor(float(self.actions.n))
        else:
            low = noise.new_tensor(self.actions.low)
            high = noise.new_tensor(self.actions.high)
            action = low + noise * (high - low)
            volume = (high - low).prod()
        log_probs = -volume.log().expand(tokens.batch_shape).to(noise)
        return Decision(action, log_probs, torch.zeros_like(log_probs), logits, state)

    @override
    def value(self, tokens: Tokens, state: State = ()) -> Tensor:
        # Without `act`, which would advance the random stream.
        return torch.zeros(tokens.batch_shape, device=tokens.types.device)
