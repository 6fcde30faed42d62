"""Merging without replacement: choices, probabilities, gradients, schedules."""

import itertools
import math
from collections.abc import Iterator
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from marl_pool.encoders import make_encoder
from marl_pool.encoders.merging import MergingLayer, PairScores, timestep_encoding
from marl_pool.encoders.pairs import (
    Pairs,
    choose_pairs,
    choose_tokens,
    gumbel,
    pair_log_prob,
    token_log_prob,
)
from marl_pool.options.signatures import check_settings
from marl_pool.utils.errors import InputError
from marl_pool_studies.hierarchical import layers
from marl_pool_studies.hierarchical.choices import (
    dependence,
    depth_probabilities,
    divergences,
    merging_schedule,
    sample_depth,
    surrogate,
    validate_schedule,
)
from marl_pool_studies.hierarchical.layers import (
    Chance,
    HierarchicalDecoder,
    HierarchicalEncoder,
    Hierarchy,
)

seeds = st.integers(0, 2**31)
Sequence = tuple[tuple[int, int], ...]
Module = TypeVar("Module", bound=nn.Module)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sequences(size: int, count: int, used: Sequence = ()) -> Iterator[Sequence]:
    """Yield all sequences of ``count`` ordered pairs without a common token."""
    if not count:
        yield used
        return
    free = set(range(size)) - {token for pair in used for token in pair}
    for pair in itertools.permutations(sorted(free), 2):
        yield from sequences(size, count - 1, (*used, pair))


def by_hand(logits: Tensor, sequence: Sequence) -> Tensor:
    """Compute the probability of a sequence, choice by choice."""
    probability, free = logits.new_ones(()), set(range(len(logits)))
    for first, second in sequence:
        allowed = itertools.permutations(sorted(free), 2)
        total = torch.stack([logits[i, j].exp() for i, j in allowed]).sum()
        probability = probability * logits[first, second].exp() / total
        free -= {first, second}
    return probability


def as_pairs(samples: list[Sequence]) -> Pairs:
    indices = torch.tensor(samples)
    valid = torch.ones(indices.shape[:2], dtype=torch.bool)
    return Pairs(indices[..., 0], indices[..., 1], valid)


# Choosing pairs


@given(seed=seeds, size=st.integers(2, 9), levels=st.sampled_from([None, 1, 3]))
def test_pairs_are_those_of_a_plain_greedy_loop(seed, size, levels):
    scores = normal(1, size, size, seed=seed)
    if levels:  # ties; at one level all are equal
        scores = (scores * levels).round() if levels > 1 else scores * 0
    most = size // 2
    pairs = choose_pairs(scores, most)
    assert pairs.valid.all()
    free = set(range(size))
    for gone, kept in zip(pairs.gone[0].tolist(), pairs.kept[0].tolist(), strict=True):
        allowed = list(itertools.permutations(sorted(free), 2))
        best = max(float(scores[0, i, j]) for i, j in allowed)
        assert (gone, kept) in allowed
        if levels is None:
            assert float(scores[0, gone, kept]) == best
        free -= {gone, kept}


def test_a_pair_has_the_direction_with_the_higher_score():
    scores = torch.zeros(1, 3, 3)
    scores[0, 2, 1] = 5.0
    assert [part.tolist() for part in choose_pairs(scores, 1)[:2]] == [[[2]], [[1]]]
    scores[0, 1, 2] = 6.0
    assert [part.tolist() for part in choose_pairs(scores, 1)[:2]] == [[[1]], [[2]]]


def test_padding_and_counts_limit_the_pairs():
    scores = normal(3, 6, 6)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 2:] = True
    padding[2] = True
    pairs = choose_pairs(scores, 3, torch.tensor([2, 1, 0]), padding)
    assert pairs.valid.sum(1).tolist() == [2, 1, 0]
    assert sorted([int(pairs.gone[1, 0]), int(pairs.kept[1, 0])]) == [0, 1]


# Probabilities


@pytest.mark.parametrize(("size", "count"), [(2, 1), (4, 1), (4, 2), (5, 2)])
def test_log_probabilities_are_those_of_sequential_sampling(size, count):
    logits = 2 * normal(size, size)
    cases = list(sequences(size, count))
    log_probs = pair_log_prob(logits.expand(len(cases), -1, -1), as_pairs(cases)).sum(1)
    expected = torch.stack([by_hand(logits, sequence) for sequence in cases])
    torch.testing.assert_close(log_probs.exp(), expected)
    assert float(log_probs.exp().sum()) == pytest.approx(1)


