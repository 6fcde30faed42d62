"""Measure tasks of MPE with random, scripted and trained agents: a CSV and a table.

``python scripts/mpe_table.py mpe_tasks.csv RUN …`` plays the tasks of the runs. In
tasks with adversaries both sides are random, scripted or trained, in all pairs; both
trained sides come from one run. In the other tasks there are also deaf scripts. A row
of the CSV is the mean return of an agent of a group over episodes from equal initial
states. The printed table has the means over runs, ± half of the 95 % t interval.
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from markdown_tables import markdown_table, mean_of_seeds
from study_arguments import absent_file, positive, reported
from torch import Tensor
from typing_extensions import override

from marl_pool import load_policies, make_batched_env
from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.speaking_heuristics import ListenerHeuristic
from marl_pool.envs.scripted import HEURISTIC, RANDOM, Heuristic, scripted_policy
from marl_pool.files.tables import write_csv
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import EVALUATION_ENVS

SIDES = "adversaries", "agents"
TRAINED, DEAF = "trained", "deaf"
PLAYERS = RANDOM, HEURISTIC, TRAINED
Row = dict[str, str | int | float]


class DeafScript(Heuristic):
    """A script that hears nothing, and so goes to the mean of the landmarks."""

    def __init__(self, script: ListenerHeuristic) -> None:
        super().__init__()
        self.script = script

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        is_speaker = tokens.types == self.script.types[self.script.speaker]
        features = tokens.features.masked_fill(is_speaker[..., None], 0)
        return self.script.choose(tokens._replace(features=features))


def side(group: str) -> str:
    """Return the side of a group."""
    return SIDES[0] if group.endswith("adversary") else SIDES[1]


def players(
    task: str,
    groups: Mapping[str, AgentGroup],
    pair: Mapping[str, str],
    run: Path | None,
) -> dict[str, Policy]:
    """Return the policy of each group, where ``pair`` names the player of each side."""
    policies: dict[str, Policy] = load_policies(run / "policy") if run else {}
    for name, group in groups.items():
        player = pair[side(name)]
        if player == TRAINED:
            continue
        script = HEURISTIC if player == DEAF else player
        policy = scripted_policy(script, env=task, role=name, group=group)
        if player == DEAF and isinstance(policy, ListenerHeuristic):
            policy = DeafScript(policy)
        policies[name] = policy
    return policies


def rows(task: str, runs: list[Path], episodes: int) -> Iterator[Row]:
    """Yield the mean returns of the groups, for each pair of players."""
    groups = make_batched_env(task, 1).groups
    sides = sorted({side(name) for name in groups})
    names = PLAYERS if len(sides) > 1 else (*PLAYERS, DEAF)
    for choice in product(names, repeat=len(sides)):
        pair = dict(zip(sides, choice, strict=True))
        for run in runs if TRAINED in choice else [None]:
            env = make_batched_env(task, episodes, first_env=EVALUATION_ENVS)
            policies = players(task, groups, pair, run)
            for group, returns in Rollout(env, policies).episodes().returns.items():
                of_agents = returns.mean(1)
                yield {
                    "task": task,
                    **{name: pair.get(name, "") for name in SIDES},
                    "run": run.name if run else "",
                    "group": group,
                    "episodes": episodes,
                    "mean": round(float(of_agents.mean()), 3),
                    "error": round(float(of_agents.std()) / episodes**0.5, 3),
                }


def table(results: list[Row]) -> str:
    """Tabulate the agents' players as columns, and what both sides get in each cell."""
    lines: dict[tuple[str, str], dict[str, dict[str, list[float]]]] = {}
    for row in results:
        line = lines.setdefault((str(row["task"]), str(row["adversaries"])), {})
        cell = line.setdefault(str(row["agents"]), {})
        cell.setdefault(str(row["group"]), []).append(float(row["mean"]))
    names = RANDOM, DEAF, HEURISTIC, TRAINED
    body = [
        [*line, *(_cell(cells.get(name, {})) for name in names)]
        for line, cells in lines.items()
    ]
    return markdown_table(
        ["task", SIDES[0], *(f"{name} agents" for name in names)], body
    )


def _cell(groups: Mapping[str, list[float]]) -> str:
    """Show the last group of each side, the adversaries' first."""
    of_sides = {side(name): values for name, values in groups.items()}
    return "; ".join(
        mean_of_seeds(of_sides[name]) for name in SIDES if name in of_sides
    )


def main(arguments: list[str] | None = None) -> None:
    """Write the CSV, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", type=absent_file)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--episodes", type=positive, default=1000)
    options = parser.parse_args(arguments)
    with reported(parser):
        tasks: dict[str, list[Path]] = {}
        for run in options.runs:
            task = Run.open(run).config["env"]["name"]
            tasks.setdefault(task, []).append(run)
        results = [
            row
            for task, runs in tasks.items()
            for row in rows(task, runs, options.episodes)
        ]
    write_csv(options.csv, list(results[0]), results)
    print(table(results))


if __name__ == "__main__":
    main()
