"""Plots of amortised clustering: Figures 3 to 5 of the SWARM paper."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from marl_pool.files.figures import figure_style, new_figure, save_png, style_axes
from marl_pool_studies.swarm.data import Mixtures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
MARGIN = 0.15
"""Margin of a plot, as a fraction of the points' range."""
DEVIATIONS = 2.0
"""Radius of an ellipse, in standard deviations."""
AT_ONCE = 20_000
"""Maximum entities computed together."""


@figure_style()
def draw_clustering(
    network: nn.Module,
    mixtures: Mixtures,
    log_probs: Tensor,
    outputs: Tensor,
    folder: Path,
    cells: int,
) -> list[Path]:
    """Plot one set's clusters, and maps of an additional entity's probabilities.

    ``clustering.png`` (Figure 4): the true clusters beside the network's, over the
    entropy of its probabilities for one more entity at each position: dark is unsure.
    Unlike in the paper, matched clusters have the same color. ``probabilities.png``
    (Figure 5): the probability of each output at each position, with the true ellipses.

    ``mixtures`` is a single row without padding, ``log_probs (N, K)`` are the network's
    log-probabilities of its points, and ``outputs (C,)`` the outputs of its clusters,
    -1 for absent ones. Maps have ``cells`` in each direction.
    """
    colors = output_colors(outputs, log_probs.shape[-1])
    # Compute the probabilities of one more point on a square grid around the points.
    low, high = mixtures.points[0].amin(0), mixtures.points[0].amax(0)
    half = float((high - low).max()) * (0.5 + MARGIN)
    x, y = ((low + high) / 2).tolist()
    extent = [x - half, x + half, y - half, y + half]
    probabilities = extra_entity(network, mixtures.points[0], extent, cells)
    assigned = colors[log_probs.argmax(-1)]
    files = [folder / "clustering.png", folder / "probabilities.png"]
    save_png(_side_by_side(mixtures, assigned, probabilities, extent), files[0], DPI)
    save_png(_probability_maps(mixtures, probabilities, colors, extent), files[1], DPI)
    return files


