"""The hierarchical tasks: images to tokens and back, training, measures, pictures."""

import json
import math
from pathlib import Path
from typing import Any

import merging_study
import pytest
import torch
from torch import Tensor, nn

from helpers.pictures import read_picture, share_of
from helpers.tables import yaml_cases
from helpers.tasks import build_task
from marl_pool.config import compose
from marl_pool.runs.run import Run
from marl_pool.training.supervised.results import read_study
from marl_pool.utils.errors import InputError
from marl_pool_studies import image_task
from marl_pool_studies.hierarchical.choices import depth_probabilities
from marl_pool_studies.hierarchical.layers import Chance
from marl_pool_studies.hierarchical.networks import (
    ImageLayout,
    Patches,
    PixelQueries,
    fourier_positions,
    teacher_forced,
)
from marl_pool_studies.hierarchical.tasks import (
    MergedClassification,
    MergedImages,
    Reconstruction,
)
from marl_pool_studies.images import Images

SMALL = {
    **{"size": 8, "patch": 2, "fourier_bands": 3, "dim": 8, "num_heads": 2},
    **{"num_layers": 4, "levels": (0.5, 1.0), "data_dir": "unused"},
}


KINDS = {kind.name: kind for kind in (Reconstruction, MergedClassification)}


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bright squares in one of four quarters, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 40, (count, 8, 8, 1), generator=generator)
    labels = torch.randint(4, (count,), generator=generator)
    for image, label in zip(pictures, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 200
    return pictures.to(torch.uint8), labels


@pytest.fixture(autouse=True)
def loaded_images(monkeypatch: pytest.MonkeyPatch) -> None:
    quarter_images = Images(*images(80, 0), *images(24, 1), num_classes=4)
    monkeypatch.setattr(image_task, "load_images", lambda *_: quarter_images)


def task_and_network(
    kind: type[MergedImages] = Reconstruction, **options: Any
) -> tuple[MergedImages, Any]:
    task: MergedImages = build_task(kind.name, **{**SMALL, **options})
    task.prepare(Path("unused"))
    network = task.make_network(0)
    task.begin_epoch(network, 0, 1)
    return task, network


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def train(task: MergedImages, network: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    noise, losses = generator(), []
    network.train()
    for _ in range(steps):
        batch = task.batch("train", torch.arange(task.num_train))
        outcome = task.evaluate(network, batch, noise)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        (value, *_) = outcome.metrics.values()
        losses.append(float(value.mean()))
    return losses


# From images to tokens and back


def test_fourier_positions_by_hand() -> None:
    positions = fourier_positions(4, 6, 3)
    assert positions.shape == (4, 6, 14)
    y, x = -1 + 2 * 1 / 3, -1 + 2 * 4 / 5
    frequencies = [1 / 6, (1 / 6 + 2) / 2, 2.0]
    expected = [math.sin(2 * math.pi * y * f) for f in frequencies]
    expected += [math.cos(2 * math.pi * y * f) for f in frequencies]
    expected += [math.sin(2 * math.pi * x * f) for f in frequencies]
    expected += [math.cos(2 * math.pi * x * f) for f in frequencies]
    assert positions[1, 4].tolist() == pytest.approx([*expected, x, y], abs=1e-5)


def test_a_patch_sees_its_own_pixels_only() -> None:
    patches = Patches(ImageLayout((4, 6, 3), 2, 2), 5)
    image = torch.rand(1, 4, 6, 3, requires_grad=True)
    tokens = patches(image)
    assert tokens.shape == (1, 6, 5)
    for token in range(6):
        row, column = divmod(token, 3)
        output = tokens[0, token].sum()
        (gradient,) = torch.autograd.grad(output, image, retain_graph=True)
        expected = torch.zeros(4, 6, dtype=torch.bool)
        expected[2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = True
        assert torch.equal(gradient[0].abs().sum(-1) > 0, expected)


def test_pixels_do_not_depend_on_the_order_of_tokens() -> None:
    pixels = PixelQueries(ImageLayout((4, 6, 3), 2, 2), 8, 2).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    decoded = pixels(x)
    assert decoded.shape == (2, 4, 6, 3)
    torch.testing.assert_close(pixels(x.flip(1)), decoded)


# Training and measuring


@pytest.mark.slow
def test_it_learns_to_reconstruct() -> None:
    # Below what the mean image scores: it tells images apart.
    sizes = {"rho": 0.0, "dim": 32, "levels": (0.25,), "num_layers": 1}
    task, network = task_and_network(**sizes)
    losses = train(task, network, 80)
    mean_image = task.baselines(task.batch("train", torch.arange(80)))["mean_image"]
    assert losses[-1] < 0.7 * float(mean_image.mean())


@pytest.mark.parametrize(
    "options",
    [
        {"log_prob": "unmasked", "credit": "batch"},
        {"baseline": True, "through_tokens": True, "policy_heads": 2},
        {"gradient": "scaling"},
        {"attention": False, "policy": "random"},
        {"token_noise": 1.0, "token_penalty": 0.01, "proportional": True},
        {"pretrain_epochs": 1},
        {"schedule": (4, 3)},
        {"policy": "shared_keys"},
        {"policy": "heuristic"},
    ],
)
def test_every_variant_trains_all_its_parts(options: dict[str, Any]) -> None:
    task, network = task_and_network(**options)
    before = {name: part.clone() for name, part in network.named_parameters()}
    assert all(map(math.isfinite, train(task, network, 3)))
    for group in ("patches.", "encoder.layer.merge.", "decoder.unmerge.", "pixels."):
        changes = [
            not torch.equal(part, before[name])
            for name, part in network.named_parameters()
            if name.startswith(group)
        ]
        assert any(changes), group
    network.eval()
    batch = task.batch("test", torch.arange(task.num_test))
    assert task.evaluate(network, batch, generator()).loss.isfinite()


def test_levels_are_measured_each() -> None:
    task, network = task_and_network()
    network.eval()
    batch = task.batch("test", torch.arange(task.num_test))
    metrics = task.evaluate(network, batch, generator()).metrics
    # 16 tokens: 4, 3, 2 and 1 merge, or 8, 4, 2 and 1.
    assert [level.tokens for level in task.measured] == [6, 1]
    assert set(metrics) == {"mse", "mse_6", "mse_1", "policy_information"}
    mean = (metrics["mse_6"] + metrics["mse_1"]) / 2
    torch.testing.assert_close(metrics["mse"], mean)
    assert (metrics["policy_information"] >= 0).all()
    chance = Chance(generator(), explore=False)
    output = network(batch["images"] / 255, task.measured[1].schedule, chance).output
    expected = (output - batch["images"] / 255).square().mean((1, 2, 3))
    torch.testing.assert_close(metrics["mse_1"], expected)


def test_the_penalty_is_added_to_the_loss() -> None:
    outcomes = []
    for weight in (0.0, 0.1):
        task, network = task_and_network(token_penalty=weight, policy="random")
        batch = task.batch("train", torch.arange(8))
        outcome = task.evaluate(network.train(), batch, generator())
        outcomes.append(float(outcome.loss.detach()))
    assert outcomes[1] > outcomes[0]


def test_rho_grows_with_the_epochs() -> None:
    task, network = task_and_network(rho=0.05, rho_step=0.01)
    for epoch, rho in ((0, 0.05), (1, 0.06), (200, 1.0)):
        task.begin_epoch(network, epoch, 1)
        expected = depth_probabilities(rho, task.num_layers)
        torch.testing.assert_close(task.depths[0], expected)


def test_initial_weights_follow_from_the_seed() -> None:
    task, network = task_and_network()
    for seed, same in ((0, True), (1, False)):
        reseeded = task.make_network(seed)
        pairs = zip(network.parameters(), reseeded.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) == same


@pytest.mark.parametrize("kind", [Reconstruction, MergedClassification])
@pytest.mark.parametrize("policy", ["random", "heuristic", "shared_keys"])
def test_methods_have_common_weights(kind: type[MergedImages], policy: str) -> None:
    _, base_network = task_and_network(kind)
    _, network = task_and_network(kind, policy=policy)
    base, variant = base_network.state_dict(), network.state_dict()
    common = base.keys() & variant.keys()
    assert any(".policy." in name for name in base.keys() - variant.keys())
    assert len(common) >= len(variant) - 1
    assert any(base[name].dim() == 2 and base[name].std() > 0 for name in common)
    for name in common:
        torch.testing.assert_close(base[name], variant[name], rtol=0, atol=0)


def test_the_mean_image_is_the_baseline() -> None:
    task, _ = task_and_network()
    mean = task.batch("train", torch.arange(80))["images"].double().mean(0) / 255
    batch = task.batch("test", torch.arange(3))
    expected = (batch["images"] / 255 - mean).square().mean((1, 2, 3)).float()
    torch.testing.assert_close(task.baselines(batch)["mean_image"], expected)


def test_it_learns_to_classify_from_one_token() -> None:
    options = {"rho": 1.0, "levels": (1.0,), "dim": 16}
    task, network = task_and_network(MergedClassification, **options)
    train(task, network, 40)
    network.eval()
    batch = task.batch("test", torch.arange(task.num_test))
    metrics = task.evaluate(network, batch, generator()).metrics
    common = task.baselines(batch)["most_common_class"]
    assert float(metrics["error_1"].mean()) < 0.5 * float(common.mean())


# Teacher forcing


def test_teacher_forcing_compares_each_token_with_its_original() -> None:
    """With a decoder that undoes merges exactly, only the pixels' error is left."""
    task, network = task_and_network(attention=False, policy="random")
    network.double()
    merged: list[Tensor] = []

    def remember(x: Tensor) -> Tensor:
        merged.append(x)
        return x[..., :8]

    depths = iter([1, 2])
    encodings = [
        network.encoder.entrance(torch.zeros(1, 1, 8), d, None)[0] for d in (1, 2)
    ]

    def undo(x: Tensor) -> Tensor:
        encoding = encodings[next(depths) - 1].double()[..., :8]
        return merged[-1] - torch.cat([encoding, encoding], -1)

    network.encoder.layer.merge = _Function(remember)
    network.decoder.unmerge = _Function(undo)
    network.decoder.entrance = lambda x, *_: (x, torch.zeros(len(x)))
    network.encoder.entrance = lambda x, depth, _: (
        x + encodings[depth - 1].to(x),
        torch.zeros(len(x)),
    )
    pictures = task.batch("train", torch.arange(5))["images"].double() / 255
    chance = Chance(generator(), explore=True)
    outcome = teacher_forced(network, pictures, [4, 2], chance)
    direct = network.pixels(network.patches(pictures)) - pictures
    untouched = outcome.losses - direct.square().mean((1, 2, 3))
    # Tokens that did not merge keep the layer's encoding; the others are restored.
    shares = [8 / 16, 8 / 12]
    sizes = [float(encoding.double().square().mean()) for encoding in encodings]
    expected = sum(a * b for a, b in zip(shares, sizes, strict=True)) / 2
    torch.testing.assert_close(untouched, torch.full((5,), expected).double())


class _Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def test_unmerging_learns_which_tokens_were_merged() -> None:
    """Its cross-entropy is over the last tokens, which are the merged ones."""
    task, network = task_and_network(attention=False)
    nn.init.zeros_(network.decoder.score[2].weight)
    pictures = task.batch("train", torch.arange(5))["images"] / 255
    chance = Chance(generator(), explore=True)
    outcome = teacher_forced(network, pictures, [4], chance)
    outcome.unmerging.sum().backward()
    assert network.decoder.score[2].weight.grad.any()
    assert network.encoder.layer.merge[0].weight.grad is None
    # All scores are zero, so each of 12 is as likely.
    torch.testing.assert_close(outcome.unmerging, torch.full((5,), math.log(12)))


def test_teacher_forcing_trains_the_merging_policy_by_reinforce() -> None:
    task, network = task_and_network()
    pictures = task.batch("train", torch.arange(5))["images"] / 255
    chance = Chance(generator(), explore=True)
    teacher_forced(network, pictures, [4, 2], chance).score.sum().backward()
    policy = {id(part) for part in network.encoder.layer.policy.parameters()}
    for name, parameter in network.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.any())
        assert has_gradient == (id(parameter) in policy), name


# Pictures


def test_pictures_are_written_to_the_folder(tmp_path: Path) -> None:
    task, network = task_and_network(patch=4)
    files = task.finish(network, tmp_path, generator())
    names = ["policies.png", "reconstructions.png"]
    assert [file.name for file in files] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    task, network = task_and_network(MergedClassification, patch=4)
    (policies,) = task.finish(network, tmp_path, generator())
    assert policies.name == names[0]


def test_one_token_has_nothing_to_merge(tmp_path: Path) -> None:
    task, network = task_and_network(patch=8)
    assert all(map(math.isfinite, train(task, network, 2)))
    batch = task.batch("test", torch.arange(3))
    metrics = task.evaluate(network.eval(), batch, generator()).metrics
    assert set(metrics) == {"mse", "mse_1"}
    (picture,) = task.finish(network, tmp_path, generator())
    assert picture.name == "reconstructions.png"


# Refusals


@yaml_cases("kind, options, message")
def test_unfit_options_are_refused(kind: str, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        task_and_network(KINDS[kind], **options)


def test_a_sweep_is_grouped_over_seeds(tmp_path: Path) -> None:
    trials = [
        ("learned", "own", 0.1, 0.1),
        ("learned", "own", 0.1, 0.3),
        ("learned", "batch", 0.1, 0.4),
        ("random", "own", 0.1, 0.5),
        ("random", "own", 0.2, 0.6),
    ]
    for number, (policy, credit, lr, error) in enumerate(trials):
        options = [f"task.policy={policy}", f"task.credit={credit}", f"fit.lr={lr}"]
        words = ["task=reconstruction", "scale=tiny", f"seed={number}", *options]
        path = tmp_path / "trials" / str(number)
        run = Run.create(path, compose("fit", words), "fit")
        trial = {"task": run.config["task"], "metric": "mse", "mean": {"mse": error}}
        (run.path / "results.json").write_text(json.dumps(trial))
    groups = merging_study.grouped(read_study(tmp_path, merging_study.TASKS))
    assert groups == {
        "learned, credit=own, fit.lr=0.1": {"mse": [0.1, 0.3]},
        "learned, credit=batch, fit.lr=0.1": {"mse": [0.4]},
        "random, credit=own, fit.lr=0.1": {"mse": [0.5]},
        "random, credit=own, fit.lr=0.2": {"mse": [0.6]},
    }
    row = "| learned, credit=own, fit.lr=0.1 | 0.2000 ± 0.1414 |"
    assert row in merging_study.markdown(groups)
    merging_study.draw(groups, "mse", "title", tmp_path / "study.png")
    picture = read_picture(tmp_path / "study.png")
    assert share_of("#6c9fc9", picture) > 3e-4  # the runs, half transparent


@pytest.mark.parametrize("task", KINDS)
def test_the_published_size_has_the_published_estimator(task):
    for scale, estimator in (("paper", "unmasked batch"), ("cpu", "masked own")):
        options = compose("fit", [f"task={task}", f"scale={scale}"])["task"]
        assert [options["log_prob"], options["credit"]] == estimator.split()
