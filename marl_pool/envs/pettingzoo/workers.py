"""Processes that step PettingZoo environments, with results in shared memory."""

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from mmap import mmap
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from marl_pool.envs.pettingzoo.env_copy import ParallelSimulator, ParallelStep
from marl_pool.envs.pettingzoo.teams import StepArrays
from marl_pool.envs.simulation import Simulator
from marl_pool.utils.errors import InputError, RemoteError, described

if TYPE_CHECKING:
    from marl_pool.envs.pettingzoo.env import PettingZooEnv

PROGRAM = """
import json, sys
sys.path[:], descriptors = json.loads(sys.argv[1])
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.pettingzoo.workers import serve
serve(PettingZooEnv, *descriptors)
"""
"""Python code of a process. It imports neither the user's script nor its state."""


class Command(NamedTuple):
    """Steps of one simulator."""

    place: int
    """Where the last result is written in the shared arrays."""
    number: int
    """Number of the simulator in its process, which builds new ones."""
    seed: int | None
    """Seed of a reset before the steps; None to go on."""
    actions: Sequence[np.ndarray]
    reads_state: bool = False
    """True to return the state, without a step."""


class Reply(NamedTuple):
    """The last step of a `Command`, or its error."""

    place: int
    step: ParallelStep | None
    """The parts that are not in the shared arrays; masks without their values."""
    error: str = ""
    """Message of an `InputError`, or else what `described` returns."""
    traceback: str = ""
    """Traceback of an error that is not an `InputError`."""

    def result(self) -> ParallelStep:
        """Return the step, or raise the error."""
        if self.step is not None:
            return self.step
        if not self.traceback:
            raise InputError(self.error)
        error = RemoteError(self.error)
        error.add_note(self.traceback)
        raise error


class _Processes(NamedTuple):
    """Processes that have built their environment, and their resources."""

    arrays: StepArrays
    """In shared memory."""
    running: list[subprocess.Popen[bytes]]
    connections: list[Connection]
    life: int
    """Descriptor of the pipe whose end tells them that this process is gone."""

    def end(self) -> None:
        """Kill them, whatever they do; they have nothing to save."""
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()
        for connection in self.connections:
            connection.close()
        os.close(self.life)


class _Reserve:
    """Processes that no environment uses, by the options they were built for."""

    def __init__(self) -> None:
        self.is_open = False
        # Garbage collection may call `put` while this thread holds the lock.
        self.lock = threading.RLock()
        self.processes: dict[bytes, list[_Processes]] = {}

    def take(self, key: bytes) -> _Processes | None:
        """Return processes of a key, or None."""
        with self.lock:
            waiting = self.processes.get(key)
            return waiting.pop() if waiting else None

    def put(self, key: bytes, processes: _Processes) -> None:
        """Keep processes, or end them unless the reserve is open."""
        with self.lock:
            if self.is_open:
                self.processes.setdefault(key, []).append(processes)
                return
        processes.end()

    def close(self) -> None:
        """End all, and keep no more."""
        with self.lock:
            self.is_open = False
            waiting = [*itertools.chain(*self.processes.values())]
            self.processes.clear()
        for processes in waiting:
            processes.end()


_reserve = _Reserve()


@contextmanager
def kept_workers() -> Iterator[None]:
    """Let environments with equal options reuse processes, one after another.

    Starting them takes seconds, and an evaluation has an environment for each case.
    """
    if _reserve.is_open:
        yield
        return
    _reserve.is_open = True
    try:
        yield
    finally:
        _reserve.close()


