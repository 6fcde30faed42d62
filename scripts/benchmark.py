"""Measure marl_pool, compared with torch without the kernel and with stock RLlib.

    python scripts/benchmark.py [--only NAME…] [--skip NAME…] [--json FILE] [--tiny]
    python scripts/benchmark.py --table FILE…

Leave the machine idle. Each benchmark runs in its own process, which gives its peak
memory. Comparators run in the same process, alternating with ours, and a ratio is the
median over the rounds. The first comparator is `kernels=torch` where the compiled
kernel takes part. A benchmark that fails is reported, and the others are still
measured and written; the exit status is then 1. `--tiny` checks that everything runs;
its numbers mean nothing. With `--device cuda`, rows that measure code for a CPU are
left out.
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
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks import kernel
from benchmarks.agents import cloning, generation
from benchmarks.common import TINY, Row, Size, number
from benchmarks.envs import MODULES, env_alone, levels, workers
from benchmarks.install import installation
from benchmarks.knn import data, training
from benchmarks.learning import (
    iteration,
    iteration_of_critic,
    time_to_goals,
    two_learners,
)
from benchmarks.parts import attention, evaluation
from benchmarks.robustness import standard_suite
from benchmarks.sampling import sampling, two_runners
from benchmarks.sets import swarm
from benchmarks.skills import SKILLS, time_to_skill
from markdown_tables import markdown_table

from marl_pool.compiled.choice import describe_kernels
from marl_pool.utils.errors import install_hint
from marl_pool.utils.progress import duration

BENCHMARKS: dict[str, Callable[[Size], Iterator[Row]]] = {
    "env/simple_centroid": env_alone("simple_centroid"),
    "env/simple_tag": env_alone("simple_tag"),
    "env/boxworld_pixels": env_alone("boxworld_pixels"),
    "env/pong": env_alone("pong"),
    **{f"env/pettingzoo_workers/{name}": workers(name) for name in MODULES},
    "levels/boxworld": levels,
    "attention/width_one": attention,
    **{f"kernel/{name}": kernel.kernel(name) for name in kernel.NETWORKS},
    **{
        f"kernel/{name}/trained": kernel.kernel(name, trained=True)
        for name in kernel.TRAINED
    },
    "denormals": kernel.denormals,
    "sample/simple_centroid": sampling("simple_centroid", with_stock=True),
    "sample/simple_tag": sampling("simple_tag"),
    "sample/simple_spread": sampling("simple_spread"),
    "sample/boxworld_pixels": sampling("boxworld_pixels"),
    "sample/pong": sampling("pong"),
    "sample/simple_tag/two_runners": two_runners("simple_tag"),
    "sample/boxworld_pixels/two_runners": two_runners("boxworld_pixels"),
    "iteration/simple_centroid": iteration("simple_centroid"),
    "iteration/simple_centroid/fast": iteration("simple_centroid", "fast"),
    "iteration/boxworld_pixels": iteration("boxworld_pixels"),
    "iteration/own_critic": iteration_of_critic("own"),
    "iteration/set_critic": iteration_of_critic("set"),
    "iteration/simple_centroid/two_learners": two_learners("simple_centroid"),
    "iteration/boxworld_pixels/two_learners": two_learners("boxworld_pixels"),
    "layer/swarm": swarm,
    "data/knn_centroid": data,
    "train/knn_centroid": training,
    "generation/cartpole": generation,
    "clone/ant": cloning,
    "evaluate/simple_centroid": evaluation,
    "suite/standard": standard_suite,
    "install/wheel": installation,
    "time_to_skill/simple_centroid": time_to_goals,
    **{f"time_to_skill/{name}": time_to_skill(name) for name in SKILLS},
}
NEEDS = {
    "env/pong": ("ale_py",),
    "env/pettingzoo_workers/simple_spread": ("mpe2",),
    "env/pettingzoo_workers/multiwalker": ("Box2D",),
    "env/pettingzoo_workers/knights_archers_zombies": ("pygame",),
    "sample/pong": ("ale_py",),
    "generation/cartpole": ("cma",),
    "clone/ant": ("mujoco",),
}
"""Optional modules of single benchmarks; all of them need ray."""
AIMS = {
    **dict.fromkeys(("env/simple_centroid", "env/simple_tag"), "300 000"),
    "env/boxworld_pixels": "300 000",
    "levels/boxworld": "20 000",
    "kernel/simple_centroid/forward": "11.9 ×",
    "kernel/simple_centroid/both": "7.7 ×",
    "kernel/simple_tag/forward": "25.5 ×",
    "kernel/simple_tag/both": "13.6 ×",
    "kernel/boxworld/forward": "21.3 ×",
    "kernel/boxworld/both": "10.2 ×",
    "kernel/boxworld_50/forward": "17.9 ×",
    "kernel/boxworld_50/both": "14.5 ×",
    "kernel/width_16/both": "3 ×",
    "kernel/width_32/both": "2.2 ×",
    "kernel/width_64/both": "1.4 ×",
    "kernel/simple_centroid/64_rows/forward": "20.4 ×",
    "kernel/simple_centroid/float64/forward": "6 to 8.5 ×",
    "sample/simple_centroid": "3.5 ×",
    "sample/simple_centroid/stock_batched": "1.4 ×",
    "sample/boxworld_pixels": "4 ×",
    "sample/simple_tag/two_runners": "20 000",
    "sample/boxworld_pixels/two_runners": "8 000",
    "iteration/simple_centroid": "5 ×, the rest 5 %",
    "iteration/simple_centroid/fast": "4 ×, the rest 15 %",
    "iteration/boxworld_pixels": "6 ×, the rest 5 %",
    "generation/cartpole": "1.2 s, 50 ×",
    "layer/swarm": "1.5 ×",
    "clone/ant": "5 ×",
    "data/knn_centroid": "60 000 samples/s",
    "train/knn_centroid": "2.5 ×",
    "evaluate/simple_centroid": "5 s",
    "suite/standard": "2.5 ×, 2 GiB",
    "install/time": "+30 s",
    "install/wheel": "+2 MB",
    "install/import": "+0 s",
    "time_to_return/simple_centroid": "30 s",
    "time_to_skill/simple_centroid": "3.5 ×",
    "time_to_skill/simple_centroid/converged": "1 min",
    "time_to_skill/simple_centroid/four_agents": "2 min",
    "time_to_skill/simple_tag": "1 min",
    "time_to_skill/boxworld": "15 min",
    "time_to_skill/boxworld_pixels": "45 min",
    "time_to_skill/cartpole": "5 min",
}
"""Aims by row, as the table shows them; a factor refers to the column ratio. Trained
weights have the aims of initial ones."""
CPU_ONLY = ("attention/", "data/", "denormals", "install/", "kernel/")
"""Prefixes of the names of rows that measure code for a CPU."""


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
        "kernels": describe_kernels(device),
        "python": platform.python_version(),
        **{name: version(name) for name in ("marl-pool", "torch", "ray")},
        "date": time.strftime("%Y-%m-%d"),
        "load_before": os.getloadavg()[0],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table."""
    lines = []
    for row in rows:
        cells = [
            f"`{row['name']}`",
            "not reached",
            "; ".join(filter(None, (row["comparator"], row["note"]))),
            "" if row["ratio"] is None else f"{row['ratio']:.3g}",
            AIMS.get(row["name"].replace("/trained", ""), ""),
            f"{row['peak_memory_mb']:,.0f} MB",
        ]
        if row["value"] is not None:
            cells[1] = f"{number(row['value'])} {row['unit']}"
        lines.append(cells)
    columns = ("what", "value", "beside", "ratio", "aim", "memory")
    return markdown_table(columns, lines)


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the rows of files; a row of a later file replaces an earlier one."""
    contents = [json.loads(file.read_text())["rows"] for file in files]
    return list({row["name"]: row for rows in contents for row in rows}.values())


def matching(patterns: Sequence[str]) -> list[str]:
    """Return the benchmarks that match shell-style patterns, in their order.

    Raises:
        ValueError: none matches one of the patterns.
    """
    matches: list[str] = []
    for pattern in patterns:
        names = [name for name in BENCHMARKS if fnmatchcase(name, pattern)]
        if not names:
            choices = ", ".join(BENCHMARKS)
            raise ValueError(f"no benchmark {pattern}; expected some of {choices}")
        matches += names
    return list(dict.fromkeys(matches))


def uses(name: str, device: str) -> bool:
    """Return True if the benchmark measures something on the device."""
    if device == "cpu":
        return True
    # Processes of runners have no GPU, and each learner needs a whole one.
    if name.endswith("/two_runners"):
        return False
    if name.endswith("/two_learners"):
        return torch.cuda.device_count() >= 2
    return not name.startswith(CPU_ONLY)


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
    add_patterns = partial(parser.add_argument, nargs="+", metavar="NAME", default=[])
    add_patterns("--only", help="names or patterns: 'kernel/*'")
    add_patterns("--skip", help="names or patterns to leave out")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: print the table of files that --json wrote",
    )
    parser.add_argument("--tiny", action="store_true", help="check that it runs")
    parser.add_argument("--seeds", type=int, help="of the time_to rows")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda on a GPU machine")
    parser.add_argument("--here", choices=list(BENCHMARKS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read(arguments.table)))
        return
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch finds no CUDA device")
    size = replace(TINY if arguments.tiny else Size(), device=arguments.device)
    if arguments.seeds:
        size = replace(size, seeds=arguments.seeds)
    if arguments.here:
        arguments.json.write_text(json.dumps(here(arguments.here, size)))
        return
    useful = [name for name in BENCHMARKS if uses(name, arguments.device)]
    try:
        skipped = matching(arguments.skip)
        selected = [n for n in matching(arguments.only or useful) if n not in skipped]
    except ValueError as error:
        parser.error(str(error))
    if useless := sorted({*selected} - {*useful}):
        parser.error(
            f"--device {arguments.device}: expected rows that use it, got "
            f"{', '.join(useless)}"
        )
    if missing := missing_extras(selected):
        parser.error("; ".join(missing))
    host = machine(arguments.device)
    passed_on = [f"--device={arguments.device}"]
    passed_on += ["--tiny"] if arguments.tiny else []
    passed_on += [f"--seeds={arguments.seeds}"] if arguments.seeds else []
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name in selected:
        began = time.perf_counter()
        try:
            rows += apart(name, passed_on)
        except BenchmarkError as error:
            failed[name] = str(error)
        passed = failed.get(name) or duration(time.perf_counter() - began)
        print(f"{name}: {passed}", file=sys.stderr, flush=True)
        # After each benchmark, so that an interruption loses one at most.
        if arguments.json:
            content = {"machine": host, "rows": rows, "failed": failed}
            arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    print(table(rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
