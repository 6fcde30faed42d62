"""Stable-Baselines3: set networks as features extractors, and masks for MaskablePPO.

Example::

    from stable_baselines3 import PPO
    from marl_pool.adapters.sb3 import SetExtractor

    model = PPO(
        "MultiInputPolicy",
        env,
        policy_kwargs=dict(
            features_extractor_class=SetExtractor,
            features_extractor_kwargs=dict(pooling="ada", dim=16),
        ),
    )
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.adapters.space_network import SpaceNetwork
from marl_pool.observations.make import split_action_mask
from marl_pool.observations.masks import MASK, read_mask
from marl_pool.observations.parts import as_array, summary_of
from marl_pool.observations.token_dict import TOKEN_PARTS
from marl_pool.observations.view import TokenView, listed
from marl_pool.options.construction import check_constructor
from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, explain_missing_modules

with explain_missing_modules():
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.policies import BasePolicy
    from stable_baselines3.common.preprocessing import (
        is_image_space,
        is_image_space_channels_first,
        maybe_transpose,
    )
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

Observation = np.ndarray | Mapping[str, np.ndarray]
"""Of one environment, or of several along the first dimension."""


class SetExtractor(BaseFeaturesExtractor):
    """A `SetNetwork` in place of Stable-Baselines3's features extractor.

    It takes any observation space that `make_view` does and SB3 accepts: a Dict of
    ``features``, ``types`` and ``padding``, a Box of ``(N, F)``, a Dict of named sets
    and vectors. An entry ``action_mask`` is not a token; see `ActionMaskWrapper`.

    `SetNetwork` chooses the initial weights: SB3's ``ortho_init`` affects only the
    layers after the extractor. The compiled kernel computes what it can, in training
    too; see `marl_pool.compile`.

    Args:
        observation_space: the policy's; SB3 passes it.
        normalize_images: as in ``policy_kwargs``: True if SB3 divides images by 255.
        **options: of the `SpaceNetwork`, such as ``pooling="ada"``, ``dim=16`` and
            ``presence=0``.

    Raises:
        InputError: as for `SpaceNetwork`.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        *,
        normalize_images: bool = True,
        **options: Any,
    ) -> None:
        defaults = (
            {"channels": "first"} if _has_channels_first(observation_space) else {}
        )
        inner = SpaceNetwork(observation_space, **{**defaults, **options})
        super().__init__(observation_space, inner.dim_out)
        self.space, _ = split_action_mask(observation_space)
        self.view, self.normalized = inner.view, normalize_images
        self.network = inner.network

    def tokens(self, observations: Any) -> Tokens:
        """Convert observations, preprocessed by SB3, to tokens of batch ``(B,)``.

        Args:
            observations: ``(B, …)``, or a dict of them: floats, images divided by 255
                and choices one-hot.
        """
        restored = _restore(self.space, observations, self.normalized)
        values = dict(self.view.read(restored))
        for name, part in self.view.parts.items():
            # SB3 passes integers as floats.
            if part.dtype.kind != "f":
                dtype = torch.from_numpy(np.zeros(0, part.dtype)).dtype
                values[name] = values[name].to(dtype)
        return self.view.tokens(values)

    @override
    def forward(self, observations: Any) -> Tensor:
        return self.network(self.tokens(observations))

    def weights(self, observations: Any) -> Tensor | None:
        """Return the head's attention weights, ``(B, heads, N)``, or None."""
        return self.network.weights(self.tokens(observations))

    @override
    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        # Orthogonal matrices would replace the initial weights that heads publish.
        if getattr(fn, "func", fn) is BasePolicy.init_weights:
            return self
        return super().apply(fn)


check_constructor(SetExtractor, "features_extractor_kwargs")


