"""Measure marl_pool, beside what stock RLlib does on the same worlds.

    python scripts/benchmark.py [--only NAME…] [--json FILE] [--tiny]

Leave the machine idle: two busy processes on two cores tell nothing. Comparators run
in the same process, in turn with ours, and a ratio is the median over the rounds.
`--tiny` checks that everything runs; its numbers mean nothing.
"""

import argparse
import functools
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune.registry import register_env
from torch.nn.functional import scaled_dot_product_attention

from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import World
from marl_pool.envs.gymnasium_view import OneAgentView
from marl_pool.evaluation.episodes import play
from marl_pool.progress import duration
from marl_pool.randomness import EVALUATION_WORLDS
from marl_pool.scalar_attention import scalar_attention
from marl_pool.tokens import Tokens
from marl_pool.training.ppo.algorithm import RETURN_WINDOW, algorithm_config
from marl_pool.training.ppo.module import build_policy
from marl_pool.training.ppo.runner import EPISODE_RETURNS

ENV = "simple_centroid"


@dataclass(frozen=True)
class Row:
    """One line of the table; ``ratio`` is ours over the comparator's, both here."""

    name: str
    value: float | None
    unit: str
    comparator: str = ""
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Size:
    """How much work is measured."""

    rounds: int = 5
    env_steps: int = 2000
    fragment: int = 128
    iterations: int = 3
    seeds: int = 5
    limit: float = 240.0
    episodes: int = 256
    sets: int = 1024
    paper: tuple[str, ...] = ("ppo=paper",)


TINY = Size(
    rounds=1,
    env_steps=20,
    fragment=4,
    iterations=1,
    seeds=1,
    limit=1.0,
    episodes=4,
    sets=4,
    paper=("ppo=paper", "ppo.batch_size=256", "ppo.num_epochs=1"),
)


def seconds(function: Callable[[], Any]) -> float:
    """Time one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def env_alone(size: Size) -> Iterator[Row]:
    """Steps a second of 64 worlds, observations included."""
    world = make_batched_env(ENV, num_envs=64)
    world.reset()
    actions = {"agent": torch.rand(64, 1, 5)}

    def steps() -> None:
        for _ in range(size.env_steps):
            step = world.step(actions)
            world.observe()
            if step.truncated.any():
                world.reset(step.truncated)

    with torch.no_grad():
        steps()
        best = [64 * size.env_steps / seconds(steps) for _ in range(size.rounds)]
    yield Row(
        "env/simple_centroid",
        statistics.median(best),
        "env steps/s",
        "published env: 2280 steps/s, measured elsewhere",
    )


def attention(size: Size) -> Iterator[Row]:
    """Forward and backward of attention with heads of width one, beside torch's own."""
    shape = (size.sets, 32, 8, 1)
    query, key, value = (
        torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    scale = 8**-0.5
    contenders = {
        "ours": lambda: scalar_attention(query, key, value, None, scale),
        "torch": lambda: scaled_dot_product_attention(query, key, value, scale=scale),
    }
    gradient = torch.ones(size.sets, 8, 32, 1)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 + size.rounds):
        for name, contender in contenders.items():
            passed = seconds(lambda run=contender: run().backward(gradient))
            times[name].append(passed / (size.sets * 8 * 32 * 32) * 1e9)
    ours, torchs = times["ours"][1:], times["torch"][1:]
    ratio = statistics.median(b / a for a, b in zip(ours, torchs, strict=True))
    comparator = (
        f"scaled_dot_product_attention: {statistics.median(torchs):.2f} ns a score"
    )
    value_ = statistics.median(ours)
    yield Row("attention/width_one", value_, "ns a score", comparator, ratio)


