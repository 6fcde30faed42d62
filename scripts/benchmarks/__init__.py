"""Benchmarks of marl_pool; `scripts/benchmark.py` runs them."""

import importlib.util
import sys

from marl_pool.utils.errors import install_hint

# Every module here imports ray: without it, say so in one line.
if importlib.util.find_spec("ray") is None:
    sys.exit(install_hint("ray"))
