"""Figures of an evaluation: a sensory layer's codes, and the most attended patches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.canvas import opencv
from marl_pool.evaluation.evaluate import EvaluatedRun
from marl_pool.evaluation.settings import EvaluateSettings
from marl_pool.evaluation.video.render import episode_frames
from marl_pool.files.figures import INK, new_figure, save_png
from marl_pool.policies.base import Policy
from marl_pool.utils.errors import UnfitTokensError
from marl_pool_studies.attention_neuron.recording import (
    Recording,
    blank_tokens,
    longest,
    make_rollout,
    record,
    validate_codes,
)

STEPS = 1000
"""Steps after which an episode is cut."""
MOST_CODES = 256
"""Rows of a heat map; if there are more codes, evenly spread ones are shown."""
GROUPS, SAMPLES = 6, 3
"""Groups of codes on a map, and frames that show each."""
FEWEST = 30
"""Minimum number of steps for a map."""
COMPONENTS = 50
"""Principal components of the codes that t-SNE maps."""
COLORS = ("#0b5fa5", "#e07b00", "#2e8b57", "#b03a2e", "#7d3c98", "#8a6d3b")
SHEET_STEPS, SHEET_FRAMES = 240, 6
"""Steps after which an episode on a sheet is cut, and frames of it."""
TOP = 10
"""Patches outlined, as in the paper's figure."""
SIZE, MARGIN = 240, 8
"""Pixels of a frame's side, and between frames."""


def draw_latents(evaluated: EvaluatedRun, settings: EvaluateSettings) -> Path:
    """Draw the codes over an episode, unperturbed and shuffled.

    Source: Tang and Ha (2021, https://arxiv.org/abs/2109.02869), Figure 4.

    Raises:
        UnfitTokensError: no sensory layer.
    """
    target, path = evaluated.target, evaluated.files.unused("latents.png")
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
    suffix = "" if len(rows) == codes else f" ({len(rows)} of {codes})"
    panels[0].set_ylabel(f"code{suffix}", color=INK)
    figure.colorbar(image, ax=panels, shrink=0.9)
    if plain.codes.shape == shuffled.codes.shape:
        largest = float((plain.codes - shuffled.codes).abs().max())
        difference = f"largest difference of a code: {largest:.1e}"
    else:
        steps = f"{len(plain.codes)} and {len(shuffled.codes)}"
        difference = f"the episodes differ: they have {steps} steps"
    figure.suptitle(difference, color=INK, fontsize=10)
    save_png(figure, path)
    return path


def draw_code_map(evaluated: EvaluatedRun, settings: EvaluateSettings) -> Path:
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

    target, path = evaluated.target, evaluated.files.unused("codes.png")
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
    return path


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
    sample_steps: np.ndarray,
    path: Path,
) -> None:
    # Draw the frames first, because their number sets the figure's width.
    pictures = [
        [_frames(recording.envs[step]) for step in group] for group in sample_steps
    ]
    frames = len(pictures[0][0])
    widths = [6.5, 2 * 0.75 * frames + 0.6]
    figure = new_figure(sum(widths), 6.5)
    # The map is on the left, frames of the chosen samples on the right.
    grid = figure.add_gridspec(1, 2, width_ratios=widths)
    axes = figure.add_subplot(grid[0])
    # Draw each group in its color, with the chosen samples on top.
    for group, (color, steps) in enumerate(zip(COLORS, sample_steps, strict=True)):
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


def draw_attended(evaluated: EvaluatedRun, settings: EvaluateSettings) -> Path:
    """Draw the most attended patches at evenly spread steps of an episode.

    Rows are the unperturbed episode, the same one shuffled, and the transfer
    environments of the evaluation. Patches are drawn at their original places, so that
    the first two rows are equal if the order does not matter.

    Source: Tang and Ha (2021, https://arxiv.org/abs/2109.02869), Figure 8.

    Raises:
        UnfitTokensError: tokens that are not patches, or a policy without attention.
    """
    target = evaluated.target
    if target.make_env(1).patch_grid is None:
        name = target.env["name"]
        raise UnfitTokensError(f"expected patches of a picture, which {name} has not")
    group, policy = next(iter(target.policies.items()))
    with torch.no_grad():
        if policy.attention_weights(blank_tokens(target, group)) is None:
            kind = type(policy).__name__
            raise UnfitTokensError(f"expected attention, which {kind} has not")
    rows = [
        _row(target.make_env(1), target.policies, "clean"),
        _row(target.make_env(1), target.policies, "shuffled", shuffled=True),
        *(
            _row(target.make_env(1, **transfer.env), transfer.policies, transfer.label)
            for transfer in evaluated.transfers
            if not transfer.missing
        ),
    ]
    sheet = _joined([_joined(row, axis=1) for row in rows], axis=0)
    path = evaluated.files.unused("patches.png")
    opencv().imwrite(str(path), sheet[..., ::-1])
    return path


def _joined(images: Sequence[np.ndarray], *, axis: int) -> np.ndarray:
    """Join images of one size along an axis, with margins between them."""
    margins = [(0, 0)] * 3
    margins[axis] = (0, MARGIN)
    tiles = [np.pad(image, margins, constant_values=255) for image in images]
    return np.concatenate(tiles, axis)


def _row(
    env: BatchedEnv, policies: Mapping[str, Policy], text: str, shuffled: bool = False
) -> list[np.ndarray]:
    """Return captioned frames at evenly spread steps."""
    rollout = make_rollout(env, policies, shuffled, SHEET_STEPS)
    frames = list(episode_frames(rollout, text=text, size=SIZE, top=TOP))
    # The last frame shows the end of the episode, without attention.
    steps = np.linspace(0, len(frames) - 2, SHEET_FRAMES).round().astype(int)
    return [frames[step] for step in steps]
