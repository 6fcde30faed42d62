"""The interface of critics."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from typing_extensions import override

from marl_pool.compiled.mlp import compile_mlp
from marl_pool.compiled.network import CompiledSetNetwork, compile_network
from marl_pool.kernels.functional import ACTIVATIONS, mlp
from marl_pool.networks.set_network import SetNetwork, init_weights
from marl_pool.options.types import NamedOptions
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

PartOption = str | Mapping[str, Any] | None
"""Encoder or head: a name, ``{"name": …, **options}``, or None for the policy's."""


class Critic(nn.Module):
    """Estimates the returns of the agents of a team, one value for each.

    A team are the agents of one group in one environment. Learners and runners have a
    critic beside the policy; neither the saved policy nor evaluation has one.

    Args:
        policy: the policy whose returns are estimated.

    The policy's parameters are no parameters of the critic.
    """

    reads: ClassVar[Literal["own", "team", "state"]]
    """What one value depends on: the observation of the agent, all observations of
    the team, or the state of the environment."""
    shares_trunk: bool = False
    """True if the critic reads what the policy's set network makes of a set."""
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
        """Return values ``(*B, agents)``, without a meaning for absent agents.

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
        if option is None:
            part: NamedOptions = self.policy.config[name]
            return part
        return {"name": option} if isinstance(option, str) else option

    def _network(
        self, spec: TokenSpec, encoder: PartOption, pooling: PartOption
    ) -> SetNetwork:
        """Build a set network whose other options are the policy's."""
        config = self.policy.config
        head = self._part("pooling", pooling)
        try:
            network = SetNetwork(
                spec,
                encoder=self._part("encoder", encoder),
                pooling=head,
                type_embedding=config["type_embedding"],
                input_activation=config["input_activation"],
                init_std=config["init_std"],
            )
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
        init_weights(head, self.policy.config["init_std"])
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
    function: Callable[[Tokens], tuple[Tensor, ...]], tokens: Tokens, present: Tensor
) -> tuple[Tensor, ...]:
    """Compute the rows of agents that are present, and 0 for those of absent agents.

    On a GPU, which would have to be waited for to count the agents, all rows are
    computed, so that those of absent agents have no meaning.

    Args:
        function: computes each row from its tokens alone.
        tokens: batch ``(B,)``.
        present: ``(B,)`` bool.
    """
    if not present.is_cpu or present.all():
        return function(tokens)
    (rows,) = present.nonzero(as_tuple=True)
    return tuple(
        part.new_zeros(len(present), *part.shape[1:]).index_copy(0, rows, part)
        for part in function(tokens.at(rows))
    )


def compiled_parts(*parts: nn.Module) -> tuple[Any, ...]:
    """Return set networks and heads as the compiled kernel computes them."""
    return tuple(
        compile_network(part) if isinstance(part, SetNetwork) else compile_mlp(part)
        for part in parts
    )
