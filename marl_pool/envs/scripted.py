"""Scripted policies: heuristic, random and plug-ins."""

from abc import abstractmethod
from typing import Any

from torch import Tensor
from typing_extensions import override

from marl_pool.envs import HEURISTICS, make_heuristic
from marl_pool.envs.base import AgentGroup
from marl_pool.options.construction import build
from marl_pool.options.names import is_plug_in
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream

HEURISTIC, RANDOM = "heuristic", "random"


class Heuristic(Policy):
    """A deterministic, stateless policy, defined by `choose`.

    Args:
        **config: the subclass's own options, JSON-ready.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the actions of the agents, and the logits for `Decision.logits`."""

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        action, logits = self.choose(tokens)
        none = logits.new_zeros(tokens.batch_shape)
        return Decision(action, none, none, logits, state)


def is_scripted(name: str) -> bool:
    """Return True for names that `scripted_policy` builds; others are folders."""
    return name in (HEURISTIC, RANDOM) or is_plug_in(name)


def scripted_policy(name: str, *, env: str, role: str, group: AgentGroup) -> Policy:
    """Build the scripted policy of a group of agents.

    Args:
        name: ``"heuristic"``, ``"random"``, or the ``package.module:Class`` of a
            `Policy`, which is passed ``group=…`` if its constructor has such a
            parameter.
        env: name of the environment.
        role: name of the group.
        group: sizes and spaces of the group.

    Raises:
        InputError: an environment without a heuristic, or an unknown policy.
    """
    if name == RANDOM:
        return RandomPolicy(group.action_space)
    if name != HEURISTIC:
        policy: Policy = build(name, {}, "policy", Policy, {}, {"group": group})
        return policy
    if env not in HEURISTICS:
        raise InputError(
            f"the env {env!r} has no heuristic: choose random, package.module:Class "
            "or the folder of a policy"
        )
    return make_heuristic(env, group, role=role)
