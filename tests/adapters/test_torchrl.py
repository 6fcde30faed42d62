"""TorchRL's losses, collectors and advantages with set networks, on the real library."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrl")

with warnings.catch_warnings():
    # TorchRL's modules warn about each other's classes when they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensordict import TensorDict, TensorDictBase
    from tensordict.nn import TensorDictModuleBase
    from torch.distributions import Categorical
    from torchrl import data
    from torchrl.collectors import Collector
    from torchrl.envs import PettingZooWrapper
    from torchrl.modules import MaskedCategorical, ProbabilisticActor, TanhNormal
    from torchrl.modules import ValueOperator as ValueOperator
    from torchrl.objectives import ClipPPOLoss, DiscreteSACLoss
    from torchrl.objectives.value import GAE

import marl_pool
from helpers.samples import SPEC
from marl_pool.adapters.torchrl import (
    SetActor,
    SetCritic,
    as_policy,
    observation_space,
)
from marl_pool.envs import make_env
from marl_pool.pooling import POOLING, pooling_names
from marl_pool.utils.errors import InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torchrl|tensordict).*"),
    pytest.mark.filterwarnings("ignore::UserWarning:(torchrl|tensordict).*"),
]

SMALL: dict[str, Any] = {"dim": 8, "num_layers": 1, "num_heads": 2, "init_std": 0.5}
NUM_AGENTS = 3


def token_observations(num_agents: int = NUM_AGENTS) -> data.Composite:
    """Return the specs of agents that observe tokens."""
    slots = SPEC.num_tokens
    shape = (num_agents, slots)
    tokens = data.Composite(
        features=data.Unbounded((*shape, SPEC.num_features)),
        types=data.Bounded(0, SPEC.num_types - 1, shape, dtype=torch.int64),
        padding=data.Binary(slots, shape, dtype=torch.bool),
        shape=(num_agents,),
    )
    agents = data.Composite(observation=tokens, shape=(num_agents,))
    return data.Composite(agents=agents)


def observations(*batch: int, seed: int = 0) -> TensorDict:
    """Return random tokens of agents; the last slot is padding that holds NaN."""
    torch.manual_seed(seed)
    shape = (*batch, SPEC.num_tokens)
    types = torch.randint(1, SPEC.num_types, shape)
    types[..., 0] = 0
    padding = torch.zeros(shape, dtype=torch.bool)
    padding[..., -1] = True
    features = torch.randn(*shape, SPEC.num_features)
    features[..., -1, :] = torch.nan
    tokens = {"features": features, "types": types, "padding": padding}
    observed = TensorDict({"observation": TensorDict(tokens, batch)}, batch)
    return TensorDict({"agents": observed}, batch[:-1])


def values(critic: TensorDictModuleBase, observed: TensorDictBase) -> Tensor:
    with torch.no_grad():
        return critic(observed.clone())["agents", "state_value"]


POOLS = [
    name
    for name in pooling_names()
    if not issubclass(POOLING.resolve(name), marl_pool.pooling.base.MemoryPooling)
]
