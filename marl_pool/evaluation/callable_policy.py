"""Any function from observations to actions, as a policy."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.observations.masks import MASK
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.randomness import Stream

Act = Callable[[dict[str, np.ndarray]], ArrayLike]
"""Takes observations ``{"features", "types", "padding"}`` of many agents at once, and
``"action_mask"`` where the environment has one."""


class CallablePolicy(Policy):
    """A function as a policy without memory.

    The function decides by itself whether it samples: ``explore`` is ignored.

    Args:
        act: takes a dictionary of arrays whose first dimension B counts environments
            times agents: ``features (B, N, F)``, ``types (B, N)`` and ``padding
            (B, N)``, in the dtypes of the env's observation space, and ``action_mask
            (B, n)`` bool, True = allowed, where there is one. Returns actions as
            `ActionSpec` has them: ``(B, A)`` in the units of a Box, which clips them;
            ``(B,)`` of a Discrete space; ``(B, K)`` of several choices, each counted
            from 0; or ``(B, K + A)``, the choices before the numbers of a Box.
        group: group of agents that it plays.

    Raises:
        InputError: ``act`` cannot be called.

    `act` raises `InputError` for actions of another shape or dtype, or that are not
    finite, and `UnfitTokensError` if the function fails on another number of tokens
    than the environment's, which some perturbations change.
    """

    def __init__(self, act: Act, group: AgentGroup) -> None:
        super().__init__()
        if not callable(act):
            raise InputError(
                f"policy: expected a function of observations or a Policy, "
                f"got {type(act).__name__}"
            )
        self._act, self.group = act, group
        # Several threads play cases, which a foreign library may not support.
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CallablePolicy":
        # The function may refer to a whole foreign library, which need not be copied.
        return self

    @override
    @torch.no_grad()
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        flat = tokens.flatten_batch().columns
        observation = {name: column.cpu().numpy() for name, column in flat.items()}
        shape, device = tokens.batch_shape, tokens.types.device
        with self._lock:
            try:
                actions = self._act(observation)
            except Exception as error:
                # A function made for N tokens may fail on another number of them.
                expected = self.group.tokens.num_tokens
                if tokens.num_tokens == expected:
                    raise
                reason = " ".join(str(error).split()) or type(error).__name__
                raise UnfitTokensError(
                    f"the policy takes {expected} tokens and fails on "
                    f"{tokens.num_tokens}: {reason:.200}"
                ) from error
            # Copy before the next call: the function may fill the same array again.
            valid_actions = self._checked(actions, shape.numel())
        if MASK in observation:
            _validate_allowed(valid_actions, observation[MASK], self.group.actions)
        # A function has neither log-probabilities nor values.
        action = torch.as_tensor(valid_actions, device=device).unflatten(0, shape)
        zeros = torch.zeros(shape, device=device)
        return Decision(action, zeros, zeros, zeros[..., None], state)

    def _checked(self, output: ArrayLike, count: int) -> np.ndarray:
        """Return ``count`` actions in the dtype of the action space."""
        # Accept nested lists as well as arrays.
        try:
            actions = np.asarray(output)
        except ValueError as error:  # rows of unequal length
            raise InputError(
                f"policy: expected an array of actions: {error}"
            ) from error
        spec, dtype = self.group.actions, actions.dtype
        shape = (count, *spec.shape)
        kind, codes = ("an integer", "iu") if spec.integral else ("a real", "iuf")
        # Check shape, kind and values before anything is cast.
        if actions.shape != shape:
            raise InputError(
                f"policy: expected actions of shape {shape}, got {actions.shape}"
            )
        if dtype.kind not in codes:
            raise InputError(f"policy: expected actions of {kind} dtype, got {dtype}")
        if not np.isfinite(actions).all():
            raise InputError("policy: expected finite actions, got NaN or infinity")
        _validate_choices(actions, spec)
        return actions.astype(np.int64 if spec.integral else np.float32)


def _choices(actions: np.ndarray, spec: ActionSpec) -> np.ndarray:
    """Return the choices of actions, ``(B, K)``."""
    rows = actions[:, None] if spec.discrete else actions
    return rows[:, : len(spec.sizes)]


def _validate_choices(actions: np.ndarray, spec: ActionSpec) -> None:
    """Raise InputError for choices that are no options."""
    choices = _choices(actions, spec)
    inside = (choices >= 0) & (choices < spec.sizes) & (choices == choices // 1)
    if not inside.all():
        row, number = np.argwhere(~inside)[0]
        prefix = "" if spec.discrete else f"choice {number}: "
        raise InputError(
            f"policy: row {row}: {prefix}expected 0 to {spec.sizes[number] - 1}, got "
            f"{choices[row, number]}"
        )


def _validate_allowed(actions: np.ndarray, mask: np.ndarray, spec: ActionSpec) -> None:
    """Raise InputError if an agent that acts chose an option that is not allowed."""
    choices = _choices(actions, spec).astype(np.int64)
    firsts = np.cumsum((0, *spec.sizes[:-1]))
    allowed = np.take_along_axis(mask, firsts + choices, 1)
    # Agents that are absent may do nothing at all.
    wrong = mask.any(1, keepdims=True) & ~allowed
    if wrong.any():
        row, number = map(int, np.argwhere(wrong)[0])
        options = mask[row, firsts[number] :][: spec.sizes[number]]
        prefix = "" if spec.discrete else f"choice {number}: "
        raise InputError(
            f"policy: row {row}: {prefix}expected one of the actions that action_mask "
            f"allows, {np.flatnonzero(options).tolist()}, got {choices[row, number]}"
        )
