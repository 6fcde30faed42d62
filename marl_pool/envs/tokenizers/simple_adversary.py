"""Tokenizer of mpe2's simple_adversary_v3."""

from marl_pool.envs.tokenizers.base import Observer
from marl_pool.envs.tokenizers.mpe import MpeTokenizer, ObservationLayout

PARTS = {"position": 2}


class SimpleAdversaryTokenizer(MpeTokenizer):
    """Self, goal, landmarks and other agents of mpe2's simple_adversary_v3.

    Every token is a relative position. The observation contains nothing about the
    observing agent, so its own token is zero; it can still be AdaPool's query. The
    goal, which only good agents observe, is a token besides that of its landmark.

    Source: ``Scenario.observation`` of mpe2 1.1: relative positions of the goal (good
    agents only), of the landmarks and of the other agents, the adversary first.

    Args:
        observer: the group of agents whose observations are converted.

    Raises:
        InputError: a wrong length of the observation, agents with other names, or
            ``num_agent_neighbors``, which hides the kinds of agents.
    """

    def __init__(self, observer: Observer) -> None:
        layout = ObservationLayout("simple_adversary", observer, PARTS)
        layout.reject_neighbors()
        counts = {name: layout.count(name) for name in ("adversary", "agent")}
        landmarks, good = counts["agent"], layout.kind() == "agent"
        counts[layout.kind()] -= 1
        layout.add("self")
        for place in layout.read(int(good)):
            layout.add("goal", position=place)
        visible = layout.visible("num_landmark_neighbors", landmarks)
        for i, place in enumerate(layout.read(visible)):
            layout.add("landmark", position=place, padded=i >= landmarks)
        for name in ("adversary", "agent"):
            for place in layout.read(counts[name]):
                layout.add(name, position=place)
        super().__init__(layout, ("self", "goal", "landmark", "adversary", "agent"))
