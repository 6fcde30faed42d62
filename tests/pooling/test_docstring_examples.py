"""The examples in docstrings."""

import doctest
import importlib

import pytest
import torch

HEADS = ("ada", "attention", "attention_neuron", "base", "basic")


@pytest.mark.parametrize(
    "name", ["networks.set_network", "tokens", *(f"pooling.{h}" for h in HEADS)]
)
def test_examples_give_what_they_print(name):
    module = importlib.import_module(f"marl_pool.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted
    assert not result.failed
