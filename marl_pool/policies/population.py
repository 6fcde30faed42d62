"""Many parameter vectors of one agent, acting side by side."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from marl_pool.policies.agent import Agent, Unroll
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream


def to_vector(agent: Agent) -> Tensor:
    """All parameters of an agent one after the other, ``(n,)``."""
    return torch.cat([part.detach().flatten() for part in agent.parameters()])


def load_vector(agent: Agent, vector: Tensor) -> None:
    """Put ``(n,)`` parameters, in the order of `to_vector`, into an agent.

    Raises:
        InputError: another number of them.
    """
    wanted = sum(part.numel() for part in agent.parameters())
    if vector.shape != (wanted,):
        raise InputError(
            f"parameters: expected {wanted} numbers, got shape {tuple(vector.shape)}"
        )
    start = 0
    with torch.no_grad():
        for part in agent.parameters():
            end = start + part.numel()
            part.copy_(vector[start:end].view_as(part))
            start = end


class _Layout(NamedTuple):
    """Where the worlds of a batch stand in a rectangle of members × places."""

    member: Tensor
    """The state's own tensor that this was computed from."""
    places: Tensor | None
    """``(worlds,)`` each one's flat place; None where they fill the rectangle."""
    shape: tuple[int, int]
    """Members that are left, and the most worlds of one of them."""
    parameters: dict[str, Tensor]
    """Of those members, by name, ``(members, …)``."""
    unroll: Unroll
    """Of those members."""


class Population(Policy):
    """P parameter vectors of one agent in one batch of worlds.

    Member p plays the worlds ``p·R`` to ``(p + 1)·R - 1`` of P·R; the state says which
    rows are whose, so worlds may end and be dropped. The agent's own `Agent.unroll` is
    vectorised over the parameters, whatever it computes.

    Args:
        agent: says what to compute; its own weights don't matter.
        vectors: ``(P, n)`` parameters in the order of `to_vector`.

    Raises:
        InputError: vectors of another length.
    """

    def __init__(self, agent: Agent, vectors: Tensor) -> None:
        super().__init__()
        self.agent = agent
        wanted = sum(part.numel() for part in agent.parameters())
        if vectors.dim() != 2 or vectors.shape[1] != wanted:
            raise InputError(
                f"vectors: expected the shape (P, {wanted}), got {tuple(vectors.shape)}"
            )
        self.size = len(vectors)
        self.noise_size = agent.noise_size
        self.vectors: Tensor
        self.register_buffer("vectors", vectors.to(agent.low))
        self._layout: _Layout | None = None

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """``{"member", "agent"}``: whose each world is, and the agents' own state.

        Raises:
            InputError: ``num_envs`` is no multiple of P.
        """
        if num_envs % self.size:
            raise InputError(
                f"worlds: expected a multiple of the population {self.size}, "
                f"got {num_envs}"
            )
        each = torch.arange(self.size, device=self.vectors.device)
        member = each.repeat_interleave(num_envs // self.size)
        own = self.agent.initial_state(num_envs, num_agents, num_tokens)
        return {"member": member, "agent": own}

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Decide for every row by its own member; see `Policy.act`.

        The state is needed: it says whose the rows are.
        """
        layout = self._laid_out(state["member"])
        given = self.agent.arguments(tokens, state["agent"])
        agents = tokens.batch_shape[1]
        given = tree_map_only(Tensor, lambda part: _spread(part, layout, agents), given)
        outputs, memory = layout.unroll(*given)
        outputs, memory = tree_map(
            lambda part: _gather(part, layout, agents), (outputs, memory)
        )
        decision = self.agent.decide(outputs, memory, tokens, generator, explore)
        own = {"member": state["member"], "agent": decision.state}
        return decision._replace(state=own)

    def scale(self, action: Tensor) -> Tensor:
        """As the agent does."""
        return self.agent.scale(action)

    def _laid_out(self, member: Tensor) -> _Layout:
        # The tensor is another one only after worlds were dropped.
        if self._layout is None or self._layout.member is not member:
            self._layout = self._lay_out(member)
        return self._layout

    def _lay_out(self, member: Tensor) -> _Layout:
        left, rows, counts = member.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        width = int(counts.max())
        places = None
        if (counts != width).any():
            first = counts.cumsum(0) - counts
            within = torch.arange(len(member), device=member.device) - first[rows]
            places = rows * width + within
        parameters, start = {}, 0
        vectors = self.vectors[left]
        for name, part in self.agent.named_parameters():
            end = start + part.numel()
            parameters[name] = vectors[:, start:end].view(len(left), *part.shape)
            start = end
        unroll = self.agent.members(parameters)
        return _Layout(member, places, (len(left), width), parameters, unroll)


def _spread(part: Tensor, layout: _Layout, agents: int) -> Tensor:
    """From ``(worlds · agents, …)`` to ``(members, width · agents, …)``."""
    members, width = layout.shape
    if layout.places is not None:
        worlds = part.unflatten(0, (-1, agents))
        room = part.new_zeros(members * width, *worlds.shape[1:])
        part = room.index_copy_(0, layout.places, worlds).flatten(0, 1)
    return part.unflatten(0, (members, width * agents))


def _gather(part: Tensor, layout: _Layout, agents: int) -> Tensor:
    """The inverse of `_spread`."""
    flat = part.flatten(0, 1)
    if layout.places is None:
        return flat
    worlds = flat.unflatten(0, (-1, agents))
    return worlds.index_select(0, layout.places).flatten(0, 1)
