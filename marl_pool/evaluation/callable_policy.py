"""Policies from any function of observations, or model with ``predict``."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.observations.masks import MASK
from marl_pool.observations.parts import Part
from marl_pool.observations.view import TokenView, WrapperView, listed
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.membership import Occlude
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, UnfitTokensError, one_line
from marl_pool.utils.randomness import Stream

Act = Callable[[Any], ArrayLike]
"""Takes observations of many agents at once; see `CallablePolicy`."""


class Predictor(Protocol):
    """A model with a method ``predict``, as in Stable-Baselines3."""

    def predict(self, observation: Any, /, *arguments: Any, **options: Any) -> Any:
        """Return actions, perhaps in a tuple with a state."""


class CallablePolicy(Policy):
    """Policy without memory that calls a function, or the ``predict`` of a model.

    It is called with observations of the environment's own space, batched as by
    ``gymnasium.vector``: arrays ``(B, …)``, or a dict or tuple of them, where B is
    environments times agents. Perturbations of tokens are carried over to these
    observations (see `TokenView.observations`). Where observations are tokens, they are
    a dictionary of ``features (B, N, F)``, ``types (B, N)`` and ``padding (B, N)``, and
    ``action_mask (B, n)`` bool, True = allowed, if there is one.

    A function decides by itself whether it samples. If the function or ``predict`` has
    a parameter ``action_masks``, it receives the mask, even one from the environment's
    infos; without a mask, the function receives None. ``predict`` also receives
    ``deterministic`` if it has that parameter.

    Args:
        act: function or model, whose actions are as in `ActionSpec`: ``(B, A)`` in the
            units of a Box, which clips them; ``(B,)`` for a Discrete space; ``(B, K)``
            for several choices, each counted from 0; or ``(B, K + A)``, the choices
            before the numbers of a Box.
        group: group of agents that it plays.

    Raises:
        InputError: ``act`` is not callable and has no ``predict``, the model states
            another action space, or tokens cannot be converted back to observations.

    `act` raises `InputError` for actions that have another shape or dtype, are not
    finite or not allowed, and `UnfitTokensError` if the function fails, or returns such
    actions, on tokens of another number or width than the environment's, or if the
    observation space cannot hold the perturbed tokens.
    """

    def __init__(self, act: Act | Predictor, group: AgentGroup) -> None:
        super().__init__()
        self.group = group
        if isinstance(act, type):
            raise InputError(
                f"policy: expected a model, got the class {act.__name__} itself"
            )
        if hasattr(act, "predict"):
            _validate_actions(act, group)
            self._act = _predictor(act)
        elif callable(act):
            function: Any = act
            takes_mask = "action_masks" in _parameters(act)
            self._act = lambda observation, mask, explore: function(
                observation, **({"action_masks": mask} if takes_mask else {})
            )
        else:
            raise InputError(
                "policy: expected a function of observations, a model with predict or "
                f"a Policy, got {type(act).__name__}"
            )
        if group.view is not None:
            # Before any episode, reject a space that tokens cannot be turned back into.
            blank = group.view.arrays(1).items()
            group.view.observations(
                group.view.tokens({name: torch.from_numpy(a) for name, a in blank})
            )
        # Cases are played in several threads, which a foreign library may not support.
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CallablePolicy":
        # The function may hold a whole foreign model, which need not be copied.
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
        flat = tokens.flatten_batch()
        # The function may edit what it gets.
        columns = {
            name: column.cpu().numpy().copy() for name, column in flat.columns.items()
        }
        view, mask = self.group.view, columns.get(MASK)
        observation = columns if view is None else view.observations(flat)
        shape, device = tokens.batch_shape, tokens.types.device
        with self._lock:
            try:
                actions = self._act(observation, mask, explore)
                # Copy before the next call: the function may fill the array again.
                valid_actions = self._checked(actions, shape.numel(), tokens.num_tokens)
            except Exception as error:
                # A function made for N tokens may fail on another number of them.
                spec, (count, width) = self.group.tokens, tokens.features.shape[-2:]
                if (count, width) == (spec.num_tokens, spec.num_features):
                    raise
                expected, actual = f"{spec.num_tokens} tokens", f"{count}"
                if width != spec.num_features:
                    expected += f" of {spec.num_features} features"
                    actual += f" of {width} features"
                raise UnfitTokensError(
                    f"the policy takes {expected} and fails on {actual}: "
                    f"{one_line(error)}"
                ) from error
        if mask is not None:
            _validate_allowed(valid_actions, mask, self.group.actions)
        # A function has neither log-probabilities nor values.
        action = torch.as_tensor(valid_actions, device=device).unflatten(0, shape)
        zeros = torch.zeros(shape, device=device)
        return Decision(action, zeros, zeros, zeros[..., None], state)

    def mismatch(self, group: AgentGroup) -> str:
        """Return why it cannot play a group of another environment; empty if it may.

        A function may take any number of tokens, and its space may hold fewer rows or
        more; only `act` finds whether they do.
        """
        expected, actual = map(_action_kind, (group.actions, self.group.actions))
        if expected != actual:
            return f"expected actions = {expected}, got {actual}"
        if group.view is None or self.group.view is None:
            kinds = [
                "tokens" if view is None else "elements of a space"
                for view in (group.view, self.group.view)
            ]
            same = kinds[0] == kinds[1]
            return "" if same else "expected observations as {}, got {}".format(*kinds)
        return _layout_mismatch(group.view, self.group.view)

    def misfit(self, perturbation: Perturbation) -> str:
        """Return why the observation space cannot express a perturbation.

        Empty if it may; `act` raises for tokens that the space cannot hold.
        """
        if self.group.view is None:
            return ""
        slots = self.group.view.slots
        if perturbation.reorders and not slots.have_order:
            return "in the observation space every token has its own place"
        hides = isinstance(perturbation, Occlude) and perturbation.mode == "drop"
        if hides and not any(slots.optional):
            return "the observation space cannot say that a token is absent"
        return ""

    def _checked(self, output: ArrayLike, count: int, num_tokens: int) -> np.ndarray:
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
                f"policy: expected actions of shape {shape}, one for each observation "
                f"of the batch, got {actions.shape}"
            )
        if dtype.kind not in codes:
            raise InputError(f"policy: expected actions of {kind} dtype, got {dtype}")
        if not np.isfinite(actions).all():
            raise InputError("policy: expected finite actions, got NaN or infinity")
        # A token that a perturbation added can be selected, too.
        sizes = (spec.num_fixed + num_tokens,) if spec.selects else spec.sizes
        _validate_choices(actions, spec, sizes)
        return actions.astype(np.int64 if spec.integral else np.float32)


def _action_kind(spec: ActionSpec) -> ActionSpec:
    """Return a specification that is the same for any number of tokens to select."""
    return replace(spec, n=spec.num_fixed + 1) if spec.selects else spec


def _layout_mismatch(expected: TokenView, actual: TokenView) -> str:
    """Return why ``actual`` cannot express observations of ``expected``, or ""."""
    layout = _layout(actual)
    for name, value in _layout(expected).items():
        # Only spaces with the same parts get to the entries of each part.
        if value != layout[name]:
            pair = [
                listed(names) if isinstance(names, list) else str(names)
                for names in (value, layout[name])
            ]
            return "expected observations with {} = {}, got {}".format(name, *pair)
    parts = _innermost(actual).parts
    mismatches = (
        _bounds_mismatch(name, part, parts[name])
        for name, part in _innermost(expected).parts.items()
    )
    return next(filter(None, mismatches), "")


def _layout(view: TokenView) -> dict[str, Any]:
    """Return what observations must share to be carried over, by description.

    The number of rows of a set is not part of it.
    """
    inner = _innermost(view)
    masks = [MASK] if MASK in view.parts else []
    layout: dict[str, Any] = {
        "types": [*view.spec.type_names],
        "features": view.spec.num_features,
        "dtype of features": view.spec.dtype,
        "parts": [*inner.parts, *masks],
    }
    for name, part in inner.parts.items():
        is_set = name in inner.sets
        layout[f"dtype of {name}"] = part.declared
        layout[f"shape of {name}"] = ("N", *part.shape[1:]) if is_set else part.shape
    return layout


def _innermost(view: TokenView) -> TokenView:
    """Return the view of the sets themselves, without slices, entries and padding."""
    while isinstance(view, WrapperView):
        view = view.inner
    return view


def _bounds_mismatch(name: str, expected: Part, actual: Part) -> str:
    """Return why the bounds of ``actual`` would change numbers of ``expected``."""
    lows, highs = (
        np.broadcast_to(bound, expected.shape)
        for bound in (expected.low, expected.high)
    )
    low, high = (
        np.broadcast_to(bound, actual.shape) for bound in (actual.low, actual.high)
    )
    if expected.shape != actual.shape:
        # With another number of rows, a row may be stored in any.
        low, high = low.max(0), high.min(0)
    if expected.declared.kind == "f":
        wrong = (lows < low) | (highs > high)
    else:
        # Bounds say what the options of choices mean, and how bytes are scaled.
        wrong = (lows != low) | (highs != high)
    if not wrong.any():
        return ""
    index = tuple(np.argwhere(wrong)[0])
    bounds = (np.broadcast_to(b, wrong.shape)[index] for b in (lows, highs, low, high))
    return "expected numbers of {} in [{:g}, {:g}], got [{:g}, {:g}]".format(
        name, *bounds
    )


def _predictor(
    model: Any,
) -> Callable[[Any, np.ndarray | None, bool], ArrayLike]:
    """Adapt a model's ``predict`` to the observation, mask and exploration flag."""
    parameters = _parameters(model.predict)

    def act(observation: Any, mask: np.ndarray | None, explore: bool) -> ArrayLike:
        keywords: dict[str, Any] = {}
        if "deterministic" in parameters:
            keywords["deterministic"] = not explore
        if "action_masks" in parameters and mask is not None:
            keywords["action_masks"] = mask
        _validate_observation(model, observation)
        prediction = model.predict(observation, **keywords)
        if not isinstance(prediction, tuple):
            return prediction
        actions, state = prediction
        if state is not None:
            raise InputError(
                f"policy: expected a model without memory, got {type(model).__name__}, "
                "whose predict returns a state"
            )
        return actions

    return act


