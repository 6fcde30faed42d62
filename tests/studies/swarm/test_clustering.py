"""Random mixtures, matching and training, against scipy."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import clustering_study
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from helpers.pictures import read_picture, share_beside_background, share_of
from helpers.tables import yaml_cases
from marl_pool.config import compose
from marl_pool.training.supervised.learner import must_go_back
from marl_pool.training.supervised.results import read_study
from marl_pool.utils.errors import InputError
from marl_pool_studies.swarm import tasks
from marl_pool_studies.swarm.data import (
    Mixtures,
    by_length,
    four_gaussians,
    in_new_order,
    log_densities,
    wishart_mixtures,
)
from marl_pool_studies.swarm.plots import output_colors
from marl_pool_studies.swarm.point_task import PointNetwork, is_equivariant
from marl_pool_studies.swarm.tasks import (
    Clustering,
    MixtureLikelihood,
    Parameters,
    accuracy,
    cluster_scores,
    match_clusters,
    mean_log_likelihood,
    to_parameters,
)

MANY = torch.arange(4000)
ALPHA = 1e-4
"""A true hypothesis fails so seldom, and with a fixed seed never."""
SMALL = {"num_samples": 20, "num_test": 8, "entities": (3, 9), "clusters": (2, 3)}


def fits_distribution(sample: Tensor, distribution: str, *args: float) -> bool:
    return bool(stats.kstest(sample.numpy(), distribution, args).pvalue > ALPHA)


def is_uniform(counts: Tensor) -> bool:
    return bool(stats.chisquare(counts.numpy()).pvalue > ALPHA)


# Mixtures


def test_clusters_of_any_shape_are_as_specified() -> None:
    mixtures = wishart_mixtures(MANY, 1, (5, 14), (3, 10))
    present = mixtures.weights > 0
    assert is_uniform((~mixtures.padding).sum(1).bincount()[5:])
    assert is_uniform(mixtures.num_clusters.bincount()[3:])
    for axis in range(2):
        assert fits_distribution(mixtures.means[present][:, axis], "norm")
    covariances = (mixtures.factors @ mixtures.factors.mT)[present].double()
    # A diagonal element of an inverse Wishart matrix, ν = 4, Ψ = 0.05 I, p = 2, is
    # inverse gamma with (ν - p + 1) / 2 and Ψ_11 / 2.
    for axis in range(2):
        assert fits_distribution(covariances[:, axis, axis], "invgamma", 1.5, 0, 0.025)
    reference = stats.invwishart(4, 0.05 * np.eye(2)).rvs(20_000, random_state=0)
    for function in (np.linalg.det, lambda matrices: matrices[:, 0, 1]):
        values, expected = function(covariances.numpy()), function(reference)
        assert stats.ks_2samp(values, expected).pvalue > ALPHA


def test_points_are_drawn_from_their_clusters() -> None:
    mixtures = wishart_mixtures(MANY[:500], 2, (50, 60), (3, 3))
    present = ~mixtures.padding
    assert is_uniform(mixtures.labels[present].bincount())
    offsets = mixtures.points - mixtures.means.gather(
        1, mixtures.labels[..., None].expand(-1, -1, 2)
    )
    rows = torch.arange(500)[:, None]
    inverse = torch.linalg.inv(mixtures.factors)[rows, mixtures.labels]
    white = (inverse @ offsets[..., None])[..., 0][present]
    for axis in range(2):
        assert fits_distribution(white[:, axis], "norm")
    assert abs(np.corrcoef(white.T)[0, 1]) < 0.03


def test_four_gaussians_are_as_specified() -> None:
    mixtures = four_gaussians(MANY, 1, (5, 14))
    assert is_uniform((~mixtures.padding).sum(1).bincount()[5:])
    assert fits_distribution(mixtures.means.flatten(), "uniform", -4, 8)
    factors = (0.3 * torch.eye(2)).expand_as(mixtures.factors)
    assert torch.equal(mixtures.factors, factors)
    # One of four flat Dirichlet weights is Beta(1, 3).
    for component in range(4):
        assert fits_distribution(mixtures.weights[:, component], "beta", 1, 3)
    torch.testing.assert_close(mixtures.weights.sum(1), torch.ones(len(MANY)))
    expected = (mixtures.weights * (~mixtures.padding).sum(1, keepdim=True)).sum(0)
    counts = mixtures.labels[~mixtures.padding].bincount(minlength=4).numpy()
    share = expected.double().numpy() / float(expected.double().sum())
    assert stats.chisquare(counts, share * counts.sum()).pvalue > ALPHA


@given(
    st.lists(st.integers(0, 1 << 42), min_size=1, max_size=6, unique=True),
    st.integers(0, 5),
    st.sampled_from([wishart_mixtures, four_gaussians]),
)
def test_a_row_is_the_same_in_any_batch(rows: list[int], seed: int, draw: Any) -> None:
    sets = draw(torch.tensor(rows), seed, (2, 30))
    for place, row in enumerate(rows):
        single = draw(torch.tensor([row]), seed, (2, 30))
        size = single.points.shape[1]
        assert not single.padding.any()
        assert sets.padding[place, size:].all()
        for name in ("points", "labels"):
            batched = getattr(sets, name)[place]
            assert torch.equal(batched[:size], getattr(single, name)[0])
            assert not batched[size:].any()
        assert torch.equal(sets.factors[place], single.factors[0])
    reseeded = draw(torch.tensor(rows), seed + 1, (2, 30))
    assert not torch.equal(sets.means, reseeded.means)


def test_log_densities_are_scipys() -> None:
    mixtures = wishart_mixtures(torch.arange(3), 0, (4, 6), (2, 3))
    densities = log_densities(mixtures)
    for row, count in enumerate(mixtures.num_clusters.tolist()):
        for c in range(count):
            factor = mixtures.factors[row, c].double()
            mean, covariance = mixtures.means[row, c].double(), factor @ factor.T
            normal = stats.multivariate_normal(mean, covariance)
            expected = normal.logpdf(mixtures.points[row]) - math.log(count)
            assert densities[row, :, c].tolist() == pytest.approx(expected, rel=1e-3)
        assert (densities[row, :, count:] == -torch.inf).all()


# Matching


def logits_of(seed: int, outputs: int = 4, clusters: int = 3) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 7, outputs, generator=generator, dtype=torch.float64)
    labels = torch.randint(clusters, (3, 7), generator=generator)
    padding = torch.arange(7) >= torch.tensor([[7], [4], [1]])
    return logits, labels.masked_fill(padding, 0), padding


@given(st.integers(0, 2**31), st.integers(1, 4))
def test_the_match_is_the_best_of_all(seed: int, clusters: int) -> None:
    logits, labels, padding = logits_of(seed, 4, clusters)
    log_probs = logits.log_softmax(-1)
    matched = match_clusters(log_probs, labels, padding, torch.full((3,), clusters))
    for row in range(3):
        present = (~padding[row]).nonzero()[:, 0]
        losses = [
            -log_probs[row, present, torch.tensor(order)[labels[row, present]]].mean()
            for order in itertools.permutations(range(4), clusters)
        ]
        assert float(matched.losses[row]) == pytest.approx(float(min(losses)))
        assert matched.outputs[row, clusters:].tolist() == [-1] * (4 - clusters)


@given(st.integers(0, 2**31), st.permutations(range(4)))
def test_names_of_outputs_and_padding_do_not_matter(seed: int, order: Any) -> None:
    logits, labels, padding = logits_of(seed)
    log_probs, three = logits.log_softmax(-1), torch.full((3,), 3)
    matched = match_clusters(log_probs, labels, padding, three)
    permuted = log_probs[..., order].masked_fill(padding[..., None], -7.0)
    rematched = match_clusters(permuted, labels, padding, three)
    torch.testing.assert_close(rematched.losses, matched.losses)
    torch.testing.assert_close(
        accuracy(permuted, labels, padding, rematched.outputs),
        accuracy(log_probs, labels, padding, matched.outputs),
    )


def test_nan_log_probabilities_give_nan_losses() -> None:
    labels, padding = torch.zeros(1, 4).long(), torch.zeros(1, 4).bool()
    log_probs = torch.full((1, 4, 3), torch.nan)
    matched = match_clusters(log_probs, labels, padding, torch.ones(1).long())
    assert matched.losses.isnan().all()


def test_the_gradient_goes_through_the_match() -> None:
    logits, labels, padding = logits_of(0)

    def loss(logits: Tensor) -> Tensor:
        three = torch.full((3,), 3)
        return match_clusters(logits.log_softmax(-1), labels, padding, three).losses

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def test_a_network_that_is_right_under_other_names() -> None:
    _, labels, padding = logits_of(0)
    names = torch.tensor([2, 0, 3])
    sure = 100 * torch.nn.functional.one_hot(names[labels], 4).double()
    matched = match_clusters(sure.log_softmax(-1), labels, padding, torch.full((3,), 3))
    assert matched.losses.abs().max() < 1e-9
    assert accuracy(sure, labels, padding, matched.outputs).tolist() == [1, 1, 1]


def test_scores_by_hand() -> None:
    log_probs = -torch.arange(1.0, 7.0).view(1, 3, 2)
    labels = torch.tensor([[1, 0, 1]])
    padding = torch.tensor([[False, False, True]])
    scores = cluster_scores(log_probs, labels, padding)
    assert scores.tolist() == [[[-3.0, -4.0], [-1.0, -2.0]]]


# Batches


def test_chunks_of_similar_length_hold_every_set_once() -> None:
    mixtures = wishart_mixtures(torch.arange(33), 0, (2, 40))
    chunks, inverse = by_length(mixtures)
    assert len(chunks) == 4
    sizes = [len(chunk.labels[0]) for chunk in chunks]
    assert sizes == sorted(sizes)
    assert sizes[-1] == mixtures.points.shape[1]
    sums = torch.cat([chunk.points.sum((1, 2)) for chunk in chunks])[inverse]
    torch.testing.assert_close(sums, mixtures.points.sum((1, 2)))
    for chunk in chunks:
        assert not chunk.padding[-1].any()


def test_a_new_order_moves_points_and_their_labels_together() -> None:
    mixtures = wishart_mixtures(torch.arange(4), 0, (6, 9))
    moved = in_new_order(mixtures, torch.Generator().manual_seed(0))
    assert torch.equal(moved.padding, mixtures.padding)
    assert not torch.equal(moved.points, mixtures.points)

    def pairs(points: Tensor, labels: Tensor) -> list[Any]:
        return sorted(zip(points.tolist(), labels.tolist(), strict=True))

    for row in range(4):
        before = pairs(mixtures.points[row], mixtures.labels[row])
        assert pairs(moved.points[row], moved.labels[row]) == before


# Tasks


def clustering(name: str = "swarm", **options: Any) -> Clustering:
    return Clustering(encoder={"name": name, "dim": 4}, **{**SMALL, **options})


def trained_losses(task: Any, steps: int = 40) -> list[float]:
    """Train for some steps on twenty sets; return the losses."""
    network, generator = task.make_network(0), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    batch, losses = task.batch("train", torch.arange(20)), []
    for _ in range(steps):
        outcome = task.evaluate(network, batch, generator)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        losses.append(outcome.loss.item())
    return losses


@pytest.mark.parametrize("name", ["swarm", "set_linear", "set_transformer", "lstm"])
def test_a_clusterer_learns(name: str) -> None:
    losses = trained_losses(clustering(name))
    # The match alone is better than equal probabilities of ten outputs.
    assert losses[0] < math.log(10)
    assert losses[-1] < losses[0] - 0.5


def test_metrics_are_of_each_set_in_the_order_of_the_batch() -> None:
    task, generator = clustering(), torch.Generator()
    network = task.make_network(0).eval()
    outcome = task.evaluate(network, task.batch("test", torch.arange(15)), generator)
    assert outcome.loss.item() == pytest.approx(float(outcome.metrics["loss"].mean()))
    for row in (0, 7, 14):
        batch = task.batch("test", torch.tensor([row]))
        metrics = task.evaluate(network, batch, generator).metrics
        for name, values in outcome.metrics.items():
            expected = pytest.approx(float(values[row]), rel=1e-4)
            assert float(metrics[name]) == expected


def test_test_sets_are_no_training_sets() -> None:
    task = clustering()
    train, test = (task.batch(split, torch.arange(5)) for split in ("train", "test"))
    assert not torch.equal(train["means"], test["means"])


def test_the_informed_baseline_beats_the_uniform_one() -> None:
    task = clustering(entities=(50, 60))
    informed, uniform = task.baselines(task.batch("test", torch.arange(50))).values()
    assert uniform.tolist() == pytest.approx([math.log(10)] * 50)
    assert (informed >= 0).all()
    assert 0 < informed.mean() < 0.2


@pytest.mark.parametrize(("name", "matters"), [("lstm", True), ("swarm", False)])
def test_only_training_shuffles_and_only_where_it_matters(name, matters) -> None:
    task = clustering(name)
    network, batch = task.make_network(0), task.batch("train", torch.arange(4))

    def losses(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return task.evaluate(network, batch, generator).metrics["loss"]

    assert torch.equal(losses(0), losses(1)) != matters
    network.eval()
    assert torch.equal(losses(0), losses(1))


def test_the_order_spreads_the_loss_of_an_lstm_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    for name, least in (("lstm", 1e-4), ("swarm", 0.0)):
        task = clustering(name)
        spread = task.spread(task.make_network(0).eval(), 9, generator)
        assert (spread > 1e-5).all() == (least > 0)


def test_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SPREAD_ORDERS", 5)
    task = clustering("lstm", picture_grid=3)
    files = task.finish(task.make_network(0).eval(), tmp_path, torch.Generator())
    names = ["clustering.png", "probabilities.png", "orders.png"]
    assert [file.name for file in files] == names
    clusters, probabilities, orders = map(read_picture, files)
    assert all(share_of(color, clusters) > 3e-4 for color in ("C0", "C1"))
    assert share_beside_background(probabilities) > 0.5
    assert share_of("C0", orders) > 1e-3  # medians
    assert share_of("#bcd6e8", orders) > 0.01  # violins, most of them transparent
    colors = output_colors(torch.tensor([3, 0, -1, -1]), 4)
    assert colors.tolist() == [1, 2, 3, 0]


@yaml_cases("options, message")
def test_what_does_not_fit_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Clustering(**{"encoder": {"name": "swarm"}, **options}).make_network(0)


# Parameters of a mixture


def mixture(pooling: str = "avg", **options: Any) -> MixtureLikelihood:
    return MixtureLikelihood(
        encoder={"name": "swarm", "dim": 6},
        pooling={"name": pooling},
        **{"num_samples": 30, "num_test": 5, "entities": (8, 20), **options},
    )


def test_the_likelihood_is_scipys() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = to_parameters(torch.randn(2, 15, generator=generator).double())
    assert parameters.log_weights.exp().sum(1).tolist() == pytest.approx([1, 1])
    points = torch.randn(2, 6, 2, generator=generator).double()
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    sets = Mixtures(points, *(torch.zeros(()),) * 5)._replace(padding=padding)
    likelihoods = mean_log_likelihood(parameters, sets)
    for row, count in enumerate((6, 4)):
        density = 0.0
        for c in range(3):
            covariance = np.diag(parameters.deviations[row, c] ** 2)
            normal = stats.multivariate_normal(parameters.means[row, c], covariance)
            weight = parameters.log_weights[row, c].exp().item()
            density += weight * normal.pdf(points[row, :count])
        assert float(likelihoods[row]) == pytest.approx(np.log(density).mean())


def test_the_true_mixture_is_a_baseline() -> None:
    task = mixture(entities=(200, 300))
    mixtures = Mixtures(**task.batch("test", torch.arange(40)))
    deviations = torch.full_like(mixtures.means, 0.3)
    true = Parameters(mixtures.weights.log(), mixtures.means, deviations)
    true_loss, gaussian_loss = task.baselines(mixtures._asdict()).values()
    expected = -mean_log_likelihood(true, mixtures)
    torch.testing.assert_close(true_loss, expected, rtol=1e-4, atol=1e-4)
    assert (gaussian_loss > true_loss).float().mean() > 0.9
    # Of one Gaussian fitted by maximum likelihood it is known: 1 + log(2π σ_x σ_y).
    first = mixtures.points[0][~mixtures.padding[0]]
    fitted = 1 + math.log(2 * math.pi) + first.std(0, correction=0).log().sum()
    assert float(gaussian_loss[0]) == pytest.approx(float(fitted), rel=1e-4)
    single = mixture(entities=(1, 1))
    baselines = single.baselines(single.batch("test", torch.arange(5)))
    assert all(values.isfinite().all() for values in baselines.values())


@pytest.mark.parametrize("pooling", ["avg", "pma", "cls"])
def test_a_mixture_is_estimated_better_with_training(pooling: str) -> None:
    task = mixture(pooling)
    losses = trained_losses(task)
    assert losses[-1] < losses[0] - 0.5
    batch = task.batch("test", torch.arange(5))
    metrics = task.evaluate(task.make_network(0), batch, torch.Generator()).metrics
    assert torch.equal(metrics["log_likelihood"], -metrics["loss"])


def test_heads_share_the_base() -> None:
    base, variant = (mixture(name).make_network(3) for name in ("avg", "pma"))
    for part in ("encoder", "embedding"):
        weights = (getattr(net, part).state_dict() for net in (base, variant))
        torch.testing.assert_close(*weights, rtol=0, atol=0)
    message = "pooling: expected one with task=mixture, got none"
    with pytest.raises(InputError, match=message):
        MixtureLikelihood(encoder={"name": "swarm"}, pooling=None)


@pytest.mark.parametrize(
    ("preset", "parameters", "causal"),
    [
        # 3 · (2 · 8576 + 60 · 32) + 96 + 330: the published code's number.
        ("paper_isab", 57_642, False),
        ("paper_swarm_mixture", None, True),
        ("paper_swarm_mixture_mean", None, False),
    ],
)
def test_presets_that_bear_the_papers_name(preset, parameters, causal) -> None:
    config = compose("fit", ["task=clustering", "scale=paper", f"encoder={preset}"])
    network = PointNetwork(10, 1000, encoder=config["encoder"], pooling=None)
    assert is_equivariant(network) is not causal
    if parameters is not None:
        assert sum(part.numel() for part in network.parameters()) == parameters


def test_a_class_token_that_meets_no_point_is_refused() -> None:
    options = {"name": "swarm", "dim": 4, "iterations": 1}
    with pytest.raises(InputError, match="would not depend on the tokens"):
        PointNetwork(1, 9, encoder=options, pooling={"name": "cls"})


# Back-tracking


def test_back_tracking_as_published() -> None:
    """In a history that begins with infinity, the last loss that was worse lies before
    the smaller of 80 % of all epochs and of all but five."""
    rng, outcomes = np.random.default_rng(0), set()
    for _ in range(300):
        *before, current = losses = rng.integers(10, size=rng.integers(1, 31)).tolist()
        history, epochs = [math.inf, *before], len(before)
        last_worse = max(i for i, loss in enumerate(history) if loss > current)
        expected = last_worse < min(epochs * (1 - 0.2), epochs - 5)
        assert must_go_back(losses) == expected
        outcomes.add(expected)
    assert outcomes == {True, False}


# Whole studies


def write_run(folder: Path, loss: float, **encoder: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    results = {
        "task": {"name": "clustering"},
        "encoder": {"dim": 8, **encoder},
        "pooling": {"name": "none"},
        "scale": "tiny",
        "parameters": round(100 / loss),
        "mean": {"loss": loss, "accuracy": 0.75},
        "sd_over_folds": {"loss": 0.01, "accuracy": 0.1},
        "baselines": {"true mixture": 0.1},
    }
    (folder / "results.json").write_text(json.dumps(results))


def test_the_study_stands_beside_published_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "trials" / "a", 0.9, name="lstm", sort=True)
    write_run(tmp_path / "trials" / "b", 0.5, name="swarm")
    write_run(tmp_path / "trials" / "c", 0.7, name="swarm")
    (tmp_path / "trials" / "unfinished").mkdir()
    (tmp_path / "trials" / "unfinished" / "config.yaml").touch()
    trials = read_study(tmp_path, clustering_study.TASKS)
    runs = sorted(trials.values(), key=lambda results: results["mean"]["loss"])
    lines = clustering_study.markdown(runs).splitlines()
    assert len(lines) == 5
    assert "| swarm | none | 8 | 200 | 0.5000 ± 0.0100 | 0.750 | 0.1000 | " in lines[2]
    assert "0.416 ± 0.004 (192-10-1)" in lines[2]
    assert "| lstm_sorted |" in lines[4]
    assert "0.582 ± 0.006 (64-3)" in lines[4]
    clustering_study.draw(runs, tmp_path / "figure.png")
    picture = read_picture(tmp_path / "figure.png")
    assert all(share_of(color, picture) > 1e-4 for color in ("C0", "C1"))
