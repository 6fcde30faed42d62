# PYTHON_ARGCOMPLETE_OK
"""The ``marl-pool`` command, also as ``python -m marl_pool``."""

import os
import sys


def main() -> int:
    """Run the command; Ctrl-C ends it quietly from the first import on."""
    # By default torch's OpenMP threads on Linux spin for milliseconds before they yield
    # their core, which every operation would pay for beside another process.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        from marl_pool.cli.main import main as run
        from marl_pool.training.signals import prepare_exit
    except KeyboardInterrupt:
        print("marl-pool: stopped", file=sys.stderr)
        return 130
    status = run()
    prepare_exit()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
