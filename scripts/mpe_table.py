"""Measure the tasks of MPE with random, scripted and trained agents, and write a CSV.

``python scripts/mpe_table.py docs/mpe_tasks.csv RUN …`` plays the task of each run. In
tasks with adversaries both sides are random, scripted or trained, in all pairs. Every
row is the mean return of an agent of a group over episodes with equal starts.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from marl_pool import load_policies, make_batched_env
from marl_pool.envs.base import AgentGroup
from marl_pool.envs.scripted import HEURISTIC, RANDOM, scripted_policy
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.utils.randomness import EVALUATION_ENVS

SCRIPTS = RANDOM, HEURISTIC


def side(group: str) -> str:
    """Return the side of a group: adversaries, or the others."""
    return "adversaries" if group.endswith("adversary") else "agents"


def policies_of(
    task: str, groups: Mapping[str, AgentGroup], sources: Mapping[str, str | Path]
) -> dict[str, Policy]:
    """Return the policy of each group, from a script's name or a run for each side."""
    policies = {}
    for name, group in groups.items():
        source = sources[side(name)]
        policies[name] = (
            load_policies(source / "policy")[name]
            if isinstance(source, Path)
            else scripted_policy(source, env=task, role=name, group=group)
        )
    return policies


def rows(task: str, runs: list[Path], episodes: int) -> Iterator[dict[str, object]]:
    """Yield the mean returns of the groups, for each pair of policies."""
    groups = make_batched_env(task, 1).groups
    sides = sorted({side(name) for name in groups})
    pairs: list[tuple[str | Path, ...]] = list(product(SCRIPTS, repeat=len(sides)))
    for run in runs:
        # Sides that learned together, and each of them against scripts.
        choices = product((run, *SCRIPTS), repeat=len(sides))
        pairs += [pair for pair in choices if run in pair]
    for pair in pairs:
        sources = dict(zip(sides, pair, strict=True))
        env = make_batched_env(task, episodes, first_env=EVALUATION_ENVS)
        rollout = Rollout(env, policies_of(task, groups, sources))
        returns = rollout.episodes().returns
        for group, values in returns.items():
            of_agents = values.mean(1)
            yield {
                "task": task,
                "adversaries": Path(sources.get("adversaries", "")).name,
                "agents": Path(sources["agents"]).name,
                "group": group,
                "episodes": episodes,
                "mean": round(float(of_agents.mean()), 3),
                "error": round(float(of_agents.std()) / episodes**0.5, 3),
            }


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--episodes", type=int, default=1000)
    arguments = parser.parse_args()
    tasks: dict[str, list[Path]] = {}
    for run in arguments.runs:
        tasks.setdefault(Run.open(run).config["env"]["name"], []).append(run)
    table = [
        row
        for task, runs in tasks.items()
        for row in rows(task, runs, arguments.episodes)
    ]
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    print(arguments.csv.read_text(), end="")


if __name__ == "__main__":
    main()
