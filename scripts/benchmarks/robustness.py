"""Benchmark of the standard suite: every perturbation at five severities."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import marl_pool
from benchmarks.common import Row, Size, by_torch, compare, taking_turns
from marl_pool.config import compose
from marl_pool.envs.description import describe_env
from marl_pool.policies import make_policy

THREADS = 2


def standard_suite(size: Size) -> Iterator[Row]:
    """Measure `marl_pool.evaluate` with the standard suite, compared with torch."""
    env = compose("train", ["experiment=simple_centroid"])["env"]
    (group,) = describe_env(env).groups.values()
    policy = make_policy(group.tokens, group.action_space, pooling="ada", seed=0)
    played: list[int] = []

    def run(suite: str | Mapping[str, Any]) -> None:
        measured = marl_pool.evaluate(
            policy,
            env,
            suite=suite,
            episodes=size.episodes,
            device=size.device,
            threads=THREADS,
        )
        missing = [row.label for row in measured.results if row.missing]
        assert not missing, missing
        played.append(measured.returns.size * env["max_steps"])

    run({"perturbations": []})  # a warm-up by clean episodes
    whole = "quick" if size.tiny else "standard"
    once: Callable[[], None] = functools.partial(run, whole)
    # A suite by torch takes a minute or more, so there is one round.
    times = taking_turns({"ours": once, "torch": by_torch(once)}, 1, warm_up=False)
    steps = played[-1]
    yield compare(
        "suite/standard",
        times["ours"],
        times["torch"],
        "kernels=torch",
        note=f"{steps:,} env steps, {steps / times['ours'][0]:,.0f} steps/s on "
        f"{THREADS} threads, bootstrap and all; {size.episodes} episodes of "
        f"{env['max_steps']} steps a severity",
    )
