"""The methods of a report: runs that differ in their seed alone are one method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl_pool.envs.options import expand_counts
from marl_pool.evaluation.report.runs import (
    ReportedRun,
    short_folders,
    with_short_folders,
)
from marl_pool.utils.errors import InputError

IRRELEVANT = frozenset(
    (
        "seed",
        "threads",
        "kernels",
        "device",
        "time_limit",
        "env_timeout",
        "checkpoint",
        "storage",
        "resources",
        "cluster",
    )
)
"""Top-level keys that do not change how a policy is trained."""
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """Runs that differ in their seed alone.

    Attributes:
        kind: the options in which its training differs from that of other methods,
            without those of the environment.
        env: the options in which its training environment differs; empty where all
            methods of a report were trained in the same.
        runs: ordered by seed.
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
        return tuple(one for one in self.runs if one.evaluation)

    @property
    def provenance(self) -> str:
        """Seeds, episodes, commit and files of its numbers, for tooltips."""
        abouts = [one.evaluation.about for one in self.evaluated if one.evaluation]
        seeds = [str(one.seed) for one in self.evaluated]
        parts = [f"{self.name}: training seeds {', '.join(seeds)}"]
        parts.append(f"{abouts[0]['episodes']} episodes each")
        commits = dict.fromkeys(recorded(about, "commit") for about in abouts)
        parts.append(f"commit {', '.join(commits)}")
        return ", ".join([*parts, *map(files_of, self.evaluated)])


def recorded(about: Mapping[str, Any], key: str) -> str:
    """A value that an evaluation recorded, as text."""
    value = about.get(key)
    return "not recorded" if value in (None, "") else str(value)


def files_of(one: ReportedRun) -> str:
    """The files of a run's evaluation, the newest first, without the folders above."""
    paths = one.evaluation.rows["path"].unique() if one.evaluation else []
    return ", ".join(map(one.relative, paths))


def methods_of(runs: Sequence[ReportedRun]) -> list[Method]:
    """Group runs into methods, named after the options in which these differ.

    Methods of one training environment are consecutive.

    Raises:
        InputError: two runs of one method with the same seed.
    """
    # Compare all options that matter for training, by dotted key.
    short = short_folders([one.run.config for one in runs])
    configs = []
    for one in runs:
        config = with_short_folders(one.run.config, short)
        kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
        configs.append({**kept, "env": expand_counts(kept["env"])})
    flat = list(map(_flat, configs))
    for key in configs[0]:
        sections = [isinstance(own[key], Mapping) for own in configs if key in own]
        # An optional section, such as ``perturbation``, is compared by its name.
        if len(set(sections)) > 1:
            for options, config in zip(flat, configs, strict=True):
                options[key] = _section_name(config.get(key))
    keys = dict.fromkeys(key for config in flat for key in config)
    differing = [key for key in keys if _differs(key, flat)]

    # Runs of equal names are one method, whose seeds must differ.
    groups: dict[tuple[str, str], list[ReportedRun]] = {}
    for one, config in zip(runs, flat, strict=True):
        own = groups.setdefault(_names(config, differing), [])
        for other in own:
            if other.seed == one.seed:
                raise InputError(
                    f"{other.run.path} and {one.run.path} differ in nothing that was "
                    f"configured, seed={one.seed} included: expected one run of each "
                    "seed"
                )
        own.append(one)
    methods = [
        Method(*names, tuple(sorted(own, key=lambda one: one.seed or 0)))
        for names, own in groups.items()
    ]
    envs = list(dict.fromkeys(method.env for method in methods))
    return sorted(methods, key=lambda method: envs.index(method.env))


def _section_name(section: Any) -> Any:
    """The name, or else the content, of an optional section; None without one."""
    is_section = isinstance(section, Mapping)
    return section.get("name", dict(section)) if is_section else section


def _flat(config: Config, prefix: str = "") -> dict[str, Any]:
    """Options by dotted key, in order."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        full = f"{prefix}{key}"
        is_section = isinstance(value, Mapping)
        flat |= _flat(value, f"{full}.") if is_section else {full: value}
    return flat


def _differs(key: str, configs: Sequence[Config]) -> bool:
    """True if configurations differ in an option.

    A section's options are compared only with those of a section of the same name. A
    key that a run lacks, written by an earlier version, counts as equal.
    """
    section, _, last = key.rpartition(".")
    by_name: dict[Any, set[str]] = {}
    for config in configs:
        if key in config:
            name = config.get(f"{section}.name") if section and last != "name" else None
            by_name.setdefault(name, set()).add(repr(config[key]))
    return any(len(values) > 1 for values in by_name.values())


def _names(config: Config, differing: Sequence[str]) -> tuple[str, str]:
    """The kind and the env of a `Method`."""
    own = [key for key in differing if key in config]
    env = [key for key in own if key.split(".")[0] == "env"]
    kind, env_name = (
        " ".join(filter(None, (_word(key, config) for key in keys)))
        for keys in ([key for key in own if key not in env], env)
    )
    default = config.get("pooling.name") or config.get("policy.name") or "the method"
    return kind or str(default), env_name


def _word(key: str, config: Config) -> str:
    """``ada`` for ``pooling.name: ada``, ``lr=0.01`` for ``ppo.lr: 0.01``.

    An optional section has no word in runs without it.
    """
    section, _, last = key.rpartition(".")
    if last == "name":
        return "" if section in config else str(config[key]).rpartition(":")[2]
    if f"{key}.name" in config:
        return str(config[key]).rpartition(":")[2]
    return "" if not section and config[key] is None else f"{last}={config[key]}"
