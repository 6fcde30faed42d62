"""Reading files that somebody else may have made, within bounds.

None of these functions runs code from a file, and none takes more memory than its
bound, whatever the file claims about itself.
"""

import errno
import json
import stat
import zipfile
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import yaml

from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    import numpy as np

YAML_BYTES = 1 << 20
"""Of a configuration; the largest of ours has a few thousand."""
YAML_NODES = 50_000
"""Keys, values and list entries, each alias counted as all that it stands for."""
YAML_DEPTH = 100
"""Mappings and lists inside one another."""
JSON_BYTES = 1 << 24
"""Of a JSON file; the largest of ours, the results of an evaluation, have a million."""
ARRAY_BYTES = 1 << 30
"""Of all arrays in a file, unpacked."""
PLAIN = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)
"""The types of YAML that are JSON's, too."""


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: it is missing, cannot be read, or is no plain file but a pipe or a
            device, which might never end.
        ValueError: it is too large, or no JSON.
        RecursionError: nested too deeply.
    """
    return json.loads(_content(file, JSON_BYTES))


def _content(file: Path, most: int) -> bytes:
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(file))
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise InputError(f"expected at most {most:,} bytes, got more")
    return content


def read_yaml(file: Path) -> Any:
    """Read a YAML file of plain data: what JSON could hold, too.

    Raises:
        FileNotFoundError: there is none.
        InputError: it cannot be read, is no YAML, holds other types, or is too large
            or nested too deeply, with all its aliases written out.
    """
    try:
        return parse_yaml(_content(file, YAML_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise
    except RecursionError:
        raise InputError(f"{file}: {_too_deep()}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:  # of which InputError is one
        reason = " ".join(str(error).split())
        raise InputError(f"{file} cannot be read: {reason}") from error


def parse_yaml(text: str) -> Any:
    """Parse YAML text; see `read_yaml` for what is refused.

    Raises:
        InputError: too many nodes, too deep, an alias inside itself, another type.
        yaml.YAMLError: it is no YAML.
        ValueError: a number that Python does not read.
        RecursionError: nested too deeply even to be parsed.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _written_out(root, {}, 0)
        return loader.construct_document(root)
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Counts nodes while the file is parsed, before any is built; knows no dates."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, form) for tag, form in resolvers if tag in PLAIN]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > YAML_NODES:
            raise InputError(f"expected at most {YAML_NODES:,} values, got more")
        return super().compose_node(parent, index)


def _written_out(node: Any, known: dict[int, int | None], depth: int) -> int:
    """Count the nodes below ``node`` with every alias expanded.

    Args:
        node: root of the count.
        known: counts so far by ``id``; None while a node is being counted.
        depth: depth of ``node``.
    """
    if node.tag not in PLAIN:
        raise InputError(f"expected plain data, got a value of the type {node.tag!r}")
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise InputError("expected plain data, got an alias inside of itself")
        return count
    if depth > YAML_DEPTH:
        raise InputError(_too_deep())
    known[id(node)] = None
    total = 1
    for child in _children(node):
        total += _written_out(child, known, depth + 1)
        if total > YAML_NODES:
            raise InputError(
                f"expected at most {YAML_NODES:,} values with aliases written out, got "
                "more"
            )
    known[id(node)] = total
    return total


def _children(node: Any) -> Iterator[Any]:
    for item in node.value:
        yield from item if isinstance(item, tuple) else (item,)


def _too_deep() -> str:
    return f"expected at most {YAML_DEPTH} levels of nesting, got more"


def read_npz(file: Path, most: int = ARRAY_BYTES) -> "dict[str, np.ndarray]":
    """Read the arrays of an npz file; nothing is unpickled.

    Raises:
        OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error: it cannot be
            read, is damaged, or holds objects.
        InputError: there is more in it than ``most`` bytes.
    """
    with file.open("rb") as opened:
        if opened.read(6) == b"\x93NUMPY":
            raise InputError(f"{file}: expected an .npz file, got a single array")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        # zipfile reads no more of a member than the size that it claims.
        if sum(member.file_size for member in members) > most:
            raise InputError(
                f"{file}: expected at most {most:,} bytes unpacked, got more"
            )
        return {
            member.filename.removesuffix(".npy"): _array(archive.open(member), member)
            for member in members
        }


def _array(opened: Any, member: zipfile.ZipInfo) -> "np.ndarray":
    import numpy as np

    with opened:
        version = np.lib.format.read_magic(opened)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, in_columns, dtype = read_header(opened)
        if dtype.hasobject:
            raise ValueError(f"{member.filename}: expected numbers, got objects")
        content = opened.read()
        # An array is as large as its file: a header that claims more is damaged.
        flat = np.frombuffer(content, dtype)
        return flat.reshape(shape, order="F" if in_columns else "C").copy()


class Bounded:
    """An open binary file that refuses to be read beyond a bound.

    Args:
        opened: seekable.
        most: bytes from its beginning, and of a single `read`.
    """

    def __init__(self, opened: BinaryIO | GzipFile, most: int) -> None:
        self._opened, self._most = opened, most

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, or to the end."""
        left = self._most - self._opened.tell()
        if size > left:
            raise self._refusal
        content = self._opened.read(size if size >= 0 else left + 1)
        if len(content) > left:
            raise self._refusal
        return content

    def seek(self, place: int, whence: int = 0) -> int:
        """Move."""
        if place > self._most:
            raise self._refusal
        return self._opened.seek(place, whence)

    @property
    def _refusal(self) -> InputError:
        return InputError(f"expected at most {self._most:,} bytes unpacked, got more")

    def tell(self) -> int:
        """Say where it is."""
        return self._opened.tell()
