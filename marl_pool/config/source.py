"""Options of config groups that come from signatures, as a config source of Hydra.

A name of a registry is an option of its group, whose keys are the parameters of the
class, with their defaults. Hydra asks for one option at a time, so only the classes
that a configuration names are imported.
"""

from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf
from pydantic_core import to_jsonable_python
from typing_extensions import override

from marl_pool.config.sections import DEFAULTS, GROUPS, NONE, VERBS, Group, built_in
from marl_pool.utils.signatures import ANY_OTHER, Option, options_of

SUFFIX = "_settings"
"""Suffix of the options that hold a verb's own settings, such as ``train_settings``."""


class SignatureSource(ConfigSource):
    """The packaged options without a YAML file, ``signature://``."""

    @staticmethod
    @override
    def scheme() -> str:
        return "signature"

    @override
    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"no option {config_path}")
        return ConfigResult(
            config=OmegaConf.create(_content(*_split(config_path))),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header={"package": None},
        )

    @override
    def available(self) -> bool:
        return True

    @override
    def is_group(self, config_path: str) -> bool:
        return bool(built_in(config_path.strip("/")))

    @override
    def is_config(self, config_path: str) -> bool:
        group, option = _split(config_path)
        if group:
            return option in built_in(group)
        return option.endswith(SUFFIX) and option.removesuffix(SUFFIX) in VERBS

    @override
    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        return [] if results_filter is ObjectType.GROUP else built_in(group)


def _split(config_path: str) -> tuple[str, str]:
    group, _, option = config_path.removesuffix(".yaml").rpartition("/")
    return group, option


def _content(group: str, option: str) -> dict[str, Any]:
    """Return the keys of an option: a name, if it is registered, and defaults."""
    if not group:
        return _defaults(options_of(VERBS[option.removesuffix(SUFFIX)].settings))
    if option == NONE:
        return {"name": NONE}
    named = group in GROUPS and option in GROUPS[group].names()
    section = GROUPS[group] if named else DEFAULTS[group, option]
    defaults = _defaults(options_of(section.cls(option), section.context))
    follows = section.follows if isinstance(section, Group) else {}
    changed = {key: follows[key] for key in defaults if key in follows}
    return {**({"name": option} if named else {}), **defaults, **changed}


def _defaults(options: dict[str, Option]) -> dict[str, Any]:
    return {
        key: to_jsonable_python(option.default)
        for key, option in options.items()
        if key != ANY_OTHER and not option.required  # the check reports a missing one
    }
