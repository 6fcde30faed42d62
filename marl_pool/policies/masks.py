"""Validation of action masks from environments."""

from typing import Any

from gymnasium import spaces
from torch import Tensor

from marl_pool.observations.make import split_action_mask
from marl_pool.observations.masks import MASK, fits, mask_sizes
from marl_pool.policies.action_spaces import ActionRows
from marl_pool.policies.actions import ActionSpec
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import place_in_batch


def validate_mask_space(
    observation: spaces.Space[Any], action: spaces.Space[Any], where: str
) -> None:
    """Raise InputError unless a mask has an entry for each option of each choice.

    Args:
        observation: space of an agent's observations, perhaps with a mask.
        action: space of the agent's actions.
        where: start of the message.
    """
    _, mask = split_action_mask(observation)
    if mask is None:
        return
    choices, sizes = ActionRows(action).sizes, mask_sizes(mask)
    if fits(sizes, choices):
        return
    expected = f"an {MASK} of shape ({sum(choices)},)" if choices else f"no {MASK}"
    if len(choices) > 1:
        expected += f", or a Tuple of the sizes {choices}"
    actual = f"a Tuple of the sizes {sizes}" if len(sizes) > 1 else sizes
    raise InputError(
        f"{where}: expected {expected} for {' '.join(str(action).split())}, "
        f"got {actual}"
    )


def validate_masks(
    group: str,
    spec: ActionSpec,
    mask: Tensor,
    active: Tensor,
    *,
    num_tokens: int,
    env_ids: Tensor,
    steps: Tensor,
) -> None:
    """Raise InputError unless every agent that acts may choose something.

    Args:
        group: the agents' group, for the message.
        spec: their actions.
        mask: ``(num_envs, agents, num_options)`` bool.
        active: ``(num_envs, agents)`` bool, agents that act.
        num_tokens: number of tokens that each agent perceives.
        env_ids: ``(num_envs,)`` numbers of the environments, for the message.
        steps: ``(num_envs,)`` steps of the episodes before this one, for the message.
    """
    shape = (*active.shape, spec.mask_width(num_tokens))
    if mask.shape != shape or not spec.sizes:
        expected = f"the shape {shape}" if spec.sizes else "none without choices"
        raise InputError(
            f"action_mask of group {group!r}: expected {expected}, "
            f"got {tuple(mask.shape)}"
        )
    options = mask[..., None, :] if spec.discrete else spec.table(mask, False)
    stuck = ~options.any(-1) & active[..., None]
    if stuck.any():
        env, agent, number = stuck.nonzero()[0].tolist()
        suffix = "" if spec.discrete else f" of choice {number}"
        raise InputError(
            f"action_mask of agent {agent} of group {group!r} in environment "
            f"{place_in_batch(int(env_ids[env]))} at step {int(steps[env])}: expected "
            f"at least one allowed action{suffix}, got none"
        )
