"""Teachers, which label the states of environments, and the other groups' policies."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from marl_pool.compiled import compile
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.scripted import HEURISTIC, scripted_policy
from marl_pool.options.construction import build
from marl_pool.options.names import is_plug_in
from marl_pool.policies.base import Policy, SpecifiedPolicy, State
from marl_pool.policies.storage import WEIGHTS, load_modules
from marl_pool.tokens import Tokens
from marl_pool.training.cloning import TEACHERS
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.fixed_policies import (
    build_fixed,
    load_fixed,
    load_saved,
    validate_fit,
)
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream


class TeacherLabel(NamedTuple):
    """Label of one step of E environments with A agents each."""

    action: Tensor
    """``(E, A, dim)`` or ``(E, A)``, in the environment's units."""
    logits: Tensor | None
    """``(E, A, n)``, for discrete actions; None if the teacher has none."""
    state: State
    """The teacher's memory for the next step."""
    privileged_targets: Tensor | None = None
    """``(E, A, K)`` features of the state that the teacher knows and the student has to
    infer, roughly in [-1, 1], NaN where unknown; None if the teacher has none."""


class Teacher(ABC):
    """Expert that labels the steps of one group, whichever policy acts.

    Attributes:
        noise_size: number of uniform random numbers for one label.
        has_logits: True if labels have logits.
        target_names: names of the K privileged targets of a label; () without any.
        envs: names of the environments that it can label; () for all.
    """

    noise_size: int = 0
    has_logits: bool = False
    target_names: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """Return the memory at an episode's start."""
        return ()

    @abstractmethod
    def label(
        self, env: BatchedEnv, tokens: Tokens, state: State, noise: Stream | None
    ) -> TeacherLabel:
        """Label the current states of the environments.

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
        self._actor = compile(policy)
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
        decision = self._actor.act(tokens, state, noise)
        logits = decision.logits if self.has_logits else None
        return TeacherLabel(self.policy.scale(decision.action), logits, decision.state)


@dataclass(frozen=True)
class Roles:
    """Roles of an environment's groups.

    Attributes:
        group: name of the cloned group.
        teacher: teacher of the group.
        other_policies: policies of the other groups, by name.
    """

    group: str
    teacher: Teacher
    other_policies: Mapping[str, Policy]


def build_roles(
    config: CloneConfig,
    groups: Mapping[str, AgentGroup],
    run_copy: Path,
    saved: Path | None,
) -> Roles:
    """Build the teacher and the policies of the other groups.

    The folder ``run_copy``, if it exists, holds the run's copy of its teacher, and
    ``saved`` the other groups' policies in a checkpoint.

    Raises:
        InputError: no such policy, or one that does not fit its group; ``fixed``
            leaves no group or several to clone.
    """
    # The one group that is not fixed is cloned.
    fixed, env_name = config.fixed or {}, config.env.name
    if unknown := [name for name in fixed if name not in groups]:
        raise InputError(
            f"fixed: expected groups among {', '.join(groups)}, got {unknown[0]!r}"
        )
    cloned_groups = [name for name in groups if name not in fixed]
    if len(cloned_groups) != 1:
        raise InputError(
            f"fixed: expected all groups but one, which is cloned, got "
            f"{', '.join(fixed) or 'none'} of {', '.join(groups)}"
        )
    group = cloned_groups[0]
    loaded = load_fixed(
        fixed, groups, env=env_name, plugins=config.plugins, saved=saved
    )
    other_policies = {
        name: build_fixed(policy, env_name, name, groups[name]).to(config.device)
        for name, policy in loaded.items()
    }
    assert config.teacher is not None
    try:
        teacher = _teacher(config, config.teacher, group, groups[group], run_copy)
    except InputError as error:
        raise InputError(f"teacher: {error}") from error
    return Roles(group, teacher, other_policies)


def _teacher(
    config: CloneConfig, source: str, name: str, group: AgentGroup, run_copy: Path
) -> Teacher:
    env_name = config.env.name
    if source in TEACHERS:
        teacher: Teacher = build(source, TEACHERS, "teacher", Teacher, {})
        if teacher.envs and env_name not in teacher.envs:
            choices = "|".join(teacher.envs)
            raise InputError(
                f"expected env={choices} with {source}, got env={env_name}"
            )
        return teacher
    policy: Policy
    if source == HEURISTIC or is_plug_in(source):
        policy = scripted_policy(source, env=env_name, role=name, group=group)
    elif (run_copy / WEIGHTS).is_file():
        # Prefer the run's own copy: other folders may move or change.
        policy = next(iter(load_modules(run_copy, plugins=config.plugins)[0].values()))
    else:
        choices = ", ".join([HEURISTIC, *TEACHERS, "package.module:Class, "])
        policy = load_saved(source, name, config.plugins, choices)
        validate_fit(policy, group, source)
    return PolicyTeacher(policy.to(config.device).eval())
