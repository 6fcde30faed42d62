"""What a configuration consists of: each verb's sections and what they configure."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from marl_pool.evaluation.settings import EvaluateSettings, RenderSettings
from marl_pool.training.settings import PPOSettings, StudySettings, TrainSettings

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
    """

    registry: str
    base: str
    context: frozenset[str] = frozenset()
    optional: bool = False

    def names(self) -> Mapping[str, str]:
        """The registry itself."""
        names: Mapping[str, str] = load(self.registry)
        return {**names, NONE: ""} if self.optional else names


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
        "marl_pool.envs.base:World",
        frozenset(
            ("num_envs", "seed", "first_world", "first_episode", "device", "dtype")
        ),
    ),
    "encoder": Group(
        "marl_pool.encoders:ENCODERS",
        "marl_pool.encoders.base:Encoder",
        frozenset({"dropout"}),
    ),
    "pooling": Group(
        "marl_pool.pooling:POOLING",
        "marl_pool.pooling.base:Pooling",
        frozenset({"dim", "num_tokens", "has_self", "action_dim"}),
    ),
    "perturbation": Group(
        "marl_pool.perturbations:PERTURBATIONS",
        "marl_pool.perturbations.base:Perturbation",
        frozenset({"has_self", "type_names", "dtype"}),
        optional=True,
    ),
}

LISTED = {"tokenizers": "marl_pool.envs.tokenizers:TOKENIZERS"}
"""Registries whose names are values of an option, not a group."""

POLICY = Section(
    "marl_pool.policies.token_policy:TokenPolicy",
    frozenset({"spec", "action_space", "encoder", "pooling", "dropout", "seed"}),
)

SECTIONS: dict[str, Group | Section | type[Any]] = {
    **GROUPS,
    "policy": POLICY,
    "ppo": PPOSettings,
}
"""By config group; a type is a dataclass of settings."""


@dataclass(frozen=True)
class Verb:
    """The composition of one verb.

    Attributes:
        sections: the keys of `SECTIONS` that it has.
        settings: its other top-level keys.
        presets: config groups that leave no section behind.
    """

    sections: tuple[str, ...]
    settings: type[Any]
    presets: tuple[str, ...] = ()

    @property
    def config_groups(self) -> tuple[str, ...]:
        """Keys whose value is the name of a YAML file."""
        return (*self.sections, *self.presets)


VERBS = {
    "train": Verb(
        ("env", "encoder", "pooling", "policy", "ppo", "perturbation"),
        TrainSettings,
        ("experiment",),
    ),
    "sweep": Verb(
        ("env", "encoder", "pooling", "policy", "ppo", "perturbation"),
        StudySettings,
        ("experiment",),
    ),
    "evaluate": Verb((), EvaluateSettings, ("suite",)),
    "render": Verb(("perturbation",), RenderSettings),
}


def registry(kind: str) -> Mapping[str, str]:
    """What is registered under "pooling", "envs", "tokenizers" and so on."""
    own = LISTED.get(kind) or GROUPS[kind.removesuffix("s")].registry
    names: Mapping[str, str] = load(own)
    return names


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
