"""PPO's loss by the compiled kernel, against torch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("ray")

from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing

from helpers.ppo import normal, recorded_columns, torchs_loss
from helpers.set_networks import needs_kernel
from marl_pool.compiled.choice import use_kernels
from marl_pool.compiled.ppo import Coefficients, ppo_loss
from marl_pool.policies.actions import ActionSpec
from marl_pool.training.ppo.loss import recorded_steps

pytestmark = needs_kernel


def make(
    actions: ActionSpec, rows: int, dtype: torch.dtype, seed: int = 0
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Sample columns, logits and values."""
    generator = torch.Generator().manual_seed(seed)
    columns = recorded_columns(actions, rows, generator, dtype)
    logits = 0.5 * normal(generator, dtype, rows, actions.num_logits)
    return columns, logits, normal(generator, dtype, rows)


def results(
    native: bool,
    actions: ActionSpec,
    inputs: tuple[dict[str, Any], Tensor, Tensor],
    c: Coefficients,
) -> list[Tensor]:
    """Return the loss and the gradients by logits and values."""
    columns, *outputs = inputs
    logits, values = (part.clone().requires_grad_() for part in outputs)
    if native:
        recorded = recorded_steps(columns, actions)
        assert recorded.fits(logits, values)
        loss = ppo_loss(c, recorded, logits, values)
    else:
        loss = torchs_loss(c, actions, columns, logits, values)
    # A factor, as of the fraction of a minibatch.
    return [loss.detach(), *torch.autograd.grad(0.7 * loss, [logits, values])]


BOX = ActionSpec(low=(-1.0,) * 3, high=(1.0,) * 3)
SPACES = {
    "box": BOX,
    "narrow box": ActionSpec(low=(-1.0,), high=(1.0,)),
    "discrete": ActionSpec(n=6),
    "one choice": ActionSpec(n=1),
    "choices": ActionSpec(choices=(3, 1, 4)),
    "one of several": ActionSpec(choices=(5,)),
    "choices and box": ActionSpec(low=(-1.0,) * 2, high=(1.0,) * 2, choices=(2, 3)),
}
COLUMNS = (
    *(Columns.ACTION_LOGP, Columns.ACTION_DIST_INPUTS),
    *(Postprocessing.ADVANTAGES, Postprocessing.VALUE_TARGETS),
)
PLAIN = Coefficients(clip=0.2, value=0.3, value_clip=float("inf"), entropy=0.0, kl=0.0)


