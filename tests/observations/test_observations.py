"""Observations of any space as tokens: values, checks, options, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import utils as vector
from hypothesis import given
from hypothesis import strategies as st

from marl_pool.observations.make import make_view
from marl_pool.observations.token_dict import token_spec
from marl_pool.observations.view import TokenOptions, TokenView
from marl_pool.perturbations import make_perturbation
from marl_pool.tokens import Tokens, append
from marl_pool.utils.errors import InputError, UnfitTokensError

BOX = spaces.Box


def box(*shape: int, low: float = -9, high: float = 9, dtype: Any = np.float32):
    return spaces.Box(low, high, shape, dtype)


def convert(view: TokenView, *observations: Any) -> Tokens:
    arrays = view.arrays(len(observations))
    for row, observation in enumerate(observations):
        view.write(arrays, row, observation)
    present = np.ones(len(observations), np.bool_)
    if (misfit := view.misfit(arrays, present)) is not None:
        raise InputError(f"{misfit.place[0]}: {misfit.message}")
    tokens = view.tokens({k: torch.from_numpy(v) for k, v in arrays.items()})
    check_form(view, tokens)
    return tokens


def check_form(view: TokenView, tokens: Tokens) -> None:
    """Check that the tokens agree with the spec."""
    spec, batch = view.spec, len(tokens.types)
    assert tokens.features.shape == (batch, spec.num_tokens, spec.num_features)
    assert tokens.types.shape == tokens.padding.shape == (batch, spec.num_tokens)
    assert str(tokens.features.dtype) == f"torch.{spec.dtype}"
    assert (tokens.types.dtype, tokens.padding.dtype) == (torch.int64, torch.bool)
    types = tokens.types[~tokens.padding]
    assert types.numel() == 0 or 0 <= types.min() <= types.max() < spec.num_types
    assert len(set(spec.type_names)) == spec.num_types
    assert spec.has_self == (spec.type_names[0] == "self")


def view_of(space: spaces.Space, **options: Any) -> TokenView:
    return make_view(space, TokenOptions(**options))


# Tokens of observations


def test_numbers_of_a_vector_are_tokens_of_their_own_types():
    view = view_of(box(3))
    tokens = convert(view, np.array([1, 2, 3], np.float32))
    assert tokens.features.tolist() == [[[1], [2], [3]]]
    assert tokens.types.tolist() == [[0, 1, 2]]
    assert view.spec.type_names == ("feature_0", "feature_1", "feature_2")
    assert not view.spec.has_self


def test_rows_of_a_matrix_are_tokens():
    rows = np.array([[1, 2], [0, 0], [0, 3]], np.float64)
    view = view_of(box(3, 2, dtype=np.float64))
    tokens = convert(view, rows)
    assert tokens.features.tolist() == [rows.tolist()]
    assert tokens.types.tolist() == [[0, 0, 0]]
    assert not tokens.padding.any()  # an entity at the origin is not padding
    assert view.spec.type_names == ("row",)


@pytest.mark.parametrize(
    ("options", "padding"),
    [
        ({"padding": "zero_rows"}, [False, True, False]),
        ({"presence": 0}, [False, True, True]),
        ({"presence": 1}, [False, True, False]),
        ({"presence": 0, "padding": "zero_rows"}, [False, True, True]),
    ],
)
def test_rows_are_padding_only_where_options_say_so(options, padding):
    view = view_of(box(3, 2), **options)
    tokens = convert(view, np.array([[1, 2], [0, 0], [0, 3]], np.float32))
    assert tokens.padding.tolist() == [padding]


def test_types_of_rows_are_named_by_row_or_by_feature():
    rows = np.array([[0, 1, 5], [1, 0, 6], [0, 1, 7]], np.float32)
    view = view_of(box(3, 3), token_types=["ball", "self", "ball"])
    assert convert(view, rows).types.tolist() == [[1, 0, 1]]
    assert view.spec.type_names == ("self", "ball")
    assert view.spec.has_self
    view = view_of(box(3, 3), type_features=[0, 1], token_types=["wall", "self"])
    assert convert(view, rows).types.tolist() == [[0, 1, 0]]
    assert view.spec.type_names == ("self", "wall")
    assert view_of(box(3, 3), type_features=[0, 1]).spec.type_names == (
        "type_0",
        "type_1",
    )


@pytest.mark.parametrize(
    ("shape", "options", "count", "width"),
    [
        ((7, 7, 3), {}, 49, 5),
        ((7, 7, 3), {"patch": 4}, 4, 2 + 48),
        ((13, 13, 5), {}, 49, 2 + 4 * 5),
        ((280, 480, 3), {}, 60, 2 + 48 * 48 * 3),
        ((457, 120, 3), {}, 64, 2 + 30 * 30 * 3),
        ((3, 10, 20), {"channels": "first", "patch": 10}, 2, 2 + 300),
        ((6, 4), {"patch": 2}, 6, 2 + 4),
    ],
)
def test_images_are_cut_into_a_bounded_number_of_patches(shape, options, count, width):
    spec = view_of(box(*shape), **options).spec
    assert (spec.num_tokens, spec.num_features) == (count, width)
    assert spec.positions == (0, 1)
    assert spec.type_names == ("patch",)


@pytest.mark.parametrize("channels", ["first", "last"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.bool_, np.int8])
def test_a_patch_is_its_position_and_its_pixels(channels, dtype):
    image = np.arange(5 * 6 * 2).reshape(5, 6, 2) % (2 if dtype == np.bool_ else 120)
    image = image.astype(dtype)
    observation = image.transpose(2, 0, 1) if channels == "first" else image
    high = {np.uint8: 255, np.bool_: 1}.get(dtype, 127)
    space = BOX(0, high, observation.shape, dtype)
    view = view_of(space, patch=4, channels=channels)
    tokens = convert(view, observation, np.zeros_like(observation))
    assert tokens.features.shape == (2, 4, 2 + 4 * 4 * 2)
    scale = 255 if dtype == np.uint8 else 1
    places = [[0, 0], [0, scale], [scale, 0], [scale, scale]]
    assert tokens.features[:, :, :2].tolist() == [places] * 2
    filled = np.zeros((8, 8, 2), np.float64)
    filled[:5, :6] = image
    patches = [filled[y : y + 4, x : x + 4].ravel() for y in (0, 4) for x in (0, 4)]
    np.testing.assert_array_equal(tokens.features[0, :, 2:], np.stack(patches))


def test_bytes_up_to_1_are_not_scaled():
    view = view_of(box(2, 2, 1, low=0, high=1, dtype=np.uint8))
    tokens = convert(view, np.ones((2, 2, 1), np.uint8))
    assert tokens.features[0, :, 2].tolist() == [1, 1, 1, 1]


def test_choices_are_one_hot():
    tokens = convert(view_of(spaces.Discrete(3)), 0, np.int64(2))
    assert tokens.features.tolist() == [[[1, 0, 0]], [[0, 0, 1]]]
    shifted = view_of(spaces.Discrete(3, start=-1))
    assert convert(shifted, 1).features.tolist() == [[[0, 0, 1]]]
    several = view_of(spaces.MultiDiscrete([2, 3], start=[0, 5]))
    tokens = convert(several, np.array([1, 5]))
    assert tokens.features.tolist() == [[[0, 1, 0], [1, 0, 0]]]
    assert tokens.types.tolist() == [[0, 1]]
    assert several.spec.type_names == ("choice_0", "choice_1")
    rows = view_of(spaces.MultiDiscrete([[2, 3], [2, 2]]))
    tokens = convert(rows, np.array([[1, 2], [0, 1]]))
    assert tokens.features.tolist() == [[[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]]
    assert tokens.types.tolist() == [[0, 0]]


def test_an_observation_that_was_not_written_has_zero_features():
    view = view_of(spaces.Discrete(3, start=4))
    empty = {k: torch.from_numpy(v) for k, v in view.arrays(1).items()}
    assert view.tokens(empty).features.tolist() == [[[0, 0, 0]]]


def test_entries_are_tokens_with_the_types_of_their_paths():
    space = spaces.Dict(
        {
            "self": box(2),
            "near": spaces.Dict(cars=box(2, 3), light=spaces.Discrete(2)),
            "pair": spaces.Tuple([box(), spaces.MultiBinary(2)]),
        }
    )
    view = view_of(space, presence=0)
    observation = {
        "self": np.array([1, 2], np.float32),
        "near": {"cars": np.array([[1, 3, 4], [0, 5, 6]], np.float32), "light": 1},
        "pair": (np.float32(7), np.array([0, 1], np.int8)),
    }
    tokens = convert(view, observation)
    names = [view.spec.type_names[kind] for kind in tokens.types[0]]
    assert [*zip(names, tokens.features[0].tolist(), strict=True)] == [
        ("near/cars", [1, 3, 4]),
        ("near/cars", [0, 5, 6]),
        ("near/light", [0, 1, 0]),
        ("pair/0", [7, 0, 0]),
        ("pair/1", [0, 1, 0]),
        ("self", [1, 2, 0]),
    ]
    assert view.spec.has_self
    assert tokens.padding[0].tolist() == [False, True, False, False, False, False]


def test_bytes_beside_other_entries_are_scaled_like_those_of_an_image():
    space = spaces.Dict(
        image=box(1, 1, 1, low=0, high=255, dtype=np.uint8), speed=box(1)
    )
    observation = {
        "image": np.full((1, 1, 1), 51, np.uint8),
        "speed": np.ones(1, np.float32),
    }
    features = convert(view_of(space), observation).features
    assert features[0, 0, 2].item() == pytest.approx(0.2)


def test_a_single_entry_is_the_observation():
    view = view_of(spaces.Dict(only=spaces.Tuple([box(2)])))
    tokens = convert(view, {"only": [np.array([1, 2], np.float32)]})
    assert tokens.features.tolist() == [[[1], [2]]]


@pytest.mark.parametrize("inner", ["one", "several", "tokens"])
def test_an_action_mask_is_a_part_and_no_token(inner):
    observed, value = {
        "one": ({"observation": box(2)}, {"observation": np.ones(2, np.float32)}),
        "several": (
            {"a": box(2), "b": spaces.Discrete(2)},
            {"a": np.ones(2, np.float32), "b": 1},
        ),
        "tokens": (dict(tokens_space().items()), tokens_value()),
    }[inner]
    space = spaces.Dict(**observed, action_mask=spaces.MultiBinary(3))
    view, plain = view_of(space), view_of(spaces.Dict(observed))
    assert view.spec == plain.spec
    assert view.parts["action_mask"].shape == (3,)
    mask = np.array([1, 0, 1], np.int8)
    tokens = convert(view, {**value, "action_mask": mask})
    assert tokens.features.equal(convert(plain, value).features)
    arrays = view.arrays(1)
    view.write(arrays, 0, {**value, "action_mask": mask})
    assert arrays["action_mask"].tolist() == [[1, 0, 1]]
    with pytest.raises(InputError, match="part 'action_mask': expected one"):
        convert(view, value)
    with pytest.raises(InputError, match=r"'action_mask': expected numbers in \[0, 1"):
        convert(view, {**value, "action_mask": mask * 2})


# Dicts of tokens


def tokens_space(types: Any = None, padding: Any = None, features: Any = None):
    return spaces.Dict(
        features=features or box(4, 3),
        types=types or box(4, low=0, high=2, dtype=np.int64),
        padding=padding or box(4, low=0, high=1, dtype=np.int8),
    )


def tokens_value(**parts: Any) -> dict[str, Any]:
    plain = {
        "features": np.ones((4, 3), np.float32),
        "types": np.array([0, 1, 2, 1]),
        "padding": np.array([0, 0, 0, 1], np.int8),
    }
    return {**plain, **parts}


@pytest.mark.parametrize(
    ("types", "padding", "names"),
    [
        (None, None, ("self", "type_1", "type_2")),
        (None, spaces.MultiBinary(4), ("self", "type_1", "type_2")),
        (spaces.MultiDiscrete([1, 3, 3, 2]), None, ("self", "type_1", "type_2")),
        (spaces.MultiDiscrete([3] * 4), spaces.MultiDiscrete([2] * 4), None),
        (
            box(4, low=0, high=2, dtype=np.uint8),
            box(4, low=0, high=1, dtype=bool),
            None,
        ),
        (box(4, low=-1, high=2, dtype=np.int16), box(4, low=0, high=1), None),
    ],
)
def test_types_and_padding_may_have_several_kinds_of_spaces(types, padding, names):
    space = tokens_space(types, padding)
    view = view_of(space)
    value = tokens_value()
    value["types"] = value["types"].astype(space["types"].dtype)
    value["padding"] = value["padding"].astype(space["padding"].dtype)
    tokens = convert(view, value)
    assert tokens.types.tolist() == [[0, 1, 2, 1]]
    assert tokens.padding.tolist() == [[False, False, False, True]]
    assert view.spec.type_names == (names or ("self", "type_1", "type_2"))


WRONG_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"features": np.float32(3)}, r"'features': expected .* shape \(4, 3\).*got \(\)"),
    ({"features": np.ones((4, 1), np.float32)}, r"shape \(4, 3\), .*got \(4, 1\)"),
    ({"features": np.full((4, 3), 10.0)}, r"'features': .*\[-9, 9\].*got 10 at \[0, 0"),
    ({"features": np.full((4, 3), "a")}, r"'features': expected numbers.* got <U1"),
    ({"types": np.int64(1)}, r"'types': expected .*\(4,\).*got \(\)"),
    ({"types": np.array([0, 1, 3, 0])}, r"'types': .*\[0, 2\].*got 3 at \[2\]"),
    ({"types": np.array([0, -1, 2, 0])}, r"'types': .*\[0, 2\].*got -1 at \[1\]"),
    ({"types": np.ones(4)}, r"'types': expected integers.*got float64"),
    ({"types": [[0], [1]]}, r"'types': .*\(4,\).*got \(2, 1\)"),
    ({"types": [[0], [1, 2]]}, r"'types': expected an array of shape \(4,\).*list"),
    ({"padding": np.int8(1)}, r"'padding': expected .*\(4,\).*got \(\)"),
    ({"padding": np.full(4, 2)}, r"'padding': .*\[0, 1\].*got 2 at \[0\]"),
    ({"padding": np.full(4, 257)}, r"'padding': .*\[0, 1\].*got 257"),
    ({"padding": np.zeros(4)}, r"'padding': expected integers"),
]


@pytest.mark.parametrize(("parts", "message"), WRONG_PARTS)
def test_parts_of_tokens_that_do_not_fit_their_space_are_refused(parts, message):
    view = view_of(tokens_space())
    with pytest.raises(InputError, match=message) as caught:
        convert(view, tokens_value(), tokens_value(**parts))
    assert "\n" not in str(caught.value)


def test_values_under_padding_are_not_checked():
    wild = {
        "features": np.array([[1] * 3] * 3 + [[99] * 3], np.float32),
        "types": np.array([0, 1, 2, -7]),
    }
    tokens = convert(view_of(tokens_space()), tokens_value(**wild))
    assert tokens.padding.tolist() == [[False, False, False, True]]
    renamed = view_of(tokens_space(), token_types=["self", "a", "b"])
    assert convert(renamed, tokens_value(**wild)).types[0, :3].tolist() == [0, 1, 2]


WIDE = np.array([3, np.iinfo(np.int64).max])

WRONG: list[tuple[spaces.Space, Any, str]] = [
    (BOX(-WIDE, WIDE, dtype=np.int64), [-3, -(1 << 62)], ""),
    (BOX(-WIDE, WIDE, dtype=np.int64), [4, 1 << 62], r"\[-3, 3\].*got 4 at \[0\]"),
    (BOX(0, np.array([3, 2**64 - 1], np.uint64), dtype=np.uint64), [3, 1 << 62], ""),
    (box(2), np.ones(3), r"^expected .*shape \(2,\), as in its space, got \(3,\)"),
    (box(2), 1.0, r"shape \(2,\).*got \(\)"),
    (box(2), None, r"shape \(2,\).*got \(\)"),
    (box(2), [10, 0], r"\[-9, 9\].*got 10 at \[0\]"),
    (spaces.Discrete(3), 3, r"\[0, 2\].*got 3$"),
    (spaces.Discrete(3), 1.0, "expected integers"),
    (spaces.Discrete(3), True, ""),
    (box(2), torch.ones(2, requires_grad=True), r"array of shape \(2,\).*got Tensor"),
    (spaces.MultiBinary(2), [0, 2], r"\[0, 1\].*got 2 at \[1\]"),
    (spaces.MultiDiscrete([2, 3]), [1, 3], r"\[0, 2\].*got 3 at \[1\]"),
    (BOX(0, 255, (2, 2, 1), np.uint8), np.full((2, 2, 1), 256), "got 256 at"),
    (BOX(0, 255, (2, 2, 1), np.uint8), np.full((2, 2, 1), -1), "got -1 at"),
    (BOX(0, 255, (2, 2, 1), np.uint8), np.full((2, 2, 1), 0.5), "expected integers"),
    (BOX(0, 1, (2, 2, 1), bool), np.full((2, 2, 1), 2), "got 2 at"),
    (spaces.Dict(a=box(1), b=box(1)), {"a": [1.0]}, "part 'b': expected one of a, b"),
    (spaces.Dict(a=box(1), b=box(1)), [1.0], "expected a dict of a, b.*got list"),
    (spaces.Tuple([box(1), box(1)]), ([1.0],), "part '1': expected one"),
    (spaces.Tuple([box(1), box(1)]), ([1.0],) * 3, "expected 2 entries.*got 3"),
    (spaces.Tuple([box(1), box(1)]), 1.0, "expected a tuple.*got float"),
    (
        spaces.Dict(a=spaces.Dict(b=box(1), c=box(1)), d=box(1)),
        {"a": {"b": [1.0], "c": [1.0, 2.0]}, "d": [1.0]},
        r"part 'a/c': expected .*\(1,\).*got \(2,\)",
    ),
]


@pytest.mark.parametrize(("space", "value", "message"), WRONG)
def test_an_observation_that_does_not_fit_its_space_is_refused(space, value, message):
    view = view_of(space)
    if not message:
        convert(view, value)
        return
    with pytest.raises(InputError, match=message):
        convert(view, value)


def test_bounds_beyond_the_stored_dtype_are_none():
    largest = np.finfo(np.float32).max
    numbers = np.array([3e38, -3e38], np.float32)
    tokens = convert(view_of(box(2, low=-largest, high=largest)), numbers)
    assert tokens.features.flatten().tolist() == numbers.tolist()


def test_rounding_beyond_the_bounds_is_no_error():
    convert(view_of(box(2, low=-1, high=1)), np.array([1.00001, -1.00001]))
    with pytest.raises(InputError, match=r"\[-1, 1\].*got 1.01 at"):
        convert(view_of(box(2, low=-1, high=1)), np.array([1.01, 0]))


def test_nan_is_left_to_the_rollout():
    tokens = convert(view_of(box(2)), np.array([np.nan, 0]))
    assert tokens.features.isnan().any()


def test_only_present_observations_are_checked_against_their_bounds():
    view = view_of(box(2, low=1, high=2))
    arrays = view.arrays(2, 3)
    present = np.zeros((2, 3), np.bool_)
    assert view.misfit(arrays, present) is None
    present[1, 2] = True
    misfit = view.misfit(arrays, present)
    assert misfit is not None
    assert misfit.place == (1, 2)


def test_a_type_below_0_is_allowed_under_padding_alone():
    kinds = spaces.Box(-1, 2, (4,), np.int64)
    view = view_of(tokens_space(types=kinds))
    arrays = view.arrays(1)
    arrays["types"][0] = [0, 1, -1, -1]
    arrays["padding"][0] = [0, 0, 1, 1]
    everyone = np.ones(1, np.bool_)
    assert view.misfit(arrays, everyone) is None
    arrays["padding"][0, 2] = 0
    misfit = view.misfit(arrays, everyone)
    assert misfit is not None
    assert misfit.message == (
        "part 'types': expected numbers in [0, 2], where there is a token, got -1 "
        "at [2]"
    )


# Options


WRONG_OPTIONS: list[tuple[spaces.Space, dict[str, Any], str]] = [
    (box(3, 2), {"presence": 2}, "env.presence: .*below 2, got .2"),
    (box(3, 2), {"type_features": [0, 0]}, "env.type_features: expected different"),
    (box(3, 2), {"token_types": ["a", "b"]}, "env.token_types: expected 1 name, for r"),
    (box(3, 2), {"token_types": [""]}, "env.token_types: expected 1 name"),
    (box(3), {"token_types": []}, "expected 3 names, for feature_0.*got none"),
    (box(3), {"signal_types": ["x"]}, "env.signal_types: expected some of feat.*got x"),
    (box(3), {"signal_types": []}, "env.signal_types: expected some of .*got none"),
    (box(3, 2), {"positions": [2]}, r"env.positions: .*below 2, got \[2\]"),
    (box(3, 2), {"positions": np.array([0, 1])}, "^positions: expected a list .*array"),
    (box(3, 2), {"positions": [1, 1]}, "env.positions: expected different indices"),
    (box(3), {"presence": 0}, "env.presence: expected null, since .* no matrix"),
    (box(3), {"padding": "zero_rows"}, "env.padding: expected null.*got 'zero_rows'"),
    (box(3), {"patch": 2}, "env.patch: expected null, since .* no image"),
    (box(4, 4, 3), {"presence": 0}, "env.presence: expected null"),
    (box(4, 4, 3), {"patch": 5}, "env.patch: expected at most 4, .* 4 x 4 .*got 5"),
    (box(4, 4, 3), {"patch": -1}, "patch: expected .*, got -1"),
    (box(4, 4, 3), {"patch": 0}, "patch: expected .*, got 0"),
    (box(4, 4), {"channels": "first"}, "env.channels: expected 'last'.*got 'first'"),
    (tokens_space(), {"padding": "zero_rows"}, "env.padding: expected null"),
    (
        spaces.Dict(cars=box(4, 3), action_mask=spaces.MultiBinary(2)),
        {"presence_keys": {"cars": "m"}},
        "env.presence_keys: expected null, since no entry .* got {'cars': 'm'}",
    ),
    *(
        (
            spaces.Dict(cars=box(4, 3), m=spaces.MultiBinary(4)),
            {"padding_keys": {name: part}},
            f"env.padding_keys: expected each set once, .* among cars, m, got {wrong}$",
        )
        for name, part, wrong in (
            ("cars", "n", "n"),
            ("car", "m", "car"),
            ("cars", "cars", "cars"),
        )
    ),
    (
        box(6),
        {"slices": {"b": [2, 6], "a": {"start": 0, "count": 3, "features": 1}}},
        "env.slices.b: expected a range from 3, after a's, got 2 to 6",
    ),
    *(
        (box(6), {"slices": {"a": [0, 2], "b": value}}, f"^env.slices.b{message}")
        for value, message in (
            (
                {"start": 2, "count": np.nan, "features": 2},
                ".count: .*integer, got nan",
            ),
            ({"start": "2", "count": 1, "features": 2}, ".start: .*integer, got '2'"),
            ({"start": 2, "cont": 1, "features": 2}, ".cont: .*Did you mean 'count'"),
            ({"start": 2, "count": 1}, ": expected .*start, stop.* or a mapping of"),
            ([2, np.nan], r": expected a list of 2 .*, got \[2, nan\]"),
            ([2, 4, 6], r": expected a list of 2 .*, got \[2, 4, 6\]"),
            (3, ": expected a list of 2 .*, got 3"),
        )
    ),
]


@pytest.mark.parametrize(("space", "options", "message"), WRONG_OPTIONS)
def test_options_that_do_not_fit_are_refused(space, options, message):
    with pytest.raises(InputError, match=message) as caught:
        make_view(space, TokenOptions(**options), prefix="env.")
    assert "\n" not in str(caught.value)
    message = "options: expected TokenOptions, got {"
    with pytest.raises(InputError, match=message):
        make_view(space, options)


def test_names_signal_and_positions_reach_the_spec():
    view = view_of(
        tokens_space(),
        token_types=["ball", "self", "ball"],
        signal_types=["self", "ball"],
        positions=[1, 2],
    )
    spec = view.spec
    assert spec.type_names == ("self", "ball")
    assert (spec.signal_types, spec.positions) == (("self", "ball"), (1, 2))
    assert convert(view, tokens_value()).types.tolist() == [[1, 0, 1, 0]]


def test_type_names_without_self_leave_no_self_token():
    assert not view_of(tokens_space(), token_types=["a", "b", "c"]).spec.has_self
    assert view_of(tokens_space()).spec.has_self


# Refusals


REFUSED: list[tuple[spaces.Space, str]] = [
    (spaces.Text(5), r"such as a MultiDiscrete of the characters.*; got Text\(1, 5"),
    (
        spaces.Sequence(box(2, 3)),
        r"a Sequence of Boxes of \(F,\), or a Box of .N, F.*; got Sequence",
    ),
    (spaces.Graph(box(2), None), "a token for each node.*; got Graph"),
    (spaces.OneOf([box(2), spaces.Discrete(2)]), "a Discrete that says.*; got OneOf"),
    (box(2, 3, 4, 5), r"a Box of \(H, W, C\), with the frames.*; got Box"),
    (box(0), r"whose sizes are at least 1; got Box"),
    (spaces.Discrete(10**9), "MultiDiscrete of digits.*got Discrete"),
    (spaces.Dict(), "at least one entry; got Dict"),
    (spaces.Dict(a=box(2), b=spaces.Text(3)), "MultiDiscrete of the char.*got Dict"),
    (spaces.Dict(action_mask=spaces.MultiBinary(2)), "a Dict with an observation"),
    (
        spaces.Dict(a=box(2), action_mask=spaces.MultiBinary([2, 2, 2])),
        "whose action_mask is",
    ),
    (tokens_space(types=box(4)), "types, a MultiDiscrete or a Box of integers"),
    (tokens_space(padding=spaces.MultiBinary(3)), r"padding, a MultiBinary\(N\)"),
    (
        tokens_space(padding=box(4, low=0, high=2, dtype=np.int8)),
        "padding, a MultiBinary",
    ),
    (
        tokens_space(types=box(4, low=0, high=10**9, dtype=np.int64)),
        "types, a MultiDisc",
    ),
    (spaces.Dict(a=tokens_space(), b=box(2)), "features, types and padding alone"),
    (
        spaces.Dict({"a/b": box(2), "a": spaces.Dict(b=box(2), c=box(1))}),
        "paths of keys, joined by /, differ",
    ),
]


@pytest.mark.parametrize(("space", "message"), REFUSED)
def test_a_space_that_cannot_become_tokens_is_refused_with_what_would_fit(
    space, message
):
    with pytest.raises(InputError, match=message) as caught:
        make_view(space, where="env.module: agent 'a'")
    text = str(caught.value)
    assert text.startswith("env.module: agent 'a': expected observations that can")
    assert "\n" not in text
    assert len(text) < 700


ALMOST_TOKENS: list[tuple[dict[str, spaces.Space], str]] = [
    ({"features": box(4, 3), "types": box(4)}, "and padding, got features, types$"),
    (
        {"features": box(4, 3), "type": box(4), "padding": box(4)},
        "got features, padding, type; did you mean 'types'.$",
    ),
    (
        {"feature": box(4, 3), "type": box(4), "paddings": box(4)},
        "did you mean 'features' and 'types' and 'padding'.$",
    ),
    (
        {**tokens_space().spaces, "goal": box(3)},
        "padding alone, got features, goal, padding, types$",
    ),
    (
        {"near": spaces.Dict(features=box(4, 3), types=box(4)), "far": box(2, 3)},
        "got features, types in near$",
    ),
    (
        {
            "features": box(4, 3),
            "types": box(4),
            "action_mask": spaces.MultiBinary(2),
        },
        "got features, types$",
    ),
]


@pytest.mark.parametrize(("entries", "message"), ALMOST_TOKENS)
def test_a_dict_that_is_almost_one_of_tokens_is_refused(entries, message):
    with pytest.raises(InputError, match=f"^env: expected features, .*{message}"):
        make_view(spaces.Dict(entries), where="env")


def test_a_mask_may_have_the_name_of_a_part_of_tokens():
    space = spaces.Dict(features=box(4, 3), padding=spaces.MultiBinary(4))
    view = view_of(space, padding_keys={"features": "padding"})
    assert view.spec.num_tokens == 4
    assert view_of(spaces.Dict(features=box(4, 3), type=box(3))).spec.num_types == 2


@pytest.mark.parametrize(("high", "number"), [(255, torch.uint8), (1, torch.float32)])
def test_bytes_of_tokens_are_an_image_only_up_to_255(high, number):
    bytes_ = box(4, 3, low=0, high=high, dtype=np.uint8)
    view = view_of(tokens_space(features=bytes_))
    features = np.eye(4, 3, dtype=np.uint8)
    tokens = convert(view, tokens_value(features=features))
    assert tokens.features.dtype is number
    assert view.spec.dtype == str(number).removeprefix("torch.")
    assert (tokens.features[0].numpy() == features).all()


def test_token_spec_is_none_for_other_spaces():
    assert token_spec(tokens_space()) is not None
    assert token_spec(box(3)) is None
    assert token_spec(spaces.Dict(features=box(4, 3))) is None


# Properties of every space


PLAIN = st.one_of(
    st.builds(
        lambda shape, dtype: BOX(0, 3, tuple(shape), np.dtype(dtype).type),
        st.lists(st.integers(1, 4), max_size=3),
        st.sampled_from(["float32", "float64", "uint8", "int64", "int8", "uint16"]),
    ),
    st.builds(spaces.Discrete, st.integers(1, 4), start=st.integers(-2, 2)),
    st.builds(
        spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)
    ),
    st.builds(spaces.MultiBinary, st.integers(1, 3)),
    st.just(spaces.MultiBinary([2, 3])),
)
ANY_SPACE = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict),
        inner.map(lambda entry: spaces.Dict({0: entry})),
    ),
    max_leaves=5,
)


@given(space=ANY_SPACE, seed=st.integers(0, 9))
def test_samples_of_a_space_fit_and_the_number_in_a_batch_does_not_matter(space, seed):
    view = make_view(space)
    space.seed(seed)
    samples = [space.sample() for _ in range(3)]
    together = convert(view, *samples)
    for row, sample in enumerate(samples):
        alone = convert(view, sample)
        for part, single in zip(together.parts, alone.parts, strict=True):
            assert part[row].equal(single[0])


@given(space=ANY_SPACE)
def test_different_observations_have_different_tokens(space):
    view = make_view(space)
    space.seed(0)
    first_sample, second_sample = space.sample(), space.sample()
    first, second = (
        convert(view, sample).features for sample in (first_sample, second_sample)
    )
    flat = [spaces.flatten(space, sample) for sample in (first_sample, second_sample)]
    assert first.equal(second) == np.array_equal(*flat)


# Back to observations


def roundtrip(view: TokenView, *observations: Any) -> Any:
    arrays = view.arrays(len(observations))
    for row, observation in enumerate(observations):
        view.write(arrays, row, observation)
    tokens = view.tokens({k: torch.from_numpy(v) for k, v in arrays.items()})
    return view.observations(tokens)


def check_roundtrip(view: TokenView, space: spaces.Space, samples: list[Any]) -> None:
    batched = vector.batch_space(space, len(samples))
    observations = vector.iterate(batched, roundtrip(view, *samples))
    for sample, observation in zip(samples, observations, strict=True):
        assert data_equivalence(typed(space, observation), sample)


@given(space=ANY_SPACE, seed=st.integers(0, 9))
def test_tokens_become_the_same_observations_again(space, seed):
    space.seed(seed)
    samples = [typed(space, space.sample()) for _ in range(3)]
    check_roundtrip(make_view(space, number=np.float64), space, samples)


SETS = spaces.Dict(
    {
        "me": box(2),
        "cars": box(3, 2),
        "car_mask": spaces.MultiBinary(3),
        "trees": box(2, 3),
        "no_trees": box(2, low=0, high=1, dtype=np.bool_),
        "action_mask": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiBinary(1)]),
    }
)
KEYS = {"presence_keys": {"cars": "car_mask"}, "padding_keys": {"trees": "no_trees"}}
"""Options for `SETS`, which has a mask of each polarity."""


def sets(**entries: Any) -> dict[str, Any]:
    return {
        "me": np.array([1, 2], np.float32),
        "cars": np.array([[1, 2], [0, 0], [3, 4]], np.float32),
        "car_mask": np.array([1, 0, 1], np.int8),
        "trees": np.array([[0, 0, 0], [0, 0, 0]], np.float32),
        "no_trees": np.array([True, False]),
        "action_mask": (np.array([1, 0], np.int8), np.array([1], np.int8)),
        **entries,
    }


def test_masks_say_which_slots_hold_tokens():
    view = view_of(SETS, **KEYS)
    tokens = convert(view, sets())
    assert view.spec.type_names == ("cars", "me", "trees")
    # A present car at the origin and an absent one differ only in the mask.
    assert tokens.padding.tolist() == [[False, True, False, False, True, False]]
    assert tokens.action_mask.tolist() == [[True, False, True]]


REVERSIBLE: list[tuple[spaces.Space, dict[str, Any], list[Any]]] = [
    (SETS, KEYS, [sets(), sets(car_mask=np.zeros(3, np.int8), cars=np.zeros((3, 2)))]),
    (
        spaces.Dict(observation=box(2, 1), mask=spaces.MultiBinary(2)),
        {"presence_keys": {"observation": "mask"}},
        [{"observation": [[3], [0]], "mask": [1, 0]}],
    ),
    (box(3, 2), {"presence": 0}, [[[1, 5], [0, 0], [2, 0]], np.zeros((3, 2))]),
    (box(3, 2), {"padding": "zero_rows"}, [[[0, 5], [0, 0], [2, 0]]]),
    (box(3, 3), {"type_features": [0, 2]}, [[[1, 5, 0], [0, 7, 1], [1, 0, 0]]]),
    (box(3, 2), {"max_tokens": 7}, [[[1, 5], [0, 0], [2, 0]]]),
    (box(3, 1), {"token_types": ["a", "self", "a"]}, [[[1], [2], [3]]]),
    (BOX(0, 255, (7, 9, 3), np.uint8), {"patch": 4}, [np.arange(189).reshape(7, 9, 3)]),
    (box(3, 7, 9), {"patch": 4, "channels": "first"}, [np.ones((3, 7, 9))]),
    (
        box(9),
        {
            "slices": {
                "self": [0, 3],
                "others": {"start": 3, "count": 3, "features": 2, "presence": 0},
            }
        },
        [[1, 2, 3, 1, 7, 0, 0, 1, 0], np.zeros(9)],
    ),
    (spaces.Sequence(box(2)), {"max_tokens": 4}, [[[1, 2], [0, 0]], [], [[3, 4]] * 4]),
    (spaces.Sequence(box(2), stack=True), {"max_tokens": 4}, [[[1, 2], [0, 0]]]),
    (spaces.Sequence(spaces.Discrete(3, start=1)), {"max_tokens": 2}, [[1, 3], [2]]),
    (
        spaces.Sequence(spaces.MultiDiscrete([2, 3])),
        {"max_tokens": 3},
        [[[1, 2], [0, 0]]],
    ),
    (
        spaces.Dict({"self": box(2), "cars": spaces.Sequence(box(3))}),
        {"max_tokens": 4},
        [{"self": [1, 2], "cars": [[1, 2, 3]]}, {"self": [0, 0], "cars": []}],
    ),
    (
        spaces.Tuple([spaces.Sequence(box(1)), spaces.Sequence(box(2))]),
        {"max_tokens": {"0": 2, "1": 1}},
        [([[1]], [[2, 3]]), ([], [])],
    ),
]
"""Spaces, options, and observations whose absent rows are 0."""


def typed(space: spaces.Space, value: Any) -> Any:
    """Convert a value to the dtypes and classes of the space."""
    match space:
        case spaces.Dict():
            return {key: typed(entry, value[key]) for key, entry in space.items()}
        case spaces.Tuple():
            return tuple(map(typed, space.spaces, value))
        case spaces.Sequence():
            element = space.feature_space
            if space.stack:
                return np.array([typed(element, part) for part in value])
            return tuple(typed(element, part) for part in value)
    return np.asarray(value, space.dtype)


@pytest.mark.parametrize(("space", "options", "values"), REVERSIBLE)
def test_tokens_of_described_spaces_become_observations_again(space, options, values):
    samples = [typed(space, value) for value in values]
    check_roundtrip(view_of(space, **options), space, samples)


@pytest.mark.parametrize(
    ("space", "options", "values"),
    [case for case in REVERSIBLE if "patch" not in case[1]],
)
def test_shuffled_tokens_become_an_observation_with_the_same_tokens(
    space, options, values
):
    """Only tokens of the same type change places."""
    view = view_of(space, **options)
    tokens = convert(view, typed(space, values[0]))
    order = torch.randperm(
        tokens.num_tokens, generator=torch.Generator().manual_seed(1)
    )
    shuffled = Tokens(*(part[:, order] for part in tokens[:3]), tokens.action_mask)
    batch = view.observations(shuffled)
    (observation,) = vector.iterate(vector.batch_space(space, 1), batch)
    again = convert(view, observation)
    assert multiset(again) == multiset(tokens)


def test_shuffled_patches_become_a_scrambled_image():
    view = view_of(box(2, 4, 1), patch=2)
    image = np.arange(8, dtype=np.float32).reshape(2, 4, 1)
    tokens = convert(view, image)
    swapped = Tokens(*(part.flip(1) for part in tokens[:3]))
    np.testing.assert_array_equal(view.observations(swapped)[0], np.roll(image, 2, 1))


def multiset(tokens: Tokens) -> list[Any]:
    present = ~tokens.padding
    rows = zip(
        tokens.types[present].tolist(), tokens.features[present].tolist(), strict=True
    )
    return sorted(rows)


def test_hidden_added_and_noisy_tokens_become_observations():
    view = view_of(box(3, 2), presence=0)
    tokens = convert(view, np.array([[1, 5], [1, 6], [0, 0]], np.float32))
    hidden = tokens._replace(padding=torch.tensor([[True, False, True]]))
    assert view.observations(hidden).tolist() == [[[0, 0], [1, 6], [0, 0]]]
    added = append(tokens, tokens.map(lambda part: part[:, :1]))
    assert view.observations(added).tolist() == [[[1, 5], [1, 6], [1, 5]]]
    # A presence of 0 from noise is no absence, and numbers are clipped to their bounds.
    noisy = tokens._replace(features=torch.tensor([[[0, 99.0], [2, 6], [5, 5]]]))
    assert view.observations(noisy).tolist() == [[[1, 9], [2, 6], [0, 0]]]


@pytest.mark.parametrize("name", ["jitter", "bias", "scale"])
@pytest.mark.parametrize(
    ("space", "options", "observation"),
    [
        (box(3, 2), {"presence": 0}, [[1, 5], [0.4, 6], [0, 0]]),
        (
            box(3, 2),
            {"presence": 0, "token_types": ["car"]},
            [[1, 5], [1, 6], [0, 0]],
        ),
        (
            spaces.Dict(cars=box(3, 2), trees=box(2, 2)),
            {"presence": {"cars": 0}},
            {"cars": [[1, 5], [0.4, 6], [0, 0]], "trees": [[1, 1], [2, 2]]},
        ),
        (
            box(8),
            {
                "slices": {
                    "self": [0, 2],
                    "cars": {"start": 2, "count": 3, "features": 2, "presence": 0},
                }
            },
            [3, 3, 1, 5, 0.4, 6, 0, 0],
        ),
    ],
)
def test_noise_does_not_change_the_presence_column(space, options, observation, name):
    view = view_of(space, **options)
    tokens = convert(view, as_arrays(observation)).map(lambda part: part[:, None])
    noise = make_perturbation(
        name, specs={"agent": view.spec}, severity=1.0, protect_self=False
    )
    state = noise.start(tokens, torch.arange(1))
    noisy, _ = noise(tokens, state)
    names = [name for name, _ in view.spec.markers]
    numbers = torch.tensor([view.spec.type_names.index(name) for name in names])
    marked = torch.zeros_like(tokens.features, dtype=torch.bool)
    marked[..., 0] = torch.isin(tokens.types, numbers)
    assert marked.any()
    moved = noisy.features != tokens.features
    assert not (moved & marked).any()
    readings = ~marked & ~tokens.padding[..., None]
    assert moved[readings].all()


def as_arrays(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {key: as_arrays(rows) for key, rows in observation.items()}
    return np.array(observation, np.float32)


def test_a_changed_type_is_written_to_the_type_features():
    view = view_of(box(2, 3), type_features=[0, 2])
    tokens = convert(view, np.array([[1, 5, 0], [0, 7, 1]], np.float32))
    changed = view.observations(tokens._replace(types=torch.tensor([[1, 1]])))
    assert changed.tolist() == [[[0, 5, 1], [0, 7, 1]]]


UNFIT: list[tuple[spaces.Space, dict[str, Any], dict[str, Any], str]] = [
    (
        box(2),
        {},
        {"padding": torch.tensor([[True, False]])},
        "cannot say that feature_0 is absent",
    ),
    (
        box(2),
        {},
        {"types": torch.tensor([[1, 1]])},
        "holds 1 of feature_1, got 2",
    ),
    (
        box(2, 1),
        {},
        {
            "features": torch.zeros(1, 3, 1),
            "types": torch.zeros(1, 3, dtype=torch.int64),
            "padding": torch.zeros(1, 3, dtype=torch.bool),
        },
        "holds 2 of row, got 3",
    ),
]


@pytest.mark.parametrize(("space", "options", "changes", "message"), UNFIT)
def test_tokens_that_the_space_cannot_hold_are_refused(
    space, options, changes, message
):
    view = view_of(space, **options)
    tokens = convert(view, np.zeros(space.shape, np.float32))
    with pytest.raises(UnfitTokensError, match=message):
        view.observations(tokens._replace(**changes))


def test_slices_that_omit_numbers_cannot_be_reversed():
    view = view_of(box(4), slices={"self": [0, 2]})
    tokens = convert(view, np.ones(4, np.float32))
    with pytest.raises(InputError, match="slices: expected every number .* number 2"):
        view.observations(tokens)


# Lists


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"drop": "last"}, [[3, 0], [1, 0]]),
        ({"drop": "farthest", "positions": [0, 1]}, [[1, 0], [2, 0]]),
    ],
)
def test_surplus_elements_are_dropped_only_on_request(options, expected):
    space = spaces.Sequence(box(2))
    observation = tuple(np.array([x, 0], np.float32) for x in (3, 1, 2))
    view = view_of(space, max_tokens=2, **options)
    assert convert(view, observation).features.tolist() == [expected]
    with pytest.raises(InputError, match="expected at most 2 elements, .* got 3"):
        convert(view_of(space, max_tokens=2), observation)


@pytest.mark.parametrize(
    ("element", "options", "message"),
    [
        (box(2), {}, "positions: expected features, by which the farthest"),
        (box(2), {"positions": [4]}, r"positions: .*below 2, got \[4\]"),
        (spaces.Discrete(4), {"positions": [3]}, "drop: expected last, since"),
    ],
)
def test_dropping_the_farthest_needs_positions_of_elements(element, options, message):
    space = spaces.Dict(near=spaces.Sequence(element), other=box(5))
    with pytest.raises(InputError, match=message):
        view_of(space, max_tokens=3, drop="farthest", **options)


def test_the_farthest_single_numbers_are_dropped():
    view = view_of(spaces.Sequence(box()), max_tokens=2, drop="farthest", positions=[0])
    tokens = convert(view, [np.float32(x) for x in (3, -1, 2)])
    assert tokens.features.tolist() == [[[-1], [2]]]


class Repeated(spaces.Space):
    """A space with the attributes of RLlib's class, whose elements are lists."""

    def __init__(self, child_space: spaces.Space, max_len: int) -> None:
        super().__init__()
        self.child_space, self.max_len = child_space, max_len


