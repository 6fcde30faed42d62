"""Training loop of all methods: resume, step, log, checkpoint, stop.

A run is resumed from the newest intact checkpoint, and the damage of newer ones is
printed. Without an intact one, resuming is an error, unless the run was stopped before
its first checkpoint.
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from marl_pool.compiled.choice import (
    chosen_kernels,
    describe_kernels,
    has_kernel,
    use_kernels,
)
from marl_pool.envs.timeout import EnvTimeoutError, limit_calls, raised_by
from marl_pool.runs.run import PARTS, RETURN, Best, Run, iteration_of
from marl_pool.training import errors
from marl_pool.training.callbacks import CallbackError, make_callbacks, notify, sessions
from marl_pool.training.settings import RunConfig
from marl_pool.training.signals import Interruptible
from marl_pool.utils.devices import without_denormals
from marl_pool.utils.errors import InputError, StoppedError, described
from marl_pool.utils.progress import Progress
from marl_pool.utils.text import print_line
from marl_pool.version import __version__


def never() -> bool:
    """Return False: the default ``should_stop``."""
    return False


class Iteration(NamedTuple):
    """Result of one iteration of a method."""

    metrics: Mapping[str, float]
    """Numbers to log, by name; the same names in every iteration."""
    progress: Mapping[str, float]
    """Numbers displayed by the progress bar, by name."""


class TrainingMethod(ABC):
    """Base of training methods such as PPO, which `TrainingLoop` runs.

    Args:
        run: run that receives the results.
        total: amount of training in the whole run, in `unit`.

    Attributes:
        unit: unit of the amount of training, such as steps.
        is_late: set by the loop; returns True once the time limit is over and the
            session has an iteration. A long step should then give up and return None.
    """

    unit: ClassVar[str]
    is_late: Callable[[], bool] = staticmethod(never)

    def __init__(self, run: Run, total: int) -> None:
        self.run, self.total = run, total

    def session(self) -> AbstractContextManager[object]:
        """Hold resources such as processes while the loop runs."""
        return nullcontext()

    @property
    @abstractmethod
    def done(self) -> int:
        """Amount of training so far, in `unit`."""

    def rounds(self) -> Iterator[None]:
        """Yield before each round of iterations.

        Code before a yield may collect data. Code after the last yield finishes the
        run; a run that stops early does not reach it.
        """
        yield

    @property
    def round_is_over(self) -> bool:
        """True after the last iteration of the round."""
        return self.done >= self.total

    @abstractmethod
    def step(self, iteration: int) -> Iteration | None:
        """Run one iteration; return None if it had no data to learn from.

        A step that gives up because of `is_late` leaves the state unchanged.

        Args:
            iteration: number of the iteration, from 1.

        Raises:
            StepError: training cannot continue.
        """

    @abstractmethod
    def save(self, checkpoint: Path) -> None:
        """Write the state that `restore` needs for an exact resume."""

    @abstractmethod
    def restore(self, checkpoint: Path) -> None:
        """Restore the state that `save` wrote."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Files of an intact checkpoint; ``*`` matches any name."""
        return PARTS[self.run.verb]

    @property
    def is_due(self) -> bool:
        """True to save a checkpoint now, in addition to the regular ones."""
        return False

    @property
    def score_of(self) -> str:
        """Meaning of `score`, a kind of `marl_pool.runs.run.Best`."""
        return RETURN

    def score(self, iteration: int) -> float | None:
        """Return the score of the policy; None if checkpoints are not compared."""
        return None

    def accept(self, score: float) -> bool:
        """Return True to keep the policy with this score as the best so far."""
        return self.run.best is None or score > self.run.best.score

    def save_policy(self, folder: Path) -> None:
        """Write the policy that `score` refers to."""
        raise NotImplementedError(f"{type(self).__name__} has no score")

    def where(self, iteration: int) -> str:
        """Describe an iteration in a message."""
        return f"iteration {iteration}"


