"""Sections of a configuration, by verb, and the classes that they construct."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from marl_pool.evaluation.settings import (
    DiagnoseSettings,
    EvaluateSettings,
    RenderSettings,
    ReportSettings,
)
from marl_pool.perturbations import CONTEXT
from marl_pool.runs import ENV_CONTEXT
from marl_pool.training.cloning.settings import CloneRunSettings, CloneSettings
from marl_pool.training.settings import (
    EvolveSettings,
    PPOSettings,
    StudySettings,
    TrainSettings,
)
from marl_pool.training.supervised.settings import (
    FitRunSettings,
    FitSettings,
    FitStudySettings,
)
from marl_pool.utils import names
from marl_pool.utils.errors import InputError
from marl_pool.utils.reading import read_yaml

CONFIGS = Path(str(files("marl_pool"))) / "configs"
"""The YAML files inside the package: one for each verb, a folder for each group."""

NONE = "none"


@dataclass(frozen=True)
class Group:
    """A section whose ``name`` says which class its other keys construct.

    Attributes:
        registry: ``module:DICT``, short name to ``package.module:Class``.
        base: ``module:Class`` that a plug-in must derive from.
        context: constructor arguments that the program fills, not the configuration.
        optional: whether the name `NONE` stands for doing without.
        parts: options that are a ``{"name": …, **options}`` of their own, each with
            the config group whose names it takes.
        follows: options that take their default from another section, each with the
            interpolation.
    """

    registry: str
    base: str
    context: frozenset[str] = frozenset()
    optional: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> Mapping[str, str]:
        """The registry itself."""
        registered: Mapping[str, str] = load(self.registry)
        return {**registered, NONE: ""} if self.optional else registered


@dataclass(frozen=True)
class Section:
    """A section without a name: its keys construct always the same class.

    Attributes:
        target: ``package.module:Class``.
        context: constructor arguments that the program fills, not the configuration.
    """

    target: str
    context: frozenset[str] = frozenset()


GROUPS = {
    "env": Group(
        "marl_pool.envs:ENVS",
        "marl_pool.envs.base:BatchedEnv",
        ENV_CONTEXT,
    ),
    "encoder": Group(
        "marl_pool.encoders:ENCODERS",
        "marl_pool.encoders.base:Encoder",
        frozenset({"dropout", "attention_dropout"}),
    ),
    "pooling": Group(
        "marl_pool.pooling:POOLING",
        "marl_pool.pooling.base:Pooling",
        frozenset({"dim", "num_tokens", "has_self", "action_dim", "attention_dropout"}),
        # A library user's head does not know what encoder stands before it.
        follows={"num_heads": "${oc.select:encoder.num_heads,1}"},
    ),
    "perturbation": Group(
        "marl_pool.perturbations:PERTURBATIONS",
        "marl_pool.perturbations.base:Perturbation",
        frozenset(CONTEXT),
        optional=True,
    ),
    "policy": Group(
        "marl_pool.policies:AGENTS",
        "marl_pool.policies.agent:Agent",
        frozenset({"spec", "action_space", "seed"}),
        parts={"pooling": "pooling"},
    ),
    "evolution": Group(
        "marl_pool.training.evolution:STRATEGIES",
        "marl_pool.training.evolution.strategy:Strategy",
        frozenset({"start", "seed"}),
    ),
    "task": Group(
        "marl_pool.training.supervised.tasks:TASKS",
        "marl_pool.training.supervised.task:Task",
        frozenset(
            {
                *("encoder", "pooling", "dropout", "init_std"),
                *("data_dir", "download"),
            }
        ),
    ),
}

LISTED = {
    "tokenizers": "marl_pool.envs.tokenizers:TOKENIZERS",
    "policies": "marl_pool.policies:POLICIES",
    "strategies": "marl_pool.training.evolution:STRATEGIES",
}
"""Registries whose names are values of an option, not a group."""

POLICY = Section(
    "marl_pool.policies.token_policy:TokenPolicy",
    frozenset({"spec", "action_space", "encoder", "pooling", "dropout", "seed"}),
)

AnySection = Group | Section | type[Any]
"""A type is a dataclass of settings."""

SECTIONS: dict[str, AnySection] = {
    **GROUPS,
    "ppo": PPOSettings,
    "clone": CloneSettings,
    "fit": FitSettings,
}
"""By config group, where a verb has none of its own."""
DISPENSABLE = {
    part: replace(GROUPS[part], optional=True) for part in ("encoder", "pooling")
}
"""Parts that some supervised tasks do without."""
DEFAULTS: dict[tuple[str, str], AnySection] = {
    ("policy", "token"): POLICY,
    ("ppo", "fast"): PPOSettings,
    ("clone", "steps"): CloneSettings,
    ("fit", "adam"): FitSettings,
}
"""By group and option: the sections whose options are the defaults of one class."""
SIZES = "sizes"
"""The preset that another two choose; see `compose`."""


@dataclass(frozen=True)
class Verb:
    """The composition of one verb.

    Attributes:
        sections: the keys of `SECTIONS` that it has.
        settings: its other top-level keys.
        presets: config groups that leave no section behind.
        own: sections that mean something else to this verb than in `SECTIONS`.
        changes: sections that may be absent, or hold some keys only: they change
            what a run's configuration says.
    """

    sections: tuple[str, ...]
    settings: type[Any]
    presets: tuple[str, ...] = ()
    own: Mapping[str, AnySection] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def config_groups(self) -> tuple[str, ...]:
        """Keys whose value is the name of a YAML file."""
        return (*self.sections, *self.presets, *self.changes)

    @property
    def keys(self) -> set[str]:
        """All top-level keys that it knows."""
        return {*self.config_groups, *(each.name for each in fields(self.settings))}

    def section(self, name: str) -> AnySection:
        """Return the group, class or dataclass that the section ``name`` configures."""
        return self.own.get(name, SECTIONS[name])


VERBS = {
    "train": Verb(
        ("env", "encoder", "pooling", "policy", "ppo", "perturbation"),
        TrainSettings,
        ("experiment",),
        {"policy": POLICY},
    ),
    "sweep": Verb(
        ("env", "encoder", "pooling", "policy", "ppo", "perturbation"),
        StudySettings,
        ("experiment",),
        {"policy": POLICY},
    ),
    "evolve": Verb(
        ("env", "policy", "evolution", "perturbation"), EvolveSettings, ("experiment",)
    ),
    "clone": Verb(
        ("env", "policy", "clone", "perturbation"), CloneRunSettings, ("experiment",)
    ),
    "fit": Verb(
        ("task", "encoder", "pooling", "fit"),
        FitRunSettings,
        ("scale", SIZES, "experiment"),
        DISPENSABLE,
    ),
    "sweep_fit": Verb(
        ("task", "encoder", "pooling", "fit"),
        FitStudySettings,
        ("scale", SIZES, "experiment"),
        DISPENSABLE,
    ),
    "evaluate": Verb((), EvaluateSettings, ("suite",), changes=("env",)),
    "diagnose": Verb((), DiagnoseSettings, changes=("env",)),
    "render": Verb(("perturbation",), RenderSettings, changes=("env",)),
    "report": Verb((), ReportSettings),
}


def registry(kind: str) -> Mapping[str, str]:
    """Return the registry of "pooling", "envs", "tokenizers" and so on."""
    own = LISTED.get(kind) or GROUPS[kind.removesuffix("s")].registry
    registered: Mapping[str, str] = load(own)
    return registered


def load(target: str) -> Any:
    """Import ``module:name``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def files_of(group: str, config_dir: Path | None = None) -> dict[str, Path]:
    """The YAML files of a config group, by option, the user's own included."""
    folders = [CONFIGS] if config_dir is None else [CONFIGS, config_dir]
    return {
        path.relative_to(folder / group).with_suffix("").as_posix(): path
        for folder in folders
        for path in sorted((folder / group).rglob("*.yaml"))
    }


