"""`check_mask` finds the faults of faulty models, and none in ours."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.samples import Prepended, encoders, heads, make_head, random_set
from marl_pool import (
    InputError,
    Tokens,
    assert_mask,
    check_mask,
    make_encoder,
    make_pooling,
)

GENERATOR = torch.Generator().manual_seed(0)
FEATURES = torch.randn(3, 6, 4, generator=GENERATOR)
PADDING = torch.arange(6) >= torch.tensor([[4], [5], [6]])
PRECISIONS = {"float16", "bfloat16"}


class Model(nn.Module):
    """Embeds the entities and pools them by a function of embeddings and padding."""

    def __init__(self, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Sequential(
                nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 16)
            )
        self.pool = pool

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        if self.pool is by_zeros:
            return by_zeros(self.embed(x), padding | (x == 0).all(-1))
        return self.pool(self.embed(x), padding)


def masked_sum(x: Tensor, padding: Tensor) -> Tensor:
    return x.masked_fill(padding[..., None], 0).sum(1)


def by_zeros(x: Tensor, padding: Tensor) -> Tensor:
    return masked_sum(x, padding)


def unmasked_max(x: Tensor, padding: Tensor) -> Tensor:
    return x.amax(1)


def mean_over_slots(x: Tensor, padding: Tensor) -> Tensor:
    return x.masked_fill(padding[..., None], 0).mean(1)


def by_product(x: Tensor, padding: Tensor) -> Tensor:
    return (x * ~padding[..., None]).sum(1)


def mean_of_none(x: Tensor, padding: Tensor) -> Tensor:
    return masked_sum(x, padding) / (~padding).sum(1, keepdim=True)


def softmax_of_none(x: Tensor, padding: Tensor) -> Tensor:
    weights = x[..., 0].masked_fill(padding, float("-inf")).softmax(1)
    return masked_sum(weights[..., None] * x, padding)


def large_negative(x: Tensor, padding: Tensor) -> Tensor:
    weights = x[..., 0].masked_fill(padding, -1e9).softmax(1)
    return (weights[..., None] * x.masked_fill(padding[..., None], 0)).sum(1)


def uniform_if_empty(x: Tensor, padding: Tensor) -> Tensor:
    weights = x[..., 0].masked_fill(padding, -1e4).softmax(1)
    return (weights[..., None] * x.nan_to_num()).sum(1)


def by_place(x: Tensor, padding: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]).to(x) + 1
    return masked_sum(x * places[:, None], padding)


def without_last(x: Tensor, padding: Tensor) -> Tensor:
    return masked_sum(x[:, :-1], padding[:, :-1])


def centred_in_batch(x: Tensor, padding: Tensor) -> Tensor:
    pooled = masked_sum(x, padding)
    return pooled - pooled.mean(0)


def noisy(x: Tensor, padding: Tensor) -> Tensor:
    return masked_sum(x, padding) + torch.rand(())


FAULTS: list[tuple[Callable[..., Tensor], set[str]]] = [
    (masked_sum, set()),
    (unmasked_max, {"content", "nan", "amount", "empty", *PRECISIONS}),
    (mean_over_slots, {"amount"}),
    (by_zeros, {"zero"}),
    (by_product, {"nan"}),
    (mean_of_none, {"empty", *PRECISIONS}),
    (softmax_of_none, {"batch"}),
    (large_negative, {"float16"}),
    (uniform_if_empty, {"empty", *PRECISIONS}),
    (by_place, {"place", "order"}),
    (without_last, {"entities", "place", "order", "amount"}),
    (centred_in_batch, {"batch"}),
]


@pytest.mark.parametrize(("pool", "failures"), FAULTS)
def test_each_fault_is_found_and_named(
    pool: Callable[..., Tensor], failures: set[str]
) -> None:
    report = check_mask(Model(pool), (FEATURES, PADDING))
    assert set(report.failures) == failures, str(report)
    assert bool(report) is (not failures)
    assert str(report).count("FAILED") == len(failures)


ONE_PRESENT = torch.tensor([[False, True, True]]).expand(2, -1)


@pytest.mark.parametrize("size", [1e-6, 3e-4, 1.0, 1e3])
@pytest.mark.parametrize(
    ("features", "padding"), [(FEATURES, PADDING), (FEATURES[:2, :3], ONE_PRESENT)]
)
def test_a_jump_at_zero_is_relative_to_the_usual_output(
    features: Tensor, padding: Tensor, size: float
) -> None:
    """Without biases the output near zero may be near zero itself."""
    observation = (size * features, padding)
    for name in ("sum", "avg", "max", "ada"):
        assert "zero" in check_mask(make_pooling(name, dim=4), observation).passed
    normalized = nn.Sequential(
        nn.Linear(4, 16, bias=False), nn.LayerNorm(16, bias=False)
    )
    assert_mask(lambda x, absent: masked_sum(normalized(x), absent), observation)
    assert "zero" in check_mask(Model(by_zeros), observation).failures


def test_a_random_model_differs_between_calls() -> None:
    assert (
        "random" in check_mask(Model(noisy), (FEATURES, PADDING)).failures["repeated"]
    )


@pytest.mark.parametrize("order", [1, -1])
def test_nan_is_found_in_each_of_several_outputs(order: int) -> None:
    def both(x: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        return (masked_sum(x, padding), by_product(x, padding))[::order]

    failures = check_mask(both, (FEATURES, PADDING)).failures
    assert set(failures) == {"nan"}
    assert "moves the output to NaN or infinity" in failures["nan"]


def test_equal_infinities_are_no_change() -> None:
    """As of logits that a mask excludes; only `empty` requires finite outputs."""

    def masked_logits(x: Tensor, padding: Tensor) -> Tensor:
        return masked_sum(x, padding).index_fill(1, torch.tensor([2]), -torch.inf)

    assert set(check_mask(masked_logits, (FEATURES, PADDING)).failures) == {"empty"}


def test_an_output_may_be_a_number_for_each_set() -> None:
    """As of a critic."""
    assert_mask(lambda x, padding: masked_sum(x, padding).sum(1), (FEATURES, PADDING))


BY_NATURE = {"merge": {"zero"}, "cls": {"entities"}}
"""Checks that heads fail by design: `merge` compares vectors by their angle, which zero
lacks, and `cls` without an encoder reads only its own token.
"""


@heads
def test_our_heads_pass(name: str, options: dict[str, Any]) -> None:
    head = make_head(name, **options)
    report = check_mask(
        Prepended(head), random_set(), mask=1, invariant=head.permutation_invariant
    )
    by_nature = set() if head.permutation_invariant else {"place"}
    assert set(report.failures) <= BY_NATURE.get(name, by_nature), str(report)


@encoders
def test_our_encoders_pass(name: str, options: dict[str, Any]) -> None:
    """Encoders get zeros under padding, so they need not clear NaN there."""
    encoder = make_encoder(name, dim=8, **options)
    features = torch.randn(3, 6, 8, generator=GENERATOR)
    report = check_mask(
        encoder,
        (features, PADDING),
        per_entity=True,
        invariant=encoder.permutation_equivariant,
    )
    assert set(report.failures) <= {"nan"}, str(report)


def with_presence(padding: Tensor) -> Tensor:
    """Features whose first column is 1 where an entity is present."""
    return torch.cat([(~padding)[..., None].float(), FEATURES], -1)


TYPES = torch.zeros(3, 6, dtype=torch.int64)
FORMS: list[tuple[Callable[..., Any], Any, dict[str, Any]]] = [
    (lambda x, absent: masked_sum(x, absent), (FEATURES, PADDING), {}),
    (
        lambda x, present: masked_sum(x, ~present),
        (FEATURES, ~PADDING),
        {"marks": "present"},
    ),
    (
        lambda parts: masked_sum(parts["x"], parts["mask"] == 0) + parts["own"],
        {"x": FEATURES, "mask": (~PADDING).float(), "own": torch.ones(3, 4)},
        {"mask": "mask", "marks": "present"},
    ),
    (
        lambda tokens: masked_sum(tokens.features, tokens.padding),
        Tokens(FEATURES, TYPES, PADDING),
        {},
    ),
    (
        lambda tokens: (
            masked_sum(tokens.features, tokens.padding) + tokens.action_mask[:, :4]
        ),
        Tokens(FEATURES, TYPES, PADDING, torch.arange(5).expand(3, 5) % 2 == 0),
        {},
    ),
    (
        lambda tokens: masked_sum(
            tokens.features, tokens.padding | ~tokens.action_mask
        ),
        Tokens(FEATURES, TYPES, PADDING, torch.ones(3, 6).bool()),
        {},
    ),
    (
        lambda x: masked_sum(x[..., 1:], x[..., 0] == 0),
        with_presence(PADDING),
        {"presence": 0},
    ),
    (
        lambda x: masked_sum(x, (x == 0).all(-1)),
        FEATURES.masked_fill(PADDING[..., None], 0),
        {"zeros": True},
    ),
    (lambda x, absent: masked_sum(x, absent), (FEATURES[:1].numpy(), PADDING[:1]), {}),
]


@pytest.mark.parametrize(("model", "observation", "options"), FORMS)
def test_forms_of_observations(
    model: Callable[..., Any], observation: Any, options: dict[str, Any]
) -> None:
    assert_mask(model, observation, **options)


def test_the_presence_column_is_read() -> None:
    report = check_mask(lambda x: x[..., 1:].sum(1), with_presence(PADDING), presence=0)
    assert {"content", "nan", "empty"} <= set(report.failures)


def test_outputs_with_a_column_for_each_slot_are_not_compared_between_sizes() -> None:
    def with_weights(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        return x.masked_fill(padding[..., None], 0).mean(1), (~padding).to(x.dtype)

    observation = (FEATURES, PADDING)
    assert "amount" in check_mask(with_weights, observation).failures
    report = check_mask(lambda *parts: with_weights(*parts)[1], observation)
    assert "depends on the number of slots" in report.skipped["amount"]


def test_an_exception_fails_its_check_alone() -> None:
    def strict(x: Tensor, padding: Tensor) -> Tensor:
        if padding.all(1).any():
            raise ArithmeticError("no entities\nin a set")
        return masked_sum(x, padding)

    report = check_mask(strict, (FEATURES, PADDING))
    assert set(report.failures) == {"empty", "batch"}
    assert report.failures["empty"].startswith("it raises ArithmeticError: no")
    assert "\n" not in report.failures["empty"]


def test_a_model_of_fixed_size_skips_the_number_of_slots() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(24, 2))
    report = check_mask(
        lambda x, padding: flat(x.masked_fill(padding[..., None], 0)),
        (FEATURES, PADDING),
    )
    assert "only 6 slots" in report.skipped["amount"]
    assert set(report.failures) == {"place", "order"}


def test_the_model_is_left_as_it_was() -> None:
    model = Model(masked_sum).train()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    check_mask(model, (FEATURES, PADDING))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert value.equal(weights[key])


class Keeping(Model):
    """Keeps its last embeddings, as others keep attention weights."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        self.last = [self.embed(x)]
        return self.pool(self.last[0], padding)


