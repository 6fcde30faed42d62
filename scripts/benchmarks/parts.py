"""Benchmarks of attention with heads of width one, and of an evaluation."""

import statistics
from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import Row, Size, seconds
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.evaluation.episodes import play
from marl_pool.kernels.narrow_attention import narrow_attention
from marl_pool.training.ppo.algorithm import algorithm_config
from marl_pool.training.ppo.module import build_policy
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.randomness import EVALUATION_ENVS


def attention(size: Size) -> Iterator[Row]:
    """Measure attention with heads of width one, forward and backward."""
    shape = (size.sets, 32, 8, 1)
    query, key, value = (
        torch.randn(shape, device=size.device).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    scale = 8**-0.5
    contenders = {
        "ours": lambda: narrow_attention(query, key, value, None, scale),
        "torch": lambda: scaled_dot_product_attention(query, key, value, scale=scale),
    }
    gradient = torch.ones(size.sets, 8, 32, 1, device=size.device)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 + size.rounds):
        for name, contender in contenders.items():
            passed = seconds(lambda run=contender: run().backward(gradient))
            times[name].append(passed / (size.sets * 8 * 32 * 32) * 1e9)
    ours, theirs = times["ours"][1:], times["torch"][1:]
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    comparator = (
        f"scaled_dot_product_attention: {statistics.median(theirs):.2f} ns a score"
    )
    value_ = statistics.median(ours)
    yield Row("attention/width_one", value_, "ns a score", comparator, ratio)


def evaluation(size: Size) -> Iterator[Row]:
    """Measure deterministic episodes, as `marl-pool evaluate` plays them."""
    settings = compose("train", [])
    (spec,) = algorithm_config(
        TrainConfig.from_plain(settings)
    ).rl_module_spec.rl_module_specs.values()
    policy = build_policy(spec.model_config).double().eval().to(size.device)

    def run() -> None:
        env = make_batched_env(
            num_envs=size.episodes,
            first_env=EVALUATION_ENVS,
            device=size.device,
            **settings["env"],
        )
        play({"agent": policy}, env)

    run()
    times = [seconds(run) for _ in range(size.rounds)]
    yield Row(
        "evaluate/simple_centroid",
        statistics.median(times),
        "s",
        note=f"{size.episodes} episodes of 128 steps",
    )
