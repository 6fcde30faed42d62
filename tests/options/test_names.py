"""Registries: from a name to a class, and helpful error messages."""

import sys
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marl_pool.envs import make_batched_env
from marl_pool.options.construction import build
from marl_pool.options.names import nearest, resolve, target, unknown
from marl_pool.perturbations import make_perturbation
from marl_pool.pooling import make_pooling
from marl_pool.utils.errors import InputError

REGISTRY = {"counter": "collections:Counter", "ordered": "collections:OrderedDict"}


class Box(dict[str, float]):
    """Something to build."""

    def __init__(self, width: float, *, height: float = 2.0) -> None:
        super().__init__(width=width, height=height)


class Anything(dict[str, float]):
    """Something that takes any option."""

    def __init__(self, **sizes: float) -> None:
        super().__init__(**sizes)


class Lid(dict[str, float], ABC):
    """Something that nothing can be built of."""

    @abstractmethod
    def open(self) -> None:
        """Missing."""

    @abstractmethod
    def close(self) -> None:
        """Missing, too."""


BOXES = {"box": f"{__name__}:Box", "anything": f"{__name__}:Anything"}


def test_registered_names_and_paths_resolve() -> None:
    assert resolve("counter", REGISTRY, "dict", dict) is Counter
    assert resolve("ordered", REGISTRY, "dict", dict) is OrderedDict
    assert resolve("collections:Counter", {}, "dict", dict) is Counter


def test_target_imports_nothing() -> None:
    name = "email.mime.audio:MIMEAudio"
    sys.modules.pop("email.mime.audio", None)
    assert target("x", {"x": name}, "thing") == name
    assert target(name, {}, "thing") == name
    assert "email.mime.audio" not in sys.modules


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clp", "clip"),
        ("clip_param", "clip"),
        ("some_long_param_kl_value", "kl_value"),
        ("learning_rate", ""),
        ("", ""),
    ],
)
def test_the_nearest_name_is_similar_or_a_part(name: str, expected: str) -> None:
    assert nearest(name, ["clip", "kl", "kl_value", "lr"]) == expected


def test_an_unknown_name_lists_the_choices_and_the_nearest() -> None:
    message = (
        r"^unknown dict 'countr': choose from counter, ordered. "
        r"Did you mean 'counter'\?$"
    )
    with pytest.raises(InputError, match=message):
        resolve("countr", REGISTRY, "dict", dict)
    with pytest.raises(InputError, match=r"choose from counter, ordered\.$"):
        resolve("zzz", REGISTRY, "dict", dict)


@given(st.text(), st.text())
@example("", "")
@example(".relative", ":Name")
@example("double..dot", ":Name")
def test_no_text_is_more_than_a_refusal(module: str, suffix: str) -> None:
    # No module begins so: whatever the text is, nothing is imported by accident.
    for name in (
        f"zz_{module}{suffix}",
        f"zz_{module}:{suffix}",
        f".zz_{module}:{suffix}",
    ):
        with pytest.raises(InputError):
            resolve(name, REGISTRY, "dict", dict)


@pytest.mark.parametrize(
    "name",
    ["collections:", ":Counter", ":", "collections", ".abc:Set", "a b:C", "a:B.c"],
)
def test_half_a_path_is_an_unknown_name(name: str) -> None:
    with pytest.raises(InputError, match="choose from counter, ordered"):
        target(name, REGISTRY, "dict")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.here:Thing", "cannot be imported: No module named"),
        ("collections:Contour", "collections has no 'Contour'"),
        ("collections:deque", "must be a subclass of builtins.dict, got <class"),
        ("collections:namedtuple", "must be a subclass of builtins.dict, got <func"),
        (f"{__name__}:Lid", "is abstract: it does not implement close, open$"),
    ],
)
def test_a_path_that_leads_nowhere_says_why(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        resolve(name, REGISTRY, "dict", dict)
    assert repr(name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            'x = 1\nraise ValueError("two\\nlines")\n',
            r"ValueError: two lines \(.*py:2\)$",
        ),
        ("class Head(:\n", r"SyntaxError: .*py, line 1"),
    ],
)
def test_a_module_that_raises_is_named_with_its_line(
    tmp_path, monkeypatch, source, message
):
    (tmp_path / "zz_raising.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=message) as refusal:
        resolve("zz_raising:Head", REGISTRY, "dict", dict)
    assert "dict 'zz_raising:Head' cannot be imported: " in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_unknown_accepts_a_name_that_is_no_string() -> None:
    assert "unknown head 3: choose from a, b." in str(unknown("head", 3, "ba"))


def test_build_passes_options_and_what_the_constructor_wants_of_the_context() -> None:
    context = {"height": 5.0, "depth": 1.0}
    built = build("box", BOXES, "box", dict, {"width": 3.0}, context)
    assert isinstance(built, Box)
    assert built == {"width": 3.0, "height": 5.0}
    options = {"width": 3.0, "height": 4.0}
    assert build("box", BOXES, "box", dict, options, context) == options


def test_build_lets_a_constructor_take_any_option() -> None:
    built = build("anything", BOXES, "box", dict, {"depth": 1.0}, {"width": 2.0})
    assert built == {"depth": 1.0}


def test_build_refuses_unknown_options_and_names_the_missing() -> None:
    with pytest.raises(InputError, match=r"'heigth'.*height, width.*mean 'height'"):
        build("box", BOXES, "box", dict, {"width": 1.0, "heigth": 1.0})
    with pytest.raises(InputError, match="box 'box' needs the option 'width'"):
        build("box", BOXES, "box", dict, {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_batched_env("simple_centroid", num_envs="4"),
            "env.num_envs: expected an integer >= 1, got '4'",
        ),
        (
            lambda: make_pooling("ada", dim=64, num_heads="4"),
            "pooling.num_heads: expected an integer >= 1, got '4'",
        ),
        (
            lambda: make_perturbation("jitter", severity=2),
            "perturbation.severity: expected a number in [0, 1], or two: "
            "[low, high], got 2",
        ),
        (
            lambda: make_batched_env("mpev2_spread", 1, domain="1"),
            "env.domain: expected 0, 1 or 2, got '1'",
        ),
    ],
)
def test_a_value_that_does_not_fit_its_annotation_is_refused(make, message) -> None:
    with pytest.raises(InputError) as refusal:
        make()
    assert str(refusal.value) == message
