"""Draw the rooms of the package, from the contract of ``make imports``.

    python scripts/rooms.py             # docs/images/rooms.svg
    python scripts/rooms.py --check     # exit 1 if the picture is out of date

A room may import the rooms below it, so arrows are not drawn.
"""

import argparse
import sys
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
WIDTH, ROW, GAP = 720, 30, 6
"""Pixels: width of the picture, height of a row, gap between rows and rooms."""
FAMILIES = {
    "#dbe9f6": {"adapters", "cli", "api", "config"},
    "#e5f2dc": {"training", "evaluation", "play"},
    "#fdeeda": {"runs", "files"},
    "#f3e3ef": {
        "rollout",
        "trajectory",
        "finite",
        "envs",
        "perturbations",
        "policies",
    },
}
"""Rooms by color: what a user calls; methods; folders; the loop. Others are layers."""
LAYER_COLOR = "#eeeeee"


def layers() -> list[list[str]]:
    """Return the rooms of the contract, the highest row first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    rows = next(c["layers"] for c in contracts if c["type"] == "layers")
    return [[room.strip() for room in row.split("|")] for row in rows]


def draw(rows: list[list[str]]) -> str:
    """Return the picture as SVG: a row each, divided into its rooms."""
    height = len(rows) * (ROW + GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="ui-monospace, monospace" font-size="14" text-anchor="middle">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, rooms in enumerate(rows):
        y = GAP + number * (ROW + GAP)
        width = (WIDTH - GAP) / len(rooms) - GAP
        for place, room in enumerate(rooms):
            x = GAP + place * (width + GAP)
            colors = [color for color, family in FAMILIES.items() if room in family]
            fill = colors[0] if colors else LAYER_COLOR
            lines.append(
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{ROW}" rx="4" '
                f'fill="{fill}" stroke="#999999"/>'
            )
            middle = x + width / 2
            lines.append(
                f'<text x="{middle:g}" y="{y + 20}" fill="#222222">'
                f"{escape(room)}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """Write the picture, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    picture, name = draw(layers()), PICTURE.relative_to(ROOT)
    if parser.parse_args().check:
        is_present = PICTURE.read_text(encoding="utf-8") == picture
        print(f"{name}: {'present' if is_present else 'run python scripts/rooms.py'}")
        return 0 if is_present else 1
    PICTURE.write_text(picture, encoding="utf-8")
    print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
