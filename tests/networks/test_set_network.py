"""SetNetwork: the paper's sizes, seeds, padding, and what stays outside the set."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.samples import NUM_TOKENS, SPEC, random_tokens, shared
from marl_pool import compile
from marl_pool.encoders import encoder_names
from marl_pool.encoders.base import Encoder
from marl_pool.networks.set_network import (
    SetNetwork,
    TokenEmbedding,
    init_weights,
    seeded,
)
from marl_pool.options.names import resolve
from marl_pool.policies import POLICIES, make_policy
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.pooling import make_pooling, pooling_names
from marl_pool.pooling.ada import AdaPooling
from marl_pool.pooling.base import Pooling
from marl_pool.pooling.basic import SumPooling
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool_studies.adapool.knn_centroid import KnnCentroid

ENCODER = {"name": "transformer", "num_layers": 1, "num_heads": 2}
TWO = {"heads": [{"name": "cls"}, {"name": "max"}]}
seeds = st.integers(0, 2**31)


def make(pooling: str = "ada", *, spec: TokenSpec = SPEC, **options: Any) -> SetNetwork:
    options = {"encoder": ENCODER, "seed": 0, "init_std": 0.5, **options}
    head = {"name": pooling, **options.pop("head", {})}
    return SetNetwork(spec, pooling=head, **options).eval()


def make_double(name: str) -> SetNetwork:
    return make(name).double()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


# The paper's sizes


def spec(num_tokens: int, num_features: int, num_types: int) -> TokenSpec:
    return TokenSpec(
        num_tokens, num_features, tuple(f"type {i}" for i in range(num_types))
    )


def ada(num_heads: int) -> dict[str, Any]:
    return {"name": "ada", "num_heads": num_heads}


CENTROID = {"dim": 8, "num_layers": 3, "num_heads": 8, "dim_ff": 32}
TAG = {"dim": 3, "num_layers": 6, "num_heads": 3, "dim_ff": 12}
BOXWORLD = {"dim": 6, "num_layers": 6, "num_heads": 6, "dim_ff": 24}


@pytest.mark.parametrize(
    ("tokens", "actions", "pooling", "type_embedding", "size", "expected"),
    [
        (spec(32, 4, 4), spaces.Box(0, 1, (5,)), {"name": "avg"}, 4, CENTROID, 5659),
        (spec(32, 4, 4), spaces.Box(0, 1, (5,)), {"name": "max"}, 4, CENTROID, 5659),
        (spec(32, 4, 4), spaces.Box(0, 1, (5,)), ada(8), 4, CENTROID, 5915),
        (spec(32, 4, 4), spaces.Box(0, 1, (5,)), {"name": "cls"}, 4, CENTROID, 5667),
        (spec(32, 4, 4), spaces.Discrete(5), ada(3), 4, TAG, 3455),
        (spec(50, 5, 2), spaces.Discrete(4), ada(6), 0, BOXWORLD, 5821),
    ],
    ids=["avg", "max", "ada", "cls", "simple_tag", "boxworld"],
)
def test_number_of_parameters(
    tokens: TokenSpec,
    actions: spaces.Space,
    pooling: Any,
    type_embedding: int,
    size: dict[str, int],
    expected: int,
) -> None:
    encoder = {"name": "transformer", **size}
    options = {"encoder": encoder, "type_embedding": type_embedding}
    policy = make_policy(tokens, actions, pooling=pooling, **options)
    assert sum(parameter.numel() for parameter in policy.parameters()) == expected


# Initial weights


def base(network: nn.Module) -> dict[str, Tensor]:
    state = network.state_dict()
    return {key: value for key, value in state.items() if "pooling." not in key}


@pytest.mark.parametrize("seed", [0, 3, 2**62])
def test_the_base_is_the_same_for_every_head_at_one_seed(seed: int) -> None:
    policies = [
        make_policy(SPEC, spaces.Discrete(3), pooling=name, seed=seed)
        for name in pooling_names()
    ]
    for policy in policies[1:]:
        assert base(policy).keys() == base(policies[0]).keys()
        same_width = policy.network.dim_out == policies[0].network.dim_out
        for key, value in base(policy).items():
            if same_width or key.startswith("network."):
                assert torch.equal(value, base(policies[0])[key]), key


@pytest.mark.parametrize("name", pooling_names())
def test_seeds_decide_the_weights(name: str) -> None:
    first, second, reseeded = (
        dict(make(name, seed=seed).named_parameters()) for seed in (1, 1, 2)
    )
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
        # What an option sets, as a logarithm, is not sampled.
        sampled = "norm" not in key and ".log_" not in key
        if sampled and not key.endswith("bias"):
            assert not torch.equal(value, reseeded[key]), key


def test_the_parts_of_a_network_are_drawn_apart() -> None:
    encoder = {**ENCODER, "num_layers": 2}
    network: Any = make(encoder=encoder, type_embedding=8 - SPEC.num_features)
    square = [
        network.embedding.project,
        network.pooling.attention.to_query,
        *(layer.attention.to_query for layer in network.encoder.layers),
    ]
    for i, part in enumerate(square):
        for earlier in square[:i]:
            assert not torch.equal(part.weight, earlier.weight)


def test_a_seed_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    make(seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_global_generator_decides() -> None:
    networks = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        networks.append(make(seed=None).embedding.project.weight)
    assert torch.equal(networks[0], networks[1])
    assert not torch.equal(networks[0], networks[2])


def test_seeded_weights_leave_the_generators_of_gpus(monkeypatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with seeded(1, "encoder"):
        pass
    assert not seeds


def test_seeded_depends_on_the_seed_and_the_part_alone() -> None:
    def sample(seed: int | None, part: str) -> Tensor:
        with seeded(seed, part):
            return torch.rand(3)

    assert torch.equal(sample(4, "a"), sample(4, "a"))
    assert not torch.equal(sample(4, "a"), sample(4, "b"))
    seeds = [*range(100), 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    assert len({tuple(sample(seed, "a").tolist()) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("std", [0.02, 0.2])
@pytest.mark.parametrize("name", pooling_names())
def test_weights_have_the_standard_deviation_asked_for(name: str, std: float) -> None:
    encoder = {"name": "transformer", "dim": 64, "num_heads": 4, "dim_ff": 64}
    wide = TokenSpec(16, 64, tuple(map(str, range(64))))
    network = make(name, spec=wide, encoder=encoder, init_std=std, type_embedding=64)
    for key, value in network.named_parameters():
        if network.pooling.keeps_initial_weights and "pooling" in key:
            continue
        if ".log_" in key:  # an option sets it
            continue
        if "norm" in key:
            assert (value == (1 if key.endswith("weight") else 0)).all(), key
        elif key.endswith("bias"):
            assert not value.any(), key
        else:
            # Six standard errors of a mean and of a standard deviation.
            error = 6 * std / value.numel() ** 0.5
            assert abs(value.std() - std) < error, key
            assert abs(value.mean()) < error, key


def test_extra_tokens_and_a_learned_query_are_weights_too() -> None:
    for name, parameter in (("cls", "tokens"), ("ada", "learned_query")):
        head = {"query": "learned"} if name == "ada" else {}
        network = make(name, head=head, init_std=1e-6)
        value = getattr(network.pooling, parameter)
        assert 0 < value.abs().max() < 1e-4


def test_init_weights_reaches_embeddings() -> None:
    with seeded(0, "test"):
        table = nn.Embedding(500, 20)
        init_weights(table, 0.1)
    assert abs(table.weight.std() - 0.1) < 0.005


# The embedding


def embed(*options: Any) -> TokenEmbedding:
    with seeded(0, "embedding"):
        return TokenEmbedding(SPEC, *options)


@given(seed=seeds)
def test_the_split_projection_is_that_of_the_concatenation(seed: int) -> None:
    tokens = random_tokens(seed)
    embedding = TokenEmbedding(SPEC, 8, 4).double()
    assert embedding.types is not None
    joined = torch.cat([tokens.features.double(), embedding.types(tokens.types)], -1)
    torch.testing.assert_close(embedding(tokens), embedding.project(joined))


def test_the_split_projection_has_the_gradients_of_the_concatenation() -> None:
    tokens = random_tokens()
    embedding = TokenEmbedding(SPEC, 8, 4).double()
    assert embedding.types is not None
    embedding(tokens).square().sum().backward()
    split = [parameter.grad for parameter in embedding.parameters()]
    embedding.zero_grad()
    joined = torch.cat([tokens.features.double(), embedding.types(tokens.types)], -1)
    embedding.project(joined).square().sum().backward()
    torch.testing.assert_close(split, [p.grad for p in embedding.parameters()])


def test_without_a_type_embedding_types_do_not_matter() -> None:
    embedding = TokenEmbedding(SPEC, 8, 0)
    tokens = random_tokens()
    retyped = tokens._replace(types=2 - tokens.types)
    assert torch.equal(embedding(tokens), embedding(retyped))
    assert torch.equal(embedding(tokens), embedding.project(tokens.features))
    with_types = TokenEmbedding(SPEC, 8, 4)
    assert not torch.equal(with_types(tokens), with_types(retyped))


@pytest.mark.parametrize("type_embedding", [0, 4])
@pytest.mark.parametrize(
    ("name", "function"), [("gelu", nn.functional.gelu), ("relu", torch.relu)]
)
def test_the_activation_follows_the_projection(
    name: Any, function: Any, type_embedding: int
) -> None:
    tokens = random_tokens()
    plain, activated = embed(8, type_embedding), embed(8, type_embedding, name)
    torch.testing.assert_close(activated(tokens), function(plain(tokens)))
    assert activated.state_dict().keys() == plain.state_dict().keys()


def test_the_activation_precedes_a_type_that_is_added() -> None:
    tokens = random_tokens()
    embedding = TokenEmbedding(SPEC, 8, "add", "gelu")
    assert embedding.project is not None
    assert embedding.types is not None
    projected = nn.functional.gelu(embedding.project(tokens.features))
    expected = projected + embedding.types(tokens.types)
    torch.testing.assert_close(embedding(tokens), expected)


@pytest.mark.parametrize(("dim", "types"), [(None, 0), (None, 4), (3, "add")])
def test_without_a_projection_nothing_is_activated(dim: Any, types: Any) -> None:
    tokens = random_tokens()
    plain, activated = embed(dim, types), embed(dim, types, "gelu")
    assert activated.project is None
    assert torch.equal(activated(tokens), plain(tokens))


def test_policies_activate_the_projection_and_supervised_networks_do_not() -> None:
    policy = make_policy(SPEC, spaces.Discrete(3), encoder=ENCODER, seed=0)
    assert isinstance(policy.network.embedding.activate, nn.GELU)
    assert isinstance(make().embedding.activate, nn.Identity)
    small = {**ENCODER, "dim": 16}
    task = KnnCentroid(encoder=small, pooling={"name": "avg"}, dim=4)
    regression: Any = task.make_network(seed=0)
    assert regression.network.embedding.project is not None
    assert isinstance(regression.network.embedding.activate, nn.Identity)


@pytest.mark.parametrize("type_embedding", [0, 4])
def test_bytes_are_scaled_to_the_unit_interval(type_embedding: int) -> None:
    bytes_spec = TokenSpec(5, 3, SPEC.type_names, dtype="uint8")
    network = make(spec=bytes_spec, type_embedding=type_embedding)
    tokens = random_tokens()
    pixels = (tokens.features * 60 + 128).clamp(0, 255).to(torch.uint8)
    scaled = tokens._replace(features=pixels.float() / 255)
    torch.testing.assert_close(
        network(tokens._replace(features=pixels)), network(scaled)
    )


@pytest.mark.parametrize("name", POLICIES.built_in)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_bytes_are_scaled_where_the_spec_has_bytes(name: str, dtype: Any) -> None:
    spec = TokenSpec(5, 3, SPEC.type_names, dtype=dtype)
    options = {"encoder": ENCODER} if name == "token" else {}
    cls = resolve(name, POLICIES, "", SpecifiedPolicy)
    policy = compile(cls(spec, spaces.Discrete(3), seed=0, **options).eval())
    tokens = random_tokens()
    pixels = (tokens.features * 60 + 128).clamp(0, 255).to(torch.uint8)
    numbers = pixels.float() / (255 if dtype == "uint8" else 1)
    tokens = tokens.map(lambda part: part[:, None])
    with torch.no_grad():
        torch.testing.assert_close(
            policy.act(tokens._replace(features=pixels[:, None])).logits,
            policy.act(tokens._replace(features=numbers[:, None])).logits,
        )


# Padding and order


# `test_pooling` and `test_encoders` try every head and every encoder.
some_heads = pytest.mark.parametrize("name", ["ada", "cls", "flatten", "max"])


@some_heads
@given(seed=seeds, places=st.lists(st.booleans(), min_size=5, max_size=5))
def test_padding_equals_absence(name: str, seed: int, places: list[bool]) -> None:
    network = shared(make_double, name)
    tokens = random_tokens(seed)
    if not network.pooling.permutation_invariant:
        places = [False, False, *sorted(places)][:NUM_TOKENS]
    kept = ~torch.tensor(places)
    if not kept.any():
        kept[0] = True
    features = tokens.features.clone()
    features[:, ~kept] = torch.nan
    types = tokens.types.clone()
    types[:, ~kept] = 99  # no type at all
    padded = Tokens(features, types, (~kept).expand(4, -1))
    present = (tokens.features[:, kept], tokens.types[:, kept])
    absent = Tokens(*present, torch.zeros(4, int(kept.sum()), dtype=torch.bool))
    assert close(network(padded), network(absent))
    weights, expected = network.weights(padded), network.weights(absent)
    if weights is None or expected is None:
        assert weights is expected
    else:
        assert close(weights[..., kept], expected)
        assert not weights[..., ~kept].any()


@some_heads
@given(seed=seeds, order=st.permutations(range(NUM_TOKENS)))
def test_an_invariant_head_makes_an_invariant_network(
    name: str, seed: int, order: list[int]
) -> None:
    network = shared(make_double, name)
    if network.pooling.permutation_invariant:
        tokens = random_tokens(seed)
        assert close(network(tokens.map(lambda part: part[:, order])), network(tokens))


# `test_pooling` compiles every head.
def test_compiled_is_the_same() -> None:
    torch.compiler.reset()
    network = make().double()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    tokens = random_tokens()
    assert close(compiled(tokens), network(tokens))
    torch.compiler.reset()


# The extra token


class Asking(AdaPooling):
    """An AdaPool that adds a token to the set."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, query="learned")
        self.extra_tokens = 1
        self.tokens = nn.Parameter(torch.zeros(1, dim))


