"""One-line errors of runs that cannot continue, and checks of what they resume from."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marl_pool.runs import Run
from marl_pool.utils.errors import StoppedError
from marl_pool.utils.manifest import MANIFEST
from marl_pool.utils.text import printable

START_ANOTHER = "there is nothing to resume, start another run"


class StepError(Exception):
    """An iteration that training cannot continue after; the message says why."""


def stopped(run: Run, where: str, reason: str) -> StoppedError:
    """Build the error that ends a run.

    Args:
        run: that ends.
        where: ``iteration 3``, say.
        reason: why.
    """
    checkpoint = run.latest_checkpoint()
    kept = "no checkpoint yet" if checkpoint is None else f"kept {checkpoint}"
    return StoppedError(f"{where}: {reason}; {kept}")


@contextmanager
def writing(run: Run, where: str, what: str) -> Iterator[None]:
    """Stop with one line if the disk is full or gone; see `stopped`."""
    try:
        yield
    except OSError as error:
        raise stopped(run, where, f"cannot write {what}: {_line(error)}") from error


def checkpoint_to_resume(run: Run) -> Path | None:
    """Find the checkpoint to resume a run from: the newest that is whole.

    Newer ones that are damaged are named on stderr, with what is wrong.

    Returns:
        None for a run that was stopped before its first checkpoint.

    Raises:
        StoppedError: all of them are damaged or gone; a run never starts over by
            itself.
    """
    found = run.latest_checkpoint()
    newer = run.checkpoints()
    newer = newer[newer.index(found) + 1 :] if found else newer
    damaged = "; ".join(f"{path}: {run.damage_of(path)}" for path in reversed(newer))
    if damaged and found is None:
        raise StoppedError(
            f"{run.path} has no intact checkpoint: {damaged}; {START_ANOTHER}"
        )
    if found is None and (trace := run.trace_of_checkpoints()):
        raise StoppedError(
            f"{run.path} has no checkpoint, but {trace}; {START_ANOTHER}"
        )
    if damaged:
        say(f"{damaged}; going on from {found}")
    if found and (lost := run.policy_damage()):
        say(f"{run.policy_dir} is damaged: {lost}")
    if not damaged and found and not (found / MANIFEST).is_file():
        say(f"{found} has no {MANIFEST}, so its integrity cannot be checked")
    return found


def trim_log(run: Run, iteration: int) -> None:
    """Drop what was logged after an iteration, and report damage in the rest."""
    if not iteration and run.metrics_path.is_file():
        say(f"{run.path} has no checkpoint yet: it starts over, and its metrics too")
    if lost := run.resume_at(iteration):
        say(lost)


def say(line: str) -> None:
    """Print a warning that does not stop a run."""
    print(f"marl-pool: {printable(line)}", file=sys.stderr, flush=True)


@contextmanager
def reading(run: Run, checkpoint: Path) -> Iterator[None]:
    """Stop with one line if a checkpoint that is whole cannot be read.

    It may be written by another version of this package or of a dependency, which
    fails in its own way; all of these errors mean the same to a user.
    """
    try:
        yield
    except Exception as error:
        way = "remove it to go on from the checkpoint before"
        if len(run.checkpoints()) == 1:
            way = START_ANOTHER
        raise StoppedError(
            f"{checkpoint} cannot be read: {_line(error)}; {way}"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
