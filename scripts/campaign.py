"""Kill training runs at random moments, break disks and environments; print a table.

    python scripts/campaign.py --count 20 --seed 1 > table.md
    python scripts/campaign.py --count 5 --only SIGKILL --only train

Runs are started with ``--or-resume`` and killed while they start, resume, sample or
write a checkpoint, again and again until they end. The finished run is compared with
an undisturbed one: metrics except times, and all weights, bit for bit. Other faults
have to end a run with one line. Cases with a full or read-only disk or a power cut need
root. The table is that in docs/reliability.md.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from markdown_tables import markdown_table  # noqa: E402

from helpers.campaign import CLONE, EVOLVE, FIT, TRAIN, results_of  # noqa: E402
from marl_pool.runs.run import Run  # noqa: E402
from marl_pool.version import commit  # noqa: E402

PATIENCE = 300.0
"""Seconds after which a command counts as hanging."""
FAREWELL = 30.0
"""Seconds within which all processes of a run have to end."""
EVERY = 7
"""Iterations from one checkpoint of a killed run to the next."""
KILLS = 5
"""Largest number of kills of one run."""
SIGNALS: dict[str, tuple[int, ...]] = {
    "SIGKILL": (),
    "SIGTERM": (143,),
    "SIGINT": (130,),
}
"""Exit statuses besides the bare signal's, which Python has at its start."""
GENERATIONS = "total_generations=60"
CMA = ("evolution=cma", *(word for word in EVOLVE if word != "evolution=pgpe"))
LONG = {
    # Long enough to be killed in the middle.
    "train": (*TRAIN, "total_steps=960"),
    "evolve": (*EVOLVE, GENERATIONS),
    "evolve, cma": (*CMA, GENERATIONS),
    "evolve, cma diagonal": (*CMA, "evolution.diagonal=true", GENERATIONS),
    "clone": (*CLONE, "total_batches=80"),
    "fit": (*FIT, "fit.epochs=30"),
    "sweep": (
        # A sweep takes each key once, and sets the threads.
        *(text for text in TRAIN if not text.startswith(("threads", "total", "check"))),
        "total_steps=640",
        "seed=0,1",
        "sweep.concurrency=2",
    ),
}
BROKEN = ("hangs", "traceback", "leaves processes")
"""Ways to end that no fault may cause, reported in place of the last line."""
REMOTE = {
    "remote runner": ("train", "resources.num_env_runners=2", "BatchedEnvRunner"),
    "remote learner": ("train", "resources.num_learners=1", "_WrappedExecutable"),
    "raylet": ("train", "resources.num_env_runners=1", r"\S*/raylet"),
    "remote worker": ("evolve", "resources.num_workers=2", r"\w*Worker"),
}
"""Verb, option that starts a process, and a pattern of the process's title."""
FAULTS = {
    # Faults of `helpers.faulty_pole`, and what the last line has to say.
    "raises": "no such state",
    "hangs": "env_timeout",
    "spins": "env_timeout",
    "NaN_reward": "nan|not finite|finite",
    "NaN_observation": "nan|not finite|finite",
    "wrong_shape": "shape|size|dimension",
    "slow": "",
}


@dataclass
class Outcome:
    """End of one case.

    Attributes:
        good: the case ended as documented.
        kills: signals sent.
        equal: the finished run equals an undisturbed one, or None if not compared.
        lost: largest number of iterations that a kill lost.
        ended: exit statuses, and the last line of a run that failed.
    """

    good: bool
    ended: str
    kills: int = 0
    equal: bool | None = None
    lost: int = 0


