"""Arguments of heads and encoders that are constructed directly."""

import inspect
from dataclasses import dataclass
from functools import partial

import pytest
from gymnasium import spaces

from helpers.samples import SPEC
from marl_pool import load_policy
from marl_pool.config import describe
from marl_pool.encoders import ENCODERS, TransformerEncoder
from marl_pool.encoders.base import Encoder
from marl_pool.networks.set_network import SetNetwork
from marl_pool.options.names import resolve
from marl_pool.options.signatures import options_of
from marl_pool.policies import POLICIES
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pooling import (
    POOLING,
    AdaPooling,
    MaxPooling,
    Pooling,
    make_pooling,
)
from marl_pool.utils.errors import InputError

pytestmark = pytest.mark.fast

CLASSES = {
    **{f"pooling {name}": resolve(name, POOLING, "", Pooling) for name in POOLING},
    **{f"encoder {name}": resolve(name, ENCODERS, "", Encoder) for name in ENCODERS},
}


@pytest.mark.parametrize("where", CLASSES)
def test_every_constructor_names_key_expected_and_got(where):
    key = f"{where.split()[0]}.dim"
    with pytest.raises(InputError, match=rf"{key}: expected an integer.*, got '8'"):
        CLASSES[where](dim="8")


@dataclass
class Widths:
    first: int = 1


class WithWidths(MaxPooling):
    def __init__(self, dim: int, *, widths: Widths = Widths()) -> None:  # noqa: B008
        super().__init__(dim)
        self.widths = widths


def test_a_mapping_may_stand_for_a_dataclass_of_a_users_class():
    for widths in ({"first": 3}, Widths(3)):
        head = make_pooling(f"{__name__}:WithWidths", dim=4, widths=widths)
        assert head.widths == widths
    with pytest.raises(InputError, match=r"pooling.widths.*first"):
        make_pooling(f"{__name__}:WithWidths", dim=4, widths={"first": "3"})


NETWORKS = {
    "set_network": (SetNetwork, {"encoder": "transformer", "pooling": "avg"}),
    **{
        f"policy {name}": (
            resolve(name, POLICIES, "", SpecifiedPolicy),
            {"action_space": spaces.Discrete(3)},
        )
        for name in POLICIES.built_in
    },
}


@pytest.mark.parametrize(
    ("where", "key"),
    [(where, key) for where, (cls, _) in NETWORKS.items() for key in options_of(cls)],
)
def test_every_argument_of_a_network_is_checked(where, key):
    cls, arguments = NETWORKS[where]
    cls(**{"spec": SPEC, **arguments})
    with pytest.raises(InputError, match=rf"{where.split()[0]}\.{key}: expected .*got"):
        cls(**{"spec": SPEC, **arguments, key: object()})


policy = partial(TokenPolicy, SPEC, spaces.Discrete(3))
DIVISOR = "num_heads: expected a divisor of dim ="
RESIDUAL = "pooling.residual: expected true or false or null"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(MaxPooling, "8"), "pooling.dim: expected an integer >= 1, got '8'"),
        (partial(MaxPooling, 0), "pooling.dim: expected an integer >= 1, got 0"),
        (partial(AdaPooling, 8, residual="x"), f"{RESIDUAL}, got 'x'"),
        (partial(AdaPooling, 8, num_heads=3), f"pooling.{DIVISOR} 8, got 3"),
        (partial(TransformerEncoder, dim=63), f"encoder.{DIVISOR} 63, got 8"),
        (
            partial(policy, trunk="seperate"),
            "policy.trunk: expected shared or separate, got 'seperate'. "
            "Did you mean 'separate'?",
        ),
        (
            partial(policy, token_dropout=1.5),
            "policy.token_dropout: expected a number in [0, 1), got 1.5",
        ),
        (
            partial(policy, log_std_range=(-1, 0, 1)),
            "policy.log_std_range: expected a list of 2 (a number, a number), "
            "got (-1, 0, 1)",
        ),
        (
            partial(SetNetwork, SPEC, encoder="lstm", pooling="avg", type_embedding=-3),
            "set_network.type_embedding: expected an integer >= 0 or add, got -3",
        ),
        (partial(load_policy, 3), "path: expected text or Path, got 3"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(make, message):
    with pytest.raises(InputError) as refusal:
        make()
    assert str(refusal.value) == message


def test_python_reports_arguments_that_do_not_exist():
    with pytest.raises(TypeError, match="num_haeds"):
        AdaPooling(8, num_haeds=2)
    with pytest.raises(TypeError, match="positional"):
        AdaPooling(8, 2)


class Passing(MaxPooling):
    """Pass what it does not know to its base."""

    def __init__(self, dim: int, *, power: float = 1.0, **common):
        super().__init__(dim, **common)


def test_an_option_that_no_base_takes_is_unknown(monkeypatch):
    name = f"{__name__}:Passing"
    with pytest.raises(InputError, match="'powr': choose from dim, power. Did you"):
        make_pooling(name, dim=8, powr=2.0)
    # A list names what the constructor names, not what it passes on.
    monkeypatch.setattr(describe, "registry", lambda kind: {"passing": name})
    assert "**" not in describe.commented_options("pooling", "passing")


def test_signatures_stay():
    parameters = inspect.signature(AdaPooling).parameters
    assert list(parameters)[:2] == ["dim", "num_heads"]


def test_a_class_of_a_user_may_have_loose_annotations():
    class Wide(AdaPooling):
        def __init__(self, dim: int, width: int = 2) -> None:
            super().__init__(dim, num_heads=2)
            self.width = width

    assert Wide(8, width=2.5).width == 2.5
    with pytest.raises(InputError, match="pooling.dim: .*, got '8'"):
        Wide("8")
