"""mpe2's simple_spread_v3."""

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
    agent      relative pos.  0         what it communicates
    =========  =============  ========  ====================

    Slots beyond the entities that there are (``num_agent_neighbors`` or
    ``num_landmark_neighbors`` above their number) are padding.

    Landmarks are to be covered and agents not to be met, so all of it is signal.

    Source: ``Scenario.observation`` of mpe2 1.1: own velocity, own position, relative
    positions of landmarks and of other agents, their communication.

    Args:
        observer: whose observations are read.

    Raises:
        InputError: an observation of another size, or agents of other names.
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
        places, heard = layout.read(others), layout.read(others)
        for i, (place, said) in enumerate(zip(places, heard, strict=True)):
            padded = i >= agents - 1
            layout.add("agent", position=place, communication=said, padded=padded)
        kinds = ("self", "landmark", "agent")
        super().__init__(layout, kinds, signal_types=kinds)
