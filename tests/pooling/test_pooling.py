"""Pooling heads: properties of all of them, then of each."""

import json
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import Tensor, nn
from torch.func import functional_call

import marl_pool
from helpers.paths import GOLDEN_FILES
from helpers.samples import (
    DIM,
    NUM_TOKENS,
    VARIANTS,
    Prepended,
    heads,
    make_head,
    random_set,
    shared,
)
from marl_pool.networks.set_network import SetNetwork
from marl_pool.options.names import resolve
from marl_pool.options.signatures import options_of
from marl_pool.pooling import POOLING, make_pooling, pooling_names
from marl_pool.pooling.base import NO_TYPE, Pooling
from marl_pool.tokens import SELF_TYPE, TokenSpec
from marl_pool.utils.errors import InputError

GOLDEN = GOLDEN_FILES
seeds = st.integers(0, 2**31)
orders = st.permutations(range(NUM_TOKENS))
cases = st.tuples(seeds, orders)
"""Examples for a property of every head."""


def is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def padded_last(seed: int, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample sets whose first ``kept`` slots are present, NaN and inf in the others."""
    x, padding, types = random_set(seed)
    padding[:] = torch.arange(NUM_TOKENS) >= kept
    x[:, kept:] = torch.nan
    x[:, -1] = torch.inf if kept < NUM_TOKENS else x[:, -1]
    return x, padding, types


# All heads


def test_every_registered_head_is_tested_here():
    assert {name for name, _ in VARIANTS} == set(POOLING)
    assert pooling_names() == sorted(POOLING)
    assert {"ada", "avg", "cls", "flatten", "max"} <= set(pooling_names())


@pytest.mark.parametrize("name", sorted(POOLING.keys() - {"cnn"}))
def test_a_head_with_options_has_variants(name):
    context = {"dim", "num_tokens", "spec", "action_dim", "has_self"}
    options = {*options_of(resolve(name, POOLING, "pooling", Pooling))} - context
    variants = [set(options) for head, options in VARIANTS if head == name and options]
    message = "give it other options in VARIANTS of tests/helpers/samples.py"
    assert bool(options) == bool(variants), message


def test_the_api_is_in_the_package():
    assert marl_pool.pooling_names is pooling_names
    assert isinstance(marl_pool.make_pooling("ada", dim=4), marl_pool.Pooling)


@heads
@pytest.mark.parametrize("batch", [1, 4])
def test_shapes(name, options, batch):
    head = make_head(name, **options)
    x, padding, types = random_set(0, batch)
    for mask in (None, padding):
        sets = head.prepend(x, mask, types)
        assert head(*sets).shape == (batch, head.dim_out)
        assert head(*sets).dtype == x.dtype
        weights = head.weights(*sets)
        if weights is not None:
            assert weights.shape[::2] == (batch, head.extra_tokens + NUM_TOKENS)
            codes = getattr(head, "num_codes", 1)
            assert weights.shape[1] == options.get("num_heads", codes)


@heads
@given(seed=seeds, content=st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]))
def test_content_under_padding_never_matters(name, options, seed, content):
    head = make_head(name, **options)
    x, padding, types = random_set(seed)
    expected = Prepended(head)(x, padding, types)
    assert expected.isfinite().all()
    dirty = x.masked_fill(padding[..., None], content).requires_grad_()
    dirty_types = types.masked_fill(padding, SELF_TYPE)
    result = Prepended(head)(dirty, padding, dirty_types)
    assert torch.equal(result, expected)
    result.sum().backward()
    for tensor in (dirty, *head.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert dirty.grad is not None
    assert not dirty.grad[padding].any()
    weights = head.weights(*head.prepend(dirty, padding, dirty_types))
    if weights is not None:
        assert weights.isfinite().all()
        assert not weights[..., head.extra_tokens :].movedim(1, -1)[padding].any()


@heads
@given(seed=seeds, kept=st.integers(2, NUM_TOKENS))
def test_masked_equals_physically_shorter(name, options, seed, kept):
    head = shared(make_head, name, repr(options))
    x, padding, types = padded_last(seed, kept)
    masked = Prepended(head)(x, padding, types)
    shorter = Prepended(head)(x[:, :kept], None, types[:, :kept])
    assert is_close(masked, shorter)


@heads
@given(seed=seeds)
def test_rows_do_not_see_each_other(name, options, seed):
    head = Prepended(shared(make_head, name, repr(options)))
    x, padding, types = random_set(seed)
    whole = head(x, padding, types)
    for row in range(len(x)):
        rows = slice(row, row + 1)
        assert is_close(head(x[rows], padding[rows], types[rows]), whole[rows])


@heads
def test_an_empty_set_gives_finite_output_and_gradient(name, options):
    head = make_head(name, **options)
    x, padding, types = random_set()
    padding[1] = True
    full = padding.clone()
    full[1] = False
    x[1, 2] = torch.nan
    x.requires_grad_()
    result = Prepended(head)(x, padding, types)
    result.square().sum().backward()
    assert result.isfinite().all()
    for tensor in (x, *head.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert x.grad is not None
    assert not x.grad[1].any()
    rows = [0, 2, 3]
    expected = Prepended(head)(x.detach().nan_to_num(), full, types)
    assert is_close(result[rows], expected[rows])
    weights = head.weights(*head.prepend(x.detach(), padding, types))
    if weights is not None:
        assert not weights[1, :, head.extra_tokens :].any()


@heads
def test_one_token_is_a_set(name, options):
    x, padding, types = (part[:, :1] for part in random_set())
    if options.get("query") == [0, 1]:
        with pytest.raises(InputError, match=r"positions \[0, 1\].* the 1 tokens"):
            make_head(name, **options)(x, padding, types)
        return
    head = Prepended(make_head(name, num_tokens=1, **options))
    result = head(x, None, types)
    assert result.isfinite().all()
    assert is_close(head(x, torch.zeros_like(padding), types), result)


@heads
def test_every_parameter_gets_a_gradient(name, options):
    head = make_head(name, **options)
    x, _, types = random_set()
    Prepended(head)(x.requires_grad_(), None, types).square().sum().backward()
    assert x.grad is not None
    for label, parameter in head.named_parameters():
        assert parameter.grad is not None, label
        # Its memory is still zero: see tests/policies/test_attention_neuron.py.
        if label != "cell.weight_hh":
            assert parameter.grad.any(), label


def ignores_order(head: nn.Module, case: tuple[int, list[int]]) -> bool:
    """Return True if a permutation of the set leaves the result unchanged."""
    seed, order = case
    x, padding, types = random_set(seed)
    permuted = Prepended(head)(x[:, order], padding[:, order], types[:, order])
    return is_close(permuted, Prepended(head)(x, padding, types))


def counterexample(head: nn.Module) -> tuple[int, list[int]] | None:
    """Return a set and a permutation that changes its result, if one is found."""
    try:
        return find(
            cases,
            lambda case: not ignores_order(head, case),
            settings=settings(database=None, derandomize=True, phases=[Phase.generate]),
        )
    except NoSuchExample:
        return None


@heads
def test_permutation_invariant_is_true_exactly_when_the_property_holds(name, options):
    head = make_head(name, **options)
    assert (counterexample(head) is None) == head.permutation_invariant


class LastState(Pooling):
    """The negative control: an LSTM's last output, which wrongly claims invariance."""

    permutation_invariant = True

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        return self.lstm(x)[0][:, -1]


def test_a_head_that_depends_on_the_order_is_caught():
    torch.manual_seed(0)
    assert counterexample(LastState(DIM).double()) is not None


@heads
def test_gradcheck(name, options):
    head = make_head(name, num_tokens=3, **options)
    x, padding, types = random_set(3, batch=3, num_tokens=3)
    padding[0], padding[1] = True, False
    parameters = dict(Prepended(head).named_parameters())

    def pool(x: Tensor, *values: Tensor) -> Tensor:
        changed = dict(zip(parameters, values, strict=True))
        return functional_call(Prepended(head), changed, (x, padding, types))

    inputs = (x.requires_grad_(), *parameters.values())
    assert torch.autograd.gradcheck(pool, inputs, fast_mode=True)


@pytest.mark.slow
@heads
def test_torch_compile_gives_the_same_result(name, options):
    torch.compiler.reset()
    head = make_head(name, **options)
    compiled = torch.compile(Prepended(head), backend="aot_eager", fullgraph=True)
    x, padding, types = random_set()
    x[padding] = torch.nan
    assert is_close(compiled(x, padding, types), Prepended(head)(x, padding, types))
    torch.compiler.reset()


@heads
def test_half_precision_and_single_precision(name, options):
    x, padding, types = random_set()
    expected = Prepended(make_head(name, **options))(x, padding, types)
    single = Prepended(make_head(name, **options).float())(x.float(), padding, types)
    assert torch.allclose(single.double(), expected, atol=1e-5)
    half = Prepended(make_head(name, **options).bfloat16())
    result = half(x.bfloat16(), padding, types)
    assert result.dtype == torch.bfloat16
    assert torch.allclose(result.double(), expected, atol=0.2, rtol=0.1)


@pytest.mark.parametrize("name", ["avg", "sqrtn", "std", "trimmed", "softmax"])
def test_sums_that_half_precision_cannot_hold(name):
    x = torch.full((1, 512, DIM), 400.0, dtype=torch.float16)
    x[:, ::2] *= 0.5
    padding = torch.zeros(1, 512, dtype=torch.bool)
    head = make_head(name, num_tokens=512)
    result = head.half()(x, padding)
    assert result.dtype == torch.float16
    expected = head.double()(x.double(), padding)
    assert torch.allclose(result.double(), expected, rtol=2e-3)


def test_a_softmax_of_single_precision_weights_hides_padding_of_half_precision():
    head = make_head("softmax", beta=1e5, learn=False).float()
    x = (
        -torch.ones(1, 2, DIM, dtype=torch.float16)
        * torch.tensor([[[9.0], [0.0]]]).half()
    )
    padding = torch.tensor([[False, True]])
    assert torch.equal(head(x, padding), x[:, 0])


class Forgets(Pooling):
    """A head that does not pool."""

    def forward(self, x: Tensor, padding: Any = None, types: Any = None) -> Tensor:
        return x


def test_a_head_that_does_not_pool_is_refused():
    with pytest.raises(InputError, match=r"Forgets: .*\(B, 3\), got \(2, 5, 3\)"):
        Forgets(3)(torch.ones(2, 5, 3))


@heads
def test_wrong_shapes_and_types_say_expected_and_got(name, options):
    head = make_head(name, **options)
    x, padding, types = head.prepend(*random_set())
    total = NUM_TOKENS + head.extra_tokens
    refusals = [
        ((x[0],), rf"expected x of shape \(B, N >= .*, 8\), got \({total}, 8\)"),
        ((x[..., :3],), rf"expected x of .*8\), got \(4, {total}, 3\)"),
        ((x[:, :0],), r"expected x of shape .* got \(4, 0, 8\)"),
        ((x.long(),), r"expected x of a floating dtype, got torch.int64"),
        ((x.detach().numpy(),), r"expected x to be a torch tensor, got ndarray"),
        ((x, padding.numpy()), r"expected padding to be a torch tensor, got ndarray"),
        ((x, padding[:, 1:]), rf"expected padding of shape \(4, {total}\), got"),
        ((x, padding.double()), r"expected padding of dtype bool, got torch.float64"),
        ((x, padding.long()), r"expected padding of dtype bool, got torch.int64"),
        ((x, padding, types[:2]), rf"expected types of shape .* got \(2, {total}\)"),
    ]
    for arguments, message in refusals:
        with pytest.raises(InputError, match=message) as refusal:
            head(*arguments)
        assert str(refusal.value).startswith(type(head).__name__)
        assert "\n" not in str(refusal.value)


@heads
def test_a_width_below_1_is_refused(name, options):
    with pytest.raises(InputError, match=r"pooling.dim: .* integer >= 1, got 0"):
        make_head(name, dim=0, **options)


def test_extra_tokens_come_first_and_are_never_padded_or_typed():
    head = make_head("cls")
    x, padding, types = random_set()
    full, full_padding, full_types = head.prepend(x, padding, types)
    assert torch.equal(full[:, 0], head.tokens.expand(len(x), -1))
    assert torch.equal(full[:, 1:], x)
    assert full_padding is not None
    assert full_types is not None
    assert not full_padding[:, 0].any()
    assert (full_types[:, 0] == NO_TYPE).all()
    assert NO_TYPE != SELF_TYPE
    assert head.prepend(x)[1:] == (None, None)
    untouched = make_head("max").prepend(x, padding, types)
    assert all(a is b for a, b in zip(untouched, (x, padding, types), strict=True))


# Names, options and plug-ins


class Sum(Pooling):
    """A head as a user would write one."""

    def __init__(self, dim: int, *, factor: float = 1.0) -> None:
        super().__init__(dim)
        self.factor = factor

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        return self.factor * x.sum(1)


def test_a_users_own_head_works_like_a_registered_one():
    head = make_pooling(f"{__name__}:Sum", dim=DIM, factor=2.0)
    x, padding, types = random_set()
    expected = 2 * x.masked_fill(padding[..., None], 0).sum(1)
    x[padding] = torch.nan
    assert is_close(head(x, padding, types), expected)
    assert head.weights(x) is None
    assert counterexample(head) is None


# Max and Avg


@given(seed=seeds)
def test_max_and_avg_are_those_of_the_tokens_present(seed):
    x, padding, _ = random_set(seed)
    for row in range(len(x)):
        present = x[row][~padding[row]]
        row_set = (x[row : row + 1], padding[row : row + 1])
        assert torch.equal(make_head("max")(*row_set)[0], present.max(0).values)
        assert is_close(make_head("avg")(*row_set)[0], present.mean(0))


@pytest.mark.parametrize(
    ("name", "options"), [part for part in VARIANTS if part[0] in ("max", "avg", "ada")]
)
def test_an_empty_set_pools_to_zero(name, options):
    x, padding, types = random_set()
    pooled = make_head(name, **options)(x, torch.ones_like(padding), types)
    assert torch.equal(pooled, torch.zeros_like(pooled))


@given(seed=seeds)
def test_avg_weights_are_one_over_n(seed):
    x, padding, _ = random_set(seed)
    head = make_head("avg")
    weights = head.weights(x, padding)
    assert weights is not None
    clean = x.masked_fill(padding[..., None], 0)
    assert is_close((weights @ clean)[:, 0], head(x, padding))
    assert is_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    whole = head.weights(x)
    assert whole is not None
    assert is_close(whole, torch.full_like(whole, 1 / NUM_TOKENS))


# Cls and flatten


def test_cls_reads_its_own_token():
    head = make_head("cls")
    x, padding, types = head.prepend(*random_set())
    assert torch.equal(head(x, padding, types), x[:, 0])


def test_flatten_is_a_projection_of_the_concatenation():
    head: Any = make_head("flatten")
    x, _, _ = random_set()
    assert is_close(head(x), head.project(x.flatten(1)))


# AdaPool


def weights_of(head: Pooling, *arguments: Tensor) -> Tensor:
    weights = head.weights(*arguments)
    assert weights is not None
    return weights


def by_hand(head: Any, query: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Definition 3.9 with heads, for one set: return result and weights."""
    attention, heads = head.attention, head.attention.num_heads
    width = DIM // heads
    q = attention.to_query.weight @ query
    keys, values = x @ attention.to_key.weight.T, x @ attention.to_value.weight.T
    parts, shares = [], []
    for h in range(heads):
        columns = slice(h * width, (h + 1) * width)
        scores = keys[:, columns] @ q[columns] * attention.scale
        share = scores.exp() / scores.exp().sum()
        parts.append(share @ values[:, columns])
        shares.append(share)
    return attention.to_out.weight @ torch.cat(parts), torch.stack(shares)


@pytest.mark.parametrize("num_heads", [1, 4, 8])
@pytest.mark.parametrize("query", ["self", "mean", "learned", [0], [1, 3]])
@pytest.mark.parametrize("residual", [None, True, False])
def test_ada_is_the_definition(query, num_heads, residual):
    head: Any = make_head("ada", query=query, num_heads=num_heads, residual=residual)
    x, padding, types = random_set(7)
    self_mask = types == SELF_TYPE
    for row in range(len(x)):
        present = ~padding[row]
        if isinstance(query, list):
            places = [i for i in query if present[i]]
        elif query == "self" and (self_mask[row] & present).any():
            places = (self_mask[row] & present).nonzero()[:, 0].tolist()
        else:
            places = present.nonzero()[:, 0].tolist()
        q = x[row, places].mean(0) if places else torch.zeros_like(x[row, 0])
        q = head.learned_query if query == "learned" else q
        expected, shares = by_hand(head, q, x[row][present])
        if residual or (residual is None and query in ("self", [0])):
            expected = expected + q
        row_set = [part[row : row + 1] for part in (x, padding, types)]
        assert is_close(head(*row_set)[0], expected)
        assert is_close(weights_of(head, *row_set)[0][:, present], shares)


@pytest.mark.parametrize(
    ("scale", "divisor"), [("model", 8**0.5), ("head", (8 / 4) ** 0.5)]
)
def test_ada_scales_by_the_width_of_the_model_or_the_head(scale, divisor):
    options = {"query": "mean", "num_heads": 4, "attention_scale": scale}
    head: Any = make_head("ada", **options)
    x, _, types = random_set()
    with torch.no_grad():
        for part in (head.attention.to_query, head.attention.to_key):
            part.weight.copy_(torch.eye(DIM))
    scores = torch.einsum("bhd,bnhd->bhn", x.mean(1).view(4, 4, 2), x.view(4, 5, 4, 2))
    assert is_close(weights_of(head, x, None, types), (scores / divisor).softmax(-1))


@heads
@given(seed=seeds)
def test_weights_are_shares_of_the_tokens_present(name, options, seed):
    head = shared(make_head, name, repr(options))
    x, padding, types = head.prepend(*random_set(seed))
    weights = head.weights(x, padding, types)
    if weights is not None:
        assert (weights >= 0).all()
        assert is_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@given(seed=seeds, place=st.integers(0, NUM_TOKENS - 1))
def test_self_is_found_by_its_type_wherever_it_stands(seed, place):
    x, padding, types = random_set(seed)
    types[:], padding[:, place] = 1, False
    types[:, place] = SELF_TYPE
    output = make_head("ada", query="self")(x, padding, types)
    assert is_close(output, make_head("ada", query=[place])(x, padding, types))


@given(seed=seeds)
def test_of_several_self_tokens_the_mean_asks(seed):
    x, padding, types = random_set(seed)
    types[:], padding[:, [1, 3]] = 1, False
    types[:, [1, 3]] = SELF_TYPE
    expected = make_head("ada", query=[1, 3], residual=True)(x, padding, types)
    assert is_close(make_head("ada", query="self")(x, padding, types), expected)


@given(seed=seeds)
def test_without_its_self_token_the_mean_of_those_present_asks(seed):
    x, padding, types = random_set(seed)
    types[:], padding[:, 2], padding[:, 0] = 1, True, False
    types[:, 2] = SELF_TYPE  # lost under padding
    expected = make_head("ada", query="mean", residual=True)(x, padding, types)
    head = make_head("ada", query="self")
    assert is_close(head(x, padding, types), expected)
    types[:] = 1  # never there
    assert is_close(head(x, padding, types), expected)


@pytest.mark.parametrize("query", ["self", "corner", "mean", "focal"])
def test_ada_with_published_weights_is_the_published_head(query):
    golden = json.loads((GOLDEN / "ada_pool.json").read_text())
    place: Any = {"corner": [0], "focal": [1, 2]}.get(query, query)
    head: Any = make_pooling("ada", dim=4, num_heads=2, query=place).double()
    with torch.no_grad():
        for name, part in head.attention.named_parameters():
            part.copy_(torch.tensor(golden[name.removesuffix(".weight")]))
    x = torch.tensor(golden["x"], dtype=torch.float64)
    types = torch.tensor([[SELF_TYPE, 1, 1]]).expand(len(x), -1)
    published = golden["self" if query == "corner" else query]
    expected = torch.tensor(published, dtype=torch.float64)
    torch.testing.assert_close(head(x, None, types), expected, rtol=1e-12, atol=1e-12)


def test_the_default_query_is_self_where_there_is_one():
    assert make_pooling("ada", dim=DIM).query == "self"
    assert make_pooling("ada", dim=DIM, has_self=True).query == "self"
    assert make_pooling("ada", dim=DIM, has_self=False).query == "mean"


def test_ada_has_the_parameters_of_four_projections():
    for query, extra in (("self", 0), ("mean", 0), ([0], 0), ("learned", DIM)):
        head = make_head("ada", query=query)
        assert sum(p.numel() for p in head.parameters()) == 4 * DIM**2 + extra


def test_a_self_query_needs_types_and_a_position_needs_its_token():
    x, padding, _ = random_set()
    with pytest.raises(InputError, match="AdaPooling: types: expected .* got None"):
        make_head("ada", query="self")(x, padding)
    for query in ([NUM_TOKENS], [0, NUM_TOKENS]):
        with pytest.raises(InputError, match="need more than the 5 tokens given"):
            make_head("ada", query=query)(x, padding)


@pytest.mark.parametrize("name", sorted(POOLING))
def test_every_head_works_without_padding_and_types(name):
    x, padding, _ = random_set()
    head = make_head(name)
    assert is_close(head(x), head(x, torch.zeros_like(padding)))


def test_without_types_ada_queries_with_the_mean():
    x, padding, _ = random_set()
    plain, mean = make_head("ada"), make_head("ada", query="mean")
    assert is_close(plain(x, padding), mean(x, padding))
    assert is_close(plain.weights(x, padding), mean.weights(x, padding))


def test_inner_heads_have_the_dropout_of_the_network() -> None:
    network = SetNetwork(
        TokenSpec(3, 2, ("self",)),
        encoder={"name": "identity", "dim": 8},
        pooling={"name": "multi", "heads": [{"name": "ada"}, {"name": "max"}]},
        attention_dropout=0.5,
    )
    head: Any = network.pooling.heads[0]
    assert head.attention.dropout == 0.5
