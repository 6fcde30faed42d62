"""The exceptions for input that a user can mend.

It imports no torch, so that the command line can catch them at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """A name, option, shape or file that does not fit.

    The message is one line: what was expected, what was passed, and where. The command
    line prints it without a traceback and exits with status 2.
    """


class UnfitTokensError(InputError):
    """Tokens whose number or types a head or a perturbation cannot work with.

    Where only a perturbed case has such tokens, an evaluation has a missing value.
    """


class StoppedError(InputError):
    """A run that cannot continue. The message is one line; the run can be resumed."""


@contextmanager
def explain_os_errors(prefix: str) -> Iterator[None]:
    """Turn an `OSError` into an `InputError` with its reason after ``prefix``."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{prefix}: {error.strerror}") from error