def test_weights_leave_out_the_extra_token() -> None:
    network = make(f"{__name__}:Asking")
    tokens = random_tokens()
    weights = network.weights(tokens)
    assert weights is not None
    assert weights.shape == (4, 1, NUM_TOKENS)
    assert not weights[:, 0][tokens.padding].any()
    whole = network.pooling.weights(*network.encode(tokens))
    assert whole is not None
    assert torch.equal(weights, whole[..., 1:])
    assert torch.allclose(whole.sum(-1), torch.ones(4, 1))
    assert (weights.sum(-1) < 0.999).all()


def test_weights_are_those_of_attending_heads() -> None:
    tokens = random_tokens()
    for name in ("ada", "avg"):
        weights = make(name).weights(tokens)
        assert weights is not None
        assert torch.allclose(weights.sum(-1), torch.ones(4, 1))
    assert make("cls").weights(tokens) is None
    assert make("max").weights(tokens) is None


def test_the_extra_token_passes_the_encoder_unpadded_and_untyped() -> None:
    network = make("cls")
    tokens = random_tokens()
    x, padding, types = network.encode(tokens)
    assert x.shape == (4, 1 + NUM_TOKENS, network.encoder.dim)
    assert padding is not None
    assert torch.equal(padding[:, 1:], tokens.padding)
    assert not padding[:, 0].any()
    assert not (types[:, 0] == SELF_TYPE).any()


