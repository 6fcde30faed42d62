"""Options of config groups that come from signatures, as a source of Hydra's.

A name of a registry is an option of its group, whose keys are the parameters of the
class, with their defaults. Hydra asks for one option at a time, so only the classes
that a configuration names are imported.
"""

from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf
from pydantic_core import to_jsonable_python

from marl_pool.config.sections import (
    DEFAULTS,
    GROUPS,
    NONE,
    VERBS,
    AnySection,
    Group,
    Section,
    built_in,
    load,
)
from marl_pool.utils.signatures import ANY_OTHER, options_of

SETTINGS = "_settings"
"""Suffix of the options that hold a verb's own settings, such as ``train_settings``."""


class SignatureSource(ConfigSource):
    """The packaged options without a YAML file, ``signature://``."""

    @staticmethod
    def scheme() -> str:
        """Return the name that search paths begin with."""
        return "signature"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return an option's keys with their defaults."""
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        if not self.is_config(config_path):
            raise ConfigLoadError(f"no option {config_path}")
        return ConfigResult(
            config=OmegaConf.create(_content(group, option)),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header={"package": None},
        )

    def available(self) -> bool:
        """Return True: signatures need no folder."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return True for a group with such options."""
        return bool(built_in(config_path.strip("/")))

    def is_config(self, config_path: str) -> bool:
        """Return True for such an option, or a verb's settings."""
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        if group:
            return option in built_in(group)
        return option.endswith(SETTINGS) and option.removesuffix(SETTINGS) in VERBS

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List the options of a group."""
        group = config_path.strip("/")
        return [] if results_filter is ObjectType.GROUP else built_in(group)


def _content(group: str, option: str) -> dict[str, Any]:
    """Return the keys of an option: a name, if it is registered, and defaults."""
    if not group:
        return _defaults(VERBS[option.removesuffix(SETTINGS)].settings)
    if option == NONE:
        return {"name": NONE}
    named = group in GROUPS and option in GROUPS[group].names()
    section = GROUPS[group] if named else DEFAULTS[group, option]
    name = {"name": option} if named else {}
    return {**name, **_defaults(section, option)}


def _defaults(section: AnySection, option: str = "") -> dict[str, Any]:
    follows = section.follows if isinstance(section, Group) else {}
    return {
        key: follows.get(key, "???" if each.required else to_jsonable_python(each[1]))
        for key, each in options_of(class_of(section, option), context(section)).items()
        if key != ANY_OTHER
    }


def class_of(section: AnySection, name: str) -> type[Any]:
    """Return the class that a section constructs.

    Args:
        section: of a verb.
        name: a key of its registry, if it has one.
    """
    if isinstance(section, Group | Section):
        target = section.names()[name] if isinstance(section, Group) else section.target
        cls: type[Any] = load(target)
        return cls
    return section


def context(section: AnySection) -> frozenset[str]:
    """Return the parameters of a section's class that are no options."""
    return section.context if isinstance(section, Group | Section) else frozenset()
