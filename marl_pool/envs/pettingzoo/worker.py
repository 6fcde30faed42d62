"""The program of a process of `EnvWorkers`."""

import mmap
import os
import threading
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.pettingzoo.env_copy import ParallelStep
from marl_pool.envs.pettingzoo.workers import Command, Reply
from marl_pool.envs.simulation import Simulator
from marl_pool.utils.errors import InputError, described


def serve(commands: int, life: int, memory: int) -> None:
    """Work until the parent process closes its end of the pipes.

    Args:
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
            simulators = ServedSimulators(places, env_options, memory)
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
        places: number of rows of the shared arrays.
        env_options: arguments of `PettingZooEnv`.
        memory: descriptor of the memory of the arrays.
    """

    def __init__(
        self, places: int, env_options: Mapping[str, Any], memory: int
    ) -> None:
        self.env = PettingZooEnv(1, **env_options)
        self.arrays = self.env.shared_arrays(places)
        self.arrays.share(mmap.mmap(memory, self.arrays.num_bytes))
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