class EnvWorkers:
    """Processes that step simulators of `PettingZooEnv` at the same time.

    A simulator is built in one of the processes, in turn, and stays there. Its resets
    and steps are only queued; `finish` lets all processes work and waits for them. They
    write observations and rewards into arrays in shared memory, which has no name, so
    that nothing remains of it. They are in a separate session, where no Ctrl-C reaches
    them, and end with the parent process, or with this object unless `kept_workers`
    keeps them. After any error they end, and the object can no longer be used.

    Args:
        count: number of processes.
        places: number of results that `finish` can wait for.
        arrays: arrays with this many rows, which become shared.
        env_options: arguments of `PettingZooEnv`.

    Raises:
        InputError: options that cannot be sent to another process, or an environment
            that cannot be built there.
    """

    def __init__(
        self,
        count: int,
        places: int,
        arrays: StepArrays,
        env_options: Mapping[str, Any],
    ) -> None:
        module = env_options["module"]
        refusal = f"env.workers: expected 1, because {module} cannot be built in"
        try:
            start = pickle.dumps((places, dict(env_options)))
        except Exception as error:  # pickling runs any object's own code
            raise InputError(
                f"{refusal} another process: {described(error)}"
            ) from error
        if module.startswith("__main__:"):
            raise InputError(f"{refusal} another process: write it in a module")
        self.places = places
        self._commands: list[list[Command]] = [[] for _ in range(count)]
        self._simulators = 0
        key = b"%d " % count + start
        if (kept := _reserve.take(key)) is not None:
            self._hold(key, kept)
            return
        # A process that is busy learns from this pipe that its parent is gone.
        life, end = os.pipe()
        memory = _memory(arrays.num_bytes)
        arrays.share(mmap(memory, arrays.num_bytes))
        self._hold(key, _Processes(arrays, [], [], end))
        try:
            for _ in range(count):
                self._start(life, memory)
            for connection in self._connections:
                connection.send_bytes(start)
            for number in range(count):
                _, failure = self._receive(number)
                if failure:
                    raise InputError(f"{refusal} another process: {failure}")
        except BaseException:
            self._end()
            raise
        finally:
            os.close(life)
            os.close(memory)

    def _hold(self, key: bytes, processes: _Processes) -> None:
        self._all, self.arrays = processes, processes.arrays
        self._processes, self._connections = processes.running, processes.connections
        self._release = weakref.finalize(self, _reserve.put, key, processes)

    def _end(self) -> None:
        if self._release.detach():
            self._all.end()

    def simulator(self) -> "RemoteSimulator":
        """Return a new simulator."""
        number, process = divmod(self._simulators, len(self._processes))
        self._simulators += 1
        return RemoteSimulator(self, process, number)

    def post(self, process: int, *command: Any) -> ParallelStep:
        """Queue a `Command`; `finish` returns its last step."""
        place = sum(map(len, self._commands))
        if place == self.places:
            raise InputError(
                f"env.workers: expected a selection of at most {self.places // 2} "
                "environments, the number in the batch, got more"
            )
        self._commands[process].append(Command(place, *command))
        return ParallelStep(place=place)

    def finish(self, posted: Sequence[ParallelStep]) -> list[ParallelStep]:
        """Run the queued commands, and return the steps in the order of ``posted``.

        Raises:
            InputError: an environment broke a rule, as in `ParallelSimulator`.
            RemoteError: an environment raised another error, or a process ended.
        """
        commands, replies = self._commands, dict[int, Reply]()
        self._commands = [[] for _ in commands]
        try:
            for connection, queue in zip(self._connections, commands, strict=True):
                if queue:
                    connection.send(queue)
            for number, queue in enumerate(commands):
                if queue:
                    replies |= {reply.place: reply for reply in self._receive(number)}
            # Raise the first error by environment, as without processes.
            for place in sorted(replies):
                replies[place].result()
        except BaseException:
            self._end()
            raise
        return [replies[step.place].result() for step in posted]

    def _start(self, life: int, memory: int) -> None:
        parent_end, child_end = Pipe()
        descriptors = (child_end.fileno(), life, memory)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps([sys.path, descriptors])],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )
        child_end.close()
        self._connections.append(parent_end)
        self._processes.append(process)

    def _receive(self, number: int) -> Any:
        try:
            return self._connections[number].recv()
        except (EOFError, ConnectionError):
            status = self._processes[number].wait()
            cause = (
                f"by signal {signal.Signals(-status).name}"
                if status < 0
                else f"with status {status}"
            )
            raise RemoteError(
                f"process {number + 1} of env.workers={len(self._processes)} ended "
                f"{cause}"
            ) from None


