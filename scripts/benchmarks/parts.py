"""Benchmarks of attention with heads of width one, and of an evaluation."""

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import Row, Size, by_torch, compare, taking_turns
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.evaluation.cases import play
from marl_pool.kernels.narrow_attention import narrow_attention
from marl_pool.training.ppo.config import algorithm_config
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
    backward = {
        name: lambda run=run: run().backward(gradient)
        for name, run in contenders.items()
    }
    times = taking_turns(backward, size.rounds)
    scores = size.sets * 8 * 32 * 32
    ours, baseline = (
        [t / scores * 1e9 for t in durations] for durations in times.values()
    )
    yield compare(
        "attention/width_one",
        ours,
        baseline,
        "scaled_dot_product_attention",
        unit="ns a score",
        note="torch's path, without the kernel",
    )


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

    times = taking_turns({"ours": run, "torch": by_torch(run)}, size.rounds)
    yield compare(
        "evaluate/simple_centroid",
        times["ours"],
        times["torch"],
        "kernels=torch",
        note=f"{size.episodes} episodes of 128 steps",
    )
