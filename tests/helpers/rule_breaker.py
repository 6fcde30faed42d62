"""A PettingZoo env that breaks one rule of the API, or returns odd but clear values."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Breaker(ParallelEnv):
    """Three agents that earn 1 in each of five steps, and are then truncated.

    Args:
        fault: name of one of `FAULTS`; None for an env that obeys the rules.
        render_mode: "rgb_array" or None.
    """

    metadata: ClassVar = {"name": "rule_breaker", "render_modes": ["rgb_array"]}

    def __init__(self, fault=None, render_mode=None):
        self.fault, self.render_mode = fault, render_mode
        self.possible_agents = ["a_0", "a_1", "a_2"]
        self.agents: Any = []
        self.time = 0

    def observation_space(self, agent):
        return spaces.Box(-9, 9, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def render(self):
        return np.full((20, 40, 3), 40 * self.time, np.uint8)

    def reset(self, seed=None, options=None):
        if self.fault == "stops at reset":
            raise StopIteration
        self.start = np.random.default_rng(seed).random()
        self.agents, self.time = list(self.possible_agents), 0
        return self._break((self._observe(), {a: {} for a in self.agents}))

    def step(self, actions):
        if self.fault == "raises":
            raise RuntimeError("the door\nis shut")
        if self.fault == "stops":
            raise StopIteration
        assert set(actions) == set(self.agents)
        self.time += 1
        acted, over = self.agents, self.time == 5
        observations = self._observe()
        self.agents = [] if over else list(acted)
        return self._break(
            (
                observations,
                dict.fromkeys(acted, 1.0),
                dict.fromkeys(acted, False),
                dict.fromkeys(acted, over),
                {agent: {} for agent in acted},
            )
        )

    def _observe(self):
        return {a: np.array([self.time, self.start], np.float32) for a in self.agents}

    def _break(self, parts):
        if self.fault not in FAULTS:
            return parts
        result = FAULTS[self.fault](self, *parts)
        return parts if result is None else result


Fault = Callable[..., Any]
"""Takes the env and a result's parts; changes them, or returns another result."""


def at_reset(fault: Fault) -> Fault:
    """Apply a fault to the results of a reset."""
    return lambda env, *parts: fault(env, *parts) if len(parts) == 2 else None


def at_step(fault: Fault, number: int = 2, *, repeat: bool = False) -> Fault:
    """Apply a fault to the results of step ``number``; with ``repeat`` of later too."""

    def apply(env, *parts):
        is_due = env.time >= number if repeat else env.time == number
        return fault(env, *parts) if len(parts) == 5 and is_due else None

    return apply


def put(index: int, values: dict[Any, Any]) -> Fault:
    """Return the fault that puts ``values`` into the part ``index``."""
    return lambda env, *parts: parts[index].update(values)


def without(index: int, agent: str = "a_0") -> Fault:
    """Return the fault that removes an agent from the part ``index``."""

    def apply(env, *parts):
        del parts[index][agent]

    return apply


def instead(index: int, value: Any) -> Fault:
    """Return the fault that replaces the part ``index``."""
    return lambda env, *parts: (*parts[:index], value, *parts[index + 1 :])


def list_agents(agents: Any) -> Fault:
    """Return the fault that sets ``env.agents``."""

    def apply(env, *parts):
        env.agents = agents

    return apply


def _end(env, observations, rewards, terminated, truncated, infos):
    """Terminate agent 0, which stays listed; "paid after the end" also rewards it."""
    terminated["a_0"] = True
    if env.time > 2:
        rewards["a_0"] = 1.0 if env.fault == "paid after the end" else 0.0


def _truncate(env, observations, rewards, terminated, truncated, infos):
    """Truncate agent 0, which stays listed; the others terminate in step 4."""
    truncated["a_0"] = True
    if env.time > 2:
        rewards["a_0"] = None
    for agent in ("a_1", "a_2"):
        terminated[agent] = env.time == 4


def _all_end(env, observations, rewards, terminated, truncated, infos):
    terminated.update(dict.fromkeys(terminated, True))
    env.agents = list(env.possible_agents)


FAULTS: dict[str, Fault] = {
    "flag ragged": at_step(put(2, {"a_0": [[], [True]]})),
    "reward with gradient": at_step(put(1, {"a_0": torch.ones(1, requires_grad=True)})),
    # Lives
    "nobody after reset": at_reset(list_agents([])),
    "stranger": at_reset(list_agents(["a_0", "ghost"])),
    "twice": at_reset(list_agents(["a_0", "a_0"])),
    "no list": at_reset(list_agents(None)),
    "a text": at_reset(list_agents("a_0")),
    "no names": at_reset(list_agents([["a_0"]])),
    "stranger later": at_step(list_agents(["a_0", "a_1", "a_2", "ghost"])),
    "vanishes": at_step(list_agents(["a_1", "a_2"])),
    "all vanish": at_step(list_agents([])),
    "ended and listed": at_step(_end, repeat=True),
    "paid after the end": at_step(_end, repeat=True),
    "lives on": at_step(put(2, {"a_0": True})),
    "truncated and listed": at_step(_truncate, repeat=True),
    "all end and stay listed": at_step(_all_end),
    "flagged numpy": at_step(
        put(2, {"a_0": np.bool_(False), "a_1": np.array([False])})
    ),
    # Flags
    "__all__": at_step(put(2, {"__all__": True})),
    "__all__ late": at_step(put(3, {"__all__": False})),
    "no termination": at_step(without(2)),
    "no truncation": at_step(without(3)),
    "flag None": at_step(put(2, {"a_0": None})),
    "flag number": at_step(put(2, {"a_0": 0})),
    "flag array": at_step(put(3, {"a_0": np.array([True, False])})),
    "flags list": at_step(instead(2, [False] * 3)),
    "flags bool": at_step(instead(3, False)),
    # Rewards
    "no reward": at_step(without(1)),
    "reward None": at_step(put(1, {"a_0": None})),
    "reward too large": at_step(put(1, {"a_0": 10**400})),
    "large reward": at_step(put(1, {"a_0": 10**30})),
    "reward text": at_step(put(1, {"a_0": "1"})),
    "reward array": at_step(put(1, {"a_0": np.array([1.0, 2.0])})),
    "reward for a stranger": at_step(put(1, {"ghost": 1.0})),
    "rewards number": at_step(instead(1, 1.0)),
    "one number": at_step(
        put(1, {"a_0": np.array([1], np.float32), "a_1": np.array(1), "a_2": True})
    ),
    # Observations and infos
    "no observation": at_step(without(0)),
    "no last observation": at_step(without(0), 5),
    "no first observation": at_reset(without(0)),
    "observation shape": at_step(put(0, {"a_0": np.zeros(1)})),
    "observation None": at_step(put(0, {"a_0": None})),
    "observations array": at_step(instead(0, np.zeros((3, 2)))),
    "common": at_step(put(0, {"common": 7})),
    "infos None": at_step(instead(4, None)),
    "infos list": at_step(instead(4, [{}, {}, {}])),
    "info None": at_step(put(4, {"a_0": None})),
    "info text": at_reset(put(1, {"a_1": "mask"})),
    "info for others": at_step(put(4, {"ghost": {}, "common": 7})),
    "no infos": at_step(instead(4, {})),
    # Forms
    "old reset": at_reset(lambda env, observations, infos: observations),
    "reset None": at_reset(lambda env, *parts: "none"),
    "reset of 3": at_reset(lambda env, *parts: (*parts, {})),
    "old step": at_step(lambda env, *parts: (*parts[:3], parts[4])),
    "step None": at_step(lambda env, *parts: "none"),
}
