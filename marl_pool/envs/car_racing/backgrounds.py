"""Backgrounds that replace the grass of CarRacing."""

from collections.abc import Callable

import numpy as np

from marl_pool.utils.errors import InputError
from marl_pool.utils.paths import user_path

SIDE = 96
"""Height and width of a screen in pixels."""
CONTRAST = 102
"""Green minus red of the darker grass; 0 on the road."""
DIMMEST = 90
"""Least red of pixels that are grass or a mixture of grass and road."""
BLUES = np.array([(23, 42, 96), (96, 164, 232), (245, 240, 255)])
EVENING = np.array([(40, 28, 92), (214, 84, 96), (255, 200, 96)])


def checkers() -> np.ndarray:
    """Draw magenta and yellow squares of 8 pixels."""
    row, column = np.indices((SIDE, SIDE)) // 8
    return _blend((row + column) % 2.0, np.array([(196, 40, 160), (250, 214, 70)]))


def stripes() -> np.ndarray:
    """Draw slanting stripes of white, red and the grey of the road."""
    row, column = np.indices((SIDE, SIDE))
    colors = np.array([(102, 102, 102), (240, 240, 240), (220, 40, 40)])
    return colors[(row + column) // 6 % 3].astype(np.uint8)


def clouds() -> np.ndarray:
    """Draw clouds in a blue sky: fixed random waves, with amplitude 1 / frequency."""
    rng = np.random.default_rng(0)
    row, column = np.indices((SIDE, SIDE)) / SIDE
    height = np.zeros((SIDE, SIDE))
    for frequency in np.repeat([1.0, 2.0, 4.0, 8.0], 6):
        across, down = frequency * rng.normal(size=2)
        phase = 2 * np.pi * (across * column + down * row + rng.uniform())
        height += np.sin(phase) / frequency
    return _blend((height - height.min()) / np.ptp(height), BLUES)


def sunset() -> np.ndarray:
    """Draw a sun in a sky that becomes lighter towards the ground."""
    row, column = np.indices((SIDE, SIDE)) / SIDE
    image = _blend(row, EVENING)
    image[np.hypot(row - 0.55, column - 0.7) < 0.14] = (255, 244, 214)
    return image


BACKGROUNDS: dict[str, Callable[[], np.ndarray]] = {
    "checkers": checkers,
    "clouds": clouds,
    "stripes": stripes,
    "sunset": sunset,
}


def find_background(name: str) -> np.ndarray | None:
    """Return the picture ``(96, 96, 3)`` uint8 RGB of `BACKGROUNDS` or of a file.

    Raises:
        InputError: an unknown name, or a file that pygame cannot read.
    """
    if name == "none":
        return None
    if name in BACKGROUNDS:
        return BACKGROUNDS[name]()
    file = user_path(name)
    if not file.is_file():
        choices = ", ".join(["none", *BACKGROUNDS])
        raise InputError(
            f"env.background: expected one of {choices}, or an image file, got {name!r}"
        )
    import pygame

    try:
        picture = pygame.image.load(file)
    except pygame.error as error:
        raise InputError(
            f"env.background: expected an image, got {name}: {error}"
        ) from error
    # smoothscale needs 24-bit colors; transparent pixels become black.
    opaque = pygame.Surface(picture.get_size(), depth=24)
    opaque.blit(picture, (0, 0))
    small = pygame.transform.smoothscale(opaque, (SIDE, SIDE))
    pixels: np.ndarray = pygame.surfarray.array3d(small).transpose(1, 0, 2)
    return pixels


def replace_grass(screens: np.ndarray, picture: np.ndarray) -> np.ndarray:
    """Replace the grass of screens ``(n, 96, 96, 3)`` by a picture ``(96, 96, 3)``.

    A mixture of grass and road becomes the same mixture of picture and road.
    """
    # On the ground red equals blue; the share of grass is the excess of green.
    red, green, blue = np.moveaxis(screens.astype(np.int32), -1, 0)
    ground = (abs(red - blue) <= 2) & (red >= DIMMEST) & (green > red)
    share = (((green - red) / CONTRAST).clip(0, 1) * ground)[..., None]
    grassless = np.stack([red, np.where(ground, red, green), blue], -1)
    return np.rint(share * picture + (1 - share) * grassless).astype(np.uint8)


def _blend(positions: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Interpolate colors ``(n, 3)`` at positions ``(…)`` in [0, 1]."""
    stops = np.linspace(0, 1, len(colors))
    parts = [np.interp(positions, stops, part) for part in colors.T]
    return np.stack(parts, -1).astype(np.uint8)
