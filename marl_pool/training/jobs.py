"""Jobs: for each verb, its training function, its progress and what may change."""

import os
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marl_pool.files.hub import is_hub
from marl_pool.options.signatures import show
from marl_pool.pretrained import PREFIX
from marl_pool.runs.run import CONFIG, Run
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.settings import EvolveConfig, TrainConfig
from marl_pool.training.supervised.results import FILE
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.utils.errors import InputError

Row = Mapping[str, Any]
"""Row of ``metrics.csv``."""


@dataclass(frozen=True)
class Job:
    """Training of the runs that a verb creates."""

    function: str
    """``module:function``, called with the run, its configuration as plain data and, by
    keyword, ``should_stop``. The latter is called before each iteration; True saves the
    run and ends it."""
    config: type[Any]
    """Class of the typed configuration, a `RunConfig`."""
    unit: str
    """Unit of the amount of training, such as steps."""
    count: Callable[[Row, Any], int]
    """Amount up to a row, from the row and the configuration."""
    limit: Callable[[Any], int]
    """Amount of a whole run, from the configuration."""
    controls: tuple[str, ...]
    """Keys, and sections of keys, that ``resume`` may change."""
    result: str = ""
    """File that marks a run as finished; empty if the count decides."""

    def total(self, config: Mapping[str, Any]) -> int:
        """Return the amount of a whole run with this configuration."""
        return self.limit(self.config.from_plain(config))

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
        config = self.config.from_plain(run.config)
        total = self.limit(config)
        if self.result and (run.path / self.result).is_file():
            return total
        count = self.count(row, config) if row else 0
        return min(count, total - 1) if self.result else count


def _in_column(name: str) -> Callable[[Row, Any], int]:
    return lambda row, config: int(row[name])


def _epochs(row: Row, config: FitConfig) -> int:
    return config.fit.epochs_over(row["fold"], row["epoch"], row["seconds"])


EPISODE_CONTROLS = (
    "time_limit",
    "env_timeout",
    "checkpoint",
    "storage",
    "callbacks",
    "env.workers",
)
"""Keys that any run that plays episodes may change when it is resumed."""
JOBS = {
    "train": Job(
        "marl_pool.training.ppo:train",
        TrainConfig,
        "steps",
        _in_column("env_steps"),
        lambda config: config.total_steps,
        ("total_steps", *EPISODE_CONTROLS, "resources"),
    ),
    "evolve": Job(
        "marl_pool.training.evolution.evolve:evolve",
        EvolveConfig,
        "generations",
        _in_column("iteration"),
        lambda config: config.total_generations,
        ("total_generations", *EPISODE_CONTROLS, "resources"),
    ),
    "clone": Job(
        "marl_pool.training.cloning.clone:clone",
        CloneConfig,
        "batches",
        _in_column("batches"),
        lambda config: config.total_batches,
        ("total_batches", *EPISODE_CONTROLS),
    ),
    "fit": Job(
        "marl_pool.training.supervised.fit:fit",
        FitConfig,
        "epochs",
        _epochs,
        lambda config: config.fit.folds * config.fit.epochs,
        (
            "time_limit",
            "checkpoint",
            "storage",
            "callbacks",
            "data_dir",
            "threads",
            "kernels",
            "device",
        ),
        FILE,
    ),
}
"""Jobs by verb."""
STARTS = ("policy", "zeros")
"""Values of an evolution's ``init`` that are not folders."""
RUN_CONTROL = ("threads", "kernels", "data_dir", "download")
"""Keys that a resumed trial may change, besides its verb's `Job.controls`."""


def begun(path: Path, verb: str, config: dict[str, Any]) -> Run | None:
    """Open the run that an earlier attempt began, or return None.

    If the disk has none, the run is restored from its mirror.

    Raises:
        InputError: the folder or the mirror has a run of another configuration.
    """
    from marl_pool.runs.mirrored import restore

    restore(path, config.get("storage"))
    if not (path / CONFIG).is_file():
        return None
    run = Run.open(path)
    validate_same(run, verb, config)
    return run


def perform(run: Run, config: Mapping[str, Any], **options: Any) -> str:
    """Continue a run from its newest checkpoint, under the run's lock.

    Args:
        run: run that receives the results.
        config: checked configuration, as plain data.
        options: keyword arguments of `Job.function`, such as ``should_stop``.

    Returns:
        What the run's mirror lacks, or an empty string; see `mirrored`.
    """
    from marl_pool.runs.mirrored import mirrored

    try:
        with run.lock(), mirrored(run, config.get("storage")) as mirror:
            # Resolved late, since it may load torch and ray.
            train = pkgutil.resolve_name(JOBS[run.verb].function)
            train(run, config, **options)
    finally:
        run.close()
    return mirror.problem if mirror else ""


def validate_same(run: Run, verb: str, config: dict[str, Any]) -> None:
    """Reject a run of another verb or with other settings.

    Keys that a resumed run may change are not compared.
    """
    if run.verb != verb:
        raise InputError(f"{run.path}: expected a run of {verb}, got one of {run.verb}")
    ignored = {*RUN_CONTROL, *JOBS[verb].controls}
    expected, actual = map(with_absolute_folders, (config, run.config))
    if changed := differences(expected, actual, ignored):
        raise InputError(f"{run.path}: {'; '.join(changed)}")


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], ignored: Collection[str]
) -> list[str]:
    """List the settings in which two configurations differ.

    Args:
        expected: nested plain data.
        actual: nested plain data.
        ignored: dotted keys of settings, and top-level keys of whole sections.
    """
    first, second = dict(flat_options(expected)), dict(flat_options(actual))
    return [
        f"{key}: expected {show(first.get(key))}, got {show(second.get(key))}"
        for key in first | second
        if not {key, key.split(".")[0]} & {*ignored}
        and first.get(key) != second.get(key)
    ]


def with_absolute_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make folders of saved policies absolute, to resume from any directory."""
    result = dict(config)
    if fixed := config.get("fixed"):
        result["fixed"] = {group: _absolute(source) for group, source in fixed.items()}
    for key in ("teacher", "init"):
        if source := config.get(key):
            result[key] = _absolute(source)
    return result


def _absolute(source: str) -> str:
    """Return the absolute path of a folder that may be gone; leave names unchanged."""
    if source in STARTS or source.startswith(PREFIX) or is_hub(source):
        return source
    from marl_pool.envs.scripted import is_scripted  # loads torch
    from marl_pool.training.cloning import TEACHERS

    if is_scripted(source) or source in TEACHERS:
        return source
    return os.path.abspath(os.path.expanduser(source))


def flat_options(
    config: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the full key and value of each option; an empty section counts as one."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_options(value, f"{path}{key}.")
        else:
            yield path + key, value
