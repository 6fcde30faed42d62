"""Pictures rendered by PettingZoo environments."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from marl_pool.envs.drawing.canvas import PAPER, opencv
from marl_pool.envs.pettingzoo.env_copy import EnvCopy, build_env, reason
from marl_pool.envs.simulation.env import ReplayCursor
from marl_pool.envs.simulation.simulator import ActionLog
from marl_pool.utils.errors import InputError


class FrameRenderer:
    """An additional environment, built at the first picture, that only renders.

    It replays the log of the environment to be drawn. So the batch needs no render
    mode, and a picture may show an earlier state.
    """

    def __init__(
        self,
        module: str,
        options: Mapping[str, Any],
        decode: Callable[[np.ndarray], dict[Any, Any]],
    ) -> None:
        self.module, self.decode = module, decode
        self.options = {**options, "render_mode": "rgb_array"}
        self._copy: EnvCopy | None = None
        self._source: ActionLog | None = None
        """The log that the copy follows."""

    def render(self, cursor: ReplayCursor) -> np.ndarray:
        """Render the state of a cursor, ``(height, width, 3)`` uint8."""
        try:
            image = self._seek(cursor).env.render()
        except Exception as error:  # third-party code may raise any exception
            raise InputError(
                f"env.module: {self.module} cannot be drawn: {reason(error)}"
            ) from error
        if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] != 3:
            raise InputError(
                f"env.module: {self.module} cannot be drawn: expected an image of "
                f"shape (height, width, 3), got {getattr(image, 'shape', image)}"
            )
        return image.astype(np.uint8, copy=False)

    def _seek(self, cursor: ReplayCursor) -> EnvCopy:
        """Bring the copy to a state, onwards from its present one where possible."""
        if self._copy is None:
            self._copy = EnvCopy(build_env(self.module, self.options), self.decode)
        copy = self._copy
        own = copy.log.actions if copy.log else []
        if cursor.log is not self._source or cursor.length < len(own):
            copy.replay(ActionLog(cursor.log.seed))
            self._source, own = cursor.log, []
        for actions in cursor.log.actions[len(own) : cursor.length]:
            copy.step(actions)
        return copy


def fit_square(image: np.ndarray, size: int) -> np.ndarray:
    """Scale an image into ``(size, size, 3)``, keeping its proportions."""
    cv2 = opencv()
    scale = size / max(image.shape[:2])
    height, width = (max(1, round(scale * length)) for length in image.shape[:2])
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    small = cv2.resize(np.ascontiguousarray(image), (width, height), None, 0, 0, method)
    canvas = np.full((size, size, 3), PAPER, np.uint8)
    top, left = (size - height) // 2, (size - width) // 2
    canvas[top : top + height, left : left + width] = small
    return canvas
