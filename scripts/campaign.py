"""Kill trainings at random moments and break their surroundings; print a table.

    python scripts/campaign.py --count 20 --seed 1 > table.md
    python scripts/campaign.py --count 5 --only SIGKILL --only 'full disk'

Each case of a kill starts a run with ``--or-resume``, sends the signal to the driver
(or SIGKILL to a worker) at a random moment of the start, the training, a checkpoint or
the resume, repeats the command, up to three kills in a row, and then lets it finish.
The finished run is compared with one that was not disturbed: metrics without clocks,
and all weights, bit for bit. Other faults have to end the run in one line.

The table is the one of docs/reliability.md. Each case is logged to stderr.
"""

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.campaign import CLONE, EVOLVE, FIT, TRAIN, results_of  # noqa: E402
from marl_pool.runs import Run  # noqa: E402
from marl_pool.version import commit  # noqa: E402

PATIENCE = 240.0
"""Seconds after which a command counts as hanging."""
KILLS = 3
"""Largest number of kills in a case."""
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
WORKERS = ("worker of train", "worker of evolve")
STOPPED = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}

LONG = {
    # Options that make a run last long enough to be killed in its middle.
    "train": (*TRAIN, "total_steps=1600", "checkpoint.every=7"),
    "evolve": (*EVOLVE, "total_generations=80", "checkpoint.every=7"),
    "clone": (*CLONE, "total_batches=64", "clone.rounds=2", "checkpoint.every=3"),
    "fit": (*FIT, "fit.epochs=30", "checkpoint.every=3"),
    "sweep": (
        *(text for text in TRAIN if not text.startswith("threads")),
        *("total_steps=800", "seed=0,1", "sweep.concurrency=2", "checkpoint.every=7"),
    ),
}
FAULTS = {
    # Environments of `helpers.faulty_envs`, and the text that has to be in the line.
    "raises": "no such state",
    "hangs": "env_timeout",
    "NaN reward": "nan",
    "NaN observation": "nan",
    "wrong shape": "",
}


class Outcome(NamedTuple):
    """End of one case."""

    good: bool
    equal: bool | None
    """The finished run equals an undisturbed one; None where none is compared."""
    lost: int
    """Most iterations that a kill took back."""
    ended: str


def command(verb: str, path: Path, *more: str) -> list[str]:
    flag = "--sweep-dir" if verb == "sweep" else "--run-dir"
    start = [sys.executable, "-m", "marl_pool", verb, flag, str(path), "--or-resume"]
    return [*start, *LONG[verb], *more]


