"""PettingZoo's turn-based (AEC) environments behind its parallel API."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pettingzoo import AECEnv, ParallelEnv
from typing_extensions import override

from marl_pool.envs.pettingzoo.life import error_at, read_flag, read_reward
from marl_pool.utils.errors import InputError

ByAgent = dict[Any, Any]
Results = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]
"""Observations, rewards, terminations, truncations and infos."""
TOLERANCE = 1e-4
"""Largest relative difference of sums of the same rewards, which may be float32."""
FLAGS = ("terminations", "truncations")
LAST = (*FLAGS, "_cumulative_rewards", "infos")
"""Dicts by agent that PettingZoo's own ``last()`` reads."""


def parallel_of(env: AECEnv[Any, Any, Any]) -> "AECAgents":
    """Return an environment whose steps are cycles if it allows that, else turns."""
    metadata = getattr(env, "metadata", None)
    if isinstance(metadata, Mapping) and metadata.get("is_parallelizable"):
        return CycledAgents(env)
    return TurnBasedAgents(env)


class AECAgents(ParallelEnv[Any, Any, Any]):
    """A turn-based environment behind ``ParallelEnv``.

    Args:
        env: the environment.

    Raises:
        InputError: in `reset` and `step`, an attribute that is not a dict by agent, or
            a reward that is not one number.
    """

    def __init__(self, env: AECEnv[Any, Any, Any]) -> None:
        self.env = env
        self.render_mode = getattr(env, "render_mode", None)
        self.number = 0
        """Steps taken in the episode."""

    @property
    def possible_agents(self) -> Any:
        """Names of all agents."""
        return self.env.possible_agents

    @property
    def agents(self) -> Any:
        """The agents of the episode."""
        return self.env.agents

    @property
    def unwrapped(self) -> Any:
        """The environment below all wrappers, whose state a tokenizer may read."""
        return self.env.unwrapped

    @override
    def observation_space(self, agent: Any) -> Any:
        return self.env.observation_space(agent)

    @override
    def action_space(self, agent: Any) -> Any:
        return self.env.action_space(agent)

    @override
    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ByAgent, ByAgent]:
        self.number = 0
        self.env.reset(seed=seed)
        return self._begin()

    @abstractmethod
    def _begin(self) -> tuple[ByAgent, ByAgent]:
        """Return observations and infos after a reset."""

    @override
    def render(self) -> Any:
        return self.env.render()

    @override
    def close(self) -> None:
        self.env.close()

    @override
    def state(self) -> Any:
        return self.env.state()

    def _listed(self) -> list[Any]:
        """Return the agents of the episode; `Lives` reports what is wrong with them."""
        agents = getattr(self.env, "agents", None)
        if isinstance(agents, Collection) and not isinstance(agents, str):
            return [*agents]
        return []

    def _selected(self) -> Any:
        """Return the agent in turn, None if there is no such attribute."""
        return getattr(self.env, "agent_selection", None)

    def _by_agent(self, name: str) -> Mapping[Any, Any]:
        """Return a dict of the environment, such as its rewards."""
        values = getattr(self.env, name, None)
        if not isinstance(values, Mapping):
            raise self._error(f"{name}: expected a dict by agent, got {values!r:.80}")
        return values

    def _add_rewards(self, *totals: ByAgent) -> None:
        """Add the rewards of a turn to sums by agent."""
        for agent, reward in self._by_agent("rewards").items():
            number = read_reward(reward, self.number, agent)
            for total in totals:
                total[agent] = total.get(agent, 0.0) + number

    def _bury(self, agent: Any) -> None:
        """Let an agent that ended leave, by the action None."""
        # PettingZoo's own step deletes all of these, and may fail halfway.
        missing = [name for name in (*LAST, "rewards") if self._lacks(name, agent)]
        try:
            self.env.step(None)
        except (AttributeError, LookupError, TypeError) as error:
            if missing:
                raise self._missing(missing[0], agent) from error
            raise
        if agent in self._listed():
            raise self._error(
                "ended and is in env.agents after its action None, expected it to "
                "leave",
                agent,
            )

    def _lacks(self, name: str, agent: Any) -> bool:
        values = getattr(self.env, name, None)
        return not isinstance(values, Mapping) or agent not in values

    def _missing(self, name: str, agent: Any) -> InputError:
        return self._error(f"{name}: expected one of each agent, got none", agent)

    def _error(self, problem: str, agent: Any = None) -> InputError:
        return error_at(self.number, problem, agent)


