"""Simple tag: predators catch prey among obstacles that are distractors."""

import math
from collections.abc import Mapping
from typing import Literal, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import GREEN, OBSTACLE, PURPLE
from marl_pool.envs.options import entity_counts
from marl_pool.envs.particles.physics import (
    DIRECTIONS,
    Entities,
    ParticleEnv,
    ParticleOptions,
    distances,
)
from marl_pool.options.types import (
    Counts,
    Episodes,
    PositiveFloat,
    Size,
    SizeOrZero,
)

PREDATOR_SIZE, PREY_SIZE, OBSTACLE_SIZE = 0.075, 0.05, 0.2
ACCELERATIONS = {"predator": 3.0, "prey": 4.0}
TOUCH_REWARD = 10.0
START_SPEED = 0.5
"""Largest initial speed along an axis."""
LEAST_SPREAD = 0.1
"""Smallest half side of the square in which predators and prey start."""


class SimpleTag(ParticleEnv):
    r"""Predators catch prey, which are smaller and faster.

    An agent observes every entity as a token: position and velocity relative to its
    own, not normalized, and the type. The order is self, obstacles, other predators,
    other prey. A predator's reward, computed after the step, is 10 for each prey at a
    distance of at most the sum of their radii. The reward of a learning prey is

    .. math:: r = -10\,n - b(|x|) - b(|y|), \quad
        b(u) = \begin{cases} 0 & u < 0.9 \\ 10\,(u - 0.9) & u < 1 \\
        \min(e^{2u - 2}, 10) & \text{else} \end{cases}

    with n the number of predators that touch it. Predators and prey collide. Obstacles
    never move and by default do not collide, so they are distractors. There are no
    walls, and episodes end by truncation only.

    Predators and prey start uniformly in the square of half side d, with velocities
    uniform in [-0.5, 0.5] along each axis; d is uniform in [0.1, log4(their number)]
    and sampled once per episode. Obstacles are uniform in the square of half side
    ``obstacle_spread``.

    Only the group ``"predator"`` learns, unless ``prey="learned"`` adds the group
    ``"prey"``.

    Source: `AdaPool <https://arxiv.org/abs/2506.09215>`_, section 4.3.2 and appendix
    C.5, and the published environment. Differences from the latter:

    - The seed determines the start; there it was ignored.
    - Obstacles do not collide, as in the paper; there the option was not read.
    - Every agent receives the reward and observation of the current step, and all are
      truncated together; there all but the first received them a step late.

    Physics, sizes, accelerations and speeds are as in mpe2's ``simple_tag_v3``.
    There, the default is 3 predators, 1 prey and 2 colliding obstacles; agents start
    at rest in [-1, 1] and obstacles in [-0.9, 0.9]; all prey learn; an observation is
    a flat vector; predators share their rewards; two entities touch at a distance
    less than, not equal to, the sum of their radii; an episode has 25 steps.

    Args:
        counts: numbers of predators, prey and obstacles, in the paper's notation.
        num_predators: predators; None uses ``counts``.
        num_prey: prey; None uses ``counts``.
        num_obstacles: obstacles; None uses ``counts``.
        prey: policy of the prey: ``"random"`` samples one of the five actions,
            ``"flee"`` flees from predators (`flight`), ``"learned"`` makes the prey a
            separate group.
        obstacles_collide: True if obstacles push predators and prey away.
        shared_reward: True if each predator receives the sum of all rewards.
        obstacle_spread: half side of the square of obstacles; None for
            ``max(log4(number of obstacles), 2)``.
    """

    type_names = ("self", "obstacle", "predator", "prey")

    def __init__(
        self,
        num_envs: Episodes,
        *,
        counts: Counts = "1-3-28",
        num_predators: Size | None = None,
        num_prey: Size | None = None,
        num_obstacles: SizeOrZero | None = None,
        prey: Literal["random", "flee", "learned"] = "random",
        obstacles_collide: bool = False,
        continuous_actions: bool = False,
        shared_reward: bool = False,
        obstacle_spread: PositiveFloat | None = None,
        max_steps: Episodes = 128,
        **common: Unpack[ParticleOptions],
    ) -> None:
        # Numbers of predators, prey and obstacles, of which options may replace some.
        numbers = entity_counts(
            counts,
            least=(1, 1, 0),
            num_predators=num_predators,
            num_prey=num_prey,
            num_obstacles=num_obstacles,
        )
        self.num_predators, self.num_prey, self.num_obstacles = numbers
        # Spread the obstacles over a larger area if there are more of them.
        if obstacle_spread is None:
            obstacle_spread = max(math.log(max(self.num_obstacles, 1), 4), 2.0)
        self.prey, self.shared_reward = prey, shared_reward
        self.obstacle_spread = obstacle_spread
        super().__init__(
            num_envs,
            entities=(
                Entities(
                    "predator",
                    self.num_predators,
                    PURPLE,
                    PREDATOR_SIZE,
                    collide=True,
                    max_speed=1.0,
                    acceleration=ACCELERATIONS["predator"],
                ),
                Entities(
                    "prey",
                    self.num_prey,
                    GREEN,
                    PREY_SIZE,
                    collide=True,
                    max_speed=1.3,
                    acceleration=ACCELERATIONS["prey"],
                ),
                Entities(
                    "obstacle",
                    self.num_obstacles,
                    OBSTACLE,
                    OBSTACLE_SIZE,
                    movable=False,
                    collide=obstacles_collide,
                    signal=obstacles_collide,
                ),
            ),
            learners=("predator", "prey") if prey == "learned" else ("predator",),
            continuous_actions=continuous_actions,
            extent=max(obstacle_spread, 2.0) + 0.25,
            max_steps=max_steps,
            **common,
            random_numbers={"prey": int(prey == "random")},
        )

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        moving = self.num_movable
        parts = [1, 4 * moving, 2 * self.num_obstacles]
        uniform = self.sample_uniform(keys, sum(parts))
        # One number for the square, then predators and prey, then obstacles.
        width, start, still = torch.split(uniform, parts, 1)
        widest = math.log(moving, 4)
        spread = LEAST_SPREAD + (widest - LEAST_SPREAD) * width[..., None]
        start = 2 * start.view(len(rows), moving, 4) - 1
        self.state[rows, :moving, :2] = start[..., :2] * spread
        self.state[rows, :moving, 2:] = start[..., 2:] * START_SPEED
        still = 2 * still.view(len(rows), self.num_obstacles, 2) - 1
        self.state[rows, moving:, :2] = still * self.obstacle_spread

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        predators = self._steering["predator"].forces(actions["predator"])
        self.integrate(torch.cat((predators, self._prey_forces(actions)), 1))
        # Predators gain by each touch, and learning prey lose by it.
        hunters, hunted = self._positions["predator"], self._positions["prey"]
        touching = distances(hunters, hunted) <= PREDATOR_SIZE + PREY_SIZE
        touching = self.fill_absent(touching, "predator", 1, False)
        touching = self.fill_absent(touching, "prey", 2, False)
        caught = touching.sum(2, dtype=self.dtype).mul_(TOUCH_REWARD)
        if self.shared_reward:
            caught = caught.sum(1, keepdim=True).expand_as(caught)
        rewards = {"predator": caught}
        if "prey" in self.groups:
            lost = touching.sum(1, dtype=self.dtype).mul_(-TOUCH_REWARD)
            lost = lost.sub_(boundary_penalty(hunted))
            rewards["prey"] = lost
        return self.earned(**rewards), self._never

    def _prey_forces(self, actions: Mapping[str, Tensor]) -> Tensor:
        """Return the control forces of the prey, ``(num_envs, prey, 2)``."""
        steering = self._steering["prey"]
        if self.prey == "learned":
            return steering.forces(actions["prey"])
        if self.prey == "random":
            return steering.push(self.dynamics.next().mul(len(DIRECTIONS)).long())
        places = self._positions["prey"]
        predators = self._positions["predator"][:, None] - places[:, :, None]
        missing = None
        if self.lives is not None:
            missing = ~self.present[:, None, self._slices["predator"]]
        force = flight(predators, -places, missing) * steering.acceleration
        return steering.forces(steering.toward(force))


