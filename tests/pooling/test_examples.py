"""The examples in the docstrings of pooling heads."""

import doctest
import importlib

import pytest
import torch


@pytest.mark.parametrize("name", ["ada", "attention_neuron", "base", "basic", "pma"])
def test_examples_give_what_they_print(name: str) -> None:
    module = importlib.import_module(f"marl_pool.pooling.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted
    assert not result.failed
