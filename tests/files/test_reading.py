"""Bounded reading: YAML of plain data, arrays no larger than their headers say."""

import gzip
import io
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.samples import SPEC
from marl_pool.config import assign, compose, registry
from marl_pool.config.checks import check
from marl_pool.envs import make_batched_env
from marl_pool.files.reading import (
    YAML_DEPTH,
    YAML_NODES,
    Bounded,
    dump_yaml,
    parse_yaml,
    read_json,
    read_npz,
    read_yaml,
)
from marl_pool.options.names import resolve
from marl_pool.options.signatures import options_of
from marl_pool.options.types import (
    LONGEST,
    PositiveInt,
    Repeats,
    Size,
    check_size,
    limit_of,
)
from marl_pool.perturbations import make_perturbation
from marl_pool.policies import make_policy
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.storage import load_policy, save_policy
from marl_pool.pooling import make_pooling
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError
from marl_pool_studies.image_files import read_idx

# YAML

# PyYAML writes a "next line" (U+0085) that it reads back as a space.
TEXT = st.text(st.characters(exclude_characters="\x85", codec="utf-8"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(PLAIN)
def test_what_we_write_is_read_back(content: Any) -> None:
    assert parse_yaml(dump_yaml(content, allow_unicode=True)) == content


@pytest.mark.parametrize(
    "text",
    [
        *("2001-01-01", "${oc.env:HOME}", "${a}", "on", "=", "<<", "0b11"),
        *("1e3", "-1E-2", "1.e3", "010", "0o7", "0x1f", "1_000", "1:30", ".5", "-.inf"),
    ],
)
def test_texts_with_a_second_meaning_stay_texts(text: str) -> None:
    for content in ({"key": [text]}, {text: 3}):
        written = dump_yaml(content)
        assert parse_yaml(written) == content
        # Other programs, and earlier versions, read YAML 1.1.
        assert yaml.safe_load(written) == content


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-2", 0.01), ("-2E3", -2000.0), ("1e+2", 100.0), ("5.e1", 50.0)),
        *(("2.5e-3", 0.0025), (".5", 0.5), ("-.5e1", -5.0), ("1_0.5", 10.5)),
        *((".inf", math.inf), ("-.INF", -math.inf), ("+1.0", 1.0)),
        *(("010", 10), ("-007", -7), ("1_200_000", 1_200_000), ("+3", 3)),
        *(("0x1F", 31), ("0o17", 15), ("0", 0)),
        *(("1:30", "1:30"), ("1.2.3", "1.2.3"), ("0b1", "0b1"), ("1e", "1e")),
        *(("e5", "e5"), (".", "."), ("08b5", "08b5"), ("'1e3'", "1e3")),
        *(('!!int "12"', 12), ('!!float "1"', 1.0), ("!!str 3", "3")),
    ],
)
def test_numbers_are_those_of_yaml_1_2_with_underscores(text, value) -> None:
    parsed = parse_yaml(f"key: {text}")["key"]
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a"),
        ("1: a\n01: b\n", 2, "01"),
        ("true: 1\nTrue: 2\n", 2, "True"),
        ("ppo:\n  lr: 1\n  lr: 2\n", 3, "lr"),
        ("[{a: 1,\na: 1}]", 2, "a"),
        ("1: a\n1: b\n", 2, "1"),
    ],
)
def test_a_repeated_key_is_refused(tmp_path, text, line, key) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    message = f"mine.yaml cannot be read: line {line}: expected every key once, got"
    with pytest.raises(InputError, match=f"{message} '{key}' again"):
        read_yaml(file)
    file.write_text("base: &b {a: 1}\nover: {<<: *b, a: 2}\n'1': x\n1: y\n")
    assert read_yaml(file) == {"base": {"a": 1}, "over": {"a": 2}, "1": "x", 1: "y"}


