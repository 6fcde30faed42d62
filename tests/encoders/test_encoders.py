"""Encoders: equivariance, padding, and as many parameters as in the paper."""

import json
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import nn

import marl_pool
from helpers.paths import GOLDEN_FILES
from helpers.samples import (
    DIM,
    ENCODER_VARIANTS,
    NUM_TOKENS,
    encoders,
    in_torchs_order,
    random_set,
    shared,
)
from helpers.samples import build_encoder as build
from marl_pool.encoders import ENCODERS, make_encoder
from marl_pool.encoders.base import Encoder, IdentityEncoder

GOLDEN = GOLDEN_FILES
seeds = st.integers(0, 2**31)
orders = st.permutations(range(NUM_TOKENS))


# All encoders


def test_every_registered_encoder_is_tested_here():
    assert {name for name, _ in ENCODER_VARIANTS} == set(ENCODERS)
    assert marl_pool.encoder_names() == sorted(ENCODERS)


@encoders
def test_shapes(name, options):
    encoder = build(name, **options)
    assert isinstance(encoder, Encoder)
    assert encoder.dim == DIM
    x, padding, _ = random_set()
    for mask in (None, padding):
        assert encoder(x, mask).shape == x.shape


def keeps_order(encoder: Encoder, seed: int, order: list[int]) -> bool:
    """Return True if permuting the set permutes the results in the same way."""
    x, padding, _ = random_set(seed)
    permuted = encoder(x[:, order], padding[:, order])
    expected = encoder(x, padding)[:, order]
    present = ~padding[:, order]
    return torch.allclose(permuted[present], expected[present], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *ENCODER_VARIANTS,
        ("swarm", {"iterations": 1}),
        ("swarm", {"population": "causal"}),
        ("learned_merging", {"attention": False, "proportion": 0.0}),
    ],
)
def test_mixes_first_is_true_exactly_where_the_first_result_needs_the_others(
    name, options
):
    encoder = build(name, **options)
    x, _, _ = random_set()
    changed = torch.cat([x[:, :1], x[:, 1:] + 1], 1)
    is_same = torch.equal(encoder(x)[:, 0], encoder(changed)[:, 0])
    assert encoder.mixes_first is not is_same


def test_a_subclass_with_a_forward_pass_of_its_own_may_mix():
    class Mixer(IdentityEncoder):
        def forward(self, x, padding=None):
            return x + x.mean(1, keepdim=True)

    class Named(IdentityEncoder):
        pass

    assert Mixer.mixes_first
    assert not Named.mixes_first


@encoders
def test_permutation_equivariant_is_true_exactly_when_the_property_holds(name, options):
    encoder = build(name, **options)
    try:
        counterexample: object = find(
            st.tuples(seeds, orders),
            lambda case: not keeps_order(encoder, *case),
            settings=settings(database=None, derandomize=True, phases=[Phase.generate]),
        )
    except NoSuchExample:
        counterexample = None
    assert (counterexample is None) == encoder.permutation_equivariant


@encoders
@given(seed=seeds, content=st.sampled_from([0.0, 1e5, -3.0]))
def test_padding_never_matters(name, options, seed, content):
    encoder = shared(build, name, repr(options))
    x, padding, _ = random_set(seed)
    expected = encoder(x, padding)
    output = encoder(x.masked_fill(padding[..., None], content), padding)
    torch.testing.assert_close(output[~padding], expected[~padding])
    for row in range(len(x)):
        present = ~padding[row]
        row_output = encoder(x[row : row + 1, present])[0]
        torch.testing.assert_close(row_output, expected[row, present])


@encoders
def test_an_empty_set_gives_finite_output_and_gradient(name, options):
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
def test_every_parameter_gets_a_gradient(name, options):
    encoder = build(name, **options)
    encoder(random_set()[0].requires_grad_()).square().sum().backward()
    for label, parameter in encoder.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.any(), label


# The transformer


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_transformer_is_torchs_pre_norm_layer(activation):
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
def test_number_of_parameters(dim, layers, heads, dim_ff, count):
    encoder = make_encoder(
        "transformer", dim=dim, num_layers=layers, num_heads=heads, dim_ff=dim_ff
    )
    assert sum(parameter.numel() for parameter in encoder.parameters()) == count


