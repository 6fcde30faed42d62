"""Tensors passed from a local runner to a local learner, against RLlib's episodes."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.ppo import LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch import torch_distribution
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import nn

from helpers.farm import FoxAndHens, policies_of
from helpers.ppo import episodes_of, local_learner
from helpers.training import RAY_WARNINGS, run_python
from marl_pool.compiled.choice import use_kernels
from marl_pool.config import compose
from marl_pool.policies.actions import ActionSpec, kl_divergence
from marl_pool.rollout import Rollout
from marl_pool.training.optimization import FlatAdam, FlatParameters
from marl_pool.training.ppo.algorithm import BatchedPPO
from marl_pool.training.ppo.batch import Rows, concatenate_rows, episode_rows, map_rows
from marl_pool.training.ppo.learner import BatchedPPOLearner, Microbatch
from marl_pool.training.ppo.loss import STATISTICS, PPOTerms, explained_variance
from marl_pool.training.ppo.runner import BatchedEnvRunner
from marl_pool.training.ppo.trajectories import (
    estimate_advantages,
    to_teams,
    trajectory_rows,
)
from marl_pool.utils.errors import InputError

pytestmark = RAY_WARNINGS

TOY = [
    *("env=helpers.farm:FoxAndHens", "ppo.num_envs=4", "ppo.batch_size=144"),
    *("ppo.minibatch_size=24", "ppo.num_epochs=3", "ppo.kl_coeff=0.2"),
    *("encoder.num_layers=1", "threads=1"),
]
RECURRENT_TOY = [
    *(override for override in TOY if "layers" not in override),
    *("encoder=identity", "pooling=attention_neuron", "pooling.num_codes=4"),
]
CENTROID = [
    *("env.num_noise=4", "env.max_steps=8", "ppo.num_envs=8", "ppo.batch_size=64"),
    *("ppo.minibatch_size=32", "ppo.dropout=0.1", "threads=1"),
]


def assert_same_rows(first: Rows, second: Rows) -> None:
    assert first.keys() == second.keys()
    for key, column in first.items():
        if isinstance(column, dict):
            assert_same_rows(column, second[key])
        else:
            assert column.dtype == second[key].dtype, key
            assert torch.equal(column, second[key]), key


RECURRENT = {"encoder": "identity", "pooling": "attention_neuron"}


@pytest.mark.parametrize(
    ("options", "is_team"), [({}, False), (RECURRENT, False), ({}, True)]
)
def test_rows_of_a_trajectory_are_those_of_its_episodes(options, is_team) -> None:
    env = FoxAndHens(3, seed=1, end_chance=0.15, max_steps=5)
    rollout = Rollout(env, policies_of(env, **options), explore=True)
    for name, part in rollout.steps(9).items():
        # Hen 2 of the first environment dies for two steps.
        active = part.active.clone()
        active[3:5, 0, -1] = False
        part = part._replace(active=active)
        fragment = (part, *estimate_advantages(part, 0.9, 0.9))
        if is_team:
            with_critic = part._replace(critic_tokens=part.tokens)
            fragment = to_teams(with_critic, *fragment[1:], 4)
            active = active.any(2)
        episodes, rows = episodes_of(name, *fragment), trajectory_rows(*fragment)
        assert len(rows[Columns.ACTIONS]) == active.sum()
        assert int(rows["begins"].sum()) == len(episodes)
        assert_same_rows(rows, episode_rows(episodes)[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        TOY,
        [*TOY, "fixed={fox: random}"],
        [*TOY, "env=helpers.farm:AlikeFoxAndHens", "modules={fox: all, hen: all}"],
        [*TOY, "env=helpers.farm:TiedHens", "modules={fox: all, hen: all}"],
        RECURRENT_TOY,
        CENTROID,
    ],
    ids=["two modules", "fixed", "shared", "masks", "recurrent", "dropout"],
)
def test_tensors_and_episodes_give_the_same_update(build, monkeypatch, overrides):
    def train(training_step: Callable[[BatchedPPO], None]) -> tuple[Any, Any]:
        monkeypatch.setattr(BatchedPPO, "training_step", training_step)
        algo = build(compose("train", overrides))
        results = [algo.train()["learners"] for _ in range(3)]
        learner = local_learner(algo)
        return results, {name: copy.deepcopy(m) for name, m in learner.module.items()}

    metrics, modules = train(BatchedPPO.training_step)
    other_metrics, other_modules = train(PPO.training_step)
    assert modules.keys() == other_modules.keys()
    for name, module in modules.items():
        for weight, other_weight in zip(
            module.parameters(), other_modules[name].parameters(), strict=True
        ):
            assert torch.equal(weight, other_weight)
        for ours, rllibs in zip(metrics, other_metrics, strict=True):
            assert {**ours[name]} == {**rllibs[name]}
            assert overrides is CENTROID or ours[name]["first_ratio_error"] < 1e-4


# The loss


BOX = ActionSpec(low=(-1.0,) * 3, high=(1.0,) * 3)
CHOICE = ActionSpec(n=6)


@pytest.mark.parametrize("actions", [BOX, CHOICE], ids=["box", "discrete"])
@pytest.mark.parametrize("kl_coeff", [0.0, 0.3])
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.01])
@pytest.mark.parametrize("value_clip", [None, 0.5])
def test_loss_and_gradient_are_rllibs(actions, kl_coeff, entropy_coeff, value_clip):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = {
        Columns.ACTIONS: torch.arange(40) % 6 if actions.discrete else normal(40, 3),
        Columns.ACTION_LOGP: -2 + 0.3 * normal(40),
        Columns.ACTION_DIST_INPUTS: 0.3 * normal(40, 6),
        Postprocessing.ADVANTAGES: normal(40),
        Postprocessing.VALUE_TARGETS: normal(40),
    }
    logits = (0.3 * normal(40, 6)).requires_grad_()
    values = normal(40).requires_grad_()
    config = PPOConfig().training(
        clip_param=0.2,
        vf_loss_coeff=0.3,
        vf_clip_param=value_clip or float("inf"),
        entropy_coeff=entropy_coeff,
        use_kl_loss=kl_coeff > 0,
    )
    # RLlib's loss, on a learner and a module that have nothing else.
    kind = "TorchCategorical" if actions.discrete else "TorchDiagGaussian"
    distribution = getattr(torch_distribution, kind)
    module = SimpleNamespace(
        get_train_action_dist_cls=lambda: distribution,
        get_exploration_action_dist_cls=lambda: distribution,
        compute_values=lambda batch, embeddings=None: values,
        unwrapped=lambda: module,
    )
    schedule = SimpleNamespace(get_current_value=lambda: entropy_coeff)
    logged: dict[str, torch.Tensor] = {}
    reference: Any = object.__new__(PPOTorchLearner)
    reference._module = {"m": module}
    reference.entropy_coeff_schedulers_per_module = {"m": schedule}
    reference.curr_kl_coeffs_per_module = {"m": torch.tensor(kl_coeff)}
    log = SimpleNamespace(log_dict=lambda numbers, **_: logged.update(numbers))
    reference.metrics = log
    inputs = {"batch": rows, "fwd_out": {Columns.ACTION_DIST_INPUTS: logits}}
    expected = reference.compute_loss_for_module(module_id="m", config=config, **inputs)
    expected_gradients = torch.autograd.grad(expected, [logits, values])

    terms = PPOTerms.of(config, actions, rows, logits, values)
    loss = terms.loss(0.3, entropy_coeff, kl_coeff)
    torch.testing.assert_close(loss, expected)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(loss, [logits, values]), expected_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)
    statistics = dict(zip(STATISTICS, terms.statistics(), strict=True))
    assert set(statistics) <= set(logged)
    for name in (POLICY_LOSS_KEY, VF_LOSS_KEY, ENTROPY_KEY, *STATISTICS):
        torch.testing.assert_close(statistics[name], logged[name].detach().squeeze())
    torch.testing.assert_close(
        explained_variance(terms.values, terms.targets),
        logged[LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY].squeeze(),
    )


def test_the_explained_variance_is_computed_on_the_whole_minibatch() -> None:
    targets = torch.tensor([0.0, 0.0, 1.0, 0.0])
    values = targets + 0.1 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    zeros, logits = torch.zeros(4), torch.zeros(4, 2)
    columns = (zeros, zeros, values, zeros)
    microbatches = []
    for rows in (slice(2), slice(2, 4)):  # the first part's targets have no variance
        parts = [column[rows] for column in columns]
        terms = PPOTerms(*parts, None, targets[rows], ActionSpec(n=2), logits[rows])
        microbatches.append(Microbatch({"m": terms}, {"m": 0.5}))
    learner: Any = object.__new__(BatchedPPOLearner)
    logged: dict[Any, float] = {}
    log = SimpleNamespace(
        log_value=lambda key, value, window: logged.update({key: value})
    )
    learner.metrics, learner._metrics, learner._divergences = log, {}, {}
    learner._terms = lambda _, terms: terms
    learner._log({"m": microbatches})
    expected = 1 - 0.01 / float(targets.var(correction=0))
    key = ("m", LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY)
    assert logged[key] == pytest.approx(expected, abs=1e-4)


def test_a_minibatch_that_is_not_finite_does_not_count_in_the_mean_divergence() -> None:
    learner: Any = object.__new__(BatchedPPOLearner)
    logged: dict[Any, float] = {}
    learner.metrics = SimpleNamespace(
        log_value=lambda key, value, window: logged.update({key: value})
    )
    parts = [torch.tensor([0.01, 0.03]), torch.full((2,), torch.nan), torch.zeros(2)]
    learner.config = SimpleNamespace(num_learners=0)
    learner._metrics, learner._divergences = {}, {"m": parts}
    learner._log({})
    assert logged == {("m", "mean_kl_loss"): pytest.approx(0.01)}


# The optimizer


def test_one_flat_tensor_takes_the_steps_of_its_parts() -> None:
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    flat_parts = copy.deepcopy(parts)
    flat = FlatParameters(flat_parts.parameters())
    optimizer = torch.optim.Adam(parts.parameters(), lr=0.1, fused=True)
    flat_optimizer = torch.optim.Adam([flat.values], lr=0.1, fused=True)
    inputs = torch.randn(4, 3)
    for _ in range(3):
        parts.zero_grad()
        flat.zero_grad()
        # The last layer has no gradient.
        parts[:2](inputs).square().sum().backward()
        flat_parts[:2](inputs).square().sum().backward()
        gradient = flat.gather_grad()
        assert gradient.shape == flat.values.shape
        optimizer.step()
        flat_optimizer.step()
    for part, twin in zip(parts.parameters(), flat_parts.parameters(), strict=True):
        torch.testing.assert_close(part, twin, rtol=1e-6, atol=1e-7)
    state = {name: tensor.clone() for name, tensor in parts.state_dict().items()}
    flat_parts.load_state_dict({k: torch.zeros_like(v) for k, v in state.items()})
    assert not flat.values.any()


def test_a_flat_tensor_takes_the_steps_of_torchs_adam() -> None:
    values = nn.Parameter(torch.linspace(-1, 1, 37))
    flat_values = nn.Parameter(values.detach().clone())
    optimizer = torch.optim.Adam([values], lr=0.1, fused=True)
    flat = FlatAdam(flat_values, lr=0.1)
    for number in range(6):
        values.grad = torch.sin(number + values.detach() * 9)
        flat_values.grad = values.grad.clone()
        for adam in (optimizer, flat):
            adam.found_inf = torch.tensor(float(number in (0, 3)))
            adam.param_groups[0]["lr"] = 0.1 / (1 + number)
            adam.step()
        assert torch.equal(values, flat_values)
        if number == 2:  # as when a run is resumed
            flat.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, part in optimizer.state[values].items():
        assert torch.equal(part, flat.state[flat_values][name])


OPTIMIZE = """
import sys, torch
from marl_pool.training.optimization import FlatAdam
from marl_pool.utils.randomness import seed_process
seed_process(1)
values = torch.nn.Parameter(torch.ones(3))
values.grad = torch.ones(3)
optimizer = FlatAdam(values)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
assert torch.are_deterministic_algorithms_enabled() or torch.version.cuda
print(sorted({"sympy", "torch._dynamo", "torch._inductor"} & {*sys.modules}))
"""


def test_neither_seeds_nor_steps_import_the_compiler() -> None:
    """Importing it would add 1.5 s to the start of every run."""
    result = run_python("-c", OPTIMIZE)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@pytest.mark.slow
def test_a_module_without_rows_in_the_last_minibatch_is_logged(build: Any) -> None:
    sizes = {"ppo.batch_size": 16, "ppo.minibatch_size": 3, "ppo.num_envs": 1}
    base = [override for override in TOY if override.split("=")[0] not in sizes]
    overrides = [f"{key}={value}" for key, value in sizes.items()] + ["ppo.kl_target=9"]
    algo = build(compose("train", [*base, *overrides]))
    learner = local_learner(algo)
    batch = algo.env_runner.sample_batch()
    # Four steps of the fox, and twelve of the hens in four minibatches.
    rows = batch.policy_batches["fox"]
    batch.policy_batches["fox"] = map_rows(lambda tensor: tensor[:2], rows)
    steps = {"num_env_steps_sampled_lifetime": 0}
    (result,) = algo.learner_group.update(batch=batch, timesteps=steps)
    assert {*STATISTICS} <= result["fox"].keys()
    # A divergence far below the target halves the coefficient.
    assert float(learner.curr_kl_coeffs_per_module["fox"]) == pytest.approx(0.1)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("estimate", ["last", "mean"])
def test_the_penalty_adapts_to_the_last_divergence_or_to_the_mean(
    build, monkeypatch, kernels, estimate
) -> None:
    """The first minibatches, near the sampling policy, only count in the mean."""
    divergences, update = [], BatchedPPOLearner._update

    def noted(self, batch):
        microbatches = update(self, batch)
        for part in microbatches:
            rows, logits, _ = part.outputs["agent"]
            actions = self._module_of("agent").policy.actions
            prior = rows[Columns.ACTION_DIST_INPUTS]
            divergences.append(
                float(kl_divergence(actions, prior, logits.detach()).mean())
            )
        return microbatches

    monkeypatch.setattr(BatchedPPOLearner, "_update", noted)
    words = [*CENTROID, "ppo.dropout=0", "ppo.minibatch_size=null"]
    words += ["ppo.lr=1e-3", "ppo.kl_coeff=1.0", "ppo.kl_target=0.005"]
    with use_kernels(kernels):
        algo = build(compose("train", [*words, f"ppo.kl_estimate={estimate}"]))
        learner = local_learner(algo)
        batch = algo.env_runner.sample_batch()
        steps = {"num_env_steps_sampled_lifetime": 0}
        (result,) = algo.learner_group.update(
            batch=batch, timesteps=steps, num_epochs=2
        )
    first, last = divergences
    assert abs(first) < 1e-6
    expected = {"last": last, "mean": (first + last) / 2}[estimate]
    kl = float(result["agent"]["mean_kl_loss"].peek())
    assert kl == pytest.approx(expected, rel=1e-5)
    coefficient = float(learner.curr_kl_coeffs_per_module["agent"])
    # The last divergence is above twice the target, the mean is not.
    assert coefficient == pytest.approx({"last": 1.5, "mean": 1.0}[estimate])


@pytest.mark.slow
def test_a_module_whose_agents_are_dead_is_left_out(build, monkeypatch) -> None:
    fragments = BatchedEnvRunner._fragment

    def dead(names: set[str]) -> Any:
        def fragment(self: Any, *args: Any) -> Any:
            return {
                name: (part._replace(active=part.active & (name not in names)), *tail)
                for name, (part, *tail) in fragments(self, *args).items()
            }

        return fragment

    algo = build(compose("train", [*RECURRENT_TOY, "ppo.minibatch_size=null"]))
    monkeypatch.setattr(BatchedEnvRunner, "_fragment", dead({"fox"}))
    batch = algo.env_runner.sample_batch()
    assert batch.policy_batches.keys() == {"hen"}
    learned = algo.train()["learners"]
    assert POLICY_LOSS_KEY in learned["hen"]
    assert POLICY_LOSS_KEY not in learned["fox"]
    monkeypatch.setattr(BatchedEnvRunner, "_fragment", dead({"fox", "hen"}))
    assert algo.env_runner.sample_batch() is None
    assert algo.env_runner.sample() == []


def test_parameters_of_several_dtypes_are_refused() -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2).double()]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    with pytest.raises(InputError, match=r"one dtype, got torch.float32, .*float64"):
        FlatParameters(parameters)


@pytest.mark.slow
def test_a_local_run_makes_no_episodes(build, monkeypatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("an episode was made")

    monkeypatch.setattr("marl_pool.training.ppo.runner.to_episodes", fail)
    algo = build(compose("train", TOY))
    algo.train()
    assert algo.env_runner.failure is None
    assert algo.env_runner.sample() == []
    assert "an episode was made" in algo.env_runner.failure.error


def test_rows_of_groups_that_share_a_module_are_joined() -> None:
    rows = {"obs": {"features": torch.arange(6.0).view(3, 2)}, "x": torch.arange(3)}
    joined = concatenate_rows([rows, map_rows(lambda tensor: tensor + 1, rows)])
    assert joined["x"].tolist() == [0, 1, 2, 1, 2, 3]
    assert joined["obs"]["features"].shape == (6, 2)
