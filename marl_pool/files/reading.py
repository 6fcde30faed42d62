"""Reading files that somebody else may have made, within bounds.

None of these functions runs code from a file, and none takes more memory than its
bound, whatever the file claims about itself.
"""

import errno
import json
import re
import stat
import zipfile
import zlib
from collections.abc import Callable
from gzip import GzipFile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import yaml
from typing_extensions import override

from marl_pool.utils.errors import InputError
from marl_pool.utils.text import single_line

if TYPE_CHECKING:
    import numpy as np

# The largest files of the package have a few thousand bytes of YAML and a million of
# JSON.
YAML_BYTES, JSON_BYTES = 1 << 20, 1 << 24
YAML_NODES = 50_000
"""Keys, values and list entries, with all aliases written out."""
YAML_DEPTH = 100
"""Nested mappings and lists."""
NPZ_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""How NumPy compresses arrays."""
ARRAY_BYTES = 1 << 30
"""Bytes of all arrays in a file, unpacked."""
TOO_DEEP = f"expected at most {YAML_DEPTH} levels of nesting, got more"
PREFIX = "tag:yaml.org,2002:"
INT, FLOAT, MERGE = f"{PREFIX}int", f"{PREFIX}float", f"{PREFIX}merge"
PLAIN = frozenset(
    f"{PREFIX}{kind}"
    for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)
"""The types that YAML shares with JSON."""
NUMBERS = {
    INT: r"[-+]?([0-9][0-9_]*|0o[0-7_]+|0x[0-9a-fA-F_]+)\Z",
    FLOAT: r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?\Z"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z",
}
"""Forms of numbers in YAML 1.2, with underscores, by tag."""


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: it is missing, cannot be read, or is not a regular file.
        ValueError: it is too large, or not JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(read_bytes(file, JSON_BYTES))


def read_bytes(file: Path, max_bytes: int) -> bytes:
    """Read a file of at most ``max_bytes``.

    Raises:
        OSError: it is missing, cannot be read, or is not a regular file.
        InputError: it is larger.
    """
    # A pipe or a device might never end.
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    with file.open("rb") as opened:
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InputError(f"expected at most {max_bytes:,} bytes, got more")
    return content


def read_yaml(file: Path) -> Any:
    """Read a YAML file of plain data, such as JSON can hold.

    Raises:
        FileNotFoundError: it does not exist.
        InputError: it cannot be read, is not YAML, holds other types, or is too large
            or nested too deeply, with all its aliases written out.
    """
    try:
        return parse_yaml(read_bytes(file, YAML_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise
    except RecursionError:
        raise InputError(f"{file}: {TOO_DEEP}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:  # InputError is a ValueError
        raise InputError(f"{file} cannot be read: {_problem(error)}") from error


def _problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and mark:
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return single_line(error)


def parse_yaml(text: str) -> Any:
    """Parse YAML text.

    Raises:
        InputError: too many nodes, too deep, an alias inside itself, another type, a
            key twice.
        yaml.YAMLError: it is not YAML.
        ValueError: a number that Python cannot read, or a tag of another type.
        RecursionError: nested too deeply even to be parsed.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _count_nodes(root, {}, 0)
        return loader.construct_document(root)
    except LookupError as error:  # PyYAML's for `!!bool x`
        raise ValueError("expected values of the types in their tags") from error
    finally:
        loader.dispose()


def _resolvers(is_kept: Callable[[str], bool]) -> dict[str, Any]:
    """Return the forms of some of YAML 1.1's scalars, then `NUMBERS`."""
    resolvers = {
        first: [(tag, form) for tag, form in forms if is_kept(tag)]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+.0123456789":
        for tag, form in NUMBERS.items():
            resolvers.setdefault(first, []).append((tag, re.compile(form)))
    return resolvers


class _Loader(yaml.SafeLoader):
    """Loader without dates; it bounds the number of nodes before any is built.

    Numbers are as in YAML 1.2, also with underscores: 1e-2 is one, 010 is 10, and
    1:30 is text.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = _resolvers(
        lambda tag: tag in PLAIN - {INT, FLOAT}
    )

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = 0

    @override
    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > YAML_NODES:
            raise InputError(f"expected at most {YAML_NODES:,} values, got more")
        return super().compose_node(parent, index)

    @override
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            # Several merges are allowed.
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            value = self.construct_object(key)
            if value in keys:
                line = key.start_mark.line + 1
                raise InputError(
                    f"line {line}: expected every key once, got {key.value!r:.80} again"
                )
            keys.add(value)
        return node

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node).replace("_", "").lower()
        kind = text.lstrip("+-")[:2]
        return int(text, {"0x": 16, "0o": 8}.get(kind, 10))

    def construct_real(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node).replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor(INT, _Loader.construct_integer)
_Loader.add_constructor(FLOAT, _Loader.construct_real)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which is a number in YAML 1.1 or 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = _resolvers(lambda tag: True)


def dump_yaml(content: Any, **options: Any) -> str:
    """Write plain data as YAML, such as `parse_yaml` reads, with PyYAML's options."""
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, **options))


