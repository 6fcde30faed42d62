"""Policies: action distributions, noise and decisions."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from helpers.samples import SPEC, heads, random_tokens
from marl_pool.compiled.mlp import CompiledMLP, compile_mlp
from marl_pool.kernels.functional import mlp
from marl_pool.policies import make_policy
from marl_pool.policies.actions import ActionSpec, log_prob, mode, sample
from marl_pool.policies.base import Decision, Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, Stream

CHOICE = spaces.Discrete(4)
LOW, HIGH = np.array([[-2, 0, 1], [2, 1, 5]], dtype=np.float32)
BOX = spaces.Box(LOW, HIGH)
both_spaces = pytest.mark.parametrize("space", [CHOICE, BOX], ids=["choice", "box"])
seeds = st.integers(0, 2**31)
SMALL = {"name": "transformer", "num_layers": 1}


def make(space: spaces.Space, **options: Any) -> TokenPolicy:
    options = {"encoder": SMALL, "init_std": 0.3, "seed": 0, **options}
    return make_policy(SPEC, space, **options).eval()


def stream(policy: Policy, num_envs: int, agents: int, seed: int = 0) -> Stream:
    return Stream(
        seed, torch.arange(num_envs), Purpose.POLICY, agents * policy.noise_size
    )


def distribution(spec: ActionSpec, logits: Tensor) -> Any:
    if spec.discrete:
        return Categorical(logits=logits)
    mean, log_std = logits.chunk(2, -1)
    return Independent(Normal(mean, log_std.exp()), 1)


def set_bias(head: nn.Sequential, bias: list[float]) -> None:
    """Make a head's output constant."""
    last: Any = head[-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor(bias))


# Action spaces and distributions


def test_action_specs_read_spaces() -> None:
    choice, box = ActionSpec.of(CHOICE), ActionSpec.of(BOX)
    assert (choice.discrete, choice.num_logits, choice.noise_size) == (True, 4, 1)
    assert (box.discrete, box.num_logits, box.noise_size) == (False, 6, 3)
    assert (box.low, box.high) == ((-2, 0, 1), (2, 1, 5))
    for spec in (choice, box):
        assert ActionSpec(**spec.to_json()) == spec


@pytest.mark.parametrize(
    "parts",
    [{}, {"n": -1}, {"n": 3, "low": (0.0,), "high": (1.0,)}, {"low": (0.0, 1.0)}],
)
def test_action_specs_are_choices_or_bounds(parts: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="action space: expected choices or bounds"):
        ActionSpec(**parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"n": 2.5}, "integers as sizes"),
        ({"n": "3"}, "integers as sizes"),
        ({"choices": (2, 1.0)}, "integers as sizes"),
        ({"n": True}, "integers as sizes"),
        ({"low": (1.0,), "high": (0.0,)}, "finite bounds"),
        ({"low": ("a",), "high": ("b",)}, "finite bounds"),
        ({"low": (0.0,), "high": (math.inf,)}, "finite bounds"),
        ({"low": (math.nan,), "high": (1.0,)}, "finite bounds"),
    ],
)
def test_action_specs_have_sizes_and_bounds(parts: dict[str, Any], message) -> None:
    with pytest.raises(InputError, match=f"action space: expected {message}, .*got"):
        ActionSpec(**parts)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=1),
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(-np.inf, 1.0, (2,)),
        spaces.Box(0, 1, (2, 2)),
        spaces.Text(3),
    ],
)
def test_other_action_spaces_are_refused(space: spaces.Space) -> None:
    message = r"action space: expected (choices counted from 0|Discrete.* Dict.*), got"
    for build in (make, RandomPolicy):
        with pytest.raises(InputError, match=message):
            build(space)


@both_spaces
@given(seed=seeds)
def test_log_prob_is_that_of_torchs_distributions(
    space: spaces.Space, seed: int
) -> None:
    spec = ActionSpec.of(space)
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(5, 2, spec.num_logits, generator=generator).double()
    noise = torch.rand(5, 2, spec.noise_size, generator=generator).double()
    action = sample(spec, logits, noise.clamp(1e-6, 1 - 1e-6))
    expected = distribution(spec, logits).log_prob(action)
    assert expected.shape == (5, 2)
    torch.testing.assert_close(log_prob(spec, logits, action), expected)


