"""Constants that are copied to a device once."""

import torch

from marl_pool.utils.devices import constant


def test_a_constant_of_bools_is_not_that_of_equal_integers() -> None:
    cpu = torch.device("cpu")
    assert constant((1, 0), cpu, torch.bool).dtype == torch.bool
    numbers = constant((1, 0), cpu)
    assert numbers.dtype == torch.int64
    assert constant((1, 0), cpu) is numbers
