"""Run folders: configuration, metrics, checkpoints, policies and results.

    RUN/config.yaml           every key of the run, and the package's version
    RUN/metrics.csv           one row per iteration
    RUN/events.out.tfevents…  the same for TensorBoard, where tensorboardX is installed
    RUN/checkpoints/iter_…    training state, each with its manifest.json
    RUN/policy/               the best policy, for `marl_pool.load_policy`, and its
                              iteration and score in best.json
    RUN/evaluation/           results of `marl-pool evaluate`
    RUN/videos/               results of `marl-pool render`
    RUN/error.txt             tracebacks, where an exception stopped a run or process

Files and folders are written to a temporary name, synced and then renamed, so that a
crash or a power cut leaves the old content or the new (`marl_pool.files.atomic`).
Checksums detect later damage (`marl_pool.files.manifest`).
"""

import math
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

from typing_extensions import override

from marl_pool.files import atomic, manifest
from marl_pool.files.reading import read_json
from marl_pool.options.names import short_name
from marl_pool.options.overrides import flat_options, is_among
from marl_pool.pretrained import PREFIX, pretrained_names
from marl_pool.runs.metrics import ITERATION, Metrics, free
from marl_pool.utils.errors import InputError, explain_os_errors
from marl_pool.utils.paths import dated, user_path
from marl_pool.utils.text import print_line, quoted
from marl_pool.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIG, METRICS, LOCK, ERROR = "config.yaml", "metrics.csv", ".lock", "error.txt"
VERSION, VERB, TRAIN = "package_version", "verb", "train"
ENV_CONTEXT = frozenset(
    ("num_envs", "seed", "first_env", "first_episode", "device", "dtype")
)
"""Arguments of an environment that the program sets, not its configuration."""
BEST, POLICY = "best.json", "policy"
CHECKPOINT = re.compile(r"iter_(\d{6}|[1-9]\d{6,11})")
"""Names of checkpoints; no run has iterations of more than 12 digits."""
POLICY_PARTS = ("policy/config.json", "policy/model.safetensors")
LEARNER = "algorithm/learner_group/learner"
BEST_PARTS = ("best/config.json", "best/model.safetensors")
PARTS = {
    "train": (
        "algorithm/algorithm_state.pt",
        "algorithm/env_runner/state.pt",
        f"{LEARNER}/state.pt",
        f"{LEARNER}/rl_module/*/module_state.pt",
        "progress.json",
        *POLICY_PARTS,
    ),
    "evolve": ("strategy.npz", "state.json", *BEST_PARTS, *POLICY_PARTS),
    "clone": ("learner.safetensors", "progress.json", *POLICY_PARTS),
    "fit": ("learner.safetensors", "learner.json", "progress.json"),
}
"""Files of a complete checkpoint, by verb; a star is any name."""
EVALUATION, VIDEOS = "evaluation", "videos"
OUTPUTS = (EVALUATION, VIDEOS)
"""Folders written without holding the run's lock."""
EPISODE_CONTROLS = (
    "time_limit",
    "env_timeout",
    "checkpoint",
    "storage",
    "callbacks",
    "env.workers",
)
"""Keys that any run that plays episodes may change when it is resumed."""
CONTROLS = {
    "train": ("total_steps", *EPISODE_CONTROLS, "resources"),
    "evolve": ("total_generations", *EPISODE_CONTROLS, "resources"),
    "clone": ("total_batches", *EPISODE_CONTROLS),
    "fit": (
        "time_limit",
        "checkpoint",
        "storage",
        "callbacks",
        "data_dir",
        "threads",
        "kernels",
        "device",
    ),
}
"""Keys, and sections of keys, that ``resume`` may change, by verb."""
OF_MACHINE = frozenset(
    {"time_limit", "env_timeout", "callbacks", "checkpoint", "resources", "storage"}
    | {"threads", "kernels", "device"}
)
"""Top-level keys that say where and how a run computes, not what."""


RETURN, LOSS, NEWEST = "return", "loss", "newest"