def test_a_few_aliases_are_read() -> None:
    part = [1, 2]
    text = yaml.safe_dump({"a": part, "b": part})
    assert "*" in text
    assert parse_yaml(text) == {"a": part, "b": part}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- x\n" * (YAML_NODES + 1), f"{YAML_NODES:,} values"),
        ("&a [*a]", "alias inside"),
        ("&a {x: {y: [*a]}}", "alias inside"),
        (nested(YAML_DEPTH + 2), f"{YAML_DEPTH} levels"),
        (nested(5000), f"{YAML_DEPTH} levels"),
        ("a: &a [1,1]\nb: [" + "*a," * 20_000 + "]", "aliases written out"),
        ("!!python/name:os.system", "python/name"),
        ("!!binary aGk=", "binary"),
        ("[1, 2", r"line 1, column 6: expected ',' or '\]', but got"),
        ("? [a]\n: b", "unhashable"),
        ("9" * 5000, "4300"),
        ('!!int ""', "invalid literal for int"),
        ('!!float ""', "could not convert string to float"),
        ("!!bool x", "tags"),
    ],
    ids=lambda value: value[:12],
)
def test_other_yaml_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "sent.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as refusal:
        read_yaml(file)
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path, tmp_path / "bytes"):
        with pytest.raises(InputError, match=f"{path}.* cannot be read"):
            read_yaml(path)


