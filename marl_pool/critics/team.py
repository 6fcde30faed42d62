"""TeamCritic: values from the set of all agents' sets of tokens."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.critics.base import Critic, PartOption, compiled_parts, of_present
from marl_pool.networks.embedding import clear_padding
from marl_pool.networks.set_network import seeded
from marl_pool.options.types import Size
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec, self_first

TEAM_TYPES = ("self", "teammate")
"""Types of the tokens of a team."""


class TeamCritic(Critic):
    """Values from what all agents of the team observe, as a set of sets (MAPPO).

    A set network pools the tokens of each agent to one vector. These vectors are the
    tokens of a second set network, which is computed once for each agent: the agent's
    own vector has the type self and comes first, the others' have the type
    teammate, and absent agents are padding. A value head reads the result. So the value
    of an agent depends on all observations of its team, and the same weights serve
    teams of every size. With invariant heads, permuting the other agents does not
    change it beyond rounding.

    An entity that several agents see is a token of each of them, relative to it; it is
    pooled within the agents that see it. In a flat union of all tokens, entities would
    be weighted by the number of their observers, and positions relative to different
    agents would be mixed.

    Source: Yu et al., The surprising effectiveness of PPO in cooperative multi-agent
    games (2022), https://arxiv.org/abs/2103.01955, whose critic concatenates the
    observations, so that the number of agents and their order are fixed, and whose
    code credits an agent that has died with what its team earns later; here, as in
    RLlib, its return ends. Liu et al.,
    PIC: permutation invariant critic for multi-agent deep reinforcement learning
    (2019), https://arxiv.org/abs/1911.00025, has a graph network over agents that
    divides by their number; no count enters here.

    Args:
        num_agents: agents of the largest team, for heads whose size depends on it.
        seed: of the initial weights.
        encoder: of the critic's set networks: a name, or a mapping with a name and
            options; None for the policy's.
        pooling: of the critic's set networks, as ``encoder``.
        trunk: the set network for the agents' tokens: the critic's own, "separate", or
            the policy's, "shared", which ``encoder`` and ``pooling`` do not change.
        head_hidden: widths of the hidden layers of the value head.
    """

    reads = "team"

    def __init__(
        self,
        policy: TokenPolicy,
        num_agents: int,
        seed: int | None = None,
        *,
        encoder: PartOption = None,
        pooling: PartOption = None,
        trunk: Literal["separate", "shared"] = "separate",
        head_hidden: Sequence[Size] = (32, 32),
    ) -> None:
        super().__init__(policy)
        self.shares_trunk = trunk == "shared"
        with seeded(seed, "critic"):
            if self.shares_trunk:
                agent_network = policy.network
            else:
                agent_network = self._network(
                    policy.spec, encoder=encoder, pooling=pooling
                )
                self.agent_network = agent_network
            spec = TokenSpec(num_agents, agent_network.dim_out, TEAM_TYPES)
            self.team_network = self._network(spec, encoder=encoder, pooling=pooling)
            self.value_head = self._head(self.team_network.dim_out, head_hidden)
        self._parts = compiled_parts(agent_network, self.team_network, self.value_head)

    @override
    def forward(
        self, tokens: Tokens, present: Tensor, pooled: Tensor | None = None
    ) -> Tensor:
        agent_network, team_network, value_head = self._parts
        if pooled is None:
            # An absent agent may have no token, which not every head can pool: it gets
            # zeros, for there may be anything under padding.
            padding = tokens.padding & present[..., None]
            cleared = clear_padding(tokens)
            poolable = cleared._replace(padding=padding, action_mask=None)
            pooled = of_present(agent_network, poolable, present)
        agents = present.shape[-1]
        vectors = pooled.reshape(-1, agents, pooled.shape[-1])
        team = team_tokens(vectors, present.reshape(-1, agents))
        values: Tensor = of_present(
            lambda rows: value_head(team_network(rows)), team, present.flatten()
        )
        return values.view(present.shape)


def team_tokens(vectors: Tensor, present: Tensor) -> Tokens:
    """Return the team as each of its agents sees it, batch ``(B · agents,)``.

    Args:
        vectors: ``(B, agents, D)``.
        present: ``(B, agents)`` bool.

    Returns:
        Tokens ``(B · agents, agents, D)``; the agent itself comes first, and is not
        padding even if it is absent.
    """
    agents, device = vectors.shape[1], vectors.device
    numbers = torch.arange(agents, device=device)
    order = self_first(numbers, agents).flatten()
    features = vectors.index_select(1, order).view(-1, agents, vectors.shape[-1])
    padding = (~present).index_select(1, order).view(-1, agents)
    padding[:, 0] = False
    types = (numbers > 0).long().expand_as(padding)
    return Tokens(features, types, padding)
