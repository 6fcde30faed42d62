"""Benchmarks of sampling: our runner, its upper bound, and stock RLlib."""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.tune.registry import register_env

from benchmarks.common import (
    Row,
    Size,
    Task,
    build,
    by_torch,
    compare,
    seconds,
    start_ray,
    taking_turns,
    task_of,
)
from marl_pool.compiled import compile
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.views import OneAgentView
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens
from marl_pool.training.ppo.config import algorithm_config
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.devices import may_read

COMPARATORS = {
    "torch": "kernels=torch",
    "floor": "environment step and forward pass alone",
    "stock_batched": "stock SingleAgentEnvRunner, the same batched environment",
    "stock_single": "stock SingleAgentEnvRunner, 64 single envs",
}
"""Comparators of our runner; the row of all but torch has the key in its name."""


def sampling(name: str, *, with_stock: bool = False) -> Callable[[Size], Iterator[Row]]:
    """Compare our runner with torch, its floor and, on a CPU, RLlib's own runner."""

    def measure(size: Size) -> Iterator[Row]:
        task = task_of(name, size)
        ours, policy = our_runner(task, size)
        contenders = {
            "ours": ours,
            "torch": by_torch(ours),
            "floor": floor_of(policy, task.make_env(size), task.fragment(size)),
        }
        if with_stock and size.device == "cpu":  # stock RLlib batches in numpy
            contenders["stock_batched"] = stock_runner(task, size, batched=True)
            contenders["stock_single"] = stock_runner(task, size, batched=False)
        # Our runner samples with one thread; compare at equal threads.
        torch.set_num_threads(1)
        times = taking_turns(contenders, size.rounds)
        steps = task.num_envs * task.fragment(size)
        for key, comparator in COMPARATORS.items():
            if key not in times:
                continue
            suffix = "" if key == "torch" else f"/{key}"
            row = f"sample/{name}{suffix}"
            beside = times["ours"], times[key], comparator
            yield compare(row, *beside, unit="env steps/s", work=steps)

    return measure


def two_runners(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure two runner processes, including the transfer to the driver."""

    def measure(size: Size) -> Iterator[Row]:
        task = task_of(name, size)
        config = task.sampling(size, num_env_runners=2)
        algo = build(config)
        sample = functools.partial(
            synchronous_parallel_sample,
            worker_set=algo.env_runner_group,
            max_env_steps=2 * task.num_envs * task.fragment(size),
            concat=False,
            _uses_new_env_runners=True,
        )
        sample()
        steps = 2 * task.num_envs * task.fragment(size)
        rates = [steps / seconds(sample) for _ in range(size.rounds)]
        algo.stop()
        yield Row(
            f"sample/{name}/two_runners",
            statistics.median(rates),
            "env steps/s",
            task.about("sample"),
            note=f"2 processes of {task.num_envs} environments; memory is the driver's",
        )

    return measure


def our_runner(task: Task, size: Size) -> tuple[Callable[[], Any], TokenPolicy]:
    """Return `BatchedEnvRunner.sample`, and the policy that it runs."""
    config = algorithm_config(TrainConfig.from_plain(task.sampling(size)))
    runner = config.env_runner_cls(config=config, worker_index=0, num_workers=0)
    return runner.sample, next(iter(dict(runner.module.items()).values())).policy


def floor_of(policy: TokenPolicy, env: BatchedEnv, steps: int) -> Callable[[], None]:
    """Return a function that only steps, observes and runs the policy."""
    (group,) = env.groups
    actor = compile(policy)  # as a rollout does

    @torch.no_grad()
    def run() -> None:
        tokens = env.observe()[group]
        for _ in range(steps):
            logits, _ = actor(tokens)
            action = logits.chunk(2, dim=-1)[0]
            if policy.actions.discrete:
                action = logits.argmax(-1)
            step = env.step({group: policy.scale(action)})
            ended = step.terminated | step.truncated
            if not may_read(ended) or ended.any():
                env.reset(ended)
            tokens = env.observe()[group]

    return run


class BatchedVectorEnv(VectorEnv):
    """Gymnasium vector env of a batch of environments, for stock RLlib."""

    def __init__(self, env: BatchedEnv) -> None:
        self.env = env
        (self.group,) = env.groups
        group = env.groups[self.group]
        self.num_envs = env.num_envs
        self.single_observation_space = group.tokens.space()
        self.single_action_space = group.action_space
        self.observation_space = batch_space(
            self.single_observation_space, self.num_envs
        )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.ended = torch.zeros(self.num_envs, dtype=torch.bool)

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        """Reset all environments."""
        self.env.reset()
        return self._observe(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict]:
        """Step; an environment that ended is reset in the next step."""
        resets = self.ended
        batch = torch.as_tensor(np.stack(actions))[:, None]
        step = self.env.step({self.group: batch})
        if resets.any():
            self.env.reset(resets)
        self.ended = (step.terminated | step.truncated) & ~resets
        rewards = step.rewards[self.group][:, 0].masked_fill(resets, 0.0).numpy()
        terminated = (step.terminated & ~resets).numpy()
        truncated = (step.truncated & ~resets).numpy()
        return self._observe(), rewards, terminated, truncated, {}

    def _observe(self) -> dict[str, np.ndarray]:
        tokens: Tokens = self.env.observe()[self.group]
        return {k: v[:, 0].numpy() for k, v in tokens.columns.items()}


def stock_runner(task: Task, size: Size, *, batched: bool) -> Callable[[], Any]:
    """Return RLlib's own sampling with our module, on a batched env or single ones."""
    start_ray()
    settings = task.sampling(size)
    ours = algorithm_config(TrainConfig.from_plain(settings))
    (module,) = ours.rl_module_spec.rl_module_specs.values()
    config = type(ours)()
    config.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=task.num_envs,
        rollout_fragment_length=task.fragment(size),
        gym_env_vectorize_mode="vector_entry_point" if batched else "sync",
    )
    steps = task.num_envs * task.fragment(size)
    config.training(train_batch_size_per_learner=steps)
    env = settings["env"]

    def make(_: Any) -> Any:
        return BatchedVectorEnv(task.make_env(size)) if batched else OneAgentView(**env)

    name = f"{env['name']}-{'batched' if batched else 'single'}"
    register_env(name, make)
    config.environment(name)
    config.rl_module(rl_module_spec=module)
    runner = SingleAgentEnvRunner(config=config, worker_index=0, num_workers=0)
    return lambda: runner.sample(num_timesteps=steps)
