"""The README and its pages: code runs, commands exist, links lead somewhere."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Sequence

import component_tables
import pytest
import yaml

from helpers.pages import blocks, commands
from helpers.paths import ROOT
from marl_pool.cli import arguments
from marl_pool.cli.help import HELP
from marl_pool.cli.main import main
from marl_pool.config import compose, plan_search, plan_sweep
from marl_pool.envs import make_batched_env
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.perturbations.actions import changes_actions
from marl_pool.policies import make_policy
from marl_pool.policies.export import SUFFIXES
from marl_pool.policies.storage import save_policies
from marl_pool.runs.run import Run
from marl_pool.training.jobs import JOBS
from marl_pool.version import __version__
from marl_pool_studies import plugin

PAGES = (
    "README.md",
    *(f"docs/{p}.md" for p in ("commands", "layers", "perturbations", "python")),
)
"""The pages whose code and commands are tried here."""
README = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
TINY = {"ppo.num_envs": 2, "ppo.batch_size": 16, "ppo.minibatch_size": 8}
TRAINING = {
    '"total_steps": 100_000': f'"total_steps": 16, **{TINY}',
    "learn(100_000)": "learn(1)",
    "episodes=64": "episodes=2",
}
"""What makes a reader wait, and what is tried instead."""
SMALL = ("env.max_steps=2", "env.num_noise=1", "encoder.num_layers=1")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The folder of a reader of the README, with its modules and trained runs.

    What a reader trains for minutes is saved untrained here, in a small environment.
    """
    path = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(path)
        for block in blocks(README, "python"):
            if match := re.match(r"# (\w+)\.py\n", block):
                (path / f"{match[1]}.py").write_text(block, encoding="utf-8")
        untrained("runs/demo")
        untrained("runs/centroid")
        untrained("runs/max", "pooling=max")
        untrained("runs/gated", "pooling=my_heads:GatedSum", "pooling.scale=0.1")
        selects = ("env.choices=food", "policy.action=select")
        untrained("runs/select", small=("env=lbforaging", *selects))
        untrained("runs/orchard", small=("env=my_orchard:Orchard", selects[1]))
        for file in path.glob("*.py"):
            sys.modules.pop(file.stem, None)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch, template):
    """A copy of the reader's folder, to work in."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file in tmp_path.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    return tmp_path


def untrained(path: str, *overrides: str, small: Sequence[str] = SMALL) -> None:
    config = compose("train", [*small, *overrides])
    group = make_batched_env(num_envs=1, **config["env"]).groups["agent"]
    parts = {"encoder": config["encoder"], "pooling": config["pooling"]}
    action = config["policy"]["action"]
    policy = make_policy(
        group.tokens, group.action_space, **parts, action=action, seed=0
    )
    run = Run.create(path, config)
    with run.save_policy_dir() as saved:
        save_policies({"agent": policy}, {"agent": "agent"}, saved)


def test_it_shows_code_and_commands():
    assert len(blocks(README, "python")) >= 4
    assert {words[0] for words in commands(README, "marl-pool")} >= set(HELP)
    assert {words[0] for words in commands(README, "make")} >= {"demo", "test"}


def quick_and_slow(sources: list[str]) -> list[object]:
    """Make a parameter of each block of code; blocks that train are slow."""
    trains = [any(long in source for long in TRAINING) for source in sources]
    return [
        pytest.param(number, marks=[pytest.mark.slow] if slow else [])
        for number, slow in enumerate(trains)
    ]


@pytest.mark.parametrize("number", quick_and_slow(blocks(README, "python")))
def test_its_python_runs(folder, number):
    source = blocks(README, "python")[number]
    for long, short in TRAINING.items():
        source = source.replace(long, short)
    exec(compile(source, f"block {number}", "exec"), {})


def test_every_wait_that_is_shortened_is_there():
    assert all(
        any(long in source for source in blocks(README, "python")) for long in TRAINING
    )


TRAINED = (*JOBS, "sweep")


def plan_training(namespace: Namespace, overrides: list[str]) -> None:
    """Compose a training, or all runs of a sweep."""
    if namespace.verb in JOBS:
        compose(namespace.verb, overrides)
    else:
        plan = plan_search if namespace.search else plan_sweep
        assert plan(overrides, None, namespace.trained_by).examples


@pytest.mark.parametrize("words", commands(README, "marl-pool"), ids=" ".join)
def test_its_commands_are_understood(folder, words):
    with contextlib.suppress(SystemExit):  # --help
        namespace, overrides = arguments.parse(words)
        if namespace.verb in TRAINED:
            plan_training(namespace, overrides)
        elif namespace.verb == "resume":
            allowed = {key for job in JOBS.values() for key in job.controls}
            assert {text.partition("=")[0] for text in overrides} <= allowed
        elif namespace.verb == "import-weights":
            assert namespace.source in plugin.WEIGHTS
            assert not overrides
            assert namespace.agent in plugin.AGENTS
        elif namespace.verb in ("list", "show", "ls", "help", "check-env"):
            assert main(words) == 0
        elif namespace.verb == "push":
            assert namespace.dry_run
            assert main(words) == 0
        elif namespace.verb == "export":
            assert namespace.to in SUFFIXES
        elif namespace.verb == "play":
            # A server would never end.
            page = namespace.export or "page.html"
            assert (
                main([*words, *([] if namespace.export else ["--export", page])]) == 0
            )
            assert (folder / page).exists()
        else:
            # A policy that comes with the package brings a full-size environment.
            pretrained = any(word.startswith("pretrained=") for word in words)
            brief = ["episodes=2", *(["env.max_steps=3"] if pretrained else [])]
            size = ["size=64"] if namespace.verb == "render" else []
            # Its first evaluation is the whole suite.
            again = words[0] == "evaluate" and words != ["evaluate", "runs/max"]
            if again and not any("perturbations=" in word for word in words):
                size = ["suite=quick"]
            assert main([*words, *brief, *size]) == 0
            assert list(folder.rglob("*.csv")) or list(folder.rglob("*.web[mp]"))


OTHER_PAGES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if str(path.relative_to(ROOT)) not in PAGES
)
UNSPECIFIED = re.compile(r"\$\w|=[A-Z]+$|=(my|custom)_\w+:|=pettingzoo$")
"""Words that a reader replaces, or whose module the reader writes."""


@pytest.mark.parametrize(
    "words",
    [
        words
        for words in commands(OTHER_PAGES, "marl-pool")
        if words[0] in TRAINED and not any(map(UNSPECIFIED.search, words))
    ],
    ids=" ".join,
)
def test_the_trainings_of_all_other_pages_are_understood(words):
    plan_training(*arguments.parse(words))


@pytest.mark.parametrize("words", commands(README, "make"), ids=" ".join)
def test_its_make_verbs_and_variables_exist(words):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{name} \?=" if is_variable else rf"^{name}:"
        assert re.search(pattern, makefile, re.M), word


def test_make_demo_says_that_it_installs_before_it_does(tmp_path):
    plan = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={tmp_path / 'new'}"],
        cwd=ROOT,
        # As typed by a user, also where make runs the tests.
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert "minutes" in plan[0]
    assert next(i for i, line in enumerate(plan) if "pip install" in line) > 0


def test_its_extras_exist():
    mentions = re.findall(r"\.\[([\w,]+)\]", README)
    assert mentions
    extras = PROJECT["project"]["optional-dependencies"]
    assert {extra for group in mentions for extra in group.split(",")} <= set(extras)


def test_the_libraries_table_has_all_perturbations_of_observations():
    page = (ROOT / "docs" / "libraries" / "index.md").read_text("utf-8")
    rows = page.partition("| perturbation |")[2].partition("\n\n")[0].splitlines()
    rows = [row.split("|")[1] for row in rows if row.startswith("| `")]
    named = {name for row in rows for name in re.findall("`(\\w+)`", row)}
    assert named == {name for name in PERTURBATIONS if not changes_actions(name)}


@pytest.mark.parametrize("kind", component_tables.PAGES)
def test_its_tables_are_what_the_docstrings_say(kind):
    run = "run python scripts/component_tables.py"
    assert component_tables.table(kind) in README, run


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    path = ROOT / document
    prose = re.sub(
        r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    for link in links:
        if link.startswith("reference/"):
            continue  # made with the site, which fails without it
        assert "://" in link or (path.parent / link).exists(), link


def test_the_citation_has_the_version_and_the_papers_that_are_linked():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert {"title", "message", "authors"} <= citation.keys()
    cited = {paper["url"] for paper in citation["references"] if "url" in paper}
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert cited == set(re.findall(r"https://arxiv\.org/abs/[\d.]+", page))


def test_the_picture_of_the_rooms_is_the_linters():
    done = subprocess.run(
        [sys.executable, "scripts/rooms.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "(images/rooms.svg)" in ARCHITECTURE
