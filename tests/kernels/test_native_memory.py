"""The compiled kernel under the sanitizers for memory and undefined behaviour."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT
from marl_pool.kernels.native import call

SOURCES = ROOT / "marl_pool" / "kernels" / "native"
RUN = """
import sys
from pathlib import Path
import pytest
from marl_pool.kernels.native import call
call._libraries = lambda: [Path(sys.argv[1])]
assert call.library() is not None
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="needs the sanitizers of g++ on Linux",
)
def test_no_access_out_of_bounds_and_no_undefined_behaviour(tmp_path: Path) -> None:
    library = tmp_path / "kernel-base.so"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-Wno-psabi"]
    sources = [str(SOURCES / name) for name in ("float.cpp", "double.cpp")]
    define = f'-DMARL_POOL_SOURCES="{call._hash_sources().decode()}"'
    subprocess.run(
        ["g++", *flags, *sanitizers, define, *sources, "-o", str(library)], check=True
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
    # torch and Python keep memory until the end, which is no leak of ours.
    env = os.environ | {
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    tests = [
        str(ROOT / "tests" / "test_native_network.py"),
        str(ROOT / "tests" / "kernels" / "test_native_mlp.py"),
        str(ROOT / "tests" / "kernels" / "test_native_ppo_loss.py"),
        str(ROOT / "tests" / "kernels" / "test_native_ppo_gradient.py"),
        *("-q", "-n", "0", "-p", "no:cacheprovider"),
        *("-k", "float64 or moments or dropout or neighbours or threads or refused"),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(library), *tests],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "passed" in ran.stdout


TOO_LARGE = """
import resource
import torch
from marl_pool.networks import SetNetwork
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
    network(tokens)
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
