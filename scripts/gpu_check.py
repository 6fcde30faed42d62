"""Check marl_pool on a GPU against the CPU, then measure it.

    python scripts/gpu_check.py [--json FILE] [--only correct|speed]

Correctness: environments, perturbations, heads and encoders give the numbers of a CPU;
no rollout step waits for the device; a short training run can be resumed and evaluated.
Speed: sampling and training on simple_centroid, compared with the aims. The exit status
is 1 if a check fails. `--device cpu --tiny` tries the script itself without a GPU: its
checks compare the branch-free code with the ordinary code.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import build, finished_returns, on, seconds, synchronize
from markdown_tables import markdown_table
from torch import Tensor
from torch.utils._pytree import tree_leaves

import marl_pool
from marl_pool.cli.main import main as run_command
from marl_pool.compiled import compile
from marl_pool.compiled.choice import use_kernels
from marl_pool.config import compose
from marl_pool.encoders import encoder_names
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.options.types import Kernels
from marl_pool.perturbations import make_perturbation, perturbation_names
from marl_pool.policies import make_policy
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.storage import load_policy
from marl_pool.pooling import pooling_names
from marl_pool.rollout import Rollout
from marl_pool.utils.devices import without_reads
from marl_pool.utils.errors import UnfitTokensError

NUM_ENVS, STEPS = 16, 24
ENVS: dict[str, dict[str, Any]] = {
    "simple_centroid": {"counts": "2-3-8"},
    "simple_tag": {"counts": "2-2-4", "prey": "learned", "obstacles_collide": True},
    "boxworld": {"random_distractors": True},
    "cartpole": {"noise_channels": 2, "num_frames": 2},
}
"""Environments of this package that are not simulators."""
SKILL = -0.72
"""Mean return on simple_centroid: 0.8 of the way from random actions to a controller
that knows the centroid."""
WINDOW = 100
"""Number of episodes in the mean return."""


@dataclass(frozen=True)
class Check:
    """One check; ``reason`` is empty where it passed."""

    name: str
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Measurement:
    """One row of the table of speeds; ``torch`` is that without kernels and graphs."""

    name: str
    value: float | None
    unit: str
    aim: float | None = None
    torch: float | None = None


# Checks


def played(
    name: str, device: str, *, sync_free: bool, kind: str | None = None
) -> list[Tensor]:
    """Play random actions, the same on every device; return all that is recorded."""
    options = {"max_steps": 9, "seed": 1, "device": device, **ENVS[name]}
    env = make_batched_env(name, NUM_ENVS, **options)
    specs = {name: group.tokens for name, group in env.groups.items()}
    perturbation = make_perturbation(kind, specs=specs) if kind else None
    policies: dict[str, Policy] = {
        role: RandomPolicy(group.action_space).to(device)
        for role, group in env.groups.items()
    }
    rollout = Rollout(env, policies, perturbation=perturbation, sync_free=sync_free)
    leaves = tree_leaves((rollout.steps(STEPS), rollout.pop_finished()))
    return [leaf.cpu() for leaf in leaves if leaf is not None]


def check_env(name: str, device: str, kind: str | None = None) -> None:
    """Compare trajectories and finished episodes with a CPU's."""
    ours = played(name, device, sync_free=True, kind=kind)
    compare(ours, played(name, "cpu", sync_free=False, kind=kind), 1e-3)


def compare(ours: list[Tensor], references: list[Tensor], tolerance: float) -> None:
    """Raise AssertionError where numbers differ by more than the tolerance."""
    for tensor, reference in zip(ours, references, strict=True):
        torch.testing.assert_close(
            tensor, reference, rtol=tolerance, atol=tolerance, equal_nan=True
        )


def some_tokens() -> tuple[BatchedEnv, Any]:
    """Return an environment and tokens, some of them padded."""
    env = make_batched_env("simple_centroid", NUM_ENVS, counts="2-3-8", seed=2)
    env.reset()
    tokens = env.observe()["agent"]
    padding = torch.rand(tokens.types.shape) < 0.3
    padding[..., 0] = False
    return env, tokens._replace(padding=padding)


