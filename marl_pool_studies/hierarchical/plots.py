"""Plots of the hierarchical autoencoder: reconstructions and merging policies."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from marl_pool.files.figures import figure_style, new_figure, save_png
from marl_pool_studies.hierarchical.choices import Dependence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE = 4
"""Maximum tokens to plot in each direction, as in Figure 4."""
OWN = "#e3008c"
"""Color of the mark on a policy's own token."""


@figure_style()
def draw_reconstructions(rows: Mapping[str, Tensor], path: Path) -> None:
    """Plot rows of n images ``(n, H, W, C)`` in [0, 1], by their title."""
    count = len(next(iter(rows.values())))
    figure = new_figure(1.1 * count, 1.35 * len(rows))
    panels = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for panel, (title, images) in zip(panels, rows.items(), strict=True):
        panel.suptitle(title, fontsize=9, x=0.01, ha="left")
        places = panel.subplots(1, count, squeeze=False)[0]
        for axes, image in zip(places, images, strict=True):
            _show_image(axes, image)
    save_png(figure, path, dpi=100)


@figure_style()
def draw_policies(
    images: Tensor, policies: Tensor, dependence: Dependence, path: Path
) -> None:
    """Plot the merging policies of some tokens, for a few images.

    Each small panel maps the probabilities of one token's partners over the image, on a
    separate scale; the token itself is marked.

    Source: Nair and Lieck, Figure 4, right.

    ``images (n, H, W, C)`` are in [0, 1], and ``policies (n, T, T)`` belong to the
    first merge of √T × √T patches.
    """
    # Choose tokens that are spread evenly over the image.
    side = math.isqrt(policies.shape[1])
    places = torch.linspace(0, side - 1, min(SIDE, side)).round().long().tolist()
    tokens = [row * side + column for row in places for column in places]
    columns = 1 + len(places)
    width = 1.1 * columns * len(images)
    figure = new_figure(width, 1.15 * len(places) + 0.5)
    figure.suptitle(
        "First merge: a token's partners. Information about the image "
        f"{dependence.information:.3f} nats, entropy {dependence.entropy:.2f} of "
        f"{dependence.uniform:.2f}",
        fontsize=9,
    )
    # Each image is followed by a square of small panels, one for each token.
    grid = figure.add_gridspec(len(places), columns * len(images))
    for number, (image, policy) in enumerate(zip(images, policies, strict=True)):
        first_column = number * columns
        _show_image(figure.add_subplot(grid[0, first_column]), image)
        for index, token in enumerate(tokens):
            row, column = divmod(index, len(places))
            axes = figure.add_subplot(grid[row, first_column + 1 + column])
            # Mark the token on the map of its partners.
            partners = policy[token].view(side, side).cpu().numpy()
            axes.imshow(partners, cmap="viridis")
            axes.plot(token % side, token // side, "s", color=OWN, markersize=4)
            axes.set_axis_off()
    save_png(figure, path, dpi=100)


def _show_image(axes: "Axes", image: Tensor) -> None:
    pixels = np.asarray(image.detach().cpu().squeeze(-1))
    axes.imshow(pixels, vmin=0, vmax=1, cmap="gray")
    axes.set_axis_off()