def test_rllibs_lists_are_recognized_by_their_attributes():
    view = view_of(Repeated(box(2), 3))
    tokens = convert(view, [np.array([1, 2], np.float32)])
    assert tokens.padding.tolist() == [[False, True, True]]
    (observation,) = view.observations(tokens)
    assert [row.tolist() for row in observation] == [[1, 2]]


@pytest.mark.parametrize("high", [254, 255])
def test_slices_of_bytes_are_rows(high):
    slices = {
        "self": [0, 4],
        "others": {"start": 4, "count": 10, "features": 5, "presence": 0},
    }
    space = spaces.Box(0, high, (64,), np.uint8)
    view = make_view(space, TokenOptions(slices=slices))
    assert (view.spec.num_tokens, view.spec.num_features) == (11, 5)
    assert convert(view, np.zeros(64, np.uint8)).padding.sum() == 10


def test_elements_of_a_list_are_tokens_though_an_image_is_cut_into_patches():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (8, 8, 3), np.uint8),
        bytes=spaces.Sequence(spaces.Box(0, 255, (3,), np.uint8)),
        floats=spaces.Sequence(spaces.Box(-1, 1, (3,))),
    )
    lengths = {"bytes": 5, "floats": 7}
    view = make_view(space, TokenOptions(max_tokens=lengths, patch=4))
    assert view.spec.num_tokens == 4 + 5 + 7
    observation = {
        "image": np.zeros((8, 8, 3), np.uint8),
        "bytes": tuple(np.full((2, 3), 9, np.uint8)),
        "floats": tuple(np.full((3, 3), 0.5, np.float32)),
    }
    padding = convert(view, observation).padding[0]
    assert (~padding).sum() == 4 + 2 + 3


