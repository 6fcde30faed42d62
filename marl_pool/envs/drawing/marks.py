"""Marks on a picture where the tokens that a policy perceives differ from the truth."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from marl_pool.envs.drawing.canvas import (
    ATTENTION,
    GRID,
    INK,
    PAPER,
    Color,
    blend,
    draw_disc,
    draw_line,
    draw_lines,
    opencv,
    write,
)
from marl_pool.envs.patches import PatchGrid
from marl_pool.perturbations.perception import Mark, Perception

IN_SLOTS = (Mark.HIDDEN, Mark.ALTERED, Mark.REPEATED)
"""Marks drawn in the row of tokens too, which shows the others by color and order."""
HALO_RADIUS = 6
"""Radius in pixels up to which the light halo of a cross would hide its token."""
OPACITY = 0.35
"""Opacity of ghosts and of hidden true tokens."""
SHARE = 0.3
"""Fraction of a patch's side that keeps the true picture, as a margin."""


class Glyphs(NamedTuple):
    """Appearance of one agent's tokens in a picture, according to their features."""

    places: np.ndarray
    """``(n, 2)`` x and y in pixels."""
    colors: list[Color]
    """Color of each token."""
    radii: list[float]
    """Radii in pixels."""
    letters: list[str]
    """Initials of the types where colors do not show them, else empty."""
    observer: np.ndarray | None = None
    """``(2,)`` start of the lines that show attention; None for no lines."""


def _ghost(image: np.ndarray, at: np.ndarray, radius: float, color: Color) -> None:
    draw_disc(image, at, radius, blend(color, OPACITY))
    draw_disc(image, at, radius, color, 1)


def _hollow(image: np.ndarray, at: np.ndarray, radius: float, color: Color) -> None:
    draw_disc(image, at, radius, PAPER)
    draw_disc(image, at, radius, color, 2)


def _rim(image: np.ndarray, at: np.ndarray, radius: float, color: Color) -> None:
    draw_disc(image, at, radius + 3, color)
    draw_disc(image, at, radius + 1, PAPER)


def _double(image: np.ndarray, at: np.ndarray, radius: float, color: Color) -> None:
    draw_disc(image, at, radius + 2, PAPER, 2)
    draw_disc(image, at, radius + 4, INK, 1)


def _cross(image: np.ndarray, at: np.ndarray, radius: float, color: Color) -> None:
    reach = 0.8 * radius + 2
    for arm in ((reach, reach), (reach, -reach)):
        ends = np.stack((at - arm, at + arm))
        if radius > HALO_RADIUS:
            draw_line(image, ends, PAPER, 3)
        draw_line(image, ends, INK, 1)


def _arrows(image: np.ndarray, at: np.ndarray, radius: float, color: Color) -> None:
    for up in (-0.5, 0.5):
        side = np.array((np.sign(up) * radius, up * radius))
        tip, tail = at + side, at + side * (-1, 1)
        draw_line(image, np.stack((tail, tip)), INK, 1)
        for bend in (-0.5, 0.5):
            barb = tip - (np.sign(up) * radius / 2, bend * radius)
            draw_line(image, np.stack((barb, tip)), INK, 1)


Drawer = Callable[[np.ndarray, np.ndarray, float, Color], None]
DRAWERS: Mapping[Mark, Drawer] = {
    Mark.HIDDEN: _cross,
    Mark.INJECTED: _hollow,
    Mark.ALTERED: _ghost,
    Mark.RETYPED: _rim,
    Mark.REPEATED: _double,
    Mark.REORDERED: _arrows,
}
"""Drawing of each mark around a token's place, also in legends."""


