"""Which runs are one method: those that differ in their seed alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from marl_pool.envs.options import counted
from marl_pool.errors import InputError
from marl_pool.evaluation.report.folders import short_folders, shown
from marl_pool.evaluation.report.sources import Source

IRRELEVANT = frozenset(
    ("seed", "threads", "device", "time_limit", "checkpoint", "resources", "cluster")
)
"""Top-level keys that don't say how a policy was trained."""
ENV = "env"
PERTURBED = ("perturbation", "clone.severities")
"""Keys, or sections of them, that say what was done to the tokens in training."""
ONLY = "the method"


@dataclass(frozen=True)
class Method:
    """Runs that differ in their seed alone.

    Attributes:
        kind: what tells its training apart, the world aside.
        world: what tells the world apart that it was trained in; empty where all of a
            report's methods were trained in the same.
        sources: its runs, by seed.
        head: the kind, what was done to the tokens in training aside.
        perturbed: what was done to them, of that what tells it apart.
    """

    kind: str
    world: str
    sources: tuple[Source, ...]
    head: str
    perturbed: str

    @property
    def name(self) -> str:
        """The method in words."""
        return f"{self.kind} · {self.world}" if self.world else self.kind

    @property
    def evaluated(self) -> tuple[Source, ...]:
        """The runs with an evaluation that counts."""
        return tuple(source for source in self.sources if source.evaluation)


class _Names(NamedTuple):
    """Of a method; see there."""

    kind: str
    world: str
    head: str
    perturbed: str


def methods_of(sources: Sequence[Source]) -> list[Method]:
    """Sort runs into methods, named after the keys in which these differ.

    Args:
        sources: in the order in which the methods are to stand.

    Raises:
        InputError: two runs of one method with the same seed.
    """
    short = short_folders([source.run.config for source in sources])
    configs = [_relevant(shown(source.run.config, short)) for source in sources]
    optional = [key for key in configs[0] if _is_optional(key, configs)]
    flat = [_flat(config) | _presence(config, optional) for config in configs]
    telling = _telling(flat)
    found: dict[_Names, list[Source]] = {}
    for source, config in zip(sources, flat, strict=True):
        found.setdefault(_names(config, telling), []).append(source)
    methods = [
        Method(
            kind=names.kind,
            world=names.world,
            sources=tuple(sorted(own, key=lambda source: source.seed or 0)),
            head=names.head,
            perturbed=names.perturbed,
        )
        for names, own in found.items()
    ]
    for method in methods:
        _require_seeds(method)
    return sorted(methods, key=_world_first(methods))


def _world_first(methods: Sequence[Method]) -> Any:
    worlds = list(dict.fromkeys(method.world for method in methods))
    return lambda method: worlds.index(method.world)


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in config.items() if key not in IRRELEVANT}
    return {**told, ENV: counted(config[ENV])}


def _is_optional(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is a section in some and none in others, such as ``perturbation``."""
    return len({isinstance(own[key], Mapping) for own in configs if key in own}) > 1


def _presence(config: Mapping[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """The name of each of some sections, or what is in it; None where there is none.

    Without it, nothing would tell a run that lacks a section from those that have it.
    """
    found = {}
    for key in sections:
        value = config.get(key)
        if isinstance(value, Mapping):
            value = value.get("name", dict(value))
        found[key] = value
    return found


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted keys, in order."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        full = f"{above}.{key}" if above else key
        flat |= _flat(value, full) if isinstance(value, Mapping) else {full: value}
    return flat


def _telling(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which configurations differ.

    Options of a section that is present under another name are told by the name. A key
    that some lack, since an earlier version wrote them, tells as little as its default.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if _differs(key, configs)]


def _differs(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    section, _, last = key.rpartition(".")
    by_name: dict[Any, set[str]] = {}
    for config in configs:
        if key not in config:
            continue
        kind = config.get(f"{section}.name") if section and last != "name" else None
        by_name.setdefault(kind, set()).add(repr(config[key]))
    return any(len(values) > 1 for values in by_name.values())


def _names(config: Mapping[str, Any], telling: Sequence[str]) -> _Names:
    own = [key for key in telling if key in config]
    world = [key for key in own if key.split(".")[0] == ENV]
    kind = [key for key in own if key not in world]
    tokens = [key for key in kind if key.startswith(PERTURBED)]
    head = [key for key in kind if key not in tokens]
    return _Names(
        kind=_words(kind, config) or _default(config),
        world=_words(world, config),
        head=_words(head, config) or _default(config),
        perturbed=_words(tokens, config),
    )


def _words(keys: Sequence[str], config: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (_word(key, config) for key in keys)))


def _default(config: Mapping[str, Any]) -> str:
    """The name of a method that differs from no other."""
    return str(config.get("pooling.name") or config.get("policy.name") or ONLY)


def _word(key: str, config: Mapping[str, Any]) -> str:
    """``ada`` for ``pooling.name: ada``, ``lr=0.01`` for ``ppo.lr: 0.01``.

    A section that others have leaves no word where it is missing.
    """
    section, _, last = key.rpartition(".")
    if last == "name":
        return "" if section in config else str(config[key]).rpartition(":")[2]
    if f"{key}.name" in config:
        return str(config[key]).rpartition(":")[2]
    lacking = not section and config[key] is None
    return "" if lacking else f"{last}={config[key]}"


def _require_seeds(method: Method) -> None:
    """Refuse what would count one seed twice."""
    seen: dict[Any, Source] = {}
    for source in method.sources:
        if source.seed in seen:
            raise InputError(
                f"{seen[source.seed].run.path} and {source.run.path} differ in nothing "
                f"that was configured, seed={source.seed} included: expected one run "
                "of each seed"
            )
        seen[source.seed] = source
