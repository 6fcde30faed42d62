"""Policies that are evolved or cloned: their base class, and populations of them."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map, tree_map_only
from typing_extensions import override

from marl_pool.kernels.functional import tanh
from marl_pool.networks.set_network import present_padding
from marl_pool.policies.actions import (
    ActionSpec,
    choice_log_prob,
    mask_logits,
    most_likely,
    sample_choices,
)
from marl_pool.policies.base import Decision, Policy, SequencePolicy, State
from marl_pool.pooling.base import Memory
from marl_pool.tokens import Mask, Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.randomness import Stream

Unroll = Callable[[Tensor, Mask, Tensor, Memory], tuple[Tensor, Memory]]
"""Signature of `Agent.unroll`."""


class Agent(SequencePolicy):
    """A policy whose output is the action itself, or one logit for each option.

    It has no value head: it is found by an evolution strategy or cloned from a teacher.
    It acts deterministically; while exploring, choices are sampled from their logits,
    and `Decision.log_prob` is theirs.

    A subclass implements `unroll`. That suffices to act, to evaluate a population in
    one batch (`Population`), and to be cloned from whole sequences. So `unroll` must be
    a function of tensors that `torch.func.vmap` can vectorise, without Python branches
    on their values.
    """

    recurrent = False
    hidden_dim: int = 0
    """H, width of the last hidden layer of `unroll_hidden`; 0 without that method."""

    def __init__(
        self, spec: TokenSpec, action_space: spaces.Space | ActionSpec, **options: Any
    ) -> None:
        super().__init__(spec, action_space, **options)
        self.noise_size = len(self.actions.sizes)

    @abstractmethod
    def unroll(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Compute the outputs of B sequences of T sets of tokens.

        Args:
            features: ``(B, T, N, F)``, in the tokens' own dtype.
            padding: ``(B, T, N)`` bool, True = ignore; None where nothing is padded.
            prev_action: ``(B, T, A)``, the action before each set, as
                `ActionSpec.to_vectors` returns it; zeros at an episode's start.
            memory: ``(B, …)`` before the first set.

        Returns:
            Outputs ``(B, T, A)`` with A = `ActionSpec.dim`, a logit for each option of
            the choices, then the numbers of a Box in [-1, 1]; and the memory after the
            last set.
        """

    def unroll_hidden(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor, Memory]:
        """Compute `unroll`, with the last hidden layer ``(B, T, H)`` as second result.

        An agent that implements it sets ``hidden_dim``. Cloning can then train an
        auxiliary head on that layer, which predicts the teacher's privileged targets.
        """
        raise NotImplementedError(f"{type(self).__name__} shows no hidden layer")

    @override
    def unroll_logits(
        self, tokens: Tokens, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        return self(tokens.features, present_padding(tokens), prev_action, memory)

    def forward(self, *arguments: Any) -> tuple[Tensor, Memory]:
        """Call `unroll`."""
        return self.unroll(*arguments)

    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        """Return `unroll` for P members with different parameters, ``(P, …)`` each.

        Its arguments and results have an additional leading dimension P. Subclasses may
        override this by a faster method.
        """

        def member(member_parameters: dict[str, Tensor], *arguments: Any) -> Any:
            return functional_call(self, member_parameters, arguments)

        def unroll(*arguments: Any) -> Any:
            # None, where nothing is padded, has no dimension to vectorise over.
            batched = tuple(None if argument is None else 0 for argument in arguments)
            return vmap(member, in_dims=(0, *batched))(parameters, *arguments)

        return unroll

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        outputs, memory = self(*self.unroll_arguments(tokens, state))
        return self.decide(outputs, memory, tokens, generator, explore)

    def decide(
        self,
        outputs: Tensor,
        memory: Memory,
        tokens: Tokens,
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Turn one step's result of `unroll` into a decision; see `Policy.act`."""
        logits = outputs[:, 0].unflatten(0, tokens.batch_shape)
        actions, zeros = self.actions, torch.zeros_like(logits[..., 0])
        log_prob = zeros  # a deterministic action has a probability of 1
        # A Box has no noise: its outputs are the action.
        if not actions.sizes:
            action = logits
        else:
            mask = self.options(tokens)
            logits = mask_logits(logits, mask)
            count = actions.num_options
            numbers = logits if actions.integral else logits[..., count:]
            if explore:
                noise = self.noise(tokens, generator)
                action = sample_choices(actions, logits, numbers, noise, mask)
                log_prob = choice_log_prob(actions, logits, action)
            else:
                action = most_likely(actions, logits, numbers)
        state = self.next_state(action, memory, logits.dtype)
        return Decision(action, log_prob, zeros, logits, state)

    def bound(self, outputs: Tensor) -> Tensor:
        """Apply tanh to outputs that are numbers of a Box; logits are unchanged."""
        if self.actions.integral:
            return outputs
        if not (count := self.actions.num_options):
            return tanh(outputs)
        return torch.cat([outputs[..., :count], tanh(outputs[..., count:])], -1)

    def unroll_arguments(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Mask, Tensor, Memory]:
        """Return the arguments of `unroll` for one step of a batch of tokens."""
        sequences, prev_action, memory = self.single_step(tokens, state)
        return sequences.features, present_padding(sequences), prev_action, memory

    def scale_features(
        self, features: Tensor, padding: Mask, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Convert features ``(*B, N, F)`` to floats: bytes to [0, 1], 0 under padding.

        Bytes are scaled if they are the spec's dtype; otherwise they are numbers.
        ``dtype`` is the result's, or None for the agent's.
        """
        numbers = features.to(dtype or self.low.dtype)
        if self.spec.dtype == "uint8" and features.dtype == torch.uint8:
            numbers = numbers / 255
        if padding is not None:
            numbers = numbers.masked_fill(padding[..., None], 0.0)
        return numbers

    def missing_tokens(self, count: int) -> int:
        """Return how many tokens ``count`` falls short of the number in training.

        Raises:
            UnfitTokensError: there are more tokens than in training.
        """
        missing = self.spec.num_tokens - count
        if missing < 0:
            raise UnfitTokensError(
                f"{type(self).__name__}: expected at most {self.spec.num_tokens} "
                f"tokens, got {count}"
            )
        return missing


def to_vector(agent: Agent) -> Tensor:
    """Concatenate all parameters of an agent into one vector ``(n,)``."""
    return torch.cat([parameter.detach().flatten() for parameter in agent.parameters()])


def load_vector(agent: Agent, vector: Tensor) -> None:
    """Set an agent's parameters to a vector ``(n,)`` in the order of `to_vector`."""
    sizes = _sizes(agent)
    if vector.shape != (sum(sizes),):
        raise InputError(
            f"parameters: expected {sum(sizes)} numbers, "
            f"got shape {tuple(vector.shape)}"
        )
    with torch.no_grad():
        for parameter, numbers in zip(
            agent.parameters(), vector.split(sizes), strict=True
        ):
            parameter.copy_(numbers.view_as(parameter))


def _sizes(agent: Agent) -> list[int]:
    return [parameter.numel() for parameter in agent.parameters()]


class _MemberGrid(NamedTuple):
    """Environments of a batch arranged in a rectangle, a row for each member."""

    member: Tensor
    """``(num_envs, agents)`` member of each; the same object as in the state."""
    cells: Tensor | None
    """``(num_envs,)`` flat index in the rectangle; None if it is full."""
    shape: tuple[int, int]
    """Number of remaining members, and the most environments of one."""
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
        num_parameters = sum(_sizes(agent))
        if vectors.dim() != 2 or vectors.shape[1] != num_parameters:
            raise InputError(
                f"vectors: expected the shape (P, {num_parameters}), "
                f"got {tuple(vectors.shape)}"
            )
        self.size = len(vectors)
        self.noise_size = agent.noise_size
        self.vectors: Tensor
        self.register_buffer("vectors", vectors.to(agent.low))
        self._grid: _MemberGrid | None = None

    @override
    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """Return ``{"member", "agent"}``: each agent's member, and its state."""
        if num_envs % self.size:
            raise InputError(
                f"num_envs: expected a multiple of the population size {self.size}, "
                f"got {num_envs}"
            )
        indices = torch.arange(self.size, device=self.vectors.device)
        member = indices.repeat_interleave(num_envs // self.size)
        member = member[:, None].expand(-1, num_agents)
        agent_state = self.agent.initial_state(num_envs, num_agents, num_tokens)
        return {"member": member, "agent": agent_state}

    @override
    def newborn_state(
        self, state: State, num_envs: int, num_agents: int, num_tokens: int
    ) -> State:
        fresh = self.agent.initial_state(num_envs, num_agents, num_tokens)
        return {"member": state["member"], "agent": fresh}

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
            Tensor, lambda argument: _to_grid(argument, grid, agents), arguments
        )
        outputs, memory = tree_map(
            lambda output: _from_grid(output, grid, agents), grid.unroll(*arguments)
        )
        decision = self.agent.decide(outputs, memory, tokens, generator, explore)
        next_state = {"member": state["member"], "agent": decision.state}
        return decision._replace(state=next_state)

    @override
    def scale(self, action: Tensor) -> Tensor:
        return self.agent.scale(action)

    def _member_grid(self, member: Tensor) -> _MemberGrid:
        # The state has another tensor only after environments were dropped.
        if self._grid is not None and self._grid.member is member:
            return self._grid
        # One row for each remaining member, as wide as the most environments of one.
        # All agents of an environment belong to one member.
        members, rows, counts = member[:, 0].unique_consecutive(
            return_inverse=True, return_counts=True
        )
        width = int(counts.max())
        cells = None
        if (counts != width).any():
            # Cell of each environment: its member's row, and its place within it.
            first = counts.cumsum(0) - counts
            within = torch.arange(len(member), device=member.device) - first[rows]
            cells = rows * width + within
        unroll = self.agent.members(self._named_parameters(members))
        self._grid = _MemberGrid(member, cells, (len(members), width), unroll)
        return self._grid

    def _named_parameters(self, members: Tensor) -> dict[str, Tensor]:
        """Return the parameters of some members by name, ``(members, …)`` each."""
        chunks = self.vectors[members].split(_sizes(self.agent), dim=1)
        pairs = zip(self.agent.named_parameters(), chunks, strict=True)
        return {
            name: numbers.view(len(members), *parameter.shape)
            for (name, parameter), numbers in pairs
        }


def _to_grid(values: Tensor, grid: _MemberGrid, agents: int) -> Tensor:
    """Arrange ``(num_envs · agents, …)`` as ``(members, width · agents, …)``."""
    members, width = grid.shape
    if grid.cells is not None:
        by_env = values.unflatten(0, (-1, agents))
        empty = values.new_zeros(members * width, *by_env.shape[1:])
        values = empty.index_copy_(0, grid.cells, by_env).flatten(0, 1)
    return values.unflatten(0, (members, width * agents))


def _from_grid(values: Tensor, grid: _MemberGrid, agents: int) -> Tensor:
    """Invert `_to_grid`."""
    flat = values.flatten(0, 1)
    if grid.cells is None:
        return flat
    by_cell = flat.unflatten(0, (-1, agents))
    return by_cell.index_select(0, grid.cells).flatten(0, 1)
