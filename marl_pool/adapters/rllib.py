"""RLlib's own algorithms with set networks as encoders, on its new API stack.

Example::

    from ray.rllib.algorithms.ppo import PPOConfig
    from marl_pool.adapters.rllib import as_policy, set_module_spec

    config = PPOConfig().environment("my_env")
    config.rl_module(rl_module_spec=set_module_spec(config, pooling="ada"))
    algorithm = config.build_algo()
    algorithm.train()
    policy = as_policy(algorithm.get_module())
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from marl_pool.adapters.space_network import SpaceNetwork, join_rows
from marl_pool.evaluation.callable_policy import Act
from marl_pool.finite import require_numbers
from marl_pool.observations.make import split_action_mask
from marl_pool.observations.masks import MASK, mask_sizes
from marl_pool.policies.actions import mask_logits
from marl_pool.policies.masks import validate_mask_space
from marl_pool.utils.errors import InputError, explain_missing_modules

with explain_missing_modules():
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
    from ray.rllib.algorithms.appo.torch.default_appo_torch_rl_module import (
        DefaultAPPOTorchRLModule,
    )
    from ray.rllib.algorithms.dqn.default_dqn_rl_module import QF_PREDS
    from ray.rllib.algorithms.dqn.dqn_catalog import DQNCatalog
    from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import (
        DefaultDQNTorchRLModule,
    )
    from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
    from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import (
        DefaultPPOTorchRLModule,
    )
    from ray.rllib.algorithms.sac.sac_catalog import SACCatalog
    from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import (
        DefaultSACTorchRLModule,
    )
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.distribution.torch.torch_distribution import (
        TorchDistribution,
        TorchSquashedGaussian,
    )
    from ray.rllib.core.models.base import ENCODER_OUT, Encoder
    from ray.rllib.core.models.catalog import Catalog
    from ray.rllib.core.models.configs import ModelConfig
    from ray.rllib.core.models.torch.base import TorchModel
    from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
    from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
    from ray.rllib.utils.spaces.space_utils import flatten_space, unsquash_action

SET_NETWORK = "set_network"
"""Key of a module's ``model_config``: the options of its `SpaceNetwork`s."""


