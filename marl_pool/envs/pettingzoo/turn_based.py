"""PettingZoo's turn-based (AEC) environments behind its parallel API."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import aec_to_parallel
from typing_extensions import override

from marl_pool.envs.pettingzoo.life import read_reward
from marl_pool.utils.errors import InputError

ByAgent = dict[Any, Any]
TOLERANCE = 1e-4
"""Relative difference of two sums of the same rewards, which may be float32."""


def parallel_of(env: AECEnv[Any, Any, Any]) -> ParallelEnv[Any, Any, Any]:
    """Return an environment whose steps are cycles, if it allows that, or turns."""
    if env.metadata.get("is_parallelizable"):
        return aec_to_parallel(env)
    return TurnBasedAgents(env)


class TurnBasedAgents(ParallelEnv[Any, Any, Any]):
    """A turn-based environment whose steps are turns, behind ``ParallelEnv``.

    A step takes the action of the agent in turn and ignores the others. It returns the
    rewards and flags of all agents, but observations and infos only of the next agent
    in turn and of the agents that ended and were asked for their last action, which is
    None.

    Args:
        env: the environment.

    Raises:
        InputError: in `reset` and `step`, a reward is not one number, an agent that
            ended stays after its action None, or ``last()`` returns another reward than
            the sum of ``rewards`` since the agent's last turn.
    """

    def __init__(self, env: AECEnv[Any, Any, Any]) -> None:
        self.env, self.metadata = env, env.metadata
        self.render_mode = getattr(env, "render_mode", None)
        self.possible_agents = list(getattr(env, "possible_agents", ()))
        self._unpaid: ByAgent = {}  # rewards since the last turn
        self._number = 0  # of the step

    @property
    def agents(self) -> Any:
        """The agents of the episode."""
        return self.env.agents

    @property
    def in_turn(self) -> Any:
        """The agent that acts in the next step, None at the end."""
        return self.env.agent_selection if self.env.agents else None

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
        self.env.reset(seed=seed, options=options)
        self._unpaid, self._number = defaultdict(float), 0
        observations, *_, infos = self._until_turn()
        return observations, infos

    @override
    def step(
        self, actions: ByAgent
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        agent = self.env.agent_selection
        self._unpaid[agent] = 0.0
        self._number += 1
        self.env.step(actions[agent])
        return self._until_turn(stepped=True)

    def _until_turn(
        self, *, stepped: bool = False
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Let agents that ended leave until one is in turn; return what happened."""
        env = self.env
        observations: ByAgent = {}
        infos: ByAgent = {}
        rewards: ByAgent = {}
        terminations: ByAgent = {}
        truncations: ByAgent = {}
        while True:
            terminations |= self._by_agent("terminations")
            truncations |= self._by_agent("truncations")
            for agent, reward in self._by_agent("rewards").items() if stepped else ():
                number = self._reward(agent, reward)
                self._unpaid[agent] += number
                rewards[agent] = rewards.get(agent, 0.0) + number
            agent = env.agent_selection
            if not isinstance(env.agents, Collection) or agent not in env.agents:
                break  # what is wrong, `Lives` says
            results = env.last()
            if not isinstance(results, Sequence) or len(results) != 5:
                raise self._error(
                    agent,
                    "last(): expected observation, reward, termination, truncation and "
                    f"info, got {results!r:.80}",
                )
            observations[agent], reward, terminated, truncated, infos[agent] = results
            paid, unpaid = self._reward(agent, reward), self._unpaid[agent]
            if abs(unpaid - paid) > TOLERANCE * max(abs(paid), 1.0):
                raise self._error(
                    agent,
                    f"last(): expected the reward {unpaid:g}, the sum of env.rewards "
                    f"since the agent's last turn, got {paid:g}",
                )
            if not (terminated or truncated):
                break
            env.step(None)
            stepped = True
            if agent in env.agents:
                raise self._error(
                    agent,
                    "ended and is in env.agents after its action None, expected it to "
                    "leave",
                )
        return observations, rewards, terminations, truncations, infos

    def _by_agent(self, name: str) -> Mapping[Any, Any]:
        """Return a dict of the environment, such as its rewards."""
        values = getattr(self.env, name, None)
        if not isinstance(values, Mapping):
            raise InputError(
                f"env.module: {self._where()}: {name}: expected a dict by agent, got "
                f"{values!r:.80}"
            )
        return values

    def _where(self) -> str:
        return f"step {self._number}" if self._number else "reset"

    def _reward(self, agent: Any, reward: Any) -> float:
        number = read_reward(reward)
        if number is None:
            raise self._error(agent, f"reward: expected one number, got {reward!r}")
        return number

    def _error(self, agent: Any, problem: str) -> InputError:
        where = f"env.module: {self._where()}: agent {agent!r}"
        return InputError(" ".join(f"{where}: {problem}".split()))

    @override
    def render(self) -> Any:
        return self.env.render()

    @override
    def close(self) -> None:
        self.env.close()
