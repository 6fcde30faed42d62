"""Reference policy of the XOR game."""

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.scripted import Heuristic
from marl_pool.tokens import SELF_TYPE, Tokens


class XORHeuristic(Heuristic):
    """Choose 1 if the agent's own number is larger than all others in the set.

    It solves the game with a tie-breaker. Without one no deterministic policy that all
    agents share gets a reward, and this one chooses 0.

    Args:
        group: the group of the agents.
    """

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        numbers = tokens.features[..., 0]
        is_self = (tokens.types == SELF_TYPE) & ~tokens.padding
        hidden = tokens.padding | is_self
        largest_self = numbers.masked_fill(~is_self, -torch.inf).amax(-1)
        largest_other = numbers.masked_fill(hidden, -torch.inf).amax(-1)
        margin = largest_self - largest_other
        action = (largest_self > largest_other).long()
        return action, margin[..., None].nan_to_num()
