"""The contract of a `BatchedEnv`, checked at each step.

The first half checks values, for example that agents that are not alive earn nothing;
`CheckedEnv` does so at each step, and a rollout once for many steps. The second half
checks groups, shapes and dtypes. It reads no values, so it costs a few microseconds and
never waits for a GPU.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from marl_pool.envs.timeout import env_call
from marl_pool.finite import validate_finite
from marl_pool.observations.view import MASK
from marl_pool.tokens import Tokens, TokenSpec, dtype_name, form_of
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import place_in_batch

if TYPE_CHECKING:
    from marl_pool.envs.base import AgentGroup, BatchedEnv, Step


class CheckedEnv:
    """An environment whose calls raise InputError where it breaks its contract.

    Attributes:
        presence: agents that are alive and that act; set by `reset` and `step`.
    """

    def __init__(self, env: "BatchedEnv") -> None:
        self.env = env

    def reset(self, where: Tensor | None = None) -> None:
        """Begin the next episode; see `BatchedEnv.reset`."""
        with env_call(self.env, "a reset"):
            self.env.reset(where)
        self.presence = presence_of(self.env)
        validate_presence(self.env, self.presence, first_steps=self.env.steps)

    def step(self, actions: Mapping[str, Tensor]) -> "Step":
        """Advance every environment by one step; see `BatchedEnv.step`."""
        env, steps = self.env, self.env.steps.clone()
        with env_call(env, "a step"):
            step = checked_step(env, actions)
        validate_presence(env, self.presence, step.rewards, first_steps=steps)
        for name, rewards in step.rewards.items():
            validate_finite(
                name, rewards=rewards[None], env_ids=env.env_ids, first_steps=steps
            )
        self.presence = presence_of(env)
        goes_on = ~(step.terminated | step.truncated)
        validate_presence(env, self.presence, first_steps=env.steps, playing=goes_on)
        return step

    def observe(self) -> dict[str, Tokens]:
        """Return tokens for each group; see `BatchedEnv.observe`."""
        env = self.env
        with env_call(env, "an observation"):
            observations = checked_observation(env)
        for name, tokens in observations.items():
            validate_types(env, name, tokens, env.steps)
            validate_finite(
                name,
                tokens.map(lambda part: part[None]),
                env_ids=env.env_ids,
                first_steps=env.steps,
            )
        return observations


def checked_observation(env: "BatchedEnv") -> dict[str, Tokens]:
    """Return the observations, checked and in a new dict.

    Raises:
        InputError: other groups, shapes or dtypes than the environment declares.
    """
    observations = env.observe()
    _validate_observations(env, observations)
    return dict(observations)


def checked_state_specs(env: "BatchedEnv") -> dict[str, TokenSpec]:
    """Return the ``state_specs`` of an environment.

    Raises:
        InputError: they are not a dict of `TokenSpec` by group.
        UnfitTokensError: the environment offers no state.
    """
    specs, part = env.state_specs, "state_specs"
    if not isinstance(specs, dict):
        raise _misfit(env, part, "a dict by group", form_of(specs))
    strange = [name for name in specs if name not in env.groups]
    if strange:
        groups = f"some of the groups {', '.join(env.groups)}"
        raise _misfit(env, part, groups, ", ".join(map(str, strange)))
    for name, spec in specs.items():
        if not isinstance(spec, TokenSpec):
            raise _misfit(env, f"{part} of {name!r}", "a TokenSpec", form_of(spec))
    return dict(specs)


def checked_state(
    env: "BatchedEnv", specs: Mapping[str, TokenSpec]
) -> dict[str, Tokens]:
    """Return the state, checked and in a new dict.

    Args:
        env: the environment.
        specs: its ``state_specs``, which may take longer to build than a step.

    Raises:
        InputError: other groups, shapes or dtypes than the specifications.
        UnfitTokensError: the environment offers no state.
    """
    states = env.observe_state()
    _validate_names(env, "states", states, specs)
    for name, spec in specs.items():
        _validate_tokens(env, name, states[name], spec, False, "states")
    return dict(states)


def checked_step(env: "BatchedEnv", actions: Mapping[str, Tensor]) -> "Step":
    """Step, and check the result even where a subclass overrides `BatchedEnv.step`.

    Raises:
        InputError: other groups, shapes or dtypes than the environment declares.
    """
    step = env.step(actions)
    if env.overrides("step"):
        validate_step(env, step)
    return step


class Presence(NamedTuple):
    """Masks of agents, by group, ``(num_envs, agents)`` bool."""

    alive: Mapping[str, Tensor]
    """Agents of the running episode; see `BatchedEnv.alive`."""
    active: Mapping[str, Tensor]
    """Agents that act in the next step; see `BatchedEnv.active`."""


def presence_of(env: "BatchedEnv") -> Presence:
    """Return which agents are alive and which act in the next step.

    Raises:
        InputError: ``alive`` or ``active`` have other groups, shapes or dtypes.
    """
    active = env.active
    if not env.may_be_absent:
        return Presence(active, active)
    _validate_by_group(env, "active", active, torch.bool)
    if not env.overrides("alive"):
        return Presence(active, active)
    alive = env.alive
    _validate_by_group(env, "alive", alive, torch.bool)
    return Presence(alive, active)


def validate_presence(
    env: "BatchedEnv",
    presence: Presence | None,
    rewards: Mapping[str, Tensor] | None = None,
    *,
    first_steps: Tensor | None = None,
    playing: Tensor | None = None,
) -> None:
    """Raise InputError if an agent acts, waits or earns against the rules.

    While an episode runs, at least one agent is alive; active agents are alive; alive
    agents are active, unless the environment is `BatchedEnv.turn_based`; and agents
    that are not alive earn nothing. Reads values, unless all agents act in every step.

    Args:
        env: the environment.
        presence: presence before each of T steps, ``(T, num_envs, agents)`` or without
            T; may be None unless the environment ``may_be_absent``.
        rewards: rewards of the steps, of the same shape; None before a step.
        first_steps: ``(T, num_envs)``, or without T, numbers of the steps in their
            episodes, for the message; None for 0, 1, … A reward has the next number.
        playing: ``(num_envs,)`` bool, environments to check; None for all.
    """
    if presence is None or not env.may_be_absent:
        return
    breaches = _breaches(env, presence, rewards)
    if playing is not None:
        breaches = {rule: mask & playing[:, None] for rule, mask in breaches.items()}
    # One read for all rules.
    if not torch.stack([mask.any() for mask in breaches.values()]).any():
        return
    # Report the earliest step with a breach, and of its rules the first.
    firsts = {
        rule: mask.view(-1, *mask.shape[-2:]).nonzero()[0].tolist()
        for rule, mask in breaches.items()
        if mask.any()
    }
    rule = min(firsts, key=lambda rule: firsts[rule][0])
    step, row, agent = firsts[rule]
    actual = f"agent {agent} of group {rule.group!r}" if rule.group else "none"
    if rule.part == "rewards" and rewards is not None:
        part = rewards[rule.group]
        earned = part.view(-1, *part.shape[-2:])[step, row, agent]
        actual = f"{float(earned):g} of {actual}"
    number = _step_number(env, first_steps, step, row) + (rule.part == "rewards")
    raise _misfit(env, rule.part, rule.expected, actual + _place(env, row, number))


class _Rule(NamedTuple):
    """A rule on the presence of a group; ``group`` is empty for one on all agents."""

    part: str
    group: str
    expected: str


def _breaches(
    env: "BatchedEnv", presence: Presence, rewards: Mapping[str, Tensor] | None
) -> dict[_Rule, Tensor]:
    """Return where each rule is broken, ``(…, num_envs, agents)`` bool.

    A rule on all agents has a single column.
    """
    nobody = ~torch.cat([*presence.alive.values()], -1).any(-1, keepdim=True)
    somebody = "at least one agent while the episode runs"
    breaches = {_Rule("alive", "", somebody): nobody}
    for name, alive in presence.alive.items():
        active = presence.active[name]
        if not env.turn_based:
            acting = "the active agents only, since turn_based is False"
            breaches[_Rule("alive", name, acting)] = alive & ~active
        breaches[_Rule("active", name, "agents that are alive")] = active & ~alive
        if rewards is not None:
            nothing = "0 for an agent that is not alive"
            earns = ~alive & (rewards[name] != 0)
            breaches[_Rule("rewards", name, nothing)] = earns
    return breaches


def validate_types(
    env: "BatchedEnv",
    group: str,
    tokens: Tokens,
    steps: Tensor,
    playing: Tensor | None = None,
) -> None:
    """Raise InputError if a token other than padding has an undeclared type.

    Reads values.

    Args:
        env: the environment.
        group: the agents' group.
        tokens: observations ``(T, num_envs, agents)``, or without T.
        steps: ``(T, num_envs)``, or without T, numbers of the steps, for the message.
        playing: ``(num_envs,)`` bool, environments to check; None for all.
    """
    count = env.groups[group].tokens.num_types
    # Usually even padding has a declared type, which two numbers tell.
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
    number = int(tokens.types.reshape(wrong.shape)[step, row, agent, slot])
    place = _place(env, row, _step_number(env, steps, step, row))
    actual = f"{number} of agent {agent}{place}"
    raise _misfit(env, f"types of {group!r}", f"numbers below {count}", actual)


def _step_number(
    env: "BatchedEnv", first_steps: Tensor | None, step: int, row: int
) -> int:
    if first_steps is None:
        return step
    return int(first_steps.view(-1, len(env.env_ids))[step, row])


def _place(env: "BatchedEnv", row: int, step: int) -> str:
    number = place_in_batch(int(env.env_ids[row]))
    return f" in environment {number} at step {step}"


def validate_groups(env: "BatchedEnv", kind: "type[AgentGroup]") -> None:
    """Raise InputError unless ``env.groups`` is a dict of ``kind`` by name.

    A group has at least one agent.
    """
    groups = getattr(env, "groups", None)
    if not isinstance(groups, Mapping) or not groups:
        actual = "an empty one" if isinstance(groups, Mapping) else form_of(groups)
        raise _misfit(env, "groups", f"a dict of {kind.__name__} by name", actual)
    for name, group in groups.items():
        if not isinstance(name, str):
            raise _misfit(env, "groups", "names", repr(name))
        if not isinstance(group, kind):
            raise _misfit(env, f"groups[{name!r}]", kind.__name__, form_of(group))
        if group.num_agents < 1:
            part = f"num_agents of {name!r}"
            raise _misfit(env, part, "at least 1", group.num_agents)


def validate_state_names(env: "BatchedEnv") -> None:
    """Raise InputError unless ``state_names`` are tensors with a row for each env.

    To be called after a reset, so that it is found before the first checkpoint.
    """
    if env.overrides("_tensors") and not hasattr(env, "state_names"):
        return  # another list of the state
    names = getattr(env, "state_names", None)
    if not isinstance(names, tuple | list):
        actual = repr(names) if isinstance(names, str) else form_of(names)
        raise _misfit(env, "state_names", "a tuple of attributes", actual)
    for name in names:
        part = f"state_names: {name!r}"
        expected = f"an attribute, a tensor with {env.num_envs} rows (num_envs)"
        if not isinstance(name, str) or not hasattr(env, name):
            raise _misfit(env, part, expected, "none of this name")
        value = getattr(env, name)
        if not isinstance(value, Tensor) or value.shape[:1] != (env.num_envs,):
            raise _misfit(env, part, expected, form_of(value))


def validate_results(
    env: "BatchedEnv", results: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the ``results`` of `BatchedEnv.advance` if they have the right form.

    Raises:
        InputError: not a pair, other groups than the environment's, or a part that is
            not a tensor of the right shape and dtype.
    """
    if not (isinstance(results, tuple) and len(results) == 2):
        is_tuple = isinstance(results, tuple)
        actual = f"{len(results)} of them" if is_tuple else form_of(results)
        raise _misfit(env, "advance", "a tuple of rewards and terminated", actual)
    rewards, terminated = results
    _validate_by_group(env, "rewards", rewards)
    _validate_form(env, "terminated", terminated, (env.num_envs,), torch.bool)
    return rewards, terminated