@given(seed=seeds)
def test_a_gaussian_sample_is_the_inverse_distribution_function(seed: int) -> None:
    spec = ActionSpec.of(BOX)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 6, generator=generator).double()
    noise = torch.rand(7, 3, generator=generator).double().clamp(1e-6, 1 - 1e-6)
    mean, log_std = logits.chunk(2, -1)
    expected = stats.norm.ppf(noise.numpy(), mean.numpy(), log_std.exp().numpy())
    np.testing.assert_allclose(sample(spec, logits, noise), expected, rtol=1e-9)


@given(seed=seeds)
def test_a_choice_is_where_the_cumulative_probability_passes_the_noise(
    seed: int,
) -> None:
    spec = ActionSpec.of(CHOICE)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, 4, generator=generator).double()
    noise = torch.rand(9, 1, generator=generator).double()
    expected = [
        np.searchsorted(row.softmax(0).cumsum(0).numpy(), float(u))
        for row, u in zip(logits, noise, strict=True)
    ]
    assert sample(spec, logits, noise).tolist() == expected


def test_samples_stay_in_range_at_the_ends_of_the_noise() -> None:
    smallest, largest = torch.tensor([[1e-30], [1 - 2**-24]])
    impossible = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf])
    spec = ActionSpec.of(CHOICE)
    assert sample(spec, impossible, smallest).item() == 1
    assert sample(spec, impossible, largest).item() == 2
    assert sample(spec, torch.zeros(4), largest).item() == 3
    wide = ActionSpec.of(BOX)
    for end in (smallest, largest):
        assert sample(wide, torch.zeros(6), end.expand(3)).isfinite().all()


def test_sampled_frequencies_and_moments() -> None:
    num = 20_000
    noise = Stream(3, torch.arange(num), Purpose.POLICY, 3).next()
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    choice = ActionSpec.of(CHOICE)
    choices = sample(choice, chances.log().expand(num, 4), noise[:, :1])
    observed = np.bincount(choices.numpy(), minlength=4)
    assert stats.chisquare(observed, num * chances.numpy()).pvalue > 1e-3
    box = ActionSpec.of(BOX)
    logits = torch.tensor([-1.0, 0.0, 3.0, -1.0, 0.0, 0.5])
    values = sample(box, logits.expand(num, 6), noise).numpy()
    for i, (mean, log_std) in enumerate(logits.view(2, 3).T.tolist()):
        normal = stats.norm(mean, np.exp(log_std))
        assert stats.kstest(values[:, i], normal.cdf).pvalue > 1e-3


def test_the_mode_is_the_likeliest_action() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [5.0, 2.0, 1.0, -1.0]])
    assert mode(ActionSpec.of(CHOICE), logits).tolist() == [1, 0]
    assert mode(ActionSpec.of(BOX), torch.arange(6.0)).tolist() == [0, 1, 2]


# TokenPolicy


@both_spaces
@pytest.mark.parametrize("batch", [(1,), (4,), (3, 2), (2, 3, 2)])
def test_shapes(space: spaces.Space, batch: tuple[int, ...]) -> None:
    policy = make(space)
    tokens = random_tokens(0, batch)
    for explore in (False, True):
        decision = policy.act(tokens, explore=explore)
        assert isinstance(decision, Decision)
        action_shape = batch if space is CHOICE else (*batch, 3)
        assert decision.action.shape == action_shape
        assert decision.log_prob.shape == decision.value.shape == batch
        assert decision.logits.shape == (*batch, 4 if space is CHOICE else 6)
        assert decision.state == ()
    assert (decision.action.dtype == torch.int64) == (space is CHOICE)


@both_spaces
def test_rows_do_not_affect_each_other(space: spaces.Space) -> None:
    policy = make(space)
    tokens = random_tokens(0, (3, 2))
    whole = policy.act(tokens)
    for env in range(3):
        for agent in range(2):
            alone = policy.act(tokens.at((slice(env, env + 1), agent)))
            for a, b in zip(alone[:4], whole[:4], strict=True):
                torch.testing.assert_close(a[0], b[env, agent])


