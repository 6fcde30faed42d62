"""Teachers: whoever can say what to do in the state where a world is."""

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.policies.base import Policy, SpecifiedPolicy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Stream

if TYPE_CHECKING:
    from marl_pool.envs.pong.teacher import ValueTableTeacher


class Answer(NamedTuple):
    """What a teacher says; ``E`` worlds, ``A`` agents in each."""

    action: Tensor
    """``(E, A, dim)`` or ``(E, A)`` in the env's units."""
    logits: Tensor | None
    """``(E, A, n)`` of its choices; None where it has none."""
    state: State
    """Its memory for the next step."""
    privileged_targets: Tensor | None = None
    """``(E, A, K)`` numbers about the state that the teacher knows and the student has
    to infer, about in [-1, 1] and NaN where unknown. None if it provides none."""


class Teacher(ABC):
    """Answer for the agents of one group, whoever plays them.

    Attributes:
        noise_size: uniform numbers that one answer takes.
        has_logits: whether its answers have logits.
        target_names: of the K privileged targets in its answers; () without any.
    """

    noise_size: int = 0
    has_logits: bool = False
    target_names: tuple[str, ...] = ()

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """The memory at an episode's start."""
        return ()

    @property
    @abstractmethod
    def identity(self) -> str:
        """The same for teachers that answer alike."""

    @abstractmethod
    def answer(
        self, env: BatchedEnv, tokens: Tokens, state: State, noise: Stream | None
    ) -> Answer:
        """Say what to do now.

        Args:
            env: where its worlds stand.
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
        self, env: BatchedEnv, tokens: Tokens, state: State, noise: Stream | None
    ) -> Answer:
        """Ask the policy; see `Teacher.answer`."""
        decision = self.policy.act(tokens, state, noise)
        logits = decision.logits if self.has_logits else None
        return Answer(self.policy.scale(decision.action), logits, decision.state)


TEMPERATURE = 0.015
"""In points: action values divided by it are logits."""


class PrivilegedTeacher(Teacher):
    """The value-table teacher of `Pong`, which reads the console and not the screen.

    Its logits are action values, so they say how much depends on the choice.

    Args:
        source: labels the states of any Pong environment.
        identity: name of the teacher.
    """

    has_logits = True

    def __init__(self, source: "ValueTableTeacher", identity: str) -> None:
        self.source, self._identity = source, identity
        self.target_names = source.target_names

    @property
    def identity(self) -> str:
        """The name given."""
        return self._identity

    def answer(
        self, env: BatchedEnv, tokens: Tokens, state: State, noise: Stream | None
    ) -> Answer:
        """Label the present states; see `Teacher.answer`."""
        labels = self.source.answer(env)  # type: ignore[arg-type]
        logits = labels.values / TEMPERATURE
        return Answer(labels.actions, logits, (), labels.targets)