def test_types_of_one_name_are_inverted_to_the_row_they_came_from():
    options = TokenOptions(
        type_features=[0, 1, 2], token_types=["agent", "agent", "goal"]
    )
    view = make_view(spaces.Box(0, 1, (3, 4)), options)
    rows = np.array([[0, 1, 0, 0.5], [1, 0, 0, 0.2], [0, 0, 1, 0.3]], np.float32)
    tokens = convert(view, rows)
    assert tokens.types.tolist() == [[0, 0, 1]]
    assert np.array_equal(view.observations(tokens)[0], rows)
    # A row of another type than its token takes the first column of that type.
    changed = tokens._replace(types=torch.tensor([[0, 1, 0]]))
    rows[1, :3], rows[2, :3] = (0, 0, 1), (1, 0, 0)
    assert np.array_equal(view.observations(changed)[0], rows)


def test_entries_with_types_of_one_name_are_refused():
    entries = {"self": box(2), "lane": spaces.MultiDiscrete([2, 2]), "lane_0": box(2)}
    space = spaces.Dict(entries)
    with pytest.raises(InputError, match="different names, got 2 types named 'lane_0'"):
        make_view(space)
    del entries["self"]
    names = ["left", "right", "lane"]
    view = view_of(spaces.Dict(entries), token_types=names)
    assert view.spec.type_names == (*names,)


@pytest.mark.parametrize("padding", [0.0, np.nan])
def test_bounds_hold_though_a_padded_row_is_nan(padding):
    space = spaces.Dict(
        features=spaces.Box(0, 1, (2, 1)),
        types=spaces.MultiDiscrete([2, 2]),
        padding=spaces.MultiBinary(2),
    )
    view = make_view(space)
    observation = {
        "features": np.array([[500], [padding]], np.float32),
        "types": np.array([0, 1]),
        "padding": np.array([0, 1], np.int8),
    }
    with pytest.raises(InputError, match=r"expected numbers in \[0, 1\].*got 500"):
        convert(view, observation)


def test_integers_of_a_list_do_not_wrap_around():
    view = make_view(
        spaces.Sequence(spaces.Box(0, 100, (2,), np.int16)), TokenOptions(max_tokens=3)
    )
    with pytest.raises(InputError, match=r"expected numbers in \[0, 100\].*65541"):
        convert(view, (np.array([65541, 1]),))
