"""The one exception for input that a user can mend.

It imports nothing, so that the command line can catch it without loading torch.
"""


class InputError(ValueError):
    """A name, option, shape or file that does not fit.

    The message is one line: what was expected, what came, and where. The command
    line prints it without a traceback and exits with status 2.
    """


class StoppedError(InputError):
    """A run that cannot go on: what was seen, in one line. It can be resumed."""
