"""What may stand in the place of CarRacing's grass."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from marl_pool.utils.errors import InputError

NONE = "none"
SIDE = 96
"""Height and width of a screen in pixels."""
CONTRAST = 102
"""How much greener than red the darker grass is; road and car are not."""
DIMMEST = 90
"""Red of the darkest pixel that may be grass, or the edge of grass and road."""
BLUES = np.array([(23, 42, 96), (96, 164, 232), (245, 240, 255)])
EVENING = np.array([(40, 28, 92), (214, 84, 96), (255, 200, 96)])


def checkers() -> np.ndarray:
    """Magenta and yellow squares of 8 pixels."""
    row, column = np.indices((SIDE, SIDE)) // 8
    return _blend((row + column) % 2.0, np.array([(196, 40, 160), (250, 214, 70)]))


def stripes() -> np.ndarray:
    """Slanting stripes of grey, the color of the road, and of white and red."""
    row, column = np.indices((SIDE, SIDE))
    colors = np.array([(102, 102, 102), (240, 240, 240), (220, 40, 40)])
    return colors[(row + column) // 6 % 3].astype(np.uint8)


def clouds() -> np.ndarray:
    """Clouds in a blue sky, always the same: random waves, the long ones highest."""
    rng = np.random.default_rng(0)
    row, column = np.indices((SIDE, SIDE)) / SIDE
    height = np.zeros((SIDE, SIDE))
    for length in np.repeat([1.0, 2.0, 4.0, 8.0], 6):
        across, down = length * rng.normal(size=2)
        phase = 2 * np.pi * (across * column + down * row + rng.uniform())
        height += np.sin(phase) / length
    return _blend((height - height.min()) / np.ptp(height), BLUES)


def sunset() -> np.ndarray:
    """A sky that grows lighter towards the ground, and the sun."""
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
    """The picture that ``name`` means, ``(96, 96, 3)`` uint8 RGB.

    Args:
        name: a key of `BACKGROUNDS`, a file that pygame can read (JPEG, PNG and
            others), or "none".

    Raises:
        InputError: neither, or a file that is no picture.
    """
    if name == NONE:
        return None
    if name in BACKGROUNDS:
        return BACKGROUNDS[name]()
    if not Path(name).is_file():
        known = ", ".join([NONE, *BACKGROUNDS])
        raise InputError(
            f"env.background: expected one of {known}, or a picture's file, "
            f"got {name!r}"
        )
    return _read(name)


def replace_grass(screens: np.ndarray, picture: np.ndarray) -> np.ndarray:
    """Put a picture in the place of the grass.

    Pixels between grass and road become mixtures of the picture and the road.

    Args:
        screens: ``(n, 96, 96, 3)`` uint8 RGB.
        picture: ``(96, 96, 3)`` uint8 RGB.

    Returns:
        As ``screens``.
    """
    red, green, blue = np.moveaxis(screens.astype(np.int32), -1, 0)
    dull = (abs(red - blue) <= 2) & (red >= DIMMEST) & (green > red)
    share = (((green - red) / CONTRAST).clip(0, 1) * dull)[..., None]
    grassless = np.stack([red, np.where(dull, red, green), blue], -1)
    return np.rint(share * picture + (1 - share) * grassless).astype(np.uint8)


def _blend(places: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Colors between the given ones, for places in [0, 1] from first to last."""
    stops = np.linspace(0, 1, len(colors))
    parts = [np.interp(places, stops, part) for part in colors.T]
    return np.stack(parts, -1).astype(np.uint8)


def _read(name: str) -> np.ndarray:
    import pygame

    try:
        picture = pygame.image.load(name)
    except pygame.error as error:
        raise InputError(
            f"env.background: {name} cannot be read as a picture: {error}"
        ) from error
    # Only colors of 24 bits can be averaged; what is transparent becomes black.
    opaque = pygame.Surface(picture.get_size(), depth=24)
    opaque.blit(picture, (0, 0))
    small = pygame.transform.smoothscale(opaque, (SIDE, SIDE))
    pixels: np.ndarray = pygame.surfarray.array3d(small).transpose(1, 0, 2)
    return pixels
