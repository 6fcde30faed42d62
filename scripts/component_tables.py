"""Write the tables of heads, encoders and perturbations from their docstrings.

They are in docs/layers.md and docs/perturbations.md, in the order of the registries.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from env_pages import markdown
from markdown_tables import markdown_table

from marl_pool.config.sections import GROUPS
from marl_pool.encoders import ENCODERS
from marl_pool.options.signatures import meanings, summary
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.pooling import POOLING

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "pooling": "layers.md",
    "encoder": "layers.md",
    "perturbation": "perturbations.md",
}
"""Page of the table of each kind of component."""


def table(kind: str) -> str:
    """Return a table of what is registered of a kind, without a newline at the end."""
    heads, rows = {
        "pooling": (["the set becomes", "order matters"], _layers(POOLING, kind)),
        "encoder": (
            ["interaction between tokens", "order matters"],
            _layers(ENCODERS, kind),
        ),
        "perturbation": (["change", "meaning of the severity"], _perturbations()),
    }[kind]
    return markdown_table([f"`{kind}=`", *heads], rows)


def _layers(registry: Mapping[str, str], kind: str) -> Iterator[tuple[str, str, str]]:
    for name, target in registry.items():
        layer = GROUPS[kind].cls(name)
        unordered = getattr(layer, "permutation_invariant", True) and getattr(
            layer, "permutation_equivariant", True
        )
        yield f"`{name}`", markdown(summary(target)), "no" if unordered else "yes"


def _perturbations() -> Iterator[tuple[str, str, str]]:
    for name, target in PERTURBATIONS.items():
        severity = meanings(GROUPS["perturbation"].cls(name))["severity"]
        yield f"`{name}`", markdown(summary(target)), markdown(severity)


def refreshed(kind: str) -> str:
    """Return the page of a kind's table with the table of today."""
    text = (DOCS / PAGES[kind]).read_text(encoding="utf-8")
    written = re.compile(rf"^\| `{kind}=`.*?(?=\n\n)", re.M | re.S)
    return written.sub(lambda _: table(kind), text)


if __name__ == "__main__":
    for component in PAGES:
        page = refreshed(component)
        (DOCS / PAGES[component]).write_text(page, encoding="utf-8")
