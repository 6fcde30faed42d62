"""Simple speaker-listener: one agent names the landmark to which another has to go."""

from collections.abc import Mapping
from typing import Unpack

from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import GREEN, OBSTACLE, PURPLE
from marl_pool.envs.particles.physics import Entities
from marl_pool.envs.particles.speaking import (
    EVERYTHING,
    MOTION,
    SpeakingEnv,
    SpeakingOptions,
)
from marl_pool.options.types import Episodes, Size

ACCELERATION = 5.0


class SimpleSpeakerListener(SpeakingEnv):
    r"""A speaker that cannot move names the landmark to which a listener has to go.

    Both get minus the squared distance of the listener to the goal, one of the
    landmarks. The speaker alone knows which; its action is a message, one of as many
    words as there are landmarks.

    A token has position and velocity relative to the observer, the identity of a
    landmark as a one-hot vector, and the message. The speaker's set is its own token,
    with the identity of the goal. The listener's set is its own token, the
    speaker's, which holds nothing but the message of the last step, and the landmarks
    with their identities, which mpe2's vector conveys by their order. All start at rest
    and uniformly in [-1, 1] along each axis. Episodes end by truncation only.

    Source: ``simple_speaker_listener_v4`` of `mpe2 <https://mpe2.farama.org>`_
    (`Lowe et al., 2017 <https://arxiv.org/abs/1706.02275>`_), whose physics, starts,
    actions and rewards these are. There, goals are colors, and there are always
    three landmarks.

    Args:
        num_landmarks: landmarks, and words.
        continuous_actions: True for numbers in [0, 1]: a message of one for each word,
            and movements of five, of which the second to fifth push left, right, down
            and up; False for a choice of one word, and of no-op, left, right, down or
            up.
    """

    type_names = ("self", "speaker", "landmark")

    def __init__(
        self,
        num_envs: Episodes,
        *,
        num_landmarks: Size = 3,
        **common: Unpack[SpeakingOptions],
    ) -> None:
        super().__init__(
            num_envs,
            entities=(
                Entities("listener", 1, GREEN, 0.075, acceleration=ACCELERATION),
                Entities("speaker", 1, PURPLE, 0.075, movable=False),
                Entities(
                    "landmark",
                    num_landmarks,
                    OBSTACLE,
                    0.04,
                    movable=False,
                    on_top=True,
                ),
            ),
            learners=("speaker", "listener"),
            lone=("speaker", "listener"),
            marks={"speaker": num_landmarks, "listener": 2 * num_landmarks},
            hidden={"listener": {"speaker": EVERYTHING}},
            speaker="speaker",
            num_words=num_landmarks,
            num_goals=1,
            **common,
        )

    @override
    def mark(self, group: str, features: Tensor) -> None:
        marks = features[..., MOTION:]
        if group == "speaker":
            marks[:, :, 0] = self._identities[self.goal]
            return
        # The speaker's token is the second, and the landmarks follow.
        marks[:, :, 1, self.num_landmarks :] = self.words
        landmarks = slice(2, 2 + self.num_landmarks)
        marks[:, :, landmarks, : self.num_landmarks] = self._identities

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        self.hear(actions["speaker"])
        self.integrate(self._steering["listener"].forces(actions["listener"]))
        away = self._positions["listener"] - self.goal_places()
        reward = away.square().sum(-1).neg_()
        return {"speaker": reward, "listener": reward.clone()}, self._never