@both_spaces
def test_without_exploring_the_mode_is_taken(space: spaces.Space) -> None:
    policy = make(space)
    tokens = random_tokens(0, (3, 2))
    decision = policy.act(tokens, generator=stream(policy, 3, 2))
    assert torch.equal(decision.action, mode(policy.actions, decision.logits))
    assert torch.equal(decision.action, policy.act(tokens).action)


@both_spaces
def test_decisions_follow_from_their_logits(space: spaces.Space) -> None:
    policy = make(space)
    tokens = random_tokens(0, (3, 2))
    noise = stream(policy, 3, 2).next().view(3, 2, -1)
    for explore in (False, True):
        decision = policy.act(tokens, (), stream(policy, 3, 2), explore)
        expected = distribution(policy.actions, decision.logits)
        torch.testing.assert_close(
            decision.log_prob, expected.log_prob(decision.action)
        )
        logits, values = policy(tokens)
        assert torch.equal(decision.logits, logits)
        assert torch.equal(decision.value, values)
    assert torch.equal(decision.action, sample(policy.actions, logits, noise))


@both_spaces
def test_a_stream_reproduces_and_other_streams_differ(space: spaces.Space) -> None:
    policy = make(space)
    tokens = random_tokens(0, (40, 2))

    def actions(seed: int) -> Tensor:
        noise = stream(policy, 40, 2, seed)
        steps = [policy.act(tokens, (), noise, True).action for _ in range(3)]
        assert not torch.equal(steps[0], steps[1])
        return torch.stack(steps)

    before = torch.get_rng_state()
    assert torch.equal(actions(0), actions(0))
    assert not torch.equal(actions(0), actions(1))
    assert torch.equal(torch.get_rng_state(), before)


@both_spaces
def test_without_a_stream_the_global_generator_explores(space: spaces.Space) -> None:
    policy = make(space)
    tokens = random_tokens(0, (40,))
    sampled = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        sampled.append(policy.act(tokens, explore=True).action)
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])


@pytest.mark.parametrize("build", [make, RandomPolicy])
def test_a_generator_of_torch_is_no_stream(build: Any) -> None:
    message = "generator: expected a Stream or None, got Generator"
    with pytest.raises(InputError, match=message):
        build(BOX).act(random_tokens(), generator=torch.Generator(), explore=True)


def test_the_log_std_is_clamped_and_the_mean_is_not() -> None:
    raw = [7.0, -7.0, 0.0, 9.0, -9.0, 0.3]
    for options, bounds in (({}, (-1, 1)), ({"log_std_range": (-2.0, 0.1)}, (-2, 0.1))):
        policy = make(BOX, **options)
        set_bias(policy.action_head, raw)
        logits = policy.act(random_tokens(0, (3, 2))).logits
        expected = [7.0, -7.0, 0.0, bounds[1], bounds[0], min(0.3, bounds[1])]
        torch.testing.assert_close(logits, torch.tensor(expected).expand(3, 2, 6))


def test_the_log_std_depends_on_the_observation() -> None:
    policy = make(BOX, log_std_range=(-50.0, 50.0))
    log_std = policy.act(random_tokens(0, (8,))).logits[:, 3:]
    assert (log_std.std(0) > 0.01).all()


def test_logits_of_a_choice_are_not_clamped() -> None:
    policy = make(CHOICE)
    set_bias(policy.action_head, [9.0, -9.0, 0.0, 4.0])
    logits = policy.act(random_tokens()).logits
    assert logits[0].tolist() == [9.0, -9.0, 0.0, 4.0]


def test_scale_maps_the_unit_interval_to_the_bounds() -> None:
    policy = make(BOX)
    low, high = torch.tensor(BOX.low), torch.tensor(BOX.high)
    ends = torch.tensor([[-1.0], [0.0], [1.0], [2.0]]).expand(4, 3)
    expected = torch.stack([low, (low + high) / 2, high, high + (high - low) / 2])
    torch.testing.assert_close(policy.scale(ends), expected)
    choice = torch.tensor([3, 0])
    assert make(CHOICE).scale(choice) is choice


