"""Image files: readers, damage, downloads, sizes, patches; and the ViT study."""

import gzip
import hashlib
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.image_files import cifar_contents, idx, write_cifar, write_mnist
from helpers.shared_data import shared_data
from helpers.tables import yaml_cases
from marl_pool.config import compose
from marl_pool.tokens import Tokens
from marl_pool.training.supervised.fit import make_task
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.utils.errors import InputError
from marl_pool_studies.image_files import ARCHIVES, Source, fetch, read_cifar, read_idx
from marl_pool_studies.images import SOURCES, load_images, patches, resize

# IDX


@pytest.mark.parametrize("compressed", [False, True])
def test_an_idx_file_is_read(tmp_path, compressed):
    array = np.arange(24).reshape(2, 3, 4)
    file = tmp_path / ("x.gz" if compressed else "x")
    file.write_bytes(gzip.compress(idx(array)) if compressed else idx(array))
    assert (read_idx(file) == array).all()


def test_damaged_idx_files_are_refused(tmp_path):
    intact = idx(np.zeros((2, 3, 4)))
    packed = gzip.compress(intact)
    for content, name, message in (
        (intact[:-1], "x", "expected 24 bytes after its header, got 23"),
        (intact + b"x", "x", "expected 24 bytes after its header, got more"),
        (b"\0\0\x0d\x01" + bytes(8), "x", "expected an IDX file of bytes"),
        (b"", "x", "expected an IDX file"),
        (intact[:6], "x", "expected an IDX file"),
        (packed[:-9], "x.gz", "truncated or corrupt"),
        (packed[:12] + b"zzz" + packed[15:], "x.gz", "truncated or corrupt"),
        (intact, "x.gz", "truncated or corrupt"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_idx(tmp_path / name)


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def published(folder):
    """The files of MNIST in a folder, as a data set to download."""
    files = [folder / source.name for source in SOURCES["mnist"]]
    return tuple(Source(file.as_uri(), md5(file.read_bytes())) for file in files)


def test_a_subfolder_or_the_folder_holds_the_files(tmp_path):
    """The subfolder comes first, since both sets have the same names of files."""
    write_mnist(tmp_path, train=30)
    write_mnist(tmp_path / "fashion_mnist")
    assert len(load_images("mnist", tmp_path).train) == 30
    images = load_images("fashion_mnist", tmp_path)
    assert images.train.shape == (40, 28, 28, 1)
    assert images.test_labels.shape == (10,)
    assert images.train.dtype == torch.uint8
    assert images.num_classes == 10


def test_files_of_two_folders_are_not_mixed(tmp_path):
    write_mnist(tmp_path, train=30)
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    images = load_images("mnist", tmp_path)
    assert (len(images.train), len(images.train_labels)) == (30, 30)
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    message = f"4 files of mnist in one folder, got 3 in {tmp_path} and 3 in {tmp_path}"
    with pytest.raises(InputError, match=f"{message}/mnist$"):
        load_images("mnist", tmp_path)


@pytest.mark.parametrize("sign", ["checksum", "folder"])
def test_files_of_another_data_set_are_refused(tmp_path, monkeypatch, sign):
    folder = tmp_path / ("Fashion-MNIST" if sign == "folder" else "data")
    files = write_mnist(folder)
    if sign == "checksum":
        monkeypatch.setitem(SOURCES, "fashion_mnist", published(files))
    hashed, digest = [], hashlib.file_digest

    def record(content, name):
        hashed.append(content.name)
        return digest(content, name)

    monkeypatch.setattr(hashlib, "file_digest", record)
    reason = ", whose name is that" if sign == "folder" else "/.*.gz, which is"
    message = f"the files of mnist, got {folder}{reason} of fashion_mnist"
    with pytest.raises(InputError, match=message):
        load_images("mnist", folder)
    # The name is compared first, since checksums take longer.
    assert len(hashed) == (0 if sign == "folder" else 1)
    # A download goes to the folder's folder.
    monkeypatch.setitem(SOURCES, "mnist", published(write_mnist(tmp_path / "b", 30)))
    assert len(load_images("mnist", folder, download=True).train) == 30
    assert len(load_images("mnist", folder).train) == 30
    assert len(load_images("fashion_mnist", folder).train) == 40


def test_missing_files_are_named(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"data_dir: .* lacks train-labels-idx1-ubyte"):
        load_images("fashion_mnist", tmp_path)
    with pytest.raises(InputError, match="data_dir: expected the folder"):
        load_images("mnist", None)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("t10k-images-idx3", np.zeros((10, 14, 14)), "expected square images of one"),
        ("t10k-images-idx3", np.zeros((10, 28, 20)), "expected square images of one"),
        ("train-labels-idx1", np.zeros(39), "expected a label for each image"),
        ("train-labels-idx1", np.full(40, 10), "expected labels below 10, got 10"),
        ("t10k-labels-idx1", np.full(10, 10), "expected labels below 10, got 10"),
    ],
)
def test_images_and_labels_must_fit(tmp_path, name, array, message):
    write_mnist(tmp_path)
    (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    with pytest.raises(InputError, match=message):
        load_images("mnist", tmp_path)


@pytest.mark.parametrize(("train", "test"), [(40, 0), (0, 10)])
def test_a_part_without_images_is_refused(tmp_path, train, test):
    write_mnist(tmp_path, train, test)
    message = f"{tmp_path}: expected images for .* test, got {train} and {test}"
    with pytest.raises(InputError, match=message):
        load_images("mnist", tmp_path)


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_the_real_files_are_read(dataset):
    images = load_images(dataset, shared_data("data"))
    assert images.train.shape == (60_000, 28, 28, 1)
    assert images.test.shape == (10_000, 28, 28, 1)
    assert images.train_labels.unique().equal(torch.arange(10))


# CIFAR


@pytest.mark.parametrize("kind", list(ARCHIVES))
def test_a_cifar_archive_is_read(tmp_path, kind):
    contents = cifar_contents(kind)
    name = SOURCES[kind][0].name
    write_cifar(tmp_path / name, kind, {**contents, "batches.meta.txt": b"names"})
    images = load_images(kind, tmp_path)
    archive = ARCHIVES[kind]
    assert images.train.shape == (3 * len(archive.train), 32, 32, 3)
    assert images.num_classes == archive.num_classes
    assert images.test_labels.tolist() == [0, archive.num_classes - 1, 1]
    size = archive.label_bytes + 3072
    row = contents[archive.test][size + archive.label_bytes : 2 * size]
    # A red, a green and a blue plane, each row after row.
    pixel = [row[color * 1024 + 5 * 32 + 7] for color in range(3)]
    assert images.test[1, 5, 7].tolist() == pixel


def test_an_archive_may_be_uncompressed(tmp_path):
    name = SOURCES["cifar100"][0].name
    file = write_cifar(tmp_path / name, "cifar100", cifar_contents("cifar100"))
    expected = load_images("cifar100", tmp_path)
    file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
    file.unlink()
    assert load_images("cifar100", tmp_path).train.equal(expected.train)


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    file = write_cifar(tmp_path / "x.tar.gz", "cifar100", cifar_contents("cifar100"))
    monkeypatch.setattr("marl_pool_studies.image_files.ARRAY_BYTES", 5000)
    with pytest.raises(InputError, match="at most 5,000 bytes unpacked"):
        read_cifar(file, "cifar100")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train.bin: expected records of 3074 bytes, got 0 bytes"),
        (bytes(3073), "train.bin: expected records of 3074 bytes, got 3,073 bytes"),
        (None, "expected an archive with cifar-100-binary/train.bin, got none"),
    ],
    ids=["empty", "another size", "missing"],
)
def test_wrong_files_of_a_cifar_archive_are_refused(tmp_path, content, message):
    contents = cifar_contents("cifar100")
    del contents["train.bin"]
    contents |= {} if content is None else {"train.bin": content}
    file = write_cifar(tmp_path / "x.tar.gz", "cifar100", contents)
    with pytest.raises(InputError, match=message) as refusal:
        read_cifar(file, "cifar100")
    assert str(file) in str(refusal.value)


