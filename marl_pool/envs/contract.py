"""Groups, shapes and dtypes of what an environment returns; see `BatchedEnv`.

No value is read, so a check costs a few microseconds and never waits for a GPU.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from marl_pool.observations.view import MASK
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.envs.base import BatchedEnv, Step


def validate_groups(env: "BatchedEnv", kind: type) -> None:
    """Raise InputError unless ``env.groups`` are instances of ``kind`` by name."""
    groups = getattr(env, "groups", None)
    if not isinstance(groups, Mapping) or not groups:
        actual = "an empty one" if isinstance(groups, Mapping) else kind_of(groups)
        raise misfit(env, "groups", f"a dict of {kind.__name__} by name", actual)
    for name, group in groups.items():
        if not isinstance(name, str):
            raise misfit(env, "groups", "names", repr(name))
        if not isinstance(group, kind):
            raise misfit(env, f"groups[{name!r}]", kind.__name__, kind_of(group))


def validate_results(env: "BatchedEnv", results: Any) -> tuple[dict[str, Tensor], Any]:
    """Return what `BatchedEnv.advance` returned, if it has the right form.

    Raises:
        InputError: no pair, other groups than the environment's, or a part that is no
            tensor of the right shape and dtype.
    """
    if not (isinstance(results, tuple) and len(results) == 2):
        actual = kind_of(results)
        if isinstance(results, tuple):
            actual = f"{len(results)} of them"
        raise misfit(env, "advance", "a tuple of rewards and terminated", actual)
    rewards, terminated = results
    validate_by_group(env, "rewards", rewards)
    _validate_ends(env, "terminated", terminated)
    return rewards, terminated


def validate_step(env: "BatchedEnv", step: "Step") -> None:
    """Raise InputError if a step, of an overridden `BatchedEnv.step`, is malformed."""
    if not (isinstance(step, tuple) and hasattr(step, "truncated")):
        raise misfit(env, "step", "a Step", kind_of(step))
    validate_results(env, (step.rewards, step.terminated))
    _validate_ends(env, "truncated", step.truncated)


def validate_by_group(
    env: "BatchedEnv", part: str, tensors: Any, dtype: torch.dtype | None = None
) -> None:
    """Raise InputError unless there is a tensor ``(num_envs, agents)`` for each group.

    Without a ``dtype`` they have the dtype of the environment, or float64.
    """
    _validate_names(env, part, tensors)
    for name, group in env.groups.items():
        form = (env.num_envs, group.num_agents), dtype or env.dtype
        if not _has_form(tensors[name], *form):
            raise _wrong_form(env, f"{part} of {name!r}", tensors[name], *form)


def validate_observation(env: "BatchedEnv", observed: Any) -> None:
    """Raise InputError unless there are tokens of the specified form for each group."""
    _validate_names(env, "observations", observed)
    for name, group in env.groups.items():
        tokens, spec = observed[name], group.tokens
        shape = (env.num_envs, group.num_agents, spec.num_tokens)
        real = torch.uint8 if spec.dtype == "uint8" else env.dtype
        # Most often all is right, and then no more than this may be computed.
        if (
            isinstance(tokens, Tokens)
            and _has_form(tokens.features, (*shape, spec.num_features), real)
            and _has_form(tokens.types, shape, torch.int64)
            and _has_form(tokens.padding, shape, torch.bool)
            and not tokens.features.requires_grad
            and tokens.action_mask is None
            and not group.has_action_masks
        ):
            continue
        if not isinstance(tokens, Tokens):
            part = f"observations of {name!r}"
            raise misfit(env, part, "Tokens", kind_of(tokens))
        options = (*shape[:2], group.actions.num_options)
        forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "features": ((*shape, spec.num_features), real),
            "types": (shape, torch.int64),
            "padding": (shape, torch.bool),
            MASK: (options, torch.bool),
        }
        for part, form in forms.items():
            value = getattr(tokens, part)
            if part == MASK and value is None and not group.has_action_masks:
                continue
            if not _has_form(value, *form):
                raise _wrong_form(env, f"{part} of {name!r}", value, *form)
        if tokens.features.requires_grad:
            part = f"features of {name!r}"
            raise misfit(env, part, "a tensor without gradient", "one that requires it")


def _validate_names(env: "BatchedEnv", part: str, by_group: Any) -> None:
    if not isinstance(by_group, dict):
        raise misfit(env, part, "a dict by group", kind_of(by_group))
    if by_group.keys() != env.groups.keys():
        names = ", ".join(map(str, by_group)) or "none"
        raise misfit(env, part, f"the groups {', '.join(env.groups)}", names)


def _validate_ends(env: "BatchedEnv", part: str, ends: Any) -> None:
    form = (env.num_envs,), torch.bool
    if not _has_form(ends, *form):
        raise _wrong_form(env, part, ends, *form)


def _has_form(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True for a tensor of this shape and dtype.

    Evaluation acts in float64, which an environment may carry on to its results.
    """
    if not isinstance(value, Tensor) or value.shape != shape:
        return False
    is_double = value.dtype is torch.float64 and dtype.is_floating_point
    return value.dtype is dtype or is_double


def _wrong_form(
    env: object,
    part: str,
    value: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> InputError:
    expected = f"a tensor of {_name_of(dtype)} of shape {shape}"
    return misfit(env, part, expected, kind_of(value))


def misfit(env: object, part: str, expected: object, actual: object) -> InputError:
    """Build the error for a part of what an environment of some class returned."""
    return InputError(
        f"{type(env).__name__}: {part}: expected {expected}, got {actual}"
    )


def kind_of(value: object) -> str:
    """Describe a value by its type, and a tensor by its dtype and shape, too."""
    if isinstance(value, Tensor):
        return f"{_name_of(value.dtype)} of shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
