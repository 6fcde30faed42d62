"""Tokenizer of mpe2's simple_spread_v3."""

from marl_pool.envs.tokenizers.base import Observer
from marl_pool.envs.tokenizers.mpe import MpeTokenizer, ObservationLayout

PARTS = {"position": 2, "velocity": 2, "communication": 2}


class SimpleSpreadTokenizer(MpeTokenizer):
    """Self, landmarks and other agents of mpe2's simple_spread_v3.

    =========  =============  ========  ====================
    type       0, 1           2, 3      4, 5
    =========  =============  ========  ====================
    self       position       velocity  0
    landmark   relative pos.  0         0
    agent      relative pos.  0         communication
    =========  =============  ========  ====================

    Slots beyond the number of entities are padding, where ``num_agent_neighbors`` or
    ``num_landmark_neighbors`` exceeds it. All tokens are signal: agents cover the
    landmarks and avoid each other.

    Source: ``Scenario.observation`` of mpe2 1.1: own velocity, own position, relative
    positions of landmarks and of other agents, their communication.

    Args:
        observer: the group of agents whose observations are converted.

    Raises:
        InputError: a wrong length of the observation, or agents with other names.
    """

    def __init__(self, observer: Observer) -> None:
        layout = ObservationLayout("simple_spread", observer, PARTS)
        agents = layout.count("agent")
        landmarks = layout.visible("num_landmark_neighbors", agents)
        others = layout.visible("num_agent_neighbors", agents - 1)
        velocity, position = layout.read(2)
        layout.add("self", position=position, velocity=velocity)
        for i, place in enumerate(layout.read(landmarks)):
            layout.add("landmark", position=place, padded=i >= agents)
        places, messages = layout.read(others), layout.read(others)
        for i, (place, message) in enumerate(zip(places, messages, strict=True)):
            padded = i >= agents - 1
            layout.add("agent", position=place, communication=message, padded=padded)
        kinds = ("self", "landmark", "agent")
        super().__init__(layout, kinds, signal_types=kinds)