def test_gumbel_noise_samples_without_replacement():
    logits, samples = normal(4, 4), 60_000
    generator = torch.Generator().manual_seed(0)
    batch = logits.expand(samples, -1, -1)
    pairs = choose_pairs(batch + gumbel(batch, generator), 2)
    codes = (pairs.gone * 4 + pairs.kept) @ torch.tensor([16, 1])
    counts = torch.bincount(codes, minlength=256)
    statistic, all_sequences = 0.0, list(sequences(4, 2))
    for (a, b), (c, d) in all_sequences:
        expected = samples * float(by_hand(logits, ((a, b), (c, d))))
        observed = int(counts[(a * 4 + b) * 16 + c * 4 + d])
        statistic += (observed - expected) ** 2 / expected
    assert len(all_sequences) == 24
    assert statistic < 49.7  # 99.9 % quantile of chi-square, 23 degrees of freedom


@given(seed=seeds)
def test_padded_pairs_score_as_a_shorter_set(seed):
    logits = normal(1, 7, 7, seed=seed)
    padding = torch.tensor([[False, True, False, False, True, False, True]])
    pairs = choose_pairs(logits, 3, torch.tensor([2]), padding)
    present = (~padding[0]).nonzero()[:, 0]
    short = logits[:, present][:, :, present]
    alone = choose_pairs(short, 2)
    assert present[alone.kept[0]].tolist() == pairs.kept[0, :2].tolist()
    for masked in (True, False):
        log_probs = pair_log_prob(logits, pairs, padding, masked=masked)
        expected = pair_log_prob(short, alone, masked=masked)
        torch.testing.assert_close(log_probs[:, :2], expected)
        assert log_probs[0, 2] == 0


def test_gradients_of_log_probabilities():
    logits = normal(3, 6, 6).requires_grad_()
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    pairs = choose_pairs(logits, 3, torch.tensor([3, 2, 3]), padding)
    for masked in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, masked=masked: pair_log_prob(x, pairs, padding, masked=masked),
            (logits,),
        )


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[0.0, 300.0, 0.0, 0.0]]).repeat(4, 1)[None]
    logits = logits.clone().requires_grad_()
    log_probs = pair_log_prob(logits, choose_pairs(logits, 2))
    log_probs.sum().backward()
    assert log_probs.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_the_unmasked_log_prob_is_the_softmax_of_the_whole_matrix():
    logits = normal(2, 5, 5)
    pairs = choose_pairs(logits, 2)
    log_probs = pair_log_prob(logits, pairs, masked=False)
    whole = logits.flatten(1).log_softmax(1)
    torch.testing.assert_close(log_probs, whole.gather(1, pairs.gone * 5 + pairs.kept))


def test_tokens_without_replacement():
    logits = normal(4)
    orders = list(itertools.permutations(range(4), 2))
    batch = logits.expand(len(orders), -1)
    probabilities = token_log_prob(batch, torch.tensor(orders)).sum(1).exp()
    share = logits.softmax(0)
    expected = [float(share[a] * share[b] / (1 - share[a])) for a, b in orders]
    torch.testing.assert_close(probabilities, torch.tensor(expected).double())
    unmasked = token_log_prob(batch, torch.tensor(orders), masked=False).sum(1).exp()
    expected = [float(share[a] * share[b]) for a, b in orders]
    torch.testing.assert_close(unmasked, torch.tensor(expected).double())
    assert choose_tokens(logits[None], 2).tolist() == [logits.topk(2).indices.tolist()]


# The estimator


def settings_of(**options: object) -> Hierarchy:
    return Hierarchy(**{"dim": 4, "num_heads": 1, "through_tokens": True, **options})  # type: ignore[arg-type]


def randomized(module: Module) -> Module:
    generator = torch.Generator().manual_seed(1)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
    return module


def chance(explore: bool = True) -> Chance:
    return Chance(torch.Generator().manual_seed(0), explore)


