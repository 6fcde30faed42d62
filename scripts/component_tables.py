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
SOURCE = re.compile(
    r"^ *Source: (?:(?!\n\n).)*?(https://arxiv\.org/abs/[\w.]+\w)", re.M | re.S
)
"""First paper that a docstring names as its source."""


def table(kind: str) -> str:
    """Return the table of a kind of component, without a newline at the end."""
    columns, rows = {
        "pooling": (
            ["the set becomes", "order matters", "source"],
            _layers(kind, POOLING, "permutation_invariant"),
        ),
        "encoder": (
            ["interaction between tokens", "order matters", "source"],
            _layers(kind, ENCODERS, "permutation_equivariant"),
        ),
        "perturbation": (["change", "meaning of the severity"], _perturbations()),
    }[kind]
    return markdown_table([f"`{kind}=`", *columns], rows)


def _layers(
    kind: str, registry: Mapping[str, str], symmetry: str
) -> Iterator[tuple[str, ...]]:
    for name, target in registry.items():
        layer = GROUPS[kind].cls(name)
        url = SOURCE.search(layer.__doc__ or "")
        yield (
            f"`{name}`",
            markdown(summary(target)),
            "no" if getattr(layer, symmetry) else "yes",
            f"[paper]({url[1]})" if url else "",
        )


def _perturbations() -> Iterator[tuple[str, ...]]:
    for name, target in PERTURBATIONS.items():
        severity = meanings(GROUPS["perturbation"].cls(name))["severity"]
        yield f"`{name}`", markdown(summary(target)), markdown(severity)


def refreshed(kind: str) -> str:
    """Return the page with the current table of a kind."""
    text = (DOCS / PAGES[kind]).read_text(encoding="utf-8")
    written = re.compile(rf"^\| `{kind}=`.*?(?=\n\n)", re.M | re.S)
    return written.sub(lambda _: table(kind), text)


if __name__ == "__main__":
    for component in PAGES:
        page = refreshed(component)
        (DOCS / PAGES[component]).write_text(page, encoding="utf-8")
