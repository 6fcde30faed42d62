"""The lives of agents in an episode of PettingZoo's API, and the rules of that API.

The rules follow PettingZoo's documentation and its ``parallel_api_test``.
Where environments are laxer and the meaning is clear, `Lives` documents it; where it is
not, they are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from marl_pool.observations.parts import as_array
from marl_pool.utils.errors import InputError, described
from marl_pool.utils.text import kind_of, single_line

RESET_PARTS = ("observations", "infos")
"""Dicts that ``ParallelEnv.reset`` returns, by agent."""
STEP_PARTS = ("observations", "rewards", "terminations", "truncations", "infos")
"""Dicts that ``ParallelEnv.step`` returns, by agent."""


class Lives:
    """The agents of one episode: who is born, alive, ended and gone.

    - *Born*: after a reset or step the agent is listed in ``env.agents``.
    - *Alive*: from its birth on it is observed and acts. Each of its steps gives it a
      reward, which is one number, a termination and a truncation, True or False.
    - *Ended*: a step flagged it as terminated or truncated. The reward of that step is
      its last. It may remain listed if it stays flagged and earns nothing more.
    - *Gone*: it is no longer listed. It may be born again.

    The episode is over when no agent is alive. If some of the last ones were truncated
    and not terminated, the episode is truncated, and their values are bootstrapped;
    otherwise it is terminated.

    `begin` follows a reset and `advance` a step; `earned` and `seen` then return the
    parts of its dicts that are used. They raise an `InputError` that names the step of
    the episode, the agent and the rule.

    Args:
        possible_agents: names of all agents that may be born.
    """

    def __init__(self, possible_agents: Iterable[Any]) -> None:
        self.possible = frozenset(possible_agents)
        self.number = 0
        """Steps taken in the episode."""
        self.listed: tuple[Any, ...] = ()
        """``env.agents``, each of which needs an action; some may have ended."""
        self.acted: tuple[Any, ...] = ()
        """Agents that were alive before the last step."""
        self.alive: tuple[Any, ...] = ()
        """Agents that act in the next step; none when the episode is over."""
        self.timed_out: tuple[Any, ...] = ()
        """Agents whose truncation ended the episode."""
        self._members: frozenset[Any] = frozenset()
        self._ends: dict[Any, int] = {}  # listed agents that ended, with the step

    def begin(self, agents: Any) -> None:
        """Begin an episode, with ``env.agents`` after the reset."""
        self.number, self._ends, self.acted, self.timed_out = 0, {}, (), ()
        self._list(agents)
        self.alive = self.listed
        if not self.alive:
            raise self._error("env.agents: expected at least one agent, got none")

    def advance(
        self,
        agents: Any,
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
    ) -> None:
        """Take a step, with ``env.agents`` and the flags after it."""
        self.number += 1
        self.acted = self.alive
        self._list(agents)
        self._require_known("terminations", terminations)
        self._require_known("truncations", truncations)
        timed_out = []
        for agent in self.acted:
            # Most agents live on, for which the other tests would be slow.
            if (
                terminations.get(agent) is False
                and truncations.get(agent) is False
                and agent in self._members
            ):
                continue
            terminated = self._flag("termination", terminations, agent)
            truncated = self._flag("truncation", truncations, agent)
            if terminated or truncated:
                self._ends[agent] = self.number
                if not terminated:
                    timed_out.append(agent)
            elif agent not in self._members:
                raise self._error(
                    "left env.agents without a flag, expected its termination or its "
                    "truncation to be True",
                    agent,
                )
        if self.listed == self.acted and not self._ends:
            return
        self._bury(terminations, truncations)
        self.alive = tuple(agent for agent in self.listed if agent not in self._ends)
        self.timed_out = () if self.alive else tuple(timed_out)

    def earned(self, rewards: Mapping[Any, Any]) -> dict[Any, float]:
        """Return the rewards of the agents that acted; the others may earn nothing."""
        earned = {agent: self._reward(rewards, agent) for agent in self.acted}
        if len(rewards) > len(earned):
            self._require_known("rewards", rewards)
            for agent in rewards.keys() - earned.keys():
                if rewards[agent] is None or self._reward(rewards, agent) == 0:
                    continue
                end = self._ends.get(agent)
                raise self._error(
                    "reward: expected 0 of an agent that "
                    + (f"ended in step {end}" if end else "did not act")
                    + ", whether env.agents lists it or not, got "
                    f"{rewards[agent]!r:.80}",
                    agent,
                )
        return earned

    def seen(
        self, observations: Mapping[Any, Any], in_turn: tuple[Any] | None = None
    ) -> dict[Any, Any]:
        """Return the observations that are needed: to act on, or to bootstrap from.

        Args:
            observations: by agent.
            in_turn: the only agent to act in the next step, as a tuple; None for all.
        """
        agents = self.alive or self.timed_out
        if in_turn is not None and self.alive:
            if in_turn[0] not in self.alive:
                raise self._error(
                    "agent_selection: expected an agent that is alive, one of "
                    f"{self.alive}, got {in_turn[0]!r}"
                )
            agents = in_turn
        return {
            agent: self._value("observation", observations, agent) for agent in agents
        }

    def require_infos(self, infos: Mapping[Any, Any]) -> None:
        """Raise an error unless each agent's info is a dict, or missing."""
        for agent, info in infos.items():
            if type(info) is dict or isinstance(info, Mapping):
                continue
            if agent in self.possible:
                raise self._error(f"info: expected a dict, got {kind_of(info)}", agent)

    def _error(self, problem: str, agent: Any = None) -> InputError:
        return error_at(self.number, problem, agent)

    def _list(self, agents: Any) -> None:
        """Set `listed`."""
        if type(agents) is list and tuple(agents) == self.listed:
            return
        if isinstance(agents, str) or not isinstance(agents, Iterable):
            raise self._error(f"env.agents: expected a list of names, got {agents!r}")
        listed = tuple(agents)
        if not _are_names(listed):
            raise self._error(f"env.agents: expected names, got {listed!r:.80}")
        self._require_known("env.agents", dict.fromkeys(listed))
        if len(set(listed)) < len(listed):
            raise self._error(f"env.agents: expected each agent once, got {listed}")
        self.listed, self._members = listed, frozenset(listed)

    def _bury(
        self, terminations: Mapping[Any, Any], truncations: Mapping[Any, Any]
    ) -> None:
        """Forget the ends of agents that are gone; check those that are listed."""
        for agent in self._members.difference(self.acted):
            if any(
                agent in flags and self._flag(name, flags, agent)
                for name, flags in (
                    ("termination", terminations),
                    ("truncation", truncations),
                )
            ):
                self._ends.setdefault(agent, self.number)
            elif agent in self._ends:
                raise self._error(
                    f"ended in step {self._ends[agent]} and is in env.agents without a "
                    "flag, expected it to leave or to stay flagged",
                    agent,
                )
        self._ends = {a: end for a, end in self._ends.items() if a in self._members}

    def _require_known(self, where: str, agents: Mapping[Any, Any]) -> None:
        # Comparing sets is fast; the difference is only needed for the message.
        if not agents.keys() <= self.possible:
            stranger = min(agents.keys() - self.possible, key=str)
            raise self._error(
                f"{where}: expected one of possible_agents, got agent {stranger!r}"
            )

    def _value(self, name: str, values: Mapping[Any, Any], agent: Any) -> Any:
        try:
            return values[agent]
        except KeyError:
            raise self._error(f"{name}: expected one, got none", agent) from None

    def _flag(self, name: str, flags: Mapping[Any, Any], agent: Any) -> bool:
        value = self._value(name, flags, agent)
        flag = read_flag(value)
        if flag is None:
            raise self._error(
                f"{name}: expected True or False, got {value!r:.80}", agent
            )
        return flag

    def _reward(self, rewards: Mapping[Any, Any], agent: Any) -> float:
        return read_reward(self._value("reward", rewards, agent), self.number, agent)


