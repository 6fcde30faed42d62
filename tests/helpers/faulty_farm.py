"""An environment that fails, once or always."""

import os
import signal
from pathlib import Path

from helpers.farm import FoxAndHens


class EscapedError(RuntimeError):
    """An exception that a user's own environment may raise."""


class FaultyFarm(FoxAndHens):
    """FoxAndHens that fails in this object's step ``fault_step``.

    ``fault`` is "raise" or "kill" (the process, as the kernel does when memory runs
    out), both only in the object with environment 0, or "init" (raise in the
    constructor, except in the process ``home``). The process is killed ``kills`` times,
    counted by files beside ``diary``. That file, if given, gets a line for each episode
    that starts: process, environment, episode.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        fault: str | None = None,
        fault_step: int = 0,
        kills: int = 0,
        home: int = 0,
        diary: str | None = None,
        **options,
    ) -> None:
        if fault == "init" and os.getpid() != home:
            raise EscapedError("no hens\nhere")
        super().__init__(num_envs, **options)
        self.fault, self.fault_step, self.kills = fault, fault_step, kills
        self.diary = None if diary is None else Path(diary)
        self.num_steps = 0

    def place(self, rows, keys):
        super().place(rows, keys)
        if self.diary is not None:
            with self.diary.open("a") as out:
                for env, episode in zip(
                    self.env_ids[rows].tolist(),
                    self.episodes[rows].tolist(),
                    strict=True,
                ):
                    out.write(f"{os.getpid()} {env} {episode}\n")

    def advance(self, actions):
        self.num_steps += 1
        is_due = self.num_steps == self.fault_step and 0 in self.env_ids
        if is_due and self.fault == "raise":
            raise EscapedError("the hens\nescaped")
        if is_due and self.fault == "kill":
            num_kills = len(list(self.diary.parent.glob("killed-*")))
            if num_kills < self.kills:
                (self.diary.parent / f"killed-{num_kills}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().advance(actions)