def validate_step(env: "BatchedEnv", step: "Step") -> None:
    """Raise InputError if a result of an overridden `BatchedEnv.step` is malformed."""
    if not (isinstance(step, tuple) and hasattr(step, "truncated")):
        raise _misfit(env, "step", "a Step", form_of(step))
    validate_results(env, (step.rewards, step.terminated))
    _validate_form(env, "truncated", step.truncated, (env.num_envs,), torch.bool)


def _validate_by_group(
    env: "BatchedEnv", part: str, tensors: Any, dtype: torch.dtype | None = None
) -> None:
    """Raise InputError unless there is a tensor ``(num_envs, agents)`` for each group.

    By default their dtype is the environment's, or float64.
    """
    _validate_names(env, part, tensors, env.groups)
    for name, group in env.groups.items():
        shape = (env.num_envs, group.num_agents)
        subject = f"{part} of {name!r}"
        _validate_form(env, subject, tensors[name], shape, dtype or env.dtype)


def _validate_observations(env: "BatchedEnv", observations: Any) -> None:
    """Raise InputError unless there are tokens of the specified form for each group."""
    _validate_names(env, "observations", observations, env.groups)
    for name, group in env.groups.items():
        _validate_tokens(
            env, name, observations[name], group.tokens, group.has_action_masks
        )


