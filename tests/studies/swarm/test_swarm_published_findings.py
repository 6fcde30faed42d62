"""The encoder behind Table 3 of the SWARM paper depends on the order of its points.

The paper estimates a mixture of Gaussians from a *set* of points (section 4.2). Its
code builds the layers without naming their pooling, whose default is causal: a point
hears only those before it. Golden numbers of that code show it; see the note in their
file.
"""

import json
import math

import torch
from torch import Tensor

from helpers.paths import GOLDEN_FILES
from marl_pool.encoders.swarm import Population, SwarmLayer

GOLDEN = GOLDEN_FILES / "swarm_mixture.json"
UNITS, ITERATIONS, COMPONENTS = 6, 3, 4
ROUNDING = 1e-12


def published_numbers(name: str, *shape: int) -> Tensor:
    """Reproducible values for a parameter, determined by its published name."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    phase = 1 + 12.9898 * sum(map(ord, name))
    return 0.5 * torch.sin(phase + 78.233 * index).view(shape)


def layer_of(population: Population) -> SwarmLayer:
    """A layer of this package with the parameters of the published one."""
    count, gates = 5 * COMPONENTS, 4 * UNITS
    layer = SwarmLayer(2, UNITS, count, ITERATIONS, population).double()
    shapes = {
        "on_input.weight": ("cell.Wih.weight", gates, 2),
        "on_input.bias": ("cell.Wih.bias", gates),
        "on_hidden.weight": ("cell.Whh.weight", gates, UNITS),
        "on_population.weight": ("cell.Whp.weight", gates, UNITS),
        "output.weight": ("ffwd.weight", count, 2 * UNITS),
        "output.bias": ("ffwd.bias", count),
    }
    layer.load_state_dict(
        {
            target: published_numbers(f"swarm.0.{source}", *shape)
            for target, (source, *shape) in shapes.items()
        }
    )
    return layer


@torch.no_grad()
def estimate(population: Population, points: Tensor) -> dict[str, Tensor]:
    """Estimate a mixture from the mean of a layer's outputs."""
    results = layer_of(population)(points).mean(1).unflatten(-1, (COMPONENTS, 5))
    return {
        "means": results[..., :2],
        "deviations": torch.nn.functional.softplus(results[..., 2:4]),
        "log_weights": results[..., 4].log_softmax(-1),
    }


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_the_published_encoder_is_the_causal_one() -> None:
    points = 4 * published_numbers("points", 3, 7, 2)
    published = {
        order: {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in estimates.items()
        }
        for order, estimates in json.loads(GOLDEN.read_text())["estimates"].items()
    }
    straight, mirrored = published["as given"], published["reversed"]
    assert difference(straight, mirrored) > 0.02 * float(straight["means"].abs().max())
    for expected, ordered in ((straight, points), (mirrored, points.flip(1))):
        assert difference(estimate("causal", ordered), expected) < ROUNDING
        assert difference(estimate("mean", ordered), expected) > 1e-3