class Command:
    """A command of the package in a new process.

    Args:
        folder: takes the output; its path marks the command's processes.
        words: verb and arguments.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = f"CAMPAIGN={folder}/{time.monotonic_ns()}"
        name, value = self.mark.split("=")
        paths = [*sys.path[:2], os.environ.get("PYTHONPATH", "")]
        self.errors = (folder / "errors.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "marl_pool", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), name: value},
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
        )

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self.process.poll() is None

    def processes(self) -> Iterator[tuple[int, str]]:
        """Yield ids and titles of the processes with the mark of this command."""
        for task in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (task / "environ").read_bytes().split(b"\0"):
                    title = (task / "cmdline").read_bytes().decode().replace("\0", " ")
                    yield int(task.name), title.removeprefix("ray::")

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and the last line of the errors.

        The line is "hangs", "traceback" or "leaves processes" if the command does so.
        """
        hangs = False
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            hangs, status = True, 0
            for number, _ in self.processes():
                os.kill(number, signal.SIGKILL)
            self.process.wait()
        gone = wait(lambda: not any(self.processes()), FAREWELL)
        self.errors.seek(0)
        text = self.errors.read()
        self.errors.close()
        if hangs or has_traceback(text) or not gone:
            return status, (
                "hangs" if hangs else "traceback" if gone else "leaves processes"
            )
        lines = [line for line in text.splitlines() if line.startswith("marl-pool: ")]
        return status, lines[-1] if lines else ""


def has_traceback(text: str) -> bool:
    """Return whether there is a traceback, except one before the first import."""
    files = re.findall(r'^ *File "([^"]*)"', text, re.MULTILINE)
    at_start = bool(files) and all(file.startswith("<frozen ") for file in files)
    return "Traceback" in text and not at_start


