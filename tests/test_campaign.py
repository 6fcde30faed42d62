"""Commands on small folders, each file of which is damaged in every way.

Whether a file is deleted, halved, emptied, replaced by a link, or one bit of it is
flipped: a command fails with an error message or gives the same result as on the
undamaged folder. A report may show less if it says so, and so may the log of a resumed
run. Nothing outside the folder is written.
"""

import itertools
import json
import os
import random
import re
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.campaign import CLONE, EVOLVE, FIT, TRAIN, results_of
from helpers.training import RAY_WARNINGS
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.policies import make_policy
from marl_pool.policies.storage import save_policies
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import Sweep
from marl_pool.training.cloning.clone import clone
from marl_pool.training.evolution.evolve import evolve
from marl_pool.training.jobs import config_of
from marl_pool.training.supervised.fit import fit

pytest.importorskip("cv2")
pytest.importorskip("matplotlib")
pytestmark = RAY_WARNINGS

SECONDS = 300
"""After which a command counts as hanging."""
MOMENT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d")


# Kinds of damage


def flipped(content: bytes, name: str) -> bytes:
    """Flip one bit, whose position depends on the name of the file."""
    position = zlib.crc32(name.encode()) % (8 * len(content))
    changed = bytearray(content)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


def delete(file: Path, outside: Path) -> None:
    file.unlink()


def halve(file: Path, outside: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path, outside: Path) -> None:
    if file.stat().st_size:
        file.write_bytes(flipped(file.read_bytes(), file.name))


def empty(file: Path, outside: Path) -> None:
    file.write_bytes(b"")


def link(file: Path, outside: Path) -> None:
    shutil.copyfile(file, outside)
    file.unlink()
    file.symlink_to(outside)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    damage.__name__: damage for damage in (delete, halve, flip, empty, link)
}


# Folders


EVALUATE = ("perturbations=[]", "episodes=2", "threads=1")


def make_policy_folder(path: Path) -> None:
    env = {"name": "simple_centroid", "max_steps": 4, "num_noise": 2}
    group = make_batched_env(num_envs=1, **env).groups["agent"]
    parts = {"encoder": {"name": "identity"}, "pooling": {"name": "avg"}}
    policy = make_policy(group.tokens, group.action_space, **parts, seed=1)
    save_policies({"agent": policy}, {"agent": "agent"}, path, env=env)


def _evaluated(path: Path) -> None:
    assert cli.main(["evaluate", str(path), *EVALUATE]) == 0


def make_evolve(path: Path) -> None:
    run = Run.create(path, compose("evolve", EVOLVE), "evolve")
    evolve(run, config_of(run))
    run.close()
    _evaluated(path)


def make_clone(path: Path) -> None:
    run = Run.create(path, compose("clone", CLONE), "clone")
    calls = itertools.count()
    clone(run, config_of(run), lambda: next(calls) >= 3)
    run.close()
    _evaluated(path)


def make_fit(path: Path) -> None:
    run = Run.create(path, compose("fit", FIT), "fit")
    calls = itertools.count()
    fit(run, config_of(run), lambda: next(calls) >= 4)
    run.close()
    assert (run.path / "networks" / "fold_0.safetensors").is_file()


def make_train(path: Path) -> None:
    assert cli.main(["train", "--run-dir", str(path), *TRAIN]) == 0
    _evaluated(path)


def make_sweep(path: Path) -> None:
    from marl_pool.config import plan_sweep

    words = [text for text in FIT if not text.startswith("threads")]
    plan = plan_sweep([*words, "seed=0,1", "sweep.cpus_per_trial=1"], None, "fit")
    sweep = Sweep(path, plan.grid, plan.overrides, None, "fit")
    with sweep.lock():
        sweep.write()
    plan.share(data_dir=str(path.absolute() / "data"))
    for trial in plan.trials:
        run = Run.create(sweep.run_path(trial), trial.config.plain, "fit")
        fit(run, config_of(run))
        run.close()
    sweep.write_table(plan.trials, {t.name: "finished" for t in plan.trials})