# Invalid parts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": {"dim": 8}}, "encoder: expected a mapping with a name, got"),
        ({"encoder": {"name": "mlp"}}, "unknown encoder 'mlp': choose from"),
        ({"pooling": "mx"}, r"unknown pooling 'mx': .*mean 'max'\?"),
        ({"head": {"quary": "mean"}}, r"'quary': choose .*mean 'query'\?"),
        ({"head": {"num_heads": 3}}, "num_heads: expected a divisor of dim = 8"),
        ({"encoder": {**ENCODER, "num_heads": 3}}, "a divisor of dim = 8, got 3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(**options)


def test_self_query_requires_a_self_token() -> None:
    channels = TokenSpec(5, 3, ("channel",), has_self=False)
    with pytest.raises(InputError, match="include no self token"):
        make("ada", spec=channels, head={"query": "self"})
    without: Any = make("ada", spec=channels).pooling
    with_self: Any = make("ada").pooling
    assert (without.query, with_self.query) == ("mean", "self")


def test_a_class_token_that_meets_no_other_token_is_refused() -> None:
    with pytest.raises(InputError, match="pooling 'cls': expected an encoder in which"):
        make("cls", encoder={"name": "identity", "dim": 8})
    heads = [{"name": "cls"}, {"name": "multi", "heads": [{"name": "cls"}]}]
    with pytest.raises(InputError, match="pooling 'multi': expected an encoder in"):
        make("multi", encoder={"name": "identity", "dim": 8}, head={"heads": heads})
    # Beside another head, the pooled vector depends on the tokens.
    make("multi", encoder={"name": "identity", "dim": 8}, head=TWO)


def test_features_of_another_shape_are_refused() -> None:
    tokens = random_tokens()
    wide = tokens._replace(features=tokens.features.repeat(1, 1, 2))
    message = r"expected features of shape \(B, N, 3\), got \(4, 5, 6\)"
    with pytest.raises(InputError, match=message):
        make()(wide)
    with pytest.raises(InputError, match=r"got \(5, 3\)"):
        make()(tokens.at(0))


class NoSuper(Pooling):
    """A head that forgets its base class."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def forward(self, x: Any, padding: Any = None, types: Any = None) -> Any:
        return x.sum(1)


class NoSuperEncoder(Encoder):
    def __init__(self, dim: int = 8) -> None:
        self.dim = dim

    def forward(self, x: Any, padding: Any = None) -> Any:
        return x


class HalfWidth(SumPooling):
    """A head whose width is no integer."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.dim_out = dim / 2  # type: ignore[assignment]


class Faulty(SumPooling):
    """A head with a wrong result.

    Args:
        fault: what is wrong.
    """

    def __init__(self, dim: int, fault: str = "") -> None:
        super().__init__(dim)
        self.fault = fault

    def forward(self, x: Any, padding: Any = None, types: Any = None) -> Any:
        pooled = x.sum(1)
        faulty = {"pair": (pooled, x), "None": None, "batch": pooled[:1]}
        faulty["dimension"] = pooled[:, None]
        return faulty.get(self.fault, pooled)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("NoSuper", r"NoSuper': expected a constructor that calls super\(\)"),
        ("HalfWidth", "HalfWidth': dim_out: expected an integer >= 1, got 4.0"),
    ],
)
def test_a_head_whose_constructor_is_wrong_is_named(head: str, message: str) -> None:
    name = f"{__name__}:{head}"
    with pytest.raises(InputError, match=message):
        make(name)
    with pytest.raises(InputError, match=message):
        make_pooling(name, dim=8)
    with pytest.raises(InputError, match=message):
        make_pooling("multi", dim=8, heads=[{"name": "avg"}, {"name": name}])


