"""Playing episodes that the teacher labels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

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
    parts, done = [], 0
    while done < episodes:
        count = min(num_envs, episodes - done)
        world = make_world(count, first + done)
        seen = perturbation and perturbation(first + done)
        player = _seat(cast, world, rows, student, seen, beta, noise)
        worlds = world.worlds
        returns = player.rollout.episodes().returns[cast.group]
        parts.append(_recorded(player, worlds, returns))
        done += count
        if progress is not None:
            steps = sum(part.num_steps for part in parts)
            progress.update(done, steps=steps)
    return join(parts)


class Games:
    """Games that go on from one round to the next; one that is over begins anew.

    Args:
        cast: who plays.
        world: where.
        rows: takes the distinct features, where they are bytes.
        student: plays in the teacher's place.
        perturbation: what is done to what the student sees.
    """

    def __init__(
        self,
        cast: Cast,
        world: World,
        rows: Rows | None,
        student: Policy,
        perturbation: Perturbation | None = None,
    ) -> None:
        self.worlds = world.worlds
        self._player = _seat(cast, world, rows, student, perturbation)

    def play(self, steps: int, beta: float = 0.0) -> Trajectories:
        """Go on for some steps; each trajectory's return is of its world in them.

        Args:
            steps: how many.
            beta: probability that a step is the teacher's.
        """
        player = self._player
        player.beta = beta
        returns = player.rollout.go_on(steps)[player.group]
        return _recorded(player, self.worlds, returns)


def _seat(
    cast: Cast,
    world: World,
    rows: Rows | None,
    student: Policy | None,
    perturbation: Perturbation | None,
    beta: float = 0.0,
    noise: float = 0.0,
) -> Player:
    """Let a player begin to play in a world."""
    assert cast.teacher is not None
    group = world.groups[cast.group]
    player = Player(
        cast.teacher,
        group.tokens,
        group.action_space,
        group=cast.group,
        recorder=Recorder(discrete=not group.action_space.shape, rows=rows),
        student=student,
        beta=beta,
        noise=noise,
        device=world.device,
    )
    policies = {**cast.others, cast.group: player}
    player.rollout = Rollout(world, policies, perturbation=perturbation)
    return player


def _recorded(player: Player, worlds: Tensor, returns: Tensor) -> Trajectories:
    """What was taken down since the last call, with the agents' returns."""
    by_agent = {
        (number, agent): value
        for number, row in zip(worlds.tolist(), returns.tolist(), strict=True)
        for agent, value in enumerate(row)
    }
    rows = player.recorder.rows
    return cut(player.recorder.pop(), by_agent, None if rows is None else rows.table())