class RemoteSimulator(Simulator[ParallelStep]):
    """A simulator in another process, stepped by `EnvWorkers.post`.

    Args:
        workers: its process and the others.
        process: index of the process.
        number: number of the simulator there.
    """

    def __init__(self, workers: EnvWorkers, process: int, number: int) -> None:
        self.workers, self.process, self.number = workers, process, number

    @override
    def reset(self, seed: int) -> ParallelStep:
        return self.workers.post(self.process, self.number, seed, ())

    @override
    def step(self, action: np.ndarray) -> ParallelStep:
        return self.workers.post(self.process, self.number, None, (action,))

    @override
    def replay(self, seed: int, actions: Sequence[np.ndarray]) -> ParallelStep:
        return self.workers.post(self.process, self.number, seed, actions)

    def state(self) -> ParallelStep:
        """Return what `ParallelSimulator.state` does."""
        return self.workers.post(self.process, self.number, None, (), True)


def _memory(num_bytes: int) -> int:
    """Return the descriptor of a file in memory that has no name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("marl_pool")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, num_bytes)
    return descriptor


def serve(
    env_class: "type[PettingZooEnv]", commands: int, life: int, memory: int
) -> None:
    """Run a process of `EnvWorkers` until the parent closes its end of the pipes.

    Args:
        env_class: `PettingZooEnv`, which this module cannot import.
        commands: descriptor of the connection to the parent process.
        life: descriptor of a pipe that ends with the parent process.
        memory: descriptor of the shared memory.
    """
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    # The parent has built an environment too, and has shown its warnings.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    connection = Connection(commands)
    with suppress(EOFError, ConnectionError):
        try:
            places, env_options = connection.recv()
            env = env_class(1, **env_options)
            simulators = ServedSimulators(env, places, memory)
        except (EOFError, ConnectionError):
            raise
        except BaseException as error:  # whatever a user's class raises
            is_ours = isinstance(error, InputError)
            connection.send((None, str(error) if is_ours else described(error)))
            return
        connection.send((None, ""))
        while True:
            connection.send([simulators.run(command) for command in connection.recv()])


def _end_with(life: int) -> None:
    os.read(life, 1)
    os._exit(1)


class ServedSimulators:
    """The simulators of this process.

    Args:
        env: the environment that builds them.
        places: number of rows of the shared arrays.
        memory: descriptor of the memory of the arrays.
    """

    def __init__(self, env: "PettingZooEnv", places: int, memory: int) -> None:
        self.env, self.arrays = env, env.shared_arrays(places)
        self.arrays.share(mmap(memory, self.arrays.num_bytes))
        self.simulators: list[Simulator[ParallelStep]] = []

    def run(self, command: Command) -> Reply:
        """Step a simulator; an error is part of the reply."""
        try:
            return Reply(command.place, self._step(command))
        except InputError as error:
            return Reply(command.place, None, str(error))
        except BaseException as error:  # whatever a user's environment raises
            text = traceback.format_exc()
            return Reply(command.place, None, described(error), text)

    def _step(self, command: Command) -> ParallelStep:
        while len(self.simulators) <= command.number:
            self.simulators.append(self.env.new_simulator())
        simulator, step = self.simulators[command.number], ParallelStep()
        if command.reads_state:
            assert isinstance(simulator, ParallelSimulator)
            return simulator.state()
        if command.seed is not None:
            step = simulator.replay(command.seed, command.actions)
        else:
            for action in command.actions:
                step = simulator.step(action)
        self.arrays.clear(command.place)
        self.arrays.write(command.place, step)
        masks = dict.fromkeys(step.masks)
        return step._replace(
            observations={}, rewards={}, masks=masks, place=command.place
        )
