"""Policies: maps from tokens to actions, and functions that build them."""

from typing import TYPE_CHECKING, Any

from marl_pool.options.construction import build
from marl_pool.options.plugins import Registry
from marl_pool.options.types import Part
from marl_pool.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from gymnasium import spaces

    from marl_pool.policies.agent import Agent as Agent
    from marl_pool.policies.base import Decision as Decision
    from marl_pool.policies.base import Policy as Policy
    from marl_pool.policies.random_policy import RandomPolicy as RandomPolicy
    from marl_pool.policies.sensory import FeedForward as FeedForward
    from marl_pool.policies.sensory import Sensory as Sensory
    from marl_pool.policies.token_policy import TokenPolicy as TokenPolicy
    from marl_pool.tokens import TokenSpec

AGENTS = Registry(
    "policy",
    {
        "feed_forward": "marl_pool.policies.sensory:FeedForward",
        "sensory": "marl_pool.policies.sensory:Sensory",
    },
)
"""Policies that can be evolved and cloned, by short name."""

POLICIES = Registry(
    "policy",
    {
        **AGENTS.built_in,
        "token": "marl_pool.policies.token_policy:TokenPolicy",
    },
)
"""Policies that can be saved and loaded, by short name."""


def make_policy(
    spec: "TokenSpec",
    action_space: "spaces.Space",
    *,
    pooling: Part = "ada",
    encoder: Part = "transformer",
    **options: Any,
) -> "TokenPolicy":
    """Build an actor-critic on sets of tokens.

    Example:
        >>> group = make_batched_env("simple_centroid", 1).groups["agent"]
        >>> policy = make_policy(group.tokens, group.action_space, pooling="max")

    Args:
        spec: sizes and types of the tokens.
        action_space: Discrete, MultiDiscrete, MultiBinary, a bounded Box of one
            dimension, or a Tuple or Dict of them; see `ActionSpec`.
        pooling: a name, or ``{"name": …, **options}``.
        encoder: a name, or ``{"name": …, **options}``.
        **options: other options of `TokenPolicy`.

    Raises:
        InputError: an unknown name or a wrong option.
    """
    from marl_pool.policies.token_policy import TokenPolicy

    options |= {"encoder": encoder, "pooling": pooling}
    context = {"spec": spec, "action_space": action_space}
    return build("token", POLICIES, "policy", TokenPolicy, options, context)


def make_agent(
    spec: "TokenSpec", action_space: "spaces.Space", name: str, **options: Any
) -> "Agent":
    """Build a policy that is evolved or cloned; see `make_policy`.

    Args:
        spec: sizes and types of the tokens.
        action_space: Discrete, MultiDiscrete, MultiBinary, a bounded Box of one
            dimension, or a Tuple or Dict of them; see `ActionSpec`.
        name: a key of `AGENTS`, or ``package.module:Class``.
        **options: options of that class.

    Raises:
        InputError: an unknown name, a wrong option, or a class or state that cannot be
            saved, which is said before training.
    """
    from marl_pool.networks.set_network import validate_state
    from marl_pool.policies.agent import Agent
    from marl_pool.policies.storage import validate_class

    context = {"spec": spec, "action_space": action_space}
    agent: Agent = build(name, AGENTS, "policy", Agent, options, context)
    validate_class(agent)
    validate_state(f"policy {name!r}", agent)
    return agent


__getattr__, __dir__ = lazy_exports(__name__)
