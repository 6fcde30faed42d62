"""The tutorials of the site: each page's code runs from top to bottom."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from helpers.paths import ROOT
from marl_pool.cli.main import main

FOLDER = ROOT / "docs" / "tutorials"
PAGES = [*sorted(path.stem for path in FOLDER.glob("*.md")), "../libraries/sb3"]
FENCE = re.compile(r"^```(\{literalinclude\} \S+|\w+)\n(.*?)^```$", re.M | re.S)
TINY = ["ppo.num_envs=2", "ppo.batch_size=16", "ppo.minibatch_size=8"]
BRIEF = {
    "train": [*TINY, "total_steps=16", "env.max_steps=4"],
    "resume": ["total_steps=32"],
    "evaluate": ["episodes=2"],
    "render": ["size=64"],
    "fit": [],
}
"""Overrides that shorten the commands."""
SHORTER = {"steps=300": "steps=2", "sample(1024": "sample(16", "Reach(256": "Reach(8"}
"""What takes long in the code, and what is tried instead."""
TRAINING = ("parts", "train", "environment", "../libraries/sb3")


class Block(NamedTuple):
    """A fenced block of a page; ``name`` is the file that it is shown as."""

    language: str
    text: str
    name: str = ""


def blocks(page: str) -> list[Block]:
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    return [_block(*groups) for groups in FENCE.findall(text)]


def _block(kind: str, body: str) -> Block:
    if kind.startswith("{"):
        return _included(FOLDER / kind.partition(" ")[2], body)
    name = re.match(r"# (\w+\.py)\n", body) if kind == "python" else None
    return Block(kind, body, name[1] if name else "")


def _included(file: Path, body: str) -> Block:
    """The lines of a file that a literalinclude shows."""
    options = dict(re.findall(r"^:([\w-]+): \"?(.*?)\"?$", body, re.M))
    lines = file.read_text(encoding="utf-8").splitlines()
    begin = options.get("start-at") or options["start-after"]
    first = next(i for i, line in enumerate(lines) if begin in line)
    excerpt = lines[first + ("start-after" in options) :]
    if end := options.get("end-before"):
        excerpt = excerpt[: next(i for i, line in enumerate(excerpt) if end in line)]
    default = file.name if file.parent.name == "examples" else ""
    text = dedent("\n".join(excerpt)) + "\n"
    return Block("python", text, options.get("caption", default))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in list(sys.modules):
        if module.startswith(("my_", "custom_")):
            monkeypatch.delitem(sys.modules, module)
    return tmp_path


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] * (p in TRAINING)) for p in PAGES]
)
def test_a_page_runs_from_top_to_bottom(page, folder, capsys):
    space: dict[str, Any] = {"__name__": page}
    for block in blocks(page):
        if block.language == "python":
            _run(block, space, folder)
        elif block.language == "bash":
            for line in block.text.splitlines():
                _command(shlex.split(line, comments=True))
        elif block.language == "text":  # what the code above it prints
            assert capsys.readouterr().out == block.text
            continue
        if block.language != "python":
            capsys.readouterr()


def _run(block: Block, space: dict[str, Any], folder: Path) -> None:
    # What is shown of a file stands in the page's namespace, the file in the folder.
    source = block.text
    for long, short in SHORTER.items():
        source = source.replace(long, short)
    if block.name:
        example = ROOT / "examples" / block.name
        if example.is_file():
            shutil.copy(example, folder)
            if "def main" in source:
                return  # a program, tried in test_examples.py
        else:
            (folder / block.name).write_text(source, encoding="utf-8")
    exec(compile(source, block.name or "block", "exec"), space)


def _command(words: list[str]) -> None:
    program, *words = words
    if program != "marl-pool":
        assert program in ("pip", "python")
        return
    assert main([*words, *BRIEF.get(words[0], [])]) == 0


def test_what_is_shortened_is_there() -> None:
    pages = "".join(block.text for page in PAGES for block in blocks(page))
    assert all(long in pages for long in SHORTER)


def test_the_notebook_runs_and_its_results_are_stored(monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    file = ROOT / "examples" / "attention.ipynb"
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    space: dict[str, Any] = {}
    for cell in code:
        source = "".join(cell["source"]).replace("num_envs=64", "num_envs=2")
        exec(compile(source, "cell", "exec"), space)
    stored = [out for cell in code for out in cell["outputs"]]
    assert {out["output_type"] for out in stored} == {"stream", "display_data"}
    first, _ = capsys.readouterr().out.split("\n", 1)
    assert stored[0]["text"] == [f"{first}\n"]
