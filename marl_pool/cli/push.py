"""The verb push, which uploads a policy to the Hugging Face Hub."""

import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from marl_pool.cli.common import open_run, plugin_flags, print_next
from marl_pool.files.hub import HubFolder, is_hub
from marl_pool.utils.errors import InputError, validate_module
from marl_pool.utils.text import print_line, quoted

if TYPE_CHECKING:
    from marl_pool.runs.run import Run


def push(arguments: Namespace, overrides: list[str]) -> int:
    """Upload the policy of a run or folder with a card; in a dry run, print the card.

    Raises:
        InputError: there is no policy, or it is incomplete without the run; or the
            target is not a repository, or one of something else.
    """
    path, target = _path_and_target(arguments.run)
    validate_module("huggingface_hub")
    from marl_pool.evaluation import push as upload

    with TemporaryDirectory() as scratch, _opened(path, Path(scratch)) as run:
        staged = Path(scratch, "staged")
        files = _stage(run, staged, target, arguments)
        if arguments.dry_run:
            for name, file in files.items():
                print(f"{file.stat().st_size:>12,}  {name}")
            print(f"\n{files[upload.CARD].read_text(encoding='utf-8')}", end="")
            return 0
        commit = upload.push(
            files,
            target,
            f"Policy of {run.name}, by marl-pool push",
            private=arguments.private,
            force=arguments.force,
        )
    pinned = f"{target}@{commit}"
    print(pinned)
    print_next(f"marl-pool evaluate {pinned}{plugin_flags(arguments.plugin)}")
    return 0


def _path_and_target(words: list[str]) -> tuple[str, HubFolder]:
    if len(words) != 2 or not is_hub(words[1]) or is_hub(words[0]):
        actual = " ".join(map(quoted, words)) or "none"
        raise InputError(f"push: expected RUN hf://USER/NAME, got {actual}")
    target = HubFolder.parse(words[1])
    if target.revision or target.folder:
        raise InputError(
            f"push: expected hf://USER/NAME, a repository whose main branch gets a "
            f"commit, got {target}"
        )
    return words[0], target


@contextmanager
def _opened(path: str, scratch: Path) -> "Iterator[Run]":
    """Open a run, or create one in ``scratch`` from a policy's folder."""
    from marl_pool.evaluation.standalone import find_standalone

    policy = find_standalone(path, None)
    if policy is None:
        yield open_run("push", path)
        return
    if policy.env is None:
        raise InputError(f"push: {policy.source} names no environment: expected a run")
    with policy.new_run(policy.env, str(scratch / policy.name), "push") as run:
        yield run


def _stage(
    run: "Run", folder: Path, target: HubFolder, arguments: Namespace
) -> dict[str, Path]:
    """Write the files of the repository to a new folder; return them by name."""
    from marl_pool.envs.description import describe_env
    from marl_pool.evaluation.card import CardContent, newest_evaluation, write_card
    from marl_pool.evaluation.push import CARD, CONFIG, MANIFEST, RESULTS, WEIGHTS
    from marl_pool.files.manifest import fingerprint, write_manifest
    from marl_pool.files.reading import read_json
    from marl_pool.policies.storage import load_modules, save_policies

    modules, by_group = load_modules(run.policy_path(), plugins=arguments.plugin)
    missing = describe_env(run.env).groups.keys() - by_group.keys()
    if missing and by_group:
        raise InputError(
            f"push: expected a saved policy of each group, got none of "
            f"{', '.join(sorted(missing))}: the upload could not play in the env "
            f"{run.env['name']}"
        )
    save_policies(modules, by_group, folder, env=run.env)
    files = {name: folder / name for name in (CONFIG, WEIGHTS, MANIFEST)}
    if evaluation := newest_evaluation(run):
        files[RESULTS] = evaluation
    else:
        print_line(f"no evaluation of {run.name}'s best policy, so the card has none")
    if picture := _picture(run, folder, arguments.plugin):
        files[f"replay{picture.suffix}"] = picture
    card = write_card(
        CardContent(
            target=target,
            run=run,
            modules=modules,
            document=read_json(evaluation) if evaluation else None,
            picture=f"replay{picture.suffix}" if picture else "",
            command=_training_command(run),
            license=arguments.license,
        )
    )
    files[CARD] = folder / CARD
    files[CARD].write_text(card, encoding="utf-8")
    # Beside the manifest's files, since the card is not fetched with the policy.
    write_manifest(folder, (CONFIG, WEIGHTS), card=fingerprint(files[CARD]))
    return files


def _picture(run: "Run", folder: Path, plugins: list[str]) -> Path | None:
    """Return the run's newest video, or a new one if it can be rendered."""
    from marl_pool.evaluation.push import PICTURES
    from marl_pool.runs.run import VIDEOS

    videos = [path for path in run.path.glob(f"{VIDEOS}/*") if path.suffix in PICTURES]
    if videos:
        return max(videos, key=lambda path: path.stat().st_mtime)
    from marl_pool.evaluation.settings import RenderSettings
    from marl_pool.evaluation.video.render import render_run

    run.results = folder / VIDEOS
    try:
        return render_run(run, RenderSettings(format="webp"), plugins=plugins)
    except (InputError, ModuleNotFoundError) as error:
        print_line(f"no picture: {error}")
        return None
    finally:
        run.results = None


def _training_command(run: "Run") -> str:
    """Return a command that composes the run's configuration; empty without one.

    Options of groups come first, then keys whose values differ from their presets.
    Folders are shortened to their last part.
    """
    from marl_pool.config import VERBS
    from marl_pool.config.compose import compose_only
    from marl_pool.options.overrides import flat_options, written
    from marl_pool.runs.run import OF_MACHINE

    if run.verb not in VERBS or "policy_from" in run.config:
        return ""
    config = {k: v for k, v in run.config.items() if k not in OF_MACHINE}
    try:
        usual = compose_only(run.verb)
        options = [
            f"{group}={config[group]['name']}"
            for group in VERBS[run.verb].config_groups
            if _name(config.get(group)) not in (None, _name(usual.get(group)))
        ]
        usual = dict(flat_options(compose_only(run.verb, options)))
    except InputError:  # names from another version
        return ""
    keys = [
        f"{key}={written(_without_folder(value))}"
        for key, value in flat_options(config)
        if key not in usual or usual[key] != value
    ]
    return " ".join(["marl-pool", run.verb, *map(shlex.quote, [*options, *keys])])


def _name(section: Any) -> Any:
    return section.get("name") if isinstance(section, Mapping) else None


def _without_folder(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folder(entry) for entry in value]
    is_folder = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_folder else value
