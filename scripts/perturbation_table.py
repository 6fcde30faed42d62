"""Write the table in docs/perturbations.md from the docstrings of the perturbations."""

import re
from pathlib import Path

from env_pages import markdown
from markdown_tables import markdown_table

from marl_pool.config.sections import GROUPS
from marl_pool.options.signatures import meanings, summary
from marl_pool.perturbations import PERTURBATIONS, perturbation_names

PAGE = Path(__file__).parents[1] / "docs" / "perturbations.md"
TABLE = re.compile(r"^\| `perturbation=`.*?(?=\n\n)", re.M | re.S)


def table() -> str:
    """Return a row for each perturbation: its change, and what its severity means."""
    rows = [
        (
            f"`{name}`",
            markdown(summary(PERTURBATIONS[name])),
            markdown(meanings(GROUPS["perturbation"].cls(name))["severity"]),
        )
        for name in perturbation_names()
    ]
    return markdown_table(
        ["`perturbation=`", "change", "meaning of the severity"], rows
    )


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(), text), encoding="utf-8")
