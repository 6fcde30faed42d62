"""Labelled image data sets, random crops and flips, patches and their embedding."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from marl_pool.files.reading import read_yaml
from marl_pool.kernels.functional import Activation
from marl_pool.networks.set_network import TokenEmbedding, TypeEmbedding
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool.utils.paths import user_path
from marl_pool_studies.image_files import ARCHIVES, Source, fetch, read_cifar, read_idx

Dataset = Literal["mnist", "fashion_mnist", "cifar10", "cifar100"]
_DATASETS = read_yaml(Path(__file__).with_name("datasets.yaml"))
SOURCES = {
    name: tuple(
        Source(f"{data['url']}/{file}", md5) for file, md5 in data["files"].items()
    )
    for name, data in _DATASETS.items()
}
"""Files to download for each data set. Local files need not have these checksums,
because Fashion-MNIST exists with other splits."""


class Normalization(NamedTuple):
    """Constants that normalize the channels of an image with pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


NORMALIZATION = {
    name: Normalization(tuple(data["mean"]), tuple(data["std"]))
    for name, data in _DATASETS.items()
}
"""Constants of each data set; ``datasets.yaml`` names their origin."""


class Images(NamedTuple):
    """A data set: images ``(n, H, W, C)`` uint8 and labels ``(n,)`` int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    num_classes: int


def load_images(
    dataset: Dataset, data_dir: str | Path | None, download: bool = False
) -> Images:
    """Read a data set from ``data_dir/dataset`` or, with less precedence, ``data_dir``.

    MNIST and Fashion-MNIST are four IDX files, compressed or not, all of one folder.
    CIFAR is the archive of its binary version. Missing files are downloaded into
    ``data_dir/dataset``, if asked.

    Raises:
        InputError: no folder given, missing, truncated or corrupt files, files
            of another data set, or a failed download.
    """
    if data_dir is None:
        raise InputError(
            f"data_dir: expected the folder with the files of {dataset}, or with "
            "download=true the one to download them to, got none"
        )
    folder = user_path(data_dir)
    if not folder.is_dir() and not download:
        raise InputError(
            f"data_dir: expected a folder with the files of {dataset}, got {data_dir}; "
            "download=true downloads them"
        )
    # MNIST and Fashion-MNIST have the same names of files, so never mix two folders.
    sources = SOURCES[dataset]
    inner, outer = (_found(place, sources) for place in (folder / dataset, folder))
    files = max(inner, outer, key=len)
    mistake = _other_dataset(dataset, files)
    if download and files is outer and (mistake or len(files) < len(sources)):
        files, mistake = inner, _other_dataset(dataset, inner)
    if mistake:
        raise InputError(
            f"data_dir: expected a folder with the files of {dataset}, got {mistake}"
        )
    missing = [source for source in sources if source not in files]
    if missing and not download:
        if inner and outer:
            raise InputError(
                f"data_dir: expected all {len(sources)} files of {dataset} in one "
                f"folder, got {len(outer)} in {folder} and {len(inner)} in "
                f"{folder / dataset}"
            )
        raise InputError(
            f"data_dir: {data_dir} lacks {', '.join(s.name for s in missing)}, "
            f"also in its folder {dataset}; download=true downloads "
            f"{'them' if len(sources) - len(inner) > 1 else 'it'}"
        )
    files |= {source: fetch(source, folder / dataset) for source in missing}
    return _read(dataset, [files[source] for source in sources])


def resize(images: Tensor, size: int) -> Tensor:
    """Resize square images by zero padding and block averaging, without interpolation.

    Images are padded on all sides to the next multiple of ``size``, at most by a
    quarter, and then averaged over squares. So 28 pixels become 28, 32 (padded), 14,
    16 (padded to 32) and so on. Images are ``(n, H, H, C)`` uint8.

    Raises:
        InputError: a size that needs more padding.
    """
    side = images.shape[1]
    factor = -(-side // size)
    target = factor * size
    if target > side * 1.25:
        raise InputError(
            f"task.size: expected a divisor of {side} pixels, padded by at most a "
            f"quarter, got {size}"
        )
    # Put the image in the middle.
    before = (target - side) // 2
    after = target - side - before
    padded = torch.nn.functional.pad(images, (0, 0, before, after, before, after))
    if factor == 1:
        return padded
    squares = padded.unflatten(2, (size, factor)).unflatten(1, (size, factor))
    return squares.float().mean((2, 4)).round().to(torch.uint8)


def check_patch(size: int, patch: int) -> None:
    """Validate that patches cover images of ``size`` pixels per side."""
    if size % patch:
        raise InputError(
            f"task.patch: expected a divisor of task.size = {size}, got {patch}"
        )


def patches(images: Tensor, patch: int) -> Tensor:
    """Cut images ``(n, H, W, C)`` into patches ``(n, N, patch * patch * C)``.

    Patches are in row-major order; H and W are multiples of ``patch``.
    """
    height, width = (extent // patch for extent in images.shape[1:3])
    cut = images.unflatten(2, (width, patch)).unflatten(1, (height, patch))
    return cut.transpose(2, 3).flatten(3).flatten(1, 2)


class PatchEmbedding(TokenEmbedding):
    r"""Project patches and add the embedding of their positions.

    .. math:: h = \mathrm{dropout}(\mathrm{LN}(W\, \mathrm{LN}((x - \mu) / \sigma)) + e)

    with pixels x in [0, 1], the data set's :math:`\mu` and :math:`\sigma`, and the
    learned embedding e of the patch's position. Normalization, both layer norms and
    dropout are optional.

    Source: the published code of the AdaPool paper's image studies,
    https://arxiv.org/abs/2506.09215.

    The types of the tokens are their positions. The channels of ``normalization`` vary
    fastest within a patch. See `TokenEmbedding` for the other arguments.
    """

    def __init__(
        self,
        spec: TokenSpec,
        dim: int | None,
        type_embedding: TypeEmbedding = "add",
        activation: Activation | None = None,
        *,
        normalization: Normalization | None = None,
        norms: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(spec, dim, type_embedding, activation)
        # Repeat the constants of the channels over the pixels of a patch.
        self.mean: Tensor | None
        self.std: Tensor | None
        for name in ("mean", "std"):
            values = None
            if normalization is not None:
                channels = torch.tensor(getattr(normalization, name))
                values = channels.repeat(spec.num_features // len(channels))
            self.register_buffer(name, values, persistent=False)
        # Normalize before and after the projection, as the vision transformer does.
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) if norms else nn.Identity()
            for width in (spec.num_features, self.dim_out)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tokens) -> Tensor:
        """Embed patches of batch ``(B,)`` as ``(B, N, D)``."""
        x = self.read(tokens)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        x = self.norms[0](x)
        if self.project is not None:
            x = self.activate(self.project(x))
        assert self.types is not None
        embedded: Tensor = self.dropout(self.norms[1](x) + self.types(tokens.types))
        return embedded


def random_crops(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Add a border of zeros to each image, and cut out a window of the image's size.

    Images are ``(B, H, W, C)``. The border is ``padding`` pixels wide on each side;
    each of the ``(2 padding + 1)²`` positions of the window is equally likely. The
    generator is on the CPU, so a seed gives the same windows on every device.
    """
    count, height, width, _ = images.shape
    border = (0, 0, padding, padding, padding, padding)
    padded = torch.nn.functional.pad(images, border)
    corners = torch.randint(2 * padding + 1, (2, count), generator=generator)
    tops, lefts = corners.to(images.device)
    # A view of all windows, (B, 2 padding + 1, 2 padding + 1, C, H, W).
    windows = padded.unfold(1, height, 1).unfold(2, width, 1)
    rows = torch.arange(count, device=images.device)
    return windows[rows, tops, lefts].permute(0, 2, 3, 1)


