"""Set networks as encoders of RLlib's own algorithms, on its new API stack."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from marl_pool.adapters.space_network import SpaceNetwork
from marl_pool.observations.make import split_action_mask
from marl_pool.observations.masks import MASK
from marl_pool.utils.errors import InputError, explain_missing_modules

with explain_missing_modules():
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
    from ray.rllib.algorithms.appo.torch.default_appo_torch_rl_module import (
        DefaultAPPOTorchRLModule,
    )
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
    from ray.rllib.core.models.base import ENCODER_OUT, Encoder
    from ray.rllib.core.models.catalog import Catalog
    from ray.rllib.core.models.configs import ModelConfig
    from ray.rllib.core.models.torch.base import TorchModel
    from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
    from ray.rllib.utils.spaces.space_utils import unsquash_action

SET_NETWORK = "set_network"
"""Key of a module's ``model_config``: the options of its `SpaceNetwork`."""


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
        """Build the network, with initial weights of torch's global generator."""
        return SpaceNetwork(self.space, **self.options)

    @override
    def build(self, framework: str = "torch") -> SetEncoder:
        return SetEncoder(self)

    @cached_property
    def output_dims(self) -> tuple[int]:
        """Width of the pooled vector."""
        with torch.random.fork_rng(devices=[]):
            return (self.network().dim_out,)


class SetCatalog(Catalog):
    """Mix-in of a catalog whose encoders are set networks.

    The catalog of any algorithm of RLlib becomes one of set networks::

        class MyCatalog(SetCatalog, AlgorithmsCatalog): ...
    """

    @classmethod
    @override
    def _get_encoder_config(
        cls,
        observation_space: spaces.Space[Any],
        model_config_dict: dict[str, Any],
        action_space: spaces.Space[Any] | None = None,
    ) -> ModelConfig:
        return SetEncoderConfig(
            space=observation_space, options=model_config_dict.get(SET_NETWORK, {})
        )


class SetPPOCatalog(SetCatalog, PPOCatalog):
    """Catalog of set networks for PPO, APPO and IMPALA."""


class SetDQNCatalog(SetCatalog, DQNCatalog):
    """Catalog of set networks for DQN."""


class SetSACCatalog(SetCatalog, SACCatalog):
    """Catalog of set networks for SAC."""


CATALOGS = {
    DefaultPPOTorchRLModule: SetPPOCatalog,
    DefaultAPPOTorchRLModule: SetPPOCatalog,
    DefaultDQNTorchRLModule: SetDQNCatalog,
    DefaultSACTorchRLModule: SetSACCatalog,
}
"""Catalogs of set networks, by the default module of an algorithm."""


def set_module_spec(config: AlgorithmConfig, **options: Any) -> RLModuleSpec:
    module_class = config.get_default_rl_module_spec().module_class
    return RLModuleSpec(
        module_class=module_class,
        catalog_class=CATALOGS[module_class],
        model_config={SET_NETWORK: options},
    )


def as_policy(
    module: RLModule, *, normalize_actions: bool = True
) -> Callable[[Any], ArrayLike]:
    def act(observation: Any) -> ArrayLike:
        batch = {Columns.OBS: tree_map(torch.as_tensor, observation)}
        with torch.no_grad():
            outputs = module.forward_inference(batch)
        if Columns.ACTIONS in outputs:
            actions = outputs[Columns.ACTIONS]
        else:
            distribution = module.get_inference_action_dist_cls().from_logits(
                outputs[Columns.ACTION_DIST_INPUTS]
            )
            actions = distribution.to_deterministic().sample()
        actions = actions.cpu().numpy()
        if normalize_actions:
            return unsquash_action(actions, module.action_space)
        return actions

    return act
