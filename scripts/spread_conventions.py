"""Measure simple spread in every convention of docs/mpe.md, and write a CSV.

``python scripts/spread_conventions.py mpe_spread.csv [RUN …]`` plays random, idle
and scripted agents, and the best policies of runs, all from equal initial states.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from particle_anchors import LeastTotal, Rest
from study_arguments import absent_file, positive, reported
from torch import Tensor

from marl_pool import load_policy, make_batched_env, make_heuristic
from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.physics import distances
from marl_pool.envs.particles.simple_spread import AGENT_SIZE, SimpleSpread
from marl_pool.files.tables import write_csv
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.utils.errors import InputError

COUNTS = (3, 8)
"""Numbers of agents."""


def play(env: SimpleSpread, policy: Policy) -> tuple[Tensor, Tensor]:
    """Return G and C of each episode, ``(num_envs,)``."""
    count = env.num_agents
    cover, touches = torch.zeros(env.num_envs), torch.zeros(env.num_envs)
    env.reset()
    for _ in range(env.max_steps):
        with torch.inference_mode():
            actions = policy.act(env.observe()["agent"]).action
        env.step({"agent": actions})
        places = env.state[:, :count, :2]
        cover -= distances(env.state[:, count:, :2], places).amin(2).sum(1)
        near = distances(places, places) < 2 * AGENT_SIZE
        touches += (near.sum((1, 2)) - count) / 2
    return cover, touches


def policy_of(run: Path, group: AgentGroup) -> Policy:
    """Load the policy of a run.

    Raises:
        InputError: no run, or one of another environment.
    """
    policy = load_policy(run / "policy")
    if not isinstance(policy, TokenPolicy):
        raise InputError(f"{run}: expected a policy trained by PPO")
    if reason := policy.mismatch(group.tokens, group.action_space):
        raise InputError(f"{run}: expected a policy of env=simple_spread: {reason}")
    return policy


def rows(runs: list[Path], episodes: int) -> Iterator[dict[str, object]]:
    """Yield the means of each policy and number of agents."""
    for count in COUNTS:
        options = {"num_agents": count, "seed": 1}
        group = make_batched_env("simple_spread", 1, **options).groups["agent"]
        policies: dict[str, Policy] = {
            "no-op": Rest(),
            "random": RandomPolicy(group.action_space),
            "nearest pairs": make_heuristic("simple_spread", group),
            "least total": LeastTotal(group),
            **{run.name: policy_of(run, group) for run in runs},
        }
        for name, policy in policies.items():
            torch.manual_seed(0)
            env = make_batched_env("simple_spread", episodes, **options)
            assert isinstance(env, SimpleSpread)
            cover, touches = play(env, policy)
            z = 0.5 * cover - touches / count
            mean, error = float(z.mean()), float(z.std() / len(z) ** 0.5)
            o = 2 * count * mean - count * env.max_steps
            numbers = {
                "G": float(cover.mean()),
                "C": float(touches.mean()),
                "Z": mean,
                "error_Z": error,
                "ZS": count * mean,
                "O": o,
                "OO": count * o,
            }
            rounded = {key: round(number, 2) for key, number in numbers.items()}
            yield {"policy": name, "agents": count, "episodes": episodes, **rounded}


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", type=absent_file)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--episodes", type=positive, default=1000)
    arguments = parser.parse_intermixed_args()
    with reported(parser):
        table = list(rows(arguments.runs, arguments.episodes))
    write_csv(arguments.csv, list(table[0]), table)
    print(arguments.csv.read_text(), end="")


if __name__ == "__main__":
    main()