def built_in(group: str) -> list[str]:
    """List the options of a group that come from signatures, not from YAML files."""
    named = {*GROUPS[group].names()} if group in GROUPS else set()
    named |= {NONE} if group in DISPENSABLE else set()
    return sorted(named | {option for own, option in DEFAULTS if own == group})


def options_for(verb: str, group: str, config_dir: Path | None = None) -> list[str]:
    """List the options of a config group that suit a verb.

    An option with a ``name`` suits the verbs that construct a registered class from
    its section, another the verbs that do not. A preset suits the verbs that have all
    the groups and options that it chooses, and all the keys that it sets.
    """
    files = files_of(group, config_dir)
    return [
        option
        for option in sorted({*built_in(group), *files})
        if _suits(verb, group, option, files, config_dir)
    ]


def refuse_option(
    verb: str, group: str, option: str, config_dir: Path | None = None
) -> InputError:
    """Build the refusal of an option that is none, or is made for other verbs."""
    choices = options_for(verb, group, config_dir)
    suited = [
        other
        for other, kind in VERBS.items()
        if group in kind.config_groups
        and option in options_for(other, group, config_dir)
    ]
    if not suited:
        return names.unknown(group, option, choices)
    instead = f"choose from {', '.join(choices)}" if choices else "there is none"
    return InputError(
        f"{group}={option} is made for {' and '.join(map(typed, suited))}; "
        f"for {typed(verb)} {instead}"
    )


def typed(verb: str) -> str:
    """Return a verb as it is typed in a command."""
    made, _, ran = verb.partition("_")
    return f"{made} --verb {ran}" if ran else verb


def _suits(
    verb: str,
    group: str,
    option: str,
    files: Mapping[str, Path],
    config_dir: Path | None,
) -> bool:
    kind = VERBS[verb]
    if group in kind.presets:
        # A key that no verb has is misspelt: to be told so, the preset is taken.
        strange = set().union(*(v.keys for v in VERBS.values())) - kind.keys
        return all(
            chosen in kind.config_groups
            and value in options_for(verb, chosen, config_dir)
            for chosen, value in _choices(option, files)
        ) and all(strange.isdisjoint(content) for content in contents(option, files))
    section = kind.section(group)
    if option == NONE:
        return isinstance(section, Group) and section.optional
    sections = (v.section(group) for v in VERBS.values() if group in v.sections)
    if len({isinstance(each, Group) for each in sections}) == 1:
        return True
    return _has_name(group, option, files) == isinstance(section, Group)


def _has_name(group: str, option: str, files: Mapping[str, Path]) -> bool:
    """Return True for an option that names a class, by itself or by its bases."""
    if option not in files:
        return group in GROUPS and option in GROUPS[group].names()
    content = read_yaml(files[option]) or {}
    bases = map(str, content.get("defaults", ()))
    return "name" in content or any(_has_name(group, base, files) for base in bases)


def _choices(option: str, files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield group and option for each choice of a preset and of its bases."""
    for content in contents(option, files):
        for default in content.get("defaults", ()):
            if isinstance(default, Mapping):
                for key, value in default.items():
                    yield str(key).removeprefix("override ").lstrip("/"), str(value)


def contents(option: str, files: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield the content of an option's file, then of the files it builds on."""
    if option in files:
        content = read_yaml(files[option]) or {}
        yield content
        for base in content.get("defaults", ()):
            yield from contents(str(base), files)
