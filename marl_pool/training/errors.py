"""One-line errors of runs that cannot continue, and checks of their checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marl_pool.files.manifest import MANIFEST
from marl_pool.runs.run import Run
from marl_pool.utils.errors import StoppedError, one_line
from marl_pool.utils.text import print_line

START_ANOTHER = "there is nothing to resume, start another run"


class StepError(Exception):
    """Failure of an iteration after which training cannot continue."""


def stopped_error(run: Run, where: str, reason: str) -> StoppedError:
    """Build the error that ends a run; ``where`` is a place such as ``iteration 3``."""
    checkpoint = run.latest_checkpoint()
    note = "no checkpoint yet" if checkpoint is None else f"kept {checkpoint}"
    return StoppedError(f"{where}: {reason}; {note}")


@contextmanager
def writing(run: Run, where: str, item: str) -> Iterator[None]:
    """Raise `stopped_error` if writing fails, such as on a full disk."""
    try:
        yield
    except OSError as error:
        raise stopped_error(
            run, where, f"cannot write {item}: {one_line(error)}"
        ) from error


def checkpoint_to_resume(run: Run) -> Path | None:
    """Find the newest intact checkpoint, from which a run is resumed.

    Damage of newer checkpoints is reported on stderr.

    Returns:
        The checkpoint; None for a run that was stopped before its first one.

    Raises:
        StoppedError: all checkpoints are damaged or missing; a run never restarts
            from scratch on its own.
    """
    checkpoint = run.latest_checkpoint()
    # List the damaged checkpoints that are newer than the newest intact one.
    newer = run.checkpoints()
    newer = newer[newer.index(checkpoint) + 1 :] if checkpoint else newer
    damaged = "; ".join(f"{path}: {run.damage_of(path)}" for path in reversed(newer))
    # Refuse to start again where earlier work may be lost.
    if checkpoint is None and (trace := damaged or run.trace_of_checkpoints()):
        problem = "no intact checkpoint:" if damaged else "no checkpoint, but"
        raise StoppedError(f"{run.path} has {problem} {trace}; {START_ANOTHER}")
    # Warn of damage that does not prevent resuming.
    if damaged:
        print_line(f"{damaged}; continuing from {checkpoint}")
    if checkpoint and (lost := run.policy_damage()):
        print_line(f"{run.policy_dir} is damaged: {lost}")
    if not damaged and checkpoint and not (checkpoint / MANIFEST).is_file():
        print_line(
            f"{checkpoint} has no {MANIFEST}, so its integrity cannot be checked"
        )
    return checkpoint


def trim_log(run: Run, iteration: int) -> None:
    """Remove the rows logged after an iteration, and report damage to the others."""
    if not iteration and run.metrics_path.is_file():
        print_line(f"{run.path} has no checkpoint yet: it starts again from scratch")
    if lost := run.resume_at(iteration):
        print_line(lost)


@contextmanager
def reading(run: Run, checkpoint: Path) -> Iterator[None]:
    """Raise `StoppedError` for any failure to read an intact checkpoint.

    Another version of this package or of a dependency may have written it, so the
    failure can be any exception.
    """
    try:
        yield
    except Exception as error:
        advice = "remove it to continue from the previous checkpoint"
        if len(run.checkpoints()) == 1:
            advice = START_ANOTHER
        raise StoppedError(
            f"{checkpoint} cannot be read: {one_line(error)}; {advice}"
        ) from error