def test_there_is_no_final_norm():
    # With both branches zero, only the residual path is left: the identity.
    encoder = build()
    with torch.no_grad():
        for layer in encoder.layers:
            for last in (layer.attention.to_out, layer.feedforward[2]):
                for parameter in last.parameters():
                    parameter.zero_()
    x, padding, _ = random_set()
    assert torch.equal(encoder(1e3 * x, padding), 1e3 * x)


def test_only_the_feed_forward_parts_have_biases():
    names = [name for name, _ in build().named_parameters() if name.endswith("bias")]
    assert names
    assert not any("attention.to_" in name for name in names)


def test_dropout_acts_in_training_only():
    x, padding, _ = random_set()
    encoder, no_dropout = build(dropout=0.5), build(dropout=0.0)
    torch.manual_seed(0)
    assert torch.equal(encoder(x, padding), no_dropout(x, padding))
    encoder.train()
    no_dropout.train()
    first, second = encoder(x, padding), encoder(x, padding)
    assert not torch.equal(first, second)
    assert torch.equal(no_dropout(x, padding), no_dropout(x, padding))
    # Dropout acts only on what the feed-forward parts add.
    with torch.no_grad():
        for layer in encoder.layers:
            for parameter in layer.feedforward[2].parameters():
                parameter.zero_()
    assert torch.equal(encoder(x, padding), encoder(x, padding))


def test_dropout_keeps_the_mean():
    encoder = build(dropout=0.25, num_layers=1).train()
    x = random_set()[0]
    torch.manual_seed(0)
    outputs = encoder(x.repeat(2000, 1, 1)).view(2000, *x.shape)
    expected = encoder.eval()(x)
    error = (outputs.mean(0) - expected).abs() / (outputs.std(0) / 2000**0.5)
    assert error.max() < 5


# Other encoders


def without_row(tokens: torch.Tensor, i: int) -> torch.Tensor:
    return torch.cat([tokens[:, :i], tokens[:, i + 1 :]], 1)


def by_hand(pool: Any) -> Any:
    """Equation 2 of SWARM, vector by vector; ``pool(W x, i)`` pools for vector i."""

    def encode(layer: Any, x: torch.Tensor) -> torch.Tensor:
        rows = []
        for i in range(x.shape[1]):
            rows.append(layer.on_own(x[:, i]) + pool(layer.on_others(x), i))
        return torch.stack(rows, 1)

    return encode


@pytest.mark.parametrize(
    ("aggregation", "pool"),
    [
        ("sum", lambda tokens, i: without_row(tokens, i).sum(1)),
        ("mean", lambda tokens, i: without_row(tokens, i).mean(1)),
        # As published, the maximum includes the token itself.
        ("max", lambda tokens, i: torch.stack(tokens.unbind(1)).max(0).values),
    ],
)
def test_a_set_linear_layer_by_hand(aggregation, pool):
    encoder = build("set_linear", num_layers=1, others=aggregation)
    x = random_set()[0]
    x[:, 3] = x[:, 1]  # a tie
    (layer,) = encoder.layers
    torch.testing.assert_close(encoder(x), by_hand(pool)(layer, x))


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_without_other_tokens_their_pooling_is_zero(aggregation):
    encoder = build("set_linear", num_layers=1, others=aggregation)
    x = random_set()[0][:, :1]
    torch.testing.assert_close(encoder(x), encoder.layers[0].on_own(x))


def test_the_maximum_of_one_vector_is_the_vector():
    encoder = build("set_linear", num_layers=1, others="max")
    (layer,) = encoder.layers
    x = random_set()[0][:, :1]
    torch.testing.assert_close(encoder(x), layer.on_own(x) + layer.on_others(x))


