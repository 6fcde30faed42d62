"""Sizes, tasks, timing and construction, shared by all benchmarks."""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.compiled.choice import use_kernels
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.training.ppo.config import algorithm_config
from marl_pool.training.ppo.runner import EPISODE_RETURNS
from marl_pool.training.settings import TrainConfig


@dataclass(frozen=True)
class Row:
    """One row of the table; ``ratio`` is our speed over the comparator's."""

    name: str
    value: float | None
    unit: str
    comparator: str = ""
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Size:
    """Amount of work to measure, and the device."""

    rounds: int = 7
    env_steps: int = 2000
    fragment: int = 128
    iterations: int = 3
    seeds: int = 5
    limit: float = 240.0
    episodes: int = 256
    sets: int = 1024
    level_resets: int = 16
    trained_iterations: int = 40
    tiny: bool = False
    device: str = "cpu"


TINY = Size(
    rounds=1,
    env_steps=4,
    fragment=4,
    iterations=1,
    seeds=1,
    limit=1.0,
    episodes=4,
    sets=4,
    level_resets=1,
    trained_iterations=1,
    tiny=True,
)


@dataclass(frozen=True)
class Task:
    """A training task, as overrides of ``marl-pool train``.

    Attributes:
        overrides: of the environment and the policy.
        paper: preset of the algorithm in the row of one iteration.
        published: figures of the published code, measured on other machines, by row.
        steps: steps of every environment in a sampled fragment.
        iterations: maximal number of measured iterations.
        num_agents: agents that learn in an environment, whose steps a batch counts.
    """

    overrides: tuple[str, ...]
    num_envs: int = 64
    paper: str = "paper"
    published: Mapping[str, str] = field(default_factory=dict)
    steps: int = 128
    iterations: int = 3
    num_agents: int = 1

    def about(self, row: str) -> str:
        """Return the published code's figure as text."""
        figure = self.published.get(row)
        return "" if figure is None else f"published code: {figure}, measured elsewhere"

    def sampling(self, size: Size, num_env_runners: int = 0) -> dict[str, Any]:
        """Return a run's configuration with one fragment per iteration."""
        num_rows = self.num_envs * self.num_agents * max(1, num_env_runners)
        batch = num_rows * self.fragment(size)
        overrides = [
            f"ppo.num_envs={self.num_envs}",
            f"ppo.batch_size={batch}",
            "ppo.minibatch_size=null",
            f"resources.num_env_runners={num_env_runners}",
        ]
        return compose("train", [*self.overrides, *overrides, *on(size.device)])

    def with_ppo(self, preset: str) -> list[str]:
        """Return the overrides with a preset of PPO in place of the task's."""
        kept = [text for text in self.overrides if not text.startswith("ppo=")]
        return [*kept, f"ppo={preset}"]

    def iteration(
        self, size: Size, ppo: str = "paper", num_learners: int = 0
    ) -> dict[str, Any]:
        """Return a run's configuration by the paper's preset, or by ``ppo``."""
        preset = self.paper if ppo == "paper" else ppo
        overrides = [*self.with_ppo(preset), *on(size.device)]
        if num_learners:
            overrides += [f"resources.num_learners={num_learners}", "threads=1"]
        if size.tiny:
            overrides += [f"ppo.batch_size={4 * self.num_envs}", "ppo.num_epochs=1"]
            overrides += ["ppo.minibatch_size=null"]
        return compose("train", [*overrides, f"ppo.num_envs={self.num_envs}"])

    def fragment(self, size: Size) -> int:
        """Return the steps of every environment in a fragment."""
        return min(self.steps, size.fragment)

    def make_env(self, size: Size) -> BatchedEnv:
        """Build the batch of environments, and reset it."""
        options = compose("train", list(self.overrides))["env"]
        env = make_batched_env(num_envs=self.num_envs, device=size.device, **options)
        env.reset()
        return env