def sampling(size: Size) -> Iterator[Row]:
    """Our runner, its floor, and RLlib's own runner on the same batched world."""
    steps = 64 * size.fragment
    config = sampling_config(steps)
    ours = config.env_runner_cls(config=config, worker_index=0, num_workers=0)
    contenders = {
        "ours": ours.sample,
        "floor": floor_of(ours.module["agent"].policy, size.fragment),
        "batched": stock_runner(batched=True, steps=steps),
        "single": stock_runner(batched=False, steps=steps),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    # Ours samples with one thread (see `BatchedEnvRunner`): so do all.
    torch.set_num_threads(1)
    for contender in contenders.values():
        contender()
    for _ in range(size.rounds):
        for name, contender in contenders.items():
            rates[name].append(steps / seconds(contender))
    torch.set_num_threads(2)
    comparators = {
        "floor": "world step and forward pass alone",
        "batched": "stock SingleAgentEnvRunner, the same batched world",
        "single": "stock SingleAgentEnvRunner, 64 one-world envs",
    }
    value = statistics.median(rates["ours"])
    for name, comparator in comparators.items():
        pairs = zip(rates["ours"], rates[name], strict=True)
        ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        theirs = f"{comparator}: {statistics.median(rates[name]):,.0f}"
        suffix = "" if name == "floor" else f"/stock_{name}"
        row = f"sample/simple_centroid{suffix}"
        yield Row(row, value, "env steps/s", theirs, ratio)


def sampling_config(steps: int) -> Any:
    """One fragment of ``steps`` steps an iteration."""
    overrides = [f"ppo.batch_size={steps}", "ppo.minibatch_size=null"]
    return algorithm_config(compose("train", overrides))


def floor_of(policy: Any, steps: int) -> Callable[[], None]:
    """Only the world's step, its observation and the forward pass."""
    world = make_batched_env(ENV, num_envs=64)
    world.reset()

    @torch.no_grad()
    def run() -> None:
        tokens = world.observe()["agent"]
        for _ in range(steps):
            logits, _ = policy(tokens)
            step = world.step({"agent": policy.scale(logits[..., :5])})
            if step.truncated.any():
                world.reset(step.truncated)
            tokens = world.observe()["agent"]

    return run


class BatchedVectorEnv(VectorEnv):
    """64 worlds of one learner as Gymnasium's vector env, for RLlib's own runner."""

    def __init__(self, name: str, num_envs: int = 64) -> None:
        self.world: World = make_batched_env(name, num_envs=num_envs)
        group = self.world.groups["agent"]
        self.num_envs = num_envs
        self.single_observation_space = group.tokens.space()
        self.single_action_space = group.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.ended = torch.zeros(num_envs, dtype=torch.bool)

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        """Begin all worlds anew."""
        self.world.reset()
        return self._look(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict]:
        """Advance; a world that ended begins anew at the next step."""
        begins = self.ended
        step = self.world.step({"agent": torch.as_tensor(np.stack(actions))[:, None]})
        if begins.any():
            self.world.reset(begins)
        self.ended = (step.terminated | step.truncated) & ~begins
        rewards = step.rewards["agent"][:, 0].masked_fill(begins, 0.0).numpy()
        terminated = (step.terminated & ~begins).numpy()
        truncated = (step.truncated & ~begins).numpy()
        return self._look(), rewards, terminated, truncated, {}

    def _look(self) -> dict[str, np.ndarray]:
        tokens: Tokens = self.world.observe()["agent"]
        return {k: v[:, 0].numpy() for k, v in tokens._asdict().items()}


def stock_runner(*, batched: bool, steps: int) -> Callable[[], Any]:
    """RLlib's own runner with our module, on one batched env or 64 single ones."""
    config = sampling_config(steps)
    spec = config.rl_module_spec.rl_module_specs["agent"]
    stock = type(config)()
    stock.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=64,
        rollout_fragment_length=steps // 64,
        gym_env_vectorize_mode="vector_entry_point" if batched else "sync",
    )
    stock.training(train_batch_size_per_learner=steps)
    kind = BatchedVectorEnv if batched else OneAgentView
    register_env(kind.__name__, lambda _: kind(ENV))
    stock.environment(kind.__name__)
    stock.rl_module(rl_module_spec=spec)
    runner = SingleAgentEnvRunner(config=stock, worker_index=0, num_workers=0)
    return lambda: runner.sample(num_timesteps=steps)


