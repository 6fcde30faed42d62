"""BenchMARL: set networks as its models, for any of its algorithms and tasks.

Example::

    experiment = Experiment(
        task=VmasTask.NAVIGATION.get_from_yaml(),
        algorithm_config=MappoConfig.get_from_yaml(),
        model_config=SetModelConfig(pooling="ada"),
        critic_model_config=SetModelConfig(pooling="ada", vector="token"),
        seed=0,
        config=ExperimentConfig.get_from_yaml(),
    )

BenchMARL 1.5 needs a TorchRL older than 0.12, so install it in a separate environment.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from marl_pool.adapters.torchrl import (
    AgentNetwork,
    Scope,
    Vector,
    leaf_paths,
    observation_space,
)
from marl_pool.kernels.functional import Activation
from marl_pool.observations.make import split_action_mask
from marl_pool.options.types import Part, PositiveFloat, PositiveInt, SizeOrZero
from marl_pool.utils.errors import InputError, explain_missing_modules

with explain_missing_modules():
    from tensordict import TensorDictBase
try:
    from benchmarl.models import Model, ModelConfig
except ModuleNotFoundError as error:
    # A missing package that benchmarl needs is another error.
    if (error.name or "").partition(".")[0] != "benchmarl":
        raise
    raise InputError(
        "this needs benchmarl, in an environment of its own: pip install benchmarl"
    ) from error


class SetModel(Model):
    """BenchMARL's model of an actor or critic around an `AgentNetwork`.

    It follows BenchMARL's conventions: a critic that is centralized pools the set of
    all agents, or reads the task's state; one that isn't, like an actor, reads each
    agent's own observation. Where several arrays are read, such as an agent's
    observation and action, each is a type of tokens, and a vector among them is one
    token.

    Args:
        network: keyword arguments of the `AgentNetwork`.
        **description: what BenchMARL passes to every model.

    Raises:
        InputError: arrays with and without a dimension of agents, or a wrong option.
    """

    def __init__(self, network: Mapping[str, Any], **description: Any) -> None:
        super().__init__(**description)
        with_agents = self.input_has_agent_dim
        spec = self.input_spec
        prefix: tuple[str, ...] = ()
        if with_agents:
            if [*spec.keys()] != [self.agent_group]:
                raise InputError(
                    "input_spec: expected arrays of the agents alone, got "
                    f"{', '.join(map(str, spec.keys()))}"
                )
            spec, prefix = spec[self.agent_group], (self.agent_group,)
        space, _ = split_action_mask(observation_space(spec, int(with_agents)))
        scope: Scope = "team" if self.centralised and with_agents else "agent"
        paths = leaf_paths(space)
        self.in_keys = [(*prefix, *path) for path in paths]
        # Position of the agents' dimension, counted from the end.
        self._agents_at = [-len(spec[path].shape) for path in paths]
        self._selects = with_agents and not self.centralised
        count = 1 if self.share_params else self.n_agents
        self.networks = nn.ModuleList(
            AgentNetwork(
                space,
                self.output_leaf_spec.shape[-1],
                scope=scope,
                num_agents=self.n_agents,
                **network,
            )
            for _ in range(count)
        ).to(self.device)

    @override
    def _forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        arrays = [tensordict.get(key) for key in self.in_keys]
        if self.share_params:
            result = self.networks[0](*arrays)
        else:
            results = [
                network(*(self._of_agent(arrays, i) if self._selects else arrays))
                for i, network in enumerate(self.networks)
            ]
            result = torch.stack(results, -2)
        tensordict.set(self.out_key, result)
        return tensordict

    def _of_agent(self, arrays: list[torch.Tensor], index: int) -> list[torch.Tensor]:
        places = zip(arrays, self._agents_at, strict=True)
        return [array.select(place, index) for array, place in places]


@dataclass
class SetModelConfig(ModelConfig):
    """BenchMARL's configuration of a `SetModel`, for actors and critics.

    Args:
        pooling, encoder, dim, num_layers, num_heads, type_embedding, input_activation,
            init_std: see `SpaceNetwork`.
        vector: ``"numbers"`` if each number of an observation is a token, ``"token"``
            if the observation is a single one, so that a centralized critic's tokens
            are the agents.
        token_options: options of `TokenOptions`, such as ``{"presence": 0}``.
    """

    pooling: Part = "ada"
    encoder: Part = "transformer"
    dim: PositiveInt | None = None
    num_layers: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    type_embedding: SizeOrZero = 4
    input_activation: Activation | None = "gelu"
    init_std: PositiveFloat = 0.2
    vector: Vector = "numbers"
    token_options: Mapping[str, Any] = field(default_factory=dict)

    @override
    def get_model(self, *, model_index: int = 0, **description: Any) -> SetModel:
        network = asdict(self)
        network |= network.pop("token_options")
        description |= {"model_index": model_index, "is_critic": self.is_critic}
        return SetModel(network, **description)

    @staticmethod
    @override
    def associated_class() -> type[SetModel]:
        return SetModel
