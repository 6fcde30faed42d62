"""The verbs of the command, each with the sections and keys of its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from marl_pool.config.sections import (
    NONE,
    OPTIONAL_PARTS,
    POLICY,
    SECTIONS,
    STUDENT,
    AnySection,
)
from marl_pool.evaluation.settings import (
    EvaluateSettings,
    PlaySettings,
    RenderSettings,
    ReportSettings,
)
from marl_pool.options.plugins import Plugins, Registry, load
from marl_pool.training.cloning.settings import CloneRunSettings
from marl_pool.training.settings import EvolveSettings, StudySettings, TrainSettings
from marl_pool.training.supervised.settings import FitRunSettings, FitStudySettings

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
        "sweep --verb fit": replace(FIT, settings=FitStudySettings),
        "evaluate": Verb({}, EvaluateSettings, {"suite": "standard"}, changes=("env",)),
        "render": Verb({"perturbation": NONE}, RenderSettings, changes=("env",)),
        "play": Verb({}, PlaySettings, changes=("env",)),
        "report": Verb({}, ReportSettings),
    },
    _verbs,
)
