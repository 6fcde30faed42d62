"""Sections of a configuration, by verb, and the classes that they construct."""

import functools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

from marl_pool.evaluation.settings import (
    EvaluateSettings,
    PlaySettings,
    RenderSettings,
    ReportSettings,
)
from marl_pool.files.reading import read_yaml
from marl_pool.options import names
from marl_pool.options.plugins import Plugins, Registry, installed, load
from marl_pool.options.signatures import show
from marl_pool.perturbations import CONTEXT
from marl_pool.runs.run import ENV_CONTEXT
from marl_pool.training.cloning.settings import CloneRunSettings
from marl_pool.training.settings import EvolveSettings, StudySettings, TrainSettings
from marl_pool.training.supervised.settings import FitRunSettings, FitStudySettings
from marl_pool.utils.errors import InputError

CONFIGS = Path(str(files("marl_pool"))) / "configs"
"""The YAML files inside the package, a folder for each group."""
NONE = "none"
DEFAULTS_KEY = "defaults"
"""Key of a YAML file that lists what it builds on: ``- OPTION`` of the same group,
whose keys come first, and ``- GROUP: OPTION`` for other groups."""


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
SIZES = "sizes"
"""The preset that task and scale choose together; see `compose`."""


@dataclass(frozen=True)
class Verb:
    """The composition of one verb.

    Attributes:
        sections: keys of `SECTIONS`, each with the option that is chosen by default.
        settings: its other top-level keys.
        presets: config groups that leave no section behind, with default options. A
            later one takes precedence.
        special_sections: sections that differ from those in `SECTIONS`.
        changes: sections that may be absent or hold only some keys: they change the
            configuration of a run.
    """

    sections: Mapping[str, str]
    settings: type[Any]
    presets: Mapping[str, str | None] = field(default_factory=dict)
    special_sections: Mapping[str, AnySection] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def config_groups(self) -> tuple[str, ...]:
        """Keys whose value is the name of an option."""
        return (*self.sections, *self.presets, *self.changes)

    @property
    def keys(self) -> set[str]:
        """All top-level keys."""
        return {*self.config_groups, *(f.name for f in fields(self.settings))}

    def section(self, name: str) -> AnySection:
        """Return what the keys of the section ``name`` construct."""
        return self.special_sections.get(name, SECTIONS[name])


PPO = Verb(
    {
        "env": "simple_centroid",
        "encoder": "transformer",
        "pooling": "ada",
        "policy": "token",
        "critic": "own",
        "ppo": "fast",
        "perturbation": NONE,
    },
    TrainSettings,
    {"experiment": None},
    {"policy": POLICY},
)
FIT = Verb(
    {
        "task": "knn_centroid",
        "encoder": "transformer",
        "pooling": "avg",
        "fit": "adam",
    },
    FitRunSettings,
    # Sizes follow from task and scale.
    {"scale": "cpu", SIZES: None, "experiment": None},
    OPTIONAL_PARTS,
)
EVOLVE = Verb(
    {
        "env": "cartpole",
        "policy": "sensory",
        "evolution": "cma",
        "perturbation": NONE,
    },
    EvolveSettings,
    {"experiment": None},
)


def _verbs(plugins: Plugins) -> dict[str, Verb]:
    return {
        name: Verb({}, load(command.settings), changes=("env",))
        for name, command in plugins.commands.items()
        if command.settings
    }


VERBS = Registry(
    "verb",
    {
        "train": PPO,
        "sweep": replace(PPO, settings=StudySettings),
        "evolve": EVOLVE,
        "clone": Verb(
            {
                "env": "cartpole",
                "policy": "sensory",
                "clone": "sequences",
                "perturbation": NONE,
            },
            CloneRunSettings,
            {"experiment": None},
            {"policy": STUDENT},
        ),
        "fit": FIT,
        "sweep_fit": replace(FIT, settings=FitStudySettings),
        "evaluate": Verb({}, EvaluateSettings, {"suite": "standard"}, changes=("env",)),
        "render": Verb({"perturbation": NONE}, RenderSettings, changes=("env",)),
        "play": Verb({}, PlaySettings, changes=("env",)),
        "report": Verb({}, ReportSettings),
    },
    _verbs,
)


def registry(kind: str) -> Mapping[str, str]:
    """Return the registry of "pooling", "envs", "tokenizers" and so on."""
    return load(LISTED.get(kind) or GROUPS[kind.removesuffix("s")].registry)


def is_packaged(file: Path) -> bool:
    """Return whether a YAML file is the library's or an installed package's."""
    return any(file.is_relative_to(folder) for folder in _folders().values())


