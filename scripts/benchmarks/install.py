"""Benchmark of installations with the compiled kernel and without it."""

import functools
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import Row, Size, number, seconds, taking_turns

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
WITHOUT_KERNEL = "--config-settings=wheel.cmake=false"
IMPORT = "from marl_pool.networks.set_network import SetNetwork"
FIRST_CALL = """
import torch
from marl_pool.networks.set_network import SetNetwork
from marl_pool.tokens import Tokens, TokenSpec
network = SetNetwork(
    TokenSpec(6, 3, ("self", "other")),
    encoder={"name": "transformer", "dim": 8, "num_heads": 8},
    pooling={"name": "avg"},
)
types, padding = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, 6).bool()
network(Tokens(torch.randn(4, 6, 3), types, padding))
"""
"""The library is loaded when it is first called."""


def installation(size: Size) -> Iterator[Row]:
    """Measure `pip install` of this checkout, the wheel's size, and fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        # At the tiny size, nothing is compiled.
        plain = [WITHOUT_KERNEL]
        options = {"with": plain if size.tiny else [], "without": plain}
        sites = {name: Path(folder, name) for name in options}
        spent = {
            name: seconds(functools.partial(install, sites[name], flags))
            for name, flags in options.items()
        }
        note = f"from a checkout, on {os.cpu_count()} cores, dependencies apart"
        yield difference("install/time", spent, "s", note)
        sizes = {name: wheel_size(site) for name, site in sites.items()}
        yield difference("install/wheel", sizes, "MB")
        for name, program in (("import", IMPORT), ("first_call", FIRST_CALL)):
            runs = {
                key: functools.partial(run, site, program)
                for key, site in sites.items()
            }
            times = taking_turns(runs, size.rounds)
            medians = {
                key: statistics.median(durations) for key, durations in times.items()
            }
            yield difference(f"install/{name}", medians, "s", "a fresh process")


def difference(name: str, values: dict[str, float], unit: str, note: str = "") -> Row:
    """Describe a cost with the kernel, compared with the cost without it."""
    ours, plain = values["with"], values["without"]
    text = f"without the kernel: {number(plain)} {unit}, so {ours - plain:+.2g} {unit}"
    return Row(name, ours, unit, text, note=note)


def install(site: Path, options: list[str]) -> None:
    """Build the wheel of this checkout into a folder, and install it there."""
    wheel = [*PIP, "wheel", "--no-deps", "--no-build-isolation", *options]
    subprocess.run([*wheel, "--wheel-dir", str(site / "wheel"), str(ROOT)], check=True)
    (built,) = (site / "wheel").glob("*.whl")
    target = ["--no-deps", "--target", str(site), str(built)]
    subprocess.run([*PIP, "install", *target], check=True)


def wheel_size(site: Path) -> float:
    """Return the size of the wheel in MB."""
    (built,) = (site / "wheel").glob("*.whl")
    return built.stat().st_size / 1e6


def run(site: Path, program: str) -> None:
    """Run a program with the installation in ``site``."""
    # -S ignores an editable installation, which would be found before any path.
    paths = os.pathsep.join((str(site), sysconfig.get_path("purelib")))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-S", "-c", program]
    subprocess.run(command, env=environment, cwd=site, check=True)
