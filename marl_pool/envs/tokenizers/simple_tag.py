"""Tokenizer of mpe2's simple_tag_v3."""

from marl_pool.envs.tokenizers.base import Observer
from marl_pool.envs.tokenizers.mpe import MpeTokenizer, ObservationLayout

PARTS = {"position": 2, "velocity": 2}


class SimpleTagTokenizer(MpeTokenizer):
    """Self, obstacles, adversaries and good agents of mpe2's simple_tag_v3.

    =========  =============  ========
    type       0, 1           2, 3
    =========  =============  ========
    self       position       velocity
    obstacle   relative pos.  0
    adversary  relative pos.  0
    agent      relative pos.  velocity
    =========  =============  ========

    Obstacles collide here, so all tokens are signal.

    Source: ``Scenario.observation`` of mpe2 1.1: own velocity, own position, relative
    positions of obstacles and of other agents (adversaries first), velocities of the
    good agents among them. The number of obstacles is the env's option
    ``num_obstacles``.

    Args:
        observer: the group of agents whose observations are converted.

    Raises:
        InputError: a wrong length of the observation, agents with other names, or
            ``num_agent_neighbors``, which hides the kinds of agents.
    """

    def __init__(self, observer: Observer) -> None:
        layout = ObservationLayout("simple_tag", observer, PARTS)
        layout.reject_neighbors()
        counts = {name: layout.count(name) for name in ("adversary", "agent")}
        counts[layout.kind()] -= 1
        obstacles = observer.options.get("num_obstacles", 2)
        velocity, position = layout.read(2)
        layout.add("self", position=position, velocity=velocity)
        visible = layout.visible("num_landmark_neighbors", obstacles)
        for i, place in enumerate(layout.read(visible)):
            layout.add("obstacle", position=place, padded=i >= obstacles)
        for place in layout.read(counts["adversary"]):
            layout.add("adversary", position=place)
        places, moves = layout.read(counts["agent"]), layout.read(counts["agent"])
        for place, move in zip(places, moves, strict=True):
            layout.add("agent", position=place, velocity=move)
        kinds = ("self", "obstacle", "adversary", "agent")
        super().__init__(layout, kinds, signal_types=kinds)
