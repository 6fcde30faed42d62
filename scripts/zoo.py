"""Train two iterations on every environment of public collections; docs/zoo.md.

    python scripts/zoo.py [--only NAME…] [--check]

Without ``--check`` the page is written. Rows whose collection is not installed, or that
``--only`` leaves out, stay as they are. ``pip install "marl-pool[zoo]"`` installs the
collections.
"""

import argparse
import importlib.util
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from markdown_tables import markdown_table

import marl_pool
from marl_pool.envs.description import describe_env
from marl_pool.training.settings import PPOSettings
from marl_pool.utils.errors import InputError

PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"
NUM_ENVS = 8
"""Number of environments, and of steps that each takes in an iteration."""
COLLECTIONS = {
    "mpe2": "mpe2",
    "SISL": "pettingzoo.sisl",
    "butterfly": "pettingzoo.butterfly",
    "classic": "pettingzoo.classic",
    "MAgent2": "magent2.environments",
}
"""Packages with a module ``NAME_vN`` for each environment."""
IDS = {
    "LBF": {
        "lbforaging:Foraging-8x8-2p-3f-v3": "all see all",
        "lbforaging:Foraging-2s-8x8-2p-2f-coop-v3": "partial sight, forced cooperation",
        "zoo:foraging_grid": "`grid_observation=True`",
    },
    "RWARE": {
        "rware:rware-tiny-2ag-v2": "",
        "zoo:warehouse_messages": "`msg_bits=2`",
        "zoo:warehouse_image": "`ObservationType.IMAGE`",
        "zoo:warehouse_image_dict": "`ObservationType.IMAGE_DICT`",
        "zoo:warehouse_dict": "`ObservationType.DICT`",
    },
}
"""One environment for each kind of space; the other ids differ only in numbers."""
SETTINGS: dict[str, dict[str, Any]] = {
    "pettingzoo.butterfly.knights_archers_zombies_v11": {"padding": "zero_rows"},
    "zoo:foraging_grid": {"channels": "first"},
    "zoo:warehouse_image": {"channels": "first"},
    "zoo:warehouse_image_dict": {"channels": "first"},
}
"""Options by which observations are described."""
REMEDIES = {
    "zoo:foraging_grid": "This is a fault of lbforaging 2.0; use the vectors.",
}
"""Advice about environments that are rejected."""
TITLE = "# Public environments"
COLUMNS = ("environment", "options", "agents", "tokens of an agent", "result")
TRAINED, IN_TURNS = "trains", "trains, in turns"


@dataclass(frozen=True)
class Entry:
    """An environment of a collection."""

    collection: str
    module: str
    note: str = ""

    @property
    def installed(self) -> bool:
        """True if the package of the environment can be imported."""
        package = {"LBF": "lbforaging", "RWARE": "rware"}.get(
            self.collection, COLLECTIONS.get(self.collection, "")
        )
        return importlib.util.find_spec(package.partition(".")[0]) is not None

    @property
    def label(self) -> str:
        """Name in the first column."""
        return f"`{self.module}`" if not self.note else f"`{self.module}` ({self.note})"


def entries() -> Iterator[Entry]:
    """Yield all environments of the installed collections."""
    for collection, package in COLLECTIONS.items():
        top = package.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            continue
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        (folder,) = spec.submodule_search_locations
        for file in sorted(Path(folder).glob("*_v[0-9]*.py")):
            yield Entry(collection, f"{package}.{file.stem}")
    for collection, modules in IDS.items():
        for module, note in modules.items():
            if (entry := Entry(collection, module, note)).installed:
                yield entry


