"""Overrides ``key=value`` of a configuration, typed or made in Python."""

import json
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from marl_pool.utils.errors import InputError

KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
"""A key, or keys of nested sections joined by dots."""
CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
"""A call, such as ``range(0,5)``."""
INTEGER = re.compile(r"[+-]?(0|[1-9](_?\d)*)")
REAL = re.compile(
    r"[+-]?((\d(_?\d)*)?\.\d(_?\d)*|\d(_?\d)*(\.|\.?(?=e)))(e[+-]?\d+)?|[+-]?(inf|nan)",
    re.IGNORECASE,
)
WORDS = {"null": None, "true": True, "false": False}
"""Values that are written as words, in any case; ``on`` and ``no`` are text."""
CLOSING = {"[": "]", "{": "}"}
TEXT = re.compile(r"(?:\$\{(?:[^{}]|\{[^{}]*\})*\}|\\.|[^,\[\]{}'\"\\])+", re.DOTALL)
"""Text without quotes: no comma, bracket or quote, except in an interpolation."""
ESCAPED = re.compile(r"\\([,\[\]{}'\"\\ ])")
"""A character that is written with a backslash before it."""
PATH = r"[\w./-]+"
NAME = re.compile(rf"\s*({PATH})\s*:")
"""Key of a mapping."""
NAMED = ("fixed", "modules")
"""Keys at the top whose mappings have names of groups as keys. Such a mapping is one
value: a later one replaces it."""
MOST_DIGITS = 400
"""Digits of the longest integer: no float is larger, and Python refuses thousands."""
MOST_VALUES = 10_000
"""Most values of one key."""


class Override(NamedTuple):
    """Values of one key.

    Attributes:
        key: name of a key, with the names of its sections before it.
        values: plain data.
        swept: True if it is written as several values, each for a separate run.
    """

    key: str
    values: list[Any]
    swept: bool = False

    @property
    def value(self) -> Any:
        """The only value."""
        return self.values[0]


def parse(text: str) -> Override:
    """Parse ``key=value``; raise `InputError` for several values."""
    override = parse_any(text)
    if override.swept:
        raise InputError(
            f"{override.key}: expected one value, got several: {text!r}. "
            "Write a list as key=[a,b]; `marl-pool sweep` trains with each value"
        )
    return override


def parse_any(text: str) -> Override:
    """Parse ``key=value``, or several values: ``key=a,b`` or ``key=range(0,5)``.

    A value is ``null``, ``true``, a number, ``[a, list]``, ``{a: mapping}``, or text,
    whose commas, brackets and quotes need quotes around them.

    Raises:
        InputError: anything else, with what was expected.
    """
    key, sign, written = text.partition("=")
    key = key.lstrip("+")
    if not sign or not KEY.fullmatch(key):
        raise InputError(f"{text!r}: expected key=value")
    call = CALL.fullmatch(written.strip())
    if call and call[1] in ("range", "choice"):
        return Override(key, _call(key, *call.groups()), swept=True)
    if call and call[1] in ("sort", "shuffle", "interval", "glob", "tag"):
        raise InputError(
            f"{key}: expected values, such as a,b or range(0,3), got {text!r}"
        )
    values = _Values(key, written).read()
    return Override(key, values, swept=len(values) > 1)


def overrides_of(options: Mapping[str, Any]) -> list[Override]:
    """Convert keyword options to overrides, one for each key.

    ``{"pooling": {"name": "ada", "query": "mean"}}`` becomes ``pooling=ada`` and
    ``pooling.query=mean``: the ``name`` of a section chooses the option of its group.

    Raises:
        InputError: a key that cannot be one, or a value that is not plain data.
    """
    return [part for key, value in options.items() for part in _flatten(key, value)]


def _flatten(key: str, value: Any) -> list[Override]:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise InputError(f"expected a key such as ppo.lr, got {key!r:.80}")
    # Keys of a mapping that are no options, such as names of groups, stay together.
    is_section = isinstance(value, Mapping) and bool(value) and key not in NAMED
    if not is_section or ("." in key and not all(map(_is_option, value))):
        return [Override(key, [plain(key, value)])]
    options, parts = dict(value), []
    if "." not in key and "name" in options:  # the option of a group comes first
        parts = _flatten(key, options.pop("name"))
    return parts + overrides_of({f"{key}.{name}": options[name] for name in options})


