"""One step of the learner: microbatches, clipping, and numbers that are not finite."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("ray")

from ray.rllib.core.columns import Columns

from marl_pool.training.optimization import FlatAdam, FlatParameters
from marl_pool.training.ppo import learner as learner_module
from marl_pool.training.ppo.learner import (
    GRADIENT_NORM,
    NON_FINITE_LOSS,
    BatchedPPOLearner,
)


def make_learner(*names: str, grad_clip: float | None = None) -> Any:
    """A learner of linear modules whose loss is their mean squared output."""
    torch.manual_seed(0)
    learner: Any = object.__new__(BatchedPPOLearner)
    learner.config = SimpleNamespace(grad_clip=grad_clip)
    modules = {name: nn.Linear(3, 1) for name in names}
    learner._module = modules
    learner._flat = {mid: FlatParameters(m.parameters()) for mid, m in modules.items()}
    optimizers = {mid: FlatAdam(flat.values) for mid, flat in learner._flat.items()}
    learner.get_optimizers_for_module = lambda mid: [("default", optimizers[mid])]
    learner._takes_whole = dict.fromkeys(names, False)
    learner._metrics = {}
    learner._outputs = lambda mid, rows: modules[mid](rows[Columns.ACTIONS])
    learner._loss = lambda mid, outputs: outputs.square().mean()
    return learner


def set_gradient(learner: Any, name: str, norm: float) -> Tensor:
    values = learner._flat[name].values
    values.grad = torch.full_like(values, norm / len(values) ** 0.5)
    return values.grad


@pytest.mark.parametrize(
    ("norm", "limit", "expected"),
    [(5.0, 2.0, 2.0), (3.0, 2.0, 2.0), (1.5, 2.0, 1.5), (50.0, None, 50.0)],
)
def test_a_gradient_is_clipped_to_the_limit(norm, limit, expected) -> None:
    learner = make_learner("a", "b", grad_clip=limit)
    gradient, small = set_gradient(learner, "a", norm), set_gradient(learner, "b", 1.0)
    learner._step({"a": torch.tensor(0.0), "b": torch.tensor(0.0)})
    assert float(gradient.norm()) == pytest.approx(expected, rel=1e-5)
    # Each module has a separate limit; the norm before clipping is logged.
    assert float(small.norm()) == pytest.approx(1.0, rel=1e-5)
    assert float(learner._metrics["a", GRADIENT_NORM]) == pytest.approx(norm)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_number_that_is_not_finite_takes_no_step(number: float, where: str) -> None:
    learner = make_learner("a", "b")
    losses = {"a": torch.tensor(0.5), "b": torch.tensor(0.5)}

    def step(losses: dict[str, Tensor]) -> list[bool]:
        before = [flat.values.detach().clone() for flat in learner._flat.values()]
        learner._step(losses)
        after = [flat.values for flat in learner._flat.values()]
        return [not torch.equal(*pair) for pair in zip(before, after, strict=True)]

    for bad in (False, True):
        for name in losses:
            set_gradient(learner, name, 1.0)
        if bad and where == "loss":
            losses["a"] = torch.tensor(number)
        elif bad:
            learner._flat["a"].values.grad[1] = number
        assert step(losses) == [not bad, not bad]
    assert [float(learner._metrics[m, NON_FINITE_LOSS]) for m in losses] == [1, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_microbatches_count_by_their_size(size: int, monkeypatch) -> None:
    """E.g. five rows in pieces of 2 and 3, whose means have weights 2/5 and 3/5."""
    monkeypatch.setattr(learner_module, "MICROBATCH_STEPS", size)
    learner = make_learner("a", "b")
    rows = {name: torch.randn(count, 3) for name, count in (("a", 5), ("b", 2))}
    batch = {name: {Columns.ACTIONS: part} for name, part in rows.items()}
    losses, microbatches = learner._accumulate(batch)
    assert len(microbatches) == -(-5 // size)
    for name, part in rows.items():
        module = learner.module[name]
        loss = module(part).square().mean()
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        torch.testing.assert_close(losses[name], loss.detach())
        expected = torch.cat([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(learner._flat[name].values.grad, expected)
