"""Errors of Hydra, ANTLR and OmegaConf in this package's words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml
from hydra.errors import HydraException
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from marl_pool.utils.errors import InputError

CLOSING = {"[": "]", "{": "}", "(": ")"}
KEY = re.compile(r"[+~]{0,2}[\w./@-]+")
MERGED = "Error merging override "


def wrong_override(text: str) -> InputError:
    """Build the error for an override that Hydra's grammar does not take."""
    key, given, value = text.partition("=")
    if not given or not KEY.fullmatch(key):
        return InputError(f"{text!r}: expected key=value")
    if missing := _not_closed(value):
        return InputError(f"{key}: expected a closing {missing}, got {value!r}")
    return InputError(
        f"{key}: expected a number, a word, [list], {{key: value}} or 'text', got "
        f"{value!r}; quote special characters: {key}='…'"
    )


def _not_closed(value: str) -> str:
    """Return the bracket or quote that is missing at the end, or an empty string."""
    awaited = [""]
    for each in value:
        if awaited[-1] in ("'", '"'):  # brackets in quotes are text
            if each == awaited[-1]:
                awaited.pop()
        elif each in ("'", '"'):
            awaited.append(each)
        elif each in CLOSING:
            awaited.append(CLOSING[each])
        elif each == awaited[-1]:
            awaited.pop()
    return awaited[-1]


@contextmanager
def one_line_errors(verb: str) -> Iterator[None]:
    """Turn errors of a composition into `InputError`."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise _unresolved(verb, error) from error
    except (HydraException, yaml.YAMLError) as error:
        raise _not_composed(verb, error) from error


def _unresolved(verb: str, error: OmegaConfBaseException) -> InputError:
    # The message names the interpolation that has no value.
    reason = str(error).partition("\n")[0]
    named = re.search(r"(?:'|type )([^']+)", reason)
    name = named[1] if named else ""
    if isinstance(error, InterpolationKeyError):
        got = f"${{{name}}}, which is no key of {verb}"
    elif isinstance(error, UnsupportedInterpolationType):
        got = f"the unknown function {name} in ${{…}}"
    elif isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        got = "none"
    elif "Recursive" in reason or "parent node" in reason:
        got = "an interpolation of itself"
    else:
        got = reason.rpartition("resolving interpolation: ")[2].strip('"')
    return InputError(f"{error.full_key or verb}: expected a value, got {got}")


def _not_composed(verb: str, error: Exception) -> InputError:
    text = " ".join(str(error).partition("\n\n")[0].split())
    if isinstance(error, HydraException) and text.startswith(MERGED):
        return wrong_override(text.removeprefix(MERGED).lstrip("+"))
    return InputError(f"configuration of {verb}: {text}")
