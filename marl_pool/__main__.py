# PYTHON_ARGCOMPLETE_OK
"""The ``marl-pool`` command, also as ``python -m marl_pool``."""

import os
import sys


def main() -> int:
    """Run the command; Ctrl-C ends it quietly from the first import on."""
    # By default threads of torch on Linux wait for each other for milliseconds before
    # they give their core away: beside another process each operation would cost that.
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