@pytest.mark.parametrize("reader", [read_yaml, read_json])
def test_pipes_and_devices_are_not_read(
    reader: Callable[[Path], Any], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises((OSError, InputError), match="not a regular file"):
            reader(tmp_path / name)


def test_json_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sent.json"
    file.write_text("[1]")
    assert read_json(file) == [1]
    os.truncate(file, 1 << 40)  # a sparse file takes no room on the disk
    with pytest.raises(InputError, match="at most"):
        read_json(file)


def test_a_policy_whose_parts_are_pipes_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "manifest.json"):
        folder = tmp_path / name
        save_policy(make_policy(SPEC, BOX, seed=0), folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(InputError, match="not a regular file"):
            load_policy(folder)


def test_a_stored_text_survives_resume(tmp_path: Path) -> None:
    text = "${oc.env:HOME} and ${seed}, \\${x}"
    run = Run.create(tmp_path / "run", {**compose("train"), "fixed": {"hen": text}})
    config = Run.open(run.path).config
    assert config["fixed"] == {"hen": text}
    assert assign(config, ["total_steps=5"])["fixed"] == {"hen": text}
    assert (
        assign(config, ["resources.address='${oc.env:HOME}'"])["resources"]["address"]
        == "${oc.env:HOME}"
    )
    with pytest.raises(InputError, match=r"total_steps\.x.*total_steps has no keys"):
        assign(config, ["total_steps.x=3"])
    assert config == Run.open(run.path).config


# Arrays


def npz(file: Path, **arrays: np.ndarray) -> Path:
    with file.open("wb") as out:
        np.savez_compressed(out, **arrays)
    return file


@given(
    st.sampled_from(["f8", "f4", "i8", "u1", "?", "<U3"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.booleans(),
)
def test_arrays_are_read_as_numpy_reads_them(
    dtype: str, shape: list[int], by_columns: bool
) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    array = np.asarray(array, order="F" if by_columns else "C")
    with tempfile.NamedTemporaryFile() as kept:
        np.savez(kept, x=array, y=np.array(3.5))
        kept.flush()
        content = read_npz(Path(kept.name))
    assert list(content) == ["x", "y"]
    assert content["x"].dtype == array.dtype
    assert np.array_equal(content["x"], array)
    assert content["x"].shape == array.shape
    assert content["x"].strides == array.strides
    assert content["x"].flags.writeable
    assert content["y"] == 3.5


def test_arrays_beyond_the_bound_are_refused(tmp_path: Path) -> None:
    file = npz(tmp_path / "x.npz", a=np.zeros(1000), b=np.zeros(1000))
    assert file.stat().st_size < 1500
    with pytest.raises(InputError, match="at most 15,000 bytes"):
        read_npz(file, 15_000)
    assert read_npz(file, 17_000)["b"].shape == (1000,)


def header(shape: str, descr: str = "'<f8'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "member",
    [
        header("(1000000000000,)") + bytes(80),
        header("(-1, 5)") + bytes(8),
        header("(10,)", "'|O'") + bytes(80),
        header("(2,)") + bytes(8),
        b"no array",
        b"",
    ],
)
def test_a_header_that_lies_takes_no_memory(tmp_path: Path, member: bytes) -> None:
    file = tmp_path / "x.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", member)
    with pytest.raises((ValueError, KeyError)):
        read_npz(file)


def test_an_idx_header_that_lies_takes_no_memory(tmp_path: Path) -> None:
    large = bytes([0, 0, 8, 3]) + 3 * (1 << 20).to_bytes(4, "big") + bytes(9)
    (tmp_path / "x").write_bytes(large)
    (tmp_path / "x.gz").write_bytes(gzip.compress(large))
    for name in ("x", "x.gz"):
        with pytest.raises(
            InputError, match="expected at most 1,073,741,824 bytes, got"
        ):
            read_idx(tmp_path / name)
    # A bomb: the header is small, what follows is not.
    small = bytes([0, 0, 8, 1, 0, 0, 0, 5]) + bytes(1 << 22)
    (tmp_path / "x.gz").write_bytes(gzip.compress(small))
    with pytest.raises(InputError, match="expected 5 bytes after its header, got more"):
        read_idx(tmp_path / "x.gz")


def test_a_bounded_file_is_not_read_beyond_its_bound() -> None:
    opened = Bounded(io.BytesIO(bytes(100)), 50)
    assert len(opened.read(50)) == 50
    assert opened.tell() == 50
    for beyond in (lambda: opened.read(1), opened.read, lambda: opened.seek(51)):
        with pytest.raises(InputError, match="at most 50 bytes"):
            beyond()
    assert opened.seek(49) == 49
    assert len(Bounded(io.BytesIO(bytes(50)), 50).read()) == 50


# Sizes

UNBOUNDED = {
    *("seed", "data_seed", "first_env", "first_episode"),  # any number will do
    *("no_reward_limit", "action_repeat", "frame_skip", "noop_max"),
    *("held", "ramp", "pretrain_epochs"),  # these take time, not memory
    # Indices and step numbers.
    *("agents", "onset", "presence", "margin", "markers"),
    # These hold options of other classes.
    *("dtype", "options", "groups", "encoder", "pooling", "heads"),
}
KINDS = ("poolings", "encoders", "policies", "envs", "perturbations", "tasks")
COUNTS = sorted(
    {
        (option, f"{kind} {name}", parameter.annotation)
        for kind in (*KINDS, "strategies")
        for name, target in registry(kind).items()
        for option, parameter in options_of(resolve(target, {}, kind, object)).items()
        if "int" in str(parameter.annotation) or "Counts" in str(parameter.annotation)
    },
    key=str,
)


def test_every_number_that_takes_memory_has_a_bound() -> None:
    assert len(COUNTS) > 150
    lacking = {
        (option, where)
        for option, where, annotation in COUNTS
        if option not in UNBOUNDED
        and limit_of(annotation) is None
        and "Le(le=" not in str(annotation)
    }
    assert not lacking
    assert not [
        (option, where)
        for option, where, annotation in COUNTS
        if option in UNBOUNDED and limit_of(annotation) is not None
    ]


BOX = ActionSpec(low=(-1.0,), high=(1.0,))


WIDE = {"name": "transformer", "dim": 80_000}
CNN = {"dim": 8, "num_tokens": 4, "channels": [4, 10**6]}
centroid_env = partial(make_batched_env, "simple_centroid", 1)
inject = partial(make_perturbation, "inject", specs={"agent": SPEC})


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (partial(make_pooling, "cls", dim=80_000), "pooling.dim"),
        (partial(make_pooling, "cnn", **CNN), "pooling.channels"),
        (partial(make_policy, SPEC, BOX, encoder=WIDE), "encoder.dim"),
        (partial(centroid_env, num_noise=10**8), "env.num_noise"),
        (partial(centroid_env, counts="1-3-100000000"), "env.counts"),
        (partial(make_batched_env, "cartpole", 10**9), "env.num_envs"),
        (partial(inject, count=10**9), "perturbation.count"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_beyond_reason_is_refused_before_memory_is_taken(
    make: Callable[[], object], key: str
) -> None:
    limit = "1,048,576" if key == "env.num_envs" else "16,384"
    with pytest.raises(InputError, match=f"{key}: expected .*at most {limit}, got"):
        make()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("encoder.num_layers=1e6", "encoder.num_layers"),
        ("env.max_steps=1e9", "env.max_steps"),
        ("ppo.num_envs=1e9", "ppo.num_envs"),
        ("threads=1e9", "threads"),
    ],
)
def test_a_configuration_names_the_key(override: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"^{key}: expected .*at most [\d,]+, got"):
        compose("train", [override])


def test_defaults_and_lists_are_within_bounds() -> None:
    check("train", compose("train"))
    check_size("x.hidden", [16] * LONGEST, list[Size])
    check_size("x.threads", True, Repeats | bool)
    check_size("x.other", 10**12, PositiveInt)
    with pytest.raises(InputError, match=r"x.hidden: expected a list of at most"):
        check_size("x.hidden", [16] * (LONGEST + 1), list[Size])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"encoder": {"name": "transformer", "dim": 80_000}}, "encoder.dim"),
        ({"head_hidden": [80_000]}, "head_hidden"),
        ({"encoder": {"name": "transformer", "num_layers": 10**6}}, "num_layers"),
        ({"encoder": {"name": "transformer", "dim_ff": 10**6}}, "dim_ff"),
        ({"pooling": {"name": "pma", "num_seeds": 10**6}}, "num_seeds"),
        ({"pooling": {"name": "attention_neuron", "num_codes": 4096}}, "num_codes"),
        ({"pooling": {"name": "vision_neuron", "position_dim": 4096}}, "position_dim"),
        ({"spec": {**SPEC.to_json(), "num_features": 10**6}}, "num_features"),
        ({"spec": {**SPEC.to_json(), "num_tokens": 10**9}}, "num_tokens"),
        ({"action_space": {"n": 10**9, "low": [], "high": []}}, "n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_policy_s_sizes_are_checked_first(
    change: dict[str, Any], key: str, tmp_path: Path
) -> None:
    save_changed(tmp_path, "identity", lambda module: module.update(change))
    with pytest.raises(InputError, match=rf"{key}: expected at most [\d,]+, got"):
        load_policy(tmp_path)


