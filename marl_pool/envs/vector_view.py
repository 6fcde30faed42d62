"""Gymnasium's vector view: a batch of environments with one agent each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.views import RENDERING, ViewedEnv, several_agents
from marl_pool.policies.action_spaces import ActionRows
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

Observations = dict[str, np.ndarray]
"""The parts of `marl_pool.tokens.Tokens`, each ``(num_envs, …)``."""


class OneAgentVectorView(VectorEnv[Observations, np.ndarray, np.ndarray]):
    """A batch of environments behind Gymnasium's ``VectorEnv``.

    ``gymnasium.make_vec("marl_pool/simple_centroid-v0", num_envs=64)`` builds it. All
    environments advance in one call, many times faster than one after another. An
    episode that ends is followed by the next one in the same step
    (``AutoresetMode.SAME_STEP``), and its last observation is ``infos["final_obs"]``.
    An ``action_mask`` that appears only after a reset is in the infos.

    Episodes follow the option ``seed``; ``reset(seed=…)`` starts over with that seed,
    from which each environment derives its own. Without either, the first reset takes a
    seed from the operating system.

    Args:
        name: a registered environment, or ``package.module:Class``.
        num_envs: number of environments.
        render_mode: ``"rgb_array"`` or None.
        options: options of the environment's constructor.

    Raises:
        InputError: several agents, an unknown name or mode, a wrong option; in `reset`,
            a seed that is not an integer in [0, 2**63), or a ``reset_mask``; in `step`,
            actions of another shape or not in the action space; in `step` and
            `render`, no episode yet; an environment that breaks its contract, also by a
            number that is NaN or infinite.
    """

    def __init__(
        self,
        name: str,
        num_envs: int = 1,
        *,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self._checked = ViewedEnv(name, num_envs, render_mode, **options)
        counts = [group.num_agents for group in self.env.groups.values()]
        if counts != [1]:
            raise several_agents(name, sum(counts))
        ((self._group, group),) = self.env.groups.items()
        self.num_envs, self.render_mode = num_envs, render_mode
        self.metadata = {**RENDERING, "autoreset_mode": AutoresetMode.SAME_STEP}
        space = group.observation_space()
        self._dtypes = {name: part.dtype for name, part in space.items()}
        self.single_observation_space = space
        self.single_action_space = group.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    @property
    def env(self) -> BatchedEnv:
        """The batch of environments."""
        return self._checked.env

    @override
    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observations, dict[str, Any]]:
        if isinstance(seed, Sequence) and not isinstance(seed, str):
            raise InputError(
                "reset: expected one seed, from which each environment derives its "
                f"own, got {len(seed)}"
            )
        if "reset_mask" in (options or {}):
            raise InputError(
                "reset: expected no reset_mask, since environments reset by themselves "
                "in the step in which their episode ends, got one"
            )
        self._checked.start(seed)
        return self._observe()

    @override
    def step(
        self, actions: np.ndarray
    ) -> tuple[Observations, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self._checked.validate_begun("step")
        step = self._checked.step({self._group: self._actions(actions)})
        rewards = step.rewards[self._group][:, 0].double().cpu().numpy()
        ended = step.terminated | step.truncated
        infos: dict[str, Any] = {}
        if bool(ended.any()):
            over, (last, _) = ended.cpu().numpy(), self._observe()
            final = np.full(self.num_envs, None, dtype=object)
            for i in over.nonzero()[0]:
                final[i] = {name: part[i] for name, part in last.items()}
            infos = {"final_obs": final, "_final_obs": over}
            self._checked.reset(ended)
        observations, masks = self._observe()
        terminated, truncated = (part.cpu().numpy() for part in step[1:])
        return observations, rewards, terminated, truncated, infos | masks

    @override
    def render(self) -> tuple[np.ndarray, ...] | None:  # type: ignore[override]
        if self.render_mode is None:
            return None
        self._checked.validate_begun("render")
        return tuple(self.env.frame(i) for i in range(self.num_envs))

    def _observe(self) -> tuple[Observations, dict[str, Any]]:
        """Return observations, and infos with the parts that are in no space."""
        tokens: Tokens = self._checked.observe()[self._group]
        arrays = {
            name: part[:, 0].cpu().numpy() for name, part in tokens.columns.items()
        }
        # Copies, so that a caller cannot modify the environment's tensors.
        observations = {
            name: arrays.pop(name).astype(dtype) for name, dtype in self._dtypes.items()
        }
        everywhere = np.ones(self.num_envs, np.bool_)
        infos = {name: part.astype(np.int8) for name, part in arrays.items()}
        return observations, infos | {f"_{name}": everywhere for name in infos}

    def _actions(self, actions: Any) -> torch.Tensor:
        """Convert actions of all environments; raise `InputError` for wrong ones."""
        if not isinstance(self.single_action_space, spaces.Discrete | spaces.Box):
            return self._rows(actions)
        array, space = np.asarray(actions), self.action_space
        if isinstance(self.single_action_space, spaces.Discrete):
            fits = space.contains(array)
        else:  # the environment clips them
            shaped = array.shape == space.shape and array.dtype.kind in "biuf"
            fits = shaped and bool(np.isfinite(array).all())
        if not fits:
            actual = f"the shape {array.shape} and {array.dtype}"
            if array.shape == space.shape and array.dtype.kind in "biuf":
                actual = "numbers outside of it, NaN or infinity"
            raise InputError(f"actions: expected {space}, got {actual}")
        typed = array.astype(self.single_action_space.dtype)
        return torch.from_numpy(typed).to(self.env.device)[:, None]

    def _rows(self, actions: Any) -> torch.Tensor:
        """Convert actions of a space that is neither Discrete nor a Box."""
        space, single = self.action_space, ActionRows(self.single_action_space)
        try:
            flattened = [single.flatten(action) for action in iterate(space, actions)]
        except (InputError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"actions: expected {space}: {error}") from error
        if len(flattened) != self.num_envs:
            raise InputError(f"actions: expected {space}, got {len(flattened)} of them")
        rows = torch.from_numpy(np.stack(flattened)).to(self.env.device)
        return (rows.float() if rows.is_floating_point() else rows)[:, None]