@functools.cache
def _folders() -> dict[str, Path]:
    """Return the folders of YAML files, by package."""
    packages = {label: plugins.configs for label, plugins in installed().items()}
    return {"marl_pool": CONFIGS} | {k: path for k, path in packages.items() if path}


@functools.cache
def _packaged() -> dict[str, dict[str, Path]]:
    """Return the packages' YAML files, by group and option.

    Raises:
        InputError: two packages have a file of one name.
    """
    options_of_group: dict[str, dict[str, Path]] = {}
    for label, folder in _folders().items():
        for file in sorted(folder.rglob("*.yaml")):
            group, *parts = file.relative_to(folder).with_suffix("").parts
            option, options = "/".join(parts), options_of_group.setdefault(group, {})
            if option in options:
                raise InputError(f"{label}: {file}: {options[option]} already exists")
            options[option] = file
    return options_of_group


def files_of(group: str, config_dir: Path | None = None) -> dict[str, Path]:
    """Return the YAML files of a config group, by option, the user's own included."""
    options = dict(_packaged().get(group, {}))
    if config_dir is not None:
        folder = config_dir / group
        for file in sorted(folder.rglob("*.yaml")):
            options[file.relative_to(folder).with_suffix("").as_posix()] = file
    return options


def built_in(group: str) -> list[str]:
    """List the options of a group that come from signatures, not from YAML files."""
    options = {*GROUPS[group].names()} if group in GROUPS else set()
    options |= {NONE} if group in OPTIONAL_PARTS else set()
    return sorted(options | {option for owner, option in DEFAULTS if owner == group})


def options_for(verb: str, group: str, config_dir: Path | None = None) -> list[str]:
    """List the options of a config group that suit a verb."""
    options = sorted({*built_in(group), *files_of(group, config_dir)})
    return [option for option in options if suits(verb, group, option, config_dir)]


def suits(verb: str, group: str, option: str, config_dir: Path | None = None) -> bool:
    """Return whether an option of a config group suits a verb.

    An option with a ``name`` suits the verbs that construct a registered class from its
    section; one without, the verbs that do not. A preset suits the verbs that have all
    the groups and options that it chooses, and all the keys that it sets.
    """
    files = files_of(group, config_dir)
    if option not in files and option not in built_in(group):
        return False
    try:
        if group in VERBS[verb].presets:
            return not _preset_misfit(verb, group, option, files, config_dir)
        return _option_suits(verb, group, option, files)
    except InputError:  # a broken file, which is an error only where it is used
        return False


def verbs_for(group: str, option: str, config_dir: Path | None = None) -> list[str]:
    """List the verbs that an option of a config group is made for, as typed."""
    return [
        typed(verb)
        for verb, kind in VERBS.items()
        if group in kind.config_groups and suits(verb, group, option, config_dir)
    ]


def unsuited(
    verb: str, group: str, option: str, config_dir: Path | None = None
) -> InputError:
    """Build the error for an option that does not exist, or is for other verbs."""
    choices = options_for(verb, group, config_dir)
    if suited := verbs_for(group, option, config_dir):
        advice = f"choose from {', '.join(choices)}" if choices else "there is none"
        *verbs, last = suited
        made_for = f"{', '.join(verbs)} and {last}" if verbs else last
        return InputError(
            f"{group}={option} is made for {made_for}; for {typed(verb)} {advice}"
        )
    files = files_of(group, config_dir)
    if option in files:
        # No verb suits a file that cannot be read; this raises the reason.
        if group not in VERBS[verb].presets:
            _option_suits(verb, group, option, files)
        elif reason := _preset_misfit(verb, group, option, files, config_dir):
            return InputError(f"{group}={option}: {files[option]}: {reason}")
    # A paper's presets are in a folder of its name.
    nested = [name for name in files if name.endswith(f"/{option}")]
    if matches := [name for name in nested if name in choices]:
        return InputError(
            f"unknown {group} {option!r}: did you mean {' or '.join(matches)}?"
        )
    if nested:
        return unsuited(verb, group, nested[0], config_dir)
    if option.endswith((".yaml", ".yml")):
        name = Path(option).stem
        return InputError(
            f"{group}: expected a name, got the file {option!r}; with --config-dir DIR "
            f"{group}={name} is DIR/{group}/{name}.yaml"
        )
    return names.unknown(group, option, choices)


def typed(verb: str) -> str:
    """Return a verb as it is typed in a command."""
    name, _, trained_by = verb.partition("_")
    return f"{name} --verb {trained_by}" if trained_by else verb


