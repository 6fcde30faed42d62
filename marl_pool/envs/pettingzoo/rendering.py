"""Pictures that other people's envs draw of themselves."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from marl_pool.envs.drawing.canvas import PAPER, opencv
from marl_pool.envs.pettingzoo.env_copy import Copy, build_env, reason
from marl_pool.envs.simulation.replay import History, Place
from marl_pool.utils.errors import InputError


class Camera:
    """A copy of the env, built when first needed, that is only there to draw.

    It follows the history of the world that it draws, so that pictures may be of a
    moment that the world has left.

    Args:
        module: of the env.
        options: of the env; the render mode is added.
        decode: from a flat array to each agent's action.
    """

    def __init__(
        self,
        module: str,
        options: Mapping[str, Any],
        decode: Callable[[np.ndarray], dict[Any, Any]],
    ) -> None:
        self.module, self.decode = module, decode
        self.options = {**options, "render_mode": "rgb_array"}
        self._copy: Copy | None = None
        self._history: History | None = None
        self._length = 0

    def show(self, place: Place) -> np.ndarray:
        """Draw the world as it was at ``place``, ``(height, width, 3)`` uint8.

        Raises:
            InputError: the env cannot.
        """
        try:
            image = self._at(place).env.render()
        except Exception as error:  # foreign code may fail to draw in any way
            raise InputError(
                f"env.module: {self.module} cannot be drawn: {reason(error)}"
            ) from error
        if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] != 3:
            raise InputError(
                f"env.module: {self.module} cannot be drawn: expected an image of "
                f"shape (height, width, 3), got {getattr(image, 'shape', image)}"
            )
        return image.astype(np.uint8, copy=False)

    def _at(self, place: Place) -> Copy:
        if self._copy is None:
            self._copy = Copy(build_env(self.module, self.options), self.decode)
        if place.history is not self._history or place.length < self._length:
            self._copy.begin(History(place.history.seed))
            self._history, self._length = place.history, 0
        for actions in place.history.actions[self._length : place.length]:
            self._copy.step(actions)
        self._length = place.length
        return self._copy


def fitted(image: np.ndarray, size: int) -> np.ndarray:
    """Scale an image, keeping its proportions, into ``(size, size, 3)``."""
    cv2 = opencv()
    scale = size / max(image.shape[:2])
    height, width = (max(1, round(scale * length)) for length in image.shape[:2])
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    small = cv2.resize(np.ascontiguousarray(image), (width, height), None, 0, 0, method)
    canvas = np.full((size, size, 3), PAPER, np.uint8)
    top, left = (size - height) // 2, (size - width) // 2
    canvas[top : top + height, left : left + width] = small
    return canvas
