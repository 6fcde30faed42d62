# ruff: noqa: NPY002
"""Seeds of processes."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from marl_pool.utils.randomness import process_seed, seed_process


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Restore torch's mode and the generators after the test."""
    mode = torch.are_deterministic_algorithms_enabled()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    torch.use_deterministic_algorithms(mode)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def numbers(seed: int) -> tuple[float, ...]:
    seed_process(seed)
    return random.random(), np.random.rand(), float(torch.rand(()))


@pytest.mark.parametrize("seed", [0, -1, 2**80])
def test_a_seed_fixes_every_generator(seed: int) -> None:
    first, second, third = (
        numbers(process_seed(*key)) for key in ((seed, 0), (seed, 1), (seed + 1, 0))
    )
    assert first == numbers(process_seed(seed))
    assert not {*first} & {*second}
    assert not {*first} & {*third}


def test_seed_process_sets_the_torch_seed_and_deterministic_mode() -> None:
    seed_process(7)
    assert torch.initial_seed() == 7
    number = float(torch.rand(()))
    torch.manual_seed(7)
    assert number == float(torch.rand(()))
    if torch.version.cuda is None:
        assert torch.are_deterministic_algorithms_enabled()
