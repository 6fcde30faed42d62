"""PettingZoo's turn-based (AEC) environments behind its parallel API."""

from collections import defaultdict
from typing import Any

from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import aec_to_parallel
from typing_extensions import override

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
        InputError: in `reset` and `step`, an agent that ended stays after its action
            None, or ``last()`` returns another reward than the sum of ``rewards`` since
            the agent's last turn.
    """

    def __init__(self, env: AECEnv[Any, Any, Any]) -> None:
        self.env, self.metadata = env, env.metadata
        self.render_mode = getattr(env, "render_mode", None)
        self.possible_agents = list(getattr(env, "possible_agents", ()))
        self._unpaid: ByAgent = {}  # rewards since the last turn

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
        self._unpaid = defaultdict(float)
        observations, *_, infos = self._until_turn()
        return observations, infos

    @override
    def step(
        self, actions: ByAgent
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        agent = self.env.agent_selection
        self._unpaid[agent] = 0.0
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
            terminations |= env.terminations
            truncations |= env.truncations
            for agent, reward in env.rewards.items() if stepped else ():
                self._unpaid[agent] = self._unpaid[agent] + reward
                rewards[agent] = rewards[agent] + reward if agent in rewards else reward
            if not env.agents:
                break
            agent = env.agent_selection
            observation, reward, terminated, truncated, info = env.last()
            observations[agent], infos[agent] = observation, info
            gap, size = abs(self._unpaid[agent] - reward), abs(reward)
            if gap > TOLERANCE * max(size, 1.0):
                raise InputError(
                    f"env.module: agent {agent!r}: last(): expected the reward "
                    f"{self._unpaid[agent]}, the sum of env.rewards since the agent's "
                    f"last turn, got {reward}"
                )
            if not (terminated or truncated):
                break
            env.step(None)
            stepped = True
            if agent in env.agents:
                raise InputError(
                    f"env.module: agent {agent!r}: ended and is in env.agents after "
                    "its action None, expected it to leave"
                )
        return observations, rewards, terminations, truncations, infos

    @override
    def render(self) -> Any:
        return self.env.render()

    @override
    def close(self) -> None:
        self.env.close()