class SetEncoder(TorchModel, Encoder):
    """RLlib's encoder around a `SpaceNetwork`.

    Args:
        config: the space of the observations, and the network's options.
    """

    def __init__(self, config: "SetEncoderConfig") -> None:
        super().__init__(config)
        self.network = config.network()

    @override
    def _forward(self, inputs: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        return {ENCODER_OUT: self.network(inputs[Columns.OBS])}


@dataclass
class SetEncoderConfig(ModelConfig):
    """RLlib's description of a `SetEncoder`.

    Args:
        space: of a single observation.
        options: keyword arguments of a `SpaceNetwork`.
    """

    space: spaces.Space[Any] = field(kw_only=True)
    options: Mapping[str, Any] = field(kw_only=True)

    def network(self) -> SpaceNetwork:
        """Build the network, with initial weights from torch's global generator."""
        return SpaceNetwork(self.space, **self.options)

    @override
    def build(self, framework: str = "torch") -> SetEncoder:
        return SetEncoder(self)

    @cached_property
    def output_dims(self) -> tuple[int]:
        """Width of the pooled vector, which depends on the pooling head."""
        # Weights that are only measured take no numbers from a seeded generator.
        with torch.random.fork_rng(devices=[]):
            return (self.network().dim_out,)


class SetCatalog(Catalog):
    """Mix-in that makes set networks the encoders of a catalog.

    `set_module_spec` chooses the catalogs below. For another algorithm whose module
    builds its encoders from a catalog, derive one::

        class MyCatalog(SetCatalog, CatalogOfTheAlgorithm): ...

        RLModuleSpec(
            catalog_class=MyCatalog, model_config={"set_network": {"pooling": "ada"}}
        )

    Raises:
        InputError: as for `SpaceNetwork`; also for an LSTM on a Dict or Tuple, and for
            an action mask that does not fit the actions.
    """

    @classmethod
    @override
    def _get_encoder_config(
        cls,
        observation_space: spaces.Space[Any],
        model_config_dict: dict[str, Any],
        action_space: spaces.Space[Any] | None = None,
    ) -> ModelConfig:
        if action_space is not None:
            _validate_mask(observation_space, action_space)
        if model_config_dict["use_lstm"]:
            # RLlib's LSTM reads what this method returns without it, and folds the
            # time into the batch of a single tensor.
            if isinstance(observation_space, spaces.Dict | spaces.Tuple):
                raise InputError(
                    "use_lstm: expected False, since RLlib's LSTM reads observations "
                    f"of one array, got {observation_space}"
                )
            return super()._get_encoder_config(
                observation_space, model_config_dict, action_space
            )
        options = model_config_dict.get(SET_NETWORK, {})
        return SetEncoderConfig(space=observation_space, options=options)


class SetPPOCatalog(SetCatalog, PPOCatalog):
    """Catalog of set networks for PPO, APPO and IMPALA."""


class SetDQNCatalog(SetCatalog, DQNCatalog):
    """Catalog of set networks for DQN."""


class SetSACCatalog(SetCatalog, SACCatalog):
    """Catalog of set networks for SAC, whose losses admit no action mask."""

    @classmethod
    @override
    def _get_encoder_config(
        cls, observation_space: spaces.Space[Any], *args: Any, **kwargs: Any
    ) -> ModelConfig:
        if split_action_mask(observation_space)[1] is not None:
            raise InputError(
                f"{MASK}: expected none in the observation, since RLlib's SAC cannot "
                f"mask actions, got {observation_space}"
            )
        return super()._get_encoder_config(observation_space, *args, **kwargs)


class SetPPOModule(DefaultPPOTorchRLModule):
    """RLlib's module of PPO and IMPALA, with the action mask of the observation."""

    @override
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return _mask(self, super()._forward(batch, **kwargs), batch)

    @override
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return _mask(self, super()._forward_train(batch, **kwargs), batch)


class SetAPPOModule(SetPPOModule, DefaultAPPOTorchRLModule):
    """RLlib's module of APPO, with the action mask of the observation."""

    @override
    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = super().forward_target(batch)
        return _mask(self, outputs, batch, TARGET_NETWORK_ACTION_DIST_INPUTS)


class SetDQNModule(DefaultDQNTorchRLModule):
    """RLlib's module of DQN, with the action mask of the observation."""

    @override
    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, Any]:
        return _mask(self, super().compute_q_values(batch), batch, QF_PREDS)

    @override
    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        return _mask(self, super().forward_target(batch), batch, QF_PREDS)


SET_CLASSES: Mapping[type[RLModule], tuple[type[RLModule], type[Catalog]]] = {
    DefaultPPOTorchRLModule: (SetPPOModule, SetPPOCatalog),
    DefaultAPPOTorchRLModule: (SetAPPOModule, SetPPOCatalog),
    DefaultDQNTorchRLModule: (SetDQNModule, SetDQNCatalog),
    DefaultSACTorchRLModule: (DefaultSACTorchRLModule, SetSACCatalog),
}
"""Module and catalog of set networks, by the default module of an algorithm."""


def set_module_spec(config: AlgorithmConfig, **options: Any) -> RLModuleSpec:
    """Return a module whose encoders are set networks, for ``config.rl_module``.

    Heads, losses and everything else stay RLlib's, and so do their options: the
    ``model_config`` of ``config.rl_module`` applies here too.

    Example:
        >>> config = PPOConfig().environment("my_env")
        >>> spec = set_module_spec(config, pooling="ada", presence=0)
        >>> config.rl_module(rl_module_spec=spec)

    For several modules, make one each, in a ``MultiRLModuleSpec``.

    Args:
        config: of PPO, APPO, IMPALA, DQN or SAC.
        **options: of the `SpaceNetwork`. Wrong ones are refused when the algorithm is
            built, because they depend on the observation space.

    Raises:
        InputError: another algorithm.
    """
    default: Any = None
    if isinstance(config, AlgorithmConfig):
        default = config.get_default_rl_module_spec().module_class
    if default not in SET_CLASSES:
        raise InputError(
            "config: expected one of PPO, APPO, IMPALA, DQN, SAC, got "
            f"{type(config).__name__}; see SetCatalog for others"
        )
    module_class, catalog_class = SET_CLASSES[default]
    return RLModuleSpec(
        module_class=module_class,
        catalog_class=catalog_class,
        model_config={SET_NETWORK: options},
    )