TASKS = {
    "simple_centroid": Task(
        ("experiment=simple_centroid",),
        published={"env": "2280 steps/s", "iteration": "13.1 s"},
    ),
    "simple_tag": Task(
        ("experiment=simple_tag", "encoder=paper_tag", "ppo=fast"),
        published={
            "env": "2180 steps/s",
            "sample": "1624 steps/s",
        },
    ),
    "simple_spread": Task(("experiment=simple_spread",), num_agents=3),
    "boxworld_pixels": Task(
        ("experiment=boxworld", "env.observation=pixels", "ppo=fast"),
        num_envs=96,
        paper="paper_boxworld",
        iterations=1,
        published={
            "env": "28,500 steps/s",
            "sample": "4917 steps/s",
            "iteration": "163 s",
        },
    ),
    "pong": Task(("experiment=pong",), num_envs=16, steps=64),
}


def task_of(name: str, size: Size) -> Task:
    """Return a task, of few environments at the tiny size."""
    return replace(TASKS[name], num_envs=4) if size.tiny else TASKS[name]


def on(device: str) -> list[str]:
    """Return overrides that place environments, runner and learner on a device."""
    return [] if device == "cpu" else [f"device={device}"]


def seconds(function: Callable[[], Any]) -> float:
    """Time one call, including the work that it queues on a GPU."""
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def taking_turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Time contenders alternately, in seconds, so that a busy machine slows all alike.

    Args:
        contenders: functions by name.
        rounds: calls of each that count.
        warm_up: call each once before, without timing it.
    """
    if warm_up:
        for contender in contenders.values():
            contender()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            times[name].append(seconds(contender))
    return times


def by_torch(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return the same function without the compiled kernel."""

    def torch_alone() -> Any:
        with use_kernels("torch"):
            return run()

    return torch_alone


def number(value: float) -> str:
    """Format a number with three digits, or as an integer from 1000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def compare(
    name: str,
    ours: Sequence[float],
    baseline: Sequence[float],
    comparator: str,
    *,
    unit: str = "s",
    work: float | None = None,
    note: str = "",
) -> Row:
    """Describe times of rounds, compared with a comparator's.

    Args:
        name: name of the row.
        ours: our times.
        baseline: the comparator's, of the same rounds.
        comparator: description of the comparator.
        unit: unit of the value.
        work: amount of work in a round; the value is then a rate.
        note: further text.
    """
    ratio = statistics.median(b / a for a, b in zip(ours, baseline, strict=True))
    value, reference = statistics.median(ours), statistics.median(baseline)
    if work is not None:
        value, reference = work / value, work / reference
    return Row(
        name, value, unit, f"{comparator}: {number(reference)} {unit}", ratio, note
    )


def start_ray() -> None:
    """Start ray, unless it runs already."""
    if not ray.is_initialized():
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


def build(config: dict[str, Any]) -> Any:
    """Build an algorithm as `marl-pool train` does."""
    start_ray()
    algo = algorithm_config(TrainConfig.from_plain(config)).build_algo()
    torch.set_num_threads(config["threads"])
    return algo


def finished_returns(sampled: Mapping[str, Any], group: str) -> list[float]:
    """Return the returns of the episodes that ended in an iteration."""
    returns = sampled.get(EPISODE_RETURNS, {}).get(group)
    return returns if isinstance(returns, list) else []  # NaN without episodes


def random_actions(env: BatchedEnv) -> dict[str, Tensor]:
    """Sample actions for one step, uniform in the groups' spaces."""
    generator = torch.Generator().manual_seed(0)

    def sample(group: AgentGroup) -> Tensor:
        space, shape = group.action_space, (env.num_envs, group.num_agents)
        if isinstance(space, spaces.Discrete):
            return torch.randint(int(space.n), shape, generator=generator)
        assert isinstance(space, spaces.Box)
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        return low + (high - low) * torch.rand(*shape, *low.shape, generator=generator)

    groups = env.groups.items()
    return {name: sample(group).to(env.device) for name, group in groups}