def flight(predators: Tensor, home: Tensor, missing: Tensor | None = None) -> Tensor:
    r"""Compute the direction of fleeing prey: away from predators and toward home.

    .. math:: f \propto \lVert 2h \rVert^2 h - \sum_i d_i / \lVert d_i \rVert^2

    Args:
        predators: ``(*B, P, 2)`` positions d of predators relative to the prey.
        home: ``(*B, 2)`` position h of the home relative to the prey.
        missing: ``(*B, P)`` bool, True for slots without a predator.

    Returns:
        ``(*B, 2)`` of length 1, or 0 where the sum vanishes.
    """
    # The floor makes the force of a coinciding predator zero.
    floor = torch.finfo(predators.dtype).eps
    near = predators.square().sum(-1, keepdim=True).clamp(min=floor).reciprocal()
    if missing is not None:
        near = near.masked_fill(missing[..., None], 0)
    pull = 4 * home.square().sum(-1, keepdim=True)
    force = pull * home - (predators * near).sum(-2)
    return torch.nn.functional.normalize(force, dim=-1)


def boundary_penalty(positions: Tensor) -> Tensor:
    """Compute the penalty ``(*B,)`` >= 0 of prey at ``positions`` ``(*B, 2)``."""
    beyond = positions.abs()
    near = (beyond - 0.9).clamp(min=0) * 10
    far = torch.exp(2 * beyond - 2).clamp(max=10)
    return torch.where(beyond < 1, near, far).sum(-1)
