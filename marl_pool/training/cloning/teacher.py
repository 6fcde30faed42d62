"""Teachers: whoever can say what to do in the state where a world is."""

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from marl_pool.envs.base import World
from marl_pool.policies.base import Policy, SpecifiedPolicy, State
from marl_pool.randomness import Stream
from marl_pool.tokens import Tokens

if TYPE_CHECKING:
    from marl_pool.envs.pong_planner import PongPlanner


class Answer(NamedTuple):
    """What a teacher says; ``E`` worlds, ``A`` agents in each."""

    action: Tensor
    """``(E, A, dim)`` or ``(E, A)`` in the env's units."""
    logits: Tensor | None
    """``(E, A, n)`` of its choices; None where it has none."""
    state: State
    """Its memory for the next step."""
    hints: Tensor | None = None
    """``(E, A, K)``, what it knows of the state in K numbers, about between -1 and 1;
    NaN where one is not known. None where it does not tell."""


class Teacher(ABC):
    """Answer for the agents of one group, whoever plays them.

    Attributes:
        noise_size: uniform numbers that one answer takes.
        has_logits: whether its answers have logits.
        hint_names: of the K hints in its answers; () where they have none.
    """

    noise_size: int = 0
    has_logits: bool = False
    hint_names: tuple[str, ...] = ()

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """The memory at an episode's start."""
        return ()

    @property
    @abstractmethod
    def identity(self) -> str:
        """The same for teachers that answer alike."""

    @abstractmethod
    def answer(
        self, world: World, tokens: Tokens, state: State, noise: Stream | None
    ) -> Answer:
        """Say what to do now.

        Args:
            world: where its worlds stand.
            tokens: what it shows the agents, ``(E, A)``, unperturbed.
            state: the memory, from `initial_state` or the last answer.
            noise: ``(E, A · noise_size)`` uniform numbers.
        """


class PolicyTeacher(Teacher):
    """A policy that takes its most likely action.

    Args:
        policy: in eval mode.
        name: under which it was found.
    """

    def __init__(self, policy: Policy, name: str) -> None:
        self.policy, self.name = policy, name
        self.noise_size = policy.noise_size
        self.has_logits = isinstance(policy, SpecifiedPolicy) and (
            policy.actions.discrete
        )

    @property
    def identity(self) -> str:
        """Its name or, if it has weights, a digest of them: a folder's may change."""
        if not isinstance(self.policy, SpecifiedPolicy):
            return self.name
        digest = hashlib.sha256()
        for name, part in self.policy.state_dict().items():
            digest.update(name.encode())
            digest.update(part.cpu().contiguous().numpy())
        return digest.hexdigest()

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """That of the policy."""
        return self.policy.initial_state(num_envs, num_agents, num_tokens)

    def answer(
        self, world: World, tokens: Tokens, state: State, noise: Stream | None
    ) -> Answer:
        """Ask the policy; see `Teacher.answer`."""
        decision = self.policy.act(tokens, state, noise)
        logits = decision.logits if self.has_logits else None
        return Answer(self.policy.scale(decision.action), logits, decision.state)


TEMPERATURE = 0.015
"""In points: what a striker's actions are worth, divided by it, is its logits."""


class PlannerTeacher(Teacher):
    """The planner of `Pong`, which reads the console and not the screen.

    A striker has logits: they say how much depends on the choice.

    Args:
        planner: of any world; it is shown others.
        identity: what it is called.
    """

    def __init__(self, planner: "PongPlanner", identity: str) -> None:
        self.planner, self._identity = planner, identity
        self.has_logits = planner.striker
        self.hint_names = planner.hint_names

    @property
    def identity(self) -> str:
        """Its name."""
        return self._identity

    def answer(
        self, world: World, tokens: Tokens, state: State, noise: Stream | None
    ) -> Answer:
        """Let it look at the console; see `Teacher.answer`."""
        self.planner.world = world  # type: ignore[assignment]
        actions, logits = self.planner.actions(), None
        if self.has_logits:
            logits = self.planner.worth() / TEMPERATURE
        return Answer(actions, logits, (), self.planner.hints())