KINDS: dict[str, Callable[[Path], None]] = {
    "policy": make_policy_folder,
    "evolve": make_evolve,
    "clone": make_clone,
    "fit": make_fit,
    "sweep": make_sweep,
    "train": make_train,
}
VERBS = ("resume", "evaluate", "render", "report")
LONGER = {"evolve": ("total_generations=4",), "train": ("total_steps=80",)}
"""By kind, the overrides of a resume, so that there is something left to do."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """A folder of each kind, made once and not changed."""
    home, paths = tmp_path_factory.mktemp("whole"), {}

    def get(kind: str) -> Path:
        if kind not in paths:
            paths[kind] = home / kind / "folder"
            paths[kind].parent.mkdir()
            KINDS[kind](paths[kind])
        return paths[kind]

    return get


# Commands


class Answer(NamedTuple):
    """The exit status and output of a command."""

    status: int
    err: str
    result: Any


@contextmanager
def limited(subject: str) -> Iterator[None]:
    def hangs(*_: Any) -> None:
        raise TimeoutError(f"{subject} hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command(verb: str, kind: str, folder: Path, out: Path) -> list[str]:
    words = [verb, str(folder)]
    if verb == "resume":
        return [*words, *LONGER.get(kind, ())]
    if verb == "report":
        return [*words, "--out", str(out / "page.html"), "videos=false", "threads=1"]
    bare = ["--out", str(out / "made")] if kind == "policy" else []
    options = EVALUATE if verb == "evaluate" else ("size=64", "threads=1")
    return [*words, *bare, *options]


def run_command(verb: str, kind: str, folder: Path, out: Path, capsys) -> Answer:
    out.mkdir()
    capsys.readouterr()
    with limited(f"{verb} of {folder}"):
        status = cli.main(command(verb, kind, folder, out))
    captured = capsys.readouterr()
    result = None if status else result_of(verb, kind, folder, out, captured.out)
    return Answer(status, captured.err, result)


def result_of(verb: str, kind: str, folder: Path, out: Path, output: str) -> Any:
    paths = [Path(line) for line in output.splitlines() if line.startswith("/")]
    if verb == "evaluate":
        (document,) = (path for path in paths if path.suffix == ".json")
        return json.loads(document.read_text())["results"]
    if verb == "render":
        (video,) = paths
        return frames_of(video)
    if verb == "report":
        # The page says when it was written.
        return MOMENT.sub("", (out / "page.html").read_text())
    if kind == "sweep":
        return (folder / "table.csv").read_text(), output.count("failed")
    return results_of(folder)


def frames_of(video: Path) -> list[bytes]:
    """Return only the pixels: the file itself has random numbers in it."""
    import cv2

    capture, frames = cv2.VideoCapture(str(video)), []
    while (read := capture.read())[0]:
        frames.append(read[1].tobytes())
    capture.release()
    assert len(frames) > 1
    return frames


@pytest.fixture(scope="module")
def undamaged(folders, tmp_path_factory) -> Callable[..., Answer]:
    """The result of a command on the undamaged folder."""
    answers: dict[tuple[str, str], Answer] = {}

    def get(verb: str, kind: str, capsys) -> Answer:
        if (verb, kind) not in answers:
            place = tmp_path_factory.mktemp("undamaged")
            folder = copied(folders(kind), place)
            answers[verb, kind] = run_command(verb, kind, folder, place / "out", capsys)
        return answers[verb, kind]

    return get


def copied(folder: Path, place: Path) -> Path:
    """Copy a folder under the same name, since results and pages contain its name."""
    return Path(shutil.copytree(folder, place / "folder", symlinks=True))


# The campaign


def gaps(page: str) -> list[str]:
    marked = re.findall(
        r'class="missing"[^>]*>([^<]*)|title="([^"]*)" class="missing"', page
    )
    return sorted("".join(match) for match in marked)


def check(verb: str, kind: str, name: str, answer: Answer, whole: Answer) -> None:
    """Accept only the answers that the module's docstring allows."""
    assert "Traceback" not in answer.err
    lines = [line for line in answer.err.splitlines() if line.startswith("marl-pool: ")]
    assert answer.status in (0, 1, 2)
    if answer.status:
        assert len(lines) >= 1, answer.err
        if answer.status == 2:
            assert answer.err.splitlines()[-1] == lines[-1]
        return
    assert whole.status == 0, "a damaged folder is accepted, the undamaged one is not"
    if answer.result == whole.result:
        return
    if verb == "report":
        assert gaps(answer.result) != gaps(whole.result), "the page differs silently"
    elif verb == "resume":
        lost = "policy" if name.startswith("policy/") else "metrics"
        assert any(lost in line for line in lines), "the run differs silently"
        if kind != "sweep" and lost == "metrics":
            answer.result["rows"] = whole.result["rows"]
            assert answer.result == whole.result
        elif kind != "sweep":
            assert answer.result["rows"] == whole.result["rows"]
    else:
        raise AssertionError("the result differs silently")