def check_network(device: str, options: Mapping[str, Any]) -> None:
    """Compare outputs and gradients in float64 with a CPU's."""
    torch.manual_seed(0)
    env, tokens = some_tokens()
    group = env.groups["agent"]
    results = []
    for where in ("cpu", device):
        policy = make_policy(group.tokens, group.action_space, seed=0, **options)
        policy = compile(policy.double().to(where))
        logits, values = policy(tokens.map(lambda part, where=where: part.to(where)))
        (logits.square().sum() + values.sum()).backward()
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad
            for p in policy.parameters()
        ]
        results.append([part.detach().cpu() for part in (logits, values, *gradients)])
    compare(results[1], results[0], 1e-6)


@contextmanager
def errors_at_reads(device: str) -> Iterator[None]:
    """Let CUDA raise an error where the host would wait for it."""
    if device == "cpu":
        with without_reads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def exploring(
    env: BatchedEnv, parts: Mapping[str, Any] = {}, **options: Any
) -> Rollout:
    """Return a rollout of untrained policies on the device of the environment."""
    policies = {
        role: make_policy(group.tokens, group.action_space, seed=0, **parts)
        for role, group in env.groups.items()
    }
    on_device = {role: policy.to(env.device) for role, policy in policies.items()}
    return Rollout(env, on_device, explore=True, **options)


def check_reads(name: str, device: str) -> None:
    """Step without waiting for the device, once constants have been copied."""
    env = make_batched_env(name, NUM_ENVS, max_steps=4, device=device, **ENVS[name])
    rollout = exploring(env, sync_free=True)
    rollout.uses_graph = False
    rollout.steps(2)
    with torch.no_grad(), errors_at_reads(device):
        rollout._play(6)


def check_graph(name: str, device: str) -> None:
    """Compare steps that are launched as a CUDA graph with the same, one by one."""
    results = []
    for uses_graph in (True, False):
        env = make_batched_env(name, NUM_ENVS, max_steps=9, device=device, **ENVS[name])
        rollout = exploring(env, sync_free=True)
        rollout.uses_graph &= uses_graph
        parts = [rollout.steps(8) for _ in range(3)]
        # A graph reads the weights anew, as learners change them in place.
        with torch.no_grad():
            for policy in rollout.policies.values():
                for parameter in policy.parameters():
                    parameter.add_(0.1)
        parts.append(rollout.steps(8))
        assert rollout.uses_graph == (uses_graph and device != "cpu")
        results.append(tree_leaves((parts, rollout.pop_finished())))
    compare(results[0], results[1], 1e-5)


