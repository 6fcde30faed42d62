"""Pretrained policies that are shipped with the package.

Each is a folder ``NAME/`` written by `marl_pool.policies.storage.save_policies`, with
the environment of the policy in its ``config.json``, and a card,
`marl_pool.evaluation.pretrained_card.PretrainedCard`. ``scripts/pretrained.py`` trains
them and puts them here.
"""

import json
from operator import itemgetter
from pathlib import Path

from marl_pool.options import names

FOLDER = Path(__file__).parent
CONFIG, CARD = "config.json", "card.json"
PREFIX = "pretrained="
"""Start of a source that names a pretrained policy instead of a folder."""


def pretrained_names() -> list[str]:
    """List the pretrained policies."""
    return sorted(file.parent.name for file in FOLDER.glob(f"*/{CONFIG}"))


def pretrained_path(name: str) -> Path:
    """Return the folder of a policy, for `marl_pool.load_policy`.

    Raises:
        InputError: an unknown name.
    """
    choices = pretrained_names()
    if name not in choices:
        raise names.unknown("pretrained policy", name, choices)
    return FOLDER / name


def pretrained_summary(name: str) -> str:
    """Describe a policy in one line: its class, its environment and its scores."""
    folder = pretrained_path(name)
    config, card = (
        json.loads((folder / file).read_text(encoding="utf-8"))
        for file in (CONFIG, CARD)
    )
    modules, env = itemgetter("modules", "env")(config)
    kinds = dict.fromkeys(module["class"] for module in modules.values())
    means = [mean for mean, *_ in (g["score"] for g in card["groups"].values())]
    numbers = ", ".join(f"{mean:.2f}" for mean in means if mean is not None)
    score = f", score {numbers}" if numbers else ""
    return f"{', '.join(kinds)} in {env['name']}{score}"