def row(entry: Entry) -> tuple[str, ...]:
    """Train two iterations on an environment, and return its row of the table."""
    settings = SETTINGS.get(entry.module, {})
    env = {"name": "pettingzoo", "module": entry.module, **settings}
    options = " ".join(f"`env.{key}={value}`" for key, value in settings.items())
    try:
        described = describe_env(env)
        groups, agents = described.groups, 1
        if not described.turn_based:
            agents = sum(group.num_agents for group in groups.values())
        with tempfile.TemporaryDirectory() as folder:
            # The default batch, rounded up as for every user.
            steps = NUM_ENVS * -(-PPOSettings.batch_size // (NUM_ENVS * agents))
            run = marl_pool.train(
                env=env,
                ppo={"num_envs": NUM_ENVS, "num_epochs": 1},
                total_steps=2 * steps,
                run_dir=f"{folder}/run",
            )
            assert len(run.rows()) == 2
    except InputError as error:
        # Keep the reason, not the folder of the run.
        reason = str(error).partition(", raised while")[0].partition("InputError: ")
        return entry.label, options, "", "", _refused(entry, reason[2] or reason[0])
    counts = ", ".join(f"{name} {group.num_agents}" for name, group in groups.items())
    sizes = dict.fromkeys(
        f"{group.tokens.num_tokens} × {group.tokens.num_features}"
        for group in groups.values()
    )
    result = TRAINED if not described.turn_based else IN_TURNS
    return entry.label, options, counts, ", ".join(sizes), result


def _refused(entry: Entry, reason: str) -> str:
    # The line of the code that raised changes with the versions.
    reason = re.sub(r" \([^()\s]+\.py:\d+\)", "", reason)
    return f"refused: {reason}. {REMEDIES.get(entry.module, '')}".strip()


def written() -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of the page by collection."""
    collections: dict[str, list[tuple[str, ...]]] = {}
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    for section in text.split("\n## ")[1:]:
        name, _, body = section.partition("\n")
        lines = re.findall(r"^\| (`.*) \|$", body, re.M)
        collections[name] = [tuple(line.split(" | ")) for line in lines]
    return collections


def page(collections: dict[str, list[tuple[str, ...]]]) -> str:
    """Return the page with the rows of each collection."""
    parts = [
        "<!-- Written by scripts/zoo.py, which trains on each: edit that. -->",
        TITLE,
        "Which public environments train: the results of two iterations of "
        "`marl-pool train env=pettingzoo env.module=…` on every environment of these "
        "collections, with its default options. A module `zoo:…` is a function in "
        "`scripts/zoo.py` that builds an environment whose options are not plain "
        "values.",
        '`pip install "marl-pool[zoo]"` installs the collections; on Python 3.11 all '
        "of them fit the versions of `constraints.txt`. "
        "[pettingzoo](envs/pettingzoo.md) explains how observations become tokens. "
        "Policies trained to the end are in [pretrained](pretrained.md).",
    ]
    for name, rows in collections.items():
        parts += [f"## {name}", markdown_table(COLUMNS, rows)]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", default=["*"])
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    options = parser.parse_args(arguments)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    # Rows that are not measured this time stay as they were.
    before = written()
    rows = {name: {line[0]: line for line in lines} for name, lines in before.items()}
    stale = 0
    for entry in entries():
        if not any(fnmatchcase(entry.module, f"*{name}*") for name in options.only):
            continue
        line = row(entry)
        old = rows.setdefault(entry.collection, {}).get(entry.label)
        stale += line != old
        rows[entry.collection][entry.label] = line
        print(f"{' | '.join(line)}{'' if line == old else '  (new)'}", file=sys.stderr)
    order = [*COLLECTIONS, *IDS]
    collections = {name: [*rows[name].values()] for name in order if name in rows}
    if not options.check:
        PAGE.write_text(page(collections), encoding="utf-8")
    return int(options.check and stale > 0)


# Environments whose options are not plain values


def foraging_grid(**options: Any) -> Any:
    """Level-based foraging with a grid as observation."""
    import lbforaging  # noqa: F401, it registers ids
    from lbforaging.foraging import ForagingEnv

    return ForagingEnv(
        players=2,
        min_player_level=1,
        max_player_level=2,
        min_food_level=1,
        max_food_level=None,
        field_size=(8, 8),
        max_num_food=3,
        sight=8,
        max_episode_steps=50,
        force_coop=False,
        grid_observation=True,
        **options,
    )


def warehouse(kind: str, **options: Any) -> Any:
    """Build the smallest robotic warehouse with a kind of observation."""
    import gymnasium
    import rware  # noqa: F401, it registers ids
    from rware.warehouse import ObservationType

    observed = ObservationType[kind]
    return gymnasium.make(
        "rware-tiny-2ag-v2",
        disable_env_checker=True,
        observation_type=observed,
        **options,
    )


def warehouse_messages(**options: Any) -> Any:
    """Build a warehouse whose robots send messages."""
    return warehouse("FLATTENED", msg_bits=2, **options)


def warehouse_image(**options: Any) -> Any:
    """Build a warehouse that is observed as an image."""
    return warehouse("IMAGE", **options)


def warehouse_image_dict(**options: Any) -> Any:
    """Build a warehouse that is observed as an image and numbers."""
    return warehouse("IMAGE_DICT", **options)


def warehouse_dict(**options: Any) -> Any:
    """Build a warehouse that is observed as nested dicts."""
    return warehouse("DICT", **options)


if __name__ == "__main__":
    # Not in `main`, since tests call it and these settings last.
    warnings.simplefilter("ignore")
    logging.disable()
    sys.exit(main())
