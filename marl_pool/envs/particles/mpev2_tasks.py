"""The six tasks of MPEv2."""

from dataclasses import replace
from typing import Literal, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from marl_pool.envs.drawing.canvas import BLUE, GREEN, OBSTACLE, PURPLE, VERMILION
from marl_pool.envs.particles.mpev2 import (
    MASS,
    Count,
    Kind,
    MPEv2,
    MPEv2Options,
    spaced,
)
from marl_pool.envs.particles.mpev2_motion import (
    box,
    chase,
    corner,
    drive,
    flee,
    follow,
    outside,
)
from marl_pool.envs.particles.physics import dead_beat
from marl_pool.options.types import Episodes
from marl_pool.policies.action_spaces import Selection
from marl_pool.policies.selection import SelectedTokens
from marl_pool.tokens import Tokens
from marl_pool.utils.devices import may_read
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

GOAL_STEPS, GOAL_TRIES = 51, 50
"""Steps between goals of wandering targets, and the places that are tried for each."""
GOAL_SHIFT, GOAL_BOUND, GOAL_DISTANCE = 0.75, 1.95, 0.2
"""Largest shift of a goal along an axis, its bound, and the distance between goals."""

FEW, MANY = Count(1, 3, 1), Count(5, 5, 0)
MORE = Count(5, 5, 2)
AGENTS, OTHERS = (FEW, MORE, MANY), (FEW, MANY, MORE)
LANDMARKS = (Count(1, 2, 1),) * 3


class Spread(MPEv2):
    r"""MPEv2's spread: agents cover targets, while more of both arrive.

    The reward of the team is the sum over targets of the negative gap between the
    target and the nearest agent; a gap is the distance of the centres less both radii.

    Targets rest. An agent's force is 1.5. Agents that arrive collide with each other;
    nothing else does.

    docs/mpev2.md describes what all six tasks share.
    """

    boundary = 1.0
    force = 1.5
    kinds = (
        Kind("agent", GREEN, AGENTS, box(1)),
        Kind("target", OBSTACLE, OTHERS, box(1), ("disc", 0.8)),
    )
    size = 0.04
    contacts = False
    newcomers_collide = True
    spacing = "kinds"

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 100,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)

    @override
    def reward(self) -> Tensor:
        return -self.nearest("target", "agent").sum(1)


class Tag(MPEv2):
    r"""Agents evade adversaries that chase the nearest one, and stay in the square.

    The reward of the team after a step is

    .. math:: r = \sum_a out(a) - 2\,\#\{(v, a): v \text{ touches } a\}, \quad
        out(a) = -\min(5^{\max(|x_a|, |y_a|) - 2}, 25)

    over agents a and adversaries v, where out is 0 within the square of half side 2.
    Agents start in the middle, adversaries in the upper left corner; newcomers appear
    at the edge. An agent's force is 4.

    docs/mpev2.md describes what all six tasks share.
    """

    boundary = 2.0
    force = 4.0
    kinds = (
        Kind("agent", GREEN, AGENTS, box(1 / 4)),
        Kind("adversary", PURPLE, OTHERS, corner, script=chase),
    )

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 200,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)

    @override
    def reward(self) -> Tensor:
        return self.penalty() - 2 * self.touches("adversary").sum(1)


def wander(env: "Guard", kind: str) -> Tensor:
    """Go to the goal, or stay without one."""
    return drive(env.way_to_goals(), env.velocity(kind))


