"""Simulators in a separate process, for those whose imports disturb this one.

``python -m marl_pool.envs.simulation.process FD`` serves calls from a pipe.
"""

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
from typing_extensions import override

from marl_pool.envs.simulation.simulator import (
    ActionLog,
    SimulatorBackend,
    Simulators,
    SimulatorStep,
)
from marl_pool.utils.errors import StoppedError
from marl_pool.utils.names import inheritance

PATIENCE = 5
"""Seconds to wait for a process to exit before it is killed."""


class SimulatorProcess(SimulatorBackend):
    """Simulators in a child process, with a message for each call.

    The process starts at the first call, and exits with this object or with the
    interpreter, even a killed one. The output of the simulators is hidden; their
    exceptions are raised here.

    Args:
        target: ``package.module:Class`` of the `Simulator`.
        options: picklable keyword arguments of its constructor.

    Raises:
        StoppedError: in a call, the process has exited.
    """

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        self._target, self._options = target, dict(options)
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None

    @override
    def replay(self, ids: Sequence[int], logs: Sequence[ActionLog]) -> SimulatorStep:
        return self._call("replay", ids, logs)

    @override
    def step(self, ids: Sequence[int], actions: np.ndarray) -> SimulatorStep:
        return self._call("step", ids, actions)

    def _call(self, name: str, *arguments: Any) -> SimulatorStep:
        # Start the process at the first call.
        if self._process is None:
            self._start()
        pipe, process = self._pipe, self._process
        assert pipe is not None
        assert process is not None
        # A call is one message, and so is its answer or its exception.
        try:
            pipe.send((name, arguments))
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            pipe.close()
            raise StoppedError(
                f"the simulator process ({self._target}) has ended, "
                f"exit status {process.wait()}{self._last_line()}"
            ) from error
        except BaseException:  # Ctrl-C: the next call would receive this answer
            pipe.close()
            raise
        # Raise in this process what the simulator raised.
        if isinstance(answer, BaseException):
            raise answer
        step: SimulatorStep = answer
        return step

    def _start(self) -> None:
        # The process inherits one end of a pipe, and prints to a temporary file.
        self._pipe, child_end = Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed by `_stop`
        # -P: files in the working directory must not shadow installed modules.
        command = [sys.executable, "-P", "-m", __name__, str(child_end.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[child_end.fileno()],
            env=os.environ | inheritance() | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
        )
        child_end.close()
        # Stop the process when this object is collected.
        weakref.finalize(self, _stop, self._pipe, self._process, self._printed)
        self._pipe.send((self._target, self._options))

    def _last_line(self) -> str:
        assert self._printed is not None
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").split("\n")
        return "".join(f": {line.strip()}" for line in [*filter(None, lines)][-1:])


def _stop(
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
    # The first message names the simulator and its options.
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
        except Exception as error:  # any exception is raised in the caller
            answer = _portable(error)
        pipe.send(answer)


def _portable(error: Exception) -> Exception:
    """Return the exception, or a RuntimeError with its text if it cannot be pickled."""
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    error.add_note(text)
    return error


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    serve(Connection(int(sys.argv[1])))