def test_all_parts_are_initialized_with_the_same_standard_deviation() -> None:
    policy = make(BOX, trunk="separate", init_std=1e-3, head_hidden=(64, 64))
    for name, parameter in policy.named_parameters():
        if "norm" not in name and not name.endswith("bias"):
            assert 3e-4 < parameter.std() < 3e-3, name


@pytest.mark.parametrize(
    ("options", "kind"), [({}, nn.GELU), ({"activation": "relu"}, nn.ReLU)]
)
def test_heads_have_two_hidden_layers(options: Any, kind: type[nn.Module]) -> None:
    policy = make(BOX, **options)
    for head, width in ((policy.action_head, 6), (policy.value_head, 1)):
        assert isinstance(compile_mlp(head), CompiledMLP)
        kinds = [type(layer) for layer in head]
        assert kinds == [nn.Linear, kind, nn.Linear, kind, nn.Linear]
        sizes = [layer.weight.shape for layer in head if isinstance(layer, nn.Linear)]
        assert sizes == [(32, 8), (32, 32), (width, 32)]
    linear = mlp([5, 2], nn.GELU)
    assert [type(layer) for layer in linear] == [nn.Linear]


@both_spaces
def test_separate_trunks_share_nothing(space: spaces.Space) -> None:
    shared, separate = make(space), make(space, trunk="separate")
    assert shared.value_network is None
    assert separate.value_network is not None
    trunk = sum(p.numel() for p in shared.network.parameters())
    total = sum(p.numel() for p in shared.parameters())
    assert sum(p.numel() for p in separate.parameters()) == total + trunk

    def trained_parts(policy: TokenPolicy, index: int) -> set[str]:
        policy.zero_grad()
        policy(random_tokens())[index].square().sum().backward()
        return {
            name.split(".")[0]
            for name, parameter in policy.named_parameters()
            if parameter.grad is not None and parameter.grad.any()
        }

    assert trained_parts(separate, 0) == {"network", "action_head"}
    assert trained_parts(separate, 1) == {"value_network", "value_head"}
    assert trained_parts(shared, 0) == {"network", "action_head"}
    assert trained_parts(shared, 1) == {"network", "value_head"}


def test_weights_have_the_batch_dimensions_of_the_tokens() -> None:
    tokens = random_tokens(0, (3, 2))
    weights = make(CHOICE, pooling={"name": "ada", "num_heads": 4}).attention_weights(
        tokens
    )
    assert weights is not None
    assert weights.shape == (3, 2, 4, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 4))
    assert not weights.movedim(2, -1)[tokens.padding].any()
    assert make(CHOICE, pooling="max").attention_weights(tokens) is None


@heads
def test_weights_compute_the_same_in_a_policy_for_more_tokens(name, options) -> None:
    parts = {"encoder": SMALL, "pooling": {"name": name, **options}}
    policy, larger = (
        make_policy(replace(SPEC, num_tokens=count), BOX, **parts, seed=count).eval()
        for count in (SPEC.num_tokens, 9)
    )
    if "flatten" in str(parts) or name == "learned_aggregation":
        # Their weights have a dimension for the tokens.
        with pytest.raises(RuntimeError, match="size mismatch"):
            larger.load_state_dict(policy.state_dict())
        return
    larger.load_state_dict(policy.state_dict())
    tokens = random_tokens(0, (6, 2))
    decisions = policy.act(tokens), larger.act(tokens)
    torch.testing.assert_close(*(decision.logits for decision in decisions))


def test_dropout_acts_in_training_only() -> None:
    policy, tokens = make(BOX, dropout=0.5), random_tokens()
    assert torch.equal(policy.act(tokens).action, make(BOX).act(tokens).action)
    policy.train()
    assert not torch.equal(policy.act(tokens).action, policy.act(tokens).action)