def _validate_tokens(
    env: "BatchedEnv",
    name: str,
    tokens: Any,
    spec: TokenSpec,
    needs_mask: bool,
    source: Literal["observations", "states"] = "observations",
) -> None:
    """Raise InputError unless the tokens of a group have the specified form.

    An action mask is checked if there is one; ``needs_mask`` requires it.
    """
    group = env.groups[name]
    shape = (env.num_envs, group.num_agents, spec.num_tokens)
    real = torch.uint8 if spec.dtype == "uint8" else env.dtype
    # The common case, which has to be fast.
    if (
        isinstance(tokens, Tokens)
        and _has_form(tokens.features, (*shape, spec.num_features), real)
        and _has_form(tokens.types, shape, torch.int64)
        and _has_form(tokens.padding, shape, torch.bool)
        and not tokens.features.requires_grad
        and tokens.action_mask is None
        and not needs_mask
    ):
        return
    if not isinstance(tokens, Tokens):
        raise _misfit(env, f"{source} of {name!r}", "Tokens", form_of(tokens))
    owner = f"of {name!r}" if source == "observations" else f"of states of {name!r}"
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "features": ((*shape, spec.num_features), real),
        "types": (shape, torch.int64),
        "padding": (shape, torch.bool),
    }
    if tokens.action_mask is not None or needs_mask:
        forms[MASK] = (*shape[:2], group.actions.num_options), torch.bool
    for part, form in forms.items():
        _validate_form(env, f"{part} {owner}", getattr(tokens, part), *form)
    if tokens.features.requires_grad:
        expected, actual = "a tensor without gradient", "one that requires it"
        raise _misfit(env, f"features {owner}", expected, actual)


def _validate_names(
    env: "BatchedEnv", part: str, by_group: Any, groups: Iterable[str]
) -> None:
    if not isinstance(by_group, dict):
        raise _misfit(env, part, "a dict by group", form_of(by_group))
    if by_group.keys() != set(groups):
        names = ", ".join(map(str, by_group)) or "none"
        raise _misfit(env, part, f"the groups {', '.join(groups)}", names)


def _validate_form(
    env: object, part: str, value: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not _has_form(value, shape, dtype):
        expected = f"a tensor of {dtype_name(dtype)} of shape {shape}"
        raise _misfit(env, part, expected, form_of(value))


def _has_form(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True for a tensor of this shape and dtype.

    Evaluation acts in float64, so results may be float64 for any floating ``dtype``.
    """
    if not isinstance(value, Tensor) or value.shape != shape:
        return False
    is_double = value.dtype is torch.float64 and dtype.is_floating_point
    return value.dtype is dtype or is_double


def _misfit(env: object, part: str, expected: object, actual: object) -> InputError:
    """Return the error for a malformed part of an environment or of its results."""
    return InputError(
        f"{type(env).__name__}: {part}: expected {expected}, got {actual}"
    )
