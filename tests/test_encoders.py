"""Encoders: equivariant, blind to padding, and as large as the paper says."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import marl_pool
from marl_pool.encoders import ENCODERS, encoder_names, make_encoder
from marl_pool.encoders.base import Encoder
from marl_pool.errors import InputError
from tests.samples import DIM, NUM_TOKENS, random_set

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in encoder_names()),
    ("transformer", {"num_heads": 2, "attention_scale": "head"}),
    ("transformer", {"num_layers": 1, "activation": "relu", "dim_ff": 5}),
]
encoders = pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=[f"{n}-{len(o)}" for n, o in VARIANTS]
)
each = settings(max_examples=30)
seeds = st.integers(0, 2**31)


def build(name: str = "transformer", **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = make_encoder(name, **{"dim": DIM, **options})
        for parameter in encoder.parameters():
            nn.init.normal_(parameter, std=0.3)
    return encoder.double().eval()


# All of them


def test_every_registered_encoder_is_tried_here() -> None:
    assert {name for name, _ in VARIANTS} == set(ENCODERS)
    assert marl_pool.encoder_names() == sorted(ENCODERS)


@encoders
def test_shapes(name: str, options: dict[str, Any]) -> None:
    encoder = build(name, **options)
    assert isinstance(encoder, Encoder)
    assert encoder.dim == DIM
    x, padding, _ = random_set()
    for mask in (None, padding):
        assert encoder(x, mask).shape == x.shape


@encoders
@each
@given(seed=seeds, order=st.permutations(range(NUM_TOKENS)))
def test_permutation_equivariance(
    name: str, options: dict[str, Any], seed: int, order: list[int]
) -> None:
    encoder = build(name, **options)
    x, padding, _ = random_set(seed)
    torch.testing.assert_close(
        encoder(x[:, order], padding[:, order]), encoder(x, padding)[:, order]
    )


@encoders
@each
@given(seed=seeds, content=st.sampled_from([0.0, 1e5, -3.0]))
def test_padding_never_matters(
    name: str, options: dict[str, Any], seed: int, content: float
) -> None:
    encoder = build(name, **options)
    x, padding, _ = random_set(seed)
    expected = encoder(x, padding)
    other = encoder(x.masked_fill(padding[..., None], content), padding)
    torch.testing.assert_close(other[~padding], expected[~padding])
    for row in range(len(x)):
        here = ~padding[row]
        alone = encoder(x[row : row + 1, here])[0]
        torch.testing.assert_close(alone, expected[row, here])


@encoders
def test_an_empty_set_gives_finite_output_and_gradient(
    name: str, options: dict[str, Any]
) -> None:
    encoder = build(name, **options)
    x, padding, _ = random_set()
    padding[1] = True
    result = encoder(x.requires_grad_(), padding)
    assert result.isfinite().all()
    result.square().sum().backward()
    for tensor in (x, *encoder.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@encoders
def test_every_parameter_gets_a_gradient(name: str, options: dict[str, Any]) -> None:
    encoder = build(name, **options)
    encoder(random_set()[0].requires_grad_()).square().sum().backward()
    for label, parameter in encoder.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.any(), label


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("transfomer", {}, r"unknown encoder 'transfomer': .*mean 'transformer'\?"),
        ("transformer", {"heads": 2}, "option of encoder 'transformer': 'heads'"),
        ("transformer", {"num_heads": 3}, "a divisor of dim = 8, got 3"),
        ("transformer", {"attention_scale": "x"}, "expected 'model' or 'head', got"),
        ("transformer", {"activation": "gleu"}, r"'gleu': choose.*mean 'gelu'\?"),
        ("transformer", {"dim": 0}, r"encoder.dim: expected at least 1, got 0"),
        ("transformer", {"num_layers": 0}, r"encoder.num_layers: expected at least 1"),
        ("transformer", {"dim_ff": -1}, r"encoder.dim_ff: expected .* 1, got -1"),
        ("transformer", {"dropout": 1.0}, r"dropout: .* in \[0, 1\), got 1.0"),
        ("torch.nn:Linear", {}, "must be a subclass of .*Encoder"),
    ],
)
def test_what_names_no_encoder_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_encoder(name, **options)


# The transformer


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_it_is_torchs_pre_norm_layer(activation: str) -> None:
    encoder = build(
        num_layers=2, num_heads=4, attention_scale="head", activation=activation
    )
    x, padding, _ = random_set()
    expected = x
    for layer in encoder.layers:
        oracle = nn.TransformerEncoderLayer(
            DIM, 4, 32, 0.0, activation, batch_first=True, norm_first=True
        ).double()
        attention, (wide, _, narrow, _) = layer.attention, layer.feedforward
        parts = (attention.to_query, attention.to_key, attention.to_value)
        zeros = torch.zeros(3 * DIM)
        oracle.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([p.weight for p in parts]),
                "self_attn.in_proj_bias": zeros,
                "self_attn.out_proj.weight": attention.to_out.weight,
                "self_attn.out_proj.bias": zeros[:DIM],
                "linear1.weight": wide.weight,
                "linear1.bias": wide.bias,
                "linear2.weight": narrow.weight,
                "linear2.bias": narrow.bias,
                "norm1.weight": layer.attention_norm.weight,
                "norm1.bias": layer.attention_norm.bias,
                "norm2.weight": layer.feedforward_norm.weight,
                "norm2.bias": layer.feedforward_norm.bias,
            }
        )
        expected = oracle(expected, src_key_padding_mask=padding)
    torch.testing.assert_close(encoder(x, padding), expected)


@pytest.mark.parametrize(
    ("dim", "layers", "heads", "dim_ff", "count"),
    [
        (8, 3, 8, 32, 2520),  # centroid: 3 · (4·64 + 4·8 + 2·8·32 + 32 + 8)
        (3, 6, 3, 12, 810),  # tag: 6 · (4·9 + 4·3 + 2·3·12 + 12 + 3)
        (6, 6, 6, 24, 2916),  # BoxWorld: 6 · (4·36 + 4·6 + 2·6·24 + 24 + 6)
    ],
)
def test_number_of_parameters(
    dim: int, layers: int, heads: int, dim_ff: int, count: int
) -> None:
    encoder = make_encoder(
        "transformer", dim=dim, num_layers=layers, num_heads=heads, dim_ff=dim_ff
    )
    assert sum(parameter.numel() for parameter in encoder.parameters()) == count


def test_there_is_no_final_norm() -> None:
    # Both branches silenced, what is left is the residual path: the identity.
    encoder = build()
    with torch.no_grad():
        for layer in encoder.layers:
            for last in (layer.attention.to_out, layer.feedforward[2]):
                for parameter in last.parameters():
                    parameter.zero_()
    x, padding, _ = random_set()
    assert torch.equal(encoder(1e3 * x, padding), 1e3 * x)


def test_only_the_feed_forward_parts_have_biases() -> None:
    names = [name for name, _ in build().named_parameters() if name.endswith("bias")]
    assert names
    assert not any("attention.to_" in name for name in names)


def test_dropout_acts_in_training_only() -> None:
    x, padding, _ = random_set()
    encoder, without = build(dropout=0.5), build(dropout=0.0)
    torch.manual_seed(0)
    assert torch.equal(encoder(x, padding), without(x, padding))
    encoder.train()
    without.train()
    first, second = encoder(x, padding), encoder(x, padding)
    assert not torch.equal(first, second)
    assert torch.equal(without(x, padding), without(x, padding))
    # It drops what the feed-forward parts add, and nothing else.
    with torch.no_grad():
        for layer in encoder.layers:
            for parameter in layer.feedforward[2].parameters():
                parameter.zero_()
    assert torch.equal(encoder(x, padding), encoder(x, padding))


def test_dropout_keeps_the_mean() -> None:
    encoder = build(dropout=0.25, num_layers=1).train()
    x = random_set()[0]
    torch.manual_seed(0)
    many = torch.stack([encoder(x) for _ in range(2000)])
    expected = encoder.eval()(x)
    error = (many.mean(0) - expected).abs() / (many.std(0) / 2000**0.5)
    assert error.max() < 5