class Misshapen(Encoder):
    """An encoder with a wrong result or width.

    Args:
        dim: the width that it declares.
        fault: what is wrong.
    """

    def __init__(self, dim: Any = 8, fault: str = "") -> None:
        super().__init__()
        self.dim, self.fault = dim, fault

    def forward(self, x: Any, padding: Any = None) -> Any:
        faulty = {"wide": x.repeat(1, 1, 2), "short": x[:, 1:], "pair": (x, padding)}
        return faulty[self.fault]


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ({"name": "NoSuperEncoder"}, r"expected a constructor that calls super\(\)"),
        ({"name": "Misshapen", "dim": "8"}, "dim: expected an integer .*, got '8'"),
        (
            {"name": "Misshapen", "fault": "wide"},
            r"expected a result of float32 of shape \(2, 5, 8\), got .*\(2, 5, 16\)",
        ),
        ({"name": "Misshapen", "fault": "short"}, r"expected .*, got .*\(2, 4, 8\)"),
        ({"name": "Misshapen", "fault": "pair"}, r"expected .*, got tuple"),
        ({"name": "Misshapen"}, "expected a result for 2 sets of zeros, got KeyError"),
    ],
)
def test_an_encoder_that_is_wrong_is_named(encoder: Any, message: str) -> None:
    name = f"{__name__}:{encoder['name']}"
    for pooling in ("avg", f"{__name__}:Faulty"):
        with pytest.raises(InputError, match=rf"^encoder '{name}': {message}"):
            make(pooling, encoder={**encoder, "name": name})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("pair", r"^Faulty: expected a result of shape \(B, 8\), got a tuple"),
        ("None", r"^Faulty: expected a result of shape \(B, 8\), got None"),
        ("batch", r"^Faulty: expected a result of shape \(2, 8\), got \(1, 8\)"),
        ("dimension", r"^Faulty: expected a result .* \(B, 8\), got \(2, 1, 8\)"),
    ],
)
def test_a_wrong_result_of_a_head_is_named(fault: str, message: str) -> None:
    faulty = {"name": f"{__name__}:Faulty", "fault": fault}
    with pytest.raises(InputError, match=message):
        make(f"{__name__}:Faulty", head={"fault": fault})
    with pytest.raises(InputError, match=message):
        make("multi", head={"heads": [{"name": "avg"}, faulty]})
    head = make_pooling(f"{__name__}:Faulty", dim=8, fault=fault)
    with pytest.raises(InputError, match=message):
        head(torch.zeros(2, 5, 8))


