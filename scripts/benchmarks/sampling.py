"""Rows of sampling: our runner, what it cannot be faster than, and stock RLlib."""

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

from benchmarks.common import TASKS, Row, Size, Task, build, seconds, start_ray
from benchmarks.worlds import stepping
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.views.gymnasium import OneAgentView
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens
from marl_pool.training.ppo.algorithm import algorithm_config
from marl_pool.training.settings import TrainConfig

Rates = dict[str, list[float]]


def sampling(name: str) -> Callable[[Size], Iterator[Row]]:
    """Our runner, and the world and the policy's forward pass each alone."""
    task = TASKS[name]

    def measure(size: Size) -> Iterator[Row]:
        ours, policy = our_runner(task, size)
        contenders = {
            "ours": ours,
            "env": stepping(task, task.world(size), task.fragment(size)),
            "forward": forward(policy, task.world(size), task.fragment(size)),
        }
        rates = compete(contenders, task, size)
        value = statistics.median(rates["ours"])
        columns = zip(rates["ours"], rates["env"], rates["forward"], strict=True)
        both, alone = [], []
        for mine, env, pass_ in columns:
            both.append(mine * (1 / env + 1 / pass_))
            alone.append(mine / pass_)
        env, pass_ = (statistics.median(rates[key]) for key in ("env", "forward"))
        floor = 1 / (1 / env + 1 / pass_)
        yield Row(
            f"sample/{name}",
            value,
            "env steps/s",
            f"world and forward pass, each alone, together: {floor:,.0f}",
            statistics.median(both),
            note=task.about("sample"),
        )
        yield Row(
            f"sample/{name}/forward",
            value,
            "env steps/s",
            f"forward pass alone: {pass_:,.0f}",
            statistics.median(alone),
            note=f"world alone: {env:,.0f}",
        )

    return measure


def two_runners(name: str) -> Callable[[Size], Iterator[Row]]:
    """Two runner processes, as RLlib samples from them, until the driver has all."""
    task = TASKS[name]

    def measure(size: Size) -> Iterator[Row]:
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
            note=f"2 processes of {task.num_envs} worlds; memory is the driver's",
        )

    return measure


def stock(name: str) -> Callable[[Size], Iterator[Row]]:
    """Our runner, its floor in one loop, and on a CPU RLlib's own runner."""
    task = TASKS[name]
    comparators = {
        "floor": "world step and forward pass alone",
        "batched": "stock SingleAgentEnvRunner, the same batched world",
        "single": "stock SingleAgentEnvRunner, 64 one-world envs",
    }

    def measure(size: Size) -> Iterator[Row]:
        ours, policy = our_runner(task, size)
        contenders = {
            "ours": ours,
            "floor": floor_of(policy, task.world(size), task.fragment(size)),
        }
        if size.device == "cpu":  # its batches of observations are numpy's
            contenders["batched"] = stock_runner(task, size, batched=True)
            contenders["single"] = stock_runner(task, size, batched=False)
        rates = compete(contenders, task, size)
        value = statistics.median(rates["ours"])
        for key, comparator in comparators.items():
            if key not in contenders:
                continue
            pairs = zip(rates["ours"], rates[key], strict=True)
            ratio = statistics.median(mine / theirs for mine, theirs in pairs)
            theirs = f"{comparator}: {statistics.median(rates[key]):,.0f}"
            suffix = "" if key == "floor" else f"/stock_{key}"
            yield Row(f"sample/{name}{suffix}", value, "env steps/s", theirs, ratio)

    return measure


def compete(contenders: dict[str, Callable[[], Any]], task: Task, size: Size) -> Rates:
    """Env steps a second of each contender, taking turns."""
    steps = task.num_envs * task.fragment(size)
    rates: Rates = {name: [] for name in contenders}
    # Ours samples with one thread (see `BatchedEnvRunner`): so do all.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for contender in contenders.values():
        contender()
    for _ in range(size.rounds):
        for name, contender in contenders.items():
            rates[name].append(steps / seconds(contender))
    torch.set_num_threads(threads)
    return rates


def our_runner(task: Task, size: Size) -> tuple[Callable[[], Any], TokenPolicy]:
    """`BatchedEnvRunner.sample`, and the policy that it runs."""
    config = algorithm_config(TrainConfig.from_plain(task.sampling(size)))
    runner = config.env_runner_cls(config=config, worker_index=0, num_workers=0)
    return runner.sample, next(iter(dict(runner.module.items()).values())).policy


def forward(policy: TokenPolicy, world: BatchedEnv, steps: int) -> Callable[[], None]:
    """The policy's forward pass on what the worlds show at a start."""
    tokens = next(iter(world.observe().values()))

    @torch.no_grad()
    def run() -> None:
        for _ in range(steps):
            policy(tokens)

    return run


def floor_of(policy: TokenPolicy, world: BatchedEnv, steps: int) -> Callable[[], None]:
    """Only the worlds' step, their observation and the forward pass."""
    (group,) = world.groups

    @torch.no_grad()
    def run() -> None:
        tokens = world.observe()[group]
        for _ in range(steps):
            logits, _ = policy(tokens)
            action = logits.chunk(2, dim=-1)[0]
            if policy.actions.discrete:
                action = logits.argmax(-1)
            step = world.step({group: policy.scale(action)})
            ended = step.terminated | step.truncated
            if ended.any():
                world.reset(ended)
            tokens = world.observe()[group]

    return run


class BatchedVectorEnv(VectorEnv):
    """A batch of worlds of one learner as Gymnasium's vector env, for stock RLlib."""

    def __init__(self, world: BatchedEnv) -> None:
        self.world = world
        (self.group,) = world.groups
        group = world.groups[self.group]
        self.num_envs = world.num_envs
        self.single_observation_space = group.tokens.space()
        self.single_action_space = group.action_space
        self.observation_space = batch_space(
            self.single_observation_space, self.num_envs
        )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.ended = torch.zeros(self.num_envs, dtype=torch.bool)

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        """Begin all worlds anew."""
        self.world.reset()
        return self._look(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict]:
        """Advance; a world that ended begins anew at the next step."""
        begins = self.ended
        batch = torch.as_tensor(np.stack(actions))[:, None]
        step = self.world.step({self.group: batch})
        if begins.any():
            self.world.reset(begins)
        self.ended = (step.terminated | step.truncated) & ~begins
        rewards = step.rewards[self.group][:, 0].masked_fill(begins, 0.0).numpy()
        terminated = (step.terminated & ~begins).numpy()
        truncated = (step.truncated & ~begins).numpy()
        return self._look(), rewards, terminated, truncated, {}

    def _look(self) -> dict[str, np.ndarray]:
        tokens: Tokens = self.world.observe()[self.group]
        return {k: v[:, 0].numpy() for k, v in tokens._asdict().items()}


def stock_runner(task: Task, size: Size, *, batched: bool) -> Callable[[], Any]:
    """RLlib's own runner with our module, on one batched env or many single ones."""
    start_ray()
    settings = task.sampling(size)
    spec = algorithm_config(TrainConfig.from_plain(settings)).rl_module_spec
    (module,) = spec.rl_module_specs.values()
    config = type(algorithm_config(TrainConfig.from_plain(settings)))()
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
        return BatchedVectorEnv(task.world(size)) if batched else OneAgentView(**env)

    name = f"{env['name']}-{'batched' if batched else 'single'}"
    register_env(name, make)
    config.environment(name)
    config.rl_module(rl_module_spec=module)
    runner = SingleAgentEnvRunner(config=config, worker_index=0, num_workers=0)
    return lambda: runner.sample(num_timesteps=steps)
