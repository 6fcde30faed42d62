"""The encoder behind Table 3 of the SWARM paper depends on the order of its points.

The paper estimates a mixture of Gaussians from a *set* of points (section 4.2). Its
code builds the layers without naming their pooling, whose default is causal: a point
hears only those before it. Golden numbers of that code show it; see the note in their
file.
"""

import json
import math

import pytest
import torch
from torch import Tensor

from helpers.paths import GOLDEN_FILES
from marl_pool.encoders.swarm import Population, SwarmLayer

GOLDEN = GOLDEN_FILES / "swarm_mixture.json"
UNITS, ITERATIONS, COMPONENTS = 6, 3, 4
ROUNDING = 1e-12
ORDERS = ("as given", "reversed")


def published_numbers(name: str, *shape: int) -> Tensor:
    """Numbers that a parameter's published name decides."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    phase = 1 + 12.9898 * sum(map(ord, name))
    return 0.5 * torch.sin(phase + 78.233 * index).view(shape)


def published_points() -> Tensor:
    return 4 * published_numbers("points", 3, 7, 2)


def layer_of(population: Population) -> SwarmLayer:
    """A layer of this package with the parameters of the published one."""
    count, gates = 5 * COMPONENTS, 4 * UNITS
    layer = SwarmLayer(2, UNITS, count, ITERATIONS, population).double()
    cell, output = "swarm.0.cell", "swarm.0.ffwd"
    layer.load_state_dict(
        {
            "on_input.weight": published_numbers(f"{cell}.Wih.weight", gates, 2),
            "on_input.bias": published_numbers(f"{cell}.Wih.bias", gates),
            "on_hidden.weight": published_numbers(f"{cell}.Whh.weight", gates, UNITS),
            "on_population.weight": published_numbers(
                f"{cell}.Whp.weight", gates, UNITS
            ),
            "output.weight": published_numbers(f"{output}.weight", count, 2 * UNITS),
            "output.bias": published_numbers(f"{output}.bias", count),
        }
    )
    return layer


@torch.no_grad()
def estimate(population: Population, points: Tensor) -> dict[str, Tensor]:
    """The mixture that a layer and the mean over its results give."""
    results = layer_of(population)(points).mean(1).unflatten(-1, (COMPONENTS, 5))
    return {
        "means": results[..., :2],
        "deviations": torch.nn.functional.softplus(results[..., 2:4]),
        "log_weights": results[..., 4].log_softmax(-1),
    }


@torch.no_grad()
def formula(points: Tensor, population: Population) -> Tensor:
    """Section 3 of the paper, point by point; the mean of the results, as pooled."""
    layer = layer_of(population)
    sets = []
    for point_set in points:
        hidden = [torch.zeros(UNITS).double() for _ in point_set]
        cell = list(hidden)
        for iteration in range(ITERATIONS):
            updated = list(hidden)
            for i, x in enumerate(point_set):
                senders = hidden[: i + 1] if population == "causal" else hidden
                gates = layer.on_input(x)
                if iteration:
                    mean_state = torch.stack(senders).mean(0)
                    gates = (
                        gates
                        + layer.on_hidden(hidden[i])
                        + layer.on_population(mean_state)
                    )
                enter, forget, leave = gates[: 3 * UNITS].sigmoid().chunk(3)
                cell[i] = forget * cell[i] + enter * gates[3 * UNITS :].tanh()
                updated[i] = leave * cell[i].tanh()
            hidden = updated
        outputs = [
            layer.output(torch.cat(pair)) for pair in zip(hidden, cell, strict=True)
        ]
        sets.append(torch.stack(outputs).mean(0))
    return torch.stack(sets)


def published() -> dict[str, dict[str, Tensor]]:
    estimates = json.loads(GOLDEN.read_text())["estimates"]
    return {
        order: {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in estimates[order].items()
        }
        for order in ORDERS
    }


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def in_both_orders() -> list[tuple[str, Tensor]]:
    points = published_points()
    return list(zip(ORDERS, (points, points.flip(1)), strict=True))


def test_the_published_estimate_depends_on_the_order_of_the_points() -> None:
    estimates = published()
    change = difference(estimates["as given"], estimates["reversed"])
    assert change > 0.02 * float(estimates["as given"]["means"].abs().max())


def test_the_published_encoder_is_the_causal_one() -> None:
    estimates = published()
    for order, points in in_both_orders():
        assert difference(estimate("causal", points), estimates[order]) < ROUNDING
        assert difference(estimate("mean", points), estimates[order]) > 1e-3


def test_with_the_mean_the_order_does_not_matter() -> None:
    original, mirrored = (estimate("mean", points) for _, points in in_both_orders())
    assert difference(original, mirrored) < ROUNDING


@pytest.mark.parametrize("population", ["mean", "causal"])
def test_the_formula_says_the_same(population: Population) -> None:
    pooled = [formula(points, population) for _, points in in_both_orders()]
    layer = layer_of(population)
    with torch.no_grad():
        for expected, (_, points) in zip(pooled, in_both_orders(), strict=True):
            torch.testing.assert_close(
                layer(points).mean(1), expected, rtol=0, atol=1e-12
            )
    change = float((pooled[0] - pooled[1]).abs().max())
    assert (change < ROUNDING) == (population == "mean")