def error_of_the_estimator(
    log_prob: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """Return the norms of the estimator's bias and of the exact gradient.

    Four tokens, two merges, then one of the two left, over all 24 x 2 sequences. The
    estimator's expectation weights each by its sampling probability, which is computed
    without the code under test.
    """
    encoder = randomized(HierarchicalEncoder(settings_of(log_prob=log_prob)))
    first, second = list(sequences(4, 2)), list(sequences(2, 1))
    pairs = list(itertools.product(first, second))
    forced = [as_pairs([a for a, _ in pairs]), as_pairs([b for _, b in pairs])]
    x, target = normal(1, 4, 4).expand(len(pairs), -1, -1), normal(1, 1, 4, seed=3)
    all_logits: list[Tensor] = []

    def choose(scores: Tensor, count: int) -> Pairs:
        return forced[len(all_logits) - 1]

    transform = encoder.layer.transform

    def transformed(x: Tensor) -> tuple[Tensor, Tensor]:
        new, logits = transform(x)
        all_logits.append(logits)
        return new, logits

    monkeypatch.setattr(layers, "choose_pairs", choose)
    monkeypatch.setattr(encoder.layer, "transform", transformed)
    answer = encoder(x, [2, 1], chance())
    losses = (answer.output - target).square().mean((1, 2))
    probability = torch.stack(
        [
            by_hand(all_logits[0][row], a) * by_hand(all_logits[1][row], b)
            for row, (a, b) in enumerate(pairs)
        ]
    )
    assert float(probability.detach().sum()) == pytest.approx(1)
    parameters = [p for p in encoder.parameters() if p.requires_grad]
    exact = gradient((probability * losses).sum(), parameters)
    # `surrogate` is a mean over samples: call it for each, and weight the results.
    estimates = [
        surrogate(losses[row : row + 1], answer.log_prob[row : row + 1])
        for row in range(len(pairs))
    ]
    expected = gradient(
        (probability.detach() * torch.stack(estimates)).sum(), parameters
    )
    return float((expected - exact).norm()), float(exact.norm())


def gradient(value: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.cat([part.flatten() for part in grads if part is not None])


def test_the_masked_estimators_expectation_is_the_exact_gradient(monkeypatch):
    error, size = error_of_the_estimator("masked", monkeypatch)
    assert size > 1e-3
    assert error < 1e-9 * size


def test_the_unmasked_estimator_is_biased(monkeypatch):
    error, size = error_of_the_estimator("unmasked", monkeypatch)
    assert error > 0.05 * size


def test_as_published_the_score_trains_the_policy_alone():
    encoder = randomized(HierarchicalEncoder(settings_of(through_tokens=False)))
    answer = encoder(normal(2, 4, 4), [2], chance())
    answer.log_prob.sum().backward()
    policy = {id(p) for p in encoder.layer.policy.parameters()}  # type: ignore[union-attr]
    for name, parameter in encoder.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in policy), name


def test_the_unmerging_estimator_is_exact(monkeypatch):
    decoder = randomized(HierarchicalDecoder(settings_of()))
    orders = list(itertools.permutations(range(3), 2))
    x = normal(1, 3, 4).expand(len(orders), -1, -1)
    monkeypatch.setattr(
        layers, "choose_tokens", lambda scores, count: torch.tensor(orders)
    )
    step = decoder.step(x, 1, 2, chance())
    weights = normal(5, 4, seed=5)
    losses = (step.tokens * weights).sum((1, 2)).square()
    logits = decoder._logits(x[:1] + timestep_encoding(1, 4))[0]
    share = logits.softmax(0)
    probability = torch.stack([share[a] * share[b] / (1 - share[a]) for a, b in orders])
    parameters = list(decoder.parameters())
    exact = gradient((probability * losses).sum(), parameters)
    scored = losses.detach() * step.log_prob + losses
    expected = gradient((probability.detach() * scored).sum(), parameters)
    torch.testing.assert_close(expected, exact)


def test_the_surrogates_weights():
    losses = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)

    def weights(**options: object) -> list[float]:
        log_prob = torch.full((3,), -5.0, requires_grad=True)
        loss = surrogate(losses, log_prob, **options)  # type: ignore[arg-type]
        assert loss.item() == pytest.approx(3)  # the mean loss
        loss.backward()
        assert log_prob.grad is not None
        return (3 * log_prob.grad).tolist()

    assert weights() == pytest.approx([1, 2, 6])
    assert weights(credit="batch") == pytest.approx([3, 3, 3])
    # Each loss minus the mean of the other two.
    assert weights(baseline=True) == pytest.approx([-3, -1.5, 4.5])
    assert losses.grad is not None
    assert losses.grad.tolist() == pytest.approx([1, 1, 1])


