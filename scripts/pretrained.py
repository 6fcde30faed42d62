"""The policies that ship with the package: training, cards, pictures and their page.

    python scripts/pretrained.py train RUNS [NAME…]
    python scripts/pretrained.py ship RUNS [NAME…] [--replace]
    python scripts/pretrained.py card NAME… [--replace] [--commit COMMIT]
    python scripts/pretrained.py page [--check]

`train` trains or resumes the unfinished runs, RUNS/NAME. `ship` copies the best policy
of finished runs into the package, with a card and an animation; without NAME, all
policies that are not in it yet. `card` measures policies that are in the package.
`page` writes docs/pretrained.md from the cards. Nothing is overwritten without
``--replace``.
"""

import math
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from markdown_tables import markdown_table
from study_arguments import reported

import marl_pool
from marl_pool.config import compose
from marl_pool.evaluation.card import num_parameters
from marl_pool.evaluation.computing import computing
from marl_pool.evaluation.load import target_from_policies
from marl_pool.evaluation.pretrained_card import (
    SUITE,
    GroupCard,
    PretrainedCard,
    area_text,
)
from marl_pool.evaluation.video.frames import write_frames
from marl_pool.evaluation.video.render import episode_frames
from marl_pool.files.manifest import fingerprint
from marl_pool.policies.storage import (
    WEIGHTS,
    load_env_config,
    load_modules,
    load_policies,
    save_policies,
)
from marl_pool.pretrained import CARD, FOLDER, pretrained_names, pretrained_path
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.training.jobs import JOBS, config_of
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import duration
from marl_pool.version import commit

TRAIN, CLONED, RUN_DIR = "marl-pool train ", "marl-pool clone ", "--run-dir"
PLAYER = (
    "marl-pool evolve experiment=cartpole_feed_forward threads=1 time_limit=600 "
    "--run-dir runs/fnn"
)
CLONE = "marl-pool clone experiment=cartpole_clone teacher=runs/fnn threads=1"
COMMANDS: dict[str, tuple[str, ...]] = {
    "simple_centroid": (
        f"{TRAIN}experiment=simple_centroid pooling=ada total_steps=1_000_000 seed=0 "
        "threads=1",
    ),
    "simple_spread": (f"{TRAIN}experiment=simple_spread pooling=ada seed=3 threads=1",),
    "simple_tag": (f"{TRAIN}experiment=simple_tag pooling=ada seed=0 threads=1",),
    "lbforaging": (f"{TRAIN}experiment=lbforaging pooling=ada seed=0 threads=1",),
    "lbforaging_select": (
        f"{TRAIN}experiment=lbforaging pooling=ada env.choices=food "
        "policy.action=select total_steps=400_000 seed=0 threads=1",
    ),
    "simple_speaker_listener": (
        f"{TRAIN}experiment=simple_speaker_listener pooling=ada seed=0 threads=1",
    ),
    "simple_adversary": (
        f"{TRAIN}experiment=simple_adversary pooling=ada seed=0 threads=1",
    ),
    "simple_push": (f"{TRAIN}experiment=simple_push pooling=ada seed=0 threads=1",),
    "boxworld": (
        "marl-pool clone experiment=boxworld_clone threads=1 --run-dir runs/clone",
        f"{TRAIN}experiment=boxworld_refined init=runs/clone threads=1",
    ),
    "boxworld_pixels": (
        "marl-pool clone experiment=boxworld_clone env.observation=pixels threads=1 "
        "--run-dir runs/clone",
        f"{TRAIN}experiment=boxworld_refined env.observation=pixels init=runs/clone "
        "threads=1",
    ),
    "cartpole": ("marl-pool clone experiment=cartpole_channels_clone threads=1",),
    "cartpole_feed_forward": (PLAYER,),
    "cartpole_attention_neuron": (
        PLAYER,
        f"{CLONE} --run-dir runs/clone",
        "marl-pool evolve experiment=cartpole_attention_neuron_refined "
        "init=runs/clone threads=1 time_limit=440 --run-dir runs/an",
        "marl-pool resume runs/an time_limit=840",
    ),
    "cartpole_attention_neuron_reshuffled": (
        PLAYER,
        f"{CLONE} perturbation=shuffle perturbation.every=40 "
        "'perturbation.severity=[0,1]' --run-dir runs/reshuffled",
    ),
}
"""How each policy is trained, in the order of the page."""
EPISODES = 256
DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURES = DOCS / "pretrained.md", DOCS / "images" / "pretrained"
SIZE, FRAMES, FPS = 208, 48, 12
LONGEST_STRIDE = 4
"""Steps between frames of long episodes; more would blur what happens."""
PICTURE_BYTES = 150_000


