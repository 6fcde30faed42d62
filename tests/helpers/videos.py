"""A small environment, a policy for it, and a run of both."""

from pathlib import Path
from typing import Any

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.target import to_float64
from marl_pool.policies import make_policy
from marl_pool.policies.base import Policy
from marl_pool.policies.storage import save_policies
from marl_pool.runs.run import Run

ENV: dict[str, Any] = {"name": "simple_centroid", "num_noise": 4, "max_steps": 5}
STEPS, PLACES = 5, 8


def centroid(count: int = 1, **options: Any) -> BatchedEnv:
    return make_batched_env(num_envs=count, **{**ENV, **options})


def policy_for(env: BatchedEnv, pooling: Any = "ada") -> Policy:
    group = env.groups["agent"]
    policy = make_policy(
        group.tokens, group.action_space, pooling=pooling, init_std=0.4, seed=1
    )
    return to_float64({"agent": policy})["agent"]


def make_run(path: Path, pooling: str = "ada", **options: Any) -> Run:
    run = Run.create(path, {"env": {**ENV, **options}, "seed": 5})
    policy = policy_for(centroid(**options), pooling)
    save_policies({"one": policy}, {"agent": "one"}, run.policy_dir)
    return run