@given(
    space=st.sampled_from(sorted(SPACES)),
    rows=st.sampled_from([1, 2, 17, 130]),
    clip=st.sampled_from([0.0, 0.2, 1.5]),
    value_clip=st.sampled_from([float("inf"), 0.5]),
    entropy=st.sampled_from([0.0, 0.01]),
    kl=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_torchs_in_float64(
    space: str,
    rows: int,
    clip: float,
    value_clip: float,
    entropy: float,
    kl: float,
    seed: int,
) -> None:
    actions, c = SPACES[space], Coefficients(clip, 0.3, value_clip, entropy, kl)
    inputs = make(actions, rows, torch.float64, seed)
    expected = results(False, actions, inputs, c)
    for ours, torchs in zip(results(True, actions, inputs, c), expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("space", ["box", "discrete", "choices and box"])
def test_float32_is_as_precise_as_torchs(space: str) -> None:
    actions, c = SPACES[space], Coefficients(0.2, 0.3, 0.5, 0.01, 0.3)
    inputs = make(actions, 512, torch.float32)
    exact = results(False, actions, make(actions, 512, torch.float64), c)
    for ours, torchs, number in zip(
        results(True, actions, inputs, c),
        results(False, actions, inputs, c),
        exact,
        strict=True,
    ):
        assert (ours - number).norm() <= 2 * (torchs - number).norm() + 1e-6


@pytest.mark.parametrize("column", [Columns.ACTION_LOGP, Postprocessing.VALUE_TARGETS])
def test_nan_and_infinity_reach_the_loss(column: str) -> None:
    for bad in (torch.nan, -torch.inf):
        columns, logits, values = make(BOX, 20, torch.float32)
        columns[column][3] = bad
        loss, *_ = results(True, BOX, (columns, logits, values), PLAIN)
        assert not loss.isfinite()


@pytest.mark.parametrize("size", [1e19, -1e30, 1e38])
@pytest.mark.parametrize("part", ["logits", "values", *COLUMNS])
@pytest.mark.parametrize("space", sorted(SPACES))
def test_a_huge_number_is_nan_only_where_it_is_in_torch(
    space: str, part: str, size: float
) -> None:
    """The square of a huge error overflows in float32."""
    for c in (PLAIN, Coefficients(0.2, 0.3, 0.5, 0.01, 0.3)):
        columns, logits, values = make(SPACES[space], 20, torch.float32)
        tensors = {"logits": logits, "values": values, **columns}
        tensors[part][3:5].view(2, -1)[:, 0] = size
        outputs, expected = (
            results(native, SPACES[space], (columns, logits, values), c)
            for native in (True, False)
        )
        for ours, torchs in zip(outputs, expected, strict=True):
            assert not (ours.isnan() & ~torchs.isnan()).any()


def test_columns_in_other_layouts_give_the_same() -> None:
    columns, logits, values = make(BOX, 20, torch.float64)
    expected = results(True, BOX, (columns, logits, values), PLAIN)
    strided = {key: torch.stack([c, -c], -1)[..., 0] for key, c in columns.items()}
    outputs = results(True, BOX, (strided, logits.T.contiguous().T, values), PLAIN)
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("action", [-1, 6])
def test_an_action_beyond_the_choices_is_refused(action: int) -> None:
    columns, logits, values = make(SPACES["discrete"], 20, torch.float32)
    columns[Columns.ACTIONS][19] = action
    with pytest.raises(IndexError, match="actions: expected 0 to 5"):
        ppo_loss(PLAIN, recorded_steps(columns, SPACES["discrete"]), logits, values)


@pytest.mark.parametrize("action", [-1.0, 3.0, float("nan")])
@pytest.mark.parametrize("space", ["choices", "choices and box"])
def test_a_choice_of_several_beyond_its_options_is_refused(
    space: str, action: float
) -> None:
    actions = SPACES[space]
    columns, logits, values = make(actions, 20, torch.float32)
    number = -1 if action != action and actions.integral else action
    columns[Columns.ACTIONS][19, actions.choices.index(3)] = number
    with pytest.raises(IndexError, match="actions: expected 0 to "):
        ppo_loss(PLAIN, recorded_steps(columns, actions), logits, values)


@pytest.mark.parametrize(
    ("recorded", "claimed"),
    [
        ("discrete", "box"),
        ("box", "discrete"),
        ("choices", "discrete"),
        ("choices", "box"),
        ("choices and box", "box"),
        ("choices and box", "choices"),
        ("discrete", "choices"),
    ],
)
def test_actions_of_another_space_are_refused(recorded: str, claimed: str) -> None:
    columns, logits, values = make(SPACES[recorded], 20, torch.float32)
    wrong = recorded_steps(columns, SPACES[claimed])
    with pytest.raises(ValueError, match="compiled kernel: expected"):
        ppo_loss(PLAIN, wrong, logits, values)


def test_sizes_are_checked() -> None:
    columns, logits, values = make(BOX, 20, torch.float32)
    for key, column in columns.items():
        wrong = recorded_steps({**columns, key: column[1:]}, BOX)
        with pytest.raises(ValueError, match="compiled kernel"):
            ppo_loss(PLAIN, wrong, logits, values)


def test_unsupported_dtypes_fall_back_to_torch() -> None:
    columns, logits, values = make(BOX, 20, torch.float32)
    recorded = recorded_steps(columns, BOX)
    assert recorded.fits(logits, values)
    assert not recorded.fits(logits.double(), values)
    assert not recorded.fits(logits.bfloat16(), values.bfloat16())
    assert not recorded.fits(logits[:0], values[:0])
    with use_kernels("torch"):
        assert not recorded.fits(logits, values)