def draw_selection(
    image: np.ndarray, glyphs: Glyphs, observer: int, token: int
) -> np.ndarray:
    """Return a picture with a line from the agent to a ring around the selected token.

    The ring of a token beyond the picture is at its edge.

    Args:
        image: picture of the environment.
        glyphs: appearance of the agent's true tokens.
        observer: index of the agent's own token.
        token: index of the selected token.
    """
    image = image.copy()
    ring = glyphs.radii[token] + 4
    places = glyphs.places[[observer, token]].clip(ring, len(image) - 1 - ring)
    away = places[1] - places[0]
    distance = float(np.hypot(*away))
    if distance > ring + glyphs.radii[observer]:
        # The line covers neither disc.
        gaps = np.array([[glyphs.radii[observer]], [-ring]])
        draw_line(image, places + gaps * away / distance, INK, 2)
    draw_disc(image, places[1], ring, INK, 2)
    return image


def draw_perceived(
    image: np.ndarray,
    perception: Perception,
    true: Glyphs,
    perceived: Glyphs,
    weights: np.ndarray | None,
) -> None:
    """Draw one agent's perceived tokens over a picture of the true ones.

    Tokens that are perceived beyond the picture are drawn at its edge.

    Args:
        image: picture of the environment, changed in place.
        perception: the tokens, without batch dimensions.
        true: appearance of the true tokens, ``N``.
        perceived: appearance of the perceived tokens, ``M``.
        weights: ``(M,)`` attention weights to draw as lines; None for no lines.
    """
    marks = {mark: mask.numpy() for mark, mask in perception.marks().items()}
    origin = perception.origin.numpy()
    altered = _where(marks, Mark.ALTERED)
    # Unaltered tokens stay in place; the others are where their features say.
    edge = max(perceived.radii)
    places = perceived.places.clip(edge, len(image) - 1 - edge)
    still = np.setdiff1d(perception.known.numpy().nonzero()[0], altered)
    places[still] = true.places[origin[still]]
    # Lines first: attention, then those from true to perceived places.
    if perceived.observer is not None and weights is not None:
        # Tokens at the same place share a line.
        spots, spot = np.unique(places, axis=0, return_inverse=True)
        total = np.bincount(spot.flatten(), weights)
        draw_lines(image, spots, perceived.observer, total)
    for token in altered:
        ends = np.stack((true.places[origin[token]], places[token]))
        draw_line(image, ends, blend(INK, 0.6), 1)
    # True tokens are drawn over the lines again, hidden ones faintly.
    hidden = _where(marks, Mark.HIDDEN)
    if perceived.observer is not None:
        for token in (~perception.true.padding).numpy().nonzero()[0][::-1]:
            color = true.colors[token]
            color = blend(color, OPACITY) if token in hidden else color
            draw_disc(image, true.places[token], true.radii[token] + 1, PAPER)
            draw_disc(image, true.places[token], true.radii[token], color)
    for token in hidden:
        _cross(image, true.places[token], true.radii[token], INK)
    # Perceived tokens, each with its marks.
    veil = image.copy()
    for token in altered:
        draw_disc(veil, places[token], perceived.radii[token], perceived.colors[token])
    # Ghosts are translucent, so that the true tokens can be seen through them.
    image[:] = np.rint(OPACITY * veil + (1 - OPACITY) * image)
    for token in altered:
        # BoxWorld's tokens have the color of the ground below them.
        rim = perceived.colors[token] if perceived.observer is not None else INK
        draw_disc(image, places[token], perceived.radii[token], rim, 1)
    for token in _where(marks, Mark.RETYPED):
        at, radius, ground = (
            places[token],
            perceived.radii[token],
            perceived.colors[token],
        )
        _rim(image, at, radius, true.colors[origin[token]])
        draw_disc(image, at, radius, ground)
        if perceived.letters[token]:
            ink = PAPER if sum(ground) < 384 else INK
            start = (round(at[0] - 0.45 * radius), round(at[1] + 0.5 * radius))
            write(image, perceived.letters[token], start, 2 * radius, ink)
    for mark in (Mark.INJECTED, Mark.REPEATED):
        for token in _where(marks, mark):
            at, color = places[token], perceived.colors[token]
            DRAWERS[mark](image, at, perceived.radii[token], color)