def test_a_swarm_layer_is_torchs_lstm_cell():
    """The cell's input is the entity and the mean hidden state of the population."""
    units, iterations = 4, 3
    encoder = build("swarm", units=units, iterations=iterations)
    (layer,) = encoder.layers
    cell = nn.LSTMCell(DIM + units, units).double()

    with torch.no_grad():
        on_both = torch.cat([layer.on_input.weight, layer.on_population.weight], 1)
        cell.weight_ih.copy_(in_torchs_order(on_both))
        cell.weight_hh.copy_(in_torchs_order(layer.on_hidden.weight))
        cell.bias_ih.copy_(in_torchs_order(layer.on_input.bias))
        cell.bias_hh.zero_()
    x = random_set()[0]
    hidden = memory = torch.zeros(x.shape[0] * NUM_TOKENS, units).double()
    for _ in range(iterations):
        states = hidden.unflatten(0, x.shape[:2])
        pooled = states.mean(1, keepdim=True).expand_as(states)
        inputs = torch.cat([x, pooled], -1).flatten(0, 1)
        hidden, memory = cell(inputs, (hidden, memory))
    expected = layer.output(torch.cat([hidden, memory], -1)).unflatten(0, x.shape[:2])
    torch.testing.assert_close(encoder(x), expected)


def test_a_causal_swarm_does_not_depend_on_later_entities():
    encoder = build("swarm", population="causal", num_layers=2)
    x = random_set()[0][:1].requires_grad_()
    for place in range(NUM_TOKENS):
        (gradient,) = torch.autograd.grad(encoder(x)[0, place].sum(), x)
        has_gradient = gradient[0].abs().sum(-1) > 0
        assert has_gradient.tolist() == [i <= place for i in range(NUM_TOKENS)]


def test_inducing_points_of_one_block_by_hand():
    encoder = build("set_transformer", num_layers=1, num_inducing=2)
    x, padding, _ = random_set()
    points = encoder.inducing.weight.expand(len(x), -1, -1)
    summary = encoder.gathering[0](points, x, padding)
    assert summary.shape == (len(x), 2, DIM)
    torch.testing.assert_close(encoder(x, padding), encoder.layers[0](x, summary))


def test_the_set_transformer_with_published_weights_is_the_published_one():
    golden = json.loads((GOLDEN / "isab.json").read_text())
    encoder = make_encoder(
        "set_transformer",
        dim=4,
        num_layers=2,
        num_heads=2,
        num_inducing=2,
        attention_scale="head",
        feedforward_layers=4,
        bias=True,
    ).double()
    weights = {name: torch.tensor(values) for name, values in golden["weights"].items()}
    encoder.load_state_dict(weights)
    x, padding = torch.tensor(golden["x"]).double(), torch.tensor(golden["padding"])
    expected = [row for rows in golden["result"] for row in rows if row is not None]
    torch.testing.assert_close(
        encoder(x, padding)[~padding],
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )


def test_swarms_set_transformer_is_initialized_as_published():
    encoder: Any = make_encoder(
        "set_transformer", dim=64, num_inducing=50, bias=True, initial="swarm"
    )
    assert encoder.keeps_initial_weights
    (block, *_) = encoder.layers
    assert block.attention.to_key.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert block.feedforward[0].weight.std().item() == pytest.approx(
        (2 / 64) ** 0.5, rel=0.1
    )
    assert encoder.inducing.weight.std().item() == pytest.approx(1, rel=0.1)
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()


def test_a_sorted_lstm_reads_by_the_first_feature_and_then_the_second():
    encoder = build("lstm", sort=True)
    plain = build("lstm")
    plain.load_state_dict(encoder.state_dict())
    x = random_set()[0]
    x[:, :, 0] = x[:, :, 0].sign()  # ties
    for row in x:
        order = sorted(range(NUM_TOKENS), key=lambda i: row[i, :2].tolist())
        expected = plain(row[None, order])[0]
        torch.testing.assert_close(encoder(row[None])[0, order], expected)


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_copies_does_not_change_pooled_results(seed):
    encoder = build("learned_merging", num_layers=3)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 8, DIM, generator=generator).double()
    x[:, 3], x[:, 6] = x[:, 1], x[:, 2]
    order = torch.randperm(8, generator=generator)
    output, permuted = encoder(x), encoder(x[:, order])
    torch.testing.assert_close(permuted.mean(1), output.mean(1))
    torch.testing.assert_close(permuted.amax(1), output.amax(1))