# The layers


def test_logits_by_hand():
    scores = randomized(PairScores(6, 2, True))
    x = normal(2, 3, 6)
    normed = scores.norm(x)
    queries = scores.to_query(normed).unflatten(-1, (2, 3))
    keys = scores.to_key(normed).unflatten(-1, (2, 3))  # type: ignore[misc]
    assert scores.head_weights is not None
    expected = torch.zeros(2, 3, 3).double()
    for head in range(2):
        product = queries[:, :, head] @ keys[:, :, head].transpose(1, 2)
        expected += scores.head_weights[head] * product / math.sqrt(3)
    torch.testing.assert_close(scores(x), expected)


def layer(**options: object) -> MergingLayer:
    arguments = {
        "num_heads": 2,
        "policy_heads": 1,
        "dim_ff": 8,
        "dropout": 0.0,
        "policy": "learned",
        "attention": True,
        "through_tokens": True,
        **options,
    }
    return randomized(MergingLayer(4, **arguments))  # type: ignore[arg-type]


def test_shared_keys_train_the_queries_only():
    shared = layer(policy="shared_keys")
    x = normal(2, 5, 4)
    shared.transform(x)[1].sum().backward()
    assert shared.policy is not None
    assert shared.policy.to_query.weight.grad is not None
    assert shared.policy.to_key is None
    assert shared.refine is not None
    assert shared.refine.attention.to_key.weight.grad is None


def test_the_heuristic_is_the_blocks_attention():
    heuristic = layer(policy="heuristic")
    x = normal(2, 5, 4)
    _, logits = heuristic.transform(x)
    assert heuristic.block is not None
    normed = heuristic.block.attention_norm(x)
    expected = heuristic.block.attention.weights(normed, normed).mean(1)
    torch.testing.assert_close(logits.exp(), expected)
    assert not logits.requires_grad


def test_a_random_policy_is_uniform_and_always_samples():
    encoder = randomized(HierarchicalEncoder(settings_of(policy="random"))).eval()
    x = normal(1, 6, 4).expand(50, -1, -1)
    step = encoder.step(x, 1, 1, chance(explore=False))
    assert step.pairs is not None
    assert len({tuple(row) for row in torch.cat(step.pairs[:2], 1).tolist()}) > 10
    torch.testing.assert_close(
        step.log_prob, torch.full((50,), -math.log(30)).to(step.log_prob)
    )


@pytest.mark.parametrize("policy", ["learned", "shared_keys", "heuristic"])
def test_evaluation_is_greedy(policy):
    encoder = randomized(HierarchicalEncoder(settings_of(policy=policy))).eval()
    x, merges = normal(3, 6, 4), [2, 1]
    first = encoder(x, merges, Chance(torch.Generator().manual_seed(1), False))
    second = encoder(x, merges, Chance(torch.Generator().manual_seed(2), False))
    assert torch.equal(first.output, second.output)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("gradient", ["reinforce", "scaling"])
def test_the_decoder_unmerges_to_the_original_shape(attention, gradient):
    settings = settings_of(attention=attention, gradient=gradient, token_noise=0.5)
    encoder = randomized(HierarchicalEncoder(settings))
    decoder = randomized(HierarchicalDecoder(settings))
    x, merges = normal(3, 7, 4), [3, 1, 1]
    encoded = encoder(x, merges, chance())
    assert encoded.output.shape == (3, 2, 4)
    decoded = decoder(encoded.output, merges, chance())
    assert decoded.output.shape == x.shape
    (decoded.output.square().sum() + encoded.log_prob.sum()).backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("gradient", "felt"), [("reinforce", True), ("scaling", False)]
)
def test_scaling_replaces_reinforce(gradient, felt):
    settings = settings_of(gradient=gradient)
    encoder, decoder = HierarchicalEncoder(settings), HierarchicalDecoder(settings)
    encoded = encoder(normal(3, 6, 4).float(), [2, 1], chance())
    decoded = decoder(encoded.output.detach(), [2, 1], chance())
    assert encoded.log_prob.requires_grad == felt
    assert decoded.log_prob.requires_grad == felt