def save_changed(
    folder: Path, encoder: str, change: Callable[[dict[str, Any]], object]
) -> None:
    """Save a policy, and change its configuration."""
    parts = {"encoder": {"name": encoder}, "pooling": {"name": "avg"}}
    save_policy(make_policy(SPEC, BOX, **parts), folder)
    file = folder / "config.json"
    content = json.loads(file.read_text())
    change(content["modules"]["policy"])
    file.write_text(json.dumps(content))


class LargestFilled(TorchDispatchMode):
    """The largest number of elements of a tensor that has contents."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.detach):
            self.numel = max(self.numel, getattr(result, "numel", int)())
        return result


# Each number is within its bound; all layers of the first together are 2 TB.
LARGE = {"dim": 16_384, "dim_ff": 16_384, "num_layers": 1024, "num_heads": 1}
SEEDS = {"name": "pma", "num_seeds": 4096}
CHOICES = {"choices": [1024] * 2048, "low": [-1], "high": [1]}


@pytest.mark.parametrize(
    ("encoder", "change"),
    [
        ("transformer", {"encoder": {"name": "transformer", **LARGE}}),
        ("identity", {"action_space": CHOICES}),
        ("identity", {"type_embedding": 4096, "pooling": SEEDS}),
    ],
    ids=["layers", "choices", "seeds"],
)
def test_a_policy_far_larger_than_its_weights_is_not_built(
    encoder: str, change: dict[str, Any], tmp_path: Path
) -> None:
    save_changed(tmp_path, encoder, lambda module: module.update(change))
    message = r"config.json: expected a network .* got more"
    with LargestFilled() as filled, pytest.raises(InputError, match=message):
        load_policy(tmp_path)
    assert filled.numel < 2_000_000


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_with_a_flipped_bit_is_read_or_refused(save, tmp_path):
    """No other error comes out of zipfile, zlib and numpy."""
    file = tmp_path / "arrays.npz"
    save(file, a=np.arange(6.0).reshape(2, 3))
    whole, refused = file.read_bytes(), 0
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            read_npz(file)
        except (OSError, ValueError):
            refused += 1
    assert refused > len(whole)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_npz_that_numpy_would_not_write_is_damaged(tmp_path, method):
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with (
        zipfile.ZipFile(tmp_path / "a.npz") as source,
        zipfile.ZipFile(tmp_path / "b.npz", "w", method) as target,
    ):
        target.writestr("x.npy", source.read("x.npy"))
    with pytest.raises(ValueError, match="damaged: compressed as NumPy never does"):
        read_npz(tmp_path / "b.npz")