def read_flag(flag: Any) -> bool | None:
    """Return a flag as a bool; None if it is not one."""
    if flag is True or flag is False:
        return flag
    array = as_array(flag)
    if array is None or array.dtype != np.bool_ or array.size != 1:
        return None
    return bool(array.item())


def read_reward(reward: Any, number: int, agent: Any) -> float:
    """Return an agent's reward in step ``number``.

    Raises:
        InputError: it is not one number.
    """
    if isinstance(reward, float | int):
        with suppress(OverflowError):
            return float(reward)
    else:
        array = as_array(reward)
        if array is not None and array.dtype.kind in "biuf" and array.size == 1:
            return float(array.item())
    raise error_at(number, f"reward: expected one number, got {reward!r:.80}", agent)


def agent_names(env: Any) -> list[Any]:
    """Return the names of all agents of an environment.

    Raises:
        InputError: ``possible_agents`` is not a list of different names.
    """
    try:
        names = getattr(env, "possible_agents", None)
    except Exception as error:  # third-party code may raise any exception
        raise InputError(f"env.module: possible_agents: {described(error)}") from error
    if not isinstance(names, list | tuple) or not names:
        # A set would have another order in each process.
        raise InputError(
            "env.module: expected an env with possible_agents, a list of names, got "
            f"{names!r:.80}"
        )
    if not _are_names(names):
        raise InputError(
            f"env.module: possible_agents: expected names, got {names!r:.80}"
        )
    if len({*map(str, names)}) < len(names):
        raise InputError(
            f"env.module: expected possible_agents of different names, got {[*names]}"
        )
    return [*names]


def _are_names(names: Sequence[Any]) -> bool:
    try:
        return len({*names}) > 0 or not names
    except TypeError:  # unhashable
        return False


def place(number: int) -> str:
    """Return the start of error messages about a step; 0 is the reset."""
    return f"env.module: step {number}" if number else "env.module: reset"


def error_at(number: int, problem: str, agent: Any = None) -> InputError:
    """Return an error of one line about a step, and about an agent if given."""
    name = "" if agent is None else f"agent {agent!r}: "
    return InputError(single_line(f"{place(number)}: {name}{problem}"))


def split(
    result: Any, names: Sequence[str], number: int, dicts: Sequence[str] | None = None
) -> tuple[Any, ...]:
    """Return the values ``names`` in the result of step ``number``; 0 is the reset.

    Raises:
        InputError: another number of values, or one of ``dicts``, by default all, that
            is not a dict.
    """
    is_sequence = isinstance(result, Sequence) and not isinstance(result, str)
    if not is_sequence or len(result) != len(names):
        kind = "dicts" if dicts is None else "values"
        actual = f"{len(result)} values" if is_sequence else kind_of(result)
        expected = f"{len(names)} {kind}, {', '.join(names)}"
        raise error_at(number, f"expected {expected}, got {actual}")
    for name, part in zip(names, result, strict=True):
        if type(part) is dict or isinstance(part, Mapping):
            continue
        if dicts is None or name in dicts:
            raise error_at(number, f"{name}: expected a dict, got {kind_of(part)}")
    return tuple(result)
