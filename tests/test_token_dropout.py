"""Token dropout in training."""

import pytest
import torch

from helpers.samples import SPEC, random_tokens
from marl_pool.networks.set_network import SetNetwork
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec, drop_tokens


def many_tokens() -> Tokens:
    """Sets of 6 tokens, the first of which is the agent's and the last padding."""
    padding = torch.zeros(2000, 6, dtype=torch.bool)
    padding[:, -1] = True
    types = torch.tensor([SELF_TYPE, 1, 1, 2, 2, 0]).expand(2000, 6)
    return Tokens(torch.zeros(2000, 6, 3), types, padding)


def test_tokens_are_dropped_with_the_probability_but_never_the_self_token() -> None:
    torch.manual_seed(0)
    tokens = many_tokens()
    dropped = drop_tokens(tokens, 0.3, has_self=True)
    assert dropped.features is tokens.features
    assert not dropped.padding[:, 0].any()
    assert dropped.padding[:, -1].all()
    assert dropped.padding[:, 1:5].float().mean().item() == pytest.approx(0.3, abs=0.02)


def test_a_set_without_a_self_token_keeps_at_least_one_token() -> None:
    torch.manual_seed(0)
    tokens = many_tokens()
    tokens.padding[0] = True
    dropped = drop_tokens(tokens, 0.999, has_self=False)
    counts = (~dropped.padding).sum(1)
    assert counts[0] == 0
    assert (counts[1:] >= 1).all()
    # Any of the five may be the one that is left.
    assert (~dropped.padding[1:]).sum(0)[:5].min() > 300


@pytest.mark.parametrize("pooling", ["avg", "quantile", "attention_neuron"])
def test_tokens_are_dropped_in_training_only(pooling: str) -> None:
    network = SetNetwork(
        SPEC,
        encoder={"name": "transformer"},
        pooling={"name": pooling},
        token_dropout=0.5,
        action_dim=1,
        seed=0,
    )
    tokens = random_tokens()
    assert torch.equal(network.eval()(tokens), network(tokens))
    network.train()
    torch.manual_seed(0)
    first = network(tokens)
    assert not torch.equal(network(tokens), first)
    torch.manual_seed(0)
    assert torch.equal(network(tokens), first)


@pytest.mark.parametrize("pooling", ["ada", "set2set"])
def test_dropped_tokens_get_no_gradient(pooling: str) -> None:
    """The native kernel and torch treat dropped tokens as padding."""
    spec = TokenSpec(6, 3, ("self", "friend", "noise"))
    network = SetNetwork(
        spec,
        encoder={"name": "transformer"},
        pooling={"name": pooling},
        token_dropout=0.5,
        seed=0,
    ).train()
    tokens = many_tokens().at(slice(8))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(8, 6, 3, generator=generator).requires_grad_()
    torch.manual_seed(1)
    hidden = drop_tokens(tokens, 0.5, has_self=True).padding
    assert hidden[:, 1:5].any()
    torch.manual_seed(1)
    network(tokens._replace(features=features)).square().sum().backward()
    assert features.grad is not None
    assert torch.equal(features.grad.abs().sum(-1) == 0, hidden)


def test_the_only_other_token_is_dropped_with_the_probability():
    torch.manual_seed(0)
    types = torch.tensor([SELF_TYPE, 1]).expand(20_000, 2)
    tokens = Tokens(torch.zeros(20_000, 2, 1), types, torch.zeros_like(types).bool())
    hidden = drop_tokens(tokens, 0.5, has_self=True).padding.double().mean(0)
    assert hidden.tolist() == [0.0, pytest.approx(0.5, abs=0.02)]
