"""Check names and docstrings of the package; a step of `make lint`.

    python scripts/words.py

Fails where two classes have the same name, where a docstring opens with a question
word instead of a noun phrase or an imperative, or where a folder has more than 20
modules.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

OPENERS = re.compile(
    r"(What|How|Whether|Of|Where|Which|Whose|Who|Why|By|For whom|Those|Them)\b"
)
MODULES = 20
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def findings(package: Path) -> Iterator[str]:
    """Yield one line for each finding in the modules of a package."""
    classes: dict[str, list[str]] = defaultdict(list)
    folders: Counter[Path] = Counter()
    for path in sorted(package.rglob("*.py")):
        folders[path.parent] += 1
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            place = f"{path}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(place)
            if isinstance(node, DOCUMENTED):
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                if OPENERS.match(summary):
                    yield f"{place}: docstring opens with a question word: {summary}"
    for name, places in classes.items():
        if len(places) > 1:
            yield f"{places[0]}: class {name} is also at {', '.join(places[1:])}"
    for folder, count in folders.items():
        if count > MODULES:
            yield f"{folder}: {count} modules, more than {MODULES}"


if __name__ == "__main__":
    found = list(findings(Path(__file__).parents[1] / "marl_pool"))
    print("\n".join(found))
    sys.exit(bool(found))