class Guard(MPEv2):
    r"""Agents guard wandering targets, several agents each, without touching them.

    The reward of the team after a step is

    .. math:: r = -\sum_t \Bigl[ \sum_{a \in N_i(t)} gap(a, t)
        + 5\,\#\{a: a \text{ touches } t\} \Bigr]

    over targets t, with N the i agents nearest to it and i the number of agents per
    target, rounded up. A target goes to a goal near it, which is drawn every 51 steps;
    one that arrives rests until the next draw. An agent's force is 4.

    docs/mpev2.md describes what all six tasks share.
    """

    state_names = ("state", "goal_places")
    boundary = 2.0
    force = 4.0
    kinds = (
        Kind("agent", GREEN, (FEW, Count(5, 5, 3), MANY), box(1)),
        Kind(
            "target",
            BLUE,
            (Count(1, 2, 1), Count(4, 4, 0), Count(4, 4, 2)),
            box(1 / 2),
            script=wander,
        ),
    )

    goal_places: Tensor
    """``(num_envs, targets, 2)``: where each target goes, valid from the first draw
    after it came."""

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 200,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)
        self.goal_places = torch.zeros_like(self._positions["target"])

    @override
    def reward(self) -> Tensor:
        gaps = self.gaps("target", "agent").sort(2).values
        agents, targets = self.count("agent"), self.count("target")
        # The number of guards of each target, rounded up.
        guards = ((agents + targets - 1) // targets)[:, None, None]
        counts = torch.arange(gaps.shape[2], device=gaps.device) < guards
        distance = torch.where(counts, gaps, 0).sum(2) + 5 * self.touches("target")
        return -self.fill_absent(distance, "target", 1, 0).sum(1)

    def _has_goal(self) -> Tensor:
        """Return ``(num_envs, targets)`` bool."""
        # Goals are drawn at step 1 and every `GOAL_STEPS` steps after it.
        last_draw = self.steps - (self.steps - 1) % GOAL_STEPS
        targets = self._slices["target"]
        began = self._lives[:, targets, 0] < last_draw[:, None]
        return began & self.present[:, targets]

    def way_to_goals(self) -> Tensor:
        """Draw goals where they are due, and return the ways ``(num_envs, n, 2)``."""
        draws = self.steps % GOAL_STEPS == 1
        # Where no value may be read, always draw: `_draw_goals` keeps what is not due.
        if not may_read(draws) or draws.any():
            self._draw_goals(draws)
        return self._ways_now()

    def _ways_now(self) -> Tensor:
        way = self.goal_places - self._positions["target"]
        return torch.where(self._has_goal()[..., None], way, 0)

    def _draw_goals(self, where: Tensor) -> None:
        place = self._positions["target"]
        keys = stream_keys(self.seed, self.env_ids, self.episodes, Purpose.DYNAMICS, 1)
        count = place.shape[1] * GOAL_TRIES * 2
        # Each draw has a separate part of the stream.
        first = self.steps[:, None] // GOAL_STEPS * count
        numbers = uniform(keys, count, first).to(self.dtype)
        shift = GOAL_SHIFT * (2 * numbers.view(-1, place.shape[1], GOAL_TRIES, 2) - 1)
        tries = (place[:, :, None] + shift).clamp(-GOAL_BOUND, GOAL_BOUND)
        drawn = spaced(tries, self._has_goal(), GOAL_DISTANCE)
        self.goal_places = torch.where(where[:, None, None], drawn, self.goal_places)

    @override
    def state_features(self) -> Tensor:
        """Add the ways of entities to their goals, which no agent sees."""
        ways = torch.zeros_like(self.state[..., :2])
        ways[:, self._slices["target"]] = self._ways_now()
        return torch.cat((super().state_features(), ways), -1)

    @override
    def goals(self) -> Tensor:
        # Without a goal the mark lies under the first target.
        first = self._positions["target"][:, :1]
        return torch.where(self._has_goal()[..., None], self.goal_places, first)


class Adversary(MPEv2):
    r"""Agents cover targets among decoys, and lead adversaries away from them.

    The reward of the team after a step is

    .. math:: r = \sum_t \bigl[ \min_v gap(v, t) - \min_a gap(a, t) \bigr]

    over targets t, adversaries v and agents a. All adversaries go to the one target or
    decoy with the smallest sum of distances to the agents, so they follow the team.
    Nothing collides. An agent's force is 1.5.

    docs/mpev2.md describes what all six tasks share.
    """

    boundary = 1.3
    force = 1.5
    kinds = (
        Kind("agent", GREEN, AGENTS, box(1), ("edge", 1.0)),
        Kind("adversary", PURPLE, OTHERS, box(1), ("edge", 1.0), script=follow),
        Kind("target", OBSTACLE, LANDMARKS, box(1), ("square", 1.0)),
        Kind("decoy", VERMILION, LANDMARKS, box(1), ("square", 1.0)),
    )
    contacts = False
    spacing = "no"

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 150,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)

    @override
    def reward(self) -> Tensor:
        near = self.nearest("target", "adversary") - self.nearest("target", "agent")
        return near.sum(1)