class Best(NamedTuple):
    """The best checkpoint so far."""

    iteration: int
    score: float
    """Higher is better."""
    of: str = RETURN
    """What the score is: `RETURN`, the negative of a `LOSS`, or the `NEWEST`."""

    @property
    def number(self) -> str:
        """The return or the loss; empty where none was measured."""
        if self.of == NEWEST or math.isinf(self.score):
            return ""
        return f"loss {-self.score:.4g}" if self.of == LOSS else f"{self.score:.4g}"

    def __str__(self) -> str:
        """Return the number and the iteration, as a command prints them."""
        if self.of == NEWEST:
            return f"iteration {self.iteration}, the newest, as returns do not compare"
        if not self.number:
            return f"iteration {self.iteration}, before an episode was over"
        return f"{self.number} at iteration {self.iteration}"


def _checked(best: Best) -> Best:
    """Return a record, or raise an error if it holds no iteration and number."""
    if type(best.iteration) is not int or not _is_number(best.score):
        raise ValueError(f"expected an iteration and a score, got {best[:2]!r:.80}")
    return best


def _is_number(value: object) -> bool:
    """Return True for a float, or an integer of 64 bits."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


@dataclass(eq=False, repr=False)
class Run:
    """The folder of one run; see the module's docstring for its layout.

    Construct it by `create` or `open`.

    Attributes:
        path: path of the folder.
        config: the checked configuration, as plain data.
        version: version of the package that wrote ``config``.
        verb: command that created the run: train, evolve, clone or fit.
        metrics: ``metrics.csv``.
        on_saved: called after each checkpoint.
        results: folder of evaluations and videos, in place of those in ``path``.
    """

    path: Path
    config: dict[str, Any]
    version: str
    verb: str = TRAIN
    on_saved: Callable[[], object] | None = field(default=None, init=False)
    _is_folder_new: bool = field(default=False, init=False)
    _first_event: int = field(default=0, init=False)
    _events: Any = field(default=None, init=False)
    _damage: dict[Path, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.path / METRICS)
        self.results: Path | None = None

    @override
    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The folder's name, also where the path is ``.``."""
        return self.path.resolve().name

    @classmethod
    def create(
        cls, path: str | Path, config: Mapping[str, Any], verb: str = TRAIN
    ) -> "Run":
        """Create the folder of a new run with a checked configuration.

        Raises:
            InputError: the folder cannot be created, or has files other than leftovers
                of a run that was killed before it had a configuration.
        """
        path = user_path(path)
        if path.is_dir() and files_in(path):
            raise InputError(
                f"{path}: expected a new or empty folder for the run, got one with "
                f"files; to continue a run: `marl-pool resume {quoted(path)}`"
            )
        is_folder_new = not path.is_dir()
        with explain_os_errors(f"{path} cannot be made"):
            atomic.make_folder(path)
        run = cls(path, {}, __version__, verb)
        run._is_folder_new = is_folder_new
        run.write_config(config)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open an existing run.

        Raises:
            InputError: the folder or its ``config.yaml`` is missing or damaged.
        """
        path = user_path(path)
        if not path.is_dir():
            hint = ""
            if ":" in path.name or path.suffix == ".py":
                hint = "; marl_pool.evaluate(policy=…) measures a function"
            elif path.is_file():
                raise InputError(f"{path}: expected a run folder, got a file")
            elif str(path) in pretrained_names():
                hint = f"; did you mean {PREFIX}{path}?"
            raise InputError(f"{path}: no such run folder{hint}")
        if not (path / CONFIG).is_file():
            raise InputError(f"{path} is no run folder: it has no {CONFIG}")
        # The version is the last key.
        config = manifest.read_complete_yaml(path / CONFIG, last=VERSION)
        verb = str(config.pop(VERB, TRAIN))
        return cls(path, config, config.pop(VERSION), verb)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replace ``config.yaml``."""
        self.config, self.version = dict(config), __version__
        # `train` is the default verb and not written.
        verb = {} if self.verb == TRAIN else {VERB: self.verb}
        content = {**self.config, **verb, VERSION: self.version}
        manifest.write_yaml(self.path / CONFIG, content)

    @property
    def env(self) -> dict[str, Any]:
        """Configuration of the training environment: ``{"name": …, **options}``.

        Raises:
            InputError: the configuration has no valid environment.
        """
        env = self.config.get("env")
        if not isinstance(env, dict) or not isinstance(env.get("name"), str):
            raise InputError(
                f"{self.path / CONFIG}: expected env.name, the name of an environment, "
                f"got env: {env!r:.80}"
            )
        # The program sets the number of environments and the like.
        for key in env:
            if not isinstance(key, str) or key in ENV_CONTEXT:
                raise InputError(
                    f"{self.path / CONFIG}: env: expected options of the environment, "
                    f"got the key {key!r:.80}"
                )
        return env

    @property
    def config_digest(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 of ``config.yaml``."""
        return sha256((self.path / CONFIG).read_bytes()).hexdigest()[:12]

    @property
    def error_path(self) -> Path:
        """Path of ``error.txt``, which exists after the first error."""
        return self.path / ERROR

    def write_error(self, text: str) -> Path:
        """Append to ``error.txt`` and return its path."""
        # The caller reports the error itself, even on a full disk.
        with suppress(OSError), atomic.appended(self.error_path) as out:
            out.write(text.rstrip("\n") + "\n")
        return self.error_path

    @property
    def is_unused(self) -> bool:
        """True if the folder contains nothing but the configuration."""
        return {item.name for item in self.path.iterdir()} <= {CONFIG, LOCK}

    def discard_if_unused(self) -> None:
        """Remove what `create` made if it is all that the folder contains."""
        # An error here would hide the one that ended the run.
        with suppress(OSError):
            if self.is_unused:
                # Another process may have begun to train it, or have finished.
                with suppress(InputError), atomic.locked(self.path / LOCK, "training"):
                    if self.is_unused:
                        self._discard()

    def _discard(self) -> None:
        if self._is_folder_new:
            shutil.rmtree(self.path)
            return
        # The user's folder may be a link, a mount point or the working directory.
        for name in (CONFIG, LOCK):
            (self.path / name).unlink()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run against other processes and clean up after a crash.

        Raises:
            InputError: another process holds the lock, a link leads out of the folder,
                or it is not writable.
        """
        # Reject links to other places, then lock.
        inside = (*self.path.glob("*"), *self._checkpoints.glob("*"))
        atomic.validate_inside(self.path, *inside)
        refusal = f"{self.path}: another process is training this run"
        with atomic.locked(self.path / LOCK, refusal):
            # Clean up what a killed process left.
            with explain_os_errors(f"{self.path} cannot be written to"):
                atomic.recover(self.policy_dir)
                atomic.discard_leftovers(self.path)
                for folder in self.path.iterdir():
                    if folder.name not in OUTPUTS:
                        atomic.discard_leftovers(folder)
                best, damage = self._unsaved_best()
                if best is not None:
                    with self.save_policy_dir(best) as folder:
                        policy = self._checkpoint_path(best.iteration) / POLICY
                        shutil.copytree(policy, folder, dirs_exist_ok=True)
                    if damage:
                        print_line(
                            f"{damage}; restored from iteration {best.iteration}"
                        )
            yield

    def recover(self) -> None:
        """Save the policy of the best checkpoint if a killed process did not."""
        best, _ = self._unsaved_best()
        if best is not None:
            with self.lock():
                pass

    def _unsaved_best(self) -> tuple[Best | None, str]:
        """Return the newest checkpoint if it is the best and its policy is not saved.

        A process may be killed after it has saved a checkpoint, before its policy. If
        the record of the best is damaged, return the last checkpoint that was the best,
        and the damage.
        """
        newest = self.latest_checkpoint()
        candidate = None if newest is None else self._best_at(newest)
        try:
            best = self.best
        except InputError as error:
            # Use the last checkpoint that was the best, which `prune` keeps.
            saved = [path for path in self.checkpoints() if not self.damage_of(path)]
            candidate = next(filter(None, map(self._best_at, reversed(saved))), None)
            return candidate, str(error)
        is_new = best is None or (candidate and best.iteration < candidate.iteration)
        return (candidate if is_new else None), ""

    def _best_at(self, checkpoint: Path) -> Best | None:
        """Return the score of a checkpoint that was the best when it was saved."""
        entries = self._manifest(checkpoint)
        if entries.get("best_score") is None:
            return None
        kind = entries.get("best_of", RETURN)
        with suppress(ValueError):
            return _checked(Best(iteration_of(checkpoint), entries["best_score"], kind))
        return None

    # Metrics

    @property
    def metrics_path(self) -> Path:
        """Path of ``metrics.csv``, which exists after the first logged row."""
        return self.metrics.path

    def log(self, row: Mapping[str, float]) -> None:
        """Append a row to ``metrics.csv`` and to the TensorBoard events.

        The row must have an ``iteration``; it may omit columns, or add some.
        """
        self.metrics.log(row)
        # TensorBoard cannot show NaN.
        if (events := self._writer()) is not None:
            for name, value in row.items():
                if name != ITERATION and math.isfinite(value):
                    events.add_scalar(name, value, int(row[ITERATION]))
            events.flush()

    def rows(self) -> list[dict[str, float]]:
        """Return all logged rows; see `Metrics.rows`."""
        return self.metrics.rows()

    def to_pandas(self) -> "DataFrame":
        """Return all logged rows as a table; needs the extra ``plots``."""
        import pandas

        return pandas.DataFrame(self.rows())

    def metrics_problem(self) -> str:
        """Describe how ``metrics.csv`` differs from its record in the checkpoints."""
        for checkpoint in reversed(self.checkpoints()):
            if logged := self._manifest(checkpoint).get("metrics"):
                return self.metrics.problem(logged, iteration_of(checkpoint))
        return ""

    def resume_at(self, iteration: int) -> str:
        """Remove rows logged after ``iteration``, from which training resumes.

        A damaged ``metrics.csv`` keeps its readable rows, and a copy of the damaged
        file is kept beside it.

        Returns:
            One line about lost or damaged rows; empty if there are none.
        """
        self.close()
        self._first_event = iteration + 1
        logged = self._manifest(self._checkpoint_path(iteration)).get("metrics")
        # The rows of an intact file need not be parsed.
        problem = self.metrics.problem(logged, iteration) if logged else ""
        if logged and not problem:
            self.metrics.cut(logged)
            return ""
        # Keep what can be read, and report the rest.
        aside = self.metrics.keep(iteration, logged and logged["columns"])
        message = "; ".join(filter(None, (problem, aside)))
        return message and f"{self.path}: {message}"

    def close(self) -> None:
        """Close the event file; a later `log` opens a new one."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _writer(self) -> Any:
        # TensorBoard is optional: without its package, only the table is written.
        if self._events is None and find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            first = self._first_event
            # The default name ends in whole seconds, which a quick resume would repeat.
            # A short queue would block forever once a full disk stops its consumer.
            self._events = SummaryWriter(
                str(self.path),
                purge_step=first or None,
                # A random suffix, so that no link can be prepared under this name.
                filename_suffix=f".{first}.{secrets.token_hex(4)}",
                max_queue=10_000,
            )
            # Its thread and its cleanup at exit write too, and would print tracebacks.
            events = self._events.file_writer.event_writer._ev_writer
            records = events._py_recordio_writer
            records._writer = _TolerantFile(records._writer)
        return self._events

    # Checkpoints

    @contextmanager
    def checkpoint(
        self,
        iteration: int,
        parts: Iterable[str] = (),
        best: Best | None = None,
        origin: Mapping[str, str] | None = None,
        ended: bool = False,
    ) -> Iterator[Path]:
        """Yield a folder that becomes the checkpoint of ``iteration`` on exit.

        Its manifest also records the state of ``metrics.csv``.

        Args:
            iteration: the last completed iteration.
            parts: required files, as in `PARTS`.
            best: the checkpoint's score if it is the best so far.
            origin: what computed it; see `origin`.
            ended: True if a callback ended the run after ``iteration``.

        Raises:
            OSError: a part is missing, or the folder cannot be written.
        """
        # Its integrity is unknown until it is complete.
        final = self._checkpoint_path(iteration)
        self._damage.pop(final, None)
        with atomic.new_folder(final) as folder:
            yield folder
            if missing := _missing(folder, parts):
                raise OSError(f"{missing} was not written")
            entries = {
                "best_score": best and best.score,
                "best_of": best and best.of,
                "origin": dict(origin or {}),
                "ended": ended,
                "settings": self._settings_checksum(),
                **self.metrics.fix(iteration),
            }
            manifest.write_manifest(folder, **entries)
        self._damage[final] = ""

    def origin(self, checkpoint: Path) -> dict[str, str]:
        """Return what computed a checkpoint: kernels and versions, by name.

        Nothing is known of a checkpoint whose manifest is damaged.
        """
        return dict(self._manifest(checkpoint).get("origin", {}))

    @property
    def was_ended(self) -> bool:
        """True if a callback ended the run at its newest intact checkpoint."""
        newest = self.latest_checkpoint()
        return newest is not None and self._manifest(newest).get("ended") is True

    def config_change(self, checkpoint: Path | None = None) -> str:
        """Describe an edit of ``config.yaml`` since a checkpoint; empty without one.

        Keys that ``resume`` may change do not count. The default is the newest
        checkpoint, damaged or not.
        """
        checkpoint = checkpoint or next(reversed(self.checkpoints()), None)
        checksum = self._manifest(checkpoint).get("settings") if checkpoint else None
        if checkpoint is None or checksum in (None, self._settings_checksum()):
            return ""
        return f"{self.path / CONFIG} has changed since {checkpoint.name} was saved"

    def _settings_checksum(self) -> str | None:
        """Return a checksum of the settings that a resume keeps; None if unreadable."""
        # An editor may be writing the file.
        try:
            config = manifest.read_complete_yaml(self.path / CONFIG, last=VERSION)
        except (InputError, OSError):
            return None
        changing = {VERSION, *CONTROLS.get(self.verb, ())}
        settings = sorted(
            f"{key}: {value!r}"
            for key, value in flat_options(config)
            if not is_among(key, changing)
        )
        return sha256("\n".join(settings).encode()).hexdigest()

    def checkpoints(self) -> list[Path]:
        """Return all checkpoints, oldest first, including damaged ones."""
        children = self._checkpoints.iterdir() if self._checkpoints.is_dir() else ()
        folders = (path for path in children if CHECKPOINT.fullmatch(path.name))
        return sorted((path for path in folders if path.is_dir()), key=iteration_of)

    def damage_of(self, checkpoint: Path) -> str:
        """Describe the damage of a checkpoint; empty if it is intact."""
        if checkpoint in self._damage:
            return self._damage[checkpoint]
        try:
            problem = manifest.problem_of(checkpoint, links=False)
        except FileNotFoundError:
            problem = f"{manifest.MANIFEST} is missing"
        self._damage[checkpoint] = problem
        return problem

    def latest_checkpoint(self) -> Path | None:
        """Return the newest intact checkpoint, or None."""
        newest = reversed(self.checkpoints())
        return next((path for path in newest if not self.damage_of(path)), None)

    def trace_of_checkpoints(self) -> str:
        """Return evidence of lost checkpoints in a run that has none, or ``""``."""
        if self.checkpoints():
            return ""
        # Evolution writes its best policy before the first checkpoint.
        if self.verb != "evolve" and self._best_file.is_file():
            return f"{self.policy_dir} is the policy of one"
        every = (self.config.get("checkpoint") or {}).get("every")
        logged = max((int(row[ITERATION]) for row in self.rows()), default=0)
        # An iteration is logged before it is saved.
        if isinstance(every, int) and logged > every:
            return f"{self.metrics_path} has {logged} iterations, saved every {every}"
        return ""

    @property
    def last_saved_iteration(self) -> int:
        """Iteration of the newest intact checkpoint, from which `resume` continues.

        0 without one.
        """
        newest = self.latest_checkpoint()
        return 0 if newest is None else iteration_of(newest)

    def saved(self) -> dict[str, float] | None:
        """Return the last row of metrics before the newest intact checkpoint."""
        newest = self.latest_checkpoint()
        if newest is None:
            return None
        row = self._manifest(newest).get("row")
        if isinstance(row, dict) and row and all(map(_is_number, row.values())):
            return row
        last = iteration_of(newest)
        return next((r for r in reversed(self.rows()) if r[ITERATION] <= last), None)

    def _manifest(self, checkpoint: Path) -> dict[str, Any]:
        """Return the manifest of a checkpoint, or {} if it is missing or damaged."""
        with suppress(FileNotFoundError, InputError):
            return manifest.read_manifest(checkpoint)
        return {}

    @property
    def best(self) -> Best | None:
        """Iteration and score of the policy in `policy_dir`, or None.

        Raises:
            InputError: the file is damaged.
        """
        if not self._best_file.is_file():
            return None
        problem = ""
        with suppress(FileNotFoundError):  # without a manifest nothing is compared
            problem = manifest.problem_of(self._best_file.parent, only=BEST)
        if problem.startswith(BEST):
            raise InputError(f"{self._best_file} cannot be read: {problem}")
        try:
            return _checked(Best(**read_json(self._best_file)))
        except (ValueError, TypeError, OSError, RecursionError) as error:
            raise InputError(f"{self._best_file} cannot be read: {error}") from error

    @property
    def _best_file(self) -> Path:
        return atomic.readable_folder(self.policy_dir) / BEST

    def prune(self, keep: int) -> None:
        """Remove all checkpoints except the newest ``keep`` intact ones and the best.

        Damaged checkpoints are removed once a newer intact one exists.
        """
        best = self.best
        whole = [path for path in self.checkpoints() if not self.damage_of(path)]
        kept = {*whole[-keep:]}
        kept |= {
            path for path in whole if best and iteration_of(path) == best.iteration
        }
        # Keep damaged ones that are newer than the newest intact one.
        newest = iteration_of(whole[-1]) if whole else 0
        for folder in self.checkpoints():
            if folder not in kept and iteration_of(folder) <= newest:
                atomic.discard(folder)
        # A killed process may have left unfinished checkpoints.
        for unfinished in self._checkpoints.glob(".iter_*"):
            atomic.discard(unfinished)

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _checkpoint_path(self, iteration: int) -> Path:
        return self._checkpoints / f"iter_{iteration:06d}"

    # Policies

    @property
    def policy_dir(self) -> Path:
        """Folder of the best policy, which exists after the first save."""
        return self.path / POLICY

    def policy_damage(self) -> str:
        """Describe the damage of the best policy; empty if it is intact."""
        if POLICY_PARTS[0] not in PARTS.get(self.verb, ()):
            return ""
        if not self._best_file.is_file():
            return f"{BEST} is missing; the next checkpoint becomes the best"
        with suppress(FileNotFoundError):  # without a manifest nothing is compared
            return manifest.problem_of(self._best_file.parent)
        return ""

    @contextmanager
    def save_policy_dir(self, best: Best | None = None) -> Iterator[Path]:
        """Yield a folder that replaces `policy_dir`, and `best`, on exit."""
        with atomic.new_folder(self.policy_dir) as folder:
            yield folder
            if best is None:
                return
            atomic.write_json(folder / BEST, best._asdict())
            manifest.add_to_manifest(folder, BEST)

    def policy_path(self, checkpoint: Literal["best", "last"] | int = "best") -> Path:
        """Return the folder of the best policy, or of one in a checkpoint.

        Args:
            checkpoint: ``"best"``, ``"last"``, or the iteration of a checkpoint.

        Raises:
            InputError: no such policy, or the last checkpoint is damaged.
        """
        saved = self.checkpoints()
        if checkpoint == "best":
            folder = atomic.readable_folder(self.policy_dir)
        elif checkpoint == "last":
            newest = saved[-1] if saved else self.path / "none"
            if saved and (damage := self.damage_of(newest)):
                raise InputError(
                    f"checkpoint: expected the last to be intact, {newest}: {damage}"
                )
            folder = newest / POLICY
        else:
            folder = self._checkpoint_path(checkpoint) / POLICY
        # Name the checkpoints that have a policy.
        if not folder.is_dir():
            whole = (iteration_of(path) for path in saved if (path / POLICY).is_dir())
            iterations = ", ".join(map(str, whole)) or "none yet"
            raise InputError(
                f"{self.path} has no policy {checkpoint!r}; checkpoints: {iterations}"
            )
        return folder

    def iteration_of(self, checkpoint: str | int) -> int | None:
        """Return the iteration of the best or last policy, or of the given number."""
        if checkpoint == "best":
            return self.best.iteration if self.best else None
        if checkpoint == "last":
            newest = next(reversed(self.checkpoints()), None)
            return iteration_of(newest) if newest else None
        return int(checkpoint)

    def superseded(self, record: Mapping[str, Any]) -> str:
        """Describe an evaluation that training has superseded; empty if it is current.

        ``record`` has the evaluation's ``checkpoint`` and ``iteration``.
        """
        checkpoint, measured = record.get("checkpoint"), record.get("iteration")
        if measured is None or not isinstance(checkpoint, str | int):
            return ""
        with suppress(InputError, ValueError):  # a damaged file is reported elsewhere
            current = self.iteration_of(checkpoint)
            if current not in (None, measured):
                return f"of iteration {measured}, but the {checkpoint} is now {current}"
        return ""

    # Results

    @property
    def evaluation_dir(self) -> Path:
        """Folder of evaluations, which exists after the first evaluation."""
        return self.results or self.path / EVALUATION

    def make_evaluation_dir(self) -> Path:
        """Create `evaluation_dir`, or raise `InputError` if it is not writable."""
        return self._writable(EVALUATION)

    def make_videos_dir(self) -> Path:
        """Create the folder of videos; errors are as in `make_evaluation_dir`."""
        return self._writable(VIDEOS)

    def add_video(self, file: Path) -> Path:
        """Move a complete video to an unused name in `make_videos_dir`; return it."""
        folder = self.make_videos_dir()
        while True:
            path = free(folder / file.name)
            # Another process may take the name at the same time.
            with suppress(FileExistsError):
                path.touch(exist_ok=False)
                file.replace(path)
                atomic.sync(folder)
                return path

    def _writable(self, name: str) -> Path:
        """Create a folder; raise an error before any work if it is not writable."""
        folder = self.results or self.path / name
        atomic.validate_inside(self.results or self.path, folder)
        with explain_os_errors(f"{folder} cannot be written to"):
            atomic.make_folder(folder)
            tempfile.TemporaryFile(dir=folder).close()
        return folder


class _TolerantFile:
    """An open event file that ignores all writes after an error.

    Records after a truncated one could not be read, and ``metrics.csv`` has the rows.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._has_failed = file, False

    def write(self, data: bytes) -> None:
        self._attempt(self._file.write, data)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _attempt(self, action: Callable[..., object], *arguments: bytes) -> None:
        try:
            if not self._has_failed:
                action(*arguments)
        except OSError:
            self._has_failed = True


def files_in(folder: Path) -> list[str]:
    """Return the names in a folder, except locks and leftovers of killed processes."""
    names = sorted(item.name for item in folder.iterdir())
    return [n for n in names if n != LOCK and not atomic.LEFTOVER.fullmatch(n)]


def default_path(config: Mapping[str, Any]) -> Path:
    """Return ``runs/<date-time>-<env or task>-<pooling>-s<seed>`` for a new run.

    Without pooling, the policy or the encoder is named.
    """
    sections = (config.get(part) for part in ("pooling", "policy", "encoder"))
    named_sections = [
        part for part in sections if part and part.get("name", "none") != "none"
    ]
    parts = [config.get("env") or config["task"], *named_sections[:1]]
    label = "-".join(short_name(part["name"]) for part in parts)
    return free(Path("runs") / dated(f"{label}-s{config['seed']}"))


def iteration_of(checkpoint: Path) -> int:
    """Return the iteration in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("iter_"))


def _missing(folder: Path, parts: Iterable[str]) -> str:
    """Return the first part that is missing or empty in a folder, or ``""``."""
    for part in parts:
        files = [path for path in folder.glob(part) if path.is_file()]
        if not files or not all(path.stat().st_size for path in files):
            return part
    return ""