class AnySizeModel:
    """A trained model for sets of any size, whatever size it was trained with.

    SB3's ``predict`` takes only the sizes of the model's observation space. Here each
    size has a policy that shares the model's weights, made when the size first occurs.

    Example:
        >>> marl_pool.evaluate(AnySizeModel(model), env="simple_centroid")

    Args:
        model: a model of SB3 or sb3-contrib whose features extractor is a
            `SetExtractor`, with a head that takes any number of tokens.

    Raises:
        InputError: another model.
    """

    def __init__(self, model: BaseAlgorithm) -> None:
        if not (isinstance(model, BaseAlgorithm) and _has_extractor(model.policy)):
            raise InputError(
                "model: expected a model of SB3 with a SetExtractor, got "
                f"{type(model).__name__}"
            )
        self.model = model
        self._original = model.policy
        self._policies: dict[tuple[Any, torch.device, torch.dtype], BasePolicy] = {}

    def __call__(self, observation: Observation) -> np.ndarray:
        """Return the most likely actions; see `predict`."""
        return self.predict(observation, deterministic=True)[0]

    def predict(
        self,
        observation: Observation,
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Return actions and state, as ``model.predict`` does.

        Entries that the model's space lacks are ignored, except an ``action_mask`` if
        the policy takes masks.

        Raises:
            InputError: sizes that no observation of the space has, numbers that are not
                finite, a wrong mask, or a head that takes only the number of tokens
                that it was trained with.
        """
        policy, observed = self._read(observation)
        keywords = {}
        # Only policies of sb3-contrib take masks.
        takes_masks = "action_masks" in inspect.signature(policy.predict).parameters
        if takes_masks and isinstance(observation, Mapping) and MASK in observation:
            batch = _batch(policy.observation_space, observed)
            keywords["action_masks"] = _read_masks(
                observation[MASK], batch, policy.action_space
            )
        return policy.predict(observed, state, episode_start, deterministic, **keywords)

    @torch.no_grad()
    def attention_weights(self, observation: Observation) -> np.ndarray | None:
        """Return the pooling head's weights of the tokens; None if it has none.

        They are ``(heads, N)``, or ``(B, heads, N)`` for several observations. Where a
        policy has several extractors, as in SAC, they are the actor's.
        """
        policy, observed = self._read(observation)
        policy.set_training_mode(False)
        extractor = _extractor(policy)
        tensors, several = policy.obs_to_tensor(observed)
        # SB3's preprocessing comes before whatever is called in an extractor's place.
        weights = BasePolicy.extract_features(policy, tensors, extractor.weights)  # type: ignore[arg-type]
        if weights is None:
            return None
        return weights.cpu().numpy() if several else weights[0].cpu().numpy()

    def _read(self, observation: Observation) -> tuple[BasePolicy, Any]:
        """Return the policy for an observation, and the entries that it reads."""
        observation = _transposed(self.model.observation_space, observation)
        policy = self._policy(observation)
        observed = _of_space(policy.observation_space, observation)
        _batch(policy.observation_space, observed)
        _validate_finite(policy, observed)
        return policy, observed

    def _policy(self, observation: Observation) -> BasePolicy:
        space = fitted_space(self.model.observation_space, observation)
        original = self.model.policy
        # Weights are no longer shared once the model has another policy, and buffers
        # once it has another dtype or device.
        if original is not self._original:
            self._original, self._policies = original, {}
        key = _sizes(space), original.device, next(original.parameters()).dtype
        if key not in self._policies:
            self._policies[key] = resize_policy(original, space)
        return self._policies[key]


def resize_policy(policy: BasePolicy, observation_space: spaces.Space) -> BasePolicy:
    """Return a policy with the same weights for observations of another space.

    The parameters are shared: training either policy trains both.

    Args:
        policy: ``model.policy``, whose features extractor is a `SetExtractor`.
        observation_space: its space with another number of tokens.

    Raises:
        InputError: another policy, a head for a fixed number of tokens, or a space that
            differs in more than that number.
    """
    if not _has_extractor(policy):
        raise InputError(
            "policy: expected one of SB3 with a SetExtractor, got "
            f"{type(policy).__name__}"
        )
    data = policy._get_constructor_parameters()
    # Initial weights are sampled, and then replaced.
    with torch.random.fork_rng(devices=[]):
        resized = type(policy)(**{**data, "observation_space": observation_space})
    _validate_sets(_extractor(policy).view, _extractor(resized).view)
    # Buffers outside the state dict need the device and dtype as well.
    resized.to(policy.device, next(policy.parameters()).dtype)
    # Frozen parameters stay frozen. The parameters themselves are shared, not only
    # their data, which a change of dtype or device would replace.
    for new, original in zip(resized.parameters(), policy.parameters(), strict=True):
        new.requires_grad_(original.requires_grad)
    try:
        resized.load_state_dict(policy.state_dict(keep_vars=True), assign=True)
    except RuntimeError as error:
        raise InputError(
            "observation: expected the number of tokens in the model's space, which "
            f"its weights depend on, got {observation_space}"
        ) from error
    resized.set_training_mode(policy.training)
    return resized


def _has_extractor(policy: Any) -> bool:
    modules = policy.modules() if isinstance(policy, BasePolicy) else ()
    return any(isinstance(module, SetExtractor) for module in modules)


def _extractor(policy: BasePolicy) -> SetExtractor:
    """Return the first extractor, the actor's where there are several."""
    return next(m for m in policy.modules() if isinstance(m, SetExtractor))


def _validate_sets(view: TokenView, resized: TokenView) -> None:
    """Raise InputError if more differs than the sets' numbers of tokens."""
    for name, part in view.parts.items():
        shape = resized.parts[name].shape
        if name not in view.sets and shape != part.shape:
            raise InputError(
                f"{part.label}expected the shape {part.shape} of the model's space, "
                f"since it is not a set of tokens, got {shape}"
            )


def _sizes(space: spaces.Space) -> Any:
    """Return the sizes of a space's arrays, which `fitted_space` changes."""
    if isinstance(space, spaces.Dict):
        return tuple((key, _sizes(part)) for key, part in space.items())
    return space.shape


def fitted_space(space: spaces.Space, observation: Observation) -> spaces.Space:
    """Return a space with the sizes of an observation, or of several.

    Raises:
        InputError: an entry that is missing, or that has another number of dimensions.
    """
    if isinstance(space, spaces.Dict):
        entries = {}
        for key, part in space.items():
            if not isinstance(observation, Mapping) or key not in observation:
                is_dict = isinstance(observation, Mapping)
                names = listed([*observation]) if is_dict else "no Dict"
                hint = ""
                if {*TOKEN_PARTS} <= space.keys():
                    hint = "; the env needs tokenize_env, as in training"
                raise InputError(
                    f"observation: expected the entry {key!r}, got {names}{hint}"
                )
            entries[key] = fitted_space(part, observation[key])
            if key == MASK and entries[key] != part:
                raise InputError(
                    f"{MASK}: expected {part.shape}, as in the model's space, or "
                    f"several of them, got {np.shape(observation[key])}"
                )
        return spaces.Dict(entries)
    array = as_array(observation)
    if array is None or array.dtype.kind not in "biuf":
        raise InputError(
            f"observation: expected an array of {space.shape}, got "
            f"{summary_of(observation)}"
        )
    shape, actual = space.shape or (), array.shape
    size = actual[len(actual) - len(shape) :]
    if len(actual) - len(shape) not in (0, 1):
        raise InputError(
            f"observation: expected {shape} with any number of tokens, or several of "
            f"them, got {actual}"
        )
    if size == shape:
        return space
    # In a Dict, a view would pad missing columns. A matrix of bytes is an image.
    is_rows = isinstance(space, spaces.Box) and len(shape) == 2
    is_rows = is_rows and space.dtype != np.uint8
    if 0 in size or (is_rows and size[1:] != shape[1:]):
        form = f"(N, {shape[1]})" if is_rows else f"a shape like {shape}"
        raise InputError(
            f"observation: expected {form} with at least one token, got {actual}"
        )
    match space:
        case spaces.MultiBinary():
            return spaces.MultiBinary(size)
        case spaces.MultiDiscrete():
            return spaces.MultiDiscrete(np.resize(space.nvec, size))
        case spaces.Box():
            # New rows have no bounds, so that all numbers get the widest ones.
            low, high = (
                np.full(size, bound, space.dtype)
                for bound in (space.low.min(), space.high.max())
            )
            return spaces.Box(low, high, size, space.low.dtype.type)
    raise InputError(f"observation: expected an element of {space}, got {actual}")


class ActionMaskWrapper(gymnasium.Wrapper):
    """An environment with the method by which MaskablePPO gets action masks.

    They are the entry ``action_mask`` of the observation, or else of infos: numbers 0
    and 1, or bools, in one row or in one for each choice.

    Args:
        env: its action space consists of choices: Discrete, MultiDiscrete or
            MultiBinary.

    Raises:
        InputError: another action space; from `reset` and `step`, no mask or a wrong
            one.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        spec = ActionSpec.of(env.action_space)
        if not spec.integral:
            raise InputError(
                "action space: expected choices, since only those have masks, got "
                f"{env.action_space}"
            )
        self._sizes, self._mask = spec.sizes, np.ones(sum(spec.sizes), bool)

    def action_masks(self) -> np.ndarray:
        """Return the allowed options, ``(n,)`` bool, after the last step or reset."""
        return self._mask

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, infos = self.env.reset(seed=seed, options=options)
        self._keep(observation, infos)
        return observation, infos

    @override
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, *outcome, infos = self.env.step(action)
        self._keep(observation, infos)
        return observation, *outcome, infos

    def _keep(self, observation: Any, infos: Mapping[str, Any]) -> None:
        observed = isinstance(observation, Mapping) and MASK in observation
        mask = observation[MASK] if observed else infos.get(MASK)
        if mask is None:
            raise InputError(
                f"{MASK}: expected an entry of the observation or of infos, got none"
            )
        allowed = read_mask(mask, self._sizes, MASK)
        # An agent that does not act may be allowed nothing; SB3 lets it choose.
        self._mask = allowed if allowed.any() else np.ones_like(allowed)


def _batch(space: spaces.Space, observed: Any) -> tuple[int, ...]:
    """Return the batch dimensions of an observation: none, or one.

    Raises:
        InputError: entries of different batches.
    """
    parts = space.items() if isinstance(space, spaces.Dict) else ((None, space),)
    batches = {}
    for key, part in parts:
        shape = np.shape(observed if key is None else observed[key])
        batches[key] = shape[: len(shape) - len(part.shape or ())]
    if len(set(batches.values())) > 1:
        raise InputError(
            "observation: expected entries of one batch, got the batches "
            f"{', '.join(f'{batch} of {key}' for key, batch in batches.items())}"
        )
    return next(iter(batches.values()))


def _validate_finite(policy: BasePolicy, observed: Any) -> None:
    """Raise InputError for tokens, padding aside, with NaN or infinite numbers."""
    arrays = observed.values() if isinstance(observed, Mapping) else (observed,)
    # Padding may be NaN. Only tokens tell what is padding, and they cost a conversion.
    if all(np.isfinite(array).all() for array in arrays):
        return
    tensors, _ = policy.obs_to_tensor(observed)
    tokens: Any = BasePolicy.extract_features(
        policy,
        tensors,
        _extractor(policy).tokens,  # type: ignore[arg-type]
    )
    if not tokens.features[~tokens.padding].isfinite().all():
        raise InputError(
            "observation: expected finite numbers, got NaN or infinity in a token"
        )


def _read_masks(mask: Any, batch: tuple[int, ...], space: spaces.Space) -> np.ndarray:
    """Return the action masks ``(*batch, …)`` of an observation."""
    shape, array = (*batch, ActionSpec.of(space).num_options), as_array(mask)
    fitting = (
        array is not None
        and array.shape[: len(batch)] == batch
        and array.size == np.prod(shape)
    )
    if array is None or not fitting or not np.isin(array, (0, 1)).all():
        actual = summary_of(mask) if array is None or fitting else array.shape
        raise InputError(
            f"{MASK}: expected numbers 0 and 1 of shape {shape}, got {actual}"
        )
    return array


def _of_space(space: spaces.Space, observation: Observation) -> Any:
    """Return an observation without the entries that a Dict lacks."""
    if not isinstance(space, spaces.Dict):
        return observation
    return {key: observation[key] for key in space}


def _transposed(space: spaces.Space, observation: Any) -> Any:
    """Put the channels of images first, as ``model.predict`` does."""
    if isinstance(space, spaces.Dict) and isinstance(observation, Mapping):
        return {
            key: _transposed(space[key], value) if key in space.spaces else value
            for key, value in observation.items()
        }
    array = as_array(observation)
    if array is None or array.ndim not in (3, 4):
        return observation
    return maybe_transpose(array, space)


def _has_channels_first(space: spaces.Space) -> bool:
    """Return whether SB3 has put the channels of an image first."""
    parts = space.values() if isinstance(space, spaces.Dict) else (space,)
    return any(
        isinstance(part, spaces.Box)
        and is_image_space(part)
        and is_image_space_channels_first(part)
        for part in parts
    )


def _restore(space: spaces.Space, values: Any, normalized: bool) -> Any:
    """Undo SB3's preprocessing: numbers of choices for one-hot rows, bytes of images.

    Args:
        space: of the observations.
        values: ``(B, …)``, or a dict of them.
        normalized: True if images were divided by 255.
    """
    match space:
        case spaces.Dict():
            return {
                key: _restore(part, values[key], normalized)
                for key, part in space.items()
            }
        case spaces.Discrete():
            return values.flatten(1).argmax(-1)
        case spaces.MultiDiscrete():
            rows = values.flatten(1).split(space.nvec.tolist(), -1)
            return torch.stack([row.argmax(-1) for row in rows], -1)
    if normalized and is_image_space(space):
        # The quotient was rounded to a float, so the product may miss the byte.
        return (values * 255).round()
    return values