class Repel(MPEv2):
    r"""Agents keep away from adversaries that chase them, and stay in the square.

    The reward of the team after a step is

    .. math:: r = \sum_a out(a) + \sum_v \min_a gap(a, v), \quad
        out(a) = -\min(5^{\max(|x_a|, |y_a|) - 2}, 25)

    over agents a and adversaries v, where out is 0 within the square of half side 2.5,
    at whose edge it jumps to -2.24. Adversaries start in the middle. An agent's force
    is 4.

    docs/mpev2.md describes what all six tasks share.
    """

    boundary = 2.5
    force = 4.0
    kinds = (
        Kind("agent", GREEN, AGENTS, box(1)),
        Kind("adversary", PURPLE, OTHERS, box(0.2 / 2.5), script=chase),
    )

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 150,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)

    @override
    def reward(self) -> Tensor:
        return self.penalty() + self.nearest("adversary", "agent").sum(1)


class Hunt(MPEv2):
    r"""Agents hunt adversaries that flee the nearest one.

    The reward of the team after a step is the negative mean over adversaries of the gap
    to the nearest agent, less the mean over agents of the gap to the nearest adversary.
    An adversary flees an agent that is nearer than 1, else moves at random, and turns
    back at the edge of the square of half side 2. An agent's force is 3.

    With ``choices="adversaries"``, which the published task lacks, an agent chooses
    none or an adversary that is there, and takes the one of its five directions that is
    nearest to the force by which `dead_beat` reaches it. This is a `Selection`, for
    ``policy.action=select``.

    docs/mpev2.md describes what all six tasks share.

    Args:
        choices: what an agent chooses: directions or adversaries.

    Raises:
        InputError: continuous actions where adversaries are chosen.
    """

    boundary = 2.0
    force = 3.0
    kinds = (
        Kind("agent", GREEN, AGENTS, outside),
        Kind("adversary", PURPLE, OTHERS, box(1 / 4), script=flee, random_numbers=2),
    )

    def __init__(
        self,
        num_envs: Episodes,
        *,
        choices: Literal["directions", "adversaries"] = "directions",
        max_steps: Episodes = 200,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)
        self._selection: SelectedTokens | None = None
        if choices == "directions":
            return
        if options.get("continuous_actions"):
            raise InputError(
                "env.continuous_actions: expected false with env.choices=adversaries, "
                "got true"
            )
        group = self.groups["agent"]
        space = Selection(1, group.tokens.num_tokens, ("adversary",))
        group = replace(group, action_space=space, has_action_masks=True)
        self.groups = {"agent": group}
        self._selection = SelectedTokens(group.tokens, group.actions)

    @override
    def reward(self) -> Tensor:
        hunted = self.nearest("adversary", "agent").sum(1) / self.count("adversary")
        return -hunted - self.nearest("agent", "adversary").sum(1) / self.count("agent")

    @override
    def observe(self) -> dict[str, Tokens]:
        tokens = super().observe()["agent"]
        if self._selection is not None:
            tokens = tokens._replace(action_mask=self._selection.options(tokens))
        return {"agent": tokens}

    @override
    def agent_forces(self, actions: Tensor) -> Tensor:
        if self._selection is None:
            return super().agent_forces(actions)
        # Entities by choice; the agent itself stands for the choice of none.
        order = pad(self._order["agent"], (1, 0))
        order[:, 0] = order[:, 1]
        entities = order.expand(self.num_envs, -1, -1).gather(2, actions[..., None])
        targets = self.state.gather(1, entities.expand(-1, -1, 4))
        away = targets - self.state[:, self._slices["agent"]]
        is_target = self.present.gather(1, entities[..., 0]) & (actions > 0)
        force = dead_beat(away, MASS) * is_target[..., None]
        steering = self._steering["agent"]
        return steering.push(steering.toward(force))
