"""How a run that cannot go on says so: in one line, with what it has kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marl_pool.errors import StoppedError
from marl_pool.runs import Run


def stopped(run: Run, where: str, reason: str) -> StoppedError:
    """Build what ends a run.

    Args:
        run: that ends.
        where: how far it was: ``iteration 3``, say.
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


@contextmanager
def reading(run: Run, checkpoint: Path) -> Iterator[None]:
    """Stop with one line if a checkpoint is damaged.

    Files can be damaged in many ways, and whatever reads them fails in as many; all
    mean the same to a user.
    """
    try:
        yield
    except Exception as error:
        way = "go on from the checkpoint before"
        if len(run.checkpoints()) == 1:
            way = "begin anew, for there is no other"
        raise StoppedError(
            f"{checkpoint} cannot be read: {_line(error)}; remove it to {way}"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
