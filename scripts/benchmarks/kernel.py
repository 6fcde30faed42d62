"""Benchmarks of the compiled kernel: whole networks, compared with torch."""

import copy
import ctypes
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import ray
import torch

from benchmarks.common import Row, Size, Task, build, compare, random_actions, task_of
from marl_pool.compiled import compile
from marl_pool.compiled.choice import use_kernels
from marl_pool.compiled.native import call
from marl_pool.config import compose
from marl_pool.networks.set_network import SetNetwork
from marl_pool.options.types import Kernels
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.devices import without_denormals
from marl_pool.utils.errors import InputError


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
    level: str = ""
    """Instruction set of the kernel, as "v3"; empty for the machine's own."""

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
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return network.to(self.dtype)

    def batch(self, rows: int) -> Tokens:
        """Sample sets of tokens."""
        generator = torch.Generator().manual_seed(0)
        shape = (rows, self.tokens)
        features = torch.randn(*shape, self.features, generator=generator)
        types = torch.randint(0, self.types, shape, generator=generator)
        padding = torch.rand(shape, generator=generator) < self.padded
        return Tokens(features.to(self.dtype), types, padding)


CENTROID = Network(dim=8, layers=3, heads=8, tokens=32)
NETWORKS = {
    "simple_centroid": CENTROID,
    "simple_tag": Network(dim=3, layers=6, heads=3, tokens=32),
    "boxworld": Network(dim=6, layers=6, heads=6, tokens=8, features=6, types=1),
    "boxworld_50": Network(dim=6, layers=6, heads=6, tokens=50, features=6, types=1),
    "width_16": Network(dim=16, layers=3, heads=4, tokens=32),
    "width_32": Network(dim=32, layers=3, heads=4, tokens=32),
    "width_64": Network(dim=64, layers=3, heads=4, tokens=32),
    "simple_centroid/64_rows": replace(CENTROID, rows=64),
    "simple_centroid/float64": replace(CENTROID, dtype=torch.float64),
    "simple_centroid/padded": replace(CENTROID, padded=0.25),
    "simple_centroid/avx2": replace(CENTROID, level="v3"),
    "width_16/avx2": Network(dim=16, layers=3, heads=4, tokens=32, level="v3"),
    "width_64/avx2": Network(dim=64, layers=3, heads=4, tokens=32, level="v3"),
}


TRAINED = {
    "simple_centroid": "simple_centroid",
    "simple_tag": "simple_tag",
    "boxworld_50": "boxworld_pixels",
}
"""Tasks whose networks are also measured with trained weights."""
RANGES = (1, 2, 4, 8)
"""Ranges of the scores that the kernel has a polynomial for."""


def kernel(name: str, *, trained: bool = False) -> Callable[[Size], Iterator[Row]]:
    """Measure microseconds per token of a network, in CPU time of one thread."""
    network = NETWORKS[name]

    def measure(size: Size) -> Iterator[Row]:
        rows = min(network.rows, 16 * size.sets)
        if trained:
            on_cpu = replace(size, device="cpu")
            module, tokens, remark = train(task_of(TRAINED[name], size), rows, on_cpu)
            yield from passes(f"kernel/{name}/trained", module, tokens, size, remark)
        else:
            module, tokens = network.build(), network.batch(rows)
            with kernel_for(network.level):
                remark = "torch keeps AVX-512" if network.level else ""
                yield from passes(f"kernel/{name}", module, tokens, size, remark)

    return measure


def denormals(size: Size) -> Iterator[Row]:
    """Measure torch with denormal numbers rounded to 0, and with them kept.

    Of a wide network, and of a softmax of scores with a standard deviation of 40.
    """
    torch.set_num_threads(1)
    network = Network(dim=128, layers=2, heads=4, tokens=128, rows=min(32, size.sets))
    module, tokens = network.build(), network.batch(network.rows)
    scores = 40 * torch.randn(network.rows, network.tokens, network.tokens)

    def both() -> None:
        module.zero_grad()
        module(tokens).sum().backward()

    def softmax() -> None:
        for _ in range(1 if size.tiny else 100):
            scores.softmax(-1)

    for name, function, count, unit in (
        ("width_128", both, tokens.types.numel(), "µs a token"),
        ("softmax", softmax, 100 * scores.numel() / 1000, "ns a score"),
    ):
        times: dict[str, list[float]] = {"flushed": [], "kept": []}
        for _ in range(1 + size.rounds):
            for kind, context in (
                ("flushed", without_denormals()),
                ("kept", nullcontext()),
            ):
                with use_kernels("torch"), context:
                    began = time.process_time()
                    function()
                    times[kind].append((time.process_time() - began) / count * 1e6)
        yield compare(
            f"denormals/{name}",
            times["flushed"][1:],
            times["kept"][1:],
            "denormal numbers kept",
            unit=unit,
            note="kernels=torch, one thread",
        )


