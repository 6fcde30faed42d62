"""Playing episodes that the teacher labels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from marl_pool.envs.base import World
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.progress import Progress
from marl_pool.randomness import VALIDATION_WORLDS
from marl_pool.rollout import Rollout
from marl_pool.training.cloning.player import Player
from marl_pool.training.cloning.recorder import Recorder, Rows
from marl_pool.training.cloning.teacher import Teacher
from marl_pool.training.cloning.trajectories import Trajectories, cut, join

PLAY_WORLDS = VALIDATION_WORLDS + (1 << 39)
"""First world number of measurements of the return during training."""

MakeWorld = Callable[[int, int], World]
"""Makes worlds from their number and the first of their numbers."""


@dataclass(frozen=True)
class Cast:
    """Who plays the groups of a world.

    Attributes:
        group: that is cloned.
        teacher: labels it; None where nobody has to.
        others: play the other groups.
    """

    group: str
    teacher: Teacher | None
    others: Mapping[str, Policy]


def collect(
    cast: Cast,
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
        cast: who plays.
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
    assert cast.teacher is not None
    parts, done = [], 0
    while done < episodes:
        count = min(num_envs, episodes - done)
        world = make_world(count, first + done)
        group = world.groups[cast.group]
        recorder = Recorder(discrete=not group.action_space.shape, rows=rows)
        player = Player(
            cast.teacher,
            group.tokens,
            group.action_space,
            group=cast.group,
            recorder=recorder,
            student=student,
            beta=beta,
            noise=noise,
            device=world.device,
        )
        rollout = Rollout(
            world,
            {**cast.others, cast.group: player},
            perturbation=perturbation and perturbation(first + done),
        )
        player.rollout = rollout
        worlds = world.worlds.tolist()
        returns = rollout.episodes().returns[cast.group].tolist()
        by_agent = {
            (number, agent): value
            for number, row in zip(worlds, returns, strict=True)
            for agent, value in enumerate(row)
        }
        table = None if rows is None else rows.table()
        parts.append(cut(recorder.pop(), by_agent, table))
        done += count
        if progress is not None:
            steps = sum(part.num_steps for part in parts)
            progress.update(done, steps=steps)
    return join(parts)
