"""StateCritic: values from the state of the environment."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from marl_pool.critics.base import Critic, PartOption, compiled_parts, of_present
from marl_pool.networks.set_network import seeded
from marl_pool.options.types import Size
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec


class StateCritic(Critic):
    """Values from the state of the environment as a set of tokens (MAPPO).

    The tokens come from `BatchedEnv.observe_state`: all entities, unperturbed, where
    the agent itself has the type self.

    Args:
        state_spec: specification of the tokens of the state.
        seed: of the initial weights.
        encoder: of the set network: a name, or a mapping with a name and options; None
            for the policy's.
        pooling: of the set network, as ``encoder``.
        head_hidden: widths of the hidden layers of the value head.
    """

    reads = "state"

    def __init__(
        self,
        policy: TokenPolicy,
        state_spec: TokenSpec,
        seed: int | None = None,
        *,
        encoder: PartOption = None,
        pooling: PartOption = None,
        head_hidden: Sequence[Size] = (32, 32),
    ) -> None:
        super().__init__(policy)
        with seeded(seed, "critic"):
            self.network = self._network(state_spec, encoder=encoder, pooling=pooling)
            self.value_head = self._head(self.network.dim_out, head_hidden)
        self._parts = compiled_parts(self.network, self.value_head)

    @override
    def forward(
        self, tokens: Tokens, present: Tensor, pooled: Tensor | None = None
    ) -> Tensor:
        network, value_head = self._parts
        return of_present(lambda rows: value_head(network(rows))[:, 0], tokens, present)