def as_policy(module: RLModule, *, normalize_actions: bool = True) -> Act:
    """Return a trained module as a policy for `marl_pool.evaluate`.

    It chooses the most likely actions, of SAC the squashed mean. Custom connectors are
    not applied.

    Example:
        >>> policy = as_policy(algorithm.get_module())
        >>> marl_pool.evaluate(policy, env="simple_centroid")

    Args:
        module: a module without a state, such as from ``algorithm.get_module()``, for
            observations of its space with any number of tokens, and for actions in a
            Box, a Discrete or a MultiDiscrete.
        normalize_actions: as in the algorithm's configuration: True if [-1, 1] stands
            for the bounds of a Box.

    Raises:
        InputError: no module, several of them, or one with a state; from the policy,
            observations that do not fit the module's space, or whose numbers give NaN.
    """
    if isinstance(module, MultiRLModule) or not isinstance(module, RLModule):
        raise InputError(
            "module: expected a single RLModule, such as algorithm.get_module(ID), got "
            f"{type(module).__name__}"
        )
    if module.is_stateful():
        raise InputError("module: expected one without a state, got an LSTM")
    device = next(module.parameters()).device

    def act(observation: Any) -> np.ndarray:
        tensors = tree_map(
            lambda part: torch.as_tensor(part, device=device), observation
        )
        with torch.no_grad():
            outputs = module.forward_inference({Columns.OBS: tensors})
        # DQN returns actions, others the parameters of a distribution.
        if Columns.ACTIONS in outputs:
            actions = outputs[Columns.ACTIONS]
        else:
            logits = outputs[Columns.ACTION_DIST_INPUTS]
            require_numbers(logits)
            distribution = module.get_inference_action_dist_cls().from_logits(logits)
            actions = _most_likely(distribution)
        require_numbers(actions)
        rows: np.ndarray = actions.cpu().numpy()
        if normalize_actions and isinstance(module.action_space, spaces.Box):
            rows = unsquash_action(rows, module.action_space)
        return rows

    return act


def _most_likely(distribution: TorchDistribution) -> Any:
    """Return the most likely actions; of a squashed Gaussian, its squashed mean.

    RLlib's own deterministic actions are the mean before squashing
    (https://github.com/ray-project/ray/issues/51544).
    """
    if isinstance(distribution, TorchSquashedGaussian):
        low, high = distribution.low, distribution.high
        return low + (torch.tanh(distribution.loc) + 1) / 2 * (high - low)
    return distribution.to_deterministic().sample()


def _validate_mask(observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
    """Raise InputError for a mask that does not fit RLlib's logits."""
    validate_mask_space(observation, action, "observation space")
    are_boxes = [isinstance(part, spaces.Box) for part in flatten_space(action)]
    # `mask_logits` masks the first logits, which must be the choices'.
    if split_action_mask(observation)[1] is not None and are_boxes != sorted(are_boxes):
        raise InputError(
            f"action space: expected choices before any Box, with an {MASK}, got "
            f"{action}"
        )


def _mask(
    module: RLModule,
    outputs: dict[str, Any],
    batch: Mapping[str, Any],
    key: str = Columns.ACTION_DIST_INPUTS,
) -> dict[str, Any]:
    """Mask one of the outputs by the action mask of the observations, if it has one.

    RLlib's DQN excludes values of -inf; a distribution needs finite logits.
    """
    _, space = split_action_mask(module.observation_space)
    if space is None:
        return outputs
    shape = (*outputs[key].shape[:-1], sum(mask_sizes(space)))
    mask = batch[Columns.OBS].get(MASK)
    allowed = None if mask is None else join_rows(mask, space)
    if allowed is None or allowed.shape != shape:
        raise InputError(
            f"{MASK}: expected the shape {shape}, as in the module's space, got "
            f"{'none' if allowed is None else tuple(allowed.shape)}"
        )
    if key == QF_PREDS:
        # An agent that does not act may be allowed nothing.
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        values = outputs[key].masked_fill(~allowed, -torch.inf)
    else:
        values = mask_logits(outputs[key], allowed)
    return {**outputs, key: values}