@contextmanager
def kernel_for(level: str) -> Iterator[None]:
    """Use the kernel that was compiled for an instruction set; "" for the machine's."""
    if not level:
        yield
        return
    paths = {path.stem: path for path in call._libraries()}
    if f"kernel-{level}" not in paths:
        built = ", ".join(sorted(paths)) or "none"
        raise InputError(f"kernel: expected kernel-{level}, got {built}")
    kernel, original = ctypes.CDLL(str(paths[f"kernel-{level}"])), call.library
    call.library = functools.cache(lambda: kernel)
    try:
        yield
    finally:
        call.library = original


def passes(
    name: str, module: SetNetwork, tokens: Tokens, size: Size, remark: str = ""
) -> Iterator[Row]:
    """Measure the forward pass alone, and with the backward pass."""
    torch.set_num_threads(1)
    module = compile(module)
    count = tokens.types.numel()
    repeat = 1 if size.tiny else max(1, 2**16 // count)

    def forward() -> None:
        with torch.no_grad():
            module(tokens)

    def both() -> None:
        module.zero_grad()
        module(tokens).sum().backward()

    def microseconds(kernels: Kernels, function: Callable[[], None]) -> float:
        with use_kernels(kernels):
            began = time.process_time()
            for _ in range(repeat):
                function()
            return (time.process_time() - began) / repeat / count * 1e6

    note = "; ".join(filter(None, (f"{len(tokens.types)} rows, one thread", remark)))
    for direction, function in (("forward", forward), ("both", both)):
        ours: list[float] = []
        torchs: list[float] = []
        for _ in range(1 + size.rounds):
            ours.append(microseconds("native", function))
            torchs.append(microseconds("torch", function))
        beside = ours[1:], torchs[1:], "kernels=torch"
        yield compare(f"{name}/{direction}", *beside, unit="µs a token", note=note)


def train(task: Task, rows: int, size: Size) -> tuple[SetNetwork, Tokens, str]:
    """Train a policy briefly; return its network, observations and a description.

    The weights determine which polynomial computes attention: the larger its scores,
    the higher the degree.
    """
    batch = task.num_envs * min(32, task.fragment(size))
    overrides = [f"ppo.num_envs={task.num_envs}", f"ppo.batch_size={batch}"]
    overrides += ["ppo.minibatch_size=null"] if size.tiny else []
    algo = build(compose("train", [*task.with_ppo("fast"), *overrides]))
    for _ in range(size.trained_iterations):
        algo.train()
    (module,) = dict(algo.env_runner.module.items()).values()
    network = copy.deepcopy(module.policy.network)
    algo.stop()
    ray.shutdown()  # its threads would be part of the process's CPU time
    # Observations of as many steps as give the rows.
    env = task.make_env(size)
    observations: list[Tokens] = []
    while sum(len(tokens.types) for tokens in observations) < rows:
        (tokens,) = env.observe().values()
        observations.append(tokens.flatten_batch())
        env.step(random_actions(env))
    tokens = Tokens(
        *(
            torch.cat(parts)[:rows]
            for parts in zip(*(sets.parts for sets in observations), strict=True)
        )
    )
    steps = batch * size.trained_iterations
    return network, tokens, f"after {steps:,} env steps; {describe_ranges(network)}"


def describe_ranges(network: SetNetwork) -> str:
    """Count the heads of width one by the range of their scores, as the kernel does."""
    counts: Counter[str] = Counter()
    for layer in network.encoder.layers:
        norm, attention = layer.attention_norm, layer.attention
        query, key = (
            (part.weight * norm.weight).detach()
            for part in (attention.to_query, attention.to_key)
        )
        # A normalized vector has norm √D at most, and is orthogonal to ones.
        largest, largest_key = (
            (part - part.mean(1, keepdim=True)).norm(dim=1) * part.shape[1] ** 0.5
            for part in (query, key)
        )
        largest += (attention.to_query.weight @ norm.bias).detach().abs()
        bounds = largest * largest_key * attention.scale
        for bound in bounds.tolist():
            fitting = [f"{limit}" for limit in RANGES if bound <= limit]
            counts[fitting[0] if fitting else "more"] += 1
    ranges = [*map(str, RANGES), "more"]
    parts = (f"{counts[limit]} up to {limit}" for limit in ranges if counts[limit])
    return f"heads by largest score: {', '.join(parts)}"