def test_damaged_cifar_archives_are_refused(tmp_path):
    file = tmp_path / "x.tar.gz"
    write_cifar(file, "cifar100", cifar_contents("cifar100"))
    for damaged in (file.read_bytes()[:-2000], b"no archive" * 100, b"no archive"):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="truncated or corrupt") as caught:
            read_cifar(file, "cifar100")
        assert "\n" not in str(caught.value)
    with tarfile.open(file, "w:gz") as archive:
        folder = tarfile.TarInfo("cifar-100-binary/train.bin")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    with pytest.raises(InputError, match=r"expected a file .*train\.bin, got a folder"):
        read_cifar(file, "cifar100")


# Downloads


def test_a_download_is_checked(tmp_path):
    origin = tmp_path / "origin" / "file.gz"
    origin.parent.mkdir()
    origin.write_bytes(b"content")
    checksum = md5(b"content")
    path = fetch(Source(origin.as_uri(), checksum), tmp_path / "new")
    assert path.read_bytes() == b"content"
    message = f"expected the MD5 checksum 0, got {checksum}"
    with pytest.raises(InputError, match=message):
        fetch(Source(origin.as_uri(), "0"), tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())
    with pytest.raises(InputError, match="cannot be downloaded"):
        fetch(Source((tmp_path / "none").as_uri(), "0"), tmp_path / "other")


