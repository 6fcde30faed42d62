"""The KNN-centroid task: its distributions, its neighbors, its published baselines."""

import multiprocessing
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from helpers.tables import yaml_cases
from helpers.tasks import build_task
from marl_pool.files.atomic import locked
from marl_pool.utils.errors import InputError
from marl_pool_studies.adapool import knn_data as room
from marl_pool_studies.adapool.knn_centroid import KnnCentroid
from marl_pool_studies.adapool.knn_data import (
    CHUNK,
    Sets,
    Target,
    nearest_means,
    sample_choices,
    sample_sets,
    targets,
)

ENCODER = {"name": "transformer", "dim": 16, "num_layers": 12, "dim_ff": 64}
SMALL = {"num_vectors": 6, "dim": 4, "num_samples": 40, "num_test": 10}
KINDS = {0: stats.norm, 1: stats.expon, 2: stats.uniform}


def task(**options: Any) -> KnnCentroid:
    small = {"name": "transformer", "dim": 4, "num_heads": 2, "num_layers": 1}
    config = {"encoder": small, "pooling": {"name": "avg"}, **SMALL, **options}
    task: KnnCentroid = build_task("knn_centroid", **config)
    return task


# The sets


def kinds_and_parameters(
    monkeypatch: pytest.MonkeyPatch, num_vectors: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A chunk by feature ``(CHUNK, d, N)``, with each one's kind, place and width."""
    parameters = room._parameters

    def sampled_with(choose: Any) -> np.ndarray:
        # Parameters are drawn last, so these change no other number.
        def chosen_parameters(generator: Any, counts: list[int]) -> Any:
            value = choose(np.repeat([0, 1, 2], counts), *parameters(generator, counts))
            return value * dim**0.5, np.zeros(len(value))

        with monkeypatch.context() as patch:
            patch.setattr(room, "_parameters", chosen_parameters)
            return sample_sets(3, 0, num_vectors, dim)[:, 0]

    kind = sampled_with(lambda kind, location, scale: kind).round().astype(int)
    place = sampled_with(lambda kind, location, scale: location)
    width = sampled_with(lambda kind, location, scale: scale)
    sets = sample_sets(3, 0, num_vectors, dim).transpose(0, 2, 1)
    return sets * dim**0.5, kind, place, width


def test_each_feature_follows_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kind, place, width = kinds_and_parameters(monkeypatch, 64, 6)
    standard = (x - place[..., None]) / width[..., None]
    for number, distribution in KINDS.items():
        sample = standard[kind == number].ravel()
        assert stats.kstest(sample, distribution.cdf).pvalue > 1e-3, distribution.name
        alternatives = [KINDS[key].cdf for key in KINDS if key != number]
        assert all(stats.kstest(sample, cdf).pvalue < 1e-3 for cdf in alternatives)


def test_parameters_of_the_distributions() -> None:
    counts = [4000, 4000, 4000]
    location, scale = room._parameters(np.random.default_rng(0), counts)
    parts = (np.split(location, 3), np.split(scale, 3))
    normal, exponential, uniform = zip(*parts, strict=True)

    def is_uniform(sample: np.ndarray, low: float, high: float) -> bool:
        cdf = stats.uniform(low, high - low).cdf
        return bool(stats.kstest(sample, cdf).pvalue > 1e-3)

    assert is_uniform(normal[0], -3, 3)
    assert is_uniform(normal[1], 1, 3)
    assert is_uniform(uniform[0], -3, 3)
    assert is_uniform(uniform[1], 0.2, 3)
    sign = np.sign(exponential[1])
    assert abs(sign.mean()) < 4 / 4000**0.5
    assert is_uniform(exponential[1] * sign, 0.1, 2)
    assert is_uniform(-exponential[0] * sign, 0, 3)


@pytest.mark.parametrize("dim", [3, 7, 16])
def test_kinds_are_shared_out_evenly(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    _, kind, _, _ = kinds_and_parameters(monkeypatch, 4, dim)
    counts = np.stack([(kind == number).sum(1) for number in KINDS], 1)
    assert (np.sort(counts, 1)[:, 0] >= dim // 3).all()
    assert (np.sort(counts, 1)[:, 2] <= -(-dim // 3)).all()
    # In any order, and with the ones left over of any kind.
    at_each_place = [(kind == number).mean(0) for number in KINDS]
    assert np.abs(np.array(at_each_place) - 1 / 3).max() < 5 * (2 / 9 / CHUNK) ** 0.5
    if dim % 3:
        assert all(len(np.unique(counts[:, number])) == 2 for number in KINDS)


def test_chunks_depend_on_their_number_and_the_seed_alone() -> None:
    eighth, first = sample_sets(5, 7, 8, 4), sample_sets(5, 0, 8, 4)
    assert np.array_equal(first, sample_sets(5, 0, 8, 4))
    assert np.array_equal(eighth, sample_sets(5, 7, 8, 4, np.empty_like(eighth)))
    assert not np.array_equal(first, eighth)
    assert not np.array_equal(first, sample_sets(6, 0, 8, 4))


def test_the_samples_of_this_version_are_fixed() -> None:
    # Other numbers need another `VERSION`: files of sets on disk bear it.
    assert room.VERSION == 1
    sets = sample_sets(7, 2, 4, 3)
    assert sets[1, 0] == pytest.approx([-0.566855, -1.899991, 0.531733], abs=1e-6)
    assert sets.mean() == pytest.approx(0.154921, abs=1e-6)
    assert sample_choices(7, 300, 4)[:8].tolist() == [0, 3, 2, 3, 1, 2, 1, 0]


def test_target_points_are_uniform_and_a_prefix() -> None:
    choices = sample_choices(0, 5000, 8)
    assert np.array_equal(sample_choices(0, 100, 8), choices[:100])
    assert stats.chisquare(np.bincount(choices, minlength=8)).pvalue > 1e-3


# Targets


@given(st.integers(0, 2**31), st.integers(2, 9), st.integers(1, 5), st.data())
def test_neighbors_by_brute_force(seed: int, count: int, dim: int, data: Any) -> None:
    k = data.draw(st.integers(1, count))
    generator = np.random.default_rng(seed)
    sets = generator.normal(size=(4, count, dim)).astype(np.float32)
    choices = generator.integers(count, size=4)
    expected = []
    for vectors, choice in zip(sets.astype(float), choices, strict=True):
        neighbors = [i for i in range(count) if i != choice]
        neighbors.sort(key=lambda i: np.linalg.norm(vectors[i] - vectors[choice]))
        expected.append(vectors[neighbors[:k]].mean(0))
    np.testing.assert_allclose(nearest_means(sets, choices, k), expected, atol=1e-5)


def test_all_neighbors_are_the_others() -> None:
    sets, choices = sample_sets(0, 0, 8, 4), sample_choices(0, CHUNK, 8)
    means = nearest_means(sets, choices, 8)
    np.testing.assert_array_equal(means, nearest_means(sets, choices, 7))
    target_points = sets[np.arange(CHUNK), choices]
    np.testing.assert_allclose(means, (8 * sets.mean(1) - target_points) / 7, atol=1e-5)


def test_neighbors_that_tie_count_once() -> None:
    sets = np.array([[[0.0], [1.0], [-1.0], [1.0], [5.0]]], np.float32)
    (mean,) = nearest_means(sets, np.array([0]), 2)
    assert mean in ([0.0], [1.0])


@pytest.mark.parametrize(
    ("target", "function"), [("min", np.min), ("max", np.max), ("mean", np.mean)]
)
def test_aggregates(target: Target, function: Any) -> None:
    sets = sample_sets(0, 0, 8, 4)
    output = targets(sets, sample_choices(0, CHUNK, 8), target, 1)
    np.testing.assert_allclose(output, function(sets, axis=1), atol=1e-6)


TABLE_3 = {
    1: (0.093, 0.058),
    2: (0.071, 0.044),
    4: (0.055, 0.040),
    8: (0.043, 0.041),
    16: (0.031, 0.048),
    32: (0.020, 0.060),
    64: (0.008, 0.080),
    128: (0.000, 0.126),
}


def test_baselines_are_table_3s(tmp_path: Path) -> None:
    size = {"num_vectors": 128, "dim": 16, "num_samples": 8001, "num_test": 8000}
    knn_task = task(**size)
    knn_task.prepare(tmp_path)
    rows = torch.arange(8000)
    for knn_task.k, published in TABLE_3.items():
        errors = knn_task.baselines(knn_task.batch("test", rows))
        assert errors["centroid"].mean() == pytest.approx(published[0], abs=0.003)
        # Twice as far from the mean, the other one is less certain.
        assert errors["target"].mean() == pytest.approx(published[1], abs=0.004)


def test_the_constant_has_the_variance_of_the_right_answers(tmp_path: Path) -> None:
    knn_task = task(num_samples=4001, num_test=2000, k=4)
    knn_task.prepare(tmp_path)
    batch = knn_task.batch("test", torch.arange(2000))
    variance = float(batch["target"].var(0).mean())
    assert float(knn_task.baselines(batch)["constant"].mean()) == pytest.approx(
        variance, rel=0.01
    )


# Files of sets


def sets_in(folder: Path, **options: Any) -> Sets:
    shape = {"num_samples": 700, "num_vectors": 4, "dim": 3, "seed": 1}
    return Sets(folder, **(shape | options))


def test_a_file_holds_what_memory_would(tmp_path: Path, monkeypatch: Any) -> None:
    rows = np.array([699, 0, 3, 257, 3])
    in_memory = sets_in(tmp_path)
    assert in_memory.file is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(room, "IN_MEMORY", 0)
    stored = sets_in(tmp_path)
    assert stored.file is not None
    files = [file for file in tmp_path.iterdir() if file.suffix != ".lock"]
    assert files == [stored.file]
    expected = [sample_sets(1, row // CHUNK, 4, 3)[row % CHUNK] for row in rows]
    for sets in (in_memory, stored, sets_in(tmp_path, num_samples=1300)):
        np.testing.assert_array_equal(sets[rows], expected)


def test_a_file_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "IN_MEMORY", 0)
    rows = sets_in(tmp_path)[np.arange(5)]

    def refuse(*arguments: Any) -> None:
        raise AssertionError("drawn again")

    with monkeypatch.context() as patch:
        patch.setattr(room, "sample_sets", refuse)
        np.testing.assert_array_equal(sets_in(tmp_path)[np.arange(5)], rows)
        with pytest.raises(AssertionError, match="drawn again"):
            sets_in(tmp_path, seed=2)
    assert len(list(tmp_path.glob("[!.]*"))) == 1
    assert not list(tmp_path.glob("*.new")), "a part of a file was left"


def test_sets_that_another_run_is_making_are_waited_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(room, "IN_MEMORY", 0)
    complete = sets_in(tmp_path / "other")
    assert complete.file is not None
    file = tmp_path / complete.file.name
    # One that was killed leaves a part, which the next one removes; others' stay.
    leftover = tmp_path / f".{file.name}.{'0' * 16}.new"
    leftover.write_bytes(b"part")
    foreign = tmp_path / f".other.npy.{'0' * 16}.new"
    foreign.write_bytes(b"part")
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / f".{file.name}.lock", "is free"):
            waiting = pool.submit(sets_in, tmp_path)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
            file.write_bytes(complete.file.read_bytes())
            before = file.stat().st_mtime_ns
        waiting.result()
    assert file.stat().st_mtime_ns == before
    file.unlink()
    assert sets_in(tmp_path).file == file
    assert file.read_bytes() == complete.file.read_bytes()
    assert list(tmp_path.glob(".*.new")) == [foreign]


def test_a_folder_that_cannot_hold_the_sets(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(InputError, match="expected 4.* GB of space .*, got "):
        sets_in(tmp_path, num_samples=10**17)
    monkeypatch.setattr(room, "IN_MEMORY", 0)
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="cannot be written: .*taken"):
        sets_in(tmp_path / "taken")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((700, 4, 4), np.float32), r"of shape \(700, 4, 3\), got .* 4, 4\)"),
        (np.zeros((700, 4, 3)), "expected float32 .*, got float64 "),
        (1000, "cannot be read"),
        (0, "cannot be read"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(room, "IN_MEMORY", 0)
    file = sets_in(tmp_path).file
    assert file is not None
    if isinstance(content, int):
        file.write_bytes(file.read_bytes()[:content])
    else:
        np.save(file, content)
    with pytest.raises(InputError, match=message):
        sets_in(tmp_path)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _peak_of_many(folder: str) -> float:
    """Return the peak memory, in MB, of making and reading 164 MB of sets."""
    room.IN_MEMORY = 0
    sets = Sets(Path(folder), num_samples=20_000, num_vectors=128, dim=16, seed=0)
    for start in range(0, 20_000, 500):
        sets[np.arange(start, start + 500)]
    return _peak()


@pytest.mark.slow
def test_the_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before = pool.apply(_peak)
        assert pool.apply(_peak_of_many, (str(tmp_path),)) < before + 100


# The task


@pytest.mark.parametrize(("head", "count"), [("avg", 38_624), ("ada", 39_648)])
def test_number_of_parameters(head: str, count: int) -> None:
    network = task(dim=16, encoder=ENCODER, pooling={"name": head}).make_network(0)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def test_another_width_is_projected_to_and_back() -> None:
    wide = {**ENCODER, "dim": 32, "num_layers": 1}
    network = task(dim=16, encoder=wide).make_network(0)
    assert network(torch.zeros(2, 6, 16), torch.ones(2, 6).long()).shape == (2, 16)
    linear = {
        name
        for name, part in network.named_modules()
        if isinstance(part, torch.nn.Linear)
        and {part.in_features, part.out_features} == {16, 32}
    }
    assert linear == {"network.embedding.project", "output"}
    # The seed decides all weights.
    repeated, reseeded = (
        task(dim=16, encoder=wide).make_network(seed).state_dict() for seed in (0, 1)
    )
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, repeated[name])
        if name.startswith("output.weight") or "to_key" in name:
            assert not torch.equal(weight, reseeded[name])


def test_without_layers_the_prediction_is_the_pooled_sum() -> None:
    knn_task = task(encoder={"name": "identity", "dim": 4})
    knn_task.prepare(Path())
    network = knn_task.make_network(0)
    batch = knn_task.batch("train", torch.arange(5))
    table = network.network.embedding.types.weight
    expected = (batch["features"] + table[batch["types"]]).mean(1)
    predicted = network(batch["features"], batch["types"])
    torch.testing.assert_close(predicted, expected)
    outcome = knn_task.evaluate(network, batch, torch.Generator())
    error = (expected - batch["target"]).square().mean()
    torch.testing.assert_close(outcome.loss, error)
    torch.testing.assert_close(outcome.metrics["mse"].mean(), error.detach())


def test_rows_are_the_same_in_any_batch_and_no_row_is_in_both_splits(tmp_path) -> None:
    knn_task = task()
    knn_task.prepare(tmp_path)
    train_batch = knn_task.batch("train", torch.arange(knn_task.num_train))
    for row in (0, 7, knn_task.num_train - 1):
        single_row = knn_task.batch("train", torch.tensor([row]))
        for name, value in single_row.items():
            assert torch.equal(value[0], train_batch[name][row]), name
    test_batch = knn_task.batch("test", torch.arange(knn_task.num_test))
    features = torch.cat([test_batch["features"], train_batch["features"]]).flatten(1)
    assert len(features.unique(dim=0)) == SMALL["num_samples"]
    assert (train_batch["types"] == 0).sum(1).eq(1).all()


def test_a_target_of_the_whole_set_marks_no_vector() -> None:
    knn_task = task(target="max", pooling={"name": "ada"})
    knn_task.prepare(Path())
    batch = knn_task.batch("train", torch.arange(5))
    assert (batch["types"] == 1).all()
    assert knn_task.make_network(0).network.pooling.query == "mean"
    assert set(knn_task.baselines(batch)) == {"centroid", "constant"}
    assert task(pooling={"name": "ada"}).make_network(0).network.pooling.query == "self"


@yaml_cases("options, message")
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        task(**options)
