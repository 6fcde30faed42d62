"""Algorithms of RLlib for single tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def build() -> Iterator[Callable[[dict], Any]]:
    """Build algorithms and stop them."""
    from helpers.ppo import rllib_config

    built = []

    def make(config: dict) -> Any:
        built.append(rllib_config(config).build_algo())
        torch.set_num_threads(1)
        return built[-1]

    yield make
    for algo in built:
        algo.stop()