def _preset_misfit(
    verb: str,
    preset_group: str,
    option: str,
    files: Mapping[str, Path],
    config_dir: Path | None,
) -> str:
    """Return the reason why a preset does not suit a verb, or an empty string."""
    kind = VERBS[verb]
    # A preset with a key that no verb has is listed; its use reports the misspelt key.
    foreign = set().union(*(v.keys for v in VERBS.values())) - kind.keys
    # Collect the choices that the preset makes for other groups.
    presets = bases_first(preset_group, option, files)
    contents = [content_of(files[preset]) for preset in presets]
    choices = [choice for content in contents for choice in choices_in(content).items()]
    # The preset suits if the verb has all its keys and choices.
    for key in sorted({key for content in contents for key in content} & foreign):
        return f"expected keys of {typed(verb)}, got {key!r}, a key of other verbs"
    for group, value in choices:
        if group not in kind.config_groups:
            return f"expected groups of {typed(verb)}, got {group}={value}"
        # Asking whether presets that choose each other suit would recurse forever.
        if group in kind.presets:
            options = sorted(files_of(group, config_dir))
        elif value is not None and suits(verb, group, value, config_dir):
            continue
        else:
            options = options_for(verb, group, config_dir)
        if value not in options:
            return f"{group}: expected one of {', '.join(options)}, got {value}"
    return ""


def _option_suits(
    verb: str, group: str, option: str, files: Mapping[str, Path]
) -> bool:
    # Only optional groups can be none.
    section = VERBS[verb].section(group)
    if option == NONE:
        return isinstance(section, Group) and section.optional
    # Where all verbs construct the group alike, all options suit.
    sections = (v.section(group) for v in VERBS.values() if group in v.sections)
    if len({isinstance(candidate, Group) for candidate in sections}) == 1:
        return True
    # An option names a class by itself or by what it builds on.
    owner = section if isinstance(section, Group) else GROUPS.get(group)
    registered = owner.names().keys() if owner else set()
    has_name = any(
        base in registered or (base in files and "name" in content_of(files[base]))
        for base in bases_first(group, option, files)
    )
    return has_name == isinstance(section, Group)


def bases_first(
    group: str,
    option: str,
    files: Mapping[str, Path],
    descendants: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yield the options that an option builds on, in order, then the option itself.

    Args:
        group: config group of all of them.
        option: the option.
        files: YAML files of the group; see `files_of`.
        descendants: options that build on this one.

    Raises:
        InputError: an option that does not exist, or that builds on itself.
    """
    descendants = (*descendants, option)
    for base in bases_in(content_of(files[option])) if option in files else ():
        # Two options may build on the same one, which then comes twice.
        if base in descendants:
            raise InputError(
                f"{files[option]}: defaults: expected another {group}, got {base}: it "
                "builds on itself"
            )
        if base not in files and base not in built_in(group):
            raise InputError(
                f"{files[option]}: defaults: "
                f"{names.unknown(group, base, {*built_in(group), *files})}"
            )
        yield from bases_first(group, base, files, descendants)
    yield option


def summary_of(file: Path) -> str:
    """Return the first sentence of the comment at the top of a preset's file."""
    lines = takewhile(
        lambda line: line.startswith("# "), file.read_text("utf-8").splitlines()
    )
    text = " ".join(line.removeprefix("# ") for line in lines)
    return text.partition(". ")[0].partition(": ")[0].removesuffix(".") + "."


def bases_in(content: Mapping[str, Any]) -> list[str]:
    """List the options of the same group that a file builds on."""
    return [entry for entry in content.get(DEFAULTS_KEY, ()) if isinstance(entry, str)]


def choices_in(content: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the options of groups that a file chooses."""
    choices: dict[str, str | None] = {}
    for entry in content.get(DEFAULTS_KEY, ()):
        choices |= entry if isinstance(entry, Mapping) else {}
    return choices


def content_of(file: Path) -> dict[str, Any]:
    """Read the keys of a YAML file; raise an `InputError` that names the file."""
    # Each composition asks for all presets, and a package's own never change.
    reader = _read if is_packaged(file) else _read.__wrapped__
    return reader(file)


@functools.cache
def _read(file: Path) -> dict[str, Any]:
    content = read_yaml(file) or {}  # checks its size too
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected a mapping of keys, got {show(content):.80}")
    entries = content.get(DEFAULTS_KEY, [])
    if not isinstance(entries, list):
        raise InputError(f"{file}: defaults: expected a list, got {show(entries):.80}")
    for entry in entries:
        options = entry.values() if isinstance(entry, dict) else [entry]
        if not all(option is None or isinstance(option, str) for option in options):
            raise InputError(
                f"{file}: defaults: expected OPTION or GROUP: OPTION, "
                f"got {show(entry):.80}"
            )
    return content
