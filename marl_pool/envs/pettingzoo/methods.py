"""Signatures of the methods by which a user's environment is called."""

import inspect
from typing import Any

from marl_pool.utils.errors import InputError, source

EXPECTED = {"reset": "reset(seed=None, options=None)", "step": "step(action)"}


def validate_methods(env: Any) -> None:
    """Raise an `InputError` if ``reset`` or ``step`` do not take their arguments.

    Here, ``reset`` is called with a seed; wrappers pass on options too.
    """
    inner, seed = getattr(env, "unwrapped", env), {"seed": 0}
    _validate_method(env, "step", None)
    _validate_method(env, "reset", **seed)
    if inner is not env:
        _validate_method(inner, "step", None)
        _validate_method(inner, "reset", **seed, options=None)


def _validate_method(env: Any, name: str, *arguments: Any, **keywords: Any) -> None:
    method = getattr(env, name, None)
    try:
        signature = inspect.signature(method)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return  # of what has no signature, nothing is known
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise InputError(
            f"env.module: {type(env).__name__}: expected {EXPECTED[name]}, got "
            f"{name}{signature}{source(method)}"
        ) from error
