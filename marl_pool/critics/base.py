"""The interface of critics."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from marl_pool.compiled.mlp import compile_mlp
from marl_pool.compiled.network import CompiledSetNetwork, compile_network
from marl_pool.kernels.functional import ACTIVATIONS, mlp
from marl_pool.networks.set_network import SetNetwork, init_weights
from marl_pool.options.construction import with_name
from marl_pool.options.types import NamedOptions, Part
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])
PartOption = Part | None
"""Encoder or head: a name, ``{"name": …, **options}``, or None for the policy's."""


class Critic(nn.Module):
    """Estimates the returns of the agents of a team, one value for each.

    A team is the agents of one group in one environment. Learners and runners have a
    critic besides the policy; neither the saved policy nor evaluation has one.

    Args:
        policy: the policy whose returns are estimated.

    The policy's parameters are not parameters of the critic.
    """

    reads: ClassVar[Literal["own", "team", "state"]]
    """What one value depends on: the observation of the agent, all observations of
    the team, or the state of the environment."""
    shares_trunk: bool = False
    """True if the critic reads the output of the policy's set network."""
    _parts: tuple[Any, ...] = ()
    """Networks and heads as `compiled_parts` returned them."""

    def __init__(self, policy: TokenPolicy) -> None:
        super().__init__()
        # A tuple, so that it is not registered as a module.
        self._policy = (policy,)

    @property
    def policy(self) -> TokenPolicy:
        """The policy whose returns are estimated."""
        return self._policy[0]

    @abstractmethod
    def forward(
        self, tokens: Tokens, present: Tensor, pooled: Tensor | None = None
    ) -> Tensor:
        """Return values ``(*B, agents)``, meaningless for absent agents.

        Args:
            tokens: what the critic reads, batch ``(*B, agents)``.
            present: ``(*B, agents)`` bool, False for agents that are absent.
            pooled: ``(*B, agents, D)``, `TokenPolicy.pool` of the tokens where it has
                been computed and the critic `shares_trunk`; None otherwise.
        """

    def is_compiled(self, *, encoder: bool = False) -> bool:
        """Return True if the compiled kernel computes the critic's set networks.

        With ``encoder``, it may leave their pooling heads to torch.
        """
        return all(
            isinstance(part, CompiledSetNetwork) and (encoder or part.whole is not None)
            for part in self._parts
            if isinstance(part, SetNetwork)
        )

    def _part(self, name: str, option: PartOption) -> NamedOptions:
        """Return the options of an encoder or a head; None stands for the policy's."""
        part: NamedOptions = self.policy.network_options[name]
        return part if option is None else with_name(option)

    def _network(
        self, spec: TokenSpec, encoder: PartOption, pooling: PartOption
    ) -> SetNetwork:
        """Build a set network whose other options are the policy's."""
        head = self._part("pooling", pooling)
        parts = {"encoder": self._part("encoder", encoder), "pooling": head}
        try:
            network = SetNetwork(spec, **self.policy.network_options | parts)
        except InputError as error:
            inherited = pooling is None and encoder is not None
            if not (inherited and str(error).startswith("pooling")):
                raise
            raise InputError(
                f"{error}: the policy's head does not fit the critic's encoder; give "
                f"it one, such as critic.pooling={{name: {head['name']}, num_heads: 1}}"
            ) from error
        if network.memory_head is not None:
            raise InputError(
                f"pooling: expected a head without memory, got {head['name']!r}"
            )
        return network

    def _head(self, dim: int, hidden: Sequence[int]) -> nn.Sequential:
        """Build the layers from a vector to a value."""
        activation = ACTIVATIONS[self.policy.activation]
        head = mlp([dim, *hidden, 1], activation)
        init_weights(head, self.policy.network_options["init_std"])
        return head


class OwnCritic(Critic):
    """The value head of the policy, which reads the agent's own observation (IPPO).

    Source: de Witt et al., Is independent learning all you need in the StarCraft
    multi-agent challenge? (2020), https://arxiv.org/abs/2011.09533.
    """

    reads = "own"

    @override
    def forward(
        self, tokens: Tokens, present: Tensor, pooled: Tensor | None = None
    ) -> Tensor:
        return self.policy.value(tokens)


def of_present(
    function: Callable[[Tokens], Result], tokens: Tokens, present: Tensor
) -> Result:
    """Compute the rows of agents that are present; the rows of absent agents are 0.

    On a GPU, where counting the agents would stall the queue, all rows are computed,
    and the results of absent agents are meaningless.

    Args:
        function: computes tensors, each row from its own tokens only.
        tokens: batch ``(*B,)``.
        present: ``(*B,)`` bool.

    Returns:
        The tensors of ``function`` as ``(*B, …)``.
    """
    flat, is_present = tokens.flatten_batch(), present.flatten()
    if not present.is_cpu or present.all():
        computed = function(flat)
    else:
        (rows,) = is_present.nonzero(as_tuple=True)

        def scatter(part: Tensor) -> Tensor:
            zeros = part.new_zeros(len(is_present), *part.shape[1:])
            return zeros.index_copy(0, rows, part)

        computed = tree_map(scatter, function(flat.at(rows)))
    result: Result = tree_map(lambda part: part.unflatten(0, present.shape), computed)
    return result


def compiled_parts(*parts: nn.Module) -> tuple[Any, ...]:
    """Return set networks and heads as the compiled kernel computes them."""
    return tuple(
        compile_network(part) if isinstance(part, SetNetwork) else compile_mlp(part)
        for part in parts
    )
