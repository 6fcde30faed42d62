"""Train heads with PPO on MPEv2's tasks, and tabulate them in its other domains.

    python scripts/mpev2_table.py --out DIR --heads ada avg --seeds 5
    python scripts/mpev2_table.py --out DIR --anchors      # policies that do not learn

Each of the six tasks is trained in domain 0, and played in domain 0, domain 1, with
more agents, and domain 2, with more of the others. Every row of DIR/results.csv is the
mean over episodes of the sum of the team's rewards. The same command resumes: rows in
the file are not repeated, and an interrupted training run continues. Other settings
need another folder. DIR/table.md has means over seeds, ± half of the 95 % t interval.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from markdown_tables import markdown_table, mean_of_seeds
from particle_anchors import Rest
from study_arguments import positive, reported
from torch import Tensor

from marl_pool import load_policy
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.mpev2 import MARGIN
from marl_pool.envs.scripted import HEURISTIC, RANDOM, scripted_policy
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import EVALUATION_ENVS

TASKS = ("spread", "tag", "guard", "adversary", "repel", "hunt")
DOMAINS = (0, 1, 2)
NO_OP = "no-op"
RESULTS = "results.csv"
COLUMNS = ("task", "head", "critic", "seed", "domain", "episodes", "mean", "error")


class Trial(NamedTuple):
    """A policy of a task: a head and a critic that are trained, or one by name."""

    task: str
    head: str
    critic: str = ""
    seed: int = 0

    @property
    def name(self) -> str:
        """Folder of its training."""
        return "-".join(map(str, self))

    @property
    def env(self) -> str:
        """Name of the environment."""
        return f"mpev2_{self.task}"


def train(trial: Trial, out: Path, steps: int, extra: Sequence[str]) -> Policy:
    """Train a policy, or continue its training, and load it."""
    folder = out / "runs" / trial.name
    words = [f"env={trial.env}", f"pooling={trial.head}", f"seed={trial.seed}"]
    # `critic=own` is the default, whether or not there are others.
    words += [f"critic={trial.critic}"] if trial.critic != "own" else []
    words += ["ppo=fast_mpev2", "encoder=transformer", f"total_steps={steps}"]
    command = [sys.executable, "-m", "marl_pool", "train", *words, *extra]
    file = out / f"{trial.name}.log"
    with file.open("a") as log:
        finished = subprocess.run(
            [*command, "--run-dir", str(folder), "--or-resume"],
            check=False,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if finished.returncode:
        lines = file.read_text().split("\n")
        last = next((line for line in reversed(lines) if line), "no output")
        raise InputError(f"{trial.name}: the training failed: {last}")
    return load_policy(folder / "policy")


def keep_settings(out: Path, settings: dict[str, object]) -> None:
    """Write the settings of a folder's results.

    Raises:
        InputError: the folder has results of other settings, or something else.
    """
    file, results = out / "settings.json", out / RESULTS
    earlier = json.loads(file.read_text()) if file.exists() else {}
    if earlier.keys() != settings.keys() and any(out.iterdir()):
        raise InputError(
            f"--out: expected a new folder or one of this script, got {out}"
        )
    # Before the first result settings may change, as after a word that was misspelled.
    if not (results.exists() and read(results)):
        file.write_text(json.dumps(settings, indent=2) + "\n")
        return
    for name, value in earlier.items():
        if settings[name] != value:
            raise InputError(
                f"{name}: expected {value!r} as in the results of {out}, got "
                f"{settings[name]!r}; choose another --out"
            )


def policy_of(trial: Trial, group: AgentGroup) -> Policy:
    """Return a policy that does not learn."""
    if trial.head == NO_OP:
        return Rest()
    return scripted_policy(trial.head, env=trial.env, role="agent", group=group)


def team_returns(trial: Trial, policy: Policy, domain: int, episodes: int) -> Tensor:
    """Play a policy in a domain, and return the sums of the team's rewards."""
    env = make_batched_env(
        trial.env,
        episodes,
        domain=domain,
        margin=MARGIN,
        first_env=EVALUATION_ENVS,
    )
    # The first agent is always there, and every agent receives the team's reward.
    return Rollout(env, {"agent": policy}).episodes().returns["agent"][:, 0]


