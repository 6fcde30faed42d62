"""Options of heads, encoders and perturbations that are refused: one table for all."""

from collections.abc import Callable
from typing import Any

import pytest

from helpers.perturbed import SPEC
from helpers.samples import DIM
from helpers.tables import yaml_cases
from marl_pool.encoders import make_encoder
from marl_pool.perturbations import make_perturbation
from marl_pool.pooling import make_pooling
from marl_pool.utils.errors import InputError

pytestmark = pytest.mark.fast

MAKERS: dict[str, Callable[..., object]] = {
    "pooling": lambda name, **options: make_pooling(name, **{"dim": DIM, **options}),
    "encoder": lambda name, **options: make_encoder(name, **{"dim": DIM, **options}),
    "perturbation": lambda name, **options: make_perturbation(
        name, specs={"agent": SPEC}, **options
    ),
}


@yaml_cases("kind, name, options, message")
def test_a_wrong_option_is_refused(
    kind: str, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        MAKERS[kind](name, **options)
    assert "\n" not in str(refusal.value)
