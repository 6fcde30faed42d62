"""PettingZoo envs that end their process in the second step, or never return."""

import os
import signal
import sys
import time
from collections.abc import Callable

from helpers.rule_breaker import Breaker


def _interrupt() -> None:
    raise KeyboardInterrupt


def _spin() -> None:
    while True:
        pass


ENDS: dict[str, Callable[[], object]] = {
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(4),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1000),
    "spins": _spin,
    "interrupts": _interrupt,
}


class FatalEnv(Breaker):
    """An env that fails in one of the ways in `ENDS`, or not at all."""

    def __init__(self, how=None, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.how = how

    def step(self, actions):
        if self.time == 1 and self.how:
            ENDS[self.how]()
        return super().step(actions)


class Unpicklable:
    """An option that cannot be sent to another process."""

    def __reduce__(self):
        raise TypeError("it is mine")


def with_option(option=None, render_mode=None):
    """Build an env with any object as its option."""
    return Breaker(render_mode=render_mode)
