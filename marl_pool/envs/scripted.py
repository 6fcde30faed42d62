"""Policies that play a group of agents without having learned."""

from marl_pool.envs import HEURISTICS, make_heuristic
from marl_pool.envs.base import AgentGroup
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.utils.construction import build
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import is_plug_in

HEURISTIC, RANDOM = "heuristic", "random"


def is_scripted(name: str) -> bool:
    """Whether ``name`` is one that `scripted_policy` builds, so no folder."""
    return name in (HEURISTIC, RANDOM) or is_plug_in(name)


def scripted_policy(name: str, *, env: str, role: str, group: AgentGroup) -> Policy:
    """Build the policy that plays a group.

    Args:
        name: ``"heuristic"`` of the env, ``"random"``, or ``package.module:Class`` of
            a `Policy`, constructed with ``group=…`` if it takes that.
        env: name of the env.
        role: name of the group.
        group: its sizes and spaces.

    Raises:
        InputError: the env has no heuristic, or there is no such policy.
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