def start(words: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, with its errors in a file."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path[:2]))
    return subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; return the status and the last line of the errors."""
    try:
        errors = process.communicate(timeout=PATIENCE)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 0, "hangs"
    if "Traceback" in errors:
        return process.returncode, "traceback"
    lines = [line for line in errors.splitlines() if line.startswith("marl-pool: ")]
    return process.returncode, lines[-1] if lines else ""


def iterations(path: Path) -> int:
    """Return the number of rows logged in a run, or in all trials of a sweep."""
    logs = [*path.glob("metrics.csv"), *path.glob("trials/*/metrics.csv")]
    return sum(max(0, log.read_bytes().count(b"\n") - 1) for log in logs)


def results(path: Path) -> Any:
    runs = [path] if not (path / "trials").is_dir() else sorted(path.glob("trials/*"))
    return [results_of(run) for run in runs]


class Campaign:
    """Cases, each in a folder of its own.

    Args:
        folder: scratch folder.
        chance: source of the moments.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.number = 0
        self.whole: dict[str, tuple[Any, float, float]] = {}

    def new(self) -> Path:
        """Return the folder of another run."""
        self.number += 1
        return self.folder / f"case{self.number}" / "run"

    def undisturbed(self, verb: str) -> tuple[Any, float, float]:
        """Return results and seconds of a whole run, and seconds to its first row."""
        if verb not in self.whole:
            path, began = self.new(), time.monotonic()
            process, first = start(command(verb, path)), 0.0
            while not first and process.poll() is None:
                first = time.monotonic() - began if iterations(path) else 0.0
                time.sleep(0.02)
            status, line = finish(process)
            assert status == 0, (verb, status, line)
            self.whole[verb] = results(path), time.monotonic() - began, first
        return self.whole[verb]

    def kill(self, verb: str, name: str) -> Outcome:
        """Kill a driver up to `KILLS` times, then let the run finish."""
        expected, seconds, first = self.undisturbed(verb)
        path, lost, statuses = self.new(), 0, []
        for _ in range(self.chance.randint(1, KILLS)):
            process = start(command(verb, path))
            # Half of the moments in the start or resume, and half after it.
            early = self.chance.random() < 0.5
            until = (0.0, first) if early else (first, seconds)
            end = time.monotonic() + self.chance.uniform(*until)
            while time.monotonic() < end and process.poll() is None:
                time.sleep(0.005)
            process.send_signal(signal.Signals[name])
            before = iterations(path)
            status, line = finish(process)
            statuses.append(status)
            # A signal that came before Python handled it kills like SIGKILL.
            allowed = (0, STOPPED[name], -signal.Signals[name])
            if status not in allowed or line in ("hangs", "traceback"):
                return Outcome(False, None, lost, f"exit {status}: {line}")
            if status == 0:
                break
            if (path / "checkpoints").is_dir():
                lost = max(lost, before - Run.open(path).iterations_saved)
            if name != "SIGKILL" and (path.is_dir() and not any(path.iterdir())):
                return Outcome(False, None, lost, "an empty folder is left")
        status, line = finish(start(command(verb, path)))
        equal = status == 0 and results(path) == expected
        ended = f"exits {sorted(set(statuses))}"
        return Outcome(equal, equal, lost, ended if equal else f"{ended}: {line}")

    def kill_worker(self, verb: str) -> Outcome:
        """Kill one of two Ray actors that sample; the run has to finish."""
        flag = "num_env_runners" if verb == "train" else "num_workers"
        path = self.new()
        process = start(command(verb, path, f"resources.{flag}=2"))
        wanted = self.chance.randint(2, 20)
        while iterations(path) < wanted and process.poll() is None:
            time.sleep(0.02)
        kinds = ("BatchedEnvRunner", "Worker")
        victims = [p for p, name in descendants(process.pid) if name.startswith(kinds)]
        if not victims:
            return Outcome(False, None, 0, f"no worker: {finish(process)}")
        os.kill(self.chance.choice(victims), signal.SIGKILL)
        status, line = finish(process)
        return Outcome(status == 0, None, 0, f"exit {status}: {line}"[:80])

    def fault(self, verb: str, name: str) -> Outcome:
        """Train in an environment that fails after a random number of steps."""
        steps = self.chance.randint(3, 60)
        env = (
            "env=helpers.faulty_envs:FaultyPole",
            f"+env.fault={name.replace(' ', '_')}",
            f"+env.after={steps}",
            "env_timeout=3",
        )
        drop = ("env=", "env.num_noise", "teacher", "policy.hidden")
        words = command(verb, self.new())
        kept = [text for text in words if not text.startswith(drop)]
        status, line = finish(start([*kept, *env]))
        good = status in (1, 2) and FAULTS[name] in line.lower() and line != "traceback"
        return Outcome(good, None, 0, f"exit {status}: {line}"[:160])

    def two_drivers(self, verb: str) -> Outcome:
        """Start a second driver on the folder of a running one."""
        expected, path = self.undisturbed(verb)[0], self.new()
        first = start(command(verb, path))
        while not iterations(path) and first.poll() is None:
            time.sleep(0.02)
        time.sleep(self.chance.uniform(0, 1))
        status, line = finish(start(command(verb, path)))
        ended, _ = finish(first)
        refused = status == 2 and "another process" in line
        late = status == 0 and ended == 0  # the first one was faster
        equal = ended == 0 and results(path) == expected
        good = equal and (refused or late)
        return Outcome(good, equal, 0, f"exit {status}: {line.rpartition(': ')[2]}")

    def full_disk(self, verb: str) -> Outcome:
        """Let no file grow beyond a random size, then resume without the limit."""
        expected, path = self.undisturbed(verb)[0], self.new()
        limit = int(10 ** self.chance.uniform(2.5, 4))

        def restrict() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        status, line = finish(start(command(verb, path), preexec_fn=restrict))
        refused = status in (1, 2) and line not in ("", "traceback")
        again, _ = finish(start(command(verb, path)))
        equal = again == 0 and results(path) == expected
        return Outcome(equal and (refused or not status), equal, 0, f"exit {status}")


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the processes below one, with the title that Ray gives them."""
    for task in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((task / "stat").read_text().rpartition(")")[2].split()[1])
            title = (task / "cmdline").read_bytes().decode().replace("\0", " ")
            if parent == pid:
                yield int(task.name), title.removeprefix("ray::")
                yield from descendants(int(task.name))


def cases(campaign: Campaign) -> dict[tuple[str, str], Callable[[], Outcome]]:
    """Return all kinds of cases, by fault and verb."""
    found: dict[tuple[str, str], Callable[[], Outcome]] = {}
    for verb in LONG:
        for name in SIGNALS:
            found[name, verb] = lambda v=verb, n=name: campaign.kill(v, n)
    for verb in ("train", "evolve"):
        found["SIGKILL of a worker", verb] = lambda v=verb: campaign.kill_worker(v)
        for name in FAULTS:
            case = f"environment: {name}"
            found[case, verb] = lambda v=verb, n=name: campaign.fault(v, n)
    for verb in ("train", "evolve", "clone", "fit"):
        found["two drivers", verb] = lambda v=verb: campaign.two_drivers(v)
        found["full disk", verb] = lambda v=verb: campaign.full_disk(v)
    return found


def main() -> None:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    text = "part of a row's name, as SIGKILL or evolve; may be given repeatedly"
    parser.add_argument("--only", action="append", default=[], help=text)
    arguments = parser.parse_args()
    outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    campaign = Campaign(scratch, random.Random(arguments.seed))
    chosen = {
        kind: case
        for kind, case in cases(campaign).items()
        if all(text in " ".join(kind) for text in arguments.only)
    }
    # Take the kinds in turns, so that an interrupted campaign has some of each.
    try:
        for _ in range(arguments.count):
            for kind, case in chosen.items():
                outcome = case()
                outcomes[kind].append(outcome)
                print(*kind, *outcome, sep=" | ", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    print_table(outcomes, arguments.seed)
    if all(outcome.good for each in outcomes.values() for outcome in each):
        shutil.rmtree(scratch)
    else:
        print(f"folders: {scratch}", file=sys.stderr)


def print_table(outcomes: dict[tuple[str, str], list[Outcome]], seed: int) -> None:
    """Print one row for each kind of case."""
    print(f"Commit {commit()}, seed {seed}.\n")
    print(
        "| what | verb | cases | as promised | equal in the end | lost at most | ends |"
    )
    print("|---|---|---|---|---|---|---|")
    for (what, verb), each in outcomes.items():
        compared = [one.equal for one in each if one.equal is not None]
        equal = f"{sum(compared)} of {len(compared)}" if compared else "–"
        lost = max(one.lost for one in each)
        ends = "; ".join(sorted({one.ended.replace("|", "/") for one in each}))
        good = sum(one.good for one in each)
        row = (what, verb, len(each), good, equal, lost, ends)
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