def run_case(
    verb: str,
    kind: str,
    name: str,
    damage: str,
    *,
    folders: Callable[[str], Path],
    undamaged: Callable[..., Answer],
    place: Path,
    capsys: Any,
) -> None:
    whole = undamaged(verb, kind, capsys)
    folder, outside = copied(folders(kind), place), place / "outside"
    DAMAGES[damage](folder / name, outside)
    before = outside.read_bytes() if outside.exists() else None
    answer = run_command(verb, kind, folder, place / "out", capsys)
    check(verb, kind, name, answer, whole)
    assert (outside.read_bytes() if outside.exists() else None) == before


def cases(folders: Callable[[str], Path], kind: str) -> list[tuple[str, str, str]]:
    """Verb, file and damage, in a fixed order."""
    root = folders(kind)
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    names = sorted(file.as_posix() for file in files)
    return list(itertools.product(VERBS, names, DAMAGES))


def campaign(
    kind: str, selection: list[tuple[str, str, str]], tmp_path: Path, **fixtures: Any
) -> None:
    """Run cases and report all failures, not only the first."""
    failed = []
    for number, (verb, name, damage) in enumerate(selection):
        place = tmp_path / str(number)
        place.mkdir()
        try:
            run_case(verb, kind, name, damage, place=place, **fixtures)
        except Exception as error:  # any error is a finding
            first = str(error).partition("\n")[0]
            failed.append(f"{verb} after {damage} of {name}: {type(error)}: {first}")
        shutil.rmtree(place)
    assert not failed, "\n".join([f"{len(failed)} of {len(selection)}", *failed])


EXPLORES = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
"""Try every case; for `train`, try different ones each time."""
TRAINED = 10
"""How many cases of each damage to try on a run of `train`: one takes seconds."""
QUICK = {"policy": 8, "evolve": 8, "clone": 6, "fit": 8}
"""How many cases of each kind the quick tests take."""


@pytest.mark.parametrize("kind", QUICK)
def test_some_damages_are_refused_or_harmless(
    kind, tmp_path, folders, undamaged, capsys
):
    pool = sorted(cases(folders, kind), key=lambda case: zlib.crc32(str(case).encode()))
    fixtures = {"folders": folders, "undamaged": undamaged, "capsys": capsys}
    campaign(kind, pool[: QUICK[kind]], tmp_path, **fixtures)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_is_refused_or_harmless(
    kind, damage, tmp_path, folders, undamaged, capsys
):
    """Try one verb for each file and damage; a verb sees all files and all damages."""
    pool = [case for case in cases(folders, kind) if case[2] == damage]
    names = sorted({name for _, name, _ in pool})
    if kind == "train":
        draw = random.SystemRandom() if EXPLORES else random.Random(damage)
        selection = draw.sample(pool, TRAINED)
    else:
        first = [*DAMAGES].index(damage)
        selection = [
            case
            for case in pool
            if EXPLORES or case[0] == VERBS[(names.index(case[1]) + first) % len(VERBS)]
        ]
    fixtures = {"folders": folders, "undamaged": undamaged, "capsys": capsys}
    campaign(kind, selection, tmp_path, **fixtures)
