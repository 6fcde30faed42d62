"""Sections of a configuration, and the classes that they construct."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from marl_pool.options.plugins import load
from marl_pool.perturbations import CONTEXT
from marl_pool.runs.run import ENV_CONTEXT

NONE = "none"


@dataclass(frozen=True)
class Section:
    """A section without a name: its keys always construct the same class.

    Attributes:
        target: ``package.module:Class``.
        context: constructor arguments that the program sets, not the configuration.
    """

    target: str
    context: Set[str] = frozenset()

    def cls(self, name: str = "") -> type[Any]:
        """Return the class; ``name`` is ignored."""
        return load(self.target)


@dataclass(frozen=True)
class Group:
    """A section whose ``name`` determines the class that its other keys construct.

    Attributes:
        registry: ``module:DICT``, short name to ``package.module:Class``.
        base: ``module:Class`` that a plug-in must derive from.
        context: constructor arguments that the program sets, not the configuration.
        optional: whether the name `NONE` is allowed.
        parts: options that are ``{"name": …, **options}`` themselves, each with the
            config group whose names it takes.
        follows: options that take their default from another section, each with its
            interpolation.
        leaders: by part, another part that it follows instead of a section.
    """

    registry: str
    base: str
    context: Set[str] = frozenset()
    optional: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)
    leaders: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> Mapping[str, str]:
        """Return the registry."""
        registered = load(self.registry)
        return {**registered, NONE: ""} if self.optional else registered

    def cls(self, name: str) -> type[Any]:
        """Return the class of a registered name."""
        return load(self.names()[name])


AnySection = Group | Section

GROUPS = {
    "env": Group("marl_pool.envs:ENVS", "marl_pool.envs.base:BatchedEnv", ENV_CONTEXT),
    "encoder": Group(
        "marl_pool.encoders:ENCODERS",
        "marl_pool.encoders.base:Encoder",
        {"dropout", "attention_dropout"},
    ),
    "pooling": Group(
        "marl_pool.pooling:POOLING",
        "marl_pool.pooling.base:Pooling",
        {"dim", "num_tokens", "has_self", "action_dim", "attention_dropout"},
        # Only a configuration has an encoder to follow.
        follows={"num_heads": "${oc.select:encoder.num_heads,1}"},
    ),
    "critic": Group(
        "marl_pool.critics:CRITICS",
        "marl_pool.critics.base:Critic",
        {"policy", "num_agents", "state_spec", "seed"},
        parts={"encoder": "encoder", "pooling": "pooling"},
    ),
    "perturbation": Group(
        "marl_pool.perturbations:PERTURBATIONS",
        "marl_pool.perturbations.base:Perturbation",
        {*CONTEXT},
        optional=True,
    ),
    "policy": Group(
        "marl_pool.policies:AGENTS",
        "marl_pool.policies.agent:Agent",
        {"spec", "action_space", "seed"},
        parts={"pooling": "pooling"},
    ),
    "evolution": Group(
        "marl_pool.training.evolution:STRATEGIES",
        "marl_pool.training.evolution.strategy:Strategy",
        {"start", "seed"},
    ),
    "task": Group(
        "marl_pool.training.supervised:TASKS",
        "marl_pool.training.supervised.task:Task",
        {"encoder", "pooling", "dropout", "init_std", "data_dir", "download"},
    ),
}

LISTED = {
    "tokenizers": "marl_pool.envs.tokenizers:TOKENIZERS",
    "policies": "marl_pool.policies:POLICIES",
    "strategies": "marl_pool.training.evolution:STRATEGIES",
    "teachers": "marl_pool.training.cloning:TEACHERS",
}
"""Registries whose names are values of an option, not a group."""

POLICY = Section(
    "marl_pool.policies.token_policy:TokenPolicy",
    {"spec", "action_space", "encoder", "pooling", "seed", "dropout", "token_dropout"},
)
STUDENT = replace(
    GROUPS["policy"],
    registry="marl_pool.policies:POLICIES",
    base="marl_pool.policies.base:SequencePolicy",
    context={"spec", "action_space", "seed", "dropout", "token_dropout"},
    parts={"encoder": "encoder", "pooling": "pooling"},
    leaders={"pooling": "encoder"},
)
"""The policy that learns by cloning."""
SETTINGS = {
    "ppo": Section("marl_pool.training.settings:PPOSettings"),
    "clone": Section("marl_pool.training.cloning.settings:CloneSettings"),
    "fit": Section("marl_pool.training.supervised.settings:FitSettings"),
}
SECTIONS: dict[str, AnySection] = {**GROUPS, **SETTINGS}
"""By config group, where a verb has no special section."""
OPTIONAL_PARTS = {
    part: replace(GROUPS[part], optional=True) for part in ("encoder", "pooling")
}
"""Parts that some supervised tasks do without."""
DEFAULTS: dict[tuple[str, str], AnySection] = {
    ("policy", "token"): POLICY,
    ("ppo", "fast"): SETTINGS["ppo"],
    ("clone", "steps"): SETTINGS["clone"],
    ("fit", "adam"): SETTINGS["fit"],
}
"""By group and option: the sections whose options are the defaults of one class."""


def registry(kind: str) -> Mapping[str, str]:
    """Return the registry of "pooling", "envs", "tokenizers" and so on."""
    return load(LISTED.get(kind) or GROUPS[kind.removesuffix("s")].registry)


def built_in(group: str) -> list[str]:
    """List the options of a group that come from signatures, not from YAML files."""
    options = {*GROUPS[group].names()} if group in GROUPS else set()
    options |= {NONE} if group in OPTIONAL_PARTS else set()
    return sorted(options | {option for owner, option in DEFAULTS if owner == group})
