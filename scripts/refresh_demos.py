"""Renew the page and the engine of the exported pages in `docs/demo`.

    python scripts/refresh_demos.py [--check]

The policies are kept. `--check` writes nothing, and fails if a page is out of date.
"""

import sys
from pathlib import Path

from marl_pool.play.export import data_of, wrapped

FOLDER = Path(__file__).parents[1] / "docs" / "demo"


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    stale = []
    for path in sorted(folder.glob("*.html")):
        text = path.read_text(encoding="utf-8")
        renewed = wrapped(data_of(text))
        if renewed != text:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(renewed, encoding="utf-8")
    print("\n".join(f"{name} is stale" for name in stale), end="\n" if stale else "")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
