"""The compiled kernel under the sanitizers for memory and undefined behavior."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.cuda_on_cpu import SANITIZERS
from helpers.paths import ROOT
from marl_pool.compiled.native import call

SOURCES = ROOT / "marl_pool" / "compiled" / "native" / "src"
RUN = """
import sys
from pathlib import Path
import pytest
from marl_pool.compiled.native import call
call._libraries = lambda: [Path(sys.argv[1])]
assert call.library() is not None
sys.exit(pytest.main(sys.argv[2:]))
"""


TESTS = ("network", "mlp", "ppo_loss", "ppo_gradient")


def run_tests(library: Path, names: Sequence[str], *more: str, **env: str) -> None:
    """Run the kernel's quick tests in another process, with another library."""
    tests = [str(ROOT / "tests" / "compiled" / f"test_{name}.py") for name in names]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *more]
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(library), *tests, *options],
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "passed" in ran.stdout


def lower_levels() -> list[Path]:
    """Return the libraries of this machine's lower instruction sets."""
    kernel = call.library()
    loaded_name = "" if kernel is None else Path(kernel._name).stem
    return [path for path in call._libraries() if "kernel-v" < path.stem < loaded_name]


@pytest.mark.slow
@pytest.mark.parametrize("path", lower_levels(), ids=lambda path: path.stem)
def test_libraries_of_lower_levels(path: Path, tmp_path: Path) -> None:
    library = tmp_path / "kernel-base.so"
    shutil.copy(path, library)
    run_tests(library, TESTS)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="needs the sanitizers of g++ on Linux",
)
def test_no_access_out_of_bounds_and_no_undefined_behavior(tmp_path: Path) -> None:
    library = tmp_path / "kernel-base.so"
    # Lines of the source are enough for a report; the names of variables, which -g
    # adds, take a third of the time.
    flags = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-pthread", "-Wno-psabi"]
    sources = [str(SOURCES / name) for name in ("float.cpp", "double.cpp")]
    define = f'-DMARL_POOL_SOURCES="{call._hash_sources().decode()}"'
    subprocess.run(
        ["g++", *flags, *SANITIZERS, define, *sources, "-o", str(library)], check=True
    )
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    # The GPU's kernel is compiled for the CPU, with the same options. How precise a
    # network is, and more examples of a property, try other numbers, not other code.
    run_tests(
        library,
        (*TESTS, "cuda_network"),
        *("-k", "not precise or ppo"),
        HYPOTHESIS_PROFILE="quick",
        LD_PRELOAD=":".join(runtimes),
        # torch and Python keep memory until the end, which is no leak of ours.
        ASAN_OPTIONS="detect_leaks=0",
        PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    )


TOO_LARGE = """
import resource
import torch
from marl_pool.compiled import compile
from marl_pool.networks.set_network import SetNetwork
from marl_pool.tokens import Tokens, TokenSpec
count = 1_000_000
network = SetNetwork(
    TokenSpec(count, 1, ("self",)),
    encoder={"name": "transformer"},
    pooling={"name": "avg"},
)
shape = (1, count)
tokens = Tokens(
    torch.zeros(*shape, 1),
    torch.zeros(shape, dtype=torch.int64),
    torch.zeros(shape, dtype=torch.bool),
)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
try:
    compile(network)(tokens)
except MemoryError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or call.library() is None, reason="needs a kernel on Linux"
)
def test_too_little_memory_is_an_error() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TOO_LARGE],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "compiled kernel" in ran.stdout
