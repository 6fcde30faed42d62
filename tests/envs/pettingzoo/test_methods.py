"""Methods of a user's environment that cannot be called as in the API."""

from typing import Any

import gymnasium
import pytest
from pettingzoo.utils.conversions import aec_to_parallel
from pettingzoo.utils.wrappers import BaseParallelWrapper, OrderEnforcingWrapper

from helpers.rule_breaker import Breaker
from helpers.turn_based import PassItOn
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.utils.errors import InputError

MODULE = f"{__name__}:build"
KINDS = {"parallel": Breaker, "turns": PassItOn, "gymnasium": gymnasium.Env}
WRAPPERS: dict[str, Any] = {
    "parallel": BaseParallelWrapper,
    "turns": OrderEnforcingWrapper,
    "gymnasium": gymnasium.Wrapper,
}


class Methods:
    """Functions in place of ``reset`` and ``step``."""

    def nothing(self):
        return self

    def options_only(self, options=None):
        return self, options

    def positional(self, seed, options):
        return self, seed, options

    def seed_only(self, seed=None):
        return super(type(self), self).reset(seed=seed)

    def anything(self, *arguments, **named):
        return super(type(self), self).reset(*arguments, **named)

    def two(self, action, more):
        return self, action, more


RESET = "expected reset(seed=None, options=None), got reset"


def build(kind, method, function, wrapped=False, cycles=False):
    """Build an env with one method replaced."""
    base = KINDS[kind]
    cls = type("Broken", (base,), {method: getattr(Methods, function)})
    cls.metadata = {"name": "broken", "is_parallelizable": cycles}
    env = cls()
    if wrapped:
        env = WRAPPERS[kind](env)
    return aec_to_parallel(env) if cycles else env


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("method", "function", "message"),
    [
        ("reset", "nothing", f"{RESET}()"),
        ("reset", "options_only", f"{RESET}(options=None)"),
        ("step", "nothing", "expected step(action), got step()"),
        ("step", "two", "expected step(action), got step(action, more)"),
    ],
)
def test_a_method_of_other_arguments_is_refused_with_its_line(
    kind, wrapped, method, function, message
):
    options = {"kind": kind, "method": method, "function": function}
    line = getattr(Methods, function).__code__.co_firstlineno
    with pytest.raises(InputError) as caught:
        PettingZooEnv(1, module=MODULE, options={**options, "wrapped": wrapped})
    shown = str(caught.value)
    assert shown.startswith(f"env.module: Broken: {message} (")
    assert shown.endswith(f"test_methods.py:{line})")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"kind": kind, "function": "positional"}, r"got reset\(seed, options\) \(")
            for kind in KINDS
        ),
        # Behind a conversion to cycles too.
        (
            {"kind": "turns", "function": "nothing", "cycles": True},
            r"Broken: expected reset\(seed=None",
        ),
        # A wrapper passes on options.
        (
            {"kind": "parallel", "function": "seed_only", "wrapped": True},
            r"got reset\(seed=None\) \(",
        ),
    ],
)
def test_a_reset_that_cannot_be_called_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        PettingZooEnv(1, module=MODULE, options={"method": "reset", **options})


@pytest.mark.parametrize("kind", ["parallel", "turns"])
@pytest.mark.parametrize("function", ["seed_only", "anything"])
def test_reset_without_options_or_with_any_arguments_is_accepted(kind, function):
    options = {"kind": kind, "method": "reset", "function": function}
    env = PettingZooEnv(1, module=MODULE, options=options)
    env.reset()
    assert any(active.any() for active in env.active.values())
