"""The methods of a report: runs that differ only in their seed are one method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl_pool.envs.options import expand_counts
from marl_pool.evaluation.report.evaluated import (
    ReportedRun,
    short_folders,
    with_short_folders,
)
from marl_pool.options.names import short_name
from marl_pool.runs.run import OF_MACHINE
from marl_pool.utils.errors import InputError

IRRELEVANT = OF_MACHINE - {"callbacks"} | {"seed"}
"""Top-level keys that do not change how a policy is trained."""
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """Runs that differ only in their seed.

    Attributes:
        kind: the options in which its training differs from other methods, without
            options of the environment.
        env: the options in which its training environment differs; empty if all
            methods of a report were trained in the same one.
        runs: its runs, ordered by seed.
    """

    kind: str
    env: str
    runs: tuple[ReportedRun, ...]

    @property
    def name(self) -> str:
        """``kind · env``."""
        return f"{self.kind} · {self.env}" if self.env else self.kind

    @property
    def evaluated(self) -> tuple[ReportedRun, ...]:
        """The runs with a comparable evaluation."""
        return tuple(run for run in self.runs if run.evaluation)

    @property
    def provenance(self) -> str:
        """Seeds, episodes, commits and files of its numbers, for tooltips."""
        records = [run.evaluation.record for run in self.evaluated if run.evaluation]
        seeds = [str(run.seed) for run in self.evaluated]
        parts = [f"{self.name}: training seeds {', '.join(seeds)}"]
        parts.append(f"{records[0]['episodes']} episodes each")
        for commit, files in commits_of(*self.evaluated).items():
            parts += [f"commit {commit}", *files]
        return ", ".join(parts)


def recorded(record: Mapping[str, Any], key: str) -> str:
    """Return a value from an evaluation's record as text."""
    value = record.get(key)
    return "not recorded" if value in (None, "") else str(value)


def commits_of(*runs: ReportedRun) -> dict[str, list[str]]:
    """Return the files of evaluations by commit, newest first, without folders above.

    A run may have several, with one commit or more.
    """
    commits: dict[str, list[str]] = {}
    for run in runs:
        rows = run.evaluation.rows.drop_duplicates("path") if run.evaluation else None
        for row in [] if rows is None else rows.to_dict("records"):
            files = commits.setdefault(recorded(row, "commit"), [])
            files.append(run.relative(row["path"]))
    return commits


def methods_of(runs: Sequence[ReportedRun]) -> list[Method]:
    """Group runs into methods, named after the options in which they differ.

    Methods of one training environment are consecutive.

    Raises:
        InputError: two runs of one method with the same seed.
    """
    # Compare all options that matter for training, by dotted key.
    short = short_folders([run.run.config for run in runs])
    configs = []
    for run in runs:
        config = with_short_folders(run.run.config, short)
        kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
        configs.append({**kept, "env": expand_counts(kept["env"])})
    flat = list(map(_flat, configs))
    for key in configs[0]:
        sections = [
            isinstance(config[key], Mapping) for config in configs if key in config
        ]
        # An optional section, such as ``perturbation``, is compared by its name.
        if len(set(sections)) > 1:
            for options, config in zip(flat, configs, strict=True):
                options[key] = section = config.get(key)
                if isinstance(section, Mapping):  # without a name, compare the content
                    options[key] = section.get("name", dict(section))
    keys = dict.fromkeys(key for config in flat for key in config)
    differing = [key for key in keys if _differs(key, flat)]

    # Runs with equal names are one method, and their seeds must differ.
    groups: dict[tuple[str, str], list[ReportedRun]] = {}
    for run, config in zip(runs, flat, strict=True):
        members = groups.setdefault(_names(config, differing), [])
        for member in members:
            if member.seed == run.seed:
                raise InputError(
                    f"{member.run.path} and {run.run.path} differ in nothing that was "
                    f"configured, seed={run.seed} included: expected one run of each "
                    "seed"
                )
        members.append(run)
    methods = [
        Method(*names, tuple(sorted(members, key=lambda run: run.seed or 0)))
        for names, members in groups.items()
    ]
    envs = list(dict.fromkeys(method.env for method in methods))
    return sorted(methods, key=lambda method: envs.index(method.env))


def _flat(config: Config, prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration to options by dotted key, in order."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        full = f"{prefix}{key}"
        is_section = isinstance(value, Mapping)
        flat |= _flat(value, f"{full}.") if is_section else {full: value}
    return flat


def _differs(key: str, configs: Sequence[Config]) -> bool:
    """Return True if configurations differ in an option.

    Options are compared only between sections of the same name. A key that a run of an
    earlier version lacks counts as equal.
    """
    section, _, last = key.rpartition(".")
    by_name: dict[Any, set[str]] = {}
    for config in configs:
        if key in config:
            name = config.get(f"{section}.name") if section and last != "name" else None
            by_name.setdefault(name, set()).add(repr(config[key]))
    return any(len(values) > 1 for values in by_name.values())


def _names(config: Config, differing: Sequence[str]) -> tuple[str, str]:
    """Return the kind and the env of a `Method`."""
    present_keys = [key for key in differing if key in config]
    env = [key for key in present_keys if key.split(".")[0] == "env"]
    kind, env_name = (
        " ".join(filter(None, (_word(key, config) for key in keys)))
        for keys in ([key for key in present_keys if key not in env], env)
    )
    default = config.get("pooling.name") or config.get("policy.name") or "the method"
    return kind or str(default), env_name


def _word(key: str, config: Config) -> str:
    """Return ``ada`` for ``pooling.name: ada``, ``lr=0.01`` for ``ppo.lr: 0.01``.

    An optional section gives no word in runs without it.
    """
    section, _, last = key.rpartition(".")
    if last == "name":
        return "" if section in config else short_name(str(config[key]))
    if f"{key}.name" in config:
        return short_name(str(config[key]))
    return "" if not section and config[key] is None else f"{last}={config[key]}"
