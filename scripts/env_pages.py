"""Write a page for each registered environment, docs/envs/NAME.md, from its docstring.

``python scripts/env_pages.py`` writes the pages and their index; ``--check`` writes
nothing and fails if a page is stale. An environment whose extra is not installed
keeps its page. A picture, docs/images/envs/NAME.png, is drawn where it is missing.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gymnasium import spaces
from markdown_tables import markdown_table

from marl_pool.config.option_files import choices_in, content_of, files_of, summary_of
from marl_pool.config.sections import GROUPS
from marl_pool.config.suitability import verbs_for
from marl_pool.envs import (
    ENVS,
    HEURISTICS,
    VERSIONS,
    env_names,
    make_batched_env,
    make_heuristic,
    registered_id,
)
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.description import describe_env
from marl_pool.envs.drawing.canvas import opencv
from marl_pool.options.names import resolve
from marl_pool.options.signatures import (
    ANY_OTHER,
    SECTION,
    describe,
    meanings,
    options_of,
    show,
    summary,
)
from marl_pool.policies import RandomPolicy
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError

FOLDER = Path(__file__).parents[1] / "docs" / "envs"
PICTURES = FOLDER.parent / "images" / "envs"
INDEX = "README"
NOTE = "<!-- Written by scripts/env_pages.py from the docstring: edit that. -->"
NEEDED = {"pettingzoo": {"module": "mpe2.simple_spread_v3"}}
"""Options without a default, as the pages show them."""
PRESETS = {"pettingzoo": "ppo=fast_spread"} | {
    name: "ppo=fast_mpev2" for name in env_names() if name.startswith("mpev2_")
}
"""Presets of PPO that are not named after the environment."""
STEPS = 20
PICTURED = {"cartpole": 220, "ant": 60, "ant_bullet": 60, "car_racing": 60, "pong": 90}
"""Steps before the picture, where more than `STEPS`."""
Row = tuple[object, ...]


class MissingExtraError(Exception):
    """An environment whose extra is not installed."""


def markdown(text: str) -> str:
    """Convert the markup of docstrings to GitHub's.

    Aligned formulas need an ``aligned`` environment, which Sphinx adds by itself.
    """
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    text = re.sub(r"`([^`<]+)\s<(https?://[^>`]+)>`_", r"[\1](\2)", text)
    text = re.sub(r":math:`([^`]*)`", r"$`\1`$", text)
    block = r"^\.\. math::(.*(?:\n+    .*)*)"
    return re.sub(block, _display, text, flags=re.M).strip()


def _display(match: re.Match[str]) -> str:
    formula = inspect.cleandoc(match[1])
    if "&" in formula:
        formula = f"\\begin{{aligned}}\n{formula}\n\\end{{aligned}}"
    return f"```math\n{formula}\n```"


def prose(docstring: str) -> str:
    """Return the text between the first line and the sections."""
    body = SECTION.split(docstring)[0].partition("\n")[2]
    return markdown(body.strip())


def table(rows: Iterable[Row]) -> str:
    """Format a table; the first row is its head."""
    head, *body = rows
    return markdown_table(head, body)


def option_rows(cls: type) -> Iterator[Row]:
    """Yield the options of an environment: default, expected values and meaning."""
    texts = meanings(cls)
    yield "option", "default", "expected", "meaning"
    for key, option in options_of(cls, GROUPS["env"].context).items():
        if key != ANY_OTHER:
            default = "*needed*" if option.required else f"`{show(option.default)}`"
            kind = describe(option.annotation)
            yield f"`env.{key}`", default, kind, markdown(texts.get(key, ""))


def group_rows(groups: Mapping[str, AgentGroup]) -> Iterator[Row]:
    """Yield the observation and action sizes of each group of agents."""
    yield "group", "agents", "tokens", "features", "types", "action"
    for name, group in groups.items():
        spec = group.tokens
        types = ", ".join(f"`{kind}`" for kind in spec.type_names)
        dtype = "" if spec.dtype == "float32" else f" ({spec.dtype})"
        sizes = (spec.num_tokens, f"{spec.num_features}{dtype}")
        yield f"`{name}`", group.num_agents, *sizes, types, action(group)


def action(group: AgentGroup) -> str:
    """Describe an action space in words."""
    space = group.action_space
    if isinstance(space, spaces.Discrete):
        return f"one of {space.n} choices"
    assert isinstance(space, spaces.Box)
    low, high, size = space.low.min(), space.high.max(), space.shape[0]
    return f"{size} number{'s' if size > 1 else ''} in [{low:g}, {high:g}]"


def scripted(name: str) -> Iterator[str]:
    """Yield the descriptions of the heuristic policies of an environment."""
    entry = HEURISTICS.get(name, {})
    roles = {"": entry} if isinstance(entry, str) else entry
    for role, target in roles.items():
        document = inspect.getdoc(resolve(target, {}, "heuristic", Policy)) or ""
        head = f"`{role}`: " if role else ""
        yield head + markdown(document.partition("\n")[0])
        yield from filter(None, [prose(document)])


def commands(name: str) -> str:
    """Return commands that train, evaluate and render."""
    needed = "".join(f" env.{k}={v}" for k, v in NEEDED.get(name, {}).items())
    # A needed module is foreign code, which a run folder may not import by itself.
    trusted = "".join(f" --plugin {v}" for v in NEEDED.get(name, {}).values())
    run, preset = f"runs/{name}", PRESETS.get(name, "")
    if f"fast_{name.removeprefix('simple_')}" in files_of("ppo"):
        preset = f"ppo=fast_{name.removeprefix('simple_')}"
    settings = f"{needed} {preset}".rstrip()
    lines = [f"marl-pool train env={name}{settings} --run-dir {run}"]
    lines.append(f"marl-pool evaluate {run} suite=quick{trusted}")
    lines.append(f"marl-pool render {run}{trusted}")
    return "\n".join(["```bash", *lines, "```"])


def presets(name: str) -> Iterator[str]:
    """Yield a table of the experiments in an environment, if there are any."""
    rows = [
        (
            f"`experiment={option}`",
            ", ".join(verbs_for("experiment", option)),
            summary_of(file),
        )
        for option, file in sorted(files_of("experiment").items())
        if choices_in(content_of(file)).get("env") == name
    ]
    if rows:
        yield markdown_table(["preset", "of", "settings"], rows)


def page(name: str) -> str:
    """Return the page of an environment.

    Raises:
        MissingExtraError: the extra of the environment is not installed.
    """
    try:
        cls = resolve(name, ENVS, "env", BatchedEnv)
        groups = describe_env({"name": name, **NEEDED.get(name, {})}).groups
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error)) from error
    except InputError as error:
        if isinstance(error.__cause__, ImportError):
            raise MissingExtraError(str(error)) from error
        raise
    document = inspect.getdoc(cls) or ""
    called = f"Name: `env={name}`."
    if name in VERSIONS:
        called += f" Id with PettingZoo and Gymnasium: `{registered_id(name)}`."
    parts = [NOTE, f"# {name}", markdown(document.partition("\n")[0]), called]
    parts += [f"![{name}](../images/envs/{name}.png)"]
    parts += [prose(document), "## Options", table(option_rows(cls))]
    setting = "".join(f", with `env.{k}={v}`" for k, v in NEEDED.get(name, {}).items())
    parts += ["## Agents", f"By default{setting}:", table(group_rows(groups))]
    if heuristics := list(scripted(name)):
        parts += ["## Scripted policy", *heuristics]
    return "\n\n".join([*parts, "## Use", commands(name), *presets(name)]) + "\n"


def draw(name: str, file: Path) -> None:
    """Draw an environment after some steps of its heuristic, or of random actions."""
    env = make_batched_env(name, num_envs=1, **NEEDED.get(name, {}))
    policies = {
        role: make_heuristic(name, group, role=role)
        if name in HEURISTICS
        else RandomPolicy(group.action_space)
        for role, group in env.groups.items()
    }
    Rollout(env, policies).advance(PICTURED.get(name, STEPS))
    file.parent.mkdir(parents=True, exist_ok=True)
    opencv().imwrite(str(file), env.frame(size=320)[..., ::-1])


def index() -> str:
    """Return the list of all pages; it needs no extra."""
    rows = [(f"[{name}]({name}.md)", summary(ENVS[name])) for name in env_names()]
    return "\n\n".join([NOTE, "# Environments", table([("env", "task"), *rows])]) + "\n"


def pages() -> dict[str, str]:
    """Return the pages that can be written with the installed extras, by name."""
    written = {INDEX: index()}
    for name in env_names():
        try:
            written[name] = page(name)
        except MissingExtraError as error:
            print(f"{name} is left as it is: {error}", file=sys.stderr)
    return written


def main(
    arguments: list[str] | None = None,
    folder: Path = FOLDER,
    pictures: Path = PICTURES,
) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    only_check = parser.parse_args(arguments).check
    texts = {folder / f"{name}.md": text for name, text in pages().items()}
    expected = {folder / f"{name}.md" for name in (INDEX, *env_names())}
    gone = [file for file in folder.glob("*.md") if file not in expected]
    stale = [file for file in texts if not _holds(file, texts[file])]
    if not only_check:
        # An environment that cannot be drawn gets no page either.
        for name in sorted({file.stem for file in texts} - {INDEX}):
            if not (picture := pictures / f"{name}.png").is_file():
                try:
                    draw(name, picture)
                except InputError as error:
                    print(f"{picture}: {error}", file=sys.stderr)
                    return 1
    for file in (*gone, *stale):
        name = f"{file.parent.name}/{file.name}"
        print(f"{name} is stale" if only_check else file)
    if not only_check:
        folder.mkdir(parents=True, exist_ok=True)
        for file in gone:
            file.unlink()
        for file in stale:
            file.write_text(texts[file], encoding="utf-8")
    return int(only_check and bool(gone or stale))


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