class Stage(NamedTuple):
    """One of the runs that train a policy."""

    verb: str
    words: list[str]
    """Overrides."""
    folder: Path

    @property
    def is_finished(self) -> bool:
        """True if the run has all of its training."""
        if not self.folder.is_dir():
            return False
        run, job = Run.open(self.folder), JOBS[self.verb]
        return job.logged(run) >= job.total(config_of(run))


def trainable() -> list[str]:
    """Return the policies that come only from runs of PPO and of cloning."""
    return [
        name
        for name, lines in COMMANDS.items()
        if all(line.startswith((TRAIN, CLONED)) for line in lines)
    ]


def stages(name: str, runs: Path) -> list[Stage]:
    """Return the runs that train a policy, the last of which has it.

    A folder that a command names is one beside the last run's, ``RUNS/NAME``.

    Raises:
        InputError: a name that is none of `trainable`.
    """
    if name not in trainable():
        choices = ", ".join(trainable())
        raise InputError(f"expected the name of a training, {choices}, got {name!r}")
    result: list[Stage] = []
    folders: dict[str, Path] = {}
    for line in COMMANDS[name]:
        _, verb, *words = shlex.split(line)
        for place, folder in folders.items():
            words = [word.replace(f"={place}", f"={folder}") for word in words]
        folder = runs.absolute() / name
        if RUN_DIR in words:
            *words, _, place = words
            folder = folders[place] = folder.with_name(f"{name}-{Path(place).name}")
        result.append(Stage(verb, words, folder))
    return result


def commits_file(runs: Path, name: str) -> Path:
    """Return the file of the commits that a run was trained with, one per line."""
    return runs / f"{name}.commits"


def train(runs: Path, names: Iterable[str]) -> None:
    """Train or resume the unfinished runs, one after the other.

    Raises:
        InputError: no such training, or one that failed.
    """
    stages_of = {name: stages(name, runs) for name in names}
    runs.mkdir(parents=True, exist_ok=True)
    for name in stages_of:
        for stage in stages_of[name]:
            if stage.is_finished:
                continue
            with commits_file(runs, name).open("a", encoding="utf-8") as out:
                out.write(f"{commit()}\n")
            program = [sys.executable, "-m", "marl_pool", stage.verb]
            place = [RUN_DIR, str(stage.folder), "--or-resume"]
            command = [*program, *place, *stage.words]
            if status := subprocess.run(command, check=False).returncode:
                raise InputError(f"{name}: the training ended with status {status}")


