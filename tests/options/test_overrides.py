"""Overrides: parsed from text, given as Python values, and written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tables import yaml_cases
from marl_pool.options.overrides import overrides_of, parse, parse_any, written
from marl_pool.utils.errors import InputError

TYPED = {
    "1": 1,
    "+3": 3,
    "-1": -1,
    "1_000": 1000,
    "1.5": 1.5,
    ".5": 0.5,
    "5.": 5.0,
    "1e-3": 1e-3,
    "1E5": 1e5,
    "inf": math.inf,
    "010": "010",
    "1__0": "1__0",
    "0x10": "0x10",
    "1-31-0": "1-31-0",
    "1:30": "1:30",
    "2020-01-01": "2020-01-01",
    "true": True,
    "False": False,
    "NULL": None,
    "on": "on",
    "no": "no",
    "~": "~",
    "": "",
    " a b ": "a b",
    "'3'": "3",
    '"a,b"': "a,b",
    r"'it\'s'": "it's",
    r"a\,b": "a,b",
    r"C:\dir": r"C:\dir",
    "s3://bucket/x=1": "s3://bucket/x=1",
    "/data/#1": "/data/#1",
    "~/data (old)/é": "~/data (old)/é",
    "${env.max_steps}": "${env.max_steps}",
    "${oc.select:encoder.num_heads,1}": "${oc.select:encoder.num_heads,1}",
    "[]": [],
    "{}": {},
    "[ 1 , a b, 'c,d']": [1, "a b", "c,d"],
    "[1, [2], {a: b}]": [1, [2], {"a": "b"}],
    "{a:1, b : [x:y]}": {"a": 1, "b": ["x:y"]},
}


@pytest.mark.parametrize("text", TYPED)
def test_a_typed_value_is_read(text):
    value = parse(f"key={text}").value
    assert (value, type(value)) == (TYPED[text], type(TYPED[text]))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", [1, 2]),
        ("[0],self", [[0], "self"]),
        ("'a,b',c", ["a,b", "c"]),
        ("range(3)", [0, 1, 2]),
        ("range(1,3)", [1, 2]),
        ("range(9,0,-4)", [9, 5, 1]),
        ("range(0,1,0.25)", [0, 0.25, 0.5, 0.75]),
        ("range(0.1,0.4,0.1)", [0.1, 0.2, 0.3]),
        ("range(1,1.3,0.1)", [1.0, 1.1, 1.2]),
        ("range(3,1,-0.5)", [3.0, 2.5, 2.0, 1.5]),
        ("range(0,1e-5,5e-6)", [0.0, 5e-6]),
        ("range(3,3)", []),
        ("choice(a)", ["a"]),
    ],
)
def test_several_values_are_those_of_a_sweep(text, values):
    override = parse_any(f"key={text}")
    assert override.swept
    assert override.values == values
    with pytest.raises(InputError, match="key: expected one value, got several"):
        parse(f"key={text}")


@yaml_cases("text, message")
def test_what_cannot_be_read_is_refused_in_one_line(text, message):
    with pytest.raises(InputError) as refused:
        parse_any(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


TEXT = st.text(max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.from_regex(r"k[a-z_]*", fullmatch=True), inner)
    ),
    max_leaves=6,
)


@given(PLAIN)
def test_what_is_written_is_read_again(value):
    assert parse(f"key={written(value)}").value == value


@given(st.floats(allow_nan=False))
def test_floats_keep_every_bit(value):
    assert parse(f"key={written(value)}").value.hex() == value.hex()


@given(st.lists(PLAIN) | st.none() | st.booleans() | st.integers() | TEXT)
def test_a_value_of_python_is_taken_as_it_is(value):
    (override,) = overrides_of({"key": value})
    assert override.value == value


@pytest.mark.parametrize("name", ["red-team", "red.team", "obs/cars"])
def test_keys_of_a_mapping_may_be_names_of_groups_and_paths(name):
    (override,) = overrides_of({"fixed": {name: "heuristic"}})
    assert override == parse(f"fixed={{{name}: heuristic}}")
    assert (override.key, override.value) == ("fixed", {name: "heuristic"})


@pytest.mark.parametrize("name", ["a b", "a:b", "", " a", 3])
def test_other_keys_of_a_mapping_are_refused(name):
    with pytest.raises(InputError, match="^fixed: expected keys that are names, got "):
        overrides_of({"fixed": {name: "heuristic"}})


def test_an_option_of_a_section_is_named_though_it_is_no_key():
    with pytest.raises(InputError, match=r"^expected a key such as .*'ppo.foo-bar'"):
        overrides_of({"ppo": {"lr": 1e-3, "foo-bar": 1}})


def test_options_of_python_keep_their_values():
    options = {"pooling": {"query": "1,2", "name": "ada"}, "ppo.lr": (1, "null")}
    assert [(part.key, part.value) for part in overrides_of(options)] == [
        ("pooling", "ada"),
        ("pooling.query", "1,2"),
        ("ppo.lr", [1, "null"]),
    ]
