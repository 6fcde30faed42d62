"""Benchmarks of the compiled kernel: whole networks, compared with torch."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import TASKS, Row, Size, build, on, seconds
from benchmarks.sampling import our_runner
from marl_pool.config import compose
from marl_pool.kernels.native import use_kernels
from marl_pool.networks import SetNetwork
from marl_pool.tokens import Tokens, TokenSpec

ROUNDS = 7


@dataclass(frozen=True)
class Network:
    """Sizes of a network and of its batch."""

    dim: int
    layers: int
    heads: int
    tokens: int
    features: int = 4
    types: int = 3
    rows: int = 1024
    dtype: torch.dtype = torch.float32
    padded: float = 0.0

    def build(self) -> SetNetwork:
        """Build the network, with noise where initial weights are 0 or 1."""
        names = tuple(f"type {i}" for i in range(self.types))
        encoder = {
            "name": "transformer",
            "dim": self.dim,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "dim_ff": 4 * self.dim,
        }
        network = SetNetwork(
            TokenSpec(self.tokens, self.features, names),
            encoder=encoder,
            pooling={"name": "ada", "num_heads": self.heads},
            type_embedding=4 if self.types > 1 else 0,
            input_activation="gelu",
            init_std=0.2,
            seed=0,
        )
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        return network.to(self.dtype)

    def batch(self, rows: int) -> Tokens:
        """Sample sets of tokens."""
        generator = torch.Generator().manual_seed(0)
        shape = (rows, self.tokens)
        features = torch.randn(*shape, self.features, generator=generator)
        types = torch.randint(0, self.types, shape, generator=generator)
        padding = torch.rand(shape, generator=generator) < self.padded
        return Tokens(features.to(self.dtype), types, padding)


CENTROID = {"dim": 8, "layers": 3, "heads": 8, "tokens": 32}
NETWORKS = {
    "simple_centroid": Network(**CENTROID),
    "simple_tag": Network(dim=3, layers=6, heads=3, tokens=32),
    "boxworld": Network(dim=6, layers=6, heads=6, tokens=8, features=6, types=1),
    "boxworld_50": Network(dim=6, layers=6, heads=6, tokens=50, features=6, types=1),
    "width_16": Network(dim=16, layers=3, heads=4, tokens=32),
    "width_32": Network(dim=32, layers=3, heads=4, tokens=32),
    "width_64": Network(dim=64, layers=3, heads=4, tokens=32),
    "simple_centroid/64_rows": Network(**CENTROID, rows=64),
    "simple_centroid/float64": Network(**CENTROID, dtype=torch.float64),
    "simple_centroid/padded": Network(**CENTROID, padded=0.25),
}


def kernel(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure microseconds per token of a network, in CPU time of one thread."""
    network = NETWORKS[name]

    def measure(size: Size) -> Iterator[Row]:
        torch.set_num_threads(1)
        module = network.build()
        tokens = network.batch(min(network.rows, 16 * size.sets))
        count = tokens.types.numel()
        repeat = 1 if size.tiny else max(1, 2**17 // count)

        def forward() -> None:
            with torch.no_grad():
                module(tokens)

        def both() -> None:
            module.zero_grad()
            module(tokens).sum().backward()

        for what, function in (("forward", forward), ("both", both)):
            times: dict[str, list[float]] = {"native": [], "torch": []}
            for _ in range(1 + (1 if size.tiny else ROUNDS)):
                for kernels, found in times.items():
                    with use_kernels(kernels):  # type: ignore[arg-type]
                        began = time.process_time()
                        for _ in range(repeat):
                            function()
                        passed = time.process_time() - began
                    found.append(passed / repeat / count * 1e6)
            ours, torchs = (found[1:] for found in times.values())
            ratios = (b / a for a, b in zip(ours, torchs, strict=True))
            yield Row(
                f"kernel/{name}/{what}",
                statistics.median(ours),
                "µs a token",
                f"by torch: {statistics.median(torchs):.3g} µs",
                statistics.median(ratios),
                note=f"{len(tokens.types)} rows, one thread",
            )

    return measure


def beside_torch(run: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Time ``run`` with the kernel and with torch in turn, in seconds."""
    times: dict[str, list[float]] = {"native": [], "torch": []}
    for round_ in range(1 + rounds):
        for kernels, found in times.items():
            with use_kernels(kernels):  # type: ignore[arg-type]
                passed = seconds(run)
            if round_:
                found.append(passed)
    return times


def row(name: str, times: dict[str, list[float]], note: str) -> Row:
    """Describe times in seconds, beside those of torch."""
    pairs = zip(times["native"], times["torch"], strict=True)
    return Row(
        name,
        statistics.median(times["native"]),
        "s",
        f"with kernels=torch: {statistics.median(times['torch']):.3g} s",
        statistics.median(torchs / ours for ours, torchs in pairs),
        note=note,
    )


def sampling(name: str) -> Callable[[Size], Iterator[Row]]:
    """One fragment of our runner, by the kernel and by torch."""
    task = TASKS[name]

    def measure(size: Size) -> Iterator[Row]:
        run, _ = our_runner(task, size)
        times = beside_torch(run, size.rounds)
        steps = f"{task.fragment(size)} steps of {task.num_envs} environments"
        yield row(f"kernels/sample/{name}", times, steps)

    return measure


def iteration(name: str, ppo: str) -> Callable[[Size], Iterator[Row]]:
    """One iteration of training, by the kernel and by torch."""
    task = TASKS[name]

    def measure(size: Size) -> Iterator[Row]:
        config = task.iteration(size)
        if ppo == "fast":
            few = ["ppo.batch_size=256", "ppo.minibatch_size=null"]
            tiny = [*few, "ppo.num_epochs=1"] if size.tiny else []
            overrides = [*task.overrides, "ppo=fast", *tiny, *on(size.device)]
            config = compose("train", overrides)
        algo = build(config)
        times = beside_torch(algo.train, min(size.iterations, 3))
        algo.stop()
        settings = config["ppo"]
        what = f"{settings['batch_size']} steps, {settings['num_epochs']} epochs"
        yield row(f"kernels/iteration/{name}/{ppo}", times, what)

    return measure
