"""The line of a user's code in an error of one line."""

from pathlib import Path

import numpy as np
import pytest

from helpers.unruly import Unruly
from marl_pool.envs.drawing.frames import to_rgb
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.timeout import env_call
from marl_pool.evaluation.loading import computing
from marl_pool.utils.errors import InputError, StoppedError, described, place

MODULE = "helpers.unruly:Unruly"


class Careless(Unruly):
    """Raises in its own line, in NumPy's or in this package's."""

    def step(self, actions):
        if self.fault == "numpy":
            return np.concatenate([np.zeros(3), np.zeros((2, 2))])
        if self.fault == "package":
            return to_rgb(None)
        raise KeyError


@pytest.mark.parametrize(
    ("fault", "begin"),
    [
        ("own", "KeyError ("),
        ("numpy", "ValueError: all the input array"),
        ("package", "InputError: expected an array of numbers, got None ("),
    ],
)
def test_an_error_has_the_user_s_innermost_line(monkeypatch, fault, begin):
    env = PettingZooEnv(1, module=f"{__name__}:Careless", options={"fault": fault})
    env.reset()
    with pytest.raises((KeyError, ValueError)) as caught:
        env.step({name: env.active[name].long() for name in env.groups})
    line = described(caught.value)
    assert line.startswith(begin)
    source = Path(__file__).read_text().splitlines()
    number = int(line.rpartition(":")[2].removesuffix(")"))
    assert {"own": "KeyError", "numpy": "concatenate", "package": "to_rgb"}[
        fault
    ] in source[number - 1]
    # A path is relative to the working directory, if it is in it.
    assert str(Path(__file__).relative_to(Path.cwd())) in line
    monkeypatch.chdir("/")
    assert str(Path(__file__).relative_to("/")) in place(caught.value)


def test_errors_of_this_package_alone_have_no_place():
    with pytest.raises(InputError) as caught:
        PettingZooEnv(1, module="json:nothing")
    assert place(caught.value) == ""


def test_an_env_that_raises_ends_an_evaluation_in_one_line():
    env = PettingZooEnv(1, module=MODULE, options={"fault": "raises"})
    env.reset()
    with (
        pytest.raises(StoppedError) as caught,
        computing(None),
        env_call(env, "a step"),
    ):
        env.step({name: env.active[name].long() for name in env.groups})
    line = str(caught.value)
    assert line.startswith("RuntimeError: the door is shut (")
    assert line.endswith("), raised by a step of PettingZooEnv")
    assert "helpers/unruly.py:" in line


def test_other_errors_than_an_env_s_are_not_hidden():
    with pytest.raises(KeyError), computing(None):
        raise KeyError("a bug")