def rows(trial: Trial, policy: Policy, episodes: int) -> Iterator[tuple[object, ...]]:
    """Yield the results of a policy in each domain."""
    for domain in DOMAINS:
        returns = team_returns(trial, policy, domain, episodes)
        error = returns.std() / episodes**0.5
        numbers = f"{float(returns.mean()):.2f}", f"{float(error):.2f}"
        yield *trial, domain, episodes, *numbers


def table(results: list[dict[str, str]]) -> str:
    """Tabulate a row for each split: means over seeds, or for one policy over episodes.

    Means over seeds have half of their 95 % t interval; a single policy has the
    standard error of its episodes.
    """
    policies = dict.fromkeys((row["head"], row["critic"]) for row in results)
    cells: dict[tuple[str, str], dict[tuple[str, str], list[dict[str, str]]]] = {}
    for row in results:
        line = cells.setdefault((row["task"], row["domain"]), {})
        line.setdefault((row["head"], row["critic"]), []).append(row)
    body = [
        [*split, *(_cell(line.get(policy, [])) for policy in policies)]
        for split, line in cells.items()
    ]
    names = [f"{head}, {critic}" if critic else head for head, critic in policies]
    return markdown_table(["task", "domain", *names], body)


def _cell(rows: list[dict[str, str]]) -> str:
    if len(rows) == 1:
        return f"{float(rows[0]['mean']):.0f} ± {float(rows[0]['error']):.0f}"
    return mean_of_seeds([float(row["mean"]) for row in rows], 0)


def main(arguments: list[str] | None = None) -> None:
    """Train and play the missing policies, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--heads", nargs="+", default=[], help="pooling heads")
    parser.add_argument("--critics", nargs="+", default=["own"])
    parser.add_argument("--seeds", type=positive, default=5, help="of each training")
    parser.add_argument("--steps", type=positive, default=1_000_000)
    parser.add_argument("--episodes", type=positive, default=256)
    parser.add_argument("--anchors", action="store_true", help="scripts as well")
    parser.add_argument("overrides", nargs="*", help="as for marl-pool train")
    options = parser.parse_args(arguments)
    with reported(parser):
        if not (options.heads or options.anchors):
            raise InputError("expected --heads or --anchors, got neither")
        play_missing(options)
    results = read(options.out / RESULTS)
    (options.out / "table.md").write_text(table(results) + "\n")


def play_missing(options: argparse.Namespace) -> None:
    """Train and play the policies that the results lack."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    names = ("steps", "episodes", "overrides")
    keep_settings(out, {name: getattr(options, name) for name in names})
    scripts = (NO_OP, RANDOM, HEURISTIC) if options.anchors else ()
    anchors = [Trial(task, name) for task in options.tasks for name in scripts]
    trained = [
        Trial(task, head, critic, seed)
        for seed in range(options.seeds)
        for task in options.tasks
        for critic in options.critics
        for head in options.heads
    ]
    file = out / RESULTS
    if not file.exists():
        file.write_text(",".join(COLUMNS) + "\n")
    for trial in (*anchors, *trained):
        done = {tuple(row[key] for key in COLUMNS[:4]) for row in read(file)}
        if tuple(map(str, trial)) in done:
            continue
        if trial.critic:
            policy = train(trial, out, options.steps, options.overrides)
        else:
            (group,) = make_batched_env(trial.env, 1).groups.values()
            policy = policy_of(trial, group)
        lines = list(rows(trial, policy, options.episodes))
        # All domains at once, so that what is there is complete.
        with file.open("a", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows(lines)
        print(*(f"{line[4]}: {line[6]} ± {line[7]}" for line in lines), trial.name)


def read(file: Path) -> list[dict[str, str]]:
    """Read the rows of the results."""
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


if __name__ == "__main__":
    main()
