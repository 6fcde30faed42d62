"""Collection of trajectories that the teacher labels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.training.cloning.behaviour_policy import BehaviourPolicy
from marl_pool.training.cloning.recorder import RowTable, StepRecorder
from marl_pool.training.cloning.teacher import Teacher
from marl_pool.training.cloning.trajectories import Trajectories, cut, join
from marl_pool.utils.progress import Progress
from marl_pool.utils.randomness import VALIDATION_ENVS

PLAY_ENV_IDS = VALIDATION_ENVS + (1 << 39)
"""First environment number of measurements of the return during training."""

MakeEnv = Callable[[int, int], BatchedEnv]
"""Factory of environments, given their count and the first of their numbers."""


@dataclass(frozen=True)
class Roles:
    """Roles of an environment's groups.

    Attributes:
        group: name of the cloned group.
        teacher: labels the group's steps; None where trajectories are given.
        others: policies of the other groups, by name.
    """

    group: str
    teacher: Teacher | None
    others: Mapping[str, Policy]


def collect(
    roles: Roles,
    make_env: MakeEnv,
    first: int,
    episodes: int,
    *,
    num_envs: int,
    rows: RowTable | None,
    student: Policy | None = None,
    perturbation: Callable[[int], Perturbation | None] | None = None,
    beta: float = 0.0,
    noise: float = 0.0,
    progress: Progress | None = None,
) -> Trajectories:
    """Play one episode in each of ``episodes`` environments.

    Args:
        roles: roles of the groups.
        make_env: factory of the environments.
        first: number of the first environment.
        episodes: number of episodes.
        num_envs: maximum number of environments stepped together.
        rows: table of distinct features, extended here; for uint8 features only.
        student: policy that acts where the teacher does not; None: the teacher acts.
        perturbation: builds the perturbation of the student's observations from the
            number of the first environment of a batch; None: no perturbation.
        beta: probability of the teacher's action, in [0, 1].
        noise: probability of a random action, in [0, 1].
        progress: progress bar, in episodes.
    """
    parts, done = [], 0
    while done < episodes:
        count = min(num_envs, episodes - done)
        env = make_env(count, first + done)
        perturbed = perturbation and perturbation(first + done)
        behaviour = _behaviour_policy(roles, env, rows, student, perturbed, beta, noise)
        env_ids = env.env_ids
        returns = behaviour.rollout.episodes().returns[roles.group]
        parts.append(_recorded(behaviour, env_ids, returns))
        done += count
        if progress is not None:
            steps = sum(part.num_steps for part in parts)
            progress.update(done, steps=steps)
    return join(parts)


class ContinuedGames:
    """Games that continue from one round to the next; a finished one starts again.

    Args:
        roles: roles of the groups.
        env: environments of the games.
        rows: table of distinct features, extended here; for uint8 features only.
        student: policy that acts where the teacher does not.
        perturbation: perturbation of the student's observations.
    """

    def __init__(
        self,
        roles: Roles,
        env: BatchedEnv,
        rows: RowTable | None,
        student: Policy,
        perturbation: Perturbation | None = None,
    ) -> None:
        self.env_ids = env.env_ids
        self._behaviour = _behaviour_policy(roles, env, rows, student, perturbation)

    def play(self, steps: int, beta: float = 0.0) -> Trajectories:
        """Advance each game; a trajectory's return sums the rewards of these steps.

        Args:
            steps: number of steps.
            beta: probability of the teacher's action, in [0, 1].
        """
        behaviour = self._behaviour
        behaviour.beta = beta
        returns = behaviour.rollout.advance(steps)[behaviour.group]
        return _recorded(behaviour, self.env_ids, returns)


def _behaviour_policy(
    roles: Roles,
    env: BatchedEnv,
    rows: RowTable | None,
    student: Policy | None,
    perturbation: Perturbation | None,
    beta: float = 0.0,
    noise: float = 0.0,
) -> BehaviourPolicy:
    """Build the collecting policy and its rollout."""
    assert roles.teacher is not None
    group = env.groups[roles.group]
    behaviour = BehaviourPolicy(
        roles.teacher,
        group.tokens,
        group.action_space,
        group=roles.group,
        recorder=StepRecorder(discrete=not group.action_space.shape, rows=rows),
        student=student,
        beta=beta,
        noise=noise,
        device=env.device,
    )
    policies = {**roles.others, roles.group: behaviour}
    behaviour.rollout = Rollout(env, policies, perturbation=perturbation)
    return behaviour


def _recorded(
    behaviour: BehaviourPolicy, env_ids: Tensor, returns: Tensor
) -> Trajectories:
    """Return what was recorded since the last call, with the agents' returns."""
    by_agent = {
        (number, agent): value
        for number, row in zip(env_ids.tolist(), returns.tolist(), strict=True)
        for agent, value in enumerate(row)
    }
    rows = behaviour.recorder.rows
    return cut(
        behaviour.recorder.pop(), by_agent, None if rows is None else rows.table()
    )
