"""Make the links of README.md absolute for PyPI, which has no other files.

    python scripts/absolute_links.py https://github.com/USER/NAME v0.1.0 [FILE]

Links lead to the repository at that tag, and pictures to their raw files, so an old
release's page shows the files of that release. FILE, by default README.md, is replaced;
the release workflow rewrites its own checkout before it builds.
"""

import argparse
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z][a-z0-9+.-]*:|#)([^)]+)\)"
)
"""A picture or a link whose target is relative: ``!``, text and target."""


def absolute(text: str, url: str, tag: str) -> str:
    """Return Markdown with relative targets below ``url`` at a tag."""

    def replace(link: re.Match[str]) -> str:
        picture, label, target = link.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({url.rstrip('/')}/{kind}/{tag}/{target})"

    return LINK.sub(replace, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of the repository")
    parser.add_argument("tag", help="tag of the release")
    parser.add_argument("file", type=Path, nargs="?", default=README)
    arguments = parser.parse_args()
    text = arguments.file.read_text(encoding="utf-8")
    arguments.file.write_text(
        absolute(text, arguments.url, arguments.tag), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
