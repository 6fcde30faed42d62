"""The gradient of PPO's loss in one call of the kernel, against torch's autograd."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("ray")

from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing

from helpers.ppo import recorded_columns, torchs_loss
from helpers.set_networks import HEADS, WIDTHS, make_tokens, needs_kernel
from marl_pool.compiled import CompiledTokenPolicy, compile
from marl_pool.compiled.actor_critic import ActorCritic
from marl_pool.compiled.choice import use_kernels
from marl_pool.compiled.ppo import Coefficients, ppo_gradient
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.storage import load_policy, save_policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.optimization import FlatParameters
from marl_pool.training.ppo.loss import recorded_steps
from marl_pool.utils.devices import torch_threads
from marl_pool.utils.errors import InputError

pytestmark = needs_kernel

BOX, CHOICES = ActionSpec(low=(-1.0,) * 3, high=(1.0,) * 3), ActionSpec(n=4)
JOINT = ActionSpec(low=(-1.0,) * 2, high=(1.0,) * 2, choices=(3, 2))
SEVERAL = ActionSpec(choices=(2, 4, 1))
ALL_TERMS = Coefficients(clip=0.2, value=0.3, value_clip=2.0, entropy=0.01, kl=0.3)
NATIVE = sorted(set(HEADS) - {"gated", "pma"})


def make_policy(
    pooling: str = "ada",
    actions: ActionSpec = BOX,
    *,
    head_width: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> TokenPolicy:
    dim, heads = WIDTHS[head_width]
    encoder = {"name": "transformer", "dim": dim, "num_layers": 2}
    encoder |= {"num_heads": heads, "dim_ff": 3 * dim + 1}
    policy = TokenPolicy(
        TokenSpec(7, 4, ("type 0", "type 1", "type 2")),
        actions,
        pooling=HEADS[pooling],
        seed=seed,
        **{"encoder": encoder, "init_std": 0.4, "head_hidden": (9, 5), **options},
    )
    return policy.to(dtype)


def actor_critic_of(policy: TokenPolicy, tokens: Tokens) -> ActorCritic | None:
    """Compile the policy, and return what the kernel reads."""
    compiled = compile(policy)
    if not isinstance(compiled, CompiledTokenPolicy):
        return None
    return compiled.actor_critic(tokens)


def make_rows(
    actions: ActionSpec,
    tokens: Tokens,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return recorded_columns(actions, len(tokens.types), generator, dtype)


def sampled(
    actions: ActionSpec = BOX, dtype: torch.dtype = torch.float64
) -> tuple[TokenPolicy, Tokens, dict[str, Any]]:
    """Return a policy, what it sees in 20 rows, and their recorded columns."""
    policy = make_policy(actions=actions, dtype=dtype)
    tokens = make_tokens(policy.network, 20)
    return policy, tokens, make_rows(actions, tokens, dtype=dtype)


def in_one_call(
    policy: TokenPolicy,
    tokens: Tokens,
    rows: dict[str, Any],
    c: Coefficients = ALL_TERMS,
    scale: Tensor | None = None,
) -> list[Tensor]:
    """Return loss, logits, values and all gradients by the kernel."""
    flat = FlatParameters(policy.parameters())
    actor_critic = actor_critic_of(policy, tokens)
    recorded = recorded_steps(rows, policy.actions)
    assert actor_critic is not None
    assert recorded.fits(actor_critic.network.values)
    flat.view_grad()
    outputs = ppo_gradient(actor_critic, c, recorded, scale)
    assert flat.values.grad is not None
    return [*outputs, *flat.split(flat.values.grad)]


def by_autograd(
    policy: TokenPolicy,
    tokens: Tokens,
    rows: dict[str, Any],
    c: Coefficients = ALL_TERMS,
    scale: Tensor | None = None,
    kernels: Any = "torch",
) -> list[Tensor]:
    """Return the same by torch's autograd."""
    policy = compile(policy)
    with use_kernels(kernels):
        for_action, for_value = policy.pool(tokens)
        logits, values = policy.logits(for_action), policy.values(for_value)
        values = values if scale is None else values * scale
        loss = torchs_loss(c, policy.actions, rows, logits, values)
        parameters = list(policy.parameters())
        gradients = torch.autograd.grad(
            loss, parameters, allow_unused=True, materialize_grads=True
        )
    return [loss.detach(), logits.detach(), values.detach(), *gradients]


