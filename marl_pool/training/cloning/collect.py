"""Playing episodes that the teacher labels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.training.cloning.behaviour_policy import BehaviourPolicy
from marl_pool.training.cloning.recorder import Recorder, Rows
from marl_pool.training.cloning.teacher import Teacher
from marl_pool.training.cloning.trajectories import Trajectories, cut, join
from marl_pool.utils.progress import Progress
from marl_pool.utils.randomness import VALIDATION_WORLDS

PLAY_WORLDS = VALIDATION_WORLDS + (1 << 39)
"""First world number of measurements of the return during training."""

MakeWorld = Callable[[int, int], BatchedEnv]
"""Makes worlds from their number and the first of their numbers."""


@dataclass(frozen=True)
class Roles:
    """Roles of an environment's groups.

    Attributes:
        group: name of the group that is cloned.
        teacher: labels its steps; None where trajectories are given.
        others: policies of the other groups.
    """

    group: str
    teacher: Teacher | None
    others: Mapping[str, Policy]


def collect(
    roles: Roles,
    make_world: MakeWorld,
    first: int,
    episodes: int,
    *,
    num_envs: int,
    rows: Rows | None,
    student: Policy | None = None,
    perturbation: Callable[[int], Perturbation | None] | None = None,
    beta: float = 0.0,
    noise: float = 0.0,
    progress: Progress | None = None,
) -> Trajectories:
    """Play one episode in each of some worlds.

    Args:
        roles: of the groups.
        make_world: of those worlds.
        first: number of the first one.
        episodes: how many.
        num_envs: stepped together.
        rows: takes the distinct features, where they are bytes.
        student: plays in the teacher's place.
        perturbation: what is done to what the student sees, by the number of the first
            world that is stepped with it; None: nothing.
        beta: probability that a step is the teacher's.
        noise: probability that a step's action is random.
        progress: shows the episodes.
    """
    parts, done = [], 0
    while done < episodes:
        count = min(num_envs, episodes - done)
        env = make_world(count, first + done)
        seen = perturbation and perturbation(first + done)
        behaviour = _behaviour_policy(roles, env, rows, student, seen, beta, noise)
        worlds = env.env_ids
        returns = behaviour.rollout.episodes().returns[roles.group]
        parts.append(_recorded(behaviour, worlds, returns))
        done += count
        if progress is not None:
            steps = sum(part.num_steps for part in parts)
            progress.update(done, steps=steps)
    return join(parts)


class Games:
    """Games that continue from one round to the next; a finished one starts again.

    Args:
        roles: of the groups.
        world: where.
        rows: takes the distinct features, where they are bytes.
        student: plays in the teacher's place.
        perturbation: what is done to what the student sees.
    """

    def __init__(
        self,
        roles: Roles,
        env: BatchedEnv,
        rows: Rows | None,
        student: Policy,
        perturbation: Perturbation | None = None,
    ) -> None:
        self.worlds = env.env_ids
        self._behaviour = _behaviour_policy(roles, env, rows, student, perturbation)

    def play(self, steps: int, beta: float = 0.0) -> Trajectories:
        """Advance some steps; each trajectory's return is of its world in them.

        Args:
            steps: how many.
            beta: probability that a step is the teacher's.
        """
        behaviour = self._behaviour
        behaviour.beta = beta
        returns = behaviour.rollout.advance(steps)[behaviour.group]
        return _recorded(behaviour, self.worlds, returns)


def _behaviour_policy(
    roles: Roles,
    env: BatchedEnv,
    rows: Rows | None,
    student: Policy | None,
    perturbation: Perturbation | None,
    beta: float = 0.0,
    noise: float = 0.0,
) -> BehaviourPolicy:
    """Build the policy that collects, in a rollout of its own."""
    assert roles.teacher is not None
    group = env.groups[roles.group]
    behaviour = BehaviourPolicy(
        roles.teacher,
        group.tokens,
        group.action_space,
        group=roles.group,
        recorder=Recorder(discrete=not group.action_space.shape, rows=rows),
        student=student,
        beta=beta,
        noise=noise,
        device=env.device,
    )
    policies = {**roles.others, roles.group: behaviour}
    behaviour.rollout = Rollout(env, policies, perturbation=perturbation)
    return behaviour


def _recorded(
    behaviour: BehaviourPolicy, worlds: Tensor, returns: Tensor
) -> Trajectories:
    """Return what was recorded since the last call, with the agents' returns."""
    by_agent = {
        (number, agent): value
        for number, row in zip(worlds.tolist(), returns.tolist(), strict=True)
        for agent, value in enumerate(row)
    }
    rows = behaviour.recorder.rows
    return cut(
        behaviour.recorder.pop(), by_agent, None if rows is None else rows.table()
    )