class Typeless(SumPooling):
    """A head whose `forward` lacks the types."""

    def forward(self, x: Any, padding: Any = None) -> Any:  # type: ignore[override]
        return x.sum(1)


@pytest.mark.parametrize("in_multi", [False, True])
def test_a_head_that_cannot_be_called_is_named(in_multi: bool) -> None:
    head = {"name": f"{__name__}:Typeless"}
    pooling = {"name": "multi", "heads": [head]} if in_multi else head
    message = r"2 sets of zeros, got TypeError: Typeless.forward\(\) takes"
    with pytest.raises(InputError, match=message):
        SetNetwork(SPEC, encoder=ENCODER, pooling=pooling)


class Attending(SumPooling):
    """A head with weights of a shape that an option says.

    Args:
        shape: of the weights; null for a pair of them.
    """

    def __init__(self, dim: int, shape: Any = None) -> None:
        super().__init__(dim)
        self.shape = shape

    def weights(self, x: Any, padding: Any = None, types: Any = None) -> Any:
        return (x, x) if self.shape is None else torch.ones(self.shape)


@pytest.mark.parametrize(
    ("shape", "actual"),
    [
        ((2, NUM_TOKENS), rf"float32 of shape \(2, {NUM_TOKENS}\)"),
        ((2, 1, NUM_TOKENS - 1), rf"float32 of shape \(2, 1, {NUM_TOKENS - 1}\)"),
        ((1, 1, NUM_TOKENS), rf"float32 of shape \(1, 1, {NUM_TOKENS}\)"),
        (None, "tuple"),
    ],
)
def test_weights_of_another_shape_are_refused(shape: Any, actual: str) -> None:
    message = (
        r"Attending': weights: expected \(B, heads, N\), here "
        rf"\(2, heads, {NUM_TOKENS}\), got {actual}"
    )
    with pytest.raises(InputError, match=message):
        make(f"{__name__}:Attending", head={"shape": shape})


