"""Jobs: for each verb, its training function, its progress and what may change."""

import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from marl_pool.files.hub import is_hub
from marl_pool.options.differences import differences
from marl_pool.pretrained import PREFIX
from marl_pool.runs.run import CONFIG, CONTROLS, Run
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.settings import EvolveConfig, RunConfig, TrainConfig
from marl_pool.training.supervised.results import FILE
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.utils.errors import InputError, validate_module
from marl_pool.utils.paths import user_path

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)
Row = Mapping[str, Any]
"""Row of ``metrics.csv``."""


@dataclass(frozen=True)
class Job:
    """Training of the runs that a verb creates."""

    function: str
    """``module:function``, called with the run, its configuration and, by keyword,
    ``should_stop``. The latter is called before each iteration; True saves the run and
    ends it."""
    config: type[RunConfig]
    """Class of the configuration."""
    unit: str
    """Unit of the amount of training, such as steps."""
    count: Callable[[Row, Any], int]
    """Amount up to a row, from the row and the configuration."""
    total: Callable[[Any], int]
    """Amount of a whole run, from the configuration."""
    result: str = ""
    """File that marks a run as finished; empty if the count decides."""

    @property
    def controls(self) -> tuple[str, ...]:
        """Keys, and sections of keys, that ``resume`` may change."""
        return CONTROLS[self.config.verb]

    def saved(self, run: Run) -> int:
        """Return the amount up to the checkpoint from which a run is resumed."""
        return self._counted(run, run.saved())

    def logged(self, run: Run | None) -> int:
        """Return the amount in a run's metrics or, if damaged, in its checkpoint."""
        if run is None:
            return 0
        if run.metrics_problem():
            return self.saved(run)
        rows = run.metrics.readable_rows()
        return self._counted(run, rows[-1] if rows else None)

    def _counted(self, run: Run, row: Row | None) -> int:
        config = config_of(run)
        total = self.total(config)
        if self.result and (run.path / self.result).is_file():
            return total
        try:
            count = self.count(row, config) if row else 0
        except (KeyError, ValueError, OverflowError) as error:
            raise InputError(
                f"{run.path}: expected a row of metrics with the {self.unit} so far, "
                f"got {row!r:.200}"
            ) from error
        return min(count, total - 1) if self.result else count


def _in_column(name: str) -> Callable[[Row, Any], int]:
    return lambda row, config: int(row[name])


def _epochs(row: Row, config: FitConfig) -> int:
    return config.fit.epochs_over(row["fold"], row["epoch"], row["seconds"])


JOBS = {
    "train": Job(
        "marl_pool.training.ppo:train",
        TrainConfig,
        "steps",
        _in_column("env_steps"),
        lambda config: config.total_steps,
    ),
    "evolve": Job(
        "marl_pool.training.evolution.evolve:evolve",
        EvolveConfig,
        "generations",
        _in_column("iteration"),
        lambda config: config.total_generations,
    ),
    "clone": Job(
        "marl_pool.training.cloning.clone:clone",
        CloneConfig,
        "batches",
        _in_column("batches"),
        lambda config: config.total_batches,
    ),
    "fit": Job(
        "marl_pool.training.supervised.fit:fit",
        FitConfig,
        "epochs",
        _epochs,
        lambda config: config.fit.folds * config.fit.epochs,
        FILE,
    ),
}
"""Jobs by verb."""
STARTS = ("policy", "zeros")
"""Values of an evolution's ``init`` that are not folders."""
RUN_CONTROL = ("threads", "kernels", "data_dir", "download")
"""Keys that a resumed trial may change, besides its verb's `Job.controls`."""


def config_of(run: Run) -> RunConfig:
    """Return a run's configuration; keys that an earlier version lacked have defaults.

    Raises:
        TypeError: a section is missing, or has a key that this version lacks.
    """
    return JOBS[run.verb].config.from_plain(run.config)


def is_finished(run: Run, config: RunConfig) -> bool:
    """Return True if a run has saved all training of a configuration."""
    job = JOBS[config.verb]
    return job.saved(run) >= job.total(config)


def has_ended(run: Run, config: RunConfig) -> bool:
    """Return True if a run is finished, or a callback ended it for good."""
    return is_finished(run, config) or run.was_ended


def validate_ray_for(config: RunConfig) -> None:
    """Reject a run that needs ray if ray is not installed."""
    has_workers = isinstance(config, EvolveConfig) and config.resources.num_workers
    if isinstance(config, TrainConfig) or has_workers:
        validate_module("ray")


def begun(path: Path, config: RunConfig) -> Run | None:
    """Open the run that an earlier attempt began, or return None.

    If the disk has none, the run is restored from its mirror.

    Raises:
        InputError: the folder or the mirror has a run of another configuration.
    """
    from marl_pool.runs.mirrored import restore

    restore(path, config.storage)
    if not (path / CONFIG).is_file():
        return None
    run = Run.open(path)
    validate_same(run, config)
    return run


def perform(run: Run, config: RunConfig, **options: Any) -> str:
    """Continue a run from its newest checkpoint, under the run's lock.

    Args:
        run: run that receives the results.
        config: checked configuration.
        options: keyword arguments of `Job.function`, such as ``should_stop``.

    Returns:
        What the run's mirror lacks, or an empty string; see `mirrored`.
    """
    from marl_pool.runs.mirrored import mirrored

    try:
        with run.lock(), mirrored(run, config.storage) as mirror:
            # Resolved late, since it may load torch and ray.
            train = pkgutil.resolve_name(JOBS[run.verb].function)
            train(run, config, **options)
    finally:
        run.close()
    return mirror.problem if mirror else ""


def validate_same(run: Run, config: RunConfig) -> None:
    """Reject a run of another verb or with other settings.

    Keys that a resumed run may change are not compared.
    """
    verb = config.verb
    if run.verb != verb:
        raise InputError(f"{run.path}: expected a run of {verb}, got one of {run.verb}")
    ignored = {*RUN_CONTROL, *JOBS[verb].controls}
    # Compare as stored: a key that an earlier version lacked has no default here.
    expected, actual = (
        {**plain, **_absolute_folders(plain)} for plain in (config.plain, run.config)
    )
    if changed := differences(expected, actual, ignored):
        raise InputError(f"{run.path}: {'; '.join(changed)}")


def with_absolute_folders(config: AnyConfig) -> AnyConfig:
    """Make folders of policies and of data absolute, to resume from any directory."""
    return replace(config, **_absolute_folders(vars(config)))


def _absolute_folders(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that name folders of policies or of data, made absolute."""
    sources = {key: settings.get(key) for key in ("teacher", "init", "fixed")}
    folders = {key: _absolute(source) for key, source in sources.items() if source}
    if data := settings.get("data_dir"):
        folders["data_dir"] = os.path.abspath(user_path(data))
    return folders


def _absolute(source: Any) -> Any:
    """Return the absolute path of a folder that may be gone; leave names unchanged."""
    if isinstance(source, Mapping):
        return {group: _absolute(path) for group, path in source.items()}
    if source in STARTS or source.startswith(PREFIX) or is_hub(source):
        return source
    from marl_pool.envs.scripted import is_scripted  # loads torch
    from marl_pool.training.cloning import TEACHERS

    if is_scripted(source) or source in TEACHERS:
        return source
    return os.path.abspath(user_path(source))
