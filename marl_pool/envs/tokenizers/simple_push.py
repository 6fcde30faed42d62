"""Tokenizer of mpe2's simple_push_v3."""

from marl_pool.envs.tokenizers.base import Observer
from marl_pool.envs.tokenizers.mpe import MpeTokenizer, ObservationLayout

PARTS = {"position": 2, "velocity": 2, "color": 3}
LANDMARKS = 2


class SimplePushTokenizer(MpeTokenizer):
    """Self, goal, landmarks and the other agent of mpe2's simple_push_v3.

    =========  =============  ========  =================
    type       0, 1           2, 3      4, 5, 6
    =========  =============  ========  =================
    self       0              velocity  color of the goal
    goal       relative pos.  0         0
    landmark   relative pos.  0         its color
    adversary  relative pos.  0         0
    agent      relative pos.  0         0
    =========  =============  ========  =================

    Only the good agent observes the goal and the colors.

    Source: ``Scenario.observation`` of mpe2 1.1: own velocity, relative position of
    the goal, own color, relative positions and colors of the landmarks, relative
    position of the other agent; for the adversary without goal and colors.

    Args:
        observer: the group of agents whose observations are converted.

    Raises:
        InputError: a wrong length of the observation, or agents with other names.
    """

    def __init__(self, observer: Observer) -> None:
        layout = ObservationLayout("simple_push", observer, PARTS)
        counts = {name: layout.count(name) for name in ("adversary", "agent")}
        good = layout.kind() == "agent"
        counts[layout.kind()] -= 1
        (velocity,) = layout.read(1)
        if good:
            (goal,), (own,) = layout.read(1), layout.read(1, 3)
            layout.add("self", velocity=velocity, color=own)
            layout.add("goal", position=goal)
            places, colors = layout.read(LANDMARKS), layout.read(LANDMARKS, 3)
            for place, color in zip(places, colors, strict=True):
                layout.add("landmark", position=place, color=color)
        else:
            layout.add("self", velocity=velocity)
            for place in layout.read(LANDMARKS):
                layout.add("landmark", position=place)
        for name in ("adversary", "agent"):
            for place in layout.read(counts[name]):
                layout.add(name, position=place)
        super().__init__(layout, ("self", "goal", "landmark", "adversary", "agent"))
