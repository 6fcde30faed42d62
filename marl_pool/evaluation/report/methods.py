"""The methods of a report: runs that differ in their seed alone are one method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl_pool.envs.options import expand_counts
from marl_pool.evaluation.report.folders import short_folders, with_short_folders
from marl_pool.evaluation.report.runs import ReportedRun
from marl_pool.utils.errors import InputError

IRRELEVANT = frozenset(
    ("seed", "threads", "device", "time_limit", "checkpoint", "resources", "cluster")
)
"""Top-level keys that do not change how a policy is trained."""
ENV = "env"
PERTURBED = ("perturbation", "clone.severities")
"""Keys, or sections of them, of perturbations in training."""
UNNAMED = "the method"
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """Runs that differ in their seed alone.

    Attributes:
        kind: the options in which its training differs from that of other methods,
            without those of the environment.
        env: the options in which its training environment differs; empty where all
            methods of a report were trained in the same.
        head: the kind without the perturbations in training.
        perturbed: the options of the perturbations in training that differ.
        runs: ordered by seed.
    """

    kind: str
    env: str
    head: str
    perturbed: str
    runs: tuple[ReportedRun, ...]

    @property
    def name(self) -> str:
        """``kind · env``."""
        return f"{self.kind} · {self.env}" if self.env else self.kind

    @property
    def evaluated(self) -> tuple[ReportedRun, ...]:
        """The runs with a comparable evaluation."""
        return tuple(one for one in self.runs if one.evaluation)


def methods_of(runs: Sequence[ReportedRun]) -> list[Method]:
    """Group runs into methods, named after the options in which these differ.

    Methods of one training environment are consecutive.

    Raises:
        InputError: two runs of one method with the same seed.
    """
    short = short_folders([one.run.config for one in runs])
    configs = [_relevant(with_short_folders(one.run.config, short)) for one in runs]
    optional = [key for key in configs[0] if _is_optional(key, configs)]
    flat = [_flat(config) | _section_names(config, optional) for config in configs]
    differing = _differing(flat)
    groups: dict[tuple[str, str, str, str], list[ReportedRun]] = {}
    for one, config in zip(runs, flat, strict=True):
        groups.setdefault(_names(config, differing), []).append(one)
    methods = [
        Method(*names, tuple(sorted(own, key=lambda one: one.seed or 0)))
        for names, own in groups.items()
    ]
    for method in methods:
        _validate_seeds(method)
    envs = list(dict.fromkeys(method.env for method in methods))
    return sorted(methods, key=lambda method: envs.index(method.env))


def _relevant(config: Config) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
    return {**kept, ENV: expand_counts(config[ENV])}


def _is_optional(key: str, configs: Sequence[Config]) -> bool:
    """True for a section in some and none in others, such as ``perturbation``."""
    return len({isinstance(own[key], Mapping) for own in configs if key in own}) > 1


def _section_names(config: Config, sections: Sequence[str]) -> dict[str, Any]:
    """The name, or else the content, of optional sections; None without the section.

    They tell runs that lack a section from those that have it.
    """
    found = {}
    for key in sections:
        value = config.get(key)
        if isinstance(value, Mapping):
            value = value.get("name", dict(value))
        found[key] = value
    return found


def _flat(config: Config, prefix: str = "") -> dict[str, Any]:
    """Options by dotted key, in order."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        full = f"{prefix}.{key}" if prefix else key
        flat |= _flat(value, full) if isinstance(value, Mapping) else {full: value}
    return flat


def _differing(configs: Sequence[Config]) -> list[str]:
    """The keys in which configurations differ.

    A section's options are compared only with those of a section of the same name. A
    key that a run lacks, written by an earlier version, counts as equal.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if _differs(key, configs)]


def _differs(key: str, configs: Sequence[Config]) -> bool:
    section, _, last = key.rpartition(".")
    by_name: dict[Any, set[str]] = {}
    for config in configs:
        if key in config:
            named = section and last != "name"
            name = config.get(f"{section}.name") if named else None
            by_name.setdefault(name, set()).add(repr(config[key]))
    return any(len(values) > 1 for values in by_name.values())


def _names(config: Config, differing: Sequence[str]) -> tuple[str, str, str, str]:
    """The kind, env, head and perturbations of a `Method`."""
    own = [key for key in differing if key in config]
    env = [key for key in own if key.split(".")[0] == ENV]
    kind = [key for key in own if key not in env]
    perturbed = [key for key in kind if key.startswith(PERTURBED)]
    head = [key for key in kind if key not in perturbed]
    default = config.get("pooling.name") or config.get("policy.name") or UNNAMED
    return (
        _words(kind, config) or str(default),
        _words(env, config),
        _words(head, config) or str(default),
        _words(perturbed, config),
    )


def _words(keys: Sequence[str], config: Config) -> str:
    return " ".join(filter(None, (_word(key, config) for key in keys)))


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


def _validate_seeds(method: Method) -> None:
    """Reject two runs of one seed."""
    seen: dict[Any, ReportedRun] = {}
    for one in method.runs:
        if one.seed in seen:
            raise InputError(
                f"{seen[one.seed].run.path} and {one.run.path} differ in nothing "
                f"that was configured, seed={one.seed} included: expected one run "
                "of each seed"
            )
        seen[one.seed] = one
