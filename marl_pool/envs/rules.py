"""The rules of steps and of agents' lives, which hold wherever an env is played."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv, Step
from marl_pool.envs.contract import (
    misfit,
    validate_by_group,
    validate_observation,
    validate_step,
)
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import place_in_batch


class Presence(NamedTuple):
    """Agents that live and those that act, by group, ``(num_envs, agents)`` bool."""

    alive: Mapping[str, Tensor]
    """Agents of the running episode; see `BatchedEnv.alive`."""
    active: Mapping[str, Tensor]
    """Those that act in the next step; see `BatchedEnv.active`."""


def checked_observation(env: BatchedEnv) -> dict[str, Tokens]:
    """Observe, into a dict that the environment does not keep.

    Raises:
        InputError: other groups, shapes or dtypes than the environment declares.
    """
    observed = env.observe()
    validate_observation(env, observed)
    return dict(observed)


def validate_types(
    env: BatchedEnv,
    group: str,
    tokens: Tokens,
    steps: Tensor,
    playing: Tensor | None = None,
) -> None:
    """Raise InputError if a token that is no padding has a type of no name.

    It reads values.

    Args:
        env: the environment.
        group: the agents' group.
        tokens: observations ``(T, num_envs, agents)``, or without T.
        steps: ``(T, num_envs)``, or without T, numbers of the steps, for the message.
        playing: ``(num_envs,)`` bool, environments to look at; None for all.
    """
    count = env.groups[group].tokens.num_types
    low, high = tokens.types.aminmax()
    if low >= 0 and high < count:
        return
    wrong = (tokens.types < 0) | (tokens.types >= count)
    # The types of padding are arbitrary.
    wrong = (wrong & ~tokens.padding).view(-1, *wrong.shape[-3:])
    if playing is not None:
        wrong &= playing[:, None, None]
    if not wrong.any():
        return
    step, row, agent, slot = wrong.nonzero()[0].tolist()
    types = tokens.types.reshape(wrong.shape)
    raise misfit(
        env,
        f"types of {group!r}",
        f"numbers below {count}",
        f"{int(types[step, row, agent, slot])} of agent {agent} in environment "
        f"{place_in_batch(int(env.env_ids[row]))} at step "
        f"{int(steps.view(-1, len(env.env_ids))[step, row])}",
    )


def checked_step(env: BatchedEnv, actions: Mapping[str, Tensor]) -> Step:
    """Step, and check the result of an overridden `BatchedEnv.step` as well.

    Raises:
        InputError: other groups, shapes or dtypes than the environment declares.
    """
    step = env.step(actions)
    if type(env).step is not BatchedEnv.step:
        validate_step(env, step)
    return step


def may_be_absent(env: BatchedEnv) -> bool:
    """Return False if all agents act in every step, which is the default."""
    kind = type(env)
    return kind.active is not BatchedEnv.active or kind.alive is not BatchedEnv.alive


def presence_of(env: BatchedEnv) -> Presence:
    """Return which agents live and act now.

    Raises:
        InputError: ``alive`` or ``active`` have other groups, shapes or dtypes.
    """
    active = env.active
    if not may_be_absent(env):
        return Presence(active, active)
    validate_by_group(env, "active", active, torch.bool)
    if type(env).alive is BatchedEnv.alive:
        return Presence(active, active)
    alive = env.alive
    validate_by_group(env, "alive", alive, torch.bool)
    return Presence(alive, active)


def validate_lives(
    env: BatchedEnv,
    lives: Presence,
    rewards: Mapping[str, Tensor] | None = None,
    *,
    first_steps: Tensor | None = None,
    playing: Tensor | None = None,
) -> None:
    """Raise InputError if an agent acts, waits or earns against the rules.

    While an episode runs some agent is alive; agents that act are alive; those that are
    alive act, unless the environment is `BatchedEnv.turn_based`; and those that are not
    alive earn nothing. Where an environment leaves ``alive`` and ``active`` to
    `BatchedEnv`, all agents live and nothing is computed. It reads values.

    Args:
        env: the environment.
        lives: before each of T steps, ``(T, num_envs, agents)`` or without T.
        rewards: of the steps, likewise, or None if not known yet.
        first_steps: ``(T, num_envs)`` numbers of the steps in their episodes, or
            without T, for the message; None for 0, 1, … A reward counts to the step
            after.
        playing: ``(num_envs,)`` bool, environments to look at; None for all.
    """
    if not may_be_absent(env):
        return
    rules = _breaches(env, lives, rewards)
    if playing is not None:
        rules = {rule: mask & playing[:, None] for rule, mask in rules.items()}
    if not torch.stack([mask.any() for mask in rules.values()]).any():
        return
    # Report the earliest step, in which the first of the rules is broken.
    firsts = {
        rule: mask.view(-1, *mask.shape[-2:]).nonzero()[0].tolist()
        for rule, mask in rules.items()
        if mask.any()
    }
    rule = min(firsts, key=lambda rule: firsts[rule][0])
    step, row, agent = firsts[rule]
    actual = f"agent {agent} of group {rule.group!r}" if rule.group else "none"
    if rule.part == "rewards" and rewards is not None:
        part = rewards[rule.group]
        earned = part.view(-1, *part.shape[-2:])[step, row, agent]
        actual = f"{float(earned):g} of {actual}"
    if first_steps is not None:
        step = int(first_steps.view(-1, len(env.env_ids))[step, row])
    step += rule.part == "rewards"
    actual += f" in environment {place_in_batch(int(env.env_ids[row]))} at step {step}"
    raise misfit(env, rule.part, rule.expected, actual)


class _Rule(NamedTuple):
    """A rule of agents' lives; ``group`` is empty for one of all agents together."""

    part: str
    group: str
    expected: str


def _breaches(
    env: BatchedEnv, lives: Presence, rewards: Mapping[str, Tensor] | None
) -> dict[_Rule, Tensor]:
    """Return where each rule is broken, ``(…, num_envs, agents)`` bool.

    Of a rule of all agents there is one column.
    """
    nobody = ~torch.cat([*lives.alive.values()], -1).any(-1, keepdim=True)
    somebody = "at least one agent while the episode runs"
    breaches = {_Rule("alive", "", somebody): nobody}
    for name, alive in lives.alive.items():
        active = lives.active[name]
        if not env.turn_based:
            acting = "the active agents only, since turn_based is False"
            breaches[_Rule("alive", name, acting)] = alive & ~active
        breaches[_Rule("active", name, "agents that are alive")] = active & ~alive
        if rewards is not None:
            nothing = "0 for an agent that is not alive"
            earns = ~alive & (rewards[name] != 0)
            breaches[_Rule("rewards", name, nothing)] = earns
    return breaches
