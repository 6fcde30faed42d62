"""Check names, docstrings and prose of the code; a step of `make lint`.

    python scripts/words.py
    python scripts/words.py --list      # also where each vague word stands

Fails where two classes have the same name, where a docstring opens with a question
word instead of a noun phrase or an imperative, where a folder of the package has
more than 20 modules, or where vague names or phrases are frequent.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPENERS = re.compile(
    r"(What|How|Whether|Of|Where|Which|Whose|Who|Why|By|For whom|Those|Them)\b"
)
MODULES = 20
PACKAGES = ("marl_pool", "marl_pool_studies")
FOLDERS = (*PACKAGES, "scripts", "examples", "tests/helpers")
MEASURED = (*PACKAGES, "scripts", "examples", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

VAGUE = re.compile(
    r"""
    # pronouns
    its? | theirs? | mine | own | this | that | these | those | such | what | which
    | who | whose | each | both | ones? | others?
    # adverbs and prepositions
    | here | there | now | then | thus | about | more | less
    # participles
    | asked | chosen | found | given | got | had | known | left | named | none_left
    | rest | said | seen | shown | taken | told | wanted
    """,
    re.VERBOSE,
)
"""Names that a reader must resolve, where a noun would say what the variable holds."""
PHRASES = {
    "that of": re.compile(r"\b(?:that|those)\s+of\b"),
    "of its own": re.compile(r"\bof\s+(?:its|their|your|our|one's)\s+own\b"),
    "; None:": re.compile(r";\s*`{0,2}None`{0,2}[:,]"),
}
NAME_LIMIT, PHRASE_LIMIT = 2 / 1_000, 1 / 10_000
"""Limits: vague names per binding, and uses of each phrase per word of prose."""


class Measure(NamedTuple):
    """The places of something vague among ``total`` bindings or words of prose."""

    label: str
    places: list[str]
    total: int
    limit: float

    @property
    def is_met(self) -> bool:
        """No more places than the limit."""
        return len(self.places) <= self.limit * self.total

    def __str__(self) -> str:
        share = f"{len(self.places)} in {self.total}"
        return f"{self.label}: {share}, limit 1 in {1 / self.limit:.0f}"


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
        if count > MODULES and root.name in PACKAGES:
            yield f"{folder}: {count} modules, more than {MODULES}"


def measures(root: Path) -> list[Measure]:
    """Measure vague names and phrases in the modules below a folder."""
    names = Measure(f"{root.name}: vague names", [], 0, NAME_LIMIT)
    phrases = {
        label: Measure(f'{root.name}: "{label}"', [], 0, PHRASE_LIMIT)
        for label in PHRASES
    }
    bindings = words = 0
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for line, name in _bound_names(text):
            bindings += 1
            if VAGUE.fullmatch(name.strip("_")):
                names.places.append(f"{path}:{line}: {name}")
        for line, passage in _prose(text):
            words += len(passage.split())
            for label, pattern in PHRASES.items():
                for match in pattern.finditer(passage):
                    place = line + passage.count("\n", 0, match.start())
                    phrases[label].places.append(f"{path}:{place}: {match[0]!r}")
    measured = [phrase._replace(total=words) for phrase in phrases.values()]
    return [names._replace(total=bindings), *measured]


def _bound_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each assignment, loop variable and argument."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring and comment."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(passage))):
                yield node.lineno, passage
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> int:
    """Print findings and exceeded limits; with ``--list`` all measures and places."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="show each vague word")
    show_all = parser.parse_args().list
    root = Path(__file__).parents[1]
    faults = [line for folder in FOLDERS for line in findings(root / folder)]
    for measure in (m for folder in MEASURED for m in measures(root / folder)):
        if not measure.is_met:
            faults.append(f"{measure} (--list shows where)")
        if show_all:
            print(measure, *measure.places, sep="\n")
    print("\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