@pytest.mark.parametrize("count", [2, 3])
def test_forced_tokens_are_scaled_as_chosen_ones(count):
    decoder = randomized(HierarchicalDecoder(settings_of(gradient="scaling")))
    x = normal(2, 3, 4)
    tokens = choose_tokens(decoder._logits(x + timestep_encoding(1, 4)), count)
    greedy = decoder.step(x, 1, count, chance(explore=False))
    forced = decoder.step(x, 1, count, chance(), tokens)
    torch.testing.assert_close(forced.tokens, greedy.tokens)
    assert forced.log_prob.requires_grad  # the decoder learns to choose them


def test_unpaired_tokens_stay_unchanged_without_attention():
    encoder = randomized(HierarchicalEncoder(settings_of(attention=False)))
    x = normal(2, 5, 4)
    step = encoder.step(x, 3, 2, chance())
    pairs = step.pairs
    assert pairs is not None
    entered = x + timestep_encoding(3, 4)
    for row in range(2):
        used = {*pairs.gone[row].tolist(), *pairs.kept[row].tolist()}
        (unpaired,) = set(range(5)) - used
        assert step.unchanged[row].tolist() == [unpaired]
        torch.testing.assert_close(step.tokens[row, 0], entered[row, unpaired])
        for number in range(2):
            pair = [entered[row, int(p[row, number])] for p in pairs[:2]]
            expected = encoder.layer.merge(torch.cat(pair))
            torch.testing.assert_close(step.tokens[row, 1 + number], expected)


def test_token_noise_and_norms():
    encoder = randomized(HierarchicalEncoder(settings_of(token_noise=1.0)))
    x = torch.zeros(4, 500, 4).double()
    quiet = x + timestep_encoding(2, 4)
    entered, norm = encoder.entrance(x, 2, chance().generator)
    assert float((entered - quiet).std()) == pytest.approx(1, abs=0.05)
    torch.testing.assert_close(norm, entered.square().sum(-1).mean(-1))
    assert torch.equal(encoder.eval().entrance(x, 2, chance().generator)[0], quiet)


def test_timestep_encoding_by_hand():
    expected = [
        math.sin(3),
        math.cos(3),
        math.sin(3 / 10000 ** (2 / 5)),
        math.cos(3 / 10000 ** (2 / 5)),
        math.sin(3 / 10000 ** (4 / 5)),
    ]
    assert timestep_encoding(3, 5).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "lerned"}, "task.policy: .* got 'lerned'.*mean 'learned'"),
        ({"num_heads": 3}, "task.num_heads: expected a divisor of dim = 4, got 3"),
        ({"policy_heads": 3}, "policy_heads: expected a divisor of dim = 4"),
        ({"policy": "heuristic", "attention": False}, "learned or random without"),
        ({"policy": "random", "gradient": "scaling"}, "got scaling with random"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(InputError, match=message):
        check_settings(Hierarchy, {"dim": 4, "num_heads": 1, **options}, "task")


# The encoder for policies


def test_a_merged_vector_is_added_in_both_slots():
    encoder = make_encoder(
        "learned_merging", dim=4, num_layers=1, proportion=0.4, attention=False
    )
    encoder = randomized(encoder).eval()
    x = normal(2, 5, 4)
    output = encoder(x)
    entered = x + timestep_encoding(1, 4)
    _, logits = encoder.layer.transform(entered)  # type: ignore[union-attr, operator]
    pairs = choose_pairs(logits, 1)
    share = pair_log_prob(logits, pairs).exp()
    for row in range(2):
        gone, kept = int(pairs.gone[row, 0]), int(pairs.kept[row, 0])
        pair = torch.cat([entered[row, gone], entered[row, kept]])
        merged = encoder.layer.merge(pair)  # type: ignore[union-attr, operator]
        expected = entered[row].clone()
        expected[[gone, kept]] = pair.view(2, 4).mean(0) + share[row] * merged
        torch.testing.assert_close(output[row], expected)


@given(seed=seeds, proportion=st.sampled_from([0.0, 0.5, 1.0]))
def test_how_many_vectors_are_left(seed, proportion):
    encoder = randomized(
        make_encoder("learned_merging", dim=4, num_layers=3, proportion=proportion)
    )
    output = encoder(normal(1, 12, 4, seed=seed))[0]
    count = 12 - sum(merging_schedule(12, proportion, 3))
    assert len({tuple(row) for row in output.tolist()}) == count


def test_sampler_and_learner_agree():
    """PPO's learner sees the rows in other batches, in training mode."""
    encoder = randomized(make_encoder("learned_merging", dim=4, num_layers=3)).float()
    x = normal(64, 9, 4).float()
    sampled = encoder.eval()(x)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    learned = torch.empty_like(sampled)
    for rows in order.split(24):
        learned[rows] = encoder.train()(x[rows])
    torch.testing.assert_close(learned, sampled)


def test_the_encoders_merging_policy_gets_a_gradient():
    encoder = randomized(make_encoder("learned_merging", dim=4))
    encoder(normal(2, 6, 4)).square().sum().backward()
    grads = {name: part.grad for name, part in encoder.named_parameters()}
    grad = grads["layer.policy.to_query.weight"]
    assert grad is not None
    assert grad.any()


# Schedules


@pytest.mark.parametrize(("proportion", "count"), [(0.25, 91), (0.5, 27), (1.0, 1)])
def test_256_tokens_over_eight_layers(proportion, count):
    schedule = merging_schedule(256, proportion, 8)
    assert 256 - sum(schedule) == count
    validate_schedule(256, schedule)
    if proportion == 1:
        assert schedule == [128, 64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([8, 5], "task.schedule: expected at most 4 merges .* layer 2, got 5"),
        ([9], "expected at most 8 merges of the 16 tokens that reach layer 1, got 9"),
        ([-1], "got -1"),
        ([], r"expected a number for each layer, got \[\]"),
    ],
)
def test_impossible_schedules_are_refused(schedule, message):
    with pytest.raises(InputError, match=message) as caught:
        validate_schedule(16, schedule)
    assert "\n" not in str(caught.value)


