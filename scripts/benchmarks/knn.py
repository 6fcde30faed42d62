"""Benchmarks of the KNN-centroid task: its data, and training."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import Row, Size, by_torch, compare, taking_turns
from marl_pool.compiled import compile_parts
from marl_pool_studies.adapool.knn_centroid import KnnCentroid
from marl_pool_studies.adapool.knn_data import (
    CHUNK,
    nearest_means,
    sample_choices,
    sample_sets,
)

VECTORS, DIM, K, BATCH, CHUNKS, DROPOUT = 128, 16, 8, 750, 120, 0.1
ENCODER = {"name": "transformer", "dim": DIM, "num_layers": 12, "dim_ff": 64}


def one_sample(generator: np.random.Generator) -> np.ndarray:
    """Sample one set feature by feature, and find the neighbors by sorting."""
    kinds = generator.permutation(np.arange(DIM) % 3)
    x = np.empty((VECTORS, DIM))
    for feature, kind in enumerate(kinds):
        sign = generator.choice([-1, 1])
        low = generator.uniform(-3, 3)
        x[:, feature] = (
            generator.normal(low, generator.uniform(1, 3), VECTORS)
            if kind == 0
            else generator.exponential(generator.uniform(0.1, 2), VECTORS) * sign
            - generator.uniform(0, 3) * sign
            if kind == 1
            else generator.uniform(low, low + generator.uniform(0.2, 3), VECTORS)
        )
    x /= DIM**0.5
    target = x[generator.integers(VECTORS)]
    order = np.linalg.norm(x - target, axis=1).argsort()
    return x[order[1 : K + 1]].mean(0)


def data(size: Size) -> Iterator[Row]:
    """Measure sampling of sets and targets, streamed by two threads."""
    chunks, samples = (1, 2) if size.tiny else (CHUNKS, 1000)

    def chunk(number: int) -> float:
        sets = sample_sets(0, number, VECTORS, DIM)
        return float(nearest_means(sets, choices, K).sum())

    def ours() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(chunk, range(chunks)))

    def loop() -> None:
        generator = np.random.default_rng(0)
        for _ in range(samples):
            one_sample(generator)

    choices = sample_choices(0, CHUNK, VECTORS)
    times = taking_turns({"ours": ours, "loop": loop}, size.rounds)
    # The loop measures fewer samples.
    scaled = [spent * chunks * CHUNK / samples for spent in times["loop"]]
    yield compare(
        "data/knn_centroid",
        times["ours"],
        scaled,
        "a numpy loop over samples",
        unit="samples/s",
        work=chunks * CHUNK,
        note=f"sets of {VECTORS} x {DIM} with targets, two threads; published code: "
        "10,000 to 15,000 samples/s, measured elsewhere",
    )


class Plain(nn.Module):
    """The same network built of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.types = nn.Embedding(2, DIM)
        layers = [
            nn.TransformerEncoderLayer(
                DIM, 8, 64, 0.0, "gelu", batch_first=True, norm_first=True, bias=True
            )
            for _ in range(12)
        ]
        for layer in layers:
            layer.dropout2.p = DROPOUT  # the only dropout of the paper
        self.layers = nn.ModuleList(layers)

    def forward(self, features: Tensor, types: Tensor) -> Tensor:
        """Map ``(B, N, d)`` to ``(B, d)``."""
        x = features + self.types(types)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


def training(size: Size) -> Iterator[Row]:
    """Measure gradient steps of the paper's network and batch, Adam included."""
    count = 2 if size.tiny else BATCH
    task = KnnCentroid(
        encoder=ENCODER,
        pooling={"name": "avg"},
        dropout=DROPOUT,
        num_samples=count + 1,
        num_test=1,
    )
    task.prepare(Path())
    rows, generator = torch.arange(count), torch.Generator()

    def step(network: nn.Module) -> Callable[[], None]:
        network = network.to(size.device).train()
        optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)

        def run() -> None:
            batch = task.batch("train", rows)
            batch = {name: part.to(size.device) for name, part in batch.items()}
            optimizer.zero_grad()
            task.evaluate(network, batch, generator).loss.backward()
            optimizer.step()

        return run

    ours = step(compile_parts(task.make_network(0)))
    contenders = {"ours": ours, "torch": by_torch(ours), "plain": step(Plain())}
    times = taking_turns(contenders, min(size.rounds, 3))
    comparators = {"torch": "kernels=torch", "plain": "nn.TransformerEncoderLayer"}
    for key, comparator in comparators.items():
        suffix = "" if key == "torch" else f"/{key}"
        yield compare(
            f"train/knn_centroid{suffix}",
            times["ours"],
            times[key],
            comparator,
            unit="samples/s",
            work=count,
            note=f"12 layers, width {DIM}, 8 heads, sets of {VECTORS}, batch {count}, "
            f"{torch.get_num_threads()} threads; published code: 285 samples/s, "
            "measured elsewhere",
        )