def assert_close(outputs: list[Tensor], expected: list[Tensor], rtol: float) -> None:
    for output, reference in zip(outputs, expected, strict=True):
        assert output.shape == reference.shape
        scale = max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(output, reference, rtol=rtol, atol=rtol * scale)


@given(
    pooling=st.sampled_from(NATIVE),
    actions=st.sampled_from([BOX, CHOICES, SEVERAL, JOINT]),
    rows=st.sampled_from([1, 8, 17, 130, 300]),
    head_width=st.sampled_from([1, 3, 8]),
    scaled=st.booleans(),
    terms=st.sampled_from([ALL_TERMS, Coefficients(0.0, 1.0, float("inf"), 0.0, 0.0)]),
    seed=st.integers(0, 99),
)
def test_gradient_is_autograds_in_float64(
    pooling: str,
    actions: ActionSpec,
    rows: int,
    head_width: int,
    scaled: bool,
    terms: Coefficients,
    seed: int,
) -> None:
    policy = make_policy(pooling, actions, head_width=head_width, seed=seed)
    tokens = make_tokens(policy.network, rows, padded=True, seed=seed)
    columns = make_rows(actions, tokens, seed)
    scale = torch.linspace(0.1, 2, rows, dtype=torch.float64) if scaled else None
    expected = by_autograd(policy, tokens, columns, terms, scale)
    outputs = in_one_call(policy, tokens, columns, terms, scale)
    assert_close(outputs, expected, 1e-8)


@pytest.mark.parametrize("actions", [BOX, CHOICES, SEVERAL, JOINT])
@pytest.mark.parametrize("pooling", ["ada", "max"])
def test_float32_is_as_precise_as_torchs(pooling: str, actions: ActionSpec) -> None:
    results = []
    for dtype, compute in (
        (torch.float64, by_autograd),
        (torch.float32, by_autograd),
        (torch.float32, in_one_call),
    ):
        policy = make_policy(pooling, actions, dtype=dtype)
        tokens = make_tokens(policy.network, 512)
        results.append(compute(policy, tokens, make_rows(actions, tokens, dtype=dtype)))
    for exact, torchs, ours in zip(*results, strict=True):
        error = (torchs - exact).norm()
        assert (ours - exact).norm() <= 2 * error + 1e-6 * exact.norm() + 1e-6


@pytest.mark.parametrize("probability", ["dropout", "token_dropout"])
def test_dropout_has_the_random_numbers_of_separate_calls(probability: str) -> None:
    policy = make_policy(**{probability: 0.4}).train()
    tokens = make_tokens(policy.network, 150)
    rows = make_rows(BOX, tokens)
    torch.manual_seed(3)
    expected = by_autograd(policy, tokens, rows, kernels="native")
    torch.manual_seed(3)
    outputs = in_one_call(policy, tokens, rows)
    assert_close(outputs, expected, 1e-10)


def test_bits_do_not_depend_on_threads() -> None:
    policy = make_policy(dtype=torch.float32)
    tokens = make_tokens(policy.network, 600)
    rows = make_rows(BOX, tokens, dtype=torch.float32)
    outputs = []
    for threads in (1, 2, 3):
        with torch_threads(threads):
            outputs.append(in_one_call(policy, tokens, rows))
    for repeat in outputs[1:]:
        assert all(map(torch.equal, repeat, outputs[0]))


