"""Settings of all tests."""

import os

import torch
from hypothesis import settings

from helpers.paths import ROOT

# No test fails for being slow on a shared machine. `quick` tries the same examples in
# each run, for a merge must not fail by chance; `thorough` tries new ones in each.
common = {"deadline": None, "print_blob": True}
settings.register_profile("quick", max_examples=15, derandomize=True, **common)
settings.register_profile("thorough", max_examples=100, derandomize=False, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Threads that wait for each other on a busy machine cost more than they gain here.
torch.set_num_threads(1)

# Processes that tests start import this package, and the worlds of `helpers`.
inherited = os.environ.get("PYTHONPATH")
folders = [str(ROOT / "tests"), str(ROOT), *([inherited] if inherited else [])]
os.environ["PYTHONPATH"] = os.pathsep.join(folders)
