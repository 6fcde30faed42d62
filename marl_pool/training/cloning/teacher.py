"""Teachers, which label the states of environments with actions."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.policies.base import Policy, SpecifiedPolicy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Stream

if TYPE_CHECKING:
    from marl_pool.envs.pong.teacher import ValueTableTeacher


class TeacherLabel(NamedTuple):
    """Label of one step of E environments with A agents each."""

    action: Tensor
    """``(E, A, dim)`` or ``(E, A)``, in the environment's units."""
    logits: Tensor | None
    """``(E, A, n)``, of a discrete action; None where the teacher has none."""
    state: State
    """The teacher's memory for the next step."""
    privileged_targets: Tensor | None = None
    """``(E, A, K)`` features of the state that the teacher knows and the student has to
    infer, about in [-1, 1] and NaN where unknown; None if the teacher has none."""


class Teacher(ABC):
    """Expert that labels the steps of one group, whichever policy acts.

    Attributes:
        noise_size: uniform random numbers for one label.
        has_logits: True if labels have logits.
        target_names: names of the K privileged targets of a label; () without any.
    """

    noise_size: int = 0
    has_logits: bool = False
    target_names: tuple[str, ...] = ()

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """Return the memory at an episode's start."""
        return ()

    @abstractmethod
    def label(
        self, env: BatchedEnv, tokens: Tokens, state: State, noise: Stream | None
    ) -> TeacherLabel:
        """Label the present states of the environments.

        Args:
            env: environments.
            tokens: unperturbed observations of the agents, batch ``(E, A)``.
            state: memory, from `initial_state` or the last label.
            noise: stream of ``(E, A · noise_size)`` uniform numbers in [0, 1).
        """


class PolicyTeacher(Teacher):
    """Teacher that labels with the most likely action of a policy in eval mode."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.noise_size = policy, policy.noise_size
        self.has_logits = (
            isinstance(policy, SpecifiedPolicy) and policy.actions.discrete
        )

    @override
    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        return self.policy.initial_state(num_envs, num_agents, num_tokens)

    @override
    def label(
        self, env: BatchedEnv, tokens: Tokens, state: State, noise: Stream | None
    ) -> TeacherLabel:
        decision = self.policy.act(tokens, state, noise)
        logits = decision.logits if self.has_logits else None
        return TeacherLabel(self.policy.scale(decision.action), logits, decision.state)


TEMPERATURE = 0.015
"""Temperature in points of Pong: action values divided by it are logits."""


class PrivilegedTeacher(Teacher):
    r"""Value-table teacher of `Pong`, which reads the console and not the screen.

    Its logits are :math:`Q(s, a) / \tau` with action values Q in points and
    :math:`\tau` = `TEMPERATURE`; their margin is the cost of a wrong action.
    """

    has_logits = True

    def __init__(self, source: "ValueTableTeacher") -> None:
        self.source = source
        self.target_names = source.target_names

    @override
    def label(
        self, env: BatchedEnv, tokens: Tokens, state: State, noise: Stream | None
    ) -> TeacherLabel:
        labels = self.source.answer(env)  # type: ignore[arg-type]
        logits = labels.values / TEMPERATURE
        return TeacherLabel(labels.actions, logits, (), labels.targets)