def normalized_weights(pool: Callable[..., Tensor]) -> Model:
    model = Model(pool)
    model.embed[0] = nn.utils.weight_norm(model.embed[0])
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("make", [Keeping, normalized_weights])
def test_a_model_may_keep_tensors_of_its_last_call(
    make: Callable[..., Model],
) -> None:
    model = make(mean_over_slots)
    for _ in range(2):
        model(FEATURES, PADDING)
        report = check_mask(model, (FEATURES, PADDING))
        assert set(report.failures) == {"amount"}, str(report)
        assert {"float16", "bfloat16"} <= {*report.passed}
    model(FEATURES, PADDING).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = Model(masked_sum)
    model.lock = Lock()
    with pytest.raises(InputError, match="a module that can be copied, got .*lock"):
        check_mask(model, (FEATURES, PADDING))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (3, {}, "model: expected a callable, got int"),
        (lambda x, padding: None, {}, "begin with (3,), got []"),
        (lambda x, padding: x.sum(), {}, "begin with (3,), got [()]"),
        (lambda x, padding: x.sum(1), {"per_entity": True}, "begin with (3, 6), got"),
        (lambda x, padding: x.sum(1)[:, :0], {}, "that is not empty, got [(3, 0)]"),
    ],
)
def test_wrong_outputs(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_mask(model, (FEATURES, PADDING), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_assert_mask_shows_every_sentence() -> None:
    with pytest.raises(AssertionError, match="content: FAILED, numbers under padding"):
        assert_mask(Model(unmasked_max), (FEATURES, PADDING))


@pytest.mark.parametrize(
    ("observation", "options", "words"),
    [
        ((FEATURES,), {}, "mask: expected its position or key"),
        ((FEATURES, PADDING, PADDING), {}, "2 of [0, 1, 2]"),
        ((FEATURES, PADDING), {"mask": 3}, "one of [0, 1], got 3"),
        ((FEATURES, PADDING), {"marks": "absent"}, "'padding' or 'present'"),
        ((FEATURES, PADDING), {"mask": 1, "zeros": True}, "expected one of mask"),
        ((FEATURES, torch.ones(3, 6).bool()), {}, "a present entity in each set"),
        ((TYPES, PADDING), {}, "floating features of shape (B, N, F)"),
        ((FEATURES, PADDING[:, 1:]), {}, "mask: expected the shape (B, N)"),
        (None, {}, "observation: expected tensors, in a tuple or a mapping, got None"),
        (FEATURES, {"presence": 4}, "a feature from 0 to 3, got 4"),
        ((FEATURES, TYPES), {"presence": 0}, "one tensor of entities, got [0, 1]"),
    ],
)
def test_bad_input(observation: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_mask(lambda *parts: parts[0], observation, **options)
    assert words in str(caught.value)
