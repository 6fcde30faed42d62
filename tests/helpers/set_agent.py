"""An agent as a user would write one, with a transformer and AdaPool."""

from typing import Any

from torch import Tensor, nn

from marl_pool.encoders import make_encoder
from marl_pool.networks.set_network import seeded
from marl_pool.policies.agent import Agent
from marl_pool.pooling import make_pooling
from marl_pool.pooling.base import Memory


class SetAgent(Agent):
    """Linear, transformer, AdaPool, linear; only `unroll` is implemented."""

    def __init__(self, spec: Any, action_space: Any, *, seed: int | None = None):
        super().__init__(spec, action_space)
        with seeded(seed, "agent"):
            self.embedding = nn.Linear(spec.num_features, 8)
            self.encoder = make_encoder("transformer", num_layers=1)
            self.pooling = make_pooling("ada", dim=8, num_heads=8, query="mean")
            self.head = nn.Linear(8, self.actions.dim)

    def unroll(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        x = self.embedding(self.scale_features(features, padding)).flatten(0, 1)
        mask = None if padding is None else padding.flatten(0, 1)
        pooled = self.pooling(self.encoder(x, mask), mask)
        return self.head(pooled).tanh().unflatten(0, features.shape[:2]), memory
