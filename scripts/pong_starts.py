"""Play a cloned Pong policy from each start, those of its training and the others.

    python scripts/pong_starts.py RUN [--occlude 0.2] [--checkpoint last]

Without sticky actions a start, its number of no-ops, decides all that follows: the
games of a deterministic player are as many as the starts, or fewer: with a frame skip
of four, four no-ops more mean the same game one step later.
"""

import argparse
import statistics
from pathlib import Path

import torch

from marl_pool.envs import make_batched_env
from marl_pool.envs.pong import Pong
from marl_pool.perturbations import make_perturbation
from marl_pool.policies.storage import load_policies
from marl_pool.rollout import Rollout
from marl_pool.runs import Run

WORLDS = 256
"""Enough to meet every start."""


def starts(env: dict, seed: int, worlds: torch.Tensor) -> torch.Tensor:
    """The no-ops with which the first episodes of some worlds begin, ``(n,)``."""
    world = make_batched_env(num_envs=len(worlds), seed=seed, **env)
    assert isinstance(world, Pong)
    world.renumber(worlds, 0)
    world.reset()
    return world.noops


def main() -> None:
    """Print a line for each start, and the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a cloning run")
    parser.add_argument("--occlude", type=float, default=0.0, help="share of patches")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    arguments = parser.parse_args()
    run = Run.open(arguments.run)
    seed = run.config["seed"]
    env = {**run.config["env"], "sticky_actions": 0.0, "threads": 1}
    taught = torch.arange(run.config["clone"]["episodes"])
    seen = set(starts(env, seed, taught).tolist())
    noops = starts(env, seed, torch.arange(WORLDS)).tolist()
    first = {count: noops.index(count) for count in sorted(set(noops))}

    world = make_batched_env(num_envs=len(first), seed=seed, **env)
    world.renumber(torch.tensor(list(first.values())), 0)
    hidden = None
    if arguments.occlude:
        specs = [group.tokens for group in world.groups.values()]
        hidden = make_perturbation("occlude", severity=arguments.occlude, specs=specs)
    policies = load_policies(run.policy_path(arguments.checkpoint))
    played = Rollout(world, policies, perturbation=hidden).episodes()
    scores = played.returns["agent"][:, 0].tolist()
    by_kind: dict[str, list[float]] = {"seen": [], "unseen": []}
    for count, score, length in zip(first, scores, played.lengths, strict=True):
        kind = "seen" if count in seen else "unseen"
        by_kind[kind].append(score)
        print(f"{count:2d} no-ops  {kind:6}  {score:5.0f}  {int(length)} steps")
    games = len(set(zip(scores, played.lengths.tolist(), strict=True)))
    for kind, found in by_kind.items():
        if found:
            print(f"{kind}: mean {statistics.mean(found):.1f} of {len(found)} starts")
    print(f"at least {games} distinct games")


if __name__ == "__main__":
    main()