def test_weights_of_several_heads_are_accepted() -> None:
    make(f"{__name__}:Attending", head={"shape": (2, 3, NUM_TOKENS)})


class NoWidth(Encoder):
    """An encoder that does not declare its width."""

    def forward(self, x, padding=None):
        return x


@pytest.mark.parametrize(
    ("encoder", "pooling"),
    [(name, "avg") for name in encoder_names()]
    + [("transformer", name) for name in pooling_names()],
)
def test_outputs_differ_between_sets_at_initialization(
    encoder: str, pooling: str
) -> None:
    """Outputs differ from set to set even with the small initial weights of `fit`."""
    network = make(pooling, encoder={"name": encoder}, init_std=0.02)
    pooled = network(random_tokens(batch=(64,)))
    assert pooled.std(0).mean() > 1e-3


def test_nested_parts_that_keep_their_weights_keep_them() -> None:
    parts = [{"name": "cnn"}, {"name": "gated"}]
    torch.manual_seed(0)
    head = make_pooling("multi", dim=8, heads=parts, num_tokens=6)
    before = {name: part.clone() for name, part in head.named_parameters()}
    init_weights(head, 0.5)
    names = {name for name, part in head.named_parameters() if part.equal(before[name])}
    assert names == {name for name in before if name.startswith("heads.0.")}


class OwnWeights(Encoder):
    """A custom encoder that keeps its initial weights."""

    dim = 8
    keeps_initial_weights = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        nn.init.eye_(self.layer.weight)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.layer(x)


def test_custom_encoder_may_keep_its_initial_weights() -> None:
    network = make("avg", encoder={"name": f"{__name__}:OwnWeights"})
    assert network.encoder.layer.weight.equal(torch.eye(8))


def test_an_encoder_without_a_width_is_refused():
    with pytest.raises(InputError, match="expected an attribute dim"):
        make("avg", encoder={"name": f"{__name__}:NoWidth"})
