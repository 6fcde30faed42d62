"""Check names and docstrings of the code; a step of `make lint`.

    python scripts/words.py

Fails where two classes have the same name, where a docstring opens with a question
word instead of a noun phrase or an imperative, or where a folder of the package has
more than 20 modules.
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
PACKAGE = "marl_pool"
FOLDERS = (PACKAGE, "scripts", "examples", "tests/helpers")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def findings(root: Path) -> Iterator[str]:
    """Yield one line for each finding in the modules below a folder."""
    classes: dict[str, list[str]] = defaultdict(list)
    folders: Counter[Path] = Counter()
    for path in sorted(root.rglob("*.py")):
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
        if count > MODULES and root.name == PACKAGE:
            yield f"{folder}: {count} modules, more than {MODULES}"


if __name__ == "__main__":
    project = Path(__file__).parents[1]
    found = [line for folder in FOLDERS for line in findings(project / folder)]
    print("\n".join(found))
    sys.exit(bool(found))
