"""Callbacks of runs: user code that is called after each iteration.

``callbacks=[my_package.my_module:MyCallback]`` sets them in the configuration of any
training run; ``callbacks=[wandb]`` logs to Weights & Biases.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from typing_extensions import override

from marl_pool.options.names import resolve
from marl_pool.runs.run import Run
from marl_pool.utils.errors import explain_missing_modules
from marl_pool.utils.text import print_line

CALLBACKS = {"wandb": "marl_pool.training.callbacks:WandB"}
"""Callbacks by short name."""


class Callback:
    """Base of callbacks; constructed without arguments, once per session."""

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Hold resources from the first iteration of a session to its end."""
        yield

    def on_iteration(self, run: Run, row: Mapping[str, float]) -> object:
        """Act on the end of an iteration; return True to save the run and end it.

        Args:
            run: run, whose metrics include the row.
            row: row of ``metrics.csv``.
        """


class WandB(Callback):
    """Log to Weights & Biases (https://docs.wandb.ai); a resumed run continues its log.

    The project is ``marl_pool``, or the environment variable ``WANDB_PROJECT``;
    ``WANDB_MODE=offline`` logs to files in the run's folder.
    """

    @override
    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        with explain_missing_modules():
            import wandb

        # The id depends on the folder, so that a resumed run continues its log. W&B
        # accepts no commas and colons, which names of trials have.
        path = run.path.absolute()
        name = re.sub(r"[:;,#?/'\\%]", "_", path.name[-40:])
        self.log = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "marl_pool"),
            name=path.name,
            id=f"{name}-{zlib.crc32(bytes(path)):08x}",
            resume="allow",
            config=run.config,
            dir=path,
        )
        try:
            yield
        finally:
            self.log.finish()

    @override
    def on_iteration(self, run: Run, row: Mapping[str, float]) -> None:
        self.log.log(dict(row), step=int(row["iteration"]))


class CallbackError(Exception):
    """Failure of a callback; the cause is the exception that it raised."""


def callback_classes(names: Sequence[str]) -> list[type[Callback]]:
    """Import callbacks by name.

    Raises:
        InputError: an unknown name, or no subclass of `Callback`.
        UntrustedError: a name in a file that is not allowed.
    """
    return [resolve(name, CALLBACKS, "callback", Callback) for name in names]


def make_callbacks(names: Sequence[str]) -> list[Callback]:
    """Construct callbacks by name.

    Raises:
        InputError: as in `callback_classes`.
        CallbackError: a constructor raised.
    """
    classes = callback_classes(names)
    with _failing():
        return [cls() for cls in classes]


@contextmanager
def sessions(callbacks: Sequence[Callback], run: Run) -> Iterator[None]:
    """Enter the sessions of all callbacks.

    Raises:
        CallbackError: a session raised at its start or end.
    """
    with ExitStack() as stack:
        for callback in callbacks:
            stack.enter_context(_session(callback, run))
        yield


def notify(callbacks: Sequence[Callback], run: Run, row: Mapping[str, Any]) -> bool:
    """Notify all callbacks of an iteration; return True if one ends the run.

    Raises:
        CallbackError: a callback raised.
    """
    with _failing():
        answers = [callback.on_iteration(run, row) for callback in callbacks]
    return any(answers)


@contextmanager
def _session(callback: Callback, run: Run) -> Iterator[None]:
    with _failing():
        session = callback.session(run)
        session.__enter__()
    try:
        yield
    except BaseException as error:
        # A callback can neither swallow nor replace what ended the run.
        try:
            session.__exit__(type(error), error, error.__traceback__)
        except BaseException as other:
            if other is not error:
                print_line(f"a callback failed, too: {other!r}")
        raise
    with _failing():
        session.__exit__(None, None, None)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CallbackError from error
