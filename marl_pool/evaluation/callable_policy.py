"""Any function from observations to actions, as a policy."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike

from marl_pool.envs.base import AgentGroup
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.randomness import Stream

Act = Callable[[dict[str, np.ndarray]], ArrayLike]
"""Takes observations ``{"features", "types", "padding"}`` of many agents at once."""


class Function(Policy):
    """A function as a policy, without memory.

    Args:
        act: takes a dictionary of arrays whose first dimension B counts worlds times
            agents: ``features (B, N, F)``, ``types (B, N)`` and ``padding (B, N)``,
            in the dtypes of the env's observation space. Returns actions: ``(B, A)``
            in the units of a Box, which clips them, or ``(B,)`` of a Discrete space.
        group: whose agents it plays.

    Raises:
        InputError: from `act`, actions of another shape or dtype, or not finite.
        UnfitTokensError: from `act`, it fails where a perturbation changed how many
            tokens there are.
    """

    def __init__(self, act: Act, group: AgentGroup) -> None:
        super().__init__()
        self._act, self.group = act, group
        # Cases are played by several threads, of which a foreign library knows nothing.
        self._turn = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Function":
        # What it calls may be a whole foreign library, which nobody changes here.
        return self

    @torch.no_grad()
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Ask the function; see `Policy.act`. It alone knows whether it samples."""
        shape, device = tokens.batch_shape, tokens.types.device
        action = torch.as_tensor(self._ask(tokens.flatten_batch()), device=device)
        zeros = torch.zeros(shape, device=device)
        return Decision(
            action.unflatten(0, shape), zeros, zeros, zeros[..., None], state
        )

    def _ask(self, tokens: Tokens) -> np.ndarray:
        with self._turn:
            return self._ask_alone(tokens)

    def _ask_alone(self, tokens: Tokens) -> np.ndarray:
        observation = {
            name: part.cpu().numpy() for name, part in tokens._asdict().items()
        }
        expected = self.group.tokens.num_tokens
        if tokens.num_tokens == expected:
            found = self._act(observation)
        else:
            try:
                found = self._act(observation)
            except Exception as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise UnfitTokensError(
                    f"the policy takes {expected} tokens and fails on "
                    f"{tokens.num_tokens}: {reason:.200}"
                ) from error
        return self._checked(_array(found), len(tokens.types))

    def _checked(self, found: np.ndarray, count: int) -> np.ndarray:
        space = self.group.action_space
        shape = (count, *(space.shape or ()))
        if found.shape != shape:
            raise InputError(
                f"policy: expected actions of shape {shape}, got {found.shape}"
            )
        if isinstance(space, spaces.Discrete):
            if not np.issubdtype(found.dtype, np.integer):
                raise InputError(
                    f"policy: expected actions of an integer dtype, got {found.dtype}"
                )
            return found.astype(np.int64)
        if not (np.issubdtype(found.dtype, np.number) and np.isrealobj(found)):
            raise InputError(
                f"policy: expected actions of a real dtype, got {found.dtype}"
            )
        if not np.isfinite(found).all():
            raise InputError("policy: expected finite actions, got NaN or infinity")
        return found.astype(np.float32)


def _array(found: ArrayLike) -> np.ndarray:
    try:
        return np.asarray(found)
    except ValueError as error:  # rows of unlike length
        raise InputError(f"policy: expected an array of actions: {error}") from error


def as_policy(given: Policy | Act, group: AgentGroup) -> Policy:
    """Take a policy as it is, and anything else that can be called as a `Function`.

    Raises:
        InputError: it cannot be called.
    """
    if isinstance(given, Policy):
        return given
    if not callable(given):
        raise InputError(
            f"policy: expected a function of observations or a Policy, "
            f"got {type(given).__name__}"
        )
    return Function(given, group)