def test_depths_of_the_stochastic_schedule():
    probabilities = depth_probabilities(0.3, 4)
    assert probabilities.tolist() == pytest.approx([0.7, 0.21, 0.063, 0.027])
    assert depth_probabilities(1.0, 3).tolist() == [0, 0, 1]
    assert depth_probabilities(0.0, 3).tolist() == [1, 0, 0]
    proportional = depth_probabilities(0.5, 3, proportional=True)
    assert proportional.tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    uniform = depth_probabilities(1.0, 4, proportional=True)
    assert uniform.tolist() == pytest.approx([0.25] * 4)


@given(rho=st.floats(0, 1), layers=st.integers(1, 8), proportional=st.booleans())
def test_depths_are_a_distribution(rho, layers, proportional):
    probabilities = depth_probabilities(rho, layers, proportional=proportional)
    assert (probabilities >= 0).all()
    assert float(probabilities.sum()) == pytest.approx(1)


def test_depths_are_sampled_by_their_probabilities():
    generator = torch.Generator().manual_seed(0)
    depths = [sample_depth(depth_probabilities(0.5, 3), generator) for _ in range(4000)]
    for depth, expected in ((1, 0.5), (2, 0.25), (3, 0.25)):
        assert depths.count(depth) / 4000 == pytest.approx(expected, abs=0.03)


# How much policies depend on their input


def test_a_policy_that_ignores_its_input_has_no_information():
    policy = normal(1, 4, 4).flatten(1).softmax(1).view(1, 4, 4)
    estimate = dependence(policy.expand(10, -1, -1))
    assert estimate.information == pytest.approx(0, abs=1e-12)
    assert estimate.entropy == pytest.approx(
        float(torch.distributions.Categorical(policy.flatten()).entropy())
    )


def test_policies_without_a_common_pair_identify_their_input():
    policies = torch.zeros(6, 3, 3)
    for number, pair in enumerate(itertools.permutations(range(3), 2)):
        policies[number][pair] = 1
    estimate = dependence(policies)
    assert estimate.information == pytest.approx(math.log(6))
    assert estimate.uniform == pytest.approx(math.log(6))
    # Uniform over all pairs, not only those that these policies choose from.
    assert dependence(policies[:2]).uniform == pytest.approx(math.log(6))


def test_divergences_are_torchs():
    policies = normal(5, 3, 3).flatten(1).softmax(1)
    mean = policies.mean(0)
    expected = nn.functional.kl_div(
        mean.log().expand(5, -1), policies, reduction="none"
    ).sum(1)
    torch.testing.assert_close(divergences(policies.view(5, 3, 3)), expected)
