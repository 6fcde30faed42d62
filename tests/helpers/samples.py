"""Sets, tokens, pooling heads and encoders shared by several test files."""

import ast
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from marl_pool.encoders import encoder_names, make_encoder
from marl_pool.options.construction import build
from marl_pool.policies.actions import ActionSpec
from marl_pool.pooling import POOLING, pooling_names
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec

DIM, NUM_TOKENS = 8, 5
T = TypeVar("T")


@cache
def shared(build: Callable[..., T], name: str, options: str = "{}") -> T:
    """Build a module once for all examples; ``options`` is a ``repr`` of a dict."""
    return build(name, **ast.literal_eval(options))


SPEC = TokenSpec(NUM_TOKENS, 3, ("self", "friend", "noise"))

ADA_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("ada", {"query": "mean"}),
    ("ada", {"query": "learned"}),
    ("ada", {"query": [0]}),
    ("ada", {"query": [0, 1]}),
    ("ada", {"query": "self", "residual": False}),
    ("ada", {"query": "learned", "residual": True}),
    ("ada", {"query": "mean", "num_heads": 4}),
    ("ada", {"query": "self", "num_heads": 2, "attention_scale": "head"}),
    ("ada", {"query": "self", "num_heads": DIM}),
]
NEURON_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("attention_neuron", {"memory": "none"}),
    ("attention_neuron", {"memory": "none", "key_units": 0, "frames": 4}),
    ("attention_neuron", {"activation": "softmax", "squash": False, "num_codes": 3}),
    ("attention_neuron", {"bias": False, "scale": False}),
    ("vision_neuron", {"num_codes": 3, "frames": 2, "affine": False, "scale": False}),
]
SET_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("power", {"shift": False}),
    ("power", {"learn": False, "p": 2.0}),
    ("softmax", {"learn": False, "beta": 3.0}),
    ("gated", {"hidden": 3}),
    ("pma", {"num_seeds": 2, "num_heads": 4}),
    ("pma", {"layer_norm": False, "attention_scale": "head"}),
    ("hopfield", {"num_heads": 2, "num_updates": 3}),
    ("hopfield", {"num_updates": 0, "beta": 2.0}),
    ("learned_aggregation", {"query_dim": 3, "dim_out": 2}),
    ("lstm", {"hidden": 3}),
    ("pna", {"scalers": ["attenuation"], "avg_log_size": 0.7}),
    ("quantile", {"levels": [0.0, 0.3, 1.0]}),
    ("set2set", {"steps": 2}),
    ("trimmed", {"fraction": 0.4}),
    ("multi", {"heads": [{"name": "cls"}, {"name": "ada"}, {"name": "sum"}]}),
    ("multi", {"heads": [{"name": "flatten"}]}),
]
DEFAULTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in pooling_names()]
VARIANTS = DEFAULTS + ADA_VARIANTS + NEURON_VARIANTS + SET_VARIANTS
"""Every registered head with its defaults, and heads with other options."""

heads = pytest.mark.parametrize(
    ("name", "options"),
    VARIANTS,
    ids=["-".join([name, *map(str, options.values())]) for name, options in VARIANTS],
)


ENCODER_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in encoder_names()),
    ("transformer", {"num_heads": 2, "attention_scale": "head"}),
    ("transformer", {"num_layers": 1, "activation": "relu", "dim_ff": 5}),
    ("set_linear", {"others": "sum", "hidden": 3}),
    ("set_linear", {"others": "max", "num_layers": 2}),
    ("set_transformer", {"num_inducing": 3, "num_heads": 2}),
    ("set_transformer", {"num_layers": 1, "layer_norm": False}),
    ("swarm", {"population": "max", "num_layers": 2, "iterations": 2}),
    ("swarm", {"population": "causal", "units": 3}),
    ("swarm", {"iterations": 2}),
    ("lstm", {"sort": True, "hidden": 3}),
    ("lstm", {"num_layers": 2}),
    ("learned_merging", {"num_layers": 3, "proportion": 1.0, "num_heads": 2}),
    ("learned_merging", {"attention": False, "residual": False, "policy_heads": 2}),
]
"""Every registered encoder with its defaults, and encoders with other options."""

encoders = pytest.mark.parametrize(
    ("name", "options"),
    ENCODER_VARIANTS,
    ids=["-".join([n, *map(str, o.values())]) for n, o in ENCODER_VARIANTS],
)


def make_head(
    name: str, *, dim: int = DIM, num_tokens: int = NUM_TOKENS, **options: Any
) -> Pooling:
    """Build a head in float64 with random parameters."""
    context = {"dim": dim, "num_tokens": num_tokens, "has_self": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = build(name, POOLING, "pooling", Pooling, options, context)
        for parameter in head.parameters():
            nn.init.normal_(parameter, std=0.5)
    return head.double().eval()


def build_encoder(name: str = "transformer", **options: Any) -> Any:
    """Build an encoder in float64 with random parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = make_encoder(name, **{"dim": DIM, **options})
        for parameter in encoder.parameters():
            nn.init.normal_(parameter, std=0.3)
    return encoder.double().eval()


def in_torchs_order(weight: Tensor) -> Tensor:
    """Swap the last two of an LSTM's four gates, to match the order in torch."""
    enter, forget, leave, content = weight.chunk(4)
    return torch.cat([enter, forget, content, leave])


class Prepended(nn.Module):
    """A head without an encoder, its extra tokens prepended to the set."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        return self.head(*self.head.prepend(x, padding, types))


def random_set(
    seed: int = 0, batch: int = 4, num_tokens: int = NUM_TOKENS, dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample vectors, padding and types; a row has one self token, and one present."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, num_tokens, dim, generator=generator, dtype=torch.float64)
    padding = torch.rand(batch, num_tokens, generator=generator) < 0.4
    types = torch.randint(1, 3, (batch, num_tokens), generator=generator)
    rows = torch.arange(batch)
    types[rows, torch.randint(num_tokens, (batch,), generator=generator)] = SELF_TYPE
    padding[rows, torch.randint(num_tokens, (batch,), generator=generator)] = False
    return x, padding, types


def random_tokens(
    seed: int = 0, batch: tuple[int, ...] = (4,), spec: TokenSpec = SPEC
) -> Tokens:
    """Sample tokens of ``spec`` with some padding."""
    rows = torch.Size(batch).numel()
    x, padding, types = random_set(seed, rows, spec.num_tokens, spec.num_features)
    types = types.clamp(max=spec.num_types - 1)
    parts = (x.float(), types, padding)
    return Tokens(*(part.unflatten(0, batch) for part in parts))


def random_actions(
    spec: ActionSpec,
    rows: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sample actions ``(rows, …)``; numbers in a Box are normally distributed."""
    columns = [torch.randint(n, (rows,), generator=generator) for n in spec.sizes]
    if spec.discrete:
        return columns[0]
    if spec.integral:
        return torch.stack(columns, -1)
    shape = (rows, len(spec.low))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.cat([*(column[:, None].to(dtype) for column in columns), numbers], -1)