def _is_option(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


def flat_options(
    config: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the full key and value of each option; an empty section counts as one."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_options(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def is_among(key: str, names: Collection[str]) -> bool:
    """Return True if a dotted key, or the section it begins with, is among names."""
    return key in names or key.partition(".")[0] in names


def plain(key: str, value: Any) -> Any:
    """Convert numpy's numbers, paths and tuples to the data that YAML holds."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(key, item) for item in value]
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        if isinstance(value, type):
            kind = f"a class; '{value.__module__}:{value.__qualname__}' names it"
        raise InputError(
            f"{key}: expected numbers, text, lists and mappings, got {kind}"
        )
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(PATH, name):
            raise InputError(f"{key}: expected keys that are names, got {name!r:.80}")
    return {name: plain(key, item) for name, item in value.items()}


def scalar(text: str) -> Any:
    """Read a number, a word of `WORDS`, or text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text) and len(text) <= MOST_DIGITS:
        return int(text)
    return float(text) if REAL.fullmatch(text) else text


def written(value: Any) -> str:
    """Write plain data as `parse` reads it."""
    if isinstance(value, str):
        bare = TEXT.fullmatch(value) and value == value.strip() and "\\" not in value
        if bare and scalar(value) == value and not CALL.fullmatch(value):
            return value
        escaped = value.replace("\\", r"\\").replace("'", r"\'")
        return f"'{escaped}'"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {written(value[key])}' for key in value)}}}"
    return repr(value) if type(value) in (int, float) else json.dumps(value)


def _call(key: str, function: str, arguments: str) -> list[Any]:
    values = _Values(key, arguments).read()
    if function == "choice":
        return values
    finite = [type(value) in (int, float) and math.isfinite(value) for value in values]
    if not 1 <= len(values) <= 3 or not all(finite) or values[2:] == [0]:
        raise InputError(
            f"{key}: expected range(stop), range(start,stop) or "
            f"range(start,stop,step), got range({arguments})"
        )
    # Decimal numbers as they are written: (0.4 - 0.1) / 0.1 is not 3 in binary.
    exact = [Fraction(str(value)) for value in values]
    start, stop = (Fraction(0), exact[0]) if len(exact) == 1 else exact[:2]
    step = exact[2] if len(exact) == 3 else Fraction(1)
    count = math.ceil((stop - start) / step)
    if count > MOST_VALUES:
        raise InputError(
            f"{key}: expected at most {MOST_VALUES:,} trials, got {count:,}"
        )
    number = int if all(type(value) is int for value in values) else float
    return [number(start + i * step) for i in range(count)]


class _Values:
    """Reader of the values in a text, from left to right."""

    def __init__(self, key: str, text: str) -> None:
        self.key, self.text, self.position = key, text, 0

    def read(self) -> list[Any]:
        """Read values with commas between them, up to the end of the text."""
        if not self.text.strip():
            return [""]
        return self._items("", self._value)

    def _items(self, closing: str, read: Callable[[], Any]) -> list[Any]:
        """Read items with commas between them, and ``closing`` after them."""
        items = [read()]
        while (following := self._next()) == ",":
            self.position += 1
            items.append(read())
        if following != closing:
            raise self._error(closing)
        self.position += 1
        return items

    def _value(self) -> Any:
        first = self._next()
        if first in ("'", '"') and first:
            body = re.compile(rf"\s*{first}((?:\\.|[^{first}\\])*){first}", re.DOTALL)
            return ESCAPED.sub(r"\1", self._match(body, first).strip()[1:-1])
        if first in CLOSING:
            self.position += 1
            closing = CLOSING[first]
            if self._next() == closing:
                self.position += 1
                return [] if closing == "]" else {}
            if closing == "]":
                return self._items(closing, self._value)
            return dict(self._items(closing, self._entry))
        return scalar(ESCAPED.sub(r"\1", self._match(TEXT).strip()))

    def _entry(self) -> tuple[str, Any]:
        name = self._match(NAME).strip().removesuffix(":").rstrip()
        return name, self._value()

    def _match(self, pattern: re.Pattern[str], closing: str = "") -> str:
        matched = pattern.match(self.text, self.position)
        if not matched:
            raise self._error(closing)
        self.position = matched.end()
        return matched[0]

    def _next(self) -> str:
        """Skip spaces, and return the character after them; "" at the end."""
        following = self.text[self.position :].lstrip()
        self.position = len(self.text) - len(following)
        return following[:1]

    def _error(self, closing: str) -> InputError:
        if closing and closing not in self.text[self.position + 1 :]:
            return InputError(
                f"{self.key}: expected a closing {closing}, got {self.text!r}"
            )
        return InputError(
            f"{self.key}: expected a number, a word, [list], {{key: value}} or 'text', "
            f"got {self.text!r}; quote special characters: \"{self.key}='…'\""
        )