def _validate_actions(model: Any, group: AgentGroup) -> None:
    """Raise InputError if a model states another action space."""
    space = getattr(model, "action_space", None)
    if isinstance(space, spaces.Space) and ActionSpec.of(space) != group.actions:
        raise InputError(
            f"policy: expected a model with the action space {group.action_space}, as "
            f"the environment's, got {space}"
        )


def _validate_observation(model: Any, observation: Any) -> None:
    """Raise InputError if a model states another observation space."""
    space = getattr(model, "observation_space", None)
    entries: Any = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    for key, part in entries.items():
        if not isinstance(part, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
            continue
        array = observation if key == "" else None
        if key and isinstance(observation, Mapping):
            array = observation.get(key)
        shape = getattr(array, "shape", None)
        if shape is None or shape[1:] not in (part.shape, _last_first(part.shape)):
            where = f", and in it {key} of shape {part.shape}" if key else ""
            actual = "no such array" if shape is None else f"the shape {shape[1:]}"
            raise InputError(
                f"policy: expected an environment with the model's observation space, "
                f"{' '.join(str(space).split()):.200}{where}; got {actual}"
            )


def _last_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an image whose channels were put first."""
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape


def _parameters(function: Callable[..., Any]) -> Collection[str]:
    """Return the names of a function's parameters; empty without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # such as some functions in C
        return ()


def _choices(actions: np.ndarray, spec: ActionSpec) -> np.ndarray:
    """Return the choices of actions, ``(B, K)``."""
    rows = actions[:, None] if spec.discrete else actions
    return rows[:, : len(spec.sizes)]


def _validate_choices(
    actions: np.ndarray, spec: ActionSpec, sizes: Sequence[int]
) -> None:
    """Raise InputError for choices out of range or between options."""
    choices = _choices(actions, spec)
    inside = (choices >= 0) & (choices < sizes) & (choices == choices // 1)
    if not inside.all():
        row, number = np.argwhere(~inside)[0]
        prefix = "" if spec.discrete else f"choice {number}: "
        raise InputError(
            f"policy: row {row}: {prefix}expected 0 to {sizes[number] - 1}, got "
            f"{choices[row, number]}"
        )


def _validate_allowed(actions: np.ndarray, mask: np.ndarray, spec: ActionSpec) -> None:
    """Raise InputError if an agent that acts chose an option that is not allowed."""
    choices = _choices(actions, spec).astype(np.int64)
    firsts = np.cumsum((0, *spec.sizes[:-1]))
    allowed = np.take_along_axis(mask, firsts + choices, 1)
    # Absent agents have no allowed option.
    wrong = mask.any(1, keepdims=True) & ~allowed
    if wrong.any():
        row, number = map(int, np.argwhere(wrong)[0])
        options = mask[row, firsts[number] :][: spec.sizes[number]]
        prefix = "" if spec.discrete else f"choice {number}: "
        raise InputError(
            f"policy: row {row}: {prefix}expected one of the actions that action_mask "
            f"allows, {np.flatnonzero(options).tolist()}, got {choices[row, number]}"
        )