def wait(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, or for some seconds; return whether it held."""
    end = time.monotonic() + seconds
    while not (held := is_so()) and time.monotonic() < end:
        time.sleep(0.002)
    return held


def words_of(verb: str, path: Path, *extra: str) -> tuple[str, ...]:
    flag = "--sweep-dir" if verb == "sweep" else "--run-dir"
    words = (*LONG[verb], f"checkpoint.every={EVERY}", *extra)
    return verb.partition(",")[0], flag, str(path), "--or-resume", *words


def runs_of(path: Path) -> list[Path]:
    """Return the folders of a run, or of all trials of a sweep."""
    trials = sorted(path.glob("trials/*"))
    return [run for run in (trials or [path]) if (run / "config.yaml").is_file()]


def rows_of(path: Path) -> list[int]:
    """Return the logged iterations of each run."""
    logs = (run / "metrics.csv" for run in runs_of(path))
    return [max(0, t.read_bytes().count(b"\n") - 1) if t.exists() else 0 for t in logs]


def is_saving(path: Path) -> bool:
    """Return whether a checkpoint is being written, under a name with a point."""
    folders = [run / "checkpoints" for run in runs_of(path)]
    with suppress(FileNotFoundError):  # it may just be finished
        return any([*folder.glob(".*.new")] for folder in folders if folder.is_dir())
    return True


def results(path: Path) -> list[dict[str, Any]]:
    return [results_of(run) for run in runs_of(path)]


def equal_but_added(
    path: Path, actual: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> bool:
    """Return whether only policies of checkpoints that signals added differ.

    The best policy may be in such a checkpoint, which no other run has.

    Args:
        path: folder of the run or the sweep.
        actual: its `results`.
        expected: the results of an undisturbed one.
    """
    for run, actual_run, expected_run in zip(
        runs_of(path), actual, expected, strict=True
    ):
        best = Run.open(run).best
        if best and best.iteration % EVERY and best.iteration < len(actual_run["rows"]):
            actual_run, expected_run = map(_without_policy, (actual_run, expected_run))
        if actual_run != expected_run:
            return False
    return True


def _without_policy(result: dict[str, Any]) -> dict[str, Any]:
    weights = result["weights"].items()
    kept = {file: part for file, part in weights if not file.startswith("policy/")}
    return {**result, "weights": kept}


@contextmanager
def disk(folder: Path, *options: str) -> Iterator[None]:
    """Mount a file system on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Undisturbed(NamedTuple):
    """A whole run."""

    results: Any
    first: float
    """Seconds to the first row of its metrics."""
    rows: int
    size: int
    """KiB on the disk."""


class Campaign:
    """Cases, each in a separate folder.

    Args:
        folder: scratch folder.
        chance: source of the moments.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.number = 0
        self.undisturbed = cache(self._undisturbed)

    def new(self) -> Path:
        """Return the folder of another run."""
        self.number += 1
        return self.folder / f"case{self.number}" / "run"

    def _undisturbed(self, verb: str) -> "Undisturbed":
        path, began = self.new(), time.monotonic()
        command = Command(path.parent, *words_of(verb, path))
        wait(lambda: sum(rows_of(path)) > 0 or not command.running, PATIENCE)
        first = time.monotonic() - began
        status, line = command.end()
        assert status == 0, (verb, status, line)
        files = [file for file in path.rglob("*") if file.is_file()]
        blocks = sum(file.stat().st_blocks for file in files)
        return Undisturbed(results(path), first, sum(rows_of(path)), blocks // 2)

    def _await_moment(self, command: Command, verb: str, path: Path) -> None:
        """Wait for a moment of the start, of an iteration or of a checkpoint."""
        _, first, rows, _ = self.undisturbed(verb)
        has = sum(rows_of(path))
        target = self.chance.randint(min(has + 1, rows), rows)
        kind = self.chance.choice(("start", "iteration", "checkpoint"))
        if kind == "start":
            wait(lambda: not command.running, self.chance.uniform(0, first))
            return
        wait(lambda: sum(rows_of(path)) >= target or not command.running, PATIENCE)
        if kind == "checkpoint":
            wait(lambda: is_saving(path) or not command.running, PATIENCE)
        time.sleep(self.chance.uniform(0, 0.02))

    def kill(self, verb: str, name: str) -> Outcome:
        """Kill a driver up to `KILLS` times, then let the run finish."""
        expected, path = self.undisturbed(verb).results, self.new()
        lost, statuses = 0, []
        for _ in range(self.chance.randint(2, KILLS)):
            command = Command(path.parent, *words_of(verb, path))
            self._await_moment(command, verb, path)
            logged = rows_of(path)
            command.process.send_signal(signal.Signals[name])
            status, line = command.end()
            if status == 0 and line not in BROKEN:
                break
            statuses.append(status)
            allowed = (*SIGNALS[name], -signal.Signals[name])
            if status not in allowed or line in BROKEN:
                ended = f"exit {status}: {line}"
                return Outcome(False, ended, len(statuses), None, lost)
            saved = [Run.open(run).last_saved_iteration for run in runs_of(path)]
            lost = max([lost, *(a - b for a, b in zip(logged, saved, strict=False))])
        status, line = Command(path.parent, *words_of(verb, path)).end()
        actual = results(path)
        equal = status == 0 and actual == expected
        ended = ", ".join(map(str, sorted(set(statuses))))
        # Evolution has the best policy of any generation.
        adds = name != "SIGKILL" and verb in ("train", "clone", "sweep")
        good = equal or (
            adds and status == 0 and equal_but_added(path, actual, expected)
        )
        good &= not line.startswith("leaves") and lost <= EVERY
        ended = ended if good else f"{ended}, then {status}: {line}"
        return Outcome(good, ended, len(statuses), equal, lost)

    def kill_remote(self, victim: str) -> Outcome:
        """Kill a process of Ray; the run has to finish, or to end with one line."""
        verb, option, title = REMOTE[victim]
        path = self.new()
        words = words_of(verb, path, option)
        command = Command(path.parent, *words)
        target = self.chance.randint(2, 20)
        wait(lambda: sum(rows_of(path)) >= target or not command.running, PATIENCE)
        pids = [n for n, name in command.processes() if re.match(title, name)]
        if not pids:
            return Outcome(False, f"no process; {command.end()}")
        logged = rows_of(path)[0]
        os.kill(self.chance.choice(pids), signal.SIGKILL)
        status, line = command.end()
        good = status == 0 or bool(line)
        lost = 0
        if status:
            lost = logged - Run.open(path).last_saved_iteration
            good &= Command(path.parent, *words).end()[0] == 0
        good &= line not in BROKEN and lost <= EVERY
        return Outcome(good, f"exit {status}: {line}" if status else "0", 1, None, lost)

    def fault(self, verb: str, name: str, *extra: str) -> Outcome:
        """Train in an environment that fails after a random number of steps."""
        steps = self.chance.randint(3, 40)
        drop = ("env=", "env.num_noise", "teacher", "policy.hidden")
        path = self.new()
        kept = [word for word in words_of(verb, path) if not word.startswith(drop)]
        env = ("env=helpers.faulty_pole:FaultyPole", f"+env.fault={name}")
        limits = [f"+env.after={steps}", "env_timeout=2"]
        if verb == "clone":
            heuristic = "marl_pool.envs.cartpole.heuristic:CartPoleHeuristic"
            limits.append(f"teacher={heuristic}")
        limits += ["time_limit=4"] if name == "slow" else []
        status, line = Command(path.parent, *kept, *env, *limits, *extra).end()
        is_named = re.search(FAULTS[name], line.lower()) is not None
        good = (status == 75) if name == "slow" else (status in (1, 2) and is_named)
        good &= line not in BROKEN
        # A folder's name is no part of the message.
        return Outcome(good, f"exit {status}: {line.replace(str(path), 'RUN')}")

    def two_drivers(self, verb: str) -> Outcome:
        """Start a second driver on the folder of a running one."""
        expected, path = self.undisturbed(verb).results, self.new()
        words = words_of(verb, path)
        first = Command(path.parent, *words)
        wait(lambda: sum(rows_of(path)) > 0 or not first.running, PATIENCE)
        # A stopped process keeps its lock; otherwise the second one would be too late.
        first.process.send_signal(signal.SIGSTOP)
        status, line = Command(path.parent / "second", *words).end()
        first.process.send_signal(signal.SIGCONT)
        ended, _ = first.end()
        equal = ended == 0 and results(path) == expected
        good = equal and status == 2 and "another process" in line
        return Outcome(good, f"{ended} and {status}", 0, equal)

    def full_disk(self, verb: str) -> Outcome:
        """Fill a small disk, then resume the run on a larger one."""
        expected, place = self.undisturbed(verb).results, self.new().parent
        # In whole pages of 4 KiB, and too small for the run.
        size = int(self.chance.uniform(0.2, 0.8) * self.undisturbed(verb).size) // 4 * 4
        with disk(place / "disk", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs"):
            command = Command(place, *words_of(verb, place / "disk/run"))
            status, line = command.end()
            half = [*(place / "disk").rglob(".*.new")]
            if (place / "disk/run").exists():
                shutil.copytree(place / "disk/run", place / "run")
        again, _ = Command(place, *words_of(verb, place / "run")).end()
        equal = again == 0 and results(place / "run") == expected
        refused = status in (1, 2) and "No space left" in line and not half
        return Outcome(equal and refused, f"{status}: {line}", 0, equal)

    def read_only(self, verb: str) -> Outcome:
        """Kill a run, resume it on a read-only disk, then on a writable one."""
        expected, place = self.undisturbed(verb).results, self.new().parent
        words = words_of(verb, place / "disk/run")
        with disk(place / "disk", "-t", "tmpfs", "tmpfs"):
            command = Command(place, *words)
            self._await_moment(command, verb, place / "disk/run")
            command.process.kill()
            command.end()
            options = ["mount", "-o", "remount,ro", str(place / "disk")]
            subprocess.run(options, check=True)
            status, line = Command(place, *words).end()
            options[2] = "remount,rw"
            subprocess.run(options, check=True)
            again, _ = Command(place, *words).end()
            equal = again == 0 and results(place / "disk/run") == expected
        refused = status == 2 and "Read-only file system" in line
        # A finished run has nothing to write.
        return Outcome(equal and (refused or not status), str(status), 1, equal)

    def power_cut(self, verb: str) -> Outcome:
        """Copy the device under a running run, and resume from the copy."""
        expected, place = self.undisturbed(verb).results, self.new().parent
        place.mkdir()
        device, snapshot = place / "device", place / "snapshot"
        with device.open("wb") as file:
            file.truncate(2**24)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(device)], check=True)
        with disk(place / "disk", "-o", "loop", str(device)):
            path = place / "disk/run"
            command = Command(place, *words_of(verb, path))
            self._await_moment(command, verb, path)
            command.process.send_signal(signal.SIGSTOP)
            # The device holds synchronized data, but not data that were only written.
            shutil.copyfile(device, snapshot)
            logged = (rows_of(path) or [0])[0]
            command.process.kill()
            command.end()
        with disk(place / "copy", "-o", "loop", str(snapshot)):
            path = place / "copy/run"
            saved = [Run.open(run).last_saved_iteration for run in runs_of(path)] or [0]
            status, line = Command(place, *words_of(verb, path)).end()
            equal = status == 0 and results(path) == expected
        lost = logged - saved[0]
        return Outcome(equal and lost <= EVERY, f"{status}: {line}", 1, equal, lost)


def cases(campaign: Campaign) -> dict[tuple[str, str], Callable[[], Outcome]]:
    """Return all kinds of cases, by fault and verb."""
    by_kind: dict[tuple[str, str], Callable[[], Outcome]] = {}
    for verb in LONG:
        for name in SIGNALS:
            by_kind[f"{name} of the driver", verb] = partial(campaign.kill, verb, name)
    for verb in ("train", "evolve", "clone", "fit"):
        by_kind["two drivers", verb] = partial(campaign.two_drivers, verb)
        if os.geteuid() == 0:
            by_kind["full disk", verb] = partial(campaign.full_disk, verb)
            by_kind["read-only disk", verb] = partial(campaign.read_only, verb)
            by_kind["power cut", verb] = partial(campaign.power_cut, verb)
    for victim, (verb, *_) in REMOTE.items():
        by_kind[f"SIGKILL of a {victim}", verb] = partial(campaign.kill_remote, victim)
    for name in FAULTS:
        text = f"environment: {name.replace('_', ' ')}"
        for verb in ("train", "evolve", "clone"):
            by_kind[text, verb] = partial(campaign.fault, verb, name)
        runner = partial(campaign.fault, "train", name, "resources.num_env_runners=1")
        by_kind[text, "train, remote runner"] = runner
    return by_kind


def main() -> None:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    text = "cases of each kind; kills for the signals to a driver"
    parser.add_argument("--count", type=int, default=20, help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    text = "part of a row's name, as SIGKILL or evolve; all that are given have to fit"
    parser.add_argument("--only", action="append", default=[], help=text)
    parser.add_argument("--json", type=Path, help="file that takes every case as a row")
    arguments = parser.parse_args()
    # A job in the background ignores Ctrl-C, and its children would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    campaign = Campaign(scratch, random.Random(arguments.seed))
    remaining = {
        kind: case
        for kind, case in cases(campaign).items()
        if all(text in " ".join(kind) for text in arguments.only)
    }
    outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    # Alternate between the kinds, so that an interrupted campaign has some of each.
    try:
        while remaining:
            for kind, case in [*remaining.items()]:
                outcome = case()
                outcomes[kind].append(outcome)
                print(*kind, outcome, sep=" | ", file=sys.stderr, flush=True)
                if sum(max(1, o.kills) for o in outcomes[kind]) >= arguments.count:
                    del remaining[kind]
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    print(f"Commit {commit()}, seed {arguments.seed}.\n\n{table(outcomes)}")
    if arguments.json:
        rows = [
            {"what": fault, "verb": verb, **asdict(outcome)}
            for (fault, verb), series in outcomes.items()
            for outcome in series
        ]
        arguments.json.write_text(json.dumps(rows, indent=1))
    if all(outcome.good for series in outcomes.values() for outcome in series):
        shutil.rmtree(scratch)
    else:
        print(f"folders: {scratch}", file=sys.stderr)


def table(outcomes: dict[tuple[str, str], list[Outcome]]) -> str:
    """Return a Markdown table with a row for each kind of case."""
    head = "what|verb|runs|kills|as promised|equal in the end|lost at most|ended"
    lines = []
    for (fault, verb), series in outcomes.items():
        compared = [outcome.equal for outcome in series if outcome.equal is not None]
        equal = f"{sum(compared)} of {len(compared)}" if compared else "–"
        kills = sum(outcome.kills for outcome in series)
        good = sum(outcome.good for outcome in series)
        statuses = {
            s for outcome in series for s in re.findall(r"-?\d+", outcome.ended[:20])
        }
        ended = ", ".join(sorted(statuses, key=int))
        lost = max(outcome.lost for outcome in series)
        lines.append((fault, verb, len(series), kills, good, equal, lost, ended))
    return markdown_table(head.split("|"), lines)


if __name__ == "__main__":
    main()
