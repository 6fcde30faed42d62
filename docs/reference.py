"""Write ``docs/reference`` from the registries, the command line and the notebook."""

import inspect
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import marl_pool
from marl_pool.cli.help import HELP
from marl_pool.cli.main import main
from marl_pool.encoders import ENCODERS
from marl_pool.options.signatures import describe, options_of
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.policies import POLICIES
from marl_pool.pooling import POOLING
from marl_pool.training.supervised import TASKS
from marl_pool.utils.lazy import reexports

FOLDER = Path(__file__).parent / "reference"
NOTEBOOK = FOLDER.parents[1] / "examples" / "attention.ipynb"
TASK = "marl_pool.training.supervised.task:Task"
RETURNED = ("marl_pool.runs.run:Run", "marl_pool.evaluation.measure:EvaluationResults")
"""Classes of what the public functions return."""
RESULTS = "marl_pool.evaluation.results"
OPTIONAL = ("play", "cluster", "reliability")
"""Pages in the contents that a checkout may lack."""
Registry = Mapping[str, str]


def write() -> None:
    """Write all pages, and touch only those that have changed."""
    pages = {
        "python": python_page(),
        "environments": environments_page(),
        "pooling": parts_page("pooling", "Pooling layers", POOLING, ["Pooling"]),
        "encoders": parts_page("encoders", "Encoders", ENCODERS, ["Encoder"]),
        "perturbations": parts_page(
            "perturbations",
            "Perturbations",
            PERTURBATIONS,
            ["Perturbation", "SampledPerturbation", "TokenShare"],
        ),
        "policies": parts_page(
            "policies", "Policies", POLICIES, ["Policy", "Decision", "Agent"]
        ),
        "tasks": registry_page("Supervised tasks", TASKS, [TASK]),
        **{f"cli_{verb}": command_page(verb) for verb in HELP},
        "notebook": notebook_page(NOTEBOOK),
    }
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.md"):
        if file.stem not in pages:
            file.unlink()
    for name, text in pages.items():
        file = FOLDER / f"{name}.md"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def python_page() -> str:
    """Functions and classes of `marl_pool` that no other page has."""
    public = {name: getattr(marl_pool, name) for name in marl_pool.__all__}
    functions = [name for name, value in public.items() if inspect.isfunction(value)]
    elsewhere = (
        "AgentGroup",
        "BatchedEnv",
        "Encoder",
        "Perturbation",
        "Policy",
        "Pooling",
        "TokenPolicy",
    )
    classes = [
        name
        for name, value in public.items()
        if inspect.isclass(value) and name not in elsewhere
    ]
    parts = ["# Python", "Each name is an attribute of `marl_pool`.", "## Functions"]
    parts += [directive("autofunction", f"marl_pool.{name}") for name in functions]
    parts += ["## Classes"]
    parts += [directive("autoclass", f"marl_pool.{name}") for name in classes]
    parts += ["## Results"]
    parts += [directive("autoclass", dotted(target)) for target in RETURNED]
    parts += [
        directive("autoclass", f"{RESULTS}.{c}") for c in ("Result", "SeverityAUC")
    ]
    return "\n\n".join(parts) + "\n"


def environments_page() -> str:
    """Classes with which an environment of one's own is written."""
    about = (
        "Classes for an environment of your own, exported by `marl_pool.envs`; see [the"
        " tutorial](../tutorials/environment.md). The registered environments have "
        "[pages of their own](../envs/README.md)."
    )
    names = [name for name in reexports("marl_pool.envs") if name != "Advance"]
    classes = [directive("autoclass", f"marl_pool.envs.{name}") for name in names]
    return "\n\n".join(["# Environments and tokenizers", about, *classes]) + "\n"


def parts_page(room: str, title: str, registry: Registry, bases: list[str]) -> str:
    """Base classes and registered classes that a package exports."""
    package = f"marl_pool.{room}"
    exported = {
        name: f"{package}:{target.partition(':')[2]}"
        if target.startswith(f"{package}.")
        else target
        for name, target in registry.items()
    }
    return registry_page(title, exported, [f"{package}:{base}" for base in bases])