def draw_perceived_patches(
    image: np.ndarray, perception: Perception, grid: PatchGrid, num_frames: int
) -> None:
    """Draw altered patches as perceived, inside the true ones; cross out hidden ones.

    Arguments as in `draw_perceived`; features as in `patch_tokens`.
    """
    cv2, scale = opencv(), len(image) / grid.screen
    marks = {mark: mask.numpy() for mark, mask in perception.marks().items()}
    origin, side = perception.origin.tolist(), grid.patch * scale
    newest = perception.seen.features.unflatten(-1, (num_frames, -1))[:, -1]
    pictures = newest.unflatten(-1, (grid.patch, grid.patch, -1)).numpy()
    inner = round((1 - SHARE) * side)
    for token in _where(marks, Mark.ALTERED):
        corner = (np.array(grid.corner(origin[token])) * scale).round()
        x, y = (round(at + SHARE / 2 * side) for at in corner)
        picture = np.broadcast_to(pictures[token], (grid.patch, grid.patch, 3))
        size = (inner, inner)
        picture = cv2.resize(np.ascontiguousarray(picture), size, interpolation=0)
        image[y : y + inner, x : x + inner] = picture
    for mark in (Mark.HIDDEN, Mark.REPEATED):
        for token in _where(marks, mark):
            place = int(token) if mark is Mark.HIDDEN else origin[token]
            center = (np.array(grid.corner(place)) + grid.patch / 2) * scale
            DRAWERS[mark](image, center, 0.3 * side, INK)


def draw_slots(
    image: np.ndarray,
    top: int,
    height: int,
    perception: Perception,
    perceived: Glyphs | None,
) -> None:
    """Draw a row of cells, the tokens in the order in which the policy gets them.

    A cell has its token's color, or where ``perceived`` is None a color for each true
    token, and its marks if it is wide enough. Cells without a token are empty.

    Args:
        image: image to draw on, over its full width.
        top: first row of pixels.
        height: height of the cells in pixels.
        perception: the tokens, without batch dimensions.
        perceived: appearance of the perceived tokens.
    """
    origin, empty = perception.origin.numpy(), perception.seen.padding.numpy()
    if perceived is not None:
        colors: Any = perceived.colors
    else:  # from dark to light
        levels = np.linspace(0, 255, perception.true.num_tokens).astype(np.uint8)
        cv2 = opencv()
        colors = cv2.applyColorMap(levels[:, None], cv2.COLORMAP_VIRIDIS)[:, 0, ::-1]
    first = round(0.5 * height) + write(
        image, "tokens", (height // 2, top + height - 2), height
    )
    edges = np.linspace(
        first + height // 2, image.shape[1] - height // 2, len(origin) + 1
    )
    wide = bool(edges[1] - edges[0] >= 0.7 * height)
    for slot, (start, end) in enumerate(itertools.pairwise(edges)):
        cell = image[top : top + height, round(start) : round(end) - wide]
        cell[:] = GRID if empty[slot] else colors[slot if perceived else origin[slot]]
        if origin[slot] < 0 and not empty[slot]:
            cell[2:-2, 1:-1] = PAPER
    # A hidden token leaves its slot empty, unless it is perceived as something else.
    masks = {mark: mask.numpy() for mark, mask in perception.marks().items()}
    if Mark.HIDDEN in masks:
        gone = np.zeros_like(empty)
        gone[: len(masks[Mark.HIDDEN])] = masks[Mark.HIDDEN]
        masks[Mark.HIDDEN] = gone & empty
    for mark in IN_SLOTS:
        for slot in _where(masks, mark):
            start, end = edges[slot : slot + 2]
            if wide:
                middle = np.array(((start + end) / 2 - 1, top + (height - 1) / 2))
                DRAWERS[mark](image, middle, height / 6, ATTENTION)
            elif mark is not Mark.HIDDEN:
                low = top + 2 * height // 3
                image[low : top + height, round(start) : round(end)] = ATTENTION


def _where(marks: Mapping[Mark, np.ndarray], mark: Mark) -> np.ndarray:
    return marks[mark].nonzero()[0] if mark in marks else np.zeros(0, np.int64)
