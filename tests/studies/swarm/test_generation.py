"""The SWARM transformer: causal, equal when run step by step, and its samples."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from helpers.pictures import read_picture, share_of
from helpers.tables import yaml_cases
from helpers.tasks import build_task
from marl_pool.utils.errors import InputError
from marl_pool_studies import image_task
from marl_pool_studies.images import Images
from marl_pool_studies.swarm.generation import (
    ImageGeneration,
    SwarmTransformer,
    sinusoids,
)

SHAPES = [(3, 3, 1), (2, 2, 3)]
shapes = pytest.mark.parametrize("shape", SHAPES)


def build(shape: Any, num_levels: int = 3, **options: Any) -> SwarmTransformer:
    small = {"width": 8, "units": 6, "iterations": 3, "num_classes": 2}
    return SwarmTransformer(shape, num_levels, **{**small, **options}).double()


def random_pixels(count: int, length: int, num_levels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(num_levels, (count, length), generator=generator)


@shapes
def test_no_logit_depends_on_its_own_pixel_or_a_later_one(shape: Any) -> None:
    length = math.prod(shape)
    network = build(shape, length)
    # No two pixels have the same level, so that the gradient of a level's
    # embedding is the gradient of a pixel.
    pixels, label = torch.arange(length)[None], torch.zeros(1, dtype=torch.int64)
    logits = network(pixels, label)[0]
    for i in range(length):
        output, weight = logits[i].square().sum(), network.intensities.weight
        (gradient,) = torch.autograd.grad(output, weight, retain_graph=True)
        influences = gradient.abs().sum(1) > 0
        assert influences.tolist() == [j < i for j in range(length)]


@shapes
@pytest.mark.parametrize("iterations", [1, 3])
def test_running_sums_give_the_same_as_the_whole_image(shape, iterations) -> None:
    network = build(shape, iterations=iterations)
    pixels = random_pixels(4, math.prod(shape))
    labels = torch.tensor([0, 1, 1, 0])
    expected = network(pixels, labels)
    context, memory = network.known(labels), network.empty_memory(4)
    with torch.no_grad():
        for place in range(math.prod(shape)):
            last = pixels[:, place - 1] if place else None
            logits = network.step(last, context[:, place], memory, place)
            torch.testing.assert_close(logits, expected[:, place])


def test_samples_have_the_probabilities_of_the_network() -> None:
    network = build((1, 3, 1), 2)
    weights = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.5, generator=weights)
    images = torch.tensor(list(itertools.product(range(2), repeat=3)))
    generator = torch.Generator().manual_seed(0)
    for label in range(2):
        labels = torch.full((4000,), label)
        log_probs = network(images, labels[:8]).log_softmax(-1)
        exact = log_probs.gather(2, images[..., None])[..., 0].sum(1).exp()
        assert exact.sum().item() == pytest.approx(1)
        samples = network.sample(labels, generator)
        assert samples.shape == (4000, 1, 3, 1)
        code = samples.flatten(1) @ torch.tensor([4, 2, 1])
        counts = code.bincount(minlength=8)
        expected = exact.detach() * 4000
        assert expected.min() > 5
        assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_a_class_changes_the_logits() -> None:
    pixels = random_pixels(2, 9)
    network = build((3, 3, 1))
    first, second = (network(pixels, torch.full((2,), label)) for label in range(2))
    assert not torch.allclose(first, second)


def test_places_are_sinusoids_of_row_and_column() -> None:
    places = sinusoids((2, 3, 2), 8)
    assert places.shape == (12, 8)
    # Channels of a pixel are at one place: row 1, column 2 has numbers 10 and 11.
    assert torch.equal(places[10], places[11])
    expected = []
    for cycles in (1, 3 / 2):  # an image, three pixels wide
        column, row = (2 * math.pi * cycles * place / 3 for place in (2, 1))
        expected += [math.sin(column), math.sin(row), math.cos(column), math.cos(row)]
    assert places[11].tolist() == pytest.approx(expected, abs=1e-6)
    assert not any(parameter is places for parameter in build((3, 3, 1)).parameters())


def test_places_are_the_published_location_features() -> None:
    """Made once by SWARM's `create_location_features_2d(4, 5, 12)`, row 3, column 2."""
    expected = [0.587785, -0.587786, -0.809017, -0.809017, -0.739443, -0.316874]
    expected += [-0.673219, 0.948468, 0.0, 0.0, 1.0, -1.0]
    assert sinusoids((4, 5, 1), 12)[17].tolist() == pytest.approx(expected, abs=2e-5)