def test_layouts_of_the_columns_make_no_difference() -> None:
    policy, tokens, rows = sampled()
    scale = torch.linspace(0.5, 1, 20, dtype=torch.float64)
    expected = in_one_call(policy, tokens, rows, scale=scale)
    strided = {key: torch.stack([c, -c], -1)[..., 0] for key, c in rows.items()}
    spread = torch.stack([scale, -scale], -1)[:, 0]
    outputs = in_one_call(policy, tokens, strided, scale=spread)
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_reach_the_loss(bad: float) -> None:
    policy, tokens, rows = sampled()
    rows[Postprocessing.VALUE_TARGETS][7] = bad
    terms = Coefficients(0.2, 0.3, float("inf"), 0.0, 0.0)
    loss, _, values, *gradients = in_one_call(policy, tokens, rows, terms)
    assert not loss.isfinite()
    assert values.isfinite().all()
    assert not all(gradient.isfinite().all() for gradient in gradients)
    # Weights outside the kernel's reach stay without a gradient afterwards.
    flat = FlatParameters(policy.parameters())
    flat.view_grad()
    assert flat.values.grad is not None
    assert not flat.values.grad.any()


@pytest.mark.parametrize("action", [-1, 4])
def test_an_action_beyond_the_choices_is_refused(action: int) -> None:
    policy, tokens, rows = sampled(actions=CHOICES)
    rows[Columns.ACTIONS][19] = action
    with pytest.raises(IndexError, match="actions: expected 0 to 3"):
        in_one_call(policy, tokens, rows)


def test_a_type_beyond_the_table_is_refused() -> None:
    policy, tokens, _ = sampled()
    tokens.types[4, 2] = 3
    with pytest.raises(InputError, match="types from 0 to 2, got 3"):
        in_one_call(policy, tokens, make_rows(BOX, tokens))


def test_sizes_are_checked() -> None:
    policy, tokens, rows = sampled()
    for key, column in rows.items():
        with pytest.raises(ValueError, match="compiled kernel"):
            in_one_call(policy, tokens, {**rows, key: column[1:]})
    with pytest.raises(ValueError, match="compiled kernel"):
        in_one_call(policy, tokens, rows, scale=torch.ones(19, dtype=torch.float64))


@pytest.mark.parametrize("name", ["action_head", "value_head"])
@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("size", [0, 3, 99])
def test_a_head_of_another_shape_is_left_to_torch(
    name: str, part: str, size: int
) -> None:
    policy, tokens, _ = sampled()
    layer = getattr(policy, name)[-1]
    shape = (size, *getattr(layer, part).shape[1:])
    setattr(layer, part, nn.Parameter(torch.ones(shape, dtype=torch.float64)))
    assert actor_critic_of(policy, tokens) is None


def test_a_value_head_with_two_numbers_is_left_to_torch() -> None:
    policy, tokens, _ = sampled()
    layer = policy.value_head[-1]
    layer.weight = nn.Parameter(layer.weight.detach().repeat(2, 1))
    layer.bias = nn.Parameter(layer.bias.detach().repeat(2))
    assert actor_critic_of(policy, tokens) is None
    assert policy.value(tokens).shape == (20,)


@pytest.mark.parametrize("part", ["data", "gradient"])
def test_memory_that_was_replaced_is_refused(part: str) -> None:
    policy, tokens, rows = sampled()
    native = actor_critic_of(policy, tokens)
    assert native is not None
    bias = policy.action_head[-1].bias
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if part == "gradient":
        bias.grad.data = torch.zeros(1, dtype=torch.float64)
    else:
        bias.data = torch.zeros(99, dtype=torch.float64)
    with pytest.raises(ValueError, match="compiled kernel: expected"):
        ppo_gradient(native, ALL_TERMS, recorded_steps(rows, policy.actions), None)


class OtherLogits(TokenPolicy):
    """A policy that overrides the logits."""

    def logits(self, pooled: Tensor) -> Tensor:
        return 2 * super().logits(pooled)