def iteration(size: Size) -> Iterator[Row]:
    """One iteration of 8192 steps and 16 full-batch epochs, and what it consists of."""
    config = compose("train", list(size.paper))
    algo = build(config)
    algo.train()
    policy = build_policy(
        algo.config.rl_module_spec.rl_module_specs["agent"].model_config
    )
    settings = config["ppo"]
    episodes = algo.env_runner.sample()
    learner = algo.learner_group._learner
    batch = learner._learner_connector(
        rl_module=learner.module, batch={}, episodes=episodes, shared_data={}
    )
    sample = floor_of(policy, settings["batch_size"] // settings["num_envs"])
    times, rests = [], []
    for _ in range(size.iterations):
        times.append(seconds(algo.train))
        torch.set_num_threads(1)
        pure = seconds(sample)
        torch.set_num_threads(config["threads"])
        pure += seconds(lambda: gradients(learner, batch, settings))
        rests.append(1 - pure / times[-1])
    algo.stop()
    value, rest = statistics.median(times), statistics.median(rests)
    yield Row(
        "iteration/simple_centroid",
        value,
        "s",
        "published code: 13.1 s, measured elsewhere",
        note=f"not env, forward pass or gradient: {100 * rest:.1f} %",
    )


def gradients(learner: Any, batch: dict[str, Any], settings: dict[str, Any]) -> None:
    """Forward pass, RLlib's loss and gradient of all epochs, and nothing else."""
    for _ in range(settings["num_epochs"]):
        for piece, shares in learner._pieces(batch):
            out = learner.module.forward_train(piece)
            config = learner.config
            loss = super(type(learner), learner).compute_loss_for_module(
                module_id="agent",
                config=config,
                batch=piece["agent"],
                fwd_out=out["agent"],
            )
            (loss * shares["agent"]).backward()


GOALS = {"time_to_return": -1.45, "time_to_skill": -0.72}
"""Mean returns: what the published code reached in 18 iterations, and 0.8 of the way
from random actions (-1.89) to a controller that knows the centroid (-0.43)."""
PUBLISHED = {
    "time_to_return": "published code: 234 s, one seed, measured elsewhere",
    "time_to_skill": "published code: not reached",
}


def time_to(name: str) -> Callable[[Size], Iterator[Row]]:
    """Seconds until the mean return has reached a goal at two checks in a row."""

    def measure(size: Size) -> Iterator[Row]:
        results = [climb(seed, size.limit)[name] for seed in range(size.seeds)]
        reached = sorted(result for result in results if result is not None)
        failed = size.seeds - len(reached)
        ordered = [*reached, *[(None, None)] * failed]
        seconds_, steps = ordered[(size.seeds - 1) // 2]
        note = f"return >= {GOALS[name]}; {size.seeds} seeds"
        if reached:
            note += f": {reached[0][0]:.0f} to {reached[-1][0]:.0f} s"
        if steps is not None:
            note += f", {steps:,} env steps at the median"
        note += f"; {failed} failed within {size.limit:.0f} s"
        yield Row(f"{name}/simple_centroid", seconds_, "s", PUBLISHED[name], note=note)

    return measure


@functools.cache
def climb(seed: int, limit: float) -> dict[str, tuple[float, int] | None]:
    """Train with ``ppo=fast`` until every goal is reached or the time is up.

    The clock starts before the first iteration; a check is an iteration in which
    episodes ended. Returns the seconds and env steps for each goal.
    """
    algo = build(compose("train", [f"seed={seed}"]))
    returns: list[float] = []
    result: dict[str, tuple[float, int] | None] = dict.fromkeys(GOALS)
    streaks = dict.fromkeys(GOALS, 0)
    began = time.perf_counter()
    while None in result.values() and time.perf_counter() - began < limit:
        sampled = algo.train()["env_runners"]
        finished = list(sampled.get(EPISODE_RETURNS, ()))
        returns = [*returns, *finished][-RETURN_WINDOW:]
        if not finished or len(returns) < RETURN_WINDOW:
            continue
        for name, goal in GOALS.items():
            reached = statistics.fmean(returns) >= goal
            streaks[name] = streaks[name] + 1 if reached else 0
            if streaks[name] >= 2 and result[name] is None:
                steps = int(sampled["num_env_steps_sampled_lifetime"])
                result[name] = time.perf_counter() - began, steps
    algo.stop()
    print(f"  seed {seed}: {result}", file=sys.stderr, flush=True)
    return result


def evaluation(size: Size) -> Iterator[Row]:
    """Deterministic episodes, as `marl-pool evaluate` plays them."""
    config = algorithm_config(compose("train", []))
    policy = build_policy(config.rl_module_spec.rl_module_specs["agent"].model_config)
    policy = policy.double().eval()

    def run() -> None:
        world = make_batched_env(
            ENV, num_envs=size.episodes, first_world=EVALUATION_WORLDS
        )
        play({"agent": policy}, world)

    run()
    times = [seconds(run) for _ in range(size.rounds)]
    yield Row(
        "evaluate/simple_centroid",
        statistics.median(times),
        "s",
        note=f"{size.episodes} episodes of 128 steps",
    )


def build(config: dict[str, Any]) -> Any:
    """Build an algorithm as `marl-pool train` does."""
    algo = algorithm_config(config).build_algo()
    torch.set_num_threads(config["threads"])
    return algo


BENCHMARKS: dict[str, Callable[[Size], Iterator[Row]]] = {
    "env/simple_centroid": env_alone,
    "attention/width_one": attention,
    "sample/simple_centroid": sampling,
    "iteration/simple_centroid": iteration,
    "evaluate/simple_centroid": evaluation,
    "time_to_return/simple_centroid": time_to("time_to_return"),
    "time_to_skill/simple_centroid": time_to("time_to_skill"),
}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("marl-pool", "torch", "ray")},
        "date": time.strftime("%Y-%m-%d"),
        "load_before": os.getloadavg()[0],
    }


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | value | beside | ratio |", "|---|---|---|---|"]
    for row in rows:
        value = "not reached"
        if row.value is not None:
            number = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.3g}"
            value = f"{number} {row.unit}"
        beside = "; ".join(filter(None, (row.comparator, row.note)))
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.name} | {value} | {beside} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Run the chosen benchmarks; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=None)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--tiny", action="store_true", help="check that it runs")
    parser.add_argument("--seeds", type=int, help="of the time_to rows")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else Size()
    if arguments.seeds:
        size = replace(size, seeds=arguments.seeds)
    torch.set_num_threads(2)
    about = machine()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    rows: list[Row] = []
    for name in arguments.only or BENCHMARKS:
        began = time.perf_counter()
        rows += BENCHMARKS[name](size)
        passed = duration(time.perf_counter() - began)
        print(f"{name}: {passed}", file=sys.stderr, flush=True)
    ray.shutdown()
    print(table(rows))
    if arguments.json:
        content = {"machine": about, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
