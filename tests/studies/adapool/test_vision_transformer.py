"""The vision transformer of `task=images` against the published one; augmentation."""

import csv
import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.image_files import cifar_contents, write_cifar
from helpers.paths import GOLDEN_FILES
from helpers.shared_data import shared_data
from helpers.tables import yaml_cases
from marl_pool.config import compose
from marl_pool.kernels.attention import MultiHeadAttention
from marl_pool.pooling import make_pooling, pooling_names
from marl_pool.runs.run import Run
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.jobs import config_of
from marl_pool.training.supervised.fit import fit, make_task
from marl_pool.training.supervised.learner import generator_of
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.training.supervised.task import Split
from marl_pool.utils.errors import InputError
from marl_pool_studies.adapool.image_classification import (
    ImageClassification,
    VisionOptions,
    VisionTransformer,
)
from marl_pool_studies.images import (
    NORMALIZATION,
    SOURCES,
    Normalization,
    PatchEmbedding,
    load_images,
    patches,
    random_crops,
    random_flips,
)

ARCHIVE = SOURCES["cifar10"][0].name
GOLDEN = GOLDEN_FILES / "vision_transformer.json"
DROPOUT = ("dropout", "attention_dropout", "embedding_dropout")
PUBLISHED = VisionOptions(
    **dict.fromkeys(DROPOUT, 0.1),
    **dict.fromkeys(("patch_norms", "classifier_norm", "scale_residual_init"), True),
    position_std=1.0,
    class_token_init="uniform",
)
HEADS: dict[str, dict[str, Any]] = {
    "avg": {"name": "avg"},
    "max": {"name": "max"},
    "cls": {"name": "cls"},
    # The published code adds the query only if it is a single token's.
    "ada mean": {"name": "ada", "query": "mean", "residual": False},
    "ada focal": {"name": "ada", "query": [5, 6, 9, 10], "residual": False},
    "ada corner": {"name": "ada", "query": [0], "residual": True},
}
"""Those of Table 1, on a square of four by four patches."""


def spec_of(count: int, features: int) -> TokenSpec:
    types = tuple(f"place_{number}" for number in range(count))
    return TokenSpec(count, features, types, has_self=False, dtype="uint8")


def tiny_network(
    head: dict[str, Any], options: VisionOptions = PUBLISHED, **encoder: Any
) -> VisionTransformer:
    """Two layers of width 16 on images of four by four patches of two by two pixels."""
    part = {"name": "transformer", "dim": 16, "num_layers": 2, "num_heads": 4}
    part |= {"dim_ff": 64, "final_norm": True, **encoder}
    pooling = {"num_heads": 4, **head} if head["name"] == "ada" else head
    parts = {"encoder": part, "pooling": pooling, "options": options}
    normalization = NORMALIZATION["cifar10"]
    spec = spec_of(16, 12)
    return VisionTransformer(spec, 10, **parts, normalization=normalization, seed=0)


def tiny_images() -> Tensor:
    return (torch.arange(2 * 8 * 8 * 3) * 37 % 256).to(torch.uint8).view(2, 8, 8, 3)


# The published network