def registry_page(title: str, registry: Registry, bases: Iterable[str]) -> str:
    """Base classes, then each registered class under its short name."""
    parts = [f"# {title}", "## Base classes"]
    parts += [directive("autoclass", dotted(base)) for base in bases]
    for name, target in registry.items():
        parts += [f"## `{name}`", directive("autoclass", dotted(target))]
    return "\n\n".join(parts) + "\n"


def command_page(verb: str) -> str:
    """Help of a verb, and the keys of its configuration."""
    parts = [f"# marl-pool {verb}", block(printed(verb, "--help"))]
    keys = printed(verb, "--cfg") if verb != "sweep" else ""  # needs a grid
    if keys:
        parts += ["## Keys", f"`marl-pool {verb} --cfg` prints:", block(keys, "yaml")]
    return "\n\n".join(parts) + "\n"


def notebook_page(file: Path) -> str:
    """A notebook's text, code and stored results."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(
            source if cell["cell_type"] == "markdown" else block(source, "python")
        )
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                parts.append(f"![Output of the cell](data:image/png;base64,{picture})")
            else:
                parts.append(block("".join(output["text"]).strip()))
    name = f"examples/{file.name}"
    return "\n\n".join([*parts, f"The notebook: [{name}](../../{name})."]) + "\n"


def printed(*arguments: str) -> str:
    """What a command prints, or nothing if it refuses."""
    out = io.StringIO()
    os.environ["COLUMNS"] = "80"
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            status = main(arguments)
    except SystemExit as end:  # --help
        status = end.code or 0
    return "" if status else out.getvalue().strip()


def dotted(target: str) -> str:
    """Return ``module.Class`` of ``module:Class``."""
    return target.replace(":", ".")


def directive(name: str, argument: str) -> str:
    """Return a directive of autodoc, for a page in Markdown."""
    return block(f".. {name}:: {argument}", "{eval-rst}")


def block(text: str, language: str = "text") -> str:
    """Return a fenced block."""
    return f"```{language}\n{text}\n```"


def explain_options(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Write beside each option of a class what it expects, and its default."""
    if what != "class" or "Args:" not in lines:
        return
    options_by_name = options_of(obj)
    start = lines.index("Args:")
    for number, line in enumerate(lines[start:], start):
        entry = re.match(r"    (\w+): ", line)
        if entry and entry[1] in options_by_name:
            kind = describe(options_by_name[entry[1]].annotation)
            lines[number] = line.replace(":", f" ({kind}):", 1)


def short_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, given: str, returned: str
) -> tuple[str, str] | None:
    """Leave the annotations of a class to `explain_options`."""
    if what != "class" or not given:
        return None
    signature = inspect.signature(obj)
    plain = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(
        signature.replace(parameters=plain, return_annotation=signature.empty)
    ), ""


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Adapt a page's Markdown from GitHub's dialect."""
    # GitHub's inline formulas keep backticks inside the dollars.
    text = re.sub(r"\$`([^`]+)`\$", r"$\1$", source[0])
    text = text.replace("](../README.md)", "](index.md)").replace(
        "```layers", "```text"
    )
    # The contents may list pages that a checkout lacks.
    for name in OPTIONAL if page == "index" else ():
        if not (FOLDER.parent / f"{name}.md").is_file():
            text = text.replace(f"\n{name}\n", "\n")
    source[0] = text


def setup(app: Sphinx) -> None:
    """Register the hooks: this module is an extension of Sphinx."""
    app.connect("builder-inited", lambda _: write())
    app.connect("source-read", read)
    # Before napoleon, which turns sections into fields.
    app.connect("autodoc-process-docstring", explain_options, priority=400)
    app.connect("autodoc-process-signature", short_signature)