class TrainingLoop:
    """Run a training method from the last checkpoint to the end.

    After Ctrl-C, SIGTERM, ``should_stop`` or the time limit, the current iteration is
    completed and the run is saved. A failure is an error of one line that names the
    checkpoint to resume from.

    Args:
        run: run that receives metrics, checkpoints and the best policy.
        config: configuration of the run.
        should_stop: called before each iteration; True saves the run and ends it.
    """

    def __init__(
        self, run: Run, config: RunConfig, should_stop: Callable[[], bool]
    ) -> None:
        self.run, self.config = run, config
        self.should_stop, self.stopping, self.has_stepped = should_stop, False, False
        self.has_logged = self.ended = False
        self.iteration, self.began = 0, 0.0
        self.ctrl_c = Interruptible()

    def train(self, build: Callable[[Path | None], TrainingMethod]) -> None:
        """Build a method and run its iterations.

        Args:
            build: constructs the method, given the checkpoint to resume from or None;
                the loop calls `TrainingMethod.restore` itself.

        Raises:
            InputError: parts of the configuration that do not fit each other.
            StoppedError: training cannot continue; the last good checkpoint remains.
            KeyboardInterrupt: Ctrl-C or SIGTERM, after the run was saved.
        """
        limit = getattr(self.config, "env_timeout", None)  # a fit plays no episodes
        with (
            use_kernels(self.config.kernels, self.config.device),
            without_denormals(),
            limit_calls(limit, self._failure),
        ):
            try:
                self._train(build)
            except InputError:
                raise
            except EnvTimeoutError as error:
                raise StoppedError(self._failure(str(error))) from error
            except CallbackError as error:
                cause = error.__cause__ or error
                if isinstance(cause, InputError) and not self.has_stepped:
                    raise cause from None
                reason = f"a callback failed: {described(cause)}"
                raise self._with_traceback(reason) from error
            except Exception as error:
                # The user's environment may fail; any other failure is a bug of ours.
                if not (call := raised_by(error)):
                    raise
                reason = f"{described(error)}, raised by {call}"
                raise self._with_traceback(reason) from error

    def _with_traceback(self, reason: str) -> StoppedError:
        file = self.run.write_error(traceback.format_exc())
        return StoppedError(self._failure(f"{reason}; traceback in {file}"))

    def _failure(self, reason: str) -> str:
        where = f"after iteration {self.iteration}"
        return str(errors.stopped_error(self.run, where, reason))

    def _train(self, build: Callable[[Path | None], TrainingMethod]) -> None:
        torch.set_num_threads(self.config.threads)
        on_cpu = self.config.device == "cpu"  # the compiler itself warns for a GPU
        if on_cpu and chosen_kernels() != "torch" and not has_kernel("cpu"):
            print_line(
                "no kernel was compiled, so torch computes everything, several times "
                "slower: install g++ or clang, then marl_pool again"
            )
        self.callbacks = make_callbacks(self.config.callbacks)
        checkpoint = errors.checkpoint_to_resume(self.run)
        self.method = method = build(checkpoint)
        method.is_late = self._is_late
        self.origin = self._origin()
        if checkpoint is not None:
            self._report_changes(checkpoint)
        # The parts fit each other, so store the configuration of this session.
        if self.config.plain != self.run.config:
            self.run.write_config(self.config.plain)

        # The start of processes counts towards the time limit.
        self.began = time.monotonic()
        with method.session(), sessions(self.callbacks, self.run):
            if checkpoint is not None:
                with errors.reading(self.run, checkpoint):
                    method.restore(checkpoint)
                self.iteration = iteration_of(checkpoint)
            # Rows logged after the checkpoint are computed again.
            with self._writing("metrics.csv"):
                errors.trim_log(self.run, self.iteration)
            for _ in method.rounds():
                with self.ctrl_c:
                    self._run_round()
                    # A round ends with a checkpoint, and so does a stopped run.
                    self._save()
                self.ctrl_c.raise_if_requested()
                if self._must_stop():
                    return

    def _origin(self) -> dict[str, str]:
        """Return the versions and kernels that determine this session's rounding."""
        kernels = describe_kernels(self.config.device)
        if kernels.startswith("torch"):  # the order of its sums depends on threads
            kernels += f", threads={self.config.threads}"
        return {
            "kernels": kernels,
            "marl_pool": __version__,
            "torch": torch.__version__,
        }

    def _report_changes(self, checkpoint: Path) -> None:
        if change := self.run.config_change(checkpoint):
            print_line(f"{change}: the run continues with its current settings")
        origin = self.run.origin(checkpoint)
        changes = [
            f"{name} {origin[name]} is now {value}"
            for name, value in self.origin.items()
            if origin.get(name, value) != value
        ]
        if changes:
            print_line(
                f"{'; '.join(changes)}: the numbers of {self.run.path} are no longer "
                "those of an uninterrupted run"
            )

    def _run_round(self) -> None:
        method, every = self.method, self.config.checkpoint.every
        progress = Progress(
            method.total,
            unit=method.unit,
            done=method.done,
            time_limit=self._seconds_left(),
        )
        with progress:
            while not method.round_is_over and not self._must_stop():
                # Take a step; a method returns None if it has nothing to log.
                self.has_stepped, number = True, self.iteration + 1
                try:
                    step = method.step(number)
                except StoppedError:
                    raise
                except (errors.StepError, InputError) as error:
                    where = method.where(number)
                    raise errors.stopped_error(self.run, where, str(error)) from error
                if step is None:
                    continue
                # Log before saving: a checkpoint's manifest holds the row.
                self.iteration = number
                with self._writing("metrics.csv"):
                    self.run.log({"iteration": number, **step.metrics})
                self.has_logged = True
                progress.update(method.done, **step.progress)
                self.ended = notify(self.callbacks, self.run, self.run.metrics.last)
                if method.is_due or number % every == 0:
                    self._save()

    def _save(self) -> None:
        """Write a checkpoint; if it is the best, its policy becomes the run's."""
        method = self.method
        # The last iteration may have its checkpoint already.
        if self.iteration == self.run.last_saved_iteration:
            return
        score = method.score(self.iteration)
        is_best = score is not None and method.accept(score)
        best = None
        if score is not None and is_best:
            best = Best(self.iteration, score, method.score_of)
        with self._writing("the checkpoint"):
            parts = method.parts
            save = self.run.checkpoint(
                self.iteration, parts, best, self.origin, self.ended
            )
            with save as folder:
                method.save(folder)
            # If the process is killed here, `Run.lock` saves the policy later.
            if best is not None:
                with self.run.save_policy_dir(best) as policy_folder:
                    method.save_policy(policy_folder)
            self.run.prune(self.config.checkpoint.keep)
        if self.run.on_saved is not None:
            self.run.on_saved()

    def _writing(self, item: str) -> AbstractContextManager[None]:
        return errors.writing(self.run, self.method.where(self.iteration), item)

    def _must_stop(self) -> bool:
        # Take at least one step in each session, however short the time limit.
        seconds = self._seconds_left()
        late = self.has_stepped and seconds is not None and seconds <= 0
        # It reports the iteration, too, and so is asked first.
        stopping = self.stopping or self.should_stop() or self.ended
        self.stopping = stopping or late or self.ctrl_c.requested
        return self.stopping

    def _is_late(self) -> bool:
        # Sessions without an iteration would make no progress, however many there are.
        seconds = self._seconds_left()
        return self.has_logged and seconds is not None and seconds <= 0

    def _seconds_left(self) -> float | None:
        limit = self.config.time_limit
        return None if limit is None else self.began + limit - time.monotonic()
