"""Simulators in a process of their own, for those that would disturb this one."""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

import numpy as np

from marl_pool.envs.simulation.simulator import Played, Simulators
from marl_pool.utils.errors import StoppedError
from marl_pool.utils.names import inheritance

PATIENCE = 5
"""Seconds that a process is given to end by itself."""


class SimulatorProcess:
    """`Simulators` behind a pipe: a message and an answer for each call.

    The process starts with the first call. It ends with this object, with the
    interpreter, or when the interpreter is killed. What the simulators print is not
    shown; their exceptions are raised here.

    Args:
        target: ``package.module:Class`` of the `Simulator`.
        options: keyword arguments of its constructor, picklable.
    """

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        self._target, self._options = target, dict(options)
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None

    def begin(
        self,
        numbers: Sequence[int],
        seeds: Sequence[int],
        pasts: Sequence[Sequence[np.ndarray]],
    ) -> Played:
        """See `Simulators.begin`."""
        return self._call("begin", numbers, seeds, pasts)

    def step(self, numbers: Sequence[int], actions: np.ndarray) -> Played:
        """See `Simulators.step`."""
        return self._call("step", numbers, actions)

    def _call(self, name: str, *arguments: Any) -> Played:
        if self._process is None:
            self._start()
        pipe, process = self._pipe, self._process
        assert pipe is not None
        assert process is not None
        try:
            pipe.send((name, arguments))
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            pipe.close()
            raise StoppedError(
                f"the process of the simulators ({self._target}) has ended, "
                f"exit status {process.wait()}{self._last_words()}"
            ) from error
        except BaseException:  # Ctrl-C: the answer would be taken for the next one's
            pipe.close()
            raise
        if isinstance(answer, BaseException):
            raise answer
        played: Played = answer
        return played

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed by `_end`
        # -P: nothing in the working directory takes the place of an installed module.
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                **inheritance(),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
        )
        theirs.close()
        weakref.finalize(self, _end, self._pipe, self._process, self._printed)
        self._pipe.send((self._target, self._options))

    def _last_words(self) -> str:
        assert self._printed is not None
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").split("\n")
        return "".join(f": {line.strip()}" for line in [*filter(None, lines)][-1:])


def _end(
    pipe: Connection, process: subprocess.Popen[bytes], printed: IO[bytes]
) -> None:
    pipe.close()
    printed.close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(pipe: Connection) -> None:
    """Answer calls until the other end of ``pipe`` is closed."""
    target, options = pipe.recv()
    module, _, name = target.partition(":")

    def build() -> Any:
        return getattr(importlib.import_module(module), name)(**options)

    simulators = Simulators(build)
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = getattr(simulators, call)(*arguments)
        except Exception as error:  # whatever it is, the caller is to hear of it
            answer = _portable(error)
        pipe.send(answer)


def _portable(error: Exception) -> Exception:
    """The exception, or one with its text if it cannot be sent."""
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    error.add_note(text)
    return error


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to answer
    serve(Connection(int(sys.argv[1])))