def published_parameter(name: str, shape: tuple[int, ...]) -> Tensor:
    """Reproducible values for a parameter, determined by its published name."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    phase = 1 + 12.9898 * sum(map(ord, name))
    values = 0.3 * torch.sin(phase + 78.233 * index).view(shape)
    norms = ("to_patch_embedding.1", "to_patch_embedding.3", "classifier.0")
    is_norm = "norm" in name or name.startswith(norms)
    return values + 1 if is_norm and name.endswith("weight") else values


def attention_pairs(source: str, target: str, dim: int) -> dict[str, Tensor]:
    """In the published code one matrix holds keys and values."""
    key_value = published_parameter(f"{source}.KV.weight", (2 * dim, dim))
    square = (dim, dim)
    return {
        f"{target}.to_query.weight": published_parameter(f"{source}.Q.weight", square),
        f"{target}.to_key.weight": key_value[:dim],
        f"{target}.to_value.weight": key_value[dim:],
        f"{target}.to_out.weight": published_parameter(f"{source}.out.weight", square),
    }


def with_published_parameters(network: VisionTransformer) -> VisionTransformer:
    """Give a network the parameters of the published one."""
    names = {
        "pooled.embedding.norms.0": "to_patch_embedding.1",
        "pooled.embedding.project": "to_patch_embedding.2",
        "pooled.embedding.norms.1": "to_patch_embedding.3",
        "pooled.encoder.final_norm": "attenuator.transformer.encoder.norm",
        "norm": "classifier.0",
        "scores": "classifier.1",
    }
    state: dict[str, Tensor] = {}
    initial = network.state_dict()
    dim = len(initial["norm.weight"])
    for layer in range(2):
        target = f"pooled.encoder.layers.{layer}"
        source = f"attenuator.transformer.encoder.layers.{layer}"
        names[f"{target}.attention_norm"] = f"{source}.norm_attn"
        names[f"{target}.feedforward_norm"] = f"{source}.norm_ff"
        names[f"{target}.feedforward.0"] = f"{source}.ff.l_in"
        names[f"{target}.feedforward.2"] = f"{source}.ff.l_out"
        state |= attention_pairs(f"{source}.attn", f"{target}.attention", dim)
    for target, source in names.items():
        for kind in ("weight", "bias"):
            shape = tuple(initial[f"{target}.{kind}"].shape)
            state[f"{target}.{kind}"] = published_parameter(f"{source}.{kind}", shape)
    places = published_parameter("pos_embd", (1, 16, dim))
    state["pooled.embedding.types.weight"] = places[0]
    if "pooled.pooling.tokens" in initial:
        token = published_parameter("attenuator.pool.cls_token", (1, 1, dim))
        state["pooled.pooling.tokens"] = token[0]
    if "pooled.pooling.attention.to_out.weight" in initial:
        head = "attenuator.pool.attn"
        state |= attention_pairs(head, "pooled.pooling.attention", dim)
    network.load_state_dict(state)
    return network


@pytest.fixture
def in_float64():
    """Convert a network to float64, including its constants."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.usefixtures("in_float64")
def test_equal_weights_give_the_published_logits(head):
    """Only the published corner query is added to the result."""
    expected = torch.tensor(json.loads(GOLDEN.read_text())["logits"][head])
    published = HEADS[head]
    variants = [published]
    if "residual" in published:
        variants.append({**published, "residual": not published["residual"]})
    for part in variants:
        network = with_published_parameters(tiny_network(part)).eval()
        logits = network(patches(tiny_images(), 2))
        assert logits.allclose(expected, rtol=0, atol=1e-12) == (part == published)


@pytest.mark.parametrize("norm", ["patch_norms", "classifier_norm", "final_norm"])
@pytest.mark.usefixtures("in_float64")
def test_each_norm_has_a_part_in_the_logits(norm):
    complete = tiny_network(HEADS["avg"]).eval()
    if norm == "final_norm":
        lacking = tiny_network(HEADS["avg"], final_norm=False)
    else:
        lacking = tiny_network(HEADS["avg"], replace(PUBLISHED, **{norm: False}))
    weights = complete.state_dict()
    lacking.load_state_dict({name: weights[name] for name in lacking.state_dict()})
    cut = patches(tiny_images(), 2)
    assert not complete(cut).allclose(lacking.eval()(cut), atol=1e-3)


def image_config(*overrides: str) -> dict[str, Any]:
    return compose("fit", ["task=images", "data_dir=data", *overrides])


def of_paper(*overrides: str) -> VisionTransformer:
    """The network of scale=paper; needs no images."""
    task = make_task(FitConfig.from_plain(image_config("scale=paper", *overrides)))
    assert isinstance(task, ImageClassification)
    task.num_classes = 10
    task.shape = (32, 32, 3)
    network = task.make_network(0)
    assert isinstance(network, VisionTransformer)
    return network


@pytest.mark.parametrize(
    ("head", "parameters"),
    [
        # Counted once on the published network, without the parameters that it has and
        # never uses: 512 of a second class token, and with ClsToken an attention.
        ("pooling=avg", 18_968_170),
        ("pooling=max", 18_968_170),
        ("pooling=cls", 18_968_682),
        ("pooling=ada pooling.query=[0]", 20_016_746),
        ("pooling=ada pooling.query=[27,28,35,36]", 20_016_746),
        ("pooling=ada pooling.query=mean", 20_016_746),
    ],
)
def test_the_paper_has_as_many_parameters(head, parameters):
    with torch.device("meta"):  # nothing is drawn: only shapes matter
        network = of_paper(*head.split())
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_initial_weights_are_the_papers():
    small = ["encoder.dim=256", "encoder.dim_ff=512"]
    network = of_paper("pooling=ada", *small)
    ends = {"to_out.weight", "feedforward.2.weight"}
    for name, value in network.named_parameters():
        std = 0.02 / math.sqrt(12) if name.endswith(tuple(ends)) else 0.02
        if "norm" in name:
            assert value.eq(float(name.endswith("weight"))).all(), name
        elif name.endswith("bias"):
            assert value.eq(0).all(), name
        elif name == "pooled.embedding.types.weight":
            assert value.std().item() == pytest.approx(1, abs=0.03)
        else:
            assert value.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(value.mean()) < 0.1 or "norm" in name
    token = of_paper("pooling=cls", *small).pooled.pooling.tokens
    assert 0 <= token.min() < 0.05
    assert 0.95 < token.max() < 1