class CycledAgents(AECAgents):
    """A turn-based environment whose steps are cycles, in which each agent has a turn.

    It is PettingZoo's ``aec_to_parallel`` with checks. All agents observe what they see
    at the end of a cycle, and earn the sum of their rewards in it.

    Raises:
        InputError: also in `step`, agents take turns in another order than in
            ``env.agents``, or one ends in the middle of a cycle.
    """

    @override
    def _begin(self) -> tuple[ByAgent, ByAgent]:
        flags = [self._by_agent(name) for name in FLAGS]
        observations = {
            agent: self.env.observe(agent)
            for agent in self._listed()
            if not any(by_agent.get(agent) for by_agent in flags)
        }
        return observations, dict(self._by_agent("infos"))

    @override
    def step(self, actions: ByAgent) -> Results:
        env, rewards = self.env, ByAgent()
        self.number += 1
        for agent in self._listed():
            self._require_turn(agent)
            env.step(actions[agent])
            self._add_rewards(rewards)
        terminations, truncations, infos = (
            dict(self._by_agent(name)) for name in (*FLAGS, "infos")
        )
        observations = {agent: env.observe(agent) for agent in self._listed()}
        while self._listed() and self._ended(agent := self._selected()):
            self._bury(agent)
        return observations, rewards, terminations, truncations, infos

    def _require_turn(self, agent: Any) -> None:
        if self._selected() == agent and not self._ended(agent):
            return
        problem = f"agent_selection: expected {agent!r}, the next of env.agents, got "
        problem += repr(self._selected())
        if self._ended(agent):
            problem = f"agent {agent!r}: ended in mid-cycle, expected that at its end"
        raise self._error(f"{problem}, since metadata say is_parallelizable")

    def _ended(self, agent: Any) -> bool:
        return any(read_flag(self._by_agent(name).get(agent)) for name in FLAGS)


class TurnBasedAgents(AECAgents):
    """A turn-based environment whose steps are turns.

    A step takes the action of the agent in turn and ignores the others. It returns the
    rewards and flags of all agents, but observations and infos only of the next agent
    in turn and of the agents that ended and were asked for their last action, which is
    None.

    Raises:
        InputError: also in `reset` and `step`, an agent that ended stays after its
            action None, or ``last()`` returns another reward than the sum of
            ``rewards`` since the agent's last turn.
    """

    def __init__(self, env: AECEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._unpaid: ByAgent = {}  # rewards since the last turn

    @property
    def in_turn(self) -> tuple[Any]:
        """The agent that acts in the next step, unless the episode is over."""
        return (self._selected(),)

    @override
    def _begin(self) -> tuple[ByAgent, ByAgent]:
        self._unpaid = defaultdict(float)
        observations, *_, infos = self._until_turn()
        return observations, infos

    @override
    def step(self, actions: ByAgent) -> Results:
        agent = self.env.agent_selection
        self._unpaid[agent] = 0.0
        self.number += 1
        self.env.step(actions[agent])
        return self._until_turn(stepped=True)

    def _until_turn(self, *, stepped: bool = False) -> Results:
        """Let ended agents leave until a living one is in turn; return the results."""
        observations: ByAgent = {}
        infos: ByAgent = {}
        rewards: ByAgent = {}
        terminations: ByAgent = {}
        truncations: ByAgent = {}
        while True:
            terminations |= self._by_agent("terminations")
            truncations |= self._by_agent("truncations")
            if stepped:
                self._add_rewards(rewards, self._unpaid)
            agent = self._selected()
            if agent not in self._listed():
                break  # `Lives` reports what is wrong
            observation, reward, terminated, truncated, info = self._last(agent)
            observations[agent], infos[agent] = observation, info
            self._require_paid(agent, read_reward(reward, self.number, agent))
            if not (read_flag(terminated) or read_flag(truncated)):
                break
            self._bury(agent)
            stepped = True
        return observations, rewards, terminations, truncations, infos

    def _last(self, agent: Any) -> Sequence[Any]:
        try:
            results = self.env.last()
        except (AttributeError, LookupError, TypeError) as error:
            self._explain_last(agent, error)
            raise
        if not isinstance(results, Sequence) or len(results) != 5:
            raise self._error(
                "last(): expected observation, reward, termination, truncation and "
                f"info, got {results!r:.80}",
                agent,
            )
        return results

    def _explain_last(self, agent: Any, error: Exception) -> None:
        """Raise an `InputError` if PettingZoo's own ``last()`` lacks something."""
        cls = type(getattr(self.env, "unwrapped", self.env))
        if cls.last is not AECEnv.last:
            return
        for name in LAST:
            if agent not in self._by_agent(name):
                raise self._missing(name, agent) from error

    def _require_paid(self, agent: Any, paid: float) -> None:
        unpaid = self._unpaid[agent]
        if abs(unpaid - paid) > TOLERANCE * max(abs(paid), 1.0):
            raise self._error(
                f"last(): expected the reward {unpaid:g}, the sum of env.rewards "
                f"since the agent's last turn, got {paid:g}",
                agent,
            )
