"""Benchmark of the standard suite: every perturbation at five severities."""

import statistics
from collections.abc import Iterator

import marl_pool
from benchmarks.common import Row, Size, seconds
from marl_pool.config import compose
from marl_pool.envs.description import describe_env
from marl_pool.policies import make_policy

THREADS = 2


def standard_suite(size: Size) -> Iterator[Row]:
    """Measure `marl_pool.evaluate` with the standard suite and with clean episodes."""
    env = compose("train", ["experiment=simple_centroid"])["env"]
    (group,) = describe_env(env).groups.values()
    policy = make_policy(group.tokens, group.action_space, pooling="ada", seed=0)
    played: list[int] = []

    def run(suite: object) -> None:
        measured = marl_pool.evaluate(
            policy, env, suite=suite, episodes=size.episodes, threads=THREADS
        )
        missing = [row.label for row in measured.results if row.missing]
        assert not missing, missing
        played.append(measured.returns.size * env["max_steps"])

    plain = {"perturbations": []}
    run(plain)
    clean = []
    for _ in range(size.rounds):
        spent = seconds(lambda: run(plain))
        clean.append(played[-1] / spent)
    whole = "quick" if size.tiny else "standard"
    suite = [seconds(lambda: run(whole)) for _ in range(min(size.rounds, 2))]
    steps, spent = played[-1], statistics.median(suite)
    rate, alone = steps / spent, statistics.median(clean)
    yield Row(
        "suite/standard",
        spent,
        "s",
        f"clean episodes, random and heuristic alone: {alone:,.0f} steps/s",
        rate / alone,
        f"{steps:,} env steps, {rate:,.0f} steps/s on {THREADS} threads, bootstrap and "
        f"all; {size.episodes} episodes of {env['max_steps']} steps a severity",
    )