def test_options_of_initial_weights_leave_the_others_alone():
    plain = tiny_network(HEADS["cls"], VisionOptions()).state_dict()
    published = tiny_network(HEADS["cls"]).state_dict()
    changed = {name for name in plain if not plain[name].equal(published[name])}
    layers = [f"pooled.encoder.layers.{layer}" for layer in range(2)]
    assert changed == {
        "pooled.embedding.types.weight",
        "pooled.pooling.tokens",
        *(f"{layer}.attention.to_out.weight" for layer in layers),
        *(f"{layer}.feedforward.2.weight" for layer in layers),
    }


def test_other_encoders_have_no_ends_to_scale():
    parts = {"encoder": {"name": "swarm", "dim": 16}, "pooling": {"name": "ada"}}
    for scaled in (False, True):
        options = replace(PUBLISHED, scale_residual_init=scaled)
        parts["options"] = options
        network = VisionTransformer(spec_of(16, 12), 10, **parts, seed=0)
        std = network.pooled.pooling.attention.to_out.weight.std().item()
        assert std == pytest.approx(0.02, rel=0.2)


def test_the_paper_has_every_option_and_other_scales_have_none():
    keys = (
        *("crop_padding", "flip_probability", "normalize", "patch_norms"),
        *("classifier_norm", "embedding_dropout", "attention_dropout"),
        *("position_std", "scale_residual_init", "class_token_init"),
    )
    paper = image_config("scale=paper")
    assert [paper["task"][key] for key in keys] == [
        *(4, 0.5, True, True, True, 0.1, 0.1, 1.0, True, "uniform")
    ]
    assert paper["encoder"]["dim_ff"] == 2048
    assert paper["encoder"]["final_norm"]
    assert paper["fit"]["dropout"] == 0.1
    for scale in ("tiny", "cpu"):
        smaller = image_config(f"scale={scale}")
        assert [smaller["task"][key] for key in keys] == [
            *(0, 0.0, False, False, False, 0.0, 0.0, None, False, "normal")
        ]
        assert not smaller["encoder"]["final_norm"]


# Dropout


@pytest.mark.parametrize("option", DROPOUT)
def test_dropout_acts_while_training_only(option):
    network = tiny_network(HEADS["ada corner"], VisionOptions(**{option: 0.5}))
    cut = patches(tiny_images(), 2)
    first, second = network(cut), network(cut)
    assert not first.equal(second)
    network.eval()
    assert network(cut).equal(network(cut))


def test_attention_drops_weights_and_results():
    torch.manual_seed(0)
    dim, count, share = 64, 64, 0.25
    attention = MultiHeadAttention(dim, 1, dropout=share)
    for part in (attention.to_value, attention.to_out):
        nn.init.eye_(part.weight)
    nn.init.zeros_(attention.to_query.weight)  # so all weights are 1 / count
    # Values are unit vectors: the result lists the weights themselves.
    x = torch.eye(count).expand(50, -1, -1)
    output = attention(x, x) * count
    survival = (1 - share) ** 2
    # A number survives both drops or neither, and is enlarged for both.
    assert output[output != 0].allclose(torch.tensor(1 / survival))
    assert (output != 0).float().mean().item() == pytest.approx(survival, abs=0.01)
    assert attention.eval()(x, x).allclose(torch.tensor(1 / count))


def test_dropout_of_attention_leaves_the_residual():
    options = {"residual": True, "attention_dropout": 0.999999}
    head = make_pooling("ada", dim=8, query=[0], **options)
    x = torch.randn(3, 5, 8)
    assert head(x).equal(x[:, 0])
    assert not head.eval()(x).allclose(x[:, 0])


@pytest.mark.parametrize("dim", [8, 64])  # narrow attention takes another path
def test_narrow_and_wide_attention_drop(dim):
    attention = MultiHeadAttention(dim, 8, dropout=0.5)
    x = torch.randn(4, 6, dim)
    assert not attention(x, x).equal(attention(x, x))
    with pytest.raises(InputError, match=r"attention_dropout: .* got 1.0"):
        MultiHeadAttention(dim, dropout=1.0)