def ship(runs: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """Copy the best policies of finished runs into the package, with cards.

    Raises:
        InputError: a run that is missing, not finished or of other settings, or a
            policy that is there already.
    """
    present = [] if overwrite else pretrained_names()
    for name in names:
        if name in present:
            raise InputError(f"{name} is in the package already: expected --replace")
    finished = {
        name: stages(name, runs)
        for name in names or trainable()
        if all(stage.is_finished for stage in stages(name, runs))
    }
    absent = [name for name in names if name not in finished]
    new = {name: chain for name, chain in finished.items() if name not in present}
    if absent or not new:
        place = runs / absent[0] if absent else runs
        raise InputError(f"{place}: expected a finished run to ship, got none")
    for name, stages_of_policy in new.items():
        opened = [Run.open(stage.folder) for stage in stages_of_policy]
        for line, stage, run in zip(
            COMMANDS[name], stages_of_policy, opened, strict=True
        ):
            if compose(stage.verb, stage.words) != run.config:
                raise InputError(f"{run.path}: expected a run of {line}")
        last_rows = [run.rows()[-1] for run in opened]
        env_steps = last_rows[-1].get("env_steps")
        commits = commits_file(runs, name).read_text(encoding="utf-8").split()
        modules, groups = load_modules(opened[-1].policy_path())
        with TemporaryDirectory() as scratch:
            folder = Path(scratch, name)
            save_policies(modules, groups, folder, env=opened[-1].config["env"])
            draw(name, folder)
            measured_card(
                name,
                folder,
                commits=", ".join(dict.fromkeys(commits)),
                env_steps=None if env_steps is None else int(env_steps),
                seconds=round(sum(row["seconds"] for row in last_rows), 1),
            ).write(folder)
            if overwrite and (FOLDER / name).is_dir():
                shutil.rmtree(FOLDER / name)
            shutil.copytree(folder, FOLDER / name)
        print(FOLDER / name)


def add_cards(names: Iterable[str], commits: str | None, *, overwrite: bool) -> None:
    """Write cards and pictures of policies that are in the package already.

    Raises:
        InputError: no such policy, a card that is there already, or none that says how
            the policy was trained.
    """
    for name in names:
        folder = pretrained_path(name)
        old = PretrainedCard.read(folder) if (folder / CARD).is_file() else None
        if old is not None and not overwrite:
            raise InputError(f"{name} has a card already: expected --replace")
        if old is None and commits is None:
            raise InputError(f"{name}: expected --commit, that trained or added it")
        draw(name, folder)
        card = measured_card(name, folder, commits=commits or "")
        if old is not None:
            card = replace(
                card,
                commit=commits or old.commit,
                env_steps=old.env_steps,
                seconds=old.seconds,
            )
        card.write(folder)
        print(folder / CARD)


def measured_card(
    name: str,
    folder: Path,
    *,
    commits: str,
    env_steps: int | None = None,
    seconds: float | None = None,
) -> PretrainedCard:
    """Evaluate a policy in its environment, and make its card."""
    modules, _ = load_modules(folder)
    env = load_env_config(folder)
    assert env is not None
    results = marl_pool.evaluate(
        load_policies(folder), env, suite=SUITE, episodes=EPISODES, threads=1
    )
    groups = dict.fromkeys(row.group for row in results.results)
    return PretrainedCard(
        commands=COMMANDS[name],
        commit=commits,
        env_steps=env_steps,
        seconds=seconds,
        parameters=num_parameters(modules),
        weights=fingerprint(folder / WEIGHTS)["sha256"],
        episodes=EPISODES,
        measured=str(commit()),
        groups={group: GroupCard.from_results(results, group) for group in groups},
    )


def draw(name: str, folder: Path) -> None:
    """Draw the first episodes of the evaluation as an animation."""
    env = load_env_config(folder)
    assert env is not None
    target = target_from_policies(load_policies(folder), env, name=name)
    steps = target.describe().max_steps
    stride = min(math.ceil(steps / FRAMES), LONGEST_STRIDE)

    def play(number: int) -> Iterator[np.ndarray]:
        rollout = Rollout(target.make_env(1, first=number), target.policies)
        text = f"episode {number + 1}"
        frames = episode_frames(rollout, source=name, text=text, size=SIZE)
        return islice(frames, 0, None, stride)

    with computing(1, "auto", None, "cpu"):
        frames = [*islice(chain.from_iterable(map(play, count())), FRAMES)]
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{name}.webp"
    write_frames(picture, frames, FPS)
    # Many entities take many bytes: end sooner.
    while picture.stat().st_size > PICTURE_BYTES:
        frames = frames[: len(frames) * 4 // 5]
        write_frames(picture, frames, FPS)


def page() -> str:
    """Return the page of all policies, from their cards."""
    names = [name for name in COMMANDS if name in pretrained_names()]
    cards = {name: PretrainedCard.read(pretrained_path(name)) for name in names}
    rows = [_row(name, card) for name, card in cards.items()]
    columns = ["policy", "environment", "parameters", "training", "return", "score"]
    parts = [
        "<!-- Written by scripts/pretrained.py from the cards: edit that. -->",
        "# Pretrained policies",
        "Policies that come with the package, to watch and to compare with. Use them "
        "by `pretrained=NAME` in `marl-pool evaluate`, `render` or `play`, or from "
        "Python:",
        "```python\nfrom marl_pool import load_policies\n\n"
        'policies = load_policies("pretrained=simple_spread")  # by group\n```',
        "`marl-pool list pretrained` lists them, and with a name prints a card. Each "
        "comes from one training run, so the numbers describe these policies and not "
        "the training method; brackets are 95 % bootstrap intervals over episodes. "
        "A score is 0 for random actions and 1 for the scripted policy. A perturbation "
        "applies to what all agents of an environment perceive or do.",
        markdown_table(columns, rows),
        "Training took one core, on a machine with other work. A cell is empty if no "
        "time was recorded, or if there is no score, as with several groups that learn."
        " `python scripts/pretrained.py train RUNS NAME` repeats a training run, and "
        "`ship` measures its policy by `marl-pool evaluate pretrained=NAME "
        f"suite={SUITE} episodes={EPISODES}`.",
        "No policy is shipped of `experiment=simple_reference`, whose seeds differ "
        "widely, and `experiment=simple_world_comm`; training takes five and three "
        "minutes ([returns](mpe.md#the-other-five-tasks)). Nor of `experiment=pong`: "
        "a clone that wins takes 40 minutes (`experiment=pong_clone_remembering`).",
        *chain.from_iterable(_section(name, card) for name, card in cards.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _row(name: str, card: PretrainedCard) -> Sequence[object]:
    env = load_env_config(pretrained_path(name))
    assert env is not None
    several = len(card.groups) > 1
    returns, scores = (
        "; ".join(
            f"{group}: {text}" if several else text
            for group, numbers in card.groups.items()
            if (text := getattr(numbers, key).text(2))
        )
        for key in ("returns", "score")
    )
    place = f"[{env['name']}](envs/{env['name']}.md)"
    trained = "" if card.seconds is None else duration(card.seconds)
    link = f"[`{name}`](#{name})"
    return link, place, f"{card.parameters:,}", trained, returns, scores


def _section(name: str, card: PretrainedCard) -> Iterator[str]:
    yield f"## {name}"
    yield f"![Episodes of {name}](images/pretrained/{name}.webp)"
    yield "```bash\n" + "\n".join(card.commands) + "\n```"
    yield f"Training: {card.training}. Evaluation: {card.evaluation}."
    groups = card.groups
    yield markdown_table(
        ["", *groups],
        [
            ["return", *(group.returns.text() for group in groups.values())],
            ["baselines", *(group.baselines for group in groups.values())],
            ["score", *(group.score.text() for group in groups.values())],
            ["", *(f"*{group.area_name}*" for group in groups.values())],
            *(
                [f"`{label}`", *(area_text(g.areas[label]) for g in groups.values())]
                for label in next(iter(groups.values())).areas
            ),
        ],
    )


def write_page(*, check: bool) -> int:
    """Write the page, or only say whether it is stale; return the exit status."""
    text = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{PAGE.name} is stale")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, ship, measure, or write the page."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("train", "ship", "card", "page"):
        sub = actions.add_parser(action)
        if action in ("train", "ship"):
            sub.add_argument("runs", type=Path, help="folder of the runs")
        if action in ("ship", "card"):
            sub.add_argument("--replace", action="store_true")
        if action == "page":
            sub.add_argument("--check", action="store_true")
        else:
            sub.add_argument("names", nargs="+" if action == "card" else "*")
        if action == "card":
            sub.add_argument("--commit", help="that trained or added the policies")
    options: Any = parser.parse_args(arguments)
    with reported(parser):
        if options.action == "train":
            train(options.runs, options.names or trainable())
        elif options.action == "ship":
            ship(options.runs, options.names, overwrite=options.replace)
        elif options.action == "card":
            add_cards(options.names, options.commit, overwrite=options.replace)
        else:
            return write_page(check=options.check)
    return 0


if __name__ == "__main__":
    sys.exit(main())
