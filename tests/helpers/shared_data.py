"""Data that are too large for the repository: in ``shared/`` beside the checkout."""

import os
from pathlib import Path

import pytest

from helpers.paths import ROOT

REQUIRED = "MARL_POOL_REQUIRE_SHARED"
"""Environment variable: 1 makes a test that lacks its data fail, as in CI."""


def shared_data(name: str) -> Path:
    """Return a folder of shared data; skip the calling test if it is missing.

    Args:
        name: of the folder in ``shared/``.
    """
    folder = ROOT.parent / "shared" / name
    if not folder.is_dir():
        missing = f"{folder} is missing"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{missing}, and {REQUIRED} is 1")
        pytest.skip(missing)
    return folder
