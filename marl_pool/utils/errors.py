"""The one exception for input that a user can mend.

It imports nothing, so that the command line can catch it without loading torch.
"""


class InputError(ValueError):
    """A name, option, shape or file that does not fit.

    The message is one line: what was expected, what came, and where. The command
    line prints it without a traceback and exits with status 2.
    """


class UnfitTokensError(InputError):
    """Tokens whose number or types a head or a perturbation cannot work with.

    An evaluation reports it as a gap where only a perturbed case has such tokens.
    """


class StoppedError(InputError):
    """A run that cannot go on: what was seen, in one line. It can be resumed."""
