"""Plots of a sensory layer's codes: under a shuffle, and as a map."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.studies.attention_neuron.recording import (
    Recording,
    longest,
    record,
    validate_codes,
)
from marl_pool.utils.errors import UnfitTokensError
from marl_pool.utils.plotting import INK, new_figure, save_png

STEPS = 1000
"""Steps after which an episode is cut."""
MOST_CODES = 256
"""Rows of a heat map; of more codes, evenly spread ones are shown."""
GROUPS, SAMPLES = 6, 3
FEWEST = 30
"""Least number of steps for a map."""
COMPONENTS = 50
"""Principal components of the codes that t-SNE maps."""
COLORS = ("#0b5fa5", "#e07b00", "#2e8b57", "#b03a2e", "#7d3c98", "#8a6d3b")


def draw_latents(target: EvaluationTarget, path: Path) -> None:
    """Draw the codes over an episode, unperturbed and shuffled.

    Source: Tang and Ha (2021, https://arxiv.org/abs/2109.02869), Figure 4.

    Raises:
        UnfitTokensError: no sensory layer.
    """
    validate_codes(target)
    # Play the same episode twice, with and without a permutation.
    numbers = [longest(target, STEPS)]
    plain = record(target, numbers, shuffled=False, max_steps=STEPS)
    shuffled = record(target, numbers, shuffled=True, max_steps=STEPS)
    # Heat maps with one color scale: codes are rows, steps columns.
    figure = new_figure(10, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    codes = plain.codes.shape[1]
    # Select evenly spread codes if there are too many to show.
    rows = torch.linspace(0, codes - 1, min(codes, MOST_CODES)).long()
    limit = float(plain.codes.abs().max())
    titles = {"unperturbed": plain, "shuffled at reset": shuffled}
    for axes, (title, recording) in zip(panels, titles.items(), strict=True):
        image = axes.imshow(
            recording.codes[:, rows].T.cpu().numpy(),
            aspect="auto",
            interpolation="nearest",
            vmin=-limit,
            vmax=limit,
        )
        axes.set_title(f"observation {title}", color=INK)
        axes.set_xlabel("step", color=INK)
    some = "" if len(rows) == codes else f" ({len(rows)} of {codes})"
    panels[0].set_ylabel(f"code{some}", color=INK)
    figure.colorbar(image, ax=panels, shrink=0.9)
    figure.suptitle(_difference(plain, shuffled), color=INK, fontsize=10)
    save_png(figure, path)


def draw_code_map(target: EvaluationTarget, path: Path) -> None:
    """Draw a t-SNE map of the codes of a shuffled episode, with frames.

    Codes are grouped on the map by k-means. Each group shows the frames of the samples
    nearest to its centre, oldest first.

    Source: Tang and Ha (2021, https://arxiv.org/abs/2109.02869), Figure 6, whose groups
    were chosen by hand.

    Raises:
        UnfitTokensError: no sensory layer, or an episode of a few steps.
        ModuleNotFoundError: no scikit-learn, of the extra ``analysis``.
    """
    from sklearn.cluster import KMeans

    validate_codes(target)
    # Record a long episode, with its environments for the frames.
    numbers = [longest(target, STEPS)]
    recording = record(target, numbers, shuffled=True, max_steps=STEPS, keep_envs=True)
    if (steps := len(recording.codes)) < FEWEST:
        raise UnfitTokensError(
            f"expected an episode of at least {FEWEST} steps, got {steps}"
        )
    # Group the map, and choose the samples nearest to each group's centre.
    places = embed(recording.codes.cpu().numpy(), target.seed)
    groups = KMeans(GROUPS, n_init=10, random_state=target.seed).fit(places)
    nearest = groups.transform(places).argsort(0, kind="stable")[:SAMPLES].T
    _draw_map(recording, places, groups.labels_, nearest, path)


def embed(codes: np.ndarray, seed: int) -> np.ndarray:
    """Map codes ``(n, C)`` to ``(n, 2)`` by PCA and t-SNE."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    components = min(COMPONENTS, *codes.shape)
    reduced = PCA(components, random_state=seed).fit_transform(codes)
    perplexity = min(30.0, (len(codes) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed)
    places: np.ndarray = tsne.fit_transform(reduced)
    return places


def _draw_map(
    recording: Recording,
    places: np.ndarray,
    labels: np.ndarray,
    chosen: np.ndarray,
    path: Path,
) -> None:
    # Draw the frames first, because their number sets the figure's width.
    pictures = [[_frames(recording.envs[step]) for step in group] for group in chosen]
    frames = len(pictures[0][0])
    widths = [6.5, 2 * 0.75 * frames + 0.6]
    figure = new_figure(sum(widths), 6.5)
    # The map is on the left, frames of the chosen samples on the right.
    grid = figure.add_gridspec(1, 2, width_ratios=widths)
    axes = figure.add_subplot(grid[0])
    # Draw each group in its color, with the chosen samples on top.
    for group, (color, steps) in enumerate(zip(COLORS, chosen, strict=True)):
        x, y = places[labels == group].T
        axes.scatter(x, y, s=8, color=color, alpha=0.35)
        x, y = places[steps].T
        axes.scatter(x, y, s=42, color=color, edgecolors="white")
    axes.set_title("codes of one episode, by t-SNE", color=INK)
    axes.set(xticks=[], yticks=[])
    # Groups in two columns, with space between; samples are rows, frames columns.
    half = GROUPS // 2
    right = grid[1].subgridspec(half, 2, wspace=0.25, hspace=0.15)
    for group, (color, samples) in enumerate(zip(COLORS, pictures, strict=True)):
        cells = right[group % half, group // half].subgridspec(
            SAMPLES, frames, wspace=0.05, hspace=0.05
        )
        for row, column in np.ndindex(SAMPLES, frames):
            cell = figure.add_subplot(cells[row, column])
            cell.imshow(samples[row][column], interpolation="nearest")
            cell.set(xticks=[], yticks=[])
            cell.spines[:].set(edgecolor=color, linewidth=1.6)
    save_png(figure, path)


def _frames(env: BatchedEnv) -> list[np.ndarray]:
    """Return the stacked frames, oldest first, or a drawing of an env without them."""
    screens: Any = getattr(env, "screens", None)
    if screens is None:
        return [env.frame(size=160)]
    frames = screens[0].cpu().numpy()
    frames = frames if frames.ndim == 4 else frames[..., None]
    return [np.broadcast_to(frame, (*frame.shape[:2], 3)) for frame in frames]


def _difference(plain: Recording, shuffled: Recording) -> str:
    if plain.codes.shape != shuffled.codes.shape:
        steps = f"{len(plain.codes)} and {len(shuffled.codes)}"
        return f"the episodes differ: they have {steps} steps"
    largest = float((plain.codes - shuffled.codes).abs().max())
    return f"largest difference of a code: {largest:.1e}"
