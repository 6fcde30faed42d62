"""Measure marl_pool, with stock RLlib on the same environments as the comparator.

    python scripts/benchmark.py [--only NAME…] [--json FILE] [--device cuda] [--tiny]

Leave the machine idle. Each benchmark runs in its own process, which gives its peak
memory. Comparators run in the same process, alternating with ours, and a ratio is the
median over the rounds. A benchmark that fails is reported, and the others are still
measured and written; the exit status is then 1. `--tiny` checks that everything runs;
its numbers mean nothing.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks import kernel
from benchmarks.agents import cloning, generation
from benchmarks.common import TINY, Row, Size
from benchmarks.envs import env_alone, levels
from benchmarks.knn import data, training
from benchmarks.learning import iteration, time_to, two_learners
from benchmarks.parts import attention, evaluation
from benchmarks.robustness import standard_suite
from benchmarks.sampling import sampling, stock, two_runners
from benchmarks.sets import swarm

from marl_pool.utils.extras import install_hint
from marl_pool.utils.progress import duration

BENCHMARKS: dict[str, Callable[[Size], Iterator[Row]]] = {
    "env/simple_centroid": env_alone("simple_centroid"),
    "env/simple_tag": env_alone("simple_tag"),
    "env/boxworld_pixels": env_alone("boxworld_pixels"),
    "env/pong": env_alone("pong"),
    "levels/boxworld": levels,
    "attention/width_one": attention,
    **{f"kernel/{name}": kernel.kernel(name) for name in kernel.NETWORKS},
    "kernels/sample/simple_centroid": kernel.sampling("simple_centroid"),
    "kernels/sample/boxworld_pixels": kernel.sampling("boxworld_pixels"),
    "kernels/iteration/simple_centroid": kernel.iteration("simple_centroid", "paper"),
    "kernels/iteration/simple_centroid/fast": kernel.iteration(
        "simple_centroid", "fast"
    ),
    "kernels/iteration/boxworld_pixels": kernel.iteration("boxworld_pixels", "paper"),
    "sample/simple_centroid": stock("simple_centroid"),
    "sample/simple_tag": sampling("simple_tag"),
    "sample/boxworld_pixels": sampling("boxworld_pixels"),
    "sample/pong": sampling("pong"),
    "sample/simple_tag/two_runners": two_runners("simple_tag"),
    "sample/boxworld_pixels/two_runners": two_runners("boxworld_pixels"),
    "iteration/simple_centroid": iteration("simple_centroid"),
    "iteration/boxworld_pixels": iteration("boxworld_pixels"),
    "iteration/simple_centroid/two_learners": two_learners("simple_centroid"),
    "iteration/boxworld_pixels/two_learners": two_learners("boxworld_pixels"),
    "layer/swarm": swarm,
    "data/knn_centroid": data,
    "train/knn_centroid": training,
    "generation/cartpole": generation,
    "clone/ant": cloning,
    "evaluate/simple_centroid": evaluation,
    "suite/standard": standard_suite,
    "time_to_return/simple_centroid": time_to("time_to_return"),
    "time_to_skill/simple_centroid": time_to("time_to_skill"),
}
NEEDS = {
    "env/pong": ("ale_py",),
    "sample/pong": ("ale_py",),
    "generation/cartpole": ("cma",),
    "clone/ant": ("mujoco",),
}
"""Optional modules of single benchmarks; all of them need ray."""


class BenchmarkError(Exception):
    """The process of a benchmark ended with an error."""


def machine(device: str) -> dict[str, Any]:
    """Describe the machine, the versions and the date."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    gpu = torch.cuda.get_device_name(device) if device != "cpu" else None
    return {
        "cpu": cpu,
        "gpu": gpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("marl-pool", "torch", "ray")},
        "date": time.strftime("%Y-%m-%d"),
        "load_before": os.getloadavg()[0],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table."""
    lines = ["| what | value | beside | ratio | memory |", "|---|---|---|---|---|"]
    for row in rows:
        value = "not reached"
        if row["value"] is not None:
            number = row["value"]
            number = f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
            value = f"{number} {row['unit']}"
        beside = "; ".join(filter(None, (row["comparator"], row["note"])))
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        memory = f"{row['peak_memory_mb']:,.0f} MB"
        lines.append(f"| `{row['name']}` | {value} | {beside} | {ratio} | {memory} |")
    return "\n".join(lines)


def missing_extras(names: Sequence[str]) -> list[str]:
    """Return one line for each optional module that the benchmarks lack."""
    modules = dict.fromkeys(["ray", *(m for n in names for m in NEEDS.get(n, ()))])
    return [install_hint(m) for m in modules if importlib.util.find_spec(m) is None]


def apart(name: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run one benchmark in its own process and add its peak memory.

    Raises:
        BenchmarkError: the process ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--here", name, "--json", str(file)]
        process = os.spawnv(os.P_NOWAIT, sys.executable, [*command, *arguments])
        _, status, usage = os.wait4(process, 0)
        if status:
            raise BenchmarkError(f"exit status {os.waitstatus_to_exitcode(status)}")
        rows = json.loads(file.read_text())
    return [{**row, "peak_memory_mb": usage.ru_maxrss / 1024} for row in rows]


def here(name: str, size: Size) -> list[dict[str, Any]]:
    """Run one benchmark in this process."""
    torch.set_num_threads(2)
    return [asdict(row) for row in BENCHMARKS[name](size)]


def main() -> None:
    """Run the chosen benchmarks, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--tiny", action="store_true", help="check that it runs")
    parser.add_argument("--seeds", type=int, help="of the time_to rows")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda on a GPU machine")
    parser.add_argument("--here", choices=list(BENCHMARKS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch finds no CUDA device")
    size = replace(TINY if arguments.tiny else Size(), device=arguments.device)
    if arguments.seeds:
        size = replace(size, seeds=arguments.seeds)
    if arguments.here:
        arguments.json.write_text(json.dumps(here(arguments.here, size)))
        return
    chosen = arguments.only or list(BENCHMARKS)
    if missing := missing_extras(chosen):
        parser.error("; ".join(missing))
    about = machine(arguments.device)
    passed_on = [f"--device={arguments.device}", *["--tiny"] * arguments.tiny]
    passed_on += [f"--seeds={arguments.seeds}"] if arguments.seeds else []
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name in chosen:
        began = time.perf_counter()
        try:
            rows += apart(name, passed_on)
        except BenchmarkError as error:
            failed[name] = str(error)
        passed = failed.get(name) or duration(time.perf_counter() - began)
        print(f"{name}: {passed}", file=sys.stderr, flush=True)
        # After each benchmark, so that an interruption loses one at most.
        if arguments.json:
            content = {"machine": about, "rows": rows, "failed": failed}
            arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    print(table(rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