def test_initial_weights_follow_from_the_seed() -> None:
    first, repeated, reseeded = (build((3, 3, 1), seed=seed) for seed in (1, 1, 2))
    states = (network.state_dict().values() for network in (first, repeated))
    pairs = zip(*states, strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(first.intensities.weight, reseeded.intensities.weight)


# The task


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Images:
    generator = torch.Generator().manual_seed(0)

    def pictures(count: int) -> Tensor:
        # The left half is dark, the right one anything.
        images = torch.randint(256, (count, 4, 4, 1), generator=generator)
        images[:, :, :2] = 0
        return images.to(torch.uint8)

    train, test = pictures(50), pictures(20)
    images = Images(train, torch.arange(50) % 3, test, torch.arange(20) % 3, 3)
    monkeypatch.setattr(image_task, "load_images", lambda *arguments: images)
    return images


def task(**options: Any) -> ImageGeneration:
    small = {"size": 4, "num_levels": 4, "width": 8, "units": 8, "iterations": 2}
    generation: ImageGeneration = build_task("generation", **{**small, **options})
    return generation


def prepared_task(tmp_path: Path, **options: Any) -> ImageGeneration:
    generation = task(**options)
    generation.prepare(tmp_path)
    return generation


def test_pixels_are_put_into_levels_along_the_scan_lines(data, tmp_path) -> None:
    generation = prepared_task(tmp_path, num_samples=30)
    assert (generation.num_train, generation.num_test) == (30, 20)
    batch = generation.batch("train", torch.tensor([7]))
    expected = [value // 64 for value in data.train[7].flatten().tolist()]
    assert batch["pixels"][0].tolist() == expected
    assert batch["labels"].tolist() == [1]


def test_bits_of_a_network_that_knows_nothing(data: Images, tmp_path: Path) -> None:
    generation = prepared_task(tmp_path)
    network = generation.make_network(0)
    for parameter in network.layer.output.parameters():
        torch.nn.init.zeros_(parameter)
    batch = generation.batch("test", torch.arange(20))
    outcome = generation.evaluate(network, batch, torch.Generator())
    assert outcome.metrics["bits_per_dim"].tolist() == pytest.approx([2.0] * 20)
    assert outcome.loss.item() == pytest.approx(math.log(4))


def test_baselines_by_hand(data: Images, tmp_path: Path) -> None:
    generation = prepared_task(tmp_path)
    rows = torch.arange(20)
    baselines = generation.baselines(generation.batch("test", rows))
    levels, tests = data.train.flatten(1) // 64, data.test.flatten(1) // 64
    for row in (0, 19):
        bits = [
            -math.log2(((levels[:, i] == tests[row, i]).sum().item() + 1) / 54)
            for i in range(16)
        ]
        assert baselines["pixels alone"][row].item() == pytest.approx(sum(bits) / 16)
    assert baselines["equal probabilities"].tolist() == [2.0] * 20


def test_it_learns_and_draws(data: Images, tmp_path: Path) -> None:
    generation = prepared_task(tmp_path)
    network = generation.make_network(0)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    batch = generation.batch("train", torch.arange(50))
    for _ in range(40):
        outcome = generation.evaluate(network, batch, torch.Generator())
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
    # Half of the pixels are always dark, of the others nothing can be known.
    assert outcome.metrics["bits_per_dim"].mean() < 1.2
    generator = torch.Generator().manual_seed(0)
    (file,) = generation.finish(network.eval(), tmp_path, generator)
    # Half of each sample is dark.
    assert share_of("black", read_picture(file)) > 0.1
    samples = network.sample(torch.arange(12) % 3, generator)
    assert (samples[:, :, :2] == 0).float().mean() > 0.9


@yaml_cases("options, message")
def test_what_does_not_fit_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        task(**options)
