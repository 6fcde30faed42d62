"""Errors that a user can fix, and the extras that install missing modules.

It imports no torch, so that the command line can catch them at once.
"""

import errno
import importlib.util
import inspect
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marl_pool.utils.text import single_line

PACKAGE = Path(__file__).parents[1]
STDLIB = Path(sysconfig.get_path("stdlib"))
NUMERICS = ("numpy", "torch", "ray")
"""Packages whose errors are usually caused by the code that calls them."""
REFUSALS = frozenset(
    getattr(errno, name)
    for name in (
        "EACCES",
        "EDQUOT",
        "EFBIG",
        "EIO",
        "ELOOP",
        "EMFILE",
        "ENAMETOOLONG",
        "ENFILE",
        "ENOSPC",
        "EPERM",
        "EROFS",
        "ESTALE",
    )
    if hasattr(errno, name)
)
"""Codes of an `OSError` with which a system refuses a legitimate request."""
OUT_OF_MEMORY = (
    "allocate memory",
    "out of memory",
    "failed to map segment",
    "bad_alloc",
    "start new thread",
    "error return without exception set",
)
"""Words of errors that libraries raise in place of a `MemoryError`."""


class InputError(ValueError):
    """A name, option, shape or file that does not fit.

    The message is one line: what was expected, what was passed, and where. The command
    line prints it without a traceback and exits with status 2.
    """


class UnfitTokensError(InputError):
    """Tokens whose number or types a head or a perturbation cannot work with.

    If only a perturbed case has such tokens, an evaluation has a missing value.
    """


class UnfitRuleError(InputError):
    """A rule of arrivals or departures that a task has no entities for.

    If only a row of a suite has such a rule, an evaluation has a missing value.
    """


class StoppedError(InputError):
    """A run that cannot continue. The message is one line; the run can be resumed."""


class RemoteError(Exception):
    """An error in another process; the message is what `described` returned there."""


def one_line(error: BaseException) -> str:
    """Return an error's message as one line of at most 200 characters."""
    return single_line(error)[:200] or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def described(error: BaseException) -> str:
    """Return an error's type, message and `place` in one line of bounded length."""
    if isinstance(error, RemoteError):
        return str(error)
    message = f": {one_line(error)}" if str(error).strip() else ""
    return f"{type(error).__name__}{message}{place(error)}"


def place(error: BaseException) -> str:
    """Return the line of foreign code that raised an error, such as `` (file.py:12)``.

    It is the innermost line of a user's file that this package called, or else of an
    installed package other than `NUMERICS`; empty if there is neither.
    """
    places: dict[bool, str] = {}  # by whether the file is of an installed package
    is_called = False
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        *_, installed = str(file).rpartition("-packages/")
        is_installed = installed != str(file)
        if file.is_relative_to(PACKAGE):
            is_called = True
        elif is_installed:
            is_foreign = installed.partition("/")[0] not in NUMERICS
            if is_called and is_foreign:
                places[True] = f" ({installed}:{line})"
        elif is_called and file.is_file() and not file.is_relative_to(STDLIB):
            places[False] = _line_of(file, line)
    return places.get(False) or places.get(True, "")


def source(function: Any) -> str:
    """Return the line where a function begins, such as `` (file.py:12)``, if known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _line_of(Path(code.co_filename), code.co_firstlineno)


def _line_of(file: Path, line: int) -> str:
    is_near = file.is_relative_to(Path.cwd())
    return f" ({file.relative_to(Path.cwd()) if is_near else file}:{line})"


def foreign(error: BaseException) -> str:
    """Describe an error of the machine or of a user's code in one line.

    Such errors are a full or unwritable disk, exhausted memory, and whatever ends a
    process, such as `SystemExit`, raised by a user's code.

    Returns:
        The line; empty for any other error, such as a bug of this package.
    """
    if isinstance(error, OSError) and error.errno in REFUSALS:
        prefix = f"{error.filename}: " if error.filename is not None else ""
        return f"{prefix}{error.strerror}"
    is_memory = isinstance(error, MemoryError) or (
        isinstance(error, ImportError | OSError | RuntimeError | SystemError)
        and any(words in str(error) for words in OUT_OF_MEMORY)
    )
    if is_memory:
        return f"out of memory: {described(error)}"
    if isinstance(error, Exception) or not place(error):
        return ""
    return described(error)


@contextmanager
def explain_os_errors(prefix: str) -> Iterator[None]:
    """Turn an `OSError` into an `InputError` with its reason after ``prefix``."""
    try:
        yield
    except OSError as error:
        # Errors of `shutil` have a text alone.
        raise InputError(f"{prefix}: {error.strerror or one_line(error)}") from error


# Optional dependencies

EXTRAS = {
    "ray": "rllib",
    "tensorboardX": "rllib",
    "cma": "evolve",
    "stable_baselines3": "sb3",
    "matplotlib": "plots",
    "pandas": "plots",
    "cv2": "plots",
    "PIL": "plots",
    "sklearn": "analysis",
    "ale_py": "atari",
    "Box2D": "box2d",
    "pygame": "box2d",
    "pybullet": "bullet",
    "mujoco": "mujoco",
    "imageio": "mujoco",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "websockets": "play",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "optuna": "search",
    "huggingface_hub": "hub",
    "wandb": "wandb",
    "tensordict": "torchrl",
    "torchrl": "torchrl",
}
"""Extras by the modules that they install and the base installation lacks."""


@contextmanager
def explain_missing_modules() -> Iterator[None]:
    """Turn the failed import of a module of `EXTRAS` into an `InputError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise InputError(install_hint(module)) from error


def validate_module(module: str) -> None:
    """Raise an `InputError` if a module of `EXTRAS` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise InputError(install_hint(module))


def install_hint(module: str) -> str:
    """Return the command that installs a module of `EXTRAS`."""
    return f'this needs {module}: pip install "marl-pool[{EXTRAS[module]}]"'
