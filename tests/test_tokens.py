"""Tokens and TokenSpec."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils import _pytree as pytree

from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec
from marl_pool.utils.errors import InputError

SPEC = TokenSpec(5, 3, ("self", "signal", "noise"))


def tokens(*batch: int) -> Tokens:
    numbers = torch.arange(float(np.prod(batch) * 15)).view(*batch, 5, 3)
    types = torch.tensor([0, 1, 2, 2, 1]).expand(*batch, 5)
    return Tokens(numbers, types, types == 2)


def test_shapes() -> None:
    assert tokens(4, 2).batch_shape == (4, 2)
    assert tokens(4, 2).num_tokens == 5
    assert Tokens(torch.zeros(5, 3), torch.zeros(5), torch.zeros(5)).batch_shape == ()


def test_tokens_are_a_pytree() -> None:
    leaves, spec = pytree.tree_flatten(tokens(2))
    assert len(leaves) == 4
    assert leaves[3] is None
    assert isinstance(pytree.tree_unflatten(leaves, spec), Tokens)


def test_map_applies_to_every_part() -> None:
    doubled = tokens(2).map(lambda part: torch.cat((part, part)))
    assert isinstance(doubled, Tokens)
    assert [len(part) for part in doubled.parts] == [4, 4, 4]


def test_at_indexes_the_batch() -> None:
    whole = tokens(4, 2)
    for index in ((slice(None), 1), torch.tensor([3, 0]), (2, 1)):
        part = whole.at(index)
        for actual, tensor in zip(part.parts, whole.parts, strict=True):
            assert torch.equal(actual, tensor[index])
    assert whole.at((2, 1)).features.shape == (5, 3)


@pytest.mark.parametrize("batch", [(4,), (4, 2), (2, 3, 2)])
def test_flatten_batch_merges_the_batch_dimensions(batch: tuple[int, ...]) -> None:
    flat = tokens(*batch).flatten_batch()
    assert flat.batch_shape == (int(np.prod(batch)),)
    assert torch.equal(flat.features.flatten(), tokens(*batch).features.flatten())
    assert flat.types.shape == flat.padding.shape == (int(np.prod(batch)), 5)


def test_a_single_set_has_no_batch_dimensions_to_merge() -> None:
    message = r"at least one batch dimension, got features of shape \(5, 3\)"
    with pytest.raises(InputError, match=message):
        tokens().flatten_batch()


def test_the_observer_has_the_first_type() -> None:
    assert SPEC.type_names[SELF_TYPE] == "self"
    assert SPEC.num_types == 3
    assert SPEC.has_self


def test_space_holds_the_tokens_and_nothing_else() -> None:
    space = SPEC.space()
    assert set(space) == {*tokens(2).columns}
    assert space["features"] == spaces.Box(-np.inf, np.inf, (5, 3), np.float32)
    assert space["types"] == spaces.Box(0, 2, (5,), np.int64)
    assert space["padding"] == spaces.Box(0, 1, (5,), np.bool_)
    arrays = {k: v.numpy() for k, v in tokens(2).at(1).columns.items()}
    assert space.contains(arrays)
    assert not space.contains({**arrays, "types": arrays["types"] + 1})
    assert not space.contains({**arrays, "features": arrays["features"][:4]})


def test_images_are_bytes() -> None:
    spec = TokenSpec(4, 12, ("patch",), has_self=False, dtype="uint8")
    assert spec.space()["features"] == spaces.Box(0, 255, (4, 12), np.uint8)


def test_json_round_trip() -> None:
    for spec in (
        SPEC,
        TokenSpec(4, 12, ("patch",), has_self=False, dtype="uint8"),
        TokenSpec(5, 3, ("self", "noise"), signal_types=("self",), positions=(2, 0)),
        TokenSpec(5, 3, ("channel",), has_self=False, positions=()),
    ):
        assert TokenSpec(**json.loads(json.dumps(spec.to_json()))) == spec


def test_specs_compare_and_hash_by_value() -> None:
    listed: Any = ["self", "signal", "noise"]
    assert TokenSpec(5, 3, listed) == SPEC
    assert hash(TokenSpec(5, 3, listed)) == hash(SPEC)
    assert TokenSpec(6, 3, listed) != SPEC


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "TokenSpec.num_tokens: expected at least 1, got 0"),
        ({"num_features": -1}, "TokenSpec.num_features: expected at least 1, got -1"),
        ({"num_tokens": 5.0}, "TokenSpec.num_tokens: expected an integer, got 5.0"),
        ({"num_tokens": "5"}, "TokenSpec.num_tokens: expected an integer, got '5'"),
        ({"num_frames": True}, "TokenSpec.num_frames: expected an integer, got true"),
        ({"has_self": 1}, "TokenSpec.has_self: expected true or false, got 1"),
        ({"dtype": "float16"}, "dtype: expected float32 or uint8, got 'float16'"),
        ({"type_names": "agent"}, "TokenSpec.type_names: expected a list .*, got 'ag"),
        ({"signal_types": "a"}, "TokenSpec.signal_types: expected a list .*, got 'a'"),
        ({"markers": (("self", 1.5),)}, r"TokenSpec.markers: .*, got \(\('self', 1.5"),
        (
            {"type_names": ("\x1b[2J\n",), "signal_types": ("a",)},
            r"^TokenSpec.signal_types: expected some of '\\x1b\[2J\\n', got \('a',\)$",
        ),
        ({"type_names": ()}, "TokenSpec.type_names: expected at least one name"),
        ({"positions": (3,)}, "TokenSpec.positions: expected .* below 3"),
        ({"positions": (0, -1)}, "TokenSpec.positions: expected .* below 3"),
        ({"num_frames": 2}, "num_frames: expected a divisor of num_features = 3"),
        ({"num_frames": 0}, "num_frames: expected at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: Any, message: str) -> None:
    sizes = {"num_tokens": 5, "num_features": 3, "type_names": ("self",)}
    with pytest.raises(InputError, match=message):
        TokenSpec(**{**sizes, **options})


def test_check_says_expected_and_got() -> None:
    SPEC.check(tokens(4, 2))
    wrong = TokenSpec(6, 3, ("self",))
    with pytest.raises(InputError) as refused:
        wrong.check(tokens(2), "here")
    assert str(refused.value) == "here: expected (..., 6, 3), got (..., 5, 3)"


def test_a_spec_makes_tuples_of_any_container():
    names = {"self": 0, "other": 1}
    spec = TokenSpec(5, 3, names.keys(), signal_types={"other"}, positions=np.arange(2))
    assert spec.type_names == ("self", "other")
    assert (spec.signal_types, spec.positions) == (("other",), (0, 1))
    assert TokenSpec(**spec.to_json()) == spec
