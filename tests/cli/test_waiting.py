"""Threads that wait for each other leave the core to other processes."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from marl_pool.__main__ import main
sys.argv = ["marl-pool", "list", "suites"]
main()
print("spins", os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("variables", "spins"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_threads_of_the_command_wait_briefly_unless_told(variables, spins):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {key: value for key, value in os.environ.items() if key not in names}
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        env=env | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines()[-1] == f"spins {spins}"