def random_flips(
    images: Tensor, probability: float, generator: torch.Generator
) -> Tensor:
    """Mirror each image of ``(B, H, W, C)``, left to right, with a probability.

    The probability is in [0, 1], the generator on the CPU.
    """
    flipped = torch.rand(len(images), generator=generator) < probability
    where = flipped.to(images.device)[:, None, None, None]
    return torch.where(where, images.flip(2), images)


def _read(dataset: Dataset, files: list[Path]) -> Images:
    folder = files[0].parent
    # CIFAR comes in one archive, MNIST and its relatives in four files.
    if dataset in ARCHIVES:
        parts = list(read_cifar(files[0], dataset))
        classes = ARCHIVES[dataset].num_classes
    else:
        parts, classes = [read_idx(file) for file in files], 10
        parts = [array[..., None] if array.ndim == 3 else array for array in parts]
    # Validate both parts: one label per image, squares of one size, known classes.
    for images, labels in (parts[:2], parts[2:]):
        if images.ndim != 4 or labels.shape != images.shape[:1]:
            raise InputError(
                f"{folder}: expected a label for each image, got images "
                f"{images.shape} and labels {labels.shape}"
            )
        if not len(images):
            raise InputError(
                f"{folder}: expected images for training and for the test, got "
                f"{len(parts[0])} and {len(parts[2])}"
            )
        height, width, _ = shape = images.shape[1:]
        if height != width or shape != parts[0].shape[1:]:
            raise InputError(
                f"{folder}: expected square images of one size, got "
                f"{parts[0].shape} and {images.shape}"
            )
        if len(labels) and labels.max() >= classes:
            raise InputError(
                f"{folder}: expected labels below {classes}, got {labels.max()}"
            )
    # Copy the arrays: those that were read are not writable.
    train, train_labels, test, test_labels = (
        torch.from_numpy(np.array(array, order="C")) for array in parts
    )
    return Images(train, train_labels.long(), test, test_labels.long(), classes)


def _found(folder: Path, sources: Iterable[Source]) -> dict[Source, Path]:
    """Return the files of a folder, compressed or not."""
    files = {}
    for source in sources:
        for name in (source.name.removesuffix(".gz"), source.name):
            if (folder / name).is_file():
                files[source] = folder / name
    return files


def _other_dataset(dataset: str, files: Mapping[Source, Path]) -> str:
    """Return the folder or file that is known to be of another data set, or ""."""
    file_names = {source.name for source in files}
    checksums_by_name = {
        name: {source.md5 for source in sources}
        for name, sources in SOURCES.items()
        if name != dataset and file_names & {source.name for source in sources}
    }
    if not checksums_by_name:
        return ""
    folder = next(iter(files.values())).parent
    name = folder.resolve().name.lower().replace("-", "_")
    if name in checksums_by_name:
        return f"{folder}, whose name is that of {name}; rename it if its files are not"
    for file in files.values():
        with file.open("rb") as content:
            checksum = hashlib.file_digest(content, "md5").hexdigest()
        for name, checksums in checksums_by_name.items():
            if checksum in checksums:
                return f"{file}, which is of {name}"
    return ""