@pytest.mark.parametrize("pooling", pooling_names())
def test_every_head_learns_with_the_papers_options(pooling):
    torch.manual_seed(0)
    network = tiny_network({"name": pooling})
    scores = network(patches(tiny_images(), 2))
    nn.functional.cross_entropy(scores, torch.tensor([1, 2])).backward()
    largest = {
        name: float(part.grad.abs().max())
        for name, part in network.named_parameters()
        if part.grad is not None
    }
    assert all(map(math.isfinite, largest.values()))
    assert largest["pooled.embedding.project.weight"] > 0
    head = [name for name, _ in network.named_parameters() if ".pooling." in name]
    assert not head or any(largest.get(name, 0) > 0 for name in head)


# Normalization


@pytest.mark.parametrize(
    ("dataset", "mean", "std"),
    [
        # Of the published loaders.
        ("cifar10", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ("cifar100", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    ],
)
def test_cifar_is_normalized_by_the_published_constants(dataset, mean, std):
    assert NORMALIZATION[dataset] == Normalization(mean, std)
    words = ("scale=paper", f"task.dataset={dataset}", "pooling=avg")
    task = make_task(FitConfig.from_plain(image_config(*words)))
    assert isinstance(task, ImageClassification)
    assert task.normalization == (mean, std)


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_other_sets_are_normalized_by_their_own_pixels(dataset):
    images = load_images(dataset, shared_data("data")).train
    values = images.flatten().bincount(minlength=256)
    shares, levels = values.double() / values.sum(), torch.arange(256) / 255
    mean = (shares * levels).sum()
    std = (shares * (levels - mean).square()).sum().sqrt()
    # Four digits are written down.
    assert NORMALIZATION[dataset].mean == pytest.approx([mean.item()], abs=5e-5)
    assert NORMALIZATION[dataset].std == pytest.approx([std.item()], abs=5e-5)


def test_channels_are_normalized_each_by_its_own():
    constants = Normalization((0.0, 0.5, 1.0), (1.0, 2.0, 4.0))
    embedding = PatchEmbedding(spec_of(4, 12), None, normalization=constants)
    nn.init.zeros_(embedding.types.weight)
    image = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 4, 4, 3)
    cut = patches(image, 2)
    zeros = torch.zeros(cut.shape[:2], dtype=torch.long)
    embedded = embedding(Tokens(cut, zeros, zeros.bool()))
    assert embedded.unflatten(-1, (4, 3)).allclose(torch.tensor([0.0, -0.15, 0.0]))


# Augmentation

pixels = st.integers(1, 6)


@given(pixels, pixels, st.integers(0, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_a_crop_is_a_window_of_the_padded_image(height, width, padding, channels, seed):
    images = torch.randint(1, 256, (5, height, width, channels)).to(torch.uint8)
    crops = random_crops(images, padding, torch.Generator().manual_seed(seed))
    assert crops.shape == images.shape
    assert crops.dtype == torch.uint8
    border = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    bordered = np.pad(images.numpy(), border)
    for crop, padded in zip(crops.numpy(), bordered, strict=True):
        windows = [
            padded[y : y + height, x : x + width]
            for y in range(2 * padding + 1)
            for x in range(2 * padding + 1)
        ]
        assert any((crop == window).all() for window in windows)


def test_crops_are_uniform_over_their_places():
    # A single bright pixel says where the window was.
    padding, count = 2, 20_000
    images = torch.zeros(count, 5, 5, 1, dtype=torch.uint8)
    images[:, 2, 2] = 255
    crops = random_crops(images, padding, torch.Generator().manual_seed(0))
    shares = crops.float().mean(0)[..., 0] / 255
    # Five times the standard deviation of a share: sqrt(p (1 - p) / count).
    assert shares.allclose(torch.tensor(1 / 25), atol=5 * math.sqrt(0.0384 / count))


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_flip_mirrors_left_and_right(seed, probability):
    images = torch.arange(4 * 3 * 5 * 2).view(4, 3, 5, 2).to(torch.uint8)
    flips = random_flips(images, probability, torch.Generator().manual_seed(seed))
    for flipped, image in zip(flips, images, strict=True):
        is_same, is_flipped = flipped.equal(image), flipped.equal(image.flip(1))
        assert is_same or is_flipped
        assert is_flipped or probability < 1
        assert is_same or probability > 0


@pytest.mark.parametrize("probability", [0.2, 0.5])
def test_flips_have_their_probability(probability):
    count = 20_000
    images = torch.tensor([0, 1], dtype=torch.uint8).expand(count, 1, 2)[..., None]
    flipped = random_flips(images, probability, torch.Generator().manual_seed(0))
    share = flipped[:, 0, 0, 0].float().mean().item()
    spread = math.sqrt(probability * (1 - probability) / count)
    assert share == pytest.approx(probability, abs=5 * spread)


def cifar_task(folder: Path, *overrides: str) -> ImageClassification:
    """The tiny task on fifteen images in the form of CIFAR-10."""
    write_cifar(folder / ARCHIVE, "cifar10", cifar_contents("cifar10"))
    words = [*AUGMENTED, f"data_dir='{folder}'", "pooling=avg", *overrides]
    task = make_task(FitConfig.from_plain(compose("fit", words)))
    assert isinstance(task, ImageClassification)
    task.prepare(folder)
    return task


AUGMENTED = (
    *("task=images", "scale=tiny", "task.dataset=cifar10", "threads=1"),
    *("task.num_samples=null", "task.num_test=null", "fit.batch_size=4"),
    *("task.crop_padding=4", "task.flip_probability=0.5", "task.normalize=true"),
    *("task.attention_dropout=0.1", "task.embedding_dropout=0.1", "fit.dropout=0.1"),
)


class Recorder(nn.Module):
    """A network that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.patches: Tensor | None = None

    def forward(self, cut: Tensor) -> Tensor:
        self.patches = cut
        return torch.zeros(len(cut), 10)


def network_input(
    task: ImageClassification, training: bool, seed: int = 0, split: Split = "train"
) -> Tensor:
    """Return a network's input for the 15 training images, or for the 3 test images."""
    recorder = Recorder().train(training)
    rows = torch.arange(15 if split == "train" else 3)
    generator = torch.Generator().manual_seed(seed)
    task.evaluate(recorder, task.batch(split, rows), generator)
    assert recorder.patches is not None
    return recorder.patches


def test_only_training_sees_crops_and_flips(tmp_path):
    task = cifar_task(tmp_path)
    plain = patches(task.batch("train", torch.arange(15))["images"], task.patch)
    assert network_input(task, training=False).equal(plain)
    augmented = network_input(task, training=True)
    assert not augmented.equal(plain)
    assert augmented.equal(network_input(task, training=True))
    assert not augmented.equal(network_input(task, training=True, seed=1))
    tested = network_input(task, training=False, split="test")
    images = load_images("cifar10", tmp_path).test
    assert tested.equal(patches(images, task.patch))
    without = cifar_task(tmp_path, "task.crop_padding=0", "task.flip_probability=0")
    assert network_input(without, training=True).equal(plain)


def test_a_resumed_run_continues_with_the_same_crops(tmp_path):
    file = tmp_path / ARCHIVE
    write_cifar(file, "cifar10", cifar_contents("cifar10"))

    def fitted(name: str, *overrides: str, stops: bool = False):
        """The weights and the logged losses of a run that stops after two epochs."""
        data = (f"data_dir='{tmp_path}'", "pooling=ada")
        epochs = ("fit.epochs=4", "fit.folds=1", "fit.validation=0.2")
        config = compose("fit", [*AUGMENTED, *data, *epochs, *overrides])
        requests = iter([False, False, True])
        path = tmp_path / name
        with closing(Run.create(path, config, "fit")) as run:
            should_stop = (lambda: next(requests)) if stops else lambda: False
            fit(run, config_of(run), should_stop)
            assert (path / "results.json").exists() is not stops
        if stops:
            with closing(Run.open(path)) as run:
                fit(run, config_of(run))
        with (path / "metrics.csv").open() as log:
            losses = [row["loss"] for row in csv.DictReader(log)]
        return load_file(path / "networks" / "fold_0.safetensors"), losses

    weights, losses = fitted("straight")
    resumed, resumed_losses = fitted("resumed", stops=True)
    assert len(losses) == 4
    assert losses == resumed_losses
    assert all(weights[name].equal(resumed[name]) for name in weights)
    _, changed = fitted("other", "task.crop_padding=0", "task.flip_probability=0")
    assert losses != changed


def test_each_epoch_has_a_separate_random_stream():
    first, second = (generator_of(0, "learn", 0, epoch) for epoch in (0, 1))
    images = torch.arange(64).view(1, 8, 8, 1).to(torch.uint8).expand(9, -1, -1, -1)
    assert not random_crops(images, 4, first).equal(random_crops(images, 4, second))


@yaml_cases("override, message")
def test_bad_options_are_refused(override, message):
    with pytest.raises(InputError, match=message):
        make_task(FitConfig.from_plain(image_config("pooling=avg", override)))