class Trained:
    """Short training runs: an uninterrupted one, and one stopped and resumed."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder

    def overrides(self, steps: int) -> list[str]:
        """Return the settings of a training run of some iterations of 256 steps."""
        small = ["ppo.num_envs=16", "ppo.batch_size=256", "ppo.minibatch_size=128"]
        lengths = ["env.max_steps=8", "checkpoint.every=1", f"total_steps={steps}"]
        return ["experiment=simple_centroid", "ppo=fast", *small, *lengths]

    def train(self) -> None:
        """Train, and check that the weights are finite."""
        run = self.folder / "whole"
        marl_pool.train(*self.overrides(1024), *on(self.device), run_dir=run)
        weights = load_policy(run / "policy").state_dict().values()
        assert all(bool(part.isfinite().all()) for part in weights)

    def resume(self) -> None:
        """Compare a resumed run with the uninterrupted one."""
        run = self.folder / "resumed"
        marl_pool.train(*self.overrides(512), *on(self.device), run_dir=run)
        assert run_command(["resume", str(run), "total_steps=1024"]) == 0
        resumed, whole = (
            list(load_policy(self.folder / name / "policy").state_dict().values())
            for name in ("resumed", "whole")
        )
        # A GPU sums gradients in any order.
        compare(resumed, whole, 0.0 if self.device == "cpu" else 1e-3)

    def evaluate(self) -> None:
        """Compare the returns of an evaluation with those on a CPU."""
        policy = load_policy(self.folder / "whole" / "policy")
        env = {"name": "simple_centroid", "max_steps": 8}
        suite: dict[str, list[str]] = {"perturbations": []}
        ours, reference = (
            marl_pool.evaluate(policy, env, suite=suite, episodes=16, device=device)
            for device in (self.device, "cpu")
        )
        compare([torch.tensor(ours.returns)], [torch.tensor(reference.returns)], 1e-6)


def checks(device: str, folder: Path, *, tiny: bool) -> dict[str, Callable[[], None]]:
    """Return the checks by name."""
    heads, encoders = pooling_names(), encoder_names()
    kinds = perturbation_names()
    if tiny:
        heads, encoders, kinds = heads[:2], encoders[:2], kinds[:3]
    by_name: dict[str, Callable[[], None]] = {}
    for name in ENVS:
        by_name[f"env/{name}"] = partial(check_env, name, device)
        by_name[f"no_waiting/{name}"] = partial(check_reads, name, device)
        by_name[f"graph/{name}"] = partial(check_graph, name, device)
    for kind in kinds:
        by_name[f"perturbation/{kind}"] = partial(
            check_env, "simple_centroid", device, kind
        )
    for head in heads:
        by_name[f"head/{head}"] = partial(check_network, device, {"pooling": head})
    for encoder in encoders:
        options = {"encoder": encoder, "pooling": "avg"}
        by_name[f"encoder/{encoder}"] = partial(check_network, device, options)
    trained = Trained(device, folder)
    return {
        **by_name,
        "training": trained.train,
        "resume": trained.resume,
        "evaluation": trained.evaluate,
    }


def perform(name: str, check: Callable[[], None]) -> Check | None:
    """Run one check, which fails by any exception; None if the tokens do not fit."""
    began = time.perf_counter()
    reason = ""
    try:
        check()
    except UnfitTokensError as error:
        print(f"left out  {name}: {error}", file=sys.stderr, flush=True)
        return None
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    done = Check(name, time.perf_counter() - began, reason)
    print(f"{'failed' if reason else 'passed'}  {name}", file=sys.stderr, flush=True)
    return done


# Measurements


def networks(device: str, *, tiny: bool) -> Iterator[Measurement]:
    """Measure networks of the presets, forward and backward, on observed sets."""
    rows = 64 if tiny else 16_384
    for name in ("simple_centroid", "simple_tag", "boxworld"):
        settings = compose("train", [f"experiment={name}"])
        env = make_batched_env(num_envs=rows, device=device, **settings["env"])
        role, group = next(iter(env.groups.items()))
        parts = {key: settings[key] for key in ("encoder", "pooling")}
        policy = make_policy(group.tokens, group.action_space, seed=0, **parts)
        env.reset()
        tokens = env.observe()[role].map(lambda part: part[:rows, 0])
        network = compile(policy.network.to(device))
        weights = list(network.parameters())

        def both(
            network: Any = network, tokens: Any = tokens, parameters: Any = weights
        ) -> Any:
            return torch.autograd.grad(network(tokens).square().sum(), parameters)

        times: dict[Kernels, list[float]] = {"auto": [], "torch": []}
        for _ in range(2 if tiny else 9):
            for kernels, durations in times.items():
                with use_kernels(kernels):
                    durations.append(1e3 * seconds(both))
        ours, torchs = (
            sorted(durations)[len(durations) // 2] for durations in times.values()
        )
        yield Measurement(
            f"{name}'s network, {rows:,} sets, both ways", ours, "ms", torch=torchs
        )


def sampling(device: str, *, tiny: bool) -> Measurement:
    """Measure sampling alone: 8192 environments of simple_centroid."""
    num_envs, steps = (8, 2) if tiny else (8192, 64)
    settings = compose("train", ["experiment=simple_centroid"])
    parts = {key: settings[key] for key in ("encoder", "pooling")}

    def rate(kernels: Kernels) -> float:
        env = make_batched_env(num_envs=num_envs, device=device, **settings["env"])
        rollout = exploring(env, parts)
        rollout.uses_graph &= kernels == "auto"
        with use_kernels(kernels):
            rollout.steps(steps)
            times = [seconds(lambda: rollout.steps(steps)) for _ in range(4)]
        return num_envs * steps / sorted(times[1:])[1]

    torchs = rate("torch")
    return Measurement("sampled", rate("auto"), "env steps/s", 1e6, torchs)


def training(device: str, *, tiny: bool) -> Iterator[Measurement]:
    """Measure training with ``ppo=gpu``: its rate, and the times to steps and skill."""
    goal, small = 4_000_000, list[str]()
    if tiny:
        goal = 512
        small = ["ppo.num_envs=16", "ppo.batch_size=256", "ppo.minibatch_size=128"]
        small += ["env.max_steps=8"]
    config = compose(
        "train", ["experiment=simple_centroid", "ppo=gpu", *small, *on(device)]
    )
    algo = build(config)
    algo.train()  # the first iteration chooses kernels
    returns: list[float] = []
    skill: float | None = None
    batch, began, steps = config["ppo"]["batch_size"], time.perf_counter(), 0
    while steps < goal:
        sampled = algo.train()["env_runners"]
        steps += batch
        returns = [*returns, *finished_returns(sampled, "agent")][-WINDOW:]
        reached = len(returns) == WINDOW and sum(returns) / WINDOW >= SKILL
        if skill is None and reached:
            skill = time.perf_counter() - began
    synchronize()
    spent = time.perf_counter() - began
    algo.stop()
    yield Measurement("trained", steps / spent, "env steps/s", 3e5)
    yield Measurement(f"{goal:,} steps of training", spent, "s", 30.0)
    yield Measurement("time to skill", skill, "s", 15.0)


def table(rows: list[Measurement]) -> str:
    """Format the measurements as a Markdown table."""
    lines = []
    for row in rows:
        numbers = (row.value, row.torch, row.aim)
        cells = ["" if n is None else f"{n:,.4g} {row.unit}" for n in numbers]
        cells[0] = cells[0] or "not reached"
        lines.append([row.name, *cells])
    return markdown_table(["what", "value", "torch alone", "aim"], lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and the measurements; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it")
    parser.add_argument("--only", choices=["correct", "speed"])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--tiny", action="store_true", help="few checks, no real sizes")
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no CUDA device")
    done: list[Check] = []
    left_out = 0
    rows: list[Measurement] = []
    if options.only != "speed":
        with tempfile.TemporaryDirectory() as folder:
            selected = checks(options.device, Path(folder), tiny=options.tiny)
            performed = [perform(name, check) for name, check in selected.items()]
        done = [check for check in performed if check is not None]
        left_out = len(performed) - len(done)
    if options.only != "correct":
        rows = list(networks(options.device, tiny=options.tiny))
        rows.append(sampling(options.device, tiny=options.tiny))
        rows += training(options.device, tiny=options.tiny)
        print(table(rows))
    failed = [check for check in done if check.reason]
    for check in failed:
        print(f"{check.name}: {check.reason}")
    print(
        f"{len(done) - len(failed)} of {len(done)} checks passed, {left_out} left out"
    )
    if options.json:
        content = {
            "device": describe(options.device),
            "checks": [asdict(check) for check in done],
            "speed": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if failed else 0


def describe(device: str) -> str:
    """Return the name of the device and torch's version."""
    name = device if device == "cpu" else torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