def add_hook(policy: TokenPolicy) -> None:
    policy.network.register_forward_hook(lambda *_: None)


def replace_activation(policy: TokenPolicy) -> None:
    policy.action_head[1] = nn.Tanh()


def replace_class(policy: TokenPolicy) -> None:
    policy.__class__ = OtherLogits


@pytest.mark.parametrize(
    "change",
    [add_hook, replace_activation, replace_class, TokenPolicy.bfloat16],
    ids=["hook", "activation", "subclass", "dtype"],
)
def test_a_changed_policy_is_left_to_torch(
    change: Callable[[TokenPolicy], Any],
) -> None:
    policy, tokens, _ = sampled(dtype=torch.float32)
    assert actor_critic_of(policy, tokens) is not None
    with use_kernels("torch"):
        assert actor_critic_of(policy, tokens) is None
    change(policy)
    assert actor_critic_of(policy, tokens) is None


@pytest.mark.parametrize("options", [{"trunk": "separate"}, {"pooling": "gated"}])
def test_other_policies_are_left_to_torch(options: dict[str, Any]) -> None:
    policy = make_policy(**options)
    assert actor_critic_of(policy, make_tokens(policy.network, 20)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("actions", [BOX, CHOICES, SEVERAL, JOINT])
def test_outputs_in_one_call_are_those_of_separate_calls(
    actions: ActionSpec, dtype: torch.dtype
) -> None:
    policy = make_policy(actions=actions, dtype=dtype)
    tokens = make_tokens(policy.network, 150, padded=True)
    policy = compile(policy)
    pooled, _ = policy.pool(tokens)
    expected = policy.logits(pooled), policy.values(pooled)
    with torch.no_grad():
        assert all(map(torch.equal, policy(tokens), expected))


def test_new_weights_count() -> None:
    policy = make_policy().eval()
    compiled = compile(policy)
    tokens = make_tokens(policy.network, 20)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)

    def change(name: str) -> None:
        if name == "step":
            compiled(tokens)[1].sum().backward()
            optimizer.step()
        elif name == "load":
            policy.load_state_dict(make_policy(seed=1).state_dict())
        elif name == "assign":
            policy.load_state_dict(make_policy(seed=2).state_dict(), assign=True)
        elif name == "flatten":
            FlatParameters(policy.parameters()).values.data.mul_(1.5)
        else:
            compiled.float()

    for name in ("step", "load", "assign", "flatten", "float"):
        with torch.no_grad():
            before = compiled(tokens)[0]
        change(name)
        with torch.no_grad():
            assert actor_critic_of(policy, tokens) is not None
            after, expected = compiled(tokens), policy(tokens)
        assert name == "float" or not torch.allclose(after[0], before)
        for ours, torchs in zip(after, expected, strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    assert compiled(tokens)[0].dtype == torch.float32


def test_dropout_is_sampled_anew() -> None:
    policy = compile(make_policy(dropout=0.4)).train()
    tokens = make_tokens(policy.network, 20)
    with torch.no_grad():
        first, second = policy(tokens)[0], policy(tokens)[0]
    assert not torch.equal(first, second)


def test_a_compiled_policy_is_saved_as_its_original(tmp_path: Path) -> None:
    policy, tokens, _ = sampled(dtype=torch.float32)
    save_policy(compile(policy), tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert type(loaded) is TokenPolicy
    with torch.no_grad():
        assert all(map(torch.equal, loaded(tokens), policy(tokens)))


def test_other_modules_are_returned_as_they_are() -> None:
    linear, policy = nn.Linear(3, 4), make_policy(encoder={"name": "identity"})
    assert compile(linear) is linear
    with pytest.raises(InputError, match="module: expected a torch Module, got 'te"):
        compile("text")
    head = compile(policy)
    assert isinstance(head, CompiledTokenPolicy)  # its heads qualify
    policy.action_head[1] = policy.value_head[1] = nn.Tanh()
    assert compile(policy) is policy