def test_a_policy_without_memory_has_an_empty_state() -> None:
    assert make(BOX).initial_state(3, 2, 5) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trunk": "both"}, "policy.trunk: expected shared or separate, got 'both'"),
        ({"log_std_range": (1.0, -1.0)}, "expected two increasing numbers, got"),
        ({"log_std_range": (0.0, 0.0)}, "expected two increasing numbers, got"),
        ({"log_std_range": (0.0,)}, "expected a list of 2 .*, got"),
        ({"log_std_range": (0.0, 1.0, 2.0)}, "expected a list of 2 .*, got"),
        ({"head_hidden": (32, 0)}, r"head_hidden: .*integer >= 1\), got \(32, 0\)"),
        ({"activation": "gelo"}, r"got 'gelo'. Did you mean 'gelu'\?"),
        (
            {"activation": "tanh", "head_hidden": ()},
            "policy.activation: expected gelu or relu, got 'tanh'",
        ),
        ({"input_activation": "tanh"}, "input_activation: expected gelu, relu or null"),
        ({"pooling": "meen"}, "unknown pooling 'meen'"),
        ({"encoder": "transformers"}, r"unknown encoder.*mean 'transformer'\?"),
        ({"pooling": 3}, "policy.pooling: expected text or a mapping, got 3"),
        ({"encoder": None}, "policy.encoder: expected text or a mapping, got null"),
        ({"pooling": {"name": "ada", "heads": 2}}, "option of pooling 'ada': 'heads'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(BOX, **options)


# The random policy


def test_the_random_policy_is_uniform_over_the_box() -> None:
    policy = RandomPolicy(BOX)
    tokens = random_tokens(0, (4000, 2))
    decision = policy.act(tokens, (), stream(policy, 4000, 2))
    assert decision.action.shape == (4000, 2, 3)
    for i, (low, high) in enumerate(zip(BOX.low, BOX.high, strict=True)):
        values = decision.action[..., i].flatten().numpy()
        uniform = stats.uniform(float(low), float(high - low))
        assert stats.kstest(values, uniform.cdf).pvalue > 1e-3
    torch.testing.assert_close(
        decision.log_prob, torch.full((4000, 2), -float(np.log(4 * 1 * 4)))
    )
    assert policy.scale(decision.action) is decision.action


def test_the_random_policy_is_uniform_over_the_choices() -> None:
    policy = RandomPolicy(CHOICE)
    tokens = random_tokens(0, (4000, 2))
    decision = policy.act(tokens, (), stream(policy, 4000, 2))
    assert decision.action.dtype == torch.int64
    counts = np.bincount(decision.action.flatten().numpy(), minlength=4)
    assert len(counts) == 4
    assert stats.chisquare(counts).pvalue > 1e-3
    torch.testing.assert_close(
        decision.log_prob, torch.full((4000, 2), -float(np.log(4)))
    )


@both_spaces
def test_the_random_policy_explores_always_and_reproduces(space: spaces.Space) -> None:
    policy = RandomPolicy(space)
    tokens = random_tokens(0, (50, 2))
    noise = stream(policy, 50, 2)
    first = policy.act(tokens, (), noise, False)
    second = policy.act(tokens, (), noise, True)
    repeated = policy.act(tokens, (), stream(policy, 50, 2), True)
    assert torch.equal(first.action, repeated.action)
    assert not torch.equal(first.action, second.action)
    assert not first.value.any()
    assert first.value.shape == first.log_prob.shape == (50, 2)
    assert first.logits.shape == (50, 2, policy.actions.num_logits)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.MultiBinary(200), -200 * math.log(2)),
        (spaces.Box(-1, 1, (200,)), -200 * math.log(2)),
        (spaces.Box(-1e-4, 1e-4, (20,)), -20 * math.log(2e-4)),
    ],
)
def test_random_actions_of_many_dimensions_have_a_finite_density(space, expected):
    assert RandomPolicy(space).log_prob == pytest.approx(expected, rel=1e-5)


def test_bounds_of_an_action_may_be_numpys() -> None:
    spec = ActionSpec(low=(np.float32(-1),), high=(np.int64(2),))
    assert spec == ActionSpec(low=(-1.0,), high=(2.0,))
