"""Population: many parameter vectors of one agent, acting in one batch."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only
from typing_extensions import override

from marl_pool.policies.agent import Agent, Unroll
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream


def to_vector(agent: Agent) -> Tensor:
    """Concatenate all parameters of an agent to one vector ``(n,)``."""
    return torch.cat([part.detach().flatten() for part in agent.parameters()])


def load_vector(agent: Agent, vector: Tensor) -> None:
    """Set an agent's parameters to a vector ``(n,)`` in the order of `to_vector`."""
    sizes = _sizes(agent)
    if vector.shape != (sum(sizes),):
        raise InputError(
            f"parameters: expected {sum(sizes)} numbers, "
            f"got shape {tuple(vector.shape)}"
        )
    with torch.no_grad():
        for part, numbers in zip(agent.parameters(), vector.split(sizes), strict=True):
            part.copy_(numbers.view_as(part))


def _sizes(agent: Agent) -> list[int]:
    return [part.numel() for part in agent.parameters()]


class _MemberGrid(NamedTuple):
    """Environments of a batch arranged in a rectangle, a row for each member."""

    member: Tensor
    """``(num_envs, agents)`` member of each; the very tensor of the state."""
    cells: Tensor | None
    """``(num_envs,)`` flat index in the rectangle; None where it is full."""
    shape: tuple[int, int]
    """Number of members left, and the largest number of environments of one."""
    unroll: Unroll
    """`Agent.unroll` of these members."""


class Population(Policy):
    """P parameter vectors of one agent, evaluated in one batch of environments.

    Member p acts in the environments ``p·R`` to ``(p + 1)·R - 1`` of P·R. The state
    holds the member of each agent, so that environments may end and be dropped. The
    agent's `Agent.unroll` is vectorised over the parameters by `Agent.members`.

    Args:
        agent: the architecture; its own parameters are not used.
        vectors: ``(P, n)`` parameters in the order of `to_vector`.
    """

    def __init__(self, agent: Agent, vectors: Tensor) -> None:
        super().__init__()
        self.agent = agent
        wanted = sum(_sizes(agent))
        if vectors.dim() != 2 or vectors.shape[1] != wanted:
            raise InputError(
                f"vectors: expected the shape (P, {wanted}), got {tuple(vectors.shape)}"
            )
        self.size = len(vectors)
        self.noise_size = agent.noise_size
        self.vectors: Tensor
        self.register_buffer("vectors", vectors.to(agent.low))
        self._grid: _MemberGrid | None = None

    @override
    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """Return ``{"member", "agent"}``: the member of each, and the agent's state."""
        if num_envs % self.size:
            raise InputError(
                f"num_envs: expected a multiple of the population size {self.size}, "
                f"got {num_envs}"
            )
        each = torch.arange(self.size, device=self.vectors.device)
        member = each.repeat_interleave(num_envs // self.size)
        member = member[:, None].expand(-1, num_agents)
        own = self.agent.initial_state(num_envs, num_agents, num_tokens)
        return {"member": member, "agent": own}

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        # Unlike in other policies, the state is required.
        grid = self._member_grid(state["member"])
        agents = tokens.batch_shape[1]
        # Arrange the rows by member, compute all members at once, and arrange back.
        arguments = self.agent.unroll_arguments(tokens, state["agent"])
        arguments = tree_map_only(
            Tensor, lambda part: _to_grid(part, grid, agents), arguments
        )
        outputs, memory = tree_map(
            lambda part: _from_grid(part, grid, agents), grid.unroll(*arguments)
        )
        decision = self.agent.decide(outputs, memory, tokens, generator, explore)
        own = {"member": state["member"], "agent": decision.state}
        return decision._replace(state=own)

    @override
    def scale(self, action: Tensor) -> Tensor:
        return self.agent.scale(action)

    def _member_grid(self, member: Tensor) -> _MemberGrid:
        # It is another tensor only after environments were dropped.
        if self._grid is None or self._grid.member is not member:
            self._grid = self._make_grid(member)
        return self._grid

    def _make_grid(self, member: Tensor) -> _MemberGrid:
        # One row for each member left, as wide as the largest number of environments.
        # All agents of an environment belong to one member.
        left, rows, counts = member[:, 0].unique_consecutive(
            return_inverse=True, return_counts=True
        )
        width = int(counts.max())
        cells = None
        if (counts != width).any():
            # Cell of each environment: its member's row, and its place within it.
            first = counts.cumsum(0) - counts
            within = torch.arange(len(member), device=member.device) - first[rows]
            cells = rows * width + within
        unroll = self.agent.members(self._named_parameters(left))
        return _MemberGrid(member, cells, (len(left), width), unroll)

    def _named_parameters(self, members: Tensor) -> dict[str, Tensor]:
        """Return the parameters of some members by name, ``(members, …)`` each."""
        parts = self.vectors[members].split(_sizes(self.agent), dim=1)
        return {
            name: numbers.view(len(members), *part.shape)
            for (name, part), numbers in zip(
                self.agent.named_parameters(), parts, strict=True
            )
        }


def _to_grid(part: Tensor, grid: _MemberGrid, agents: int) -> Tensor:
    """Arrange ``(num_envs · agents, …)`` as ``(members, width · agents, …)``."""
    members, width = grid.shape
    if grid.cells is not None:
        by_env = part.unflatten(0, (-1, agents))
        empty = part.new_zeros(members * width, *by_env.shape[1:])
        part = empty.index_copy_(0, grid.cells, by_env).flatten(0, 1)
    return part.unflatten(0, (members, width * agents))


def _from_grid(part: Tensor, grid: _MemberGrid, agents: int) -> Tensor:
    """Invert `_to_grid`."""
    flat = part.flatten(0, 1)
    if grid.cells is None:
        return flat
    by_cell = flat.unflatten(0, (-1, agents))
    return by_cell.index_select(0, grid.cells).flatten(0, 1)