def _count_nodes(node: Any, counts: dict[int, int | None], depth: int) -> int:
    """Count the nodes below ``node`` with every alias expanded.

    ``counts`` holds the counts so far by ``id``, None while a node is being counted.
    """
    # Tags could construct objects.
    if node.tag not in PLAIN:
        raise InputError(f"expected plain data, got a value of the type {node.tag!r}")
    if isinstance(node, yaml.ScalarNode):
        return 1
    # An alias repeats a node that was counted already.
    if id(node) in counts:
        count = counts[id(node)]
        if count is None:
            raise InputError("expected plain data, got an alias inside of itself")
        return count
    if depth > YAML_DEPTH:
        raise InputError(TOO_DEEP)
    # Mark the node as open, so that an alias inside it is detected.
    counts[id(node)] = None
    total = 1
    # A mapping's value is a list of pairs.
    pairs = isinstance(node, yaml.MappingNode)
    for child in chain.from_iterable(node.value) if pairs else node.value:
        total += _count_nodes(child, counts, depth + 1)
        if total > YAML_NODES:
            raise InputError(
                f"expected at most {YAML_NODES:,} values with aliases written out, got "
                "more"
            )
    counts[id(node)] = total
    return total


def read_npz(file: Path, max_bytes: int = ARRAY_BYTES) -> "dict[str, np.ndarray]":
    """Read the arrays of an npz file; nothing is unpickled.

    Raises:
        OSError, ValueError: it cannot be read, is damaged, or holds objects.
        InputError: it has more than ``max_bytes``, unpacked, or is not an npz file.
    """
    # A single array has another format.
    with file.open("rb") as opened:
        if opened.read(6) == b"\x93NUMPY":
            raise InputError(f"{file}: expected an .npz file, got a single array")
    try:
        with zipfile.ZipFile(file) as archive:
            # zipfile reads no more of a member than the size that it claims.
            members = archive.infolist()
            # NumPy uses no other methods; LZMA and bzip2 have errors not caught below.
            if {member.compress_type for member in members} - NPZ_METHODS:
                raise ValueError(f"{file} is damaged: compressed as NumPy never does")
            names = {member.filename: member.file_size for member in members}
            if sum(names.values()) > max_bytes:
                raise InputError(
                    f"{file}: expected at most {max_bytes:,} bytes unpacked, got more"
                )
            return {name.removesuffix(".npy"): _array(archive, name) for name in names}
    # RuntimeError is a flag or method unknown to zipfile, KeyError a version unknown
    # to `_array`.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _array(archive: zipfile.ZipFile, name: str) -> "np.ndarray":
    import numpy as np

    with archive.open(name) as opened:
        # Read the header, which must describe plain numbers.
        version = np.lib.format.read_magic(opened)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, in_columns, dtype = read_header(opened)
        if dtype.hasobject:
            raise ValueError(f"{name}: expected numbers, got objects")
        content = opened.read()
        # The content must have the size that the header claims, else `reshape` fails.
        flat = np.frombuffer(content, dtype)
        # Keep the order in memory, which affects how BLAS rounds a product.
        array = flat.reshape(shape, order="F" if in_columns else "C")
        return array.copy(order="K")


class Bounded:
    """An open, seekable binary file that cannot be read beyond ``max_bytes``."""

    def __init__(self, opened: BinaryIO | GzipFile, max_bytes: int) -> None:
        self._opened, self._max_bytes = opened, max_bytes

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, or to the end."""
        remaining = self._max_bytes - self._opened.tell()
        self._validate(size <= remaining)
        content = self._opened.read(size if size >= 0 else remaining + 1)
        self._validate(len(content) <= remaining)
        return content

    def seek(self, place: int, whence: int = 0) -> int:
        """Move to a place within the bound."""
        self._validate(place <= self._max_bytes)
        return self._opened.seek(place, whence)

    def tell(self) -> int:
        """Return the current place."""
        return self._opened.tell()

    def _validate(self, fits: bool) -> None:
        if not fits:
            raise InputError(
                f"expected at most {self._max_bytes:,} bytes unpacked, got more"
            )