def test_download_fetches_what_is_missing_only(tmp_path, monkeypatch):
    write_mnist(tmp_path / "origin")
    sources = published(tmp_path / "origin")
    monkeypatch.setitem(SOURCES, "mnist", sources)
    with pytest.raises(InputError, match="download=true downloads them"):
        load_images("mnist", tmp_path / "mine")
    images = load_images("mnist", tmp_path / "mine", download=True)
    assert len(list((tmp_path / "mine" / "mnist").iterdir())) == 4
    (tmp_path / "origin" / sources[0].name).unlink()
    assert load_images("mnist", tmp_path / "mine", True).train.equal(images.train)


# Sizes and patches


def test_images_are_padded_and_averaged():
    image = torch.arange(28 * 28).remainder(256).to(torch.uint8).view(1, 28, 28, 1)
    assert resize(image, 28).equal(image)
    padded = resize(image, 32)
    assert padded[:, 2:30, 2:30].equal(image)
    assert padded.long().sum() == image.long().sum()
    halved = resize(image, 14)
    expected = image[0, 6:8, 4:6, 0].float().mean().round()
    assert halved[0, 3, 2, 0] == expected
    assert resize(image, 16)[0, 4, 3, 0] == expected
    with pytest.raises(InputError, match=r"task.size: .* got 20"):
        resize(image, 20)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_patches_are_squares_in_the_order_of_reading(count, side, patch, channels):
    extent = side * patch
    images = torch.arange(count * extent * extent * channels)
    images = images.view(count, extent, extent, channels)
    cut = patches(images, patch)
    assert cut.shape == (count, side * side, patch * patch * channels)
    for place in range(side * side):
        row, column = (patch * number for number in divmod(place, side))
        square = images[:, row : row + patch, column : column + patch]
        assert cut[:, place].equal(square.flatten(1))


# The study


def test_pooling_is_invariant_to_the_order_of_patches_and_the_network_is_not(tmp_path):
    write_mnist(tmp_path)
    config = compose("fit", ["task=images", f"data_dir='{tmp_path}'", "pooling=ada"])
    task = make_task(FitConfig.from_plain(config))
    task.prepare(tmp_path)
    network = task.make_network(0).double().eval()
    cut = patches(task.batch("train", torch.arange(4))["images"], task.patch)
    places = torch.arange(64).expand(4, 64)
    padding = torch.zeros(4, 64, dtype=torch.bool)
    order = torch.randperm(64)

    def pooled(rows):
        return network.pooled(Tokens(cut[:, rows], places[:, rows], padding))

    assert pooled(order).allclose(pooled(torch.arange(64)), atol=1e-9)
    moved = network(cut[:, order])
    assert not moved.allclose(network(cut), atol=1e-9), "places do not matter"


@pytest.mark.parametrize("scale", ["tiny", "cpu", "paper"])
@pytest.mark.parametrize("encoder", ["swarm", "set_transformer", "identity"])
def test_any_encoder_takes_the_place_of_the_transformer(scale, encoder):
    config = compose("fit", ["task=images", f"scale={scale}", f"encoder={encoder}"])
    assert config["encoder"]["name"] == encoder


@yaml_cases("overrides, message")
def test_bad_input_is_one_line(tmp_path, refused, overrides, message):
    write_mnist(tmp_path / "data")
    base = ["task=images", f"data_dir='{tmp_path / 'data'}'"]
    if not any(text.startswith("pooling=") for text in overrides):
        base.append("pooling=ada")
    path = tmp_path / "run"
    assert message in refused("fit", *base, *overrides, "--run-dir", str(path))
    assert not path.exists()