def extra_entity(
    network: nn.Module, points: Tensor, extent: Sequence[float], cells: int
) -> Tensor:
    """Compute the probabilities of one more entity at the centre of each cell.

    Each cell is a separate set: the given points ``(N, 2)`` and the one at the cell's
    centre. ``extent`` is left, right, bottom and top of the grid. The result is
    ``(cells, cells, K)``; rows go up.
    """
    x_min, x_max, y_min, y_max = extent
    steps = (torch.arange(cells) + 0.5) / cells
    y, x = y_min + (y_max - y_min) * steps, x_min + (x_max - x_min) * steps
    places = torch.cartesian_prod(y, x).flip(-1)
    # Evaluate as many cells at once as memory permits.
    results = []
    for centres in places.split(max(1, AT_ONCE // (len(points) + 1))):
        context = points.expand(len(centres), -1, -1)
        logits = network(torch.cat([context, centres[:, None]], 1), None)[:, -1]
        results.append(logits.softmax(-1))
    return torch.cat(results).unflatten(0, (cells, cells))


def output_colors(outputs: Tensor, count: int) -> Tensor:
    """Number the colors of K outputs; a matched one has its cluster's number.

    ``outputs (C,)`` belong to one set's clusters, -1 for absent clusters.
    """
    matched = outputs[outputs >= 0].tolist()
    spare = [output for output in range(count) if output not in matched]
    return torch.tensor([*matched, *spare]).argsort()


@figure_style()
def draw_spread(spreads: dict[str, Tensor], path: Path) -> None:
    """Plot the dependence of the loss on the order of the entities (Figure 3).

    ``spreads`` holds the relative standard deviation of each set's loss over orders, by
    the sets' number of entities.
    """
    figure = new_figure(1.2 + 0.9 * len(spreads), 3.2)
    axes = figure.subplots()
    percents = [100 * spread.numpy() for spread in spreads.values()]
    axes.violinplot(percents, showmedians=True)
    axes.set_xticks(range(1, len(spreads) + 1), list(spreads))
    axes.set(xlabel="entities", ylabel="loss: sd over orders / mean, %")
    axes.set_ylim(bottom=0)
    style_axes(axes)
    save_png(figure, path, DPI)


def _side_by_side(
    mixtures: Mixtures, assigned: Tensor, probabilities: Tensor, extent: list[float]
) -> "Figure":
    figure = new_figure(9.5, 4.9)
    true_panel, assigned_panel = figure.subplots(1, 2, sharex=True, sharey=True)
    true_panel.set_title("true clusters", fontsize=10)
    assigned_panel.set_title("assigned; gray: entropy of one more point", fontsize=10)
    # Shade the right panel by the entropy, from certain (white) to uniform.
    entropy = torch.special.entr(probabilities).sum(-1)
    shading = assigned_panel.imshow(
        entropy.numpy(),
        extent=extent,
        origin="lower",
        cmap="Greys",
        vmin=0,
        vmax=math.log(probabilities.shape[-1]),
        interpolation="bilinear",
        alpha=0.8,
    )
    figure.colorbar(shading, ax=assigned_panel, label="nats", shrink=0.8)
    # Draw the points and the true ellipses in both panels.
    clusters = torch.arange(int(mixtures.num_clusters[0]))
    for axes, colors in ((true_panel, mixtures.labels[0]), (assigned_panel, assigned)):
        points = mixtures.points[0].T.numpy()
        axes.scatter(*points, c=_palette(colors), s=7, linewidths=0)
        axes.set_aspect("equal")
        style_axes(axes)
        for cluster, color in enumerate(_palette(clusters)):
            _ellipse(axes, mixtures, cluster, color)
    return figure


def _probability_maps(
    mixtures: Mixtures, probabilities: Tensor, colors: Tensor, extent: list[float]
) -> "Figure":
    from matplotlib.colors import LinearSegmentedColormap

    count = len(colors)
    columns = min(5, count)
    rows = math.ceil(count / columns)
    figure = new_figure(2.1 * columns, 2.2 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    # Hide all axes, in unused panels too.
    for axes in panels:
        axes.set_axis_off()
    clusters = int(mixtures.num_clusters[0])
    # Panels are in the order of the colors: matched outputs first.
    for output in colors.argsort().tolist():
        place = int(colors[output])
        axes = panels[place]
        full = _palette(colors[output : output + 1])[0]
        axes.imshow(
            probabilities[..., output].numpy(),
            extent=extent,
            origin="lower",
            cmap=LinearSegmentedColormap.from_list("", ["black", full]),
            vmin=0,
            vmax=1,
        )
        spare = "" if place < clusters else ", spare"
        axes.set_title(f"output {output}{spare}", fontsize=8)
        for cluster in range(clusters):
            is_match = cluster == place
            _ellipse(axes, mixtures, cluster, "white", width=1.4 if is_match else 0.5)
    figure.suptitle("probability of one more point (black 0, full color 1)")
    return figure


def _ellipse(
    axes: "Axes", mixtures: Mixtures, cluster: int, color: Any, width: float = 1.2
) -> None:
    angle = torch.linspace(0, 2 * math.pi, 100)
    circle = torch.stack([angle.cos(), angle.sin()])
    line = DEVIATIONS * mixtures.factors[0, cluster] @ circle
    line = line + mixtures.means[0, cluster][:, None]
    # Do not scale the axes, which have the range of the points.
    axes.plot(*line.numpy(), color=color, linewidth=width, scalex=False, scaley=False)


def _palette(numbers: Tensor) -> list[Any]:
    import matplotlib as mpl

    table = mpl.colormaps["tab10"]
    return [table(int(number) % 10) for number in numbers]
